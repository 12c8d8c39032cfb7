"""Runs a region on random numbers, in slices of rows and whole, and compares the results.

Slices are proposed by rules about operators (``analysis/row_rules.py``); this check is independent
of them. It runs the region on random tensors of its real shapes, whole and in parts as the step
program calls them, and compares every result. Most wrong slices come from sizes that are equal by
chance, so no dimension is made smaller. Only the number of rows is, where the whole is too large:
then two rows of the chain are compared with one row at a time.

Numbers are float64 where every kernel takes it, so that a difference is not rounding. Some results
are rounding all the same: what cancels to zero (the gradient of a bias that a softmax ignores), or
what jumps at a tie. To see which, the whole runs again with inputs that differ in their last
digits: its parts may differ by as much as it changes then.
"""

import enum
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memo_compile.analysis.purity import is_collective
from memo_compile.analysis.random_states import is_read_on_host
from memo_compile.analysis.regions import RegionGraph, layout_elements
from memo_compile.analysis.structure import argument, op_name
from memo_compile.analysis.tile_chains import transient_bytes
from memo_compile.analysis.views import results_of, shape_of
from memo_compile.costs.measure_regions import torch_as_before
from memo_compile.costs.roofline import graph_cost
from memo_compile.driver.left_whole import say_bug
from memo_compile.errors import UnsupportedGraph
from memo_compile.lowering.aten import interpret
from memo_compile.passes.cut import content_of
from memo_compile.passes.tile_cut import RegionTiling
from memo_compile.reporting import state
from memo_compile.step.problem import Layout
from memo_compile.torch_private import fx_graphs
from memo_compile.torch_private.storages import unwritten_is_nan

MAX_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}
"""A region with more bytes of inputs, results and temporaries is not run: a step may need them."""

MAX_FLOPS = {"cpu": 4e9, "cuda": 4e12}
"""A region with more FLOPs is not run: half a second on a core or GPU; each class runs twice."""

TOLERANCE = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 2e-3}
"""Results may differ by this share of their largest number: slices sum in another order."""

COARSE = 5e-2
"""``TOLERANCE`` of shorter dtypes."""

FLOAT8 = 0.15
"""The same for float8, whose neighbours are up to an eighth apart."""

NUDGES = 4
"""Runs of the whole with slightly different inputs, where its parts differ from it."""

ROUNDING = 8
"""Parts may differ by so many times what these runs differ: they sum in another order."""

PERIOD = 1_000_003
"""Random numbers are drawn on the host, which takes seconds for the weight of a large vocabulary: a
longer tensor repeats so many. It is a prime: rows that repeat lie a multiple of it apart."""

MAX_NOT_FINITE = 0.1
"""Share of a result that may be infinite or NaN. Where more is (roots and logarithms of negative
inputs), a second run with positive inputs is compared as well."""

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


class Verdict(enum.Enum):
    """The result of a probe."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A verdict, and the reason unless it is AGREES."""

    verdict: Verdict
    reason: str = ""


def believed(probe: Probe, *, differs: str, not_run: str) -> bool:
    """False where the probe DIFFERS. Reports that with the message ``differs``, or ``not_run``."""
    if probe.verdict is Verdict.DIFFERS:
        say_bug(differs, probe.reason)
    elif probe.verdict is Verdict.NOT_RUN:
        state.add_note(f"{not_run}: {probe.reason}")
    return probe.verdict is not Verdict.DIFFERS


