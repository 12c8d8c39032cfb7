"""Compares, on numbers, a region that runs in slices of rows with the region that runs whole.

What makes slices is proposed by rules about operators (``analysis/row_rules.py``). This check knows
none of them. It runs the region on random tensors of its real shapes, whole and as the step program
would call its parts, and compares every result. Most wrong slices come from sizes that agree by
chance, so no dimension is made smaller. Only the rows are, where the whole is too large: then the
chain is compared for two rows against one row at a time.

Numbers are float64 where every kernel takes it, so that a difference is not rounding. Some results
are rounding all the same: what cancels to zero (the gradient of a bias that a softmax ignores), or
what jumps at a tie. The whole itself tells which, run again with inputs that differ in their last
digits: by as much as it changes then, its parts may differ too.
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

MAX_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}
"""Bytes of inputs, results and temporaries above which nothing is run: a step may need them."""

MAX_FLOPS = {"cpu": 4e9, "cuda": 4e12}
"""FLOPs above which nothing is run: half a second on a core or GPU, and each class runs twice."""

TOLERANCE = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 2e-3}
"""Results may differ by this share of their largest number: slices sum in another order."""

COARSE = 5e-2
"""``TOLERANCE`` of shorter types."""

NUDGES = 4
"""Runs of the whole with slightly other inputs, where its parts differ from it."""

ROUNDING = 8
"""Parts may differ by so many times what these runs do, since they sum in another order."""

PERIOD = 1_000_003
"""Random numbers are drawn on the host, which takes seconds for the weight of a large vocabulary: a
longer tensor repeats so many. It is a prime: rows that repeat lie a multiple of it apart."""

MAX_NOT_FINITE = 0.1
"""Share of a result that may be infinite or NaN. Where more is (made-up inputs have roots and
logarithms that are no numbers), a second run with positive inputs is compared as well."""

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


class Verdict(enum.Enum):
    """What a probe found."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A verdict, and the reason unless it is AGREES."""

    verdict: Verdict
    reason: str = ""


def believed(probe: Probe, *, differs: str, not_run: str) -> bool:
    """False where the probe DIFFERS. Says in the report that it does, or that nothing was run."""
    if probe.verdict is Verdict.DIFFERS:
        say_bug(differs, probe.reason)
    elif probe.verdict is Verdict.NOT_RUN:
        state.add_note(f"{not_run}: {probe.reason}")
    return probe.verdict is not Verdict.DIFFERS


class TilingProbes:
    """False for tiles that compute something else than their region, run on random numbers.

    Each distinct tiling is run once: a graph that is tried in several ways has most in common.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], bool] = {}

    def __call__(self, tiling: RegionTiling) -> bool:
        """Whether ``tiling`` may run; says where it may not, or was not compared."""
        graphs = [tiling.region.gm, *(part.gm for part in tiling.parts.values())]
        if any(graph.graph.find_nodes(op="get_attr") for graph in graphs):  # not in its content
            return _tiling_believed(tiling)
        key = (str(tiling.tiled.tiling), *map(content_of, graphs))
        if key not in self._known:
            self._known[key] = _tiling_believed(tiling)
        return self._known[key]


def _tiling_believed(tiling: RegionTiling) -> bool:
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
    """Whether the parts of a region in tiles, called in order, make what the region makes.

    First the whole is compared in float64. Where it is too large, or a kernel does not take
    float64, the chain alone is, two rows against one row at a time: it has no such kernels. Last
    comes the whole in its own types.
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
    """Whether ``part``, on the first rows of the inputs of ``whole``, makes its first rows.

    Rows lie in the dimension in which an input or a result is smaller in ``part``. ``num_parts``
    ranges of rows are compared, one after another.
    """
    assert num_parts >= 1, num_parts
    examples = part.example_inputs()

    def sliced(number: int, wide: bool) -> Run:
        run = _prepared(part, wide)
        return lambda inputs: run(
            [_narrowed(*pair, number) for pair in zip(inputs, examples, strict=True)]
        )

    for number in range(num_parts):
        probe = _compare(whole, functools.partial(sliced, number), number=number)
        if probe.verdict is not Verdict.AGREES:
            return probe
    return probe


