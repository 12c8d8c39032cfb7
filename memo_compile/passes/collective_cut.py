"""Cuts what stands at one place of the step at its collectives.

Rewrite, where ``w`` (a weight's gradient) needs no collective, and ``e`` needs ``d``:

    b = dx(a); w = dw(a)                    a' = [b = dx(a)]
    c = all_reduce(b); d = wait(c)     ->   issue c
    e = norm(d)                             [w = dw(a)]           beside the collective
                                            wait d
                                            [e = norm(d)]

A collective begins as soon as its input can be there. What computes a result of the place without
needing what is in flight runs before the next wait; what only prepares later work does not, since
it would have to be held until then. The order of the collectives is that of the graph: it is the
same on all ranks. Those of a group end in that order too, so that who waits for one waits for those
before it, and computes what these make possible.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from memo_compile.analysis.purity import (
    has_effect,
    is_collective,
    is_known,
    is_random,
    is_write,
    only_orders,
)
from memo_compile.analysis.purity import written_arguments as written_by
from memo_compile.analysis.structure import argument
from memo_compile.analysis.views import bytes_of, is_item, is_view, storage_of
from memo_compile.step.problem import CallKind


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPiece:
    """Nodes of one call, in order; of an ISSUE or a COMM_WAIT one node."""

    kind: CallKind
    nodes: tuple[fx.Node, ...]


def pieces(
    nodes: Sequence[fx.Node],
    waits: Mapping[fx.Node, fx.Node],
    results: Collection[fx.Node],
    *,
    joins: bool = False,
) -> list[CutPiece]:
    """Returns ``nodes``, which are in graph order and stand at one place, in pieces.

    ``waits`` has the wait of each collective that is split; ``results`` are nodes that are read
    elsewhere. Cost: nodes times collectives.

    ``joins`` is for little memory: a collective begins later where two pieces beside it would hand
    over more bytes than it does. As one piece they can run in tiles, which never hold all of them.
    The order of collectives, also of those inside a piece, stays what it is on ranks without tiles.
    """
    cut_pieces = _PieceCutter(nodes, waits, results).run()
    return _joined(cut_pieces, results) if joins else cut_pieces


class _PieceCutter:
    """Deals the nodes of one place out to pieces, which ``run`` returns; see the file's head."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        waits: Mapping[fx.Node, fx.Node],
        results: Collection[fx.Node],
    ) -> None:
        self.nodes = nodes
        self.waits = {issue: wait for issue, wait in waits.items() if issue in set(nodes)}
        self.ends = [node for node in nodes if node in results or has_effect(node)]
        self.needs = _needs(nodes, self.waits)
        self.uncut = dict.fromkeys(nodes)
        """Nodes that stand in no piece yet, in order."""
        self.in_flight: list[fx.Node] = []
        """Waits of the collectives that have been issued, in order."""
        self.open_piece: list[fx.Node] = []
        """Nodes of the computing piece that has not ended."""
        self.pieces: list[CutPiece] = []

    def run(self) -> list[CutPiece]:
        """Issues one collective after the other as early as it can be, then computes the rest."""
        for issue in self.waits:
            self._wait_for(self._needed([issue]))
            for node in self._needed([issue]):  # without what ran before those waits
                if only_orders(node):
                    # In the piece before it, its shard would be held while that piece computes.
                    self._end_piece()
                if node is not issue:
                    self._compute([node])
            self._add_alone(CallKind.ISSUE, issue)
            self.in_flight.append(self.waits[issue])
        self._wait_for(self.in_flight)
        self._compute_results()
        self._compute(self.uncut)
        self._end_piece()
        return self.pieces

    def _needed(self, targets: Iterable[fx.Node]) -> dict[fx.Node, None]:
        """Returns the uncut ones of ``targets`` and of all nodes that they need, in order."""
        needed, stack = set(), list(targets)
        while stack:
            node = stack.pop()
            if node in self.uncut and node not in needed:
                needed.add(node)
                stack.extend(self.needs[node])
        return {node: None for node in self.uncut if node in needed}

    def _compute_results(self) -> None:
        """Computes the results of the place that need no collective which is still to end."""
        stuck: set[fx.Node] = set()
        for node in self.uncut:
            is_comm = node in self.waits or node in self.in_flight
            if is_comm or any(source in stuck for source in self.needs[node]):
                stuck.add(node)
        free = [node for node in self.ends if node in self.uncut and node not in stuck]
        self._compute(self._needed(free))

    def _compute(self, nodes: Iterable[fx.Node]) -> None:
        """Adds ``nodes``, each with its items and views, to the piece: it hands no list over."""
        pending = list(nodes)[::-1]
        while pending:
            node = pending.pop()
            if node in self.uncut:
                self.open_piece.append(node)
                del self.uncut[node]
                shown = [user for user in node.users if is_item(user) or is_view(user)]
                pending += reversed(shown)

    def _wait_for(self, needed: Collection[fx.Node]) -> None:
        """Waits for those of ``needed`` that are in flight, and for what their groups began before.

        Before each wait it computes what can be computed meanwhile.
        """
        last_wait = {_group_of(wait): wait for wait in self.in_flight if wait in needed}
        for wait in list(self.in_flight):
            group = _group_of(wait)
            if group in last_wait:
                self._compute_results()
                self._add_alone(CallKind.COMM_WAIT, wait)
                self.in_flight.remove(wait)
                if wait is last_wait[group]:
                    del last_wait[group]

    def _add_alone(self, kind: CallKind, node: fx.Node) -> None:
        """Adds a piece of one node: the begin of a collective, or its wait."""
        self._end_piece()
        self.pieces.append(CutPiece(kind=kind, nodes=(node,)))
        del self.uncut[node]

    def _end_piece(self) -> None:
        if self.open_piece:
            self.pieces.append(CutPiece(kind=CallKind.RUN, nodes=tuple(self.open_piece)))
            self.open_piece = []


