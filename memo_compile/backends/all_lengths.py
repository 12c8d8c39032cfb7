"""Takes a graph of changing sizes through AOTAutograd once, with its sizes as symbols.

AOTAutograd's trace of forward and backward takes most of a compilation's time. So it is made once,
with a shape environment of its own. The joint graph is kept. AOTAutograd gets *hollow* halves, with
inputs and results and nothing between, and what it makes to run around them serves all sizes for
which its assumptions hold. For a concrete length the joint graph with numbers in place of symbols
goes on as a captured step (``capture``). When the graph runs, its sizes select the step.

Where two lengths were cut alike, later ones of their size, and of sizes between, are not cut out of
the joint graph again: they get the first's cut with other numbers (``cut_template``). Where torch
cannot trace with symbols, or takes one for a constant, each length is traced by itself.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from memo_runtime import ops
from memo_runtime.leases import leases
from torch import fx

from memo_compile.analysis.joint_units import is_tangent
from memo_compile.analysis.views import is_tensor, results_of
from memo_compile.backends.made_inputs import not_a_leaf
from memo_compile.config import MemoConfig
from memo_compile.driver.stages import CutStep
from memo_compile.errors import Infeasible, RuntimeMisuse, UnsupportedGraph, described
from memo_compile.lowering.varying_sizes import SMALLEST, foreseeing
from memo_compile.passes.at_numbers import SymbolicJoint
from memo_compile.passes.cut import Cut
from memo_compile.passes.cut_template import CutTemplate, OtherSizes, is_same
from memo_compile.passes.equal_cut import Chosen
from memo_compile.passes.lease import HANDLE
from memo_compile.passes.numbers import OPEN_NUMBERS, ReadOpenNumbers
from memo_compile.reporting import state
from memo_compile.torch_private import autograd, fx_graphs, inductor_api
from memo_compile.torch_private.symbols import (
    SizeSymbols,
    expression_of,
    known_metadata,
    metadata_of_inputs,
    note_metadata,
)

if TYPE_CHECKING:
    from memo_compile.backends.capture import StepCapture

log = logging.getLogger("memo")

MAX_TRACES = 3
"""Most traces of a graph with symbols: each has assumptions of its own."""

MAX_CUTS = 8
"""Most ways to cut a graph that are kept; the oldest goes."""

LENGTHS = "memo_lengths"
"""Key of ``AllLengths.compiled``, for some sizes, in the ``meta`` of a graph with these numbers."""


@dataclass(eq=False, kw_only=True)
class AllLengths:
    """A Dynamo graph with symbols, and its traces."""

    gm: fx.GraphModule
    positions: tuple[int, ...]
    """Inputs that are sizes."""
    _traces: list["_Traced"] = field(default_factory=list)
    _refused: bool = False
    """Torch could not trace it with symbols, which is not tried again."""

    def compiled(
        self, numbers: tuple[int, ...], capture: "StepCapture", inputs: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """Returns what runs the graph for ``numbers``, its step captured by ``capture``.

        It takes the graph's ``inputs`` without the sizes. None: no trace serves these numbers.
        """
        if any(n < SMALLEST for n in numbers):
            return None
        try:
            for traced in self._traces:
                if not traced.symbols.admits(*numbers):
                    continue
                if traced.needless_masks != capture.needless_masks:
                    continue
                if not traced.takes(inputs, numbers):  # nor would another trace
                    return None
                if (run := traced.compiled(capture, numbers)) is not None:
                    return run
            return self._first(capture, numbers, inputs)
        except UnsupportedGraph as error:
            log.info("memo: sizes %s are traced by themselves: %s", numbers, error)
            return None

    def _first(
        self, capture: "StepCapture", numbers: tuple[int, ...], inputs: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """As ``compiled``, by a new trace."""
        if self._refused or len(self._traces) == MAX_TRACES:
            return None
        try:
            traced = _Traced(self.gm, self.positions, capture, numbers, inputs)
        except Exception as error:  # of torch with symbols: each length is traced by itself
            self._refused = True
            note = f"a graph is traced anew for each length: {described(error)}"
            if OPEN_NUMBERS not in self.gm.meta and state.add_note(note):
                log.info("memo: %s", note)
            return None
        self._traces.append(traced)
        return traced.compiled(capture, numbers)


@dataclass(eq=False, kw_only=True)
class _Step:
    """The compiled step of one length."""

    num_results: int
    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]
    capture: "StepCapture"
    """Kept alive: with it the step's memory goes."""


