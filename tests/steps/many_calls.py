"""Random steps whose layers' passes are several calls, of which each reads other slots.

A prologue P, layers of one class or two, and a head H. Operators of a layer make values of its
input x, of what all layers share (m), and of each other. Each call of its backward reads some. In
some steps layers gather weights and reduce what they hand on, and wait right behind the beginning.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from memo_compile.planners.move_rules import can_split, closure_of
from memo_compile.planners.policy.modes import Rights, layer_rights
from memo_compile.step.movable import (
    Action,
    Layer,
    LayerClass,
    LayerOp,
    Mode,
    MovableStep,
    Moves,
    RecomputeKey,
    RecomputeRegion,
    Schedule,
    Slot,
    StepCosts,
)
from memo_compile.step.problem import (
    CallKind,
    OutsideBuffer,
    Phase,
    Problem,
    RegionProfile,
    StepCall,
)
from tests.steps.among_ranks import SHOWN, layout, one_line, wait
from tests.steps.movable import by_lines, layer_call, recomputer
from tests.steps.parts import arena, buffer, call

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
SAVE, OFFLOAD, RECOMPUTE = Action.SAVE, Action.OFFLOAD, Action.RECOMPUTE
UNIT = 512
SIZES = ((8,), (8, 8, 16), (4, 8, 12, 20, 28), (3, 5, 7, 11, 64))
SECONDS = (0.0, 0.1, 0.5, 1.0, 1.0, 3.0)
OP_SECONDS = (0.0, 0.02, 0.1, 0.3, 1.0)
SPEEDS = (0.03, 0.1, 0.3, 0.6, 1.0, 3.0)
"""Layers that a link copies in the time of one's forward."""


class Piece(NamedTuple):
    """One call of a layer's pass. Names stand for values of layer {i}, or {up} for the next."""

    region: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    made: Mapping[str, int]
    """What it makes in the arena, in the order of ``outputs``: buffer -> bytes."""
    gathers: str = ""
    """The weight that is gathered before, which it reads."""
    reduces: tuple[str, str] = ("", "")
    """What is reduced behind it, and the name of the sum."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A class of layers, and the calls of its passes."""

    cls: LayerClass
    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]


