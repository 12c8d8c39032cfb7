"""Makes a region for fewer tokens, to time a part of what is too large to be timed whole.

Every size that is a multiple of the tokens shrinks in proportion, in the shapes of the inputs and
in the sizes that operators are given; parameters keep their shape. An eighth of 1024 tokens:

    x [1, 1024, 64]                    x [1, 128, 64]
    q = view(x, [1024, 8, 8])    ->    q = view(x, [128, 8, 8])
    s = bmm(q, k)                      s = bmm(q, k)

Only the time that the shorter graph takes is of use, not what it computes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.views import is_tensor, tensors_of
from memo_compile.errors import UnsupportedGraph
from memo_compile.passes.runner import PassRunner
from memo_compile.passes.slice_rows import FakeCopier

MIN_TOKENS = 16
"""Smaller sizes are not taken for tokens: they are batches, heads and the like."""

_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
"""Errors of operators for fakes of shapes that they do not take; some operators assert."""

_MAX_SIZE = 2**48
"""Larger numbers among the arguments are limits ("to the end"), not sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Replaces sizes of ``old`` tokens by sizes of ``new`` ones."""

    old: int
    new: int

    def size(self, value: Any) -> Any:
        """Scales a multiple of the tokens, plus or minus one (shifted labels); others stay."""
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= _MAX_SIZE:
            return value
        times = round(value / self.old)
        offset = value - times * self.old
        return times * self.new + offset if abs(offset) <= 1 else value

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.size(size) for size in shape)


def shorten(region: RegionGraph, part: int, runner: PassRunner) -> RegionGraph:
    """Returns ``region`` for one ``part``-th of its tokens; raises as ``ShortenTokens`` does."""
    shorter = ShortenTokens(part=part, static_inputs=region.static_inputs)
    try:
        gm = runner.run(region.gm, [shorter], stage=region.name)
    except UnsupportedGraph as error:
        raise UnsupportedGraph(f"region {region.name} {error}") from error
    return replace(region, name=f"{region.name}.{part}th", gm=gm)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortenTokens:
    """Makes a new graph for one ``part``-th of the tokens (2: half of them).

    A size of the inputs that are no parameters, tried from the largest inputs on, is the number of
    tokens if every operator accepts its shorter inputs and makes results shorter in the same way.

    Rewrite, with ``part`` = 8: see this file's head.
    """

    part: int
    static_inputs: tuple[int, ...]
    """Positions of inputs that are parameters."""
    name: ClassVar[str] = "shorten-tokens"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Returns a new graph. Raises UnsupportedGraph: no size of its is the number of tokens."""
        for size in _candidates(gm, self.static_inputs):
            if size % self.part == 0:
                scale = _Scale(old=size, new=size // self.part)
                try:
                    shorter = _Shortener(gm, self.static_inputs, scale).run()
                except _OtherSizeError:
                    continue
                return PassResult(shorter, True)
        raise UnsupportedGraph(f"cannot be cut to one {self.part}th of its tokens")


class _OtherSizeError(Exception):
    """The size that is tried is not the number of tokens."""


def _candidates(gm: fx.GraphModule, static_inputs: tuple[int, ...]) -> list[int]:
    """Returns sizes of inputs that are no parameters: of the most bytes first, then the largest.

    Sizes that parameters have too come last; those below MIN_TOKENS are left out.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    bytes_of: Counter[int] = Counter()
    of_parameters: set[int] = set()
    for at, node in enumerate(placeholders):
        if not is_tensor(node):
            continue
        value = node.meta["val"]
        if at in static_inputs:
            of_parameters.update(value.shape)
            continue
        for size in {length for length in value.shape if length >= MIN_TOKENS}:
            bytes_of[size] += value.nbytes
    return sorted(bytes_of, key=lambda size: (size in of_parameters, -bytes_of[size], -size))


class _Shortener(FakeCopier):
    """Copies a graph with its sizes scaled; raises _OtherSizeError where that does not work out."""

    def __init__(self, gm: fx.GraphModule, static_inputs: tuple[int, ...], scale: _Scale) -> None:
        super().__init__(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.static = {placeholders[at] for at in static_inputs}
        self.scale = scale

    def change(self, copy: fx.Node, node: fx.Node) -> None:
        """Scales the sizes of an input, unless it is a parameter, or of an operator."""
        if node.op == "call_function":
            self._call(copy, node)
        elif node.op == "placeholder" and node not in self.static and is_tensor(node):
            value = node.meta["val"]
            size = self.scale.shape(value.shape)
            copy.meta["val"] = value.new_empty_strided(size, _strides(value, size))

    def _call(self, copy: fx.Node, node: fx.Node) -> None:
        """Scales sizes among the arguments; raises unless the result scales likewise."""
        copy.args = fx.node.map_aggregate(copy.args, self.scale.size)
        copy.kwargs = fx.node.map_aggregate(copy.kwargs, self.scale.size)
        try:
            copy.meta["val"] = self.value_of(copy)
        except _REFUSALS as error:
            raise _OtherSizeError(f"{node.name}: {error}") from error
        shapes = [tuple(value.shape) for value in tensors_of(copy)]
        if shapes != [self.scale.shape(value.shape) for value in tensors_of(node)]:
            raise _OtherSizeError(f"{node.name}: {shapes}")


def _strides(value: torch.Tensor, size: Sequence[int]) -> list[int]:
    """Returns strides for ``size`` in which dimensions lie in the same order, with the same gaps.

    [2, 1024, 64] with strides (65536, 64, 1), for 128 tokens -> (8192, 64, 1).
    """
    strides = list(value.stride())
    inner_span, new_inner_span = 1, 1
    for dim in sorted(range(value.dim()), key=lambda dim: (value.stride(dim), value.shape[dim])):
        if value.stride(dim) == 0:
            continue
        if value.stride(dim) % inner_span:
            raise _OtherSizeError(f"strides {value.stride()} overlap")
        strides[dim] = value.stride(dim) // inner_span * new_inner_span
        inner_span = value.stride(dim) * value.shape[dim]
        new_inner_span = strides[dim] * size[dim]
    return strides