def _size_class(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the class of ``numbers``: those of a class differ by less than a factor of two."""
    return tuple(number.bit_length() for number in numbers)


@dataclass(eq=False, kw_only=True)
class KnownCut:
    """A step that was cut out of a joint graph at some sizes, and may serve others.

    It serves sizes between two that were cut alike: then no number is right by chance at one size
    only, and decisions by bytes were equal at both, and so between.
    """

    config: MemoConfig
    cut: CutStep
    halves: tuple[CutTemplate, CutTemplate]
    classes: set[tuple[int, ...]]
    """Size classes in which a length was cut out of the joint graph, with an equal result."""
    is_compared: bool = False
    """True once that was another length than its own."""

    @classmethod
    def of(
        cls, cut: CutStep, config: MemoConfig, joint: SymbolicJoint, numbers: tuple[int, ...]
    ) -> "KnownCut":
        """Returns ``cut``, made at ``numbers``. Raises UnsupportedGraph: it has more than calls."""

        def template(half: Cut) -> CutTemplate:
            return CutTemplate(cut=half, symbols=joint.symbols, fakes=joint.fakes, numbers=numbers)

        halves = (template(cut.forward), template(cut.backward))
        return cls(config=config, cut=cut, halves=halves, classes={_size_class(numbers)})

    def serves(self, numbers: tuple[int, ...]) -> bool:
        """True for sizes between those that were cut alike."""
        size_class = _size_class(numbers)

        def is_ordered(smaller: tuple[int, ...], larger: tuple[int, ...]) -> bool:
            return all(n <= m for n, m in zip(smaller, larger, strict=True))

        return (
            self.is_compared
            and any(is_ordered(other, size_class) for other in self.classes)
            and any(is_ordered(size_class, other) for other in self.classes)
        )

    def at(self, numbers: tuple[int, ...]) -> CutStep:
        """Returns the step at ``numbers``."""
        forward, backward = (half.at(numbers) for half in self.halves)
        return replace(self.cut, forward=forward, backward=backward)

    def compare(self, cut: CutStep, numbers: tuple[int, ...]) -> bool:
        """True where ``cut``, made at ``numbers``, equals this one there; then this serves them."""
        same = self.at(numbers)
        if not (is_same(same.forward, cut.forward) and is_same(same.backward, cut.backward)):
            return False
        self.classes.add(_size_class(numbers))
        self.is_compared = True
        return True


class _Traced:
    """One trace of a graph with symbols, and the captured step of each length."""

    def __init__(
        self,
        gm: fx.GraphModule,
        positions: tuple[int, ...],
        capture: "StepCapture",
        numbers: tuple[int, ...],
        inputs: Sequence[Any],
    ) -> None:
        """Traces ``gm``. Raises torch's errors; UnsupportedGraph: it would serve no other sizes."""
        self._positions, self._capture, self._numbers = positions, capture, numbers
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        self._open = tuple(map(names.index, gm.meta.get(OPEN_NUMBERS, ())))
        self.needless_masks = capture.needless_masks
        """Differ between lengths: one within an attention window needs no mask."""
        self.symbols, self._known = _symbols_of(gm, positions, numbers)
        self._layouts: dict[int, tuple[list[Any], list[Any], Any]] = {}
        """Input -> its sizes, strides and storage offset, where there are symbols in them."""
        self._steps: weakref.WeakValueDictionary[tuple[int, ...], _Step] = (
            weakref.WeakValueDictionary()
        )
        self._joint: SymbolicJoint | None = None
        self._kept: list[str] = []
        """Tensors that autograd keeps beside the handle, by names in the joint graph."""
        self._settings: dict[str, Any] = {}
        """The partitioner's keywords, with positions among the inputs that are no sizes."""
        self._static: tuple[int, ...] = ()
        """Inputs that Inductor takes for parameters and buffers."""
        self._written: list[int] = []
        """Inputs that the graph writes into, by position among those that are no sizes."""
        self._metadata: Any = None
        """AOTAutograd's, of the whole graph."""
        self._chosen: dict[tuple[int, ...], Chosen] = {}
        """Size class -> what torch's partitioner saves."""
        self._cuts: list[KnownCut] = []
        self._halves_at_first: tuple[fx.GraphModule, fx.GraphModule] | None = None
        fakes = self._fakes(gm, inputs)
        with self.symbols.tracing(), capture.settings(self._partition):
            graph = capture.prepared(gm)
            self._run = inductor_api.compile_fx(graph, fakes, inner_compile=self._inner)
        del self._capture
        if self._joint is None or self._metadata is None:
            raise UnsupportedGraph("it was not captured whole")
        if not self.symbols.admits(*numbers):
            raise UnsupportedGraph("torch takes a size for a constant")
        infos = enumerate(self._metadata.input_info)
        written = [at for at, info in infos if info.mutates_data or info.mutates_metadata]
        if not self._layouts.keys().isdisjoint(written):
            raise UnsupportedGraph("it writes into an input whose size varies")
        self._written = [self._position(at) for at in written]
        if not self.takes(inputs, numbers):
            raise UnsupportedGraph("its inputs do not lie as Dynamo says, or share memory")

    def _fakes(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Returns an input for each placeholder, with symbols in the sizes that vary."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        examples = [node.meta["example_value"] for node in placeholders]
        remaining = iter(inputs)
        return [
            self.symbols.values[self._positions.index(at)]
            if at in self._positions
            else self._fake(at, example, next(remaining))
            for at, example in enumerate(examples)
        ]

    def _fake(self, at: int, example: Any, given: Any) -> Any:
        """Returns the input ``given`` as a fake, with the symbols of Dynamo's ``example``.

        Raises UnsupportedGraph: it is of a kind that is traced at each length.
        """
        if not isinstance(given, torch.Tensor):
            return given
        numbers = [*example.shape, *example.stride()]
        if all(isinstance(number, int) for number in numbers):
            with self.symbols.mode:
                return self.symbols.mode.from_tensor(given, static_shapes=True)
        layout = ([*example.shape], [*example.stride()], [example.storage_offset()])
        try:
            size, stride, (start,) = (
                [self.symbols.like(number, self._known) for number in part] for part in layout
            )
        except KeyError:
            raise UnsupportedGraph("an input's layout depends on what is no input") from None
        is_part = not isinstance(start, int) or start > 0
        if type(given) is not torch.Tensor or (is_part and given.requires_grad):
            raise UnsupportedGraph("an input whose size varies is no plain tensor")
        self._layouts[at] = (size, stride, start)
        with self.symbols.mode, torch.enable_grad():
            if is_part:
                last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
                whole = torch.empty(start + last + 1, dtype=given.dtype, device=given.device)
                return whole.as_strided(size, stride, start)
            make = functools.partial(
                torch.empty_strided, size, stride, dtype=given.dtype, device=given.device
            )
            return make().requires_grad_(given.requires_grad) if given.is_leaf else not_a_leaf(make)

    def _position(self, at: int) -> int:
        """Returns the position of input ``at`` among those that are no sizes."""
        return at - sum(position < at for position in self._positions)

    def takes(self, inputs: Sequence[Any], numbers: tuple[int, ...]) -> bool:
        """True where the inputs have the layouts of the trace at ``numbers``."""
        number = self.symbols.at(numbers)
        for at, (size, stride, start) in self._layouts.items():
            value = inputs[self._position(at)]
            layout = ([*value.shape], [*value.stride()], value.storage_offset())
            if layout != ([*map(number, size)], [*map(number, stride)], number(start)):
                return False
        return not shared_memory(inputs, self._written)

    def compiled(
        self, capture: "StepCapture", numbers: tuple[int, ...]
    ) -> Callable[..., Any] | None:
        """Returns what runs the graph for ``numbers``; None: autograd would keep other tensors."""
        metadata = metadata_of_inputs(self._metadata, self._positions)
        note_metadata(metadata)
        assert self._joint is not None, "it was traced"
        with self._joint.fakes.tracing(metadata):
            step = self._from_known_cut(capture, numbers) or self._cut_anew(capture, numbers)
        if step is None:
            return None

        def run(*args: Any) -> Any:
            self._steps[numbers] = step  # another may have been compiled for them
            all_args = list(args)
            for at, number in zip(self._positions, numbers, strict=True):
                all_args.insert(at, number)
            return self._run(*all_args)

        return run

    def _cut_anew(self, capture: "StepCapture", numbers: tuple[int, ...]) -> "_Step | None":
        """Cuts the step for ``numbers`` out of the joint graph."""
        first, self._halves_at_first = self._halves_at_first, None
        forward, backward = first or self._halves(capture, numbers)
        if _kept(forward, capture.num_results) != self._kept:
            return None
        static = tuple(map(self._position, self._static))
        assert self._joint is not None, "it was traced"
        sizes = [number for size, _, _ in self._layouts.values() for number in size]
        with foreseeing(OtherSizes.of(self.symbols, self._joint.fakes, numbers, sizes)):
            run_forward = capture.inner(forward, _examples(forward), static_input_idxs=static)
            run_backward = capture.inner(backward, _examples(backward), is_backward=True)
        step = _Step(
            num_results=capture.num_results,
            forward=run_forward,
            backward=run_backward,
            capture=capture,
        )
        if capture.assembly is not None and not capture.numbers:  # which are of these sizes
            self._learn(capture.config, capture.assembly.lowered.cut, numbers)
        return step

    def _from_known_cut(self, capture: "StepCapture", numbers: tuple[int, ...]) -> "_Step | None":
        """Returns the step for ``numbers`` by a cut of other sizes; None: no cut serves them."""
        cuts = [each for each in self._cuts if each.config == capture.config]
        same_class = [each for each in cuts if _size_class(numbers) in each.classes]
        num_results = self._settings["num_fwd_outputs"]
        for known_cut in same_class or cuts:
            if not known_cut.serves(numbers):
                continue
            try:
                cut = known_cut.at(numbers)
            except Exception as error:  # then it is cut anew
                log.info("memo: sizes %s are cut anew: %s", numbers, described(error))
                continue
            names, ties_inputs = cut.facts.static_names, cut.facts.ties_inputs
            try:
                halves = capture.cut_before(cut, num_results, names, ties_inputs=ties_inputs)
            except Infeasible:  # what is saved depends on sizes: cut anew it may fit
                continue
            forward, backward = halves
            return _Step(
                num_results=num_results, forward=forward, backward=backward, capture=capture
            )
        return None

    def _learn(self, config: MemoConfig, cut: CutStep, numbers: tuple[int, ...]) -> None:
        """Keeps a cut of the joint graph, so that other sizes need not be cut anew."""
        assert self._joint is not None, "it was traced"
        try:
            for known_cut in self._cuts:
                if known_cut.config == config and known_cut.compare(cut, numbers):
                    return
            new_cut = KnownCut.of(cut, config, self._joint, numbers)
            self._cuts[:] = [*self._cuts, new_cut][-MAX_CUTS:]
        except Exception as error:  # then every length is cut anew
            log.info("memo: each length is cut anew: %s", described(error))

    def _halves(
        self, capture: "StepCapture", numbers: tuple[int, ...]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Returns the halves for ``numbers``, cut so that lengths of one class save the same."""
        joint = self._joint
        assert joint is not None, "it was traced"
        by_name = dict(zip((node.name for node in joint.sizes), numbers, strict=True))
        gm = capture.runner.derive(
            "numbers",
            joint.gm,
            lambda: joint.at(by_name, numbers),
            stage="joint",
            graphs=lambda graph: {"joint": graph},
        )
        capture.chosen = self._chosen.setdefault(_size_class(numbers), {})
        return capture.partition(gm, joint.inputs_of(gm), **self._settings)

    def _partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **settings: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Returns hollow halves, with the tensors that autograd keeps at the first length."""
        if self._open:
            read = ReadOpenNumbers(positions=self._open)
            joint = self._capture.runner.run(joint, [read], stage="joint")
        self._settings = {"num_fwd_outputs": num_fwd_outputs, **settings}
        static = settings.get("static_lifetime_input_indices")
        if static is not None:
            positions = [self._position(at) for at in static if at not in self._positions]
            self._settings["static_lifetime_input_indices"] = positions
        self._joint = SymbolicJoint(
            gm=fx_graphs.copied(joint), symbols=self.symbols, num_fwd_outputs=num_fwd_outputs
        )
        inputs = self._joint.gm.graph.find_nodes(op="placeholder")
        sizes = [at for at, node in enumerate(inputs) if node in self._joint.sizes]
        if tuple(sizes) != self._positions:
            raise UnsupportedGraph("AOTAutograd gives it other inputs")
        with self._joint.fakes.tracing(None):
            self._halves_at_first = self._halves(self._capture, self._numbers)
        forward, _ = self._halves_at_first
        self._kept = _kept(forward, num_fwd_outputs)
        halves = _hollow(self._joint, forward, self._kept)
        self._capture.refuse_compiled_autograd(halves[1])
        return halves

    def _inner(self, gm: fx.GraphModule, examples: Sequence[Any], **kwargs: Any) -> Any:
        """Returns for each hollow half a function that picks the step of the length that runs."""
        if self._joint is None or kwargs.get("is_inference"):
            raise UnsupportedGraph("it is inference")
        if kwargs.get("is_backward"):
            autograd.allow_second_backward()
            return _boxed(self._backward)
        static = kwargs.get("static_input_idxs", ())
        self._static = tuple(at for at in static if at not in self._positions)
        self._metadata = known_metadata()
        return _boxed(self._forward)

    def _forward(self, args: list[Any]) -> list[Any]:
        """Runs the forward for the sizes in ``args``, which autograd keeps for the backward."""
        numbers = tuple(int(args[at]) for at in self._positions)
        inputs = [value for at, value in enumerate(args) if at not in self._positions]
        args.clear()
        step = self._steps[numbers]
        results = list(step.forward(inputs))
        lease = leases.find(results[step.num_results + len(self._kept)])
        if lease is not None:
            lease.owner = step
        return [*results, *numbers]

    def _backward(self, args: list[Any]) -> list[Any]:
        """Runs the backward of the step that the lease names, even where its plan has gone."""
        first = len(self._positions)
        numbers, inputs = tuple(map(int, args[:first])), args[first:]
        args.clear()
        lease = leases.find(inputs[len(self._kept)])
        step = self._steps.get(numbers) if lease is None else lease.owner
        del lease
        if step is None:
            raise RuntimeMisuse(
                f"the plan for sizes {numbers} is gone, and its step has ended; raise max_plans"
            )
        results = list(step.backward(inputs))
        for at in self._positions:  # a size has no gradient
            results.insert(at, None)
        return results


def _symbols_of(
    gm: fx.GraphModule, positions: Sequence[int], numbers: Sequence[int]
) -> tuple[SizeSymbols, dict[Any, int]]:
    """Returns the sizes among a Dynamo graph's inputs, and the position of each symbol among them.

    Raises UnsupportedGraph: an input is a number that is no function of sizes.
    """
    examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    expressions = [expression_of(examples[at]) for at in positions]
    positions_of: dict[Any, int] = {}
    for position, expression in enumerate(expressions):
        if expression.is_Symbol:
            positions_of.setdefault(expression, position)
    try:
        return SizeSymbols(numbers, expressions), positions_of
    except KeyError:
        raise UnsupportedGraph("a size among its inputs depends on what is no input") from None


def _boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def boxed(args: list[Any]) -> Any:
        return run(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _examples(half: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in half.graph.find_nodes(op="placeholder")]


def _kept(forward: fx.GraphModule, num_results: int) -> list[str]:
    """Returns the names of the tensors that autograd keeps of a forward, up to the handle.

    Raises UnsupportedGraph: it keeps more than tensors that it checks for writes.
    """
    saved = results_of(forward.graph)[num_results:]
    *kept, handle = saved
    unchecked = [node.meta.get("saved_tensor_with_no_vc_check", False) for node in kept]
    if not all(map(is_tensor, kept)) or any(unchecked) or handle.target is not ops.lease:
        raise UnsupportedGraph("autograd keeps what memo does not know")
    return [node.name for node in kept]


def _hollow(
    joint: SymbolicJoint, forward: fx.GraphModule, kept: Sequence[str]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns forward and backward of ``joint`` with inputs and results and nothing between.

    Rewrite:
        joint: (n, x, w, t) -> loss, None, None, grad_w
            -> forward: (n, x, w) -> loss, x, w, handle, n
               backward: (n, x, w, handle, t) -> None, None, grad_w
    """
    nodes = {node.name: node for node in joint.gm.graph.nodes}
    if not nodes.keys() >= set(kept):
        raise UnsupportedGraph("autograd keeps what the symbolic graph does not have")
    handle = results_of(forward.graph)[-1]
    results, first = results_of(joint.gm.graph), joint.num_fwd_outputs
    inputs = joint.gm.graph.find_nodes(op="placeholder")
    primals = [node for node in inputs if not is_tangent(node)]
    tangents = [node for node in inputs if is_tangent(node)]
    ends = [*results[:first], *(nodes[name] for name in kept), handle, *joint.sizes]
    starts = [*joint.sizes, *(nodes[name] for name in kept), handle, *tangents]
    return _between(joint.gm, primals, ends), _between(joint.gm, starts, results[first:])


def _between(
    owner: fx.GraphModule, inputs: Sequence[fx.Node], results: Sequence[Any]
) -> fx.GraphModule:
    """Returns a hollow graph from ``inputs`` to ``results``, like the nodes of these names."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        name = HANDLE if node.target is ops.lease else node.name
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta)
    for node in results:
        if isinstance(node, fx.Node) and node not in copies:
            copies[node] = graph.call_function(_hollow_value, ())
            copies[node].meta = dict(node.meta)
    graph.output(tuple(copies[n] if isinstance(n, fx.Node) else None for n in results))
    return fx_graphs.graph_module(owner, graph)


def _hollow_value() -> Any:
    """Stands for a value of a half that each length's own step makes."""
    raise AssertionError("the halves of all lengths are hollow; those of one length run")


def shared_memory(inputs: Sequence[Any], written: Collection[int]) -> tuple[str, ...]:
    """Describes how inputs share memory that the graph writes; empty: they do not.

    AOTAutograd compiles for exactly that, and relies on Dynamo's guards to notice another way.
    """
    if not written:
        return ()
    return tuple(
        f"{at} {_place(inputs[at])}"
        for group in autograd.sharing_storage(inputs)
        if not set(written).isdisjoint(group)
        for at in group
    )


def _place(value: torch.Tensor) -> str:
    """Describes where ``value`` lies in its storage, and what it is a view of."""
    base = value if value._base is None else value._base
    num_bytes = value.untyped_storage().nbytes()
    return f"at {value.storage_offset()} of {num_bytes} B, {tuple(base.shape)} by {base.stride()}"