class TilingProbes:
    """Judges tiles of regions, each distinct tiling once: several tries of a graph share most."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[str, ...], bool] = {}

    def __call__(self, tiling: RegionTiling) -> bool:
        """True where ``tiling`` may run; reports where it may not, or was not compared."""
        graphs = [tiling.region.gm, *(part.gm for part in tiling.parts.values())]
        if any(graph.graph.find_nodes(op="get_attr") for graph in graphs):  # no key for tensors
            return _tiling_believed(tiling)
        key = (str(tiling.tiled.tiling), *map(content_of, graphs))
        if key not in self._verdicts:
            self._verdicts[key] = _tiling_believed(tiling)
        return self._verdicts[key]


def _tiling_believed(tiling: RegionTiling) -> bool:
    """True where ``tiling`` may run, compared or not; reports what hinders."""
    name = tiling.region.name
    return believed(
        probe_tiling(tiling),
        differs=f"region {name} is not run in tiles: they compute something else",
        not_run=f"region {name}: its tiles were not compared with it",
    )


class _NotRunError(Exception):
    """A probe cannot run; the message says why."""


class _DiffersError(Exception):
    """Results differ; the message says which."""


Run = Callable[[list[Any]], Sequence[Any]]
"""A region's results from its inputs."""


def probe_tiling(tiling: RegionTiling) -> Probe:
    """Compares the parts of a region in tiles, called in order, with the region whole.

    First in float64. Where the whole is too large, or a kernel does not take float64, only its
    chain is compared, two rows against one row at a time: it has no such kernels. Where that cannot
    run either, the whole is compared in its own dtypes.
    """

    def tiled(wide: bool) -> Run:
        graphs = {name: _prepared(part, wide) for name, part in tiling.parts.items()}
        return lambda inputs: _run_calls(tiling, graphs, inputs)

    probe = _compare(tiling.region, tiled, types=(True,))
    if probe.verdict is Verdict.NOT_RUN:
        probe = _probe_chain(tiling)
    if probe.verdict is Verdict.NOT_RUN:
        probe = _compare(tiling.region, tiled, types=(False,))
    return probe


def _probe_chain(tiling: RegionTiling) -> Probe:
    """Compares a few rows of the region's chain with the same rows in two parts."""
    reason = "it has too few rows"
    for rows in (1, 2):  # one row fails where an operator drops dimensions of size 1
        if 2 * rows <= tiling.tiled.num_rows:
            try:
                both, part = tiling.tiled.chain_of(2 * rows), tiling.tiled.chain_of(rows)
            except UnsupportedGraph as error:
                reason = str(error)
            else:
                return probe_rows(both, part, num_parts=2)
    return Probe(verdict=Verdict.NOT_RUN, reason=reason)


def probe_rows(whole: RegionGraph, part: RegionGraph, *, num_parts: int = 1) -> Probe:
    """Compares ``part``, run on a range of the rows of ``whole``, with that range of its results.

    Rows lie in the dimension in which an input or a result is smaller in ``part``. The first
    ``num_parts`` ranges are compared, one after another.
    """
    assert num_parts >= 1, num_parts
    examples = part.example_inputs()

    def sliced(number: int, wide: bool) -> Run:
        run_part = _prepared(part, wide)
        return lambda inputs: run_part(
            [_narrowed(*pair, number) for pair in zip(inputs, examples, strict=True)]
        )

    for number in range(num_parts):
        probe = _compare(whole, functools.partial(sliced, number), number=number)
        if probe.verdict is not Verdict.AGREES:
            return probe
    return probe


def _narrowed(value: Any, like: Any, number: int) -> Any:
    """Returns range ``number`` of ``value``; each range has the shape of ``like``."""
    if not isinstance(value, torch.Tensor) or value.shape == like.shape:
        return value
    different = [dim for dim in range(value.dim()) if value.shape[dim] != like.shape[dim]]
    if len(different) != 1:
        raise _DiffersError(f"shapes {tuple(value.shape)} and {tuple(like.shape)} are no range")
    (dim,) = different
    return value.narrow(dim, number * like.shape[dim], like.shape[dim])


def _compare(
    region: RegionGraph,
    parts: Callable[[bool], Run],
    *,
    number: int = 0,
    types: Sequence[bool] = (True, False),
) -> Probe:
    """Compares ``region`` with its ``parts``; ``types``: in float64 (True), in its own dtypes."""
    reason = ""
    for wide in types:
        try:
            _require_small(region, wide)
            with fx_graphs.real_tensors(), torch_as_before(region.device):
                _compare_once(region, parts(wide), wide, number)
        except _NotRunError as error:
            reason = str(error)
        except _DiffersError as error:
            return Probe(verdict=Verdict.DIFFERS, reason=str(error))
        else:
            return Probe(verdict=Verdict.AGREES)
    return Probe(verdict=Verdict.NOT_RUN, reason=reason)


