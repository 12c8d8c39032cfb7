"""Makes a graph for fewer rows (tokens, or sequences) than it was traced with.

Rewrite, 32 of 128 rows:
    a = mm(x, w)            # x [128, 64]             a = mm(x, w)           # x [32, 64]
    b = view(a, [128, 4, 16])                  ->     b = view(a, [32, 4, 16])
    c = mul(b, scale)       # scale [16]              c = mul(b, scale)      # scale [16]
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from memo_compile.analysis.row_rules import RowDim
from memo_compile.analysis.rows import is_row_wise
from memo_compile.analysis.structure import argument, op_name
from memo_compile.analysis.views import shape_of
from memo_compile.errors import UnsupportedGraph
from memo_compile.torch_private import fx_graphs

_SHAPE_ARGUMENTS = {
    "reshape": "shape",
    **dict.fromkeys("view _unsafe_view expand full zeros ones empty".split(), "size"),
}
"""Operator -> its argument that is the shape of the result."""


def slice_rows(
    gm: fx.GraphModule, dims: Mapping[fx.Node, RowDim | None], rows: int, num_rows: int
) -> fx.GraphModule:
    """Returns the same graph for ``rows`` of ``num_rows`` rows.

    Placeholders that carry rows have a narrower value with the strides of the whole. Shapes among
    the arguments are rewritten, and every ``meta["val"]`` follows from running the node on fakes.
    ``dims`` is the result of ``rows.row_dims`` for ``gm``. Raises UnsupportedGraph: a node of
    ``gm`` is not separable.
    """
    if not 0 < rows <= num_rows:
        raise UnsupportedGraph(f"rows: expected 1 to {num_rows} rows, got {rows}")
    for node in gm.graph.nodes:
        if node.op != "output" and not is_row_wise(node, dims):
            raise UnsupportedGraph(
                f"{node.name} ({node.target}) mixes rows or is not known to keep them "
                "apart: take it out of the graph before slicing"
            )
    return _Slicer(gm, dims, rows, num_rows).run()


class FakeCopier:
    """Copies a graph node by node; values are computed on fakes of other shapes."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in gm.graph.nodes)
        self._mode: Any = next((mode for mode in modes if mode is not None), None)
        if self._mode is None:
            raise UnsupportedGraph("the graph to slice carries no fake tensors")

    def run(self) -> fx.GraphModule:
        """Returns the copy."""
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self.graph.output(fx.node.map_arg(node.args[0], self._copies.__getitem__))
                continue
            copy = self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
            with self._mode:
                self.change(copy, node)
        return fx_graphs.graph_module(self.gm, self.graph)

    def change(self, copy: fx.Node, node: fx.Node) -> None:
        """Changes the arguments of ``copy``, which are those of ``node``, and sets its value."""
        raise NotImplementedError

    def value_of(self, copy: fx.Node) -> Any:
        """Runs ``copy`` on the fakes of its inputs; returns its value."""

        def fake(source: fx.Node) -> Any:
            if "val" in source.meta:
                return source.meta["val"]
            return self._mode.from_tensor(getattr(self.gm, str(source.target)))

        args, kwargs = fx.node.map_arg((copy.args, copy.kwargs), fake)
        assert callable(copy.target)
        return copy.target(*args, **kwargs)


class _Slicer(FakeCopier):
    """Copies a graph for ``rows`` of ``num_rows`` rows, which lie in ``dims`` of its values."""

    def __init__(
        self, gm: fx.GraphModule, dims: Mapping[fx.Node, RowDim | None], rows: int, num_rows: int
    ) -> None:
        super().__init__(gm)
        self.dims, self.rows, self.num_rows = dims, rows, num_rows

    def change(self, copy: fx.Node, node: fx.Node) -> None:
        """Gives ``copy`` fewer rows; a view of a sliced value may need a dense copy of it."""
        row = self.dims[node]
        if row is None:
            return
        if node.op == "placeholder":
            copy.meta["val"] = node.meta["val"].narrow(row.dim, 0, self.rows * row.factor)
            return
        self._reshape(copy, node, row)
        try:
            copy.meta["val"] = self.value_of(copy)
        except (RuntimeError, ValueError):
            if op_name(node) not in ("view", "_unsafe_view"):
                raise
            self._make_dense(copy)
            copy.meta["val"] = self.value_of(copy)
        self._require_rows(copy, node, row)

    def _require_rows(self, copy: fx.Node, node: fx.Node, row: RowDim) -> None:
        """Raises UnsupportedGraph: the result has another shape, as operators may drop size 1."""
        if row.dim >= len(shape_of(node)):
            return  # a tuple whose first element is no tensor
        expected = list(shape_of(node))
        expected[row.dim] = self.rows * row.factor
        if list(shape_of(copy)) != expected:
            raise UnsupportedGraph(
                f"{node.name} ({node.target}) has shape {shape_of(copy)} for {self.rows} of "
                f"{self.num_rows} rows, expected {tuple(expected)}"
            )

    def _reshape(self, copy: fx.Node, node: fx.Node, row: RowDim) -> None:
        """Gives ``copy`` the shape of its result with fewer rows, if the shape is an argument."""
        name = _SHAPE_ARGUMENTS.get(op_name(node))
        if name is None:
            return
        shape = list(shape_of(node))
        shape[row.dim] = self.rows * row.factor
        if name in copy.kwargs:
            copy.update_kwarg(name, shape)
        else:
            whole = argument(node, name)
            copy.update_arg(next(i for i, arg in enumerate(node.args) if arg is whole), shape)

    def _make_dense(self, copy: fx.Node) -> None:
        """Lets a view read a dense copy of its source: part of a tensor may not allow it."""
        source = copy.all_input_nodes[0]
        with self.graph.inserting_before(copy):
            dense = self.graph.call_function(
                torch.ops.aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
            )
        dense.meta["val"] = self.value_of(dense)
        copy.replace_input_with(source, dense)
