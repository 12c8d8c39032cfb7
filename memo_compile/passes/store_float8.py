"""Stores saved activations as float8, for ``saved_dtype="float8"``: half of bf16's bytes.

Blocks of BLOCK numbers share a scale, a power of two, by which their largest number becomes one of
the largest of float8. Numbers are stored with 4 significant bits: they come back within a sixteenth
of themselves. Rows of bytes hold the numbers and behind them the exponents of their scales.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree as pytree

from memo_compile.analysis.joint_units import UNIT, JointUnits, backward_positions
from memo_compile.analysis.purity import must_be_saved
from memo_compile.analysis.structure import GRADIENT, op_name
from memo_compile.analysis.views import is_tensor, is_view, results_of, storage_of
from memo_compile.passes.equal_cut import near_attention
from memo_compile.torch_private import fx_graphs

BLOCK = 128
"""Numbers with one scale; a last dimension that is no multiple of it has one scale for a row."""

MIN_NUMBERS = 1024
"""Tensors of fewer numbers are stored as they are: they take no bytes worth a rounding."""

MIN_ROW = 32
"""So are those of shorter rows, whose scales would take more than a tenth of the bytes saved.
Statistics of a normalisation are such tensors."""

FLOAT8 = torch.float8_e4m3fn

FLOAT8_NAME = "_float8"
"""Ending of the name of what is stored in place of an activation."""

_LEAST_NUMBER = 1e-30
"""Added to a block's largest number: a block of zeros has a scale, too."""

_MARGIN = 1 + 2**-12
"""Rounding of the logarithm makes no number larger than the largest of float8, which has no inf."""

_BIAS = 127
"""What is added to an exponent, so that a byte holds it."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_aten, _to_dtype = torch.ops.aten, torch.ops.prims.convert_element_type.default


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFloat8:
    """Returns float8 numbers and scales from the forward, for the activations that it saves.

    Rewrite, with ``num_fwd_outputs`` = 1, in short:
        return loss, mul, rsqrt    ->    exponents = ceil(log2(amax(abs(mul blocks)) / 448))
                                         values = to_float8(mul blocks * exp2(-exponents))
                                         mul_float8 = cat(bytes of values, bytes of exponents)
                                         return loss, mul_float8, rsqrt

    Stored as they are: masks and whole numbers, statistics, what a plan must not compute twice (a
    comparison may read it), what was masked, where one huge number would leave no digits to the
    others, inputs and results of attention, whose probabilities would no longer add up to one,
    inputs of layers, from which everything may be recomputed, and what the program
    itself gets.
    """

    num_fwd_outputs: int
    name: ClassVar[str] = "store-float8"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        output, results = gm.graph.output_node(), results_of(gm.graph)
        user_results = results[: self.num_fwd_outputs]
        user_storages = {storage_of(n) for n in user_results if isinstance(n, fx.Node)}
        stored = {
            node: _stored(node)
            for node in results[self.num_fwd_outputs :]
            if isinstance(node, fx.Node)
            and _can_store(node)
            and storage_of(node) not in user_storages
        }
        if stored:
            fx_graphs.set_results(output, [stored.get(node, node) for node in results])
        return PassResult(gm, bool(stored))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFloat8:
    """Makes the activations again from float8 numbers and scales, beside their readers.

    Rewrite, for ``stored`` = the names of the nodes behind ``StoreFloat8``:
        (mul, rsqrt, tangent)    ->    (mul_float8, rsqrt, tangent)
                                       mul = to_bf16(values of mul_float8 * exp2(its exponents))

    Each layer's backward makes what it reads, so that nothing wide passes from layer to layer.
    """

    stored: Mapping[str, torch.Tensor]
    """By an activation's name what is stored of it, as a fake tensor."""
    units: JointUnits
    name: ClassVar[str] = "read-float8"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        activations = [node for node in placeholders if node.name in self.stored]
        positions = backward_positions(gm.graph, self.units.num_units) if activations else {}
        for node in activations:
            with gm.graph.inserting_before(node):
                stored = gm.graph.placeholder(node.name + FLOAT8_NAME)
            stored.meta = {**node.meta, "val": self.stored[node.name]}
            by_position: dict[int | None, list[fx.Node]] = {}  # its readers in each region
            for user in node.users:
                by_position.setdefault(positions.get(user), []).append(user)
            for users in by_position.values():
                first = next(user for user in gm.graph.nodes if user in users)
                read_back = _read(stored, node, first)
                for user in users:
                    user.replace_input_with(node, read_back)
            gm.graph.erase_node(node)
        return PassResult(gm, bool(activations))


