"""Synthetic training steps as placement problems, after the shapes of real transformer graphs.

A layer is a table of forward and backward lines: ``out size = inputs``. Sizes are in units of one
activation (tokens x hidden x 2 bytes). A buffer lives from the line that makes it to the last line
that reads it; what a backward line reads of the forward is a saved activation. Weight gradients
are never in the arena. Offloaded tensors have two lives, recomputed ones are made again in the
backward.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memo_compile.planners.placement import Block, Buffer, PlacementProblem

UNIT_BYTES = 16 * 2**20 + 3 * 512
"""One activation: 4096 tokens x 2048 hidden in 2 bytes, and a little that is no power of two."""

_GPT = """
mean 1/512 = x; rstd 1/512 = x; n1 1 = x mean rstd; qkv 3 = n1; att 1 = qkv; lse 1/128 = qkv
proj 1 = att; mask1 1/2 =; res 1 = x proj mask1; mean2 1/512 = res; rstd2 1/512 = res
n2 1 = res mean2 rstd2; fc1 4 = n2; gelu 4 = fc1; fc2 1 = gelu; mask2 1/2 =; y 1 = res fc2 mask2
---
dd 1 = dy mask2; dgelu 4 = dd; wg1 1/256 = dd gelu; dfc1 4 = dgelu fc1; wg2 1/256 = dfc1 n2
dn2 1 = dfc1; f32 2 = dn2 res mean2 rstd2; red 1/64 = f32; dres 1 = f32 dy red; dp 1 = dres mask1
datt 1 = dp; wg3 1/256 = dp att; delta 1/64 = datt att; dqkv 3 = datt qkv att lse delta
wg4 1/256 = dqkv n1; dn1 1 = dqkv; f32b 2 = dn1 x mean rstd; red2 1/64 = f32b; dx 1 = f32b dres red2
"""

_LLAMA = """
rstd 1/512 = x; n1 1 = x rstd; q 1 = n1; k 1/4 = n1; v 1/4 = n1; qr 1 = q; kr 1/4 = k
att 1 = qr kr v; lse 1/64 = qr kr; proj 1 = att; res 1 = x proj; rstd2 1/512 = res
n2 1 = res rstd2; gate 7/2 = n2; up 7/2 = n2; silu 7/2 = gate; prod 7/2 = silu up
down 1 = prod; y 1 = res down
---
dprod 7/2 = dy; wg1 1/256 = dy prod; sig 7/2 = gate; dup 7/2 = dprod gate sig
dgate 7/2 = dprod up gate sig; wg2 1/256 = dup n2; wg3 1/256 = dgate n2; dna 1 = dgate
dnb 1 = dup; dn2 1 = dna dnb; f32 2 = dn2 res rstd2; dres 1 = f32 dy; datt 1 = dres
wg4 1/256 = dres att; delta 1/64 = datt att; dqr 1 = datt qr kr v lse delta; dkr 1/4 = datt qr lse
dv 1/4 = datt qr kr lse; dq 1 = dqr; dk 1/4 = dkr; a 1 = dq n1; b 1 = dk n1; c 1 = dv n1
ab 1 = a b; dn1 1 = ab c; f32b 2 = dn1 x rstd; dx 1 = f32b dres
"""

_LOCAL = _LLAMA.replace("lse 1/64 = qr kr", "lse 1/64 = qr kr; soft 1 = qr kr").replace(
    "delta 1/64 = datt att", "delta 1/64 = datt att soft"
)

_MOE = """
rstd 1/512 = x; n1 1 = x rstd; qkv 3/2 = n1; att 1 = qkv; lse 1/64 = qkv; proj 1 = att
res 1 = x proj; rstd2 1/512 = res; n2 1 = res rstd2; router 1/128 = n2; prob 1/128 = router
top 1/256 = prob; sortidx 1/128 = top; perm 2 = n2 sortidx; gate 7 = perm; up 7 = perm
silu 7 = gate; prod 7 = silu up; down 2 = prod; unperm 2 = down sortidx; mix 1 = unperm top
y 1 = res mix
---
dun 2 = dy top sortidx; dtop 1/128 = dy down sortidx; dprod 7 = dun; wg1 1/256 = dun prod
dup 7 = dprod gate; dgate 7 = dprod up gate; wg2 1/256 = dup dgate perm; dperm 2 = dup dgate
dn2 1 = dperm sortidx; drouter 1/128 = dtop prob; dn2b 1 = drouter; dn2c 1 = dn2 dn2b n2
f32 2 = dn2c res rstd2; dres 1 = f32 dy; datt 1 = dres; wg3 1/256 = dres att
delta 1/64 = datt att; dqkv 3/2 = datt qkv att lse delta; dn1 1 = dqkv n1; f32b 2 = dn1 x rstd
dx 1 = f32b dres
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    out: str
    units: float
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A class of layers, its tokens relative to the first class, and what is not simply saved."""

    key: str
    forward: tuple[_Line, ...]
    backward: tuple[_Line, ...]
    scale: float = 1.0
    offload: frozenset[str] = frozenset()
    recompute: frozenset[str] = frozenset()


@dataclass(slots=True, kw_only=True)
class _Life:
    """A buffer under construction; lines are added as the step is walked."""

    size: int
    births: list[int]
    uses: list[int] = field(default_factory=list)


def _parse(text: str) -> tuple[_Line, ...]:
    lines = []
    for entry in text.replace("\n", ";").split(";"):
        if not entry.strip():
            continue
        left, _, right = entry.partition("=")
        name, units = left.split()
        over, _, under = units.partition("/")
        lines.append(
            _Line(out=name, units=int(over) / int(under or 1), inputs=tuple(right.split()))
        )
    return tuple(lines)


def _layer(key: str, text: str, *, scale: float = 1.0, moved: bool = False) -> _Layer:
    forward, backward = text.split("---")
    recompute = {"n1", "n2", "gelu", "silu", "prod", "fc1", "gate", "up"} if moved else set()
    return _Layer(
        key=key,
        forward=_parse(forward),
        backward=_parse(backward),
        scale=scale,
        offload=frozenset({"x", "att", "qkv", "qr", "kr", "v", "res"} if moved else ()),
        recompute=frozenset(recompute),
    )


def make_step(model: str, num_layers: int, *, moved: bool = False) -> PlacementProblem:
    """One training step of ``model``; with ``moved`` its activations are offloaded and recomputed.

    Raises:
        KeyError: ``model`` is none of ``MODELS``.
    """
    return _Step(MODELS[model](num_layers, moved)).problem()


def make_irregular_step(model: str, num_layers: int, seed: int) -> PlacementProblem:
    """A moved step with random sizes and a random choice of what is offloaded and recomputed.

    Harder than ``make_step``: the peak lies in every layer, and no two sizes are multiples.
    """
    rng = random.Random(seed)
    layers = MODELS[model](num_layers, True)
    changed = {layer.key: _irregular(layer, rng) for layer in layers}
    return _Step([changed[layer.key] for layer in layers]).problem()


def _irregular(layer: _Layer, rng: random.Random) -> _Layer:
    def resized(lines: Iterable[_Line]) -> tuple[_Line, ...]:
        return tuple(replace(line, units=line.units * rng.uniform(0.6, 1.6)) for line in lines)

    made = {line.out for line in layer.forward} | {"x"}
    saved = sorted({name for line in layer.backward for name in line.inputs} & made)
    offload = frozenset(name for name in saved if rng.random() < 0.5)
    recompute = frozenset(
        name for name in saved if name not in offload | {"x"} and rng.random() < 0.4
    )
    return replace(
        layer,
        forward=resized(layer.forward),
        backward=resized(layer.backward),
        offload=offload | {"x"},
        recompute=recompute,
    )


def _same(key: str, text: str, count: int, moved: bool) -> list[_Layer]:
    return [_layer(key, text, moved=moved)] * count


def _alternating(count: int, moved: bool) -> list[_Layer]:
    kinds = (_layer("local", _LOCAL, moved=moved), _layer("global", _LLAMA, moved=moved))
    return [kinds[i % 6 == 5] for i in range(count)]


def _encoder_decoder(count: int, moved: bool) -> list[_Layer]:
    encoder = _layer("encoder", _GPT, scale=1.5, moved=moved)
    decoder = _layer("decoder", _LOCAL, moved=moved)
    return [encoder] * (count // 2) + [decoder] * (count - count // 2)


MODELS = {
    "gpt": lambda n, moved: _same("gpt", _GPT, n, moved),
    "llama": lambda n, moved: _same("llama", _LLAMA, n, moved),
    "alternating": _alternating,
    "moe": lambda n, moved: _same("moe", _MOE, n, moved),
    "encoder-decoder": _encoder_decoder,
}


class _Step:
    """Walks the step's lines once and collects lifetimes."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self._layers = layers
        self._lives: dict[str, _Life] = {}
        self._blocks: list[Block] = []
        self._block_of: dict[str, str] = {}
        self._time = 0

    def problem(self) -> PlacementProblem:
        last = len(self._layers) - 1
        self._make("y-1", 1.0, [])
        for index, layer in enumerate(self._layers):
            self._forward(index, layer)
        # With moved activations the loss is taken in chunks, else it alone would be the peak.
        wide = 1.0 if self._layers[0].offload else 16.0
        logits = [("logits", wide, [f"y{last}"]), ("f32", 2 * wide, ["logits"])]
        logits += [("lse", 0.01, ["f32"]), ("dlogits", wide, ["f32", "lse"])]
        logits += [(f"dy{last}", 1.0, ["dlogits", f"y{last}"])]
        for name, units, inputs in logits:
            self._make(name, units, inputs)
        for index in range(last, -1, -1):
            self._backward(index, self._layers[index])
        return PlacementProblem(
            buffers=tuple(self._buffers()), blocks=tuple(self._blocks), alignment=512
        )

    def _make(self, name: str, units: float, inputs: Iterable[str]) -> None:
        for source in inputs:
            self._lives[source].uses.append(self._time)
        size = max(int(units * UNIT_BYTES), 512)
        self._lives[name] = _Life(size=size, births=[self._time])
        self._time += 1

    def _forward(self, index: int, layer: _Layer) -> None:
        begin = self._time
        names = {"x": f"y{index - 1}"}
        later = {source for line in layer.backward for source in line.inputs}
        for line in layer.forward:
            kept = line.out in later and line.out not in layer.recompute
            names[line.out] = f"y{index}" if line.out == "y" else f"f{index}.{line.out}"
            self._make(names[line.out], line.units * layer.scale, [names[i] for i in line.inputs])
            if line.out != "y" and not kept:
                self._block_of[names[line.out]] = f"fwd{index}"
        self._close_block("fwd", index, layer, begin)

    def _close_block(self, kind: str, index: int, layer: _Layer, begin: int) -> None:
        self._blocks.append(
            Block(
                id=f"{kind}{index}", class_key=f"{kind}-{layer.key}", lower=begin, upper=self._time
            )
        )

    def _backward(self, index: int, layer: _Layer) -> None:
        begin = self._time
        block = f"bwd{index}"
        names = {line.out: f"f{index}.{line.out}" for line in layer.forward}
        names |= {"x": f"y{index - 1}", "dy": f"dy{index}"}
        if layer.offload and index < len(self._layers) - 2:
            self._move(index, layer, names)
        for line in layer.forward:
            if line.out in layer.recompute:
                names[line.out] = f"r{index}.{line.out}"
                inputs = [names[i] for i in line.inputs]
                self._make(names[line.out], line.units * layer.scale, inputs)
                self._block_of[names[line.out]] = block
        for line in layer.backward:
            name = f"dy{index - 1}" if line.out == "dx" else f"b{index}.{line.out}"
            names[line.out] = name
            self._make(name, line.units * layer.scale, [names[i] for i in line.inputs])
            if line.out != "dx":
                self._block_of[name] = block
        self._close_block("bwd", index, layer, begin)

    def _move(self, index: int, layer: _Layer, names: dict[str, str]) -> None:
        """The offloaded tensors of a layer come back as other buffers, one backward ahead.

        Their first life ends when the copy-out has ended, with the next layer's forward.
        """
        ends = {block.id: block for block in self._blocks}
        for name in sorted(layer.offload & names.keys()):
            first = self._lives[names[name]]
            first.uses.append(ends[f"fwd{index + 1}"].upper - 1)
            back = f"{names[name]}.reloaded{index}"
            self._lives[back] = _Life(size=first.size, births=[ends[f"bwd{index + 1}"].lower])
            names[name] = back

    def _buffers(self) -> Iterable[Buffer]:
        ends = {block.id: block.upper for block in self._blocks}
        for name, life in self._lives.items():
            upper = max(life.births + life.uses) + 1
            block = self._block_of.get(name)
            yield Buffer(
                id=name,
                lower=life.births[0],
                upper=upper,
                size=life.size,
                # What a later region recomputes from lives on: no transient after all.
                block=block if block and upper <= ends[block] else None,
            )


def describe(problem: PlacementProblem) -> Mapping[str, int]:
    """How large the problem is: buffers, blocks and classes."""
    return {
        "buffers": len(problem.buffers),
        "blocks": len(problem.blocks),
        "classes": len({b.class_key for b in problem.blocks}),
    }