class _Draw:
    """The sizes of a step, and what is drawn with them."""

    def __init__(self, rng: Random, *, talks: bool, pairs: bool) -> None:
        self.rng = rng
        self.talks, self.pairs = talks, pairs
        self.sizes = [UNIT * units for units in rng.choice(SIZES)]
        self.size_of = {"x": rng.choice(self.sizes), "m": rng.choice(self.sizes)}
        self.size_of["y"] = self.size = self.size_of["x"]
        self.row_wise, self.again = rng.choice((0.4, 0.8, 1.0)), rng.choice((0.6, 0.9, 1.0))

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def kind(self, key: str) -> Kind:
        rng = self.rng
        num_forward, num_backward = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 2, 3, 4, 5))
        names, made_at = ["x"], [-1]
        ops = [LayerOp(name="op_x", seconds=0.0, slot=0, can_recompute=False, row_wise=True)]
        if self.chance(0.2):
            ops.append(replace(ops[0], name="op_m", slot=1))
            names, made_at = ["x", "m"], [-1, -1]
        for at in sorted(rng.randrange(num_forward) for _ in range(rng.randint(2, 6))):
            if self.chance(0.3):
                ops.append(self._op(ops, None))
            for op in self._results(ops, len(names)):
                ops.append(op)
                names.append(f"s{len(names)}")
                made_at.append(at)
        if self.chance(0.2):
            ops.append(self._op(ops, len(names)))
            names.append("y")
            made_at.append(num_forward - 1)
        readers = [self._some(num_backward) for _ in names]
        cls = LayerClass(key=key, slots=tuple(self._slots(names, ops, readers)), ops=tuple(ops))
        return Kind(
            cls=cls,
            forward=tuple(self._forward(cls, made_at, num_forward)),
            backward=tuple(self._backward(cls, readers, num_backward)),
        )

    def _results(self, ops: list[LayerOp], slot: int) -> Iterable[LayerOp]:
        """What makes the next slot; or the next two, of one operator, which is appended."""
        if not (self.pairs and self.chance(0.4)):
            return [self._op(ops, slot)]
        ops.append(self._op(ops, None))
        of = replace(ops[-1], name=f"op{len(ops)}", seconds=0.0, inputs=(len(ops) - 1,), slot=slot)
        return [of, replace(of, name=f"{of.name}b", slot=slot + 1)]

    def _op(self, ops: Sequence[LayerOp], slot: int | None) -> LayerOp:
        rng, last = self.rng, len(ops) - 1
        read = {max(0, last - int(rng.expovariate(0.6))) for _ in range(rng.choice((1, 1, 2)))}
        return LayerOp(
            name=f"op{len(ops)}",
            seconds=rng.choice(OP_SECONDS),
            inputs=tuple(sorted(read)),
            slot=slot,
            can_recompute=self.chance(self.again),
            row_wise=self.chance(self.row_wise),
        )

    def _some(self, count: int) -> frozenset[int]:
        times = self.rng.choice((1, 1, 1, 2)) if self.chance(0.97) else 0
        return frozenset(self.rng.randrange(count) for _ in range(times))

    def _slots(
        self, names: Sequence[str], ops: Sequence[LayerOp], readers: Sequence[frozenset[int]]
    ) -> Iterator[Slot]:
        rows = self.rng.choice((1, 4, 4))
        plain = LayerClass(
            key="", slots=(Slot(name="", size_bytes=UNIT),) * len(names), ops=tuple(ops)
        )
        for slot, name in enumerate(names):
            own = [ops[at] for at in closure_of(plain, (slot,))]
            size_bytes = self.size_of.get(name) or self.rng.choice(self.sizes)
            yield Slot(
                name=name,
                size_bytes=size_bytes,
                can_offload=name in self.size_of or self.chance(0.9),
                can_recompute=all(op.can_recompute for op in own),
                is_input=name == "x",
                is_attention=not own[-1].row_wise,
                num_rows=rows,
                row_bytes=size_bytes // rows,
                first_read=min(readers[slot], default=0),
            )

    def _forward(self, cls: LayerClass, made_at: Sequence[int], num_calls: int) -> Iterator[Piece]:
        late: dict[int, list[str]] = {}
        for at in range(num_calls):
            ops = [op for op in cls.ops if op.slot is not None and made_at[op.slot] == at]
            read = {slot for op in ops for slot in _behind(cls.ops, op) if made_at[slot] < at}
            if not read or self.chance(0.2):
                read.add(self.rng.choice([s for s, made in enumerate(made_at) if made < at]))
            inputs = [_template(cls.slots[slot].name) for slot in sorted(read)]
            last = at == num_calls - 1
            made = {f"to{at}": self.size}
            outputs = ["x.{up}" if last else f"t{at}.{{i}}"]
            for slot, own in enumerate(cls.slots):
                if made_at[slot] == at and own.name != "y":
                    made[own.name] = own.size_bytes
                    outputs.append(_template(own.name))
            yield self._piece(f"{cls.key}f{at}", inputs, outputs, made, late, (at, num_calls))

    def _backward(
        self, cls: LayerClass, readers: Sequence[frozenset[int]], num_calls: int
    ) -> Iterator[Piece]:
        late: dict[int, list[str]] = {}
        for at in range(num_calls):
            inputs = ["g.{up}"] if at == 0 or self.chance(0.3) else []
            slots = zip(cls.slots, readers, strict=True)
            inputs += [_template(slot.name) for slot, own in slots if at in own]
            last = at == num_calls - 1
            outputs = ["g.{i}" if last else f"q{at}.{{i}}", f"dw{at}.{{i}}"]
            made = {"g": self.size}
            yield self._piece(f"{cls.key}b{at}", inputs, outputs, made, late, (at, num_calls))

    def _piece(
        self,
        region: str,
        inputs: list[str],
        outputs: list[str],
        made: Mapping[str, int],
        late: dict[int, list[str]],
        place: tuple[int, int],
    ) -> Piece:
        """A call that also reads what those before it hand on; ``late`` says what and when."""
        at, num_calls = place
        read = late.pop(at, [])
        reduces = ("", "")
        if at < num_calls - 1:
            first = outputs[0]
            if self.talks and self.chance(0.4):
                reduces = first, f"r{first}"
                late.setdefault(self.rng.randint(at + 1, num_calls - 1), []).append(reduces[1])
            else:
                late.setdefault(at + 1, []).append(first)
        gathers = f"v{region}.{{i}}" if self.talks and self.chance(0.3) else ""
        all_read = (*inputs, *read, *([gathers] if gathers else ()))
        return Piece(region, all_read, tuple(outputs), made, gathers, reduces)

    def region(
        self, name: str, made: Mapping[str, int], num_inputs: int, results: int = 0
    ) -> RegionProfile:
        rng, most = self.rng, max(self.sizes)
        transient = rng.choice((UNIT, most, 4 * most)) if self.chance(0.4) else UNIT
        num_lines = rng.randint(1, 4)
        found = by_lines(
            name, num_lines, made, transient, num_inputs=num_inputs, num_external=results
        )
        if self.chance(0.5):
            return found
        ends = (rng.randint(1, num_lines) for _ in range(num_inputs))
        return replace(found, input_ends=tuple(ends))

    def regions(self, kinds: Sequence[Kind]) -> Iterator[RegionProfile]:
        yield self.region("P", {"x": self.size, "m": self.size_of["m"]}, 1)
        yield self.region("H", {}, 1, 1)
        yield self.region("Hb", {"g": self.size}, 2)
        yield self.region("Pb", {}, 1, 1)
        for kind in kinds:
            for piece in (*kind.forward, *kind.backward):
                results = len(piece.outputs) - len(piece.made)
                yield self.region(piece.region, piece.made, len(piece.inputs), results)
        if self.talks:
            shown = (layout(self.size),)
            yield one_line("reduce", [SHOWN], 1, output_layouts=shown)
            yield one_line("arrived", [SHOWN], 2)
            own = (buffer("v", self.size, 0, 1),)
            yield one_line("gather", [arena(0)], 1, buffers=own, output_layouts=shown)


