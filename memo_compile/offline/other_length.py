"""A model that was traced at two lengths, at any other: Dynamo and AOTAutograd are not asked again.

The joint graphs of two lengths are the same but for numbers, in arguments and in sizes and strides.
Two say what each number is of the length: a multiple, a square, or that and a constant. For a third
length those are put in their place, and torch's own rules make each value anew. The result is used
only if every size and stride is then what the two lengths say, too; else the model is traced.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from memo_compile.backends.capture import StepCapture
from memo_compile.config import MemoConfig
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.stages import CapturedStep
from memo_compile.errors import UnsupportedGraph, described
from memo_compile.lowering.varying_sizes import (
    Formula,
    Written,
    formula,
    with_numbers,
    written,
)
from memo_compile.offline.more_layers import MoreLayers
from memo_compile.torch_private import fx_graphs

log = logging.getLogger("memo")

NUM_LENGTHS = 2
"""So many say what all others are; more are not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLength:
    """What was traced at one length."""

    length: int
    step: CapturedStep
    capture: StepCapture
    products: tuple[int, ...]
    """Bytes of what products make, in the order of Dynamo's graph."""
    constant_bytes: int
    """Parameters and what belongs to them, at every length the same."""
    more: MoreLayers | None
    """The layers that were not traced, likewise."""


@dataclass(slots=True)
class TracedLengths:
    """One model at several lengths. Its code is memo's own: it does the same at every length."""

    _known: dict[int, TracedLength] = field(default_factory=dict)
    _functions: "_Functions | None" = None

    def add(self, traced: TracedLength | None) -> None:
        """One more length; the first two are kept."""
        if traced is not None and len(self._known) < NUM_LENGTHS:
            self._known.setdefault(traced.length, traced)

    def at(self, length: int) -> "OtherLength | None":
        """The model at ``length``; None: it must be traced, which is said if two are known."""
        if len(self._known) < NUM_LENGTHS:
            return None
        try:
            if self._functions is None:
                self._functions = _Functions(*self._known.values())
            return self._functions.at(length)
        except Exception as error:  # of torch with other sizes: it is traced, and fails or not
            log.warning("memo: length %d is traced anew: %s", length, described(error))
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLength:
    """A model at a length at which it was not traced."""

    products: tuple[int, ...]
    """As of ``TracedLength``."""
    first: TracedLength
    joint: fx.GraphModule

    @property
    def facts(self) -> GraphFacts:
        """What is known of the inputs, but for the bytes of those that are no parameters."""
        return self.first.step.facts

    def captured(self, config: MemoConfig) -> tuple[CapturedStep, StepCapture]:
        """The step under ``config``, as AOTAutograd would hand it over."""
        step, capture = self.first.capture.captured_again(self.first.step, config, self.joint)
        facts = copy.copy(self.facts)
        facts.read_forward(
            step.forward.graph.find_nodes(op="placeholder"),
            facts.static_names,
            ties_inputs=facts.ties_inputs,
        )
        return replace(step, facts=facts), capture


class _Functions:
    """The numbers of a joint graph as functions of the length."""

    def __init__(self, first: TracedLength, second: TracedLength) -> None:
        if _constant(first) != _constant(second):
            raise UnsupportedGraph("two lengths have other parameters, or other products")
        self._first = first
        base = (first.length, second.length)
        self._gm, other = _joint(first), _joint(second)
        mine, theirs = written(self._gm), written(other)
        if mine.text != theirs.text:
            raise UnsupportedGraph("the joint graphs of two lengths differ")
        self._text = mine.text
        self._arguments = _formulas(mine.arguments, theirs.arguments, base)
        self._layouts = _formulas(mine.layouts, theirs.layouts, base)
        self._products = _formulas(first.products, second.products, base)

    def at(self, length: int) -> OtherLength:
        """Raises UnsupportedGraph, or what torch raises: it is another graph there."""
        gm = _Rebuilt(self._gm, length, self._arguments, self._layouts).gm
        arguments, layouts = (
            self._numbers(formulas, length) for formulas in (self._arguments, self._layouts)
        )
        if written(gm) != Written(text=self._text, arguments=arguments, layouts=layouts):
            raise UnsupportedGraph("sizes of the joint graph are no functions of the length")
        products = self._numbers(self._products, length)
        return OtherLength(products=products, first=self._first, joint=gm)

    @staticmethod
    def _numbers(formulas: Sequence[Formula], length: int) -> tuple[int, ...]:
        return tuple(of.at(length) for of in formulas)


def _constant(traced: TracedLength) -> tuple[int, ...]:
    """What must not depend on the length."""
    more = traced.more
    layers = () if more is None else (more.num_layers, *(part.nbytes for part in more.untraced))
    return traced.constant_bytes, len(traced.products), *layers


def _joint(traced: TracedLength) -> fx.GraphModule:
    joint = traced.capture.joint
    assert joint is not None, "nothing runs, and the partitioner was called"
    return joint


def _formulas(
    first: Sequence[int], second: Sequence[int], base: tuple[int, int]
) -> tuple[Formula, ...]:
    found = []
    for pair in zip(first, second, strict=True):
        of = formula(*pair, base)
        if of is None:
            raise UnsupportedGraph(f"{pair[0]} and {pair[1]} are no function of the length")
        found.append(of)
    return tuple(found)


class _Rebuilt:
    """A joint graph with other numbers; its values are made by torch's rules."""

    def __init__(
        self,
        gm: fx.GraphModule,
        length: int,
        arguments: Sequence[Formula],
        layouts: Sequence[Formula],
    ) -> None:
        self._length, self._arguments = length, iter(arguments)
        mode = fx_graphs.detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes])
        if mode is None:
            raise UnsupportedGraph("the joint graph carries no fake tensors")
        self._mode = mode
        self._graph = fx.Graph()
        self._nodes: dict[fx.Node, fx.Node] = {}
        remaining = iter(layouts)
        for node in gm.graph.nodes:
            count = sum(2 * value.dim() for value in _tensors(node.meta.get("val")))
            self._copy(node, [next(remaining) for _ in range(count)])
        self.gm = fx_graphs.graph_module(gm, self._graph)
        self.gm.meta.update(gm.meta)

    def _copy(self, node: fx.Node, layout: Sequence[Formula]) -> None:
        value: Any = None
        if node.op == "placeholder":
            new = self._graph.placeholder(str(node.target))
            value = self._given(node.meta["val"], layout)
        elif node.op == "output":
            new = self._graph.output(self._changed(node.args[0]))
        else:
            args, kwargs = self._changed(node.args), self._changed(node.kwargs)
            new = self._graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            args, kwargs = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
            with self._mode, torch.no_grad():
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        new.name = node.name
        new.meta = {key: note for key, note in node.meta.items() if key != "eager_input_vals"}
        if node.op != "output":
            new.meta["val"] = value
        self._nodes[node] = new

    def _given(self, value: Any, layout: Sequence[Formula]) -> Any:
        """An input: itself, where its size is the same."""
        numbers = [of.at(self._length) for of in layout]
        if numbers == [*value.shape, *value.stride()]:
            return value
        if value.storage_offset():
            raise UnsupportedGraph("an input whose size varies is a view")
        with self._mode:
            return torch.empty_strided(
                numbers[: value.dim()],
                numbers[value.dim() :],
                dtype=value.dtype,
                device=value.device,
            )

    def _changed(self, value: Any) -> Any:
        """An argument, with the new graph's nodes and numbers."""
        return with_numbers(value, self._nodes, lambda: next(self._arguments).at(self._length))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
