"""Counts memory that libraries take beside their results, which no traced graph shows.

CPU: oneDNN copies a convolution's operands and result into layouts of its own, and torch's own
implementations unfold its source; measured with torch 2.13 on AVX-512: oneDNN's usual kernels with
one and two threads, the rest with one (``tests/numerics/test_convolutions.py`` measures again).

CUDA: read in FlashAttention-2's ``mha_bwd`` (torch 2.11 to 2.13): it sums the queries' gradient in
float32, keeps one float32 number for each row of scores, and where keys have fewer heads than
queries it makes their gradients for every query head first. cuDNN 9 does the same (cudnn_frontend's
``CompositeSDPABackwardNode``). Memory-efficient attention: torch's ``attention_backward.cu`` and
``kernel_backward.h`` (2.11); ``tests/cuda_emulated/test_attention.py`` compares what they allocate.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from memo_compile.analysis.regions import LoweredRegion, RegionGraph
from memo_compile.analysis.structure import argument, namespace, op_name
from memo_compile.lowering.eager_ops import PIECE, PIECE_ITEM_BYTES
from memo_compile.step.problem import OutsideBuffer, align
from memo_compile.torch_private import inductor_api

FLOAT32_BYTES = 4
ROW_GRANULE = 128
"""Rows are rounded up to a multiple of the kernel's block of queries."""
WIDTH_GRANULE = 32
"""Head widths are rounded up to a multiple of this."""
RING_BUFFERS = 4
"""Buffers of a key's size in which ring attention receives while it reads others."""

WIDE_HEAD = 128
"""Memory-efficient attention sums wider heads of 16-bit numbers in memory, in float32."""
EFFICIENT_GRANULE = 64
"""Rows and columns of its blocks; WIDE_HEAD of each for wider heads."""
EFFICIENT_BLOCKS = 200
"""Most blocks of keys, in all heads of all batches, whose gradients' sums exist for wide heads."""
EFFICIENT_LOCK_BYTES = 16
"""Bytes beside the sums of a block."""

CHANNEL_BLOCK_BYTES = 64
"""oneDNN's own layouts round channels up to blocks of this size."""
GROUP_BLOCK = 16
"""Where oneDNN has no kernel for its groups, it rounds the channels of each up to this."""
PARTIAL_SUMS_BYTES = 2 * 2**20
"""Most bytes of partial sums of a weight's gradient; each thread has its own."""

_FLASH_BACKWARD = re.compile("^flash_attn::_flash_attn_(varlen_)?backward$")
"""The package flash-attn's own operators."""

CONVOLUTION = "convolution workspace"
"""Kind of the buffers that ``convolution_bytes`` counts."""

_FOURIER = re.compile(r"(?:^|[._])_fft_(r2c|c2r|c2c)(?=$|[._])")
_SCATTER = re.compile(r"(?:^|[._])(?:gather|scatter(?:_add|_reduce)?)_?(?=$|[._])")
_HALVES = (torch.bfloat16, torch.float16)
CAST = "copies of another dtype"
"""Kind of the buffers that ``cast_bytes`` and ``cast_workspace`` count."""
_BILINEAR = "upsample_bilinear2d"
_RANDOM = ("inductor_random", "inductor_randint")
_POOLING = ("_low_memory_max_pool_with_offsets", "_low_memory_max_pool_offsets_to_indices")

_CONVOLUTION = re.compile(r"(?:^|[._])convolution(_backward)?(?=$|[._])")
"""Matches the names of convolutions: operators, and Inductor's kernels."""