def _narrowed(value: Any, like: Any, number: int) -> Any:
    """Range ``number`` of ``value``, each range in the shape of ``like``."""
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
    """Whole against parts, in float64 if its kernels take it, else in the region's own types."""
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
    whole = _prepared(region, wide)
    for positive in (False, True):
        make = functools.partial(made_up_inputs, region, wide=wide, positive=positive)
        inputs = make()
        try:
            expected = _seeded(whole, inputs)
        except Exception as error:  # kernels raise what they like: nothing can be compared
            raise _NotRunError(f"{type(error).__name__}: {_first_line(error)}") from error
        try:
            found = _seeded(parts, inputs)
        except _DiffersError:
            raise
        except torch.OutOfMemoryError as error:
            raise _NotRunError(_first_line(error)) from error
        except Exception as error:  # the whole runs: what its parts raise is their fault
            raise _DiffersError(
                f"the parts raise {type(error).__name__}: {_first_line(error)}"
            ) from error
        try:
            _require_all_close(expected, found, number)
        except _DiffersError:
            _require_all_close(expected, found, number, _rounding(whole, make, expected))
        if all(_is_mostly_finite(value) for value in expected):
            return


def _rounding(
    whole: Run, make: Callable[..., list[Any]], expected: Sequence[Any]
) -> list[torch.Tensor | None]:
    """How far each number of a result moves with the last digits of the inputs, or most do.

    A number may stay in place by chance; one that jumps says nothing of others. None: of no
    fractions, and of those whose bound is as coarse as their last digits.
    """
    moved = [_moved(value, value) for value in expected]
    try:
        for seed in range(1, NUDGES + 1):
            for at, value in enumerate(_seeded(whole, make(nudge=seed))):
                before, now = moved[at], _moved(expected[at], value)
                moved[at] = None if before is None or now is None else before.maximum(now)
    except torch.OutOfMemoryError as error:
        raise _NotRunError(_first_line(error)) from error
    return [move if move is None else move.maximum(move.median()) for move in moved]


def _moved(value: Any, other: Any) -> torch.Tensor | None:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    if value.dtype not in TOLERANCE:  # no fraction, or one whose last digits are as coarse
        return None
    return (other - value).abs().nan_to_num(0)


def _seeded(run: Run, inputs: Sequence[Any]) -> Sequence[Any]:
    """Results with fresh random states; nothing that is compared writes into its inputs."""
    torch.manual_seed(0)
    return run(list(inputs))


def _like(whole: Any, part: Any, number: int) -> Any:
    if isinstance(whole, torch.Tensor) and isinstance(part, torch.Tensor):
        if whole.dim() != part.dim():
            raise _DiffersError(f"shapes {tuple(whole.shape)} and {tuple(part.shape)}")
        return _narrowed(whole, part, number)
    return whole


