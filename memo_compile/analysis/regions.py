"""A region before lowering, and a lowered one: its profile, views of buffers, and how to run it."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from memo_runtime.collectives import Collective
from torch import fx

from memo_compile.analysis.views import results_of, storage_of
from memo_compile.step.problem import (
    CallKind,
    Layout,
    Layouts,
    RegionOutput,
    RegionProfile,
    Storage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSpec:
    """The tensor that a buffer's bytes are: dtype, size, and stride in elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionGraph:
    """A region before lowering.

    ``gm`` takes its placeholders in order and returns a tuple. Outputs in ``external_outputs``
    go to the user and must lie in ordinary memory. ``static_inputs`` are parameters and buffers:
    their addresses do not change from step to step.
    """

    name: str
    gm: fx.GraphModule
    external_outputs: frozenset[int]
    static_inputs: tuple[int, ...]
    is_backward: bool
    device: torch.device
    kind: CallKind = CallKind.RUN
    """ISSUE: ``gm`` is one collective; COMM_WAIT: its wait, whose inputs are the output and the
    input of the collective. The runtime runs both; they are not lowered."""
    may_reuse_input: bool = False
    """ISSUE: the graph allows the result to take the input's place."""
    op_by_op: bool = False
    """Runs operator by operator whatever the lowering: an output may lie over an input, which one
    operator allows and several kernels need not."""
    donated: tuple[int, ...] = ()
    """Positions of inputs that nothing reads after a call: the code may overwrite them."""

    def example_inputs(self) -> list[Any]:
        """Returns the fake values of the placeholders, in order."""
        return [node.meta["val"] for node in self.gm.graph.find_nodes(op="placeholder")]

    def external_storages(self) -> set[fx.Node]:
        """Returns the nodes that make the memory of outputs that go to the user."""
        results = results_of(self.gm.graph)
        return {storage_of(results[at]) for at in self.external_outputs}

    def input_layouts(self) -> Layouts:
        """Returns the layouts of the inputs."""
        return tuple(map(layout_of, self.example_inputs()))

    def output_layouts(self) -> Layouts:
        """Returns the layouts of the results."""
        results = results_of(self.gm.graph)
        return tuple(
            layout_of(result.meta.get("val")) if isinstance(result, fx.Node) else None
            for result in results
        )


class AttentionLine(NamedTuple):
    """A line of a lowered region that calls an attention kernel."""

    operator: str
    """As its schema names it, e.g. ``aten::_scaled_dot_product_flash_attention``."""
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredRegion:
    """A region that can run: ``run(inputs)`` writes into ``memo_runtime.current.views``."""

    profile: RegionProfile
    views: tuple[ViewSpec, ...]
    run: Callable[[list[Any]], Sequence[Any]]
    collective: Collective | None = None
    """ISSUE: the collective that the runtime begins; ``run`` is not called."""
    attention: tuple[AttentionLine, ...] = ()
    """The lines that call attention kernels."""


def layout_of(value: object) -> Layout | None:
    """Returns the layout of a tensor, from its own first element on; None: no strided tensor."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return Layout(
        dtype=str(value.dtype).removeprefix("torch."),
        item_bytes=value.dtype.itemsize,
        size=tuple(value.shape),
        stride=tuple(value.stride()),
    )


def counted_once(outputs: Iterable[tuple[Hashable, RegionOutput]]) -> tuple[RegionOutput, ...]:
    """Returns ``outputs``, (storage, output) each, so that storages of ordinary memory count once.

    The second output of such a storage gets 0 bytes and ``same_as`` the first.
    """
    first: dict[Hashable, int] = {}
    counted = []
    for index, (storage, output) in enumerate(outputs):
        if output.storage in (Storage.EXTERNAL, Storage.OUTSIDE):
            same_as = first.setdefault(storage, index)
            if same_as != index:
                output = replace(output, size_bytes=0, same_as=same_as)
        counted.append(output)
    return tuple(counted)


def layout_elements(value: torch.Tensor) -> int:
    """Returns the number of elements from the first to the last of a tensor, gaps included."""
    layout = zip(value.shape, value.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in layout) if value.numel() else 0


def storage_bytes(value: torch.Tensor) -> int:
    """Returns the number of bytes from the first to the last element of a tensor."""
    return int(layout_elements(value)) * value.element_size()


def view_spec(value: torch.Tensor) -> ViewSpec:
    """Returns dtype, size and stride of ``value``."""
    return ViewSpec(dtype=value.dtype, size=tuple(value.shape), stride=tuple(value.stride()))
