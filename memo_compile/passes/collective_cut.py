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
    """``nodes``, which are in graph order, in pieces.

    ``waits`` are the collectives that are split, each with its wait; ``results`` the nodes that are
    read elsewhere. Cost: nodes times collectives.

    ``joins`` is for little memory: a collective begins later where two pieces beside it would hand
    over more bytes than it does. As one piece they can run in tiles, which never hold all of them.
    The order of collectives, also of those inside a piece, stays what it is on ranks without tiles.
    """
    found = _Pieces(nodes, waits, results).run()
    return _joined(found, results) if joins else found


class _Pieces:
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
        self.left = dict.fromkeys(nodes)
        """What stands in no piece yet, in order."""
        self.in_flight: list[fx.Node] = []
        """Waits of what has been issued, in order."""
        self.own: list[fx.Node] = []
        """Of the piece that has not ended."""
        self.pieces: list[CutPiece] = []

    def run(self) -> list[CutPiece]:
        for issue in self.waits:
            self._wait_for(self._needed([issue]))
            for node in self._needed([issue]):
                if only_orders(node):  # what it returns is not read while its turn is computed
                    self._end()
                self._compute([node] if node is not issue else [])
            self._single(CallKind.ISSUE, issue)
            self.in_flight.append(self.waits[issue])
        self._wait_for(self.in_flight)
        self._fill()
        self._compute(self.left)
        self._end()
        return self.pieces

    def _needed(self, targets: Iterable[fx.Node]) -> dict[fx.Node, None]:
        """What is left of ``targets`` and of all that they need, in order."""
        found, stack = set(), list(targets)
        while stack:
            node = stack.pop()
            if node in self.left and node not in found:
                found.add(node)
                stack.extend(self.needs[node])
        return {node: None for node in self.left if node in found}

    def _fill(self) -> None:
        """Compute the results that need nothing that is, or is to be, in flight."""
        stuck: set[fx.Node] = set()
        for node in self.left:
            is_comm = node in self.waits or node in self.in_flight
            if is_comm or any(source in stuck for source in self.needs[node]):
                stuck.add(node)
        free = [node for node in self.ends if node in self.left and node not in stuck]
        self._compute(self._needed(free))

    def _compute(self, nodes: Iterable[fx.Node]) -> None:
        """Each of ``nodes``, and with it the items and views of it: no list is handed over."""
        pending = list(nodes)[::-1]
        while pending:
            node = pending.pop()
            if node in self.left:
                self.own.append(node)
                del self.left[node]
                shown = [user for user in node.users if is_item(user) or is_view(user)]
                pending += reversed(shown)

    def _wait_for(self, needed: Collection[fx.Node]) -> None:
        """Wait for those of ``needed`` that are in flight, and for what their groups began before.

        Each time what can be computed meanwhile is computed first.
        """
        last = {_group_of(wait): wait for wait in self.in_flight if wait in needed}
        for wait in list(self.in_flight):
            group = _group_of(wait)
            if group in last:
                self._fill()
                self._single(CallKind.COMM_WAIT, wait)
                self.in_flight.remove(wait)
                if wait is last[group]:
                    del last[group]

    def _single(self, kind: CallKind, node: fx.Node) -> None:
        self._end()
        self.pieces.append(CutPiece(kind=kind, nodes=(node,)))
        del self.left[node]

    def _end(self) -> None:
        if self.own:
            self.pieces.append(CutPiece(kind=CallKind.RUN, nodes=tuple(self.own)))
            self.own = []


def _needs(
    nodes: Sequence[fx.Node], waits: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """Node -> those of ``nodes`` that must run before it.

    A write comes after earlier reads of the same storage, of a collective after its wait; a read
    after earlier writes. Random numbers are drawn in order, and operators that are not known keep
    theirs.
    """
    own = set(nodes)
    found: dict[fx.Node, list[fx.Node]] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
    last_effect: fx.Node | None = None
    for node in nodes:
        needed = [source for source in node.all_input_nodes if source in own]
        roots = dict.fromkeys(storage_of(source) for source in node.all_input_nodes)
        needed += [writer[root] for root in roots if root in writer]
        targets = [storage_of(target) for target in written_by(node)] if is_write(node) else []
        for root in targets:
            needed += [waits.get(reader, reader) for reader in readers.pop(root, ())]
            writer[root] = node
        for root in roots:
            readers.setdefault(root, []).append(node)
        if node not in waits and _has_order(node):
            needed += [] if last_effect is None else [last_effect]
            last_effect = node
        found[node] = [source for source in needed if source is not node]
    return found


def _group_of(wait: fx.Node) -> object:
    """The group whose ranks a wait is for."""
    return argument(wait.all_input_nodes[0], "group_name")


def _joined(found: Sequence[CutPiece], results: Collection[fx.Node]) -> list[CutPiece]:
    """``found`` with fewer computing pieces, see ``pieces``."""
    read_elsewhere = {storage_of(node) for node in results}
    joined: list[CutPiece] = []
    begun: list[CutPiece] = []  # collectives behind the last computing piece
    for at, piece in enumerate(found):
        if piece.kind is CallKind.ISSUE:
            begun.append(piece)
            continue
        if piece.kind is CallKind.RUN and begun and joined and joined[-1].kind is CallKind.RUN:
            later = (node for other in (*begun, *found[at + 1 :]) for node in other.nodes)
            kept = read_elsewhere | _storages_read(later)
            handed_over = _handed_over_bytes(joined[-1], piece, kept)
            in_order = not any(map(is_collective, piece.nodes))  # as on ranks that do not join them
            if in_order and handed_over > sum(map(_collective_bytes, begun)):
                piece = replace(piece, nodes=(*joined.pop().nodes, *piece.nodes))
                joined.append(piece)
                continue
        joined += [*begun, piece]
        begun = []
    return [*joined, *begun]


def _storages_read(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {storage_of(source) for node in nodes for source in node.all_input_nodes}


def _handed_over_bytes(first: CutPiece, second: CutPiece, kept: Collection[fx.Node]) -> int:
    """Bytes that ``first`` makes for ``second`` alone."""
    made = {storage_of(node) for node in first.nodes}.intersection(first.nodes)
    return sum(bytes_of(node) for node in (made & _storages_read(second.nodes)) - set(kept))


def _collective_bytes(begun: CutPiece) -> int:
    (issue,) = begun.nodes
    return max(map(bytes_of, (issue, *issue.all_input_nodes)))


def _has_order(node: fx.Node) -> bool:
    return is_random(node) or not (is_known(node) or is_collective(node))