def at_line(kind: str, size_bytes: int, line: int) -> OutsideBuffer:
    """Returns memory outside that exists while ``line`` runs."""
    return OutsideBuffer(kind=kind, size_bytes=size_bytes, start=line, end=line + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution on a CPU, forward or backward. Shapes are (B, C, ...), the weight's too.

    The backward's ``result`` is the gradient that comes in.
    """

    result: tuple[int, ...]
    source: tuple[int, ...]
    weight: tuple[int, ...]
    item_bytes: int
    is_backward: bool
    groups: int = 1
    is_transposed: bool = False
    is_dilated: bool = False
    is_strided: bool = False
    backend: str = "Mkldnn"
    """Which of torch's implementations runs it (``inductor_api.convolution_backend``)."""

    @property
    def key(self) -> tuple[bool, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The part of it that Inductor's kernel shows."""
        return self.is_backward, self.result, self.source, self.weight


def convolution_bytes(conv: Convolution) -> int:
    """Bytes that a convolution allocates for itself on a CPU (1 % of random ones took more).

    Torch's own implementations unfold the source. oneDNN copies into layouts of its own; with
    channels last, and for some sizes, it copies nothing. Its backward reads the source for two
    gradients, and sums the weight's in float32. A transposed convolution runs as the backward of
    another, and is unfolded where it is dilated.
    """
    return align(_unfolded_bytes(conv) if conv.backend.startswith("Slow") else _copied_bytes(conv))


def _unfolded_bytes(conv: Convolution) -> int:
    """Bytes of torch's own: the source's columns, in a backward for both gradients, and copies.

    Columns of all groups count: they are so small that the heap may not reuse their places.
    """
    images = 1 if "Dilated" in conv.backend else conv.source[0]
    numbers = (1 + conv.is_backward) * images * conv.groups * _columns(conv)
    numbers += sum(map(math.prod, (conv.source, conv.result, conv.weight)))
    if conv.groups > 1:  # results of the groups, before they are put together
        numbers += math.prod(conv.source) + math.prod(conv.weight)
    return numbers * conv.item_bytes + _summed_bytes(conv)


def _summed_bytes(conv: Convolution) -> int:
    """Bytes in which products of 16-bit numbers are summed in float32: a product for each thread.

    (Processors with instructions for such products take none.) In a forward a thread's product is
    an image's result; in a backward it is columns, which are folded into the source's gradient. A
    transposed convolution's forward makes columns, and its backward makes the source's gradient.
    """
    if conv.item_bytes >= FLOAT32_BYTES:
        return 0
    makes_columns = conv.is_backward != conv.is_transposed
    image = conv.source if conv.is_backward else conv.result
    numbers = _columns(conv) if makes_columns else math.prod(image[1:])
    return min(torch.get_num_threads(), conv.source[0]) * numbers * FLOAT32_BYTES


def _columns(conv: Convolution) -> int:
    """Returns how many numbers the columns of one image have, in one group."""
    ends = conv.source if conv.is_transposed else conv.result
    return math.prod(conv.weight[1:]) * math.prod(ends[2:])


def _copied_bytes(conv: Convolution) -> int:
    """Bytes of the copies that oneDNN makes."""
    result, source, weight, item_bytes = conv.result, conv.source, conv.weight, conv.item_bytes
    channels, outputs = max(1, source[1]), max(1, result[1])
    blocked = max(1, CHANNEL_BLOCK_BYTES // item_bytes)
    source_bytes = math.prod(source) // channels * _rounded(channels, blocked) * item_bytes
    result_bytes = math.prod(result) // outputs * _rounded(outputs, blocked) * item_bytes
    weight_bytes = math.prod(weight[2:]) * item_bytes
    weight_bytes *= _rounded(weight[0], blocked) * _rounded(weight[1], blocked)
    if weight[0] != outputs or math.prod(result[2:]) > math.prod(source[2:]):
        result_bytes *= 2
    num_bytes = source_bytes + result_bytes + weight_bytes + _bytes_without_onednn_kernel(conv)
    if conv.is_backward or conv.is_transposed:
        num_bytes += source_bytes
    if conv.is_backward and conv.is_transposed:
        num_bytes += result_bytes
    if conv.is_backward:
        num_bytes += weight_bytes // item_bytes * max(item_bytes, FLOAT32_BYTES)
        num_bytes += min(PARTIAL_SUMS_BYTES, 2 * (source_bytes + result_bytes))
    return num_bytes


def _bytes_without_onednn_kernel(conv: Convolution) -> int:
    """Bytes beside ``_copied_bytes`` where oneDNN has no kernel of its own for the shape.

    The terms fit what was measured; they are named after copies that would have such sizes.
    """
    return _dilated_bytes(conv) + _unusual_groups_bytes(conv)


def _dilated_bytes(conv: Convolution) -> int:
    """Bytes of columns into which oneDNN unfolds a dilated convolution: an image for each thread.

    Of a volume it unfolds one slice at a time.
    """
    is_volume = len(conv.source) > 4
    unfolds = conv.is_transposed or (conv.is_backward and (conv.is_strided or is_volume))
    if not (conv.is_dilated and unfolds):
        return 0
    depth = conv.source[2] if is_volume else 1
    threads = min(torch.get_num_threads(), conv.source[0])
    return threads * _columns(conv) // depth * FLOAT32_BYTES


def _unusual_groups_bytes(conv: Convolution) -> int:
    """Bytes that the backward of unusual groups takes: oneDNN computes it in float32.

    Usual are kernels of length 1 and 3, neither dilated nor transposed.
    """
    is_plain = not (conv.is_dilated or conv.is_transposed)
    is_usual = is_plain and all(length in (1, 3) for length in conv.weight[2:])
    if conv.groups == 1 or is_usual or not conv.is_backward:
        return 0
    outputs, inputs, *lengths = conv.weight
    channels = _rounded(outputs // conv.groups, GROUP_BLOCK), _rounded(inputs, GROUP_BLOCK)
    # The weight's gradient, whose channels are rounded up in each group.
    weight_bytes = conv.groups * math.prod((*channels, *lengths)) * FLOAT32_BYTES
    if conv.item_bytes >= FLOAT32_BYTES:
        return weight_bytes
    # 16-bit numbers: the weight itself too, and source and result, once for each of two gradients.
    num_bytes = 2 * weight_bytes
    num_bytes += 2 * FLOAT32_BYTES * (math.prod(conv.source) + math.prod(conv.result))
    if conv.is_strided:  # as if each channel of the source filled a block by itself
        num_bytes += GROUP_BLOCK * conv.item_bytes * math.prod(conv.source)
    return num_bytes


def _rounded(number: int, granule: int) -> int:
    """Returns ``number`` rounded up to a multiple of ``granule``."""
    return -(-number // granule) * granule


def is_convolution(name: str) -> bool:
    """True for the name of an operator, or of a kernel of Inductor's, that is a convolution."""
    return _CONVOLUTION.search(name) is not None


def convolution_of(node: fx.Node) -> Convolution | None:
    """Returns the convolution that ``node`` runs on a CPU, also into given buffers; None: none."""
    match = _CONVOLUTION.search(op_name(node)) if node.op == "call_function" else None
    if match is None or not isinstance(node.target, torch._ops.OpOverload):
        return None
    output = node if isinstance(node.meta.get("val"), torch.Tensor) else argument(node, "out0")
    result = _fake(argument(node, "grad_output") if match[1] else output)
    source, weight = _fake(argument(node, "input")), _fake(argument(node, "weight"))
    if result is None or source is None or weight is None or source.device.type != "cpu":
        return None
    settings = {name: argument(node, name) for name in inductor_api.CONVOLUTION_SETTINGS}
    return Convolution(
        result=tuple(result.shape),
        source=tuple(source.shape),
        weight=tuple(weight.shape),
        item_bytes=source.itemsize,
        is_backward=bool(match[1]),
        groups=settings["groups"],
        is_transposed=settings["transposed"],
        is_dilated=max(settings["dilation"]) > 1,
        is_strided=max(settings["stride"]) > 1,
        backend=inductor_api.convolution_backend(source, weight, settings),
    )


def convolution_workspace(node: fx.Node, line: int) -> OutsideBuffer | None:
    """Returns what ``node``, if a convolution on a CPU, allocates for itself on ``line``."""
    conv = convolution_of(node)
    return None if conv is None else at_line(CONVOLUTION, convolution_bytes(conv), line)


def pooling_workspace(node: fx.Node, line: int) -> OutsideBuffer | None:
    """Returns what maximum pooling takes op by op: several integers for each of its results.

    Inductor makes one kernel of it, which takes none.
    """
    if node.op != "call_function" or op_name(node) not in _POOLING:
        return None
    value = node.meta["val"]
    result = value[0] if isinstance(value, tuple | list) else value
    numbers = 2 * len(argument(node, "kernel_size")) + 3
    size_bytes = align(numbers * torch.int64.itemsize * result.numel())
    return at_line("pooling workspace", size_bytes, line)


def is_fourier(node: fx.Node) -> bool:
    """True where ``node`` is a Fourier transform."""
    return node.op == "call_function" and _FOURIER.search(op_name(node)) is not None


def fourier_workspace(node: fx.Node, line: int) -> OutsideBuffer | None:
    """Returns what a Fourier transform on a CPU takes: its source with dimensions reordered.

    A transform to real numbers over several dimensions also makes complex ones in between. Measured
    with torch 2.13; ``tests/numerics/test_fourier.py`` measures again.
    """
    match = _FOURIER.search(op_name(node)) if node.op == "call_function" else None
    source = None if match is None else _fake(argument(node, "self"))
    if match is None or source is None or source.device.type != "cpu":
        return None
    copies = 3 if match[1] == "c2r" and len(argument(node, "dim")) > 1 else 1
    return at_line("Fourier workspace", align(copies * source.nbytes), line)


def cast_bytes(name: str, dtype: torch.dtype, numbers: int, averaged: int = 0) -> int:
    """Bytes that operator ``name`` takes on a CPU to gather or scatter 16-bit numbers, or average.

    It makes its result, ``numbers`` numbers, in float32. (Inductor calls ``scatter_reduce_`` where
    there are several threads.) A mean of ``averaged`` numbers also takes their counts, and a mask.
    """
    if _SCATTER.search(name) is None:
        return 0
    size_bytes = numbers * FLOAT32_BYTES if dtype in _HALVES else 0
    if averaged:
        size_bytes = dtype.itemsize * (numbers + averaged) + max(size_bytes, numbers)
    return align(size_bytes)


def cast_workspace(node: fx.Node, line: int) -> OutsideBuffer | None:
    """Returns what operators on a CPU copy into another dtype, or layout, op by op.

    Means cast 16-bit numbers to float32, magnitudes of complex numbers make a complex result,
    ``any`` takes a byte for each number, and bilinear upsampling mostly copies to channels last.
    Measured with torch 2.13; ``tests/numerics/test_casts.py`` measures again.
    """
    is_aten = node.op == "call_function" and namespace(node) == "aten"
    size_bytes = align(_cast_bytes(node)) if is_aten else 0
    return at_line(CAST, size_bytes, line) if size_bytes else None


def _cast_bytes(node: fx.Node) -> int:
    """Returns the bytes of ``cast_workspace``, for an operator of aten."""
    name, result = op_name(node), node.meta.get("val")
    source = _fake(argument(node, "self"))
    if source is None or source.device.type != "cpu" or not isinstance(result, torch.Tensor):
        return 0
    if name == "mean" and source.dtype in _HALVES:
        return FLOAT32_BYTES * source.numel()
    if name == "abs" and source.is_complex():
        return source.nbytes
    if name == "any" and source.dtype not in (torch.bool, torch.uint8):
        return source.numel()
    if name == _BILINEAR and not source.is_contiguous(memory_format=torch.channels_last):
        return source.nbytes + result.nbytes
    averages = name == "scatter_reduce" and argument(node, "reduce") == "mean"
    averaged = _fake(argument(node, "src")) if averages else None
    num_averaged = 0 if averaged is None else averaged.numel()
    return cast_bytes(name, result.dtype, result.numel(), num_averaged)


def random_workspace(node: fx.Node, line: int) -> OutsideBuffer | None:
    """Returns what random numbers take op by op on a device: the bits that they are made of."""
    is_random = node.op == "call_function" and op_name(node) in _RANDOM
    if not is_random or (value := node.meta["val"]).device.type == "cpu":
        return None
    return at_line("random bits", align(min(value.numel(), PIECE) * PIECE_ITEM_BYTES), line)


def with_workspaces(
    lowered: Mapping[str, LoweredRegion], graphs: Mapping[str, RegionGraph]
) -> dict[str, LoweredRegion]:
    """Adds to ``lowered`` what attention kernels on a CUDA device take for themselves."""
    return {name: _with_workspaces(region, graphs[name]) for name, region in lowered.items()}


def _with_workspaces(lowered: LoweredRegion, region: RegionGraph) -> LoweredRegion:
    """Adds the workspaces of attention kernels: on their lines, or if unknown on all lines."""
    sizes: dict[str, int] = {}
    for node in region.gm.graph.nodes:
        if size_bytes := attention_bytes(node):
            operator = called_operator(node)
            sizes[operator] = max(size_bytes, sizes.get(operator, 0))
    if not sizes:
        return lowered
    profile = lowered.profile
    workspaces = [
        _attention(sizes[operator], line, line + 1)
        for operator, line in lowered.attention
        if operator in sizes
    ]
    unseen = sizes.keys() - {operator for operator, _ in lowered.attention}
    workspaces += [_attention(sizes[operator], 0, profile.num_lines) for operator in sorted(unseen)]
    return replace(lowered, profile=replace(profile, outside=(*profile.outside, *workspaces)))


def _attention(size_bytes: int, start: int, end: int) -> OutsideBuffer:
    return OutsideBuffer(kind="attention workspace", size_bytes=size_bytes, start=start, end=end)


def is_attention(operator: str) -> bool:
    """True for the name of an attention operator."""
    return "attention" in operator or "flash_attn" in operator


def attention_bytes(node: fx.Node) -> int:
    """Bytes that an attention kernel allocates for itself while it runs; 0 for other operators."""
    if match := _FLASH_BACKWARD.search(called_operator(node)):
        return _flash_package_bytes(node, has_lengths=bool(match[1]))
    if node.op != "call_function" or "attention" not in op_name(node):
        return 0
    is_backward = "backward" in op_name(node)
    first = 1 if is_backward else 0  # behind the result's gradient
    query, key = (_fake(node.args[at]) for at in (first, first + 1))
    if query is None or key is None or query.dim() != 4:
        return 0
    if "efficient" in op_name(node):
        return _efficient_bytes(query, key, is_backward=is_backward)
    is_ring = namespace(node) == "memo_shapes" and argument(node, "world") > 1
    arriving_bytes = RING_BUFFERS * key.nbytes if is_ring else 0  # from other ranks
    if not is_backward:
        return arriving_bytes
    batch, heads, rows, width = query.shape
    num_rows = batch * _rounded(rows, ROW_GRANULE)
    backward_bytes = _flash_backward_bytes(num_rows, heads, width, key, key.shape[1])
    return backward_bytes + align(arriving_bytes)


def _flash_backward_bytes(
    num_rows: int, heads: int, width: int, key: torch.Tensor, key_heads: int
) -> int:
    """Bytes of flash attention's backward, see the file's head; ``num_rows`` are of all batches."""
    sums_bytes = num_rows * heads * (_rounded(width, WIDTH_GRANULE) + 1) * FLOAT32_BYTES
    # Gradients of keys and values for every head of the queries.
    expanded_bytes = 2 * key.nbytes * heads // key_heads if key_heads != heads else 0
    return align(sums_bytes) + align(expanded_bytes)


def _efficient_bytes(query: torch.Tensor, key: torch.Tensor, *, is_backward: bool) -> int:
    """Bytes of memory-efficient attention, (B, H, T, D): sums in float32, a number for each row.

    Where heads are float32 the rows' numbers are computed beside the kernel.
    """
    batch, heads, rows, width = query.shape
    is_wide = query.itemsize < FLOAT32_BYTES and width > WIDE_HEAD
    if not is_backward:
        return align(is_wide * query.numel() * FLOAT32_BYTES)
    granule = EFFICIENT_GRANULE if width <= EFFICIENT_GRANULE else WIDE_HEAD
    blocks = batch * heads * -(-rows // granule) * -(-width // granule)
    sums = blocks * (granule * granule * FLOAT32_BYTES + EFFICIENT_LOCK_BYTES)
    if is_wide:
        most_blocks = EFFICIENT_BLOCKS // (batch * heads)
        key_blocks = max(1, min(-(-key.shape[2] // EFFICIENT_GRANULE), most_blocks))
        block_numbers = EFFICIENT_GRANULE * _rounded(width, WIDE_HEAD)
        sums += 2 * batch * heads * key_blocks * block_numbers * FLOAT32_BYTES
    row_numbers_bytes = batch * heads * rows * FLOAT32_BYTES
    return align(sums) + 2 * align(row_numbers_bytes)


def called_operator(node: fx.Node) -> str:
    """Returns the operator's name, of a wrapped one that writes too; "" for no operator."""
    target: object = node.target
    if node.op == "call_function" and "auto_functionalized" in str(target):
        target = node.args[0]
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def _flash_package_bytes(node: fx.Node, *, has_lengths: bool) -> int:
    """Bytes of a backward of the package flash-attn: (B, T, H, D), or packed (T, H, D).

    Its kernel takes what that of torch does (``mha_bwd``, ``mha_varlen_bwd``).
    """
    wrapped = not isinstance(node.target, torch._ops.OpOverload)
    query, key, ends = (
        _fake(node.kwargs.get(name) if wrapped else argument(node, name))
        for name in ("q", "k", "cu_seqlens_q" if has_lengths else "q")
    )
    if query is None or key is None or ends is None:
        return 0
    *outer, heads, width = query.shape
    if has_lengths:
        num_rows = outer[0] + ROW_GRANULE * (ends.numel() - 1)
    else:
        num_rows = outer[0] * _rounded(outer[1], ROW_GRANULE)
    return _flash_backward_bytes(num_rows, heads, width, key, key.shape[-2])


def _fake(argument: object) -> torch.Tensor | None:
    """Returns the value of an operator's argument; None: it is no tensor."""
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