def _behind(ops: Sequence[LayerOp], op: LayerOp) -> set[int]:
    """The slots that ``op`` reads, and those that operators without one read for it."""
    found: set[int] = set()
    for source in (ops[at] for at in op.inputs):
        found |= _behind(ops, source) if source.slot is None else {source.slot}
    return found


def _template(slot: str) -> str:
    return {"m": "m", "y": "x.{up}"}.get(slot, f"{slot}.{{i}}")


def random_step(
    rng: Random, *, max_layers: int = 5, talks: bool = False, pairs: bool = False
) -> MovableStep:
    """A step of some layers, and the speed of its links."""
    draw = _Draw(rng, talks=talks, pairs=pairs)
    kinds = [draw.kind(f"L{number}") for number in range(rng.choice((1, 1, 2)))]
    order = [rng.choice(kinds) for _ in range(rng.randint(1, max_layers))]
    regions = {region.name: region for region in draw.regions(kinds)}
    talking = dict.fromkeys(("reduce", "gather", "arrived"), 0.0)
    seconds = {name: rng.choice(SECONDS) for name in regions} | (talking if talks else {})
    of_layer = sum(seconds[piece.region] for piece in order[0].forward)
    rate = order[0].cls.saved_bytes / (of_layer or 1.0)
    calls = tuple(_calls(order, draw.size))
    shards = (own.inputs[0] for own in calls if own.region == "gather")
    return MovableStep(
        problem=Problem(regions=regions, calls=calls, inputs=("in", "tangent", *shards)),
        classes={kind.cls.key: kind.cls for kind in kinds},
        layers=tuple(_layer(kind, i) for i, kind in enumerate(order)),
        costs=StepCosts(
            region_s=seconds,
            d2h_bytes_per_s=rate * rng.choice(SPEEDS),
            h2d_bytes_per_s=rate * rng.choice(SPEEDS),
            copy_latency_s=rng.choice((0.0, 0.0, 0.1)),
            comm_bytes_per_s=rate * rng.choice(SPEEDS) if talks else None,
            comm_slowdown=rng.choice((1.0, 1.0, 1.3)) if talks else 1.0,
        ),
        token_granule=1,
        waits_late=rng.random() < 0.7,
    )


def _layer(kind: Kind, i: int) -> Layer:
    return Layer(
        class_key=kind.cls.key,
        calls=tuple(f"{piece.region}@{i}" for piece in kind.forward),
        inputs=(f"x.{i}",),
        backward=f"{kind.backward[0].region}@{i}",
        values=tuple(_template(slot.name).format(i=i, up=i + 1) for slot in kind.cls.slots),
    )


def _calls(order: Sequence[Kind], size: int) -> Iterator[StepCall]:
    top = len(order)
    yield call("P", "P", FORWARD, ["in"], ["x.0", "m"])
    for i, kind in enumerate(order):
        yield from _pass(kind.forward, i, FORWARD, size)
    yield call("H", "H", FORWARD, [f"x.{top}"], ["loss"])
    yield call("Hb", "Hb", BACKWARD, ["tangent", f"x.{top}"], [f"g.{top}"])
    for i, kind in reversed(list(enumerate(order))):
        yield from _pass(kind.backward, i, BACKWARD, size)
    yield call("Pb", "Pb", BACKWARD, ["g.0"], ["dwp"])