def _needs(
    nodes: Sequence[fx.Node], waits: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """Returns for each node those of ``nodes`` that must run before it.

    A write comes after earlier reads of the same storage, and if a collective reads it, after its
    wait; a read after earlier writes. Random operators, and those whose effects are unknown, keep
    the graph's order.
    """
    inside = set(nodes)
    needs: dict[fx.Node, list[fx.Node]] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
    last_effect: fx.Node | None = None
    for node in nodes:
        needed = [source for source in node.all_input_nodes if source in inside]
        roots = dict.fromkeys(storage_of(source) for source in node.all_input_nodes)
        needed += [writer[root] for root in roots if root in writer]
        targets = [storage_of(target) for target in written_by(node)] if is_write(node) else []
        for root in targets:
            needed += [waits.get(reader, reader) for reader in readers.pop(root, ())]
            writer[root] = node
        for root in roots:
            readers.setdefault(root, []).append(node)
        keeps_order = is_random(node) or not (is_known(node) or is_collective(node))
        if node not in waits and keeps_order:
            needed += [] if last_effect is None else [last_effect]
            last_effect = node
        needs[node] = [source for source in needed if source is not node]
    return needs


def _group_of(wait: fx.Node) -> object:
    """Returns the name of the process group of the collective that ``wait`` is for."""
    return argument(wait.all_input_nodes[0], "group_name")


def _joined(cut_pieces: Sequence[CutPiece], results: Collection[fx.Node]) -> list[CutPiece]:
    """Joins computing pieces where fewer bytes are held then, as ``pieces`` says of ``joins``.

    [compute a, issue c, compute b] -> [compute a and b, issue c]
    """
    read_elsewhere = {storage_of(node) for node in results}
    joined: list[CutPiece] = []
    begun: list[CutPiece] = []  # collectives behind the last computing piece
    for at, piece in enumerate(cut_pieces):
        if piece.kind is CallKind.ISSUE:
            begun.append(piece)
            continue
        if piece.kind is CallKind.RUN and begun and joined and joined[-1].kind is CallKind.RUN:
            later = (node for other in (*begun, *cut_pieces[at + 1 :]) for node in other.nodes)
            kept = read_elsewhere | _storages_read(later)
            handed_over_bytes = _handed_over_bytes(joined[-1], piece, kept)
            in_order = not any(map(is_collective, piece.nodes))  # as on ranks that do not join them
            if in_order and handed_over_bytes > sum(map(_collective_bytes, begun)):
                piece = replace(piece, nodes=(*joined.pop().nodes, *piece.nodes))
                joined.append(piece)
                continue
        joined += [*begun, piece]
        begun = []
    return [*joined, *begun]


def _storages_read(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {storage_of(source) for node in nodes for source in node.all_input_nodes}


def _handed_over_bytes(first: CutPiece, second: CutPiece, kept: Collection[fx.Node]) -> int:
    """Returns the bytes of storages that ``first`` makes for ``second`` alone."""
    storages = {storage_of(node) for node in first.nodes}.intersection(first.nodes)
    return sum(bytes_of(node) for node in (storages & _storages_read(second.nodes)) - set(kept))


def _collective_bytes(issue_piece: CutPiece) -> int:
    (issue,) = issue_piece.nodes
    return max(map(bytes_of, (issue, *issue.all_input_nodes)))