def _compare_once(region: RegionGraph, parts: Run, wide: bool, number: int) -> None:
    """Compares results of ``parts`` with range ``number`` of the whole's on made-up inputs.

    On positive ones as well, if the others give many infinities. Raises _NotRunError and
    _DiffersError.
    """
    whole = _prepared(region, wide)
    for positive in (False, True):
        make = functools.partial(made_up_inputs, region, wide=wide, positive=positive)
        inputs = make()
        try:
            expected = _seeded(whole, inputs)
        except Exception as error:  # kernels raise what they like: nothing can be compared
            raise _NotRunError(f"{type(error).__name__}: {_first_line(error)}") from error
        try:
            results = _seeded(parts, inputs)
        except _DiffersError:
            raise
        except torch.OutOfMemoryError as error:
            raise _NotRunError(_first_line(error)) from error
        except Exception as error:  # the whole runs: what its parts raise is their fault
            raise _DiffersError(
                f"the parts raise {type(error).__name__}: {_first_line(error)}"
            ) from error
        try:
            _require_all_close(expected, results, number)
        except _DiffersError:
            _require_all_close(expected, results, number, _rounding(whole, make, expected))
        if all(_is_mostly_finite(value) for value in expected):
            return


def _rounding(
    whole: Run, make: Callable[..., list[Any]], expected: Sequence[Any]
) -> list[torch.Tensor | None]:
    """Returns how far each number of each result moves when the inputs' last digits change.

    At least as far as the median number does: one may stay in place by chance. None for a result
    of whole numbers, or of a dtype that is as coarse as COARSE.
    """
    shifts = [_shift(value, value) for value in expected]
    try:
        for seed in range(1, NUDGES + 1):
            for at, value in enumerate(_seeded(whole, make(nudge=seed))):
                before, now = shifts[at], _shift(expected[at], value)
                shifts[at] = None if before is None or now is None else before.maximum(now)
    except torch.OutOfMemoryError as error:
        raise _NotRunError(_first_line(error)) from error
    return [shift if shift is None else shift.maximum(shift.median()) for shift in shifts]


def _shift(value: Any, other: Any) -> torch.Tensor | None:
    """Returns how far each number of ``other`` is from ``value``; None as of ``_rounding``."""
    if not isinstance(value, torch.Tensor) or not value.numel() or value.dtype not in TOLERANCE:
        return None
    return (other - value).abs().nan_to_num(0)


def _seeded(run: Run, inputs: Sequence[Any]) -> Sequence[Any]:
    """Runs with fresh random states; nothing that is compared writes into its inputs.

    Memory that is not written is equal in each run: with made-up ends, attention of packed
    sequences leaves tokens out.
    """
    torch.manual_seed(0)
    with unwritten_is_nan():
        return run(list(inputs))


def _range_like(whole: Any, part: Any, number: int) -> Any:
    """Returns range ``number`` of the tensor ``whole``, in the shape of ``part``."""
    if isinstance(whole, torch.Tensor) and isinstance(part, torch.Tensor):
        if whole.dim() != part.dim():
            raise _DiffersError(f"shapes {tuple(whole.shape)} and {tuple(part.shape)}")
        return _narrowed(whole, part, number)
    return whole