def _is_mostly_finite(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return True
    return bool((~value.isfinite()).double().mean() <= MAX_NOT_FINITE)


def _require_all_close(
    expected: Sequence[Any],
    found: Sequence[Any],
    number: int,
    rounding: Sequence[torch.Tensor | None] = (),
) -> None:
    """Raises _DiffersError for the first result that is another, by more than its ``rounding``."""
    bounds = rounding or [None] * len(expected)
    for at, (whole, part, bound) in enumerate(zip(expected, found, bounds, strict=True)):
        _require_close(at, _like(whole, part, number), part, _like(bound, part, number))


def _require_close(at: int, expected: Any, found: Any, rounding: torch.Tensor | None) -> None:
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        if expected is not found and expected != found:
            raise _DiffersError(f"result {at}: {found} for {expected}")
        return
    same = expected == found
    if expected.is_floating_point() or expected.is_complex():
        same |= expected.isnan() & found.isnan()
        finite = expected[expected.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        difference = (expected - found).abs()
        same |= difference <= TOLERANCE.get(expected.dtype, COARSE) * scale
        if rounding is not None:
            same |= difference <= ROUNDING * rounding
    wrong = int((~same).sum())
    if wrong:
        raise _DiffersError(f"result {at}: {wrong} of {same.numel()} numbers differ")


def _require_small(region: RegionGraph, wide: bool) -> None:
    """Refuse what would take long, or memory that a step may need."""
    for node in region.gm.graph.nodes:
        if is_collective(node):
            raise _NotRunError(f"{node.name} talks to other ranks")
    kind = region.device.type if region.device.type in MAX_BYTES else "cpu"
    results = results_of(region.gm.graph)
    made = (result.meta.get("val") for result in results if isinstance(result, fx.Node))
    size = transient_bytes(region.gm) + sum(map(_bytes_of, (*region.example_inputs(), *made)))
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
    """``region`` op by op; ``wide``: with float64 for every shorter type."""

    def widened(value: Any) -> Any:
        return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value

    return interpret(region.gm, widened if wide else None)


def _run_calls(tiling: RegionTiling, graphs: Mapping[str, Run], inputs: Sequence[Any]) -> list[Any]:
    """The region's outputs, made by calls of its parts on plain tensors, without a frame."""
    values: dict[str, Any] = {f"in{at}": value for at, value in enumerate(inputs)}
    layouts = {f"in{at}": layout for at, layout in enumerate(tiling.region.input_layouts())}
    for call in tiling.calls:
        given = [
            values[name] if read == layouts.get(name) else _seen(values[name], read)
            for name, read in zip(call.inputs, call.reads, strict=True)
        ]
        made = list(graphs[call.region](given))
        made_as = tiling.parts[call.region].output_layouts()
        for into in call.into:
            layout = made_as[into.output]
            assert layout is not None, f"{call.name}: output {into.output} is no tensor"
            at = into.offset_bytes // layout.item_bytes
            target = _seen(values[into.value], replace(layout, offset=at))
            made[into.output] = target.copy_(made[into.output])
        values.update(zip(call.outputs, made, strict=True))
        layouts.update(zip(call.outputs, made_as, strict=True))
    return [values[f"out{at}"] for at in range(len(results_of(tiling.region.gm.graph)))]


def _seen(value: Any, layout: Layout | None) -> Any:
    if layout is None:
        return value
    return value.as_strided(layout.size, layout.stride, value.storage_offset() + layout.offset)


def made_up_inputs(
    region: RegionGraph, *, wide: bool, positive: bool, nudge: int | None = None
) -> list[Any]:
    """Random tensors in the layouts of the region's inputs.

    Whole numbers are valid indices for whatever reads them; every last dimension of a mask allows
    its first entry. ``nudge``: the seed by which fractions are changed in their last digits.
    """
    generator = torch.Generator().manual_seed(0)
    changes = None if nudge is None else torch.Generator().manual_seed(nudge)
    made = []
    for node in region.gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            raise _NotRunError(f"input {node.name} is no tensor but {type(value).__name__}")
        count = layout_elements(value)
        some = _numbers(value, min(count, PERIOD), _index_bound(node), positive, generator)
        if wide:
            some = some.to(_WIDE.get(value.dtype, value.dtype))
        if changes is not None and (some.is_floating_point() or some.is_complex()):
            some = _nudged(some, changes)
        device = torch.device("cpu") if is_read_on_host(node) else value.device
        flat = some.to(device)
        if count > PERIOD:
            flat = flat.repeat(-(-count // PERIOD))
        tensor = flat.as_strided(value.shape, value.stride())
        if value.dtype is torch.bool and value.dim():
            tensor[..., 0] = True
        made.append(tensor)
    return made


def _numbers(
    value: torch.Tensor, count: int, bound: int, positive: bool, generator: torch.Generator
) -> torch.Tensor:
    if value.dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.7
    if not (value.is_floating_point() or value.is_complex()):
        return torch.randint(0, bound, (count,), generator=generator).to(value.dtype)
    wide = torch.complex128 if value.is_complex() else torch.float64
    numbers = torch.randn(count, generator=generator, dtype=wide) / 2
    return (numbers.abs() + 0.1 if positive else numbers).to(value.dtype)


def _nudged(flat: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each number a little larger or smaller, by about its rounding."""
    signs = 2 * torch.randint(0, 2, flat.shape, generator=generator).to(flat.dtype) - 1
    return flat * (1 + 2 * torch.finfo(flat.dtype).eps * signs)


def _index_bound(node: fx.Node) -> int:
    """The fewest entries of any dimension that ``node`` is an index into; 2 if of none."""
    return max(min(_bounds(node, set()), default=2), 1)


def _bounds(node: fx.Node, seen: set[fx.Node]) -> Iterable[int]:
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
    """Entries of the dimension that ``user`` indexes with ``index``; None if it does not."""
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