def stored_values(forward: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Returns what a forward returns in place of activations, as ``ReadFloat8.stored``."""
    return {
        node.name.removesuffix(FLOAT8_NAME): node.meta["val"]
        for node in results_of(forward.graph)
        if isinstance(node, fx.Node) and node.meta.get(_STORED)
    }


_STORED = "memo_stored_as_float8"


def _can_store(node: fx.Node) -> bool:
    """True for an activation that may be rounded to float8: see ``StoreFloat8`` for all others."""
    if node.op != "call_function" or not is_tensor(node) or is_view(node):
        return False
    value = node.meta["val"]
    return (
        value.dtype in _DTYPES
        and value.dim() > 1
        and value.numel() >= MIN_NUMBERS
        and value.shape[-1] >= MIN_ROW
        and value.is_contiguous()
        and not must_be_saved(node)
        and not node.meta.get(GRADIENT)
        and not near_attention(node)
        and not _is_handed_on(node)
        and not _may_be_masked(node)
    )


def _may_be_masked(node: fx.Node) -> bool:
    """True for a choice of two values, and for a sum with what is broadcast, as masks are."""
    size = node.meta["val"].numel()
    sources = filter(is_tensor, node.all_input_nodes)
    is_sum = op_name(node) == "add" and any(s.meta["val"].numel() < size for s in sources)
    return is_sum or op_name(node) in ("where", "masked_fill")


def _is_handed_on(node: fx.Node) -> bool:
    """True for a value that another unit of the forward reads: a layer's result."""
    return any(
        user.meta.get(UNIT, node.meta.get(UNIT)) != node.meta.get(UNIT) for user in node.users
    )


def _stored(node: fx.Node) -> fx.Node:
    """Adds behind ``node`` what rounds it; returns its rows of bytes."""
    call = _Calls(node, node.next)
    shape, limit = list(node.meta["val"].shape), torch.finfo(FLOAT8).max
    blocks = call(_aten.view.default, call(_to_dtype, node, torch.float32), _blocks(shape))
    largest = call(_aten.amax.default, call(_aten.abs.default, blocks), [-1], True)
    largest = call(_aten.add.Tensor, largest, _LEAST_NUMBER)
    exponents = call(_aten.log2.default, call(_aten.mul.Tensor, largest, _MARGIN / limit))
    exponents = call(_aten.ceil.default, exponents)
    shrunk = call(_aten.exp2.default, call(_aten.neg.default, exponents))
    scaled = call(_aten.mul.Tensor, blocks, shrunk)
    values = call(_aten.view.default, call(_to_dtype, scaled, FLOAT8), shape)
    biased = call(_to_dtype, call(_aten.add.Tensor, exponents, _BIAS), torch.uint8)
    scales = call(_aten.view.default, biased, [*shape[:-1], _blocks(shape)[-2]])
    rows = call(_aten.cat.default, [call(_aten.view.dtype, values, torch.uint8), scales], -1)
    rows.meta[_STORED] = True
    rows.name = node.name + FLOAT8_NAME
    return rows


def _read(stored: fx.Node, node: fx.Node, reader: fx.Node) -> fx.Node:
    """Adds in front of ``reader`` what makes ``node`` again."""
    call = _Calls(node, reader)
    value = node.meta["val"]
    width, blocks = value.shape[-1], _blocks(value.shape)
    numbers = call(_aten.slice.Tensor, stored, -1, 0, width)
    values = call(_to_dtype, call(_aten.view.dtype, numbers, FLOAT8), torch.float32)
    biased = call(_aten.slice.Tensor, stored, -1, width, width + blocks[-2])
    exponents = call(_aten.sub.Tensor, call(_to_dtype, biased, torch.float32), _BIAS)
    scales = call(_aten.view.default, call(_aten.exp2.default, exponents), [*blocks[:-1], 1])
    wide = call(_aten.mul.Tensor, call(_aten.view.default, values, blocks), scales)
    whole = call(_aten.view.default, wide, list(value.shape))
    return whole if value.dtype == torch.float32 else call(_to_dtype, whole, value.dtype)


def _blocks(shape: Sequence[int]) -> list[int]:
    """Returns the shape of a value's blocks: [tokens, 4096] -> [tokens, 32, BLOCK]."""
    width = BLOCK if shape[-1] % BLOCK == 0 else shape[-1]
    return [*shape[:-1], shape[-1] // width, width]


class _Calls:
    """Adds calls of operators before ``place``, in the unit and for the source line of ``like``."""

    def __init__(self, like: fx.Node, place: fx.Node) -> None:
        self._place = place
        keys = (UNIT, "partitioner_tag", "stack_trace", "nn_module_stack", "seq_nr")
        self._meta = {key: like.meta[key] for key in keys if key in like.meta}
        self._mode = fx_graphs.detect_fake_mode([like.meta["val"]]) or contextlib.nullcontext()

    def __call__(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Adds a call of ``target``; its value follows from running it on fakes."""
        with self._place.graph.inserting_before(self._place):
            node = self._place.graph.call_function(target, args)
        values = pytree.tree_map_only(fx.Node, lambda source: source.meta["val"], args)
        with self._mode:
            node.meta = {**self._meta, "val": target(*values)}
        return node