def _is_mostly_finite(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return True
    value = _countable(value)
    return bool((~value.isfinite()).double().mean() <= MAX_NOT_FINITE)


def _countable(value: torch.Tensor) -> torch.Tensor:
    """Returns float8 as float32: torch does not compare or subtract numbers of 8 bits."""
    is_float8 = value.is_floating_point() and value.dtype.itemsize == 1
    return value.float() if is_float8 else value


def _require_all_close(
    expected: Sequence[Any],
    results: Sequence[Any],
    number: int,
    rounding: Sequence[torch.Tensor | None] = (),
) -> None:
    """Raises _DiffersError for the first result that differs by more than its ``rounding``."""
    bounds = rounding or [None] * len(expected)
    for at, (whole, part, bound) in enumerate(zip(expected, results, bounds, strict=True)):
        _require_close(at, _range_like(whole, part, number), part, _range_like(bound, part, number))


def _require_close(at: int, expected: Any, result: Any, rounding: torch.Tensor | None) -> None:
    """Raises _DiffersError unless result ``at`` is as ``expected``, but for rounding."""
    if not isinstance(expected, torch.Tensor) or not isinstance(result, torch.Tensor):
        if expected is not result and expected != result:
            raise _DiffersError(f"result {at}: {result} for {expected}")
        return
    tolerance = TOLERANCE.get(expected.dtype, FLOAT8 if expected.dtype.itemsize == 1 else COARSE)
    expected, result = _countable(expected), _countable(result)
    same = expected == result
    if expected.is_floating_point() or expected.is_complex():
        same |= expected.isnan() & result.isnan()
        finite = expected[expected.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        difference = (expected - result).abs()
        same |= difference <= tolerance * scale
        if rounding is not None:
            same |= difference <= ROUNDING * rounding
    wrong = int((~same).sum())
    if wrong:
        raise _DiffersError(f"result {at}: {wrong} of {same.numel()} numbers differ")


def _require_small(region: RegionGraph, wide: bool) -> None:
    """Raises _NotRunError for a region that takes long, or memory that a step may need."""
    for node in region.gm.graph.nodes:
        if is_collective(node):
            raise _NotRunError(f"{node.name} talks to other ranks")
    kind = region.device.type if region.device.type in MAX_BYTES else "cpu"
    results = results_of(region.gm.graph)
    outputs = (result.meta.get("val") for result in results if isinstance(result, fx.Node))
    size = transient_bytes(region.gm) + sum(map(_bytes_of, (*region.example_inputs(), *outputs)))
    if size * (2 if wide else 1) > MAX_BYTES[kind]:
        raise _NotRunError(f"a run takes {size} bytes")
    flops = graph_cost(region.gm).flops
    if flops > MAX_FLOPS[kind]:
        raise _NotRunError(f"a run takes {flops:.2g} FLOPs")


def _bytes_of(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _prepared(region: RegionGraph, wide: bool) -> Run:
    """Returns ``region`` as a function, op by op; ``wide``: with float64 for shorter dtypes."""

    def widened(value: Any) -> Any:
        return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value

    return interpret(region.gm, widened if wide else None)


def _run_calls(tiling: RegionTiling, graphs: Mapping[str, Run], inputs: Sequence[Any]) -> list[Any]:
    """Returns the region's outputs, from calls of its parts on plain tensors, without a frame."""
    values: dict[str, Any] = {f"in{at}": value for at, value in enumerate(inputs)}
    layouts = {f"in{at}": layout for at, layout in enumerate(tiling.region.input_layouts())}
    for call in tiling.calls:
        inputs_of_call = [
            values[name] if read == layouts.get(name) else _in_layout(values[name], read)
            for name, read in zip(call.inputs, call.reads, strict=True)
        ]
        outputs = list(graphs[call.region](inputs_of_call))
        output_layouts = tiling.parts[call.region].output_layouts()
        for into in call.into:
            layout = output_layouts[into.output]
            assert layout is not None, f"{call.name}: output {into.output} is no tensor"
            at = into.offset_bytes // layout.item_bytes
            target = _in_layout(values[into.value], replace(layout, offset=at))
            outputs[into.output] = target.copy_(outputs[into.output])
        values.update(zip(call.outputs, outputs, strict=True))
        layouts.update(zip(call.outputs, output_layouts, strict=True))
    return [values[f"out{at}"] for at in range(len(results_of(tiling.region.gm.graph)))]


def _in_layout(value: Any, layout: Layout | None) -> Any:
    if layout is None:
        return value
    return value.as_strided(layout.size, layout.stride, value.storage_offset() + layout.offset)


def made_up_inputs(
    region: RegionGraph, *, wide: bool, positive: bool, nudge: int | None = None
) -> list[Any]:
    """Returns random tensors in the layouts of the region's inputs.

    Whole numbers are valid indices for whatever reads them; every last dimension of a mask allows
    its first entry. ``nudge`` is the seed of changes in the last digits of fractions.
    """
    generator = torch.Generator().manual_seed(0)
    nudges = None if nudge is None else torch.Generator().manual_seed(nudge)
    inputs = []
    for node in region.gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            raise _NotRunError(f"input {node.name} is no tensor but {type(value).__name__}")
        count = layout_elements(value)
        flat = _numbers(value, min(count, PERIOD), _index_bound(node), positive, generator)
        if wide:
            flat = flat.to(_WIDE.get(value.dtype, value.dtype))
        if nudges is not None and (flat.is_floating_point() or flat.is_complex()):
            flat = _nudged(flat, nudges)
        flat = flat.to(torch.device("cpu") if is_read_on_host(node) else value.device)
        if count > PERIOD:
            flat = flat.repeat(-(-count // PERIOD))
        tensor = flat.as_strided(value.shape, value.stride())
        if value.dtype is torch.bool and value.dim():
            tensor[..., 0] = True
        inputs.append(tensor)
    return inputs


def _numbers(
    value: torch.Tensor, count: int, bound: int, positive: bool, generator: torch.Generator
) -> torch.Tensor:
    """Returns ``count`` random numbers of the dtype of ``value``; whole ones below ``bound``."""
    if value.dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.7
    if not (value.is_floating_point() or value.is_complex()):
        return torch.randint(0, bound, (count,), generator=generator).to(value.dtype)
    wide = torch.complex128 if value.is_complex() else torch.float64
    numbers = torch.randn(count, generator=generator, dtype=wide) / 2
    return (numbers.abs() + 0.1 if positive else numbers).to(value.dtype)


def _nudged(flat: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns each number a little larger or smaller, by about its rounding."""
    signs = 2 * torch.randint(0, 2, flat.shape, generator=generator).to(flat.dtype) - 1
    return flat * (1 + 2 * torch.finfo(flat.dtype).eps * signs)


def _index_bound(node: fx.Node) -> int:
    """Returns the size of the smallest dimension that ``node`` is an index into; 2 if of none."""
    return max(min(_bounds(node, set()), default=2), 1)


def _bounds(node: fx.Node, seen: set[fx.Node]) -> Iterable[int]:
    """Yields the sizes of dimensions that ``node``, or integers made of it, index into."""
    if node in seen:
        return
    seen.add(node)
    for user in node.users:
        value = user.meta.get("val")
        if user.op != "call_function" or user.target is operator.getitem:
            continue
        bound = _bound_in(user, node)
        if bound is not None:
            yield bound
        elif isinstance(value, torch.Tensor) and not value.is_floating_point():
            yield from _bounds(user, seen)


def _bound_in(user: fx.Node, index: fx.Node) -> int | None:
    """Returns the size of the dimension that ``user`` indexes with ``index``; None: it does not."""
    name = op_name(user)
    if name == "embedding":
        return shape_of(user.args[0])[0] if user.args[1] is index else None  # type: ignore[arg-type]
    if name == "embedding_dense_backward":
        rows = argument(user, "num_weights")
        return int(rows) if user.args[1] is index else None
    if name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put"):
        positions = user.args[1]
        assert isinstance(positions, list | tuple)
        sizes = shape_of(user.args[0])  # type: ignore[arg-type]
        return next((sizes[at] for at, position in enumerate(positions) if position is index), None)
    if not isinstance(user.target, torch._ops.OpOverload) or argument(user, "index") is not index:
        return None
    table = shape_of(user.args[0])  # type: ignore[arg-type]
    return table[argument(user, "dim")] if table else 1