def _pass(pieces: Sequence[Piece], i: int, phase: Phase, size: int) -> Iterator[StepCall]:
    """The calls of layer ``i``; what it gathers comes first."""
    for piece in pieces:
        if piece.gathers:
            yield from _waited(
                "gather", i, phase, (f"shard.{piece.gathers}", piece.gathers), size // 2
            )
    for piece in pieces:
        inputs, outputs = ([own.format(i=i, up=i + 1) for own in some] for some in piece[1:3])
        yield layer_call(piece.region, i, phase, inputs, outputs)
        if piece.reduces[0]:
            yield from _waited("reduce", i, phase, piece.reduces, size)


def _waited(
    region: str, i: int, phase: Phase, names: tuple[str, str], size: int
) -> Iterator[StepCall]:
    """A collective and its wait; whose they are is the layer."""
    given, shown = (name.format(i=i, up=i + 1) for name in names)
    begun = layer_call(region, i, phase, [given], [f"{shown}.flying"])
    kind = CallKind.ISSUE
    begun = replace(begun, name=f"{region}.{shown}", kind=kind, reads=(layout(size),))
    yield begun
    yield replace(wait(begun, shown), layer_class=begun.layer_class, instance=i)


def random_moves(rng: Random, step: MovableStep) -> Moves:
    """Modes that may be, and a schedule."""
    taken: set[str] = set()
    modes: dict[int, Mode] = {}
    eager, rights = rng.choice((0.3, 0.7, 0.95)), layer_rights(step)
    for at in rng.sample(range(len(step.layers)), len(step.layers)):
        layer = step.layers[at]
        free = [slot for slot, value in enumerate(layer.values) if value not in taken]
        modes[at] = mode = random_mode(rng, step.class_of(layer), rights[at], free, eager)
        moved = mode.slots(OFFLOAD) + mode.slots(RECOMPUTE)
        taken |= {layer.values[slot] for slot in moved}
    return Moves(
        modes=tuple(modes[at] for at in range(len(step.layers))), schedule=random_schedule(rng)
    )


def random_mode(
    rng: Random, cls: LayerClass, rights: Rights, free: Sequence[int], eager: float
) -> Mode:
    """A mode that moves some of the slots ``free``."""
    actions = [SAVE] * len(cls.slots)
    for slot in free:
        some = [OFFLOAD] * (slot in rights.offload) + [RECOMPUTE] * (slot in rights.recompute)
        if some and rng.random() < eager:
            actions[slot] = rng.choice(some)
    mode = Mode(actions=tuple(actions))
    again = mode.slots(RECOMPUTE)
    if again and rng.random() < 0.5 and can_split(cls, again):
        return replace(mode, recompute_rows=rng.randint(1, cls.slots[again[0]].num_rows))
    return mode


def random_schedule(rng: Random) -> Schedule:
    """Nothing in flight beside a call but where there is room, or some layers' time."""
    return Schedule(
        layers=rng.choice((0, 0, 1, 2)),
        widen=rng.choice((0.0, 1.0, 1.0, 1.05, 1.3)),
        spare=rng.choice((0.0, 0.0, 0.02, 0.1)),
    )


def varied_recomputer(
    rng: Random, step: MovableStep, *, outside: float = 0.0
) -> Callable[[RecomputeKey], RecomputeRegion]:
    """Regions of which each takes another share of its operators' seconds.

    So large a share of the operators allocate their results themselves, wherever they run.
    """
    whole, known = recomputer(step), dict[RecomputeKey, RecomputeRegion]()
    shares = rng.choice(((1.0,), (0.5, 0.8, 1.0, 1.3)))
    allocating = {
        (key, at)
        for key, cls in step.classes.items()
        for at, op in enumerate(cls.ops)
        if op.slot is not None and rng.random() < outside
    }

    def recompute(key: RecomputeKey) -> RecomputeRegion:
        if key not in known:
            region = whole(key)
            profile = replace(region.profile, outside=tuple(buffers(key, region.profile.num_lines)))
            seconds = region.seconds * rng.choice(shares)
            known[key] = replace(region, seconds=seconds, profile=profile)
        return known[key]

    def buffers(key: RecomputeKey, num_lines: int) -> Iterator[OutsideBuffer]:
        cls = step.classes[key.class_key]
        for at in sorted(closure_of(cls, key.slots, key.passing)):
            slot = cls.ops[at].slot
            if slot is None or (key.class_key, at) not in allocating:
                continue
            kind = cls.slots[slot]
            rows = kind.num_rows if key.rows is None else key.rows
            size_bytes = kind.size_bytes * rows // kind.num_rows
            start = rng.randrange(num_lines)
            yield OutsideBuffer(
                kind=f"aten.{cls.ops[at].name}.default",
                size_bytes=size_bytes,
                start=start,
                end=rng.randint(start + 1, num_lines),
            )

    return recompute
