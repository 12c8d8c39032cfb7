"""Captures a training step between AOTAutograd and memo's stages: partitioner and inner compiler.

``compile_fx`` calls the partitioner with the joint graph, then the inner compiler with the forward
and with the backward. When both halves are there, the step goes to ``finish``, the stages of the
caller.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Never

import torch
from memo_runtime.handle import NUM_BITS, plain_handle, under_hooks, watch_handles
from memo_runtime.operator_modes import hidden_from_modes
from torch import fx

from memo_compile.analysis.joint_units import JointUnits, saved_nodes, tag_saved, tag_units
from memo_compile.analysis.masks import large_masks
from memo_compile.analysis.position_masks import Allowed
from memo_compile.analysis.purity import gives_other_memory, ties_inputs
from memo_compile.analysis.views import results_of
from memo_compile.backends.all_lengths import LENGTHS
from memo_compile.backends.capture_memory import CaptureMemory, Recalled, memory_of
from memo_compile.config import MemoConfig
from memo_compile.driver.assemble import Assembly
from memo_compile.driver.early_gradients import Gating
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.part import StepPart
from memo_compile.driver.stages import CapturedStep, CutStep
from memo_compile.errors import (
    MemoError,
    NumberNeeded,
    RuntimeMisuse,
    UnsupportedGraph,
    UntraceableGraph,
    described,
)
from memo_compile.lowering.lower import plain_inner
from memo_compile.passes.cse import MergeCommonSubexpressions
from memo_compile.passes.effect_tokens import num_tokens, without_tokens
from memo_compile.passes.equal_cut import Chosen, EqualCut, SaveMinCut, SufficientCut, dropped_sizes
from memo_compile.passes.gather_once import GatherOnce
from memo_compile.passes.hoist import HoistInvariants
from memo_compile.passes.keep_jumps import KeepJumps
from memo_compile.passes.lease import FetchLeased, LeaseSaved, leased_names
from memo_compile.passes.loss_gradient import GradientOfLoss
from memo_compile.passes.needless_masks import NeedlessMasks, needless_masks
from memo_compile.passes.numbers import OPEN_NUMBERS
from memo_compile.passes.order import selection
from memo_compile.passes.overwritten import KeepOverwritten
from memo_compile.passes.own_inputs import OwnInputs, inputs_of, with_history, written_between
from memo_compile.passes.retarget import Retarget
from memo_compile.passes.runner import PassRunner
from memo_compile.passes.slice_first import SliceFirst
from memo_compile.passes.store_float8 import FLOAT8_NAME, ReadFloat8, StoreFloat8, stored_values
from memo_compile.passes.traced_collectives import TracedCollectives
from memo_compile.reporting import state
from memo_compile.torch_private import autograd, compile_caches, dynamo, fx_graphs, inductor_api
from memo_compile.torch_private.compile_caches import Half
from memo_compile.torch_private.partitioner import (
    Partitioner,
    activation_memory_budget,
    extract_halves,
    reordering_to_mimic_autograd_engine,
)
from memo_compile.units import format_bytes

COMPILED_AUTOGRAD = (
    "compiled autograd traces the backward itself, which memo has planned; set "
    "torch._dynamo.config.compiled_autograd = False, with DistributedDataParallel also "
    "torch._dynamo.config.optimize_ddp = False in place of 'python_reducer', or use another backend"
)

BATCHED = (
    "a planned backward runs with one gradient at a time: call torch.autograd.grad without "
    "is_grads_batched, once for each, with retain_graph=True"
)

TIED_INPUTS = (
    "the gradients of a graph reach autograd when its backward has ended, not before: it writes "
    "into an input that needs a gradient, or gives back a view of one"
)

_graph_numbers = itertools.count()


def next_graph_name() -> str:
    """Returns the name of the next captured graph: ``graph0``, ``graph1``, ..."""
    return f"graph{next(_graph_numbers)}"


Finish = Callable[[CapturedStep | CutStep], Assembly | None]
"""Takes a step through the stages; returns None where it is not going to run."""


@dataclass(eq=False)
class StepCapture:
    """Captures one Dynamo graph, and hands its training step to ``finish``."""

    config: MemoConfig
    facts: GraphFacts
    name: str
    finish: Finish
    is_run: bool = True
    """False for a plan only: nothing is compiled then."""
    assembly: Assembly | None = None
    """Runs the step, once ``finish`` has made it."""
    steps: StepPart | None = None
    """The steps of ``assembly``, by themselves or as members of joint steps."""
    needless_masks: Mapping[str, Allowed] = field(default_factory=dict)
    """Name of an attention call -> what its mask, made of positions alone, allows."""
    chosen: Chosen | None = None
    """Names of nodes that were saved at other sizes, to save the same again."""
    _finished: bool = False
    """True once both halves were captured and ``finish`` has returned."""
    _units: JointUnits | None = None
    """None before the partitioner has seen a step that trains."""
    num_results: int = 0
    """How many results the forward has; after them it returns the tensors that autograd saves."""
    _own_results: tuple[int, ...] = ()
    _droppable: tuple[int, ...] = ()
    numbers: dict[int, float] = field(default_factory=dict)
    """The forward's results that are no tensors, by position: sizes."""
    _made_outside: tuple[int, ...] = ()
    """Positions of inputs that other differentiable code made."""
    _written_between: tuple[int, ...] = ()
    """Positions of inputs that the program may write between the halves."""
    _num_examples: int = 0
    _ties_inputs: bool = False
    """As of ``purity.ties_inputs``."""
    _forward: fx.GraphModule | None = None
    _joint: tuple[fx.GraphModule, Any, dict[str, Any]] | None = None
    """The partitioner's arguments, where nothing is going to run."""
    _memory: CaptureMemory | None = None
    """Keeps the capture for later processes; None: it cannot be kept."""
    _notes: list[str] = field(default_factory=list)
    """Notes of the report that the partitioner made."""
    _is_asked: bool = False
    """True once torch has asked for a partition or for code."""

    def __post_init__(self) -> None:
        dump = Path(self.config.dump) / self.name if self.config.dump else None
        self.runner = PassRunner(dump, selection(self.config.passes))

    def run(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a copy of ``gm`` through AOTAutograd; returns what runs it.

        Raises UnsupportedGraph: a step that trains was not captured whole. NumberNeeded: it cannot
        be compiled for all values of its open integers.
        """
        self._made_outside, self._num_examples = with_history(examples), len(examples)
        self._written_between = written_between(examples)
        if not (self.config.exact or self.runner.skips(NeedlessMasks.name)):
            self.needless_masks = needless_masks(gm)
        at_sizes = gm.meta.get(LENGTHS)
        compiled = None if at_sizes is None else at_sizes(self, examples)
        if compiled is None:
            if OPEN_NUMBERS in gm.meta:
                raise NumberNeeded("no trace serves all values of its integers")
            compiled = self._by_torch(gm, examples)
        if self._units is None:  # inference
            return compiled
        if not self._finished:
            raise UnsupportedGraph("the backward of this graph was not compiled with its forward")
        gating = Gating() if self.config.early_gradients and not self.facts.ties_inputs else None
        if self.config.early_gradients and self.facts.ties_inputs:
            state.add_note(TIED_INPUTS)

        @functools.wraps(compiled)
        def run(*args: Any) -> Any:
            """Runs the forward, its inputs behind gates, so that gradients leave it early."""
            assert self.steps is not None, "the step was assembled"
            self.steps.assembly.return_weights(args)
            if gating is None or self.steps.runs_as_member:
                return under_hooks(compiled, *args)
            with hidden_from_modes():
                gated = gating.gated(self.steps.assembly.step.backward, args)
            return under_hooks(compiled, *gated)

        return run

    def _by_torch(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compiles ``gm`` through AOTAutograd, or from torch's and memo's caches.

        Raises UntraceableGraph: AOTAutograd failed before it asked memo for anything.
        """
        try:
            return self._traced_by_torch(gm, examples)
        except dynamo.RestartAnalysis:
            raise
        except Exception as error:
            if self._is_asked or isinstance(error, MemoError):
                raise
            raise UntraceableGraph(f"AOTAutograd cannot trace it: {described(error)}") from error

    def _traced_by_torch(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """As ``_by_torch``, with AOTAutograd's own errors."""
        gm = self.prepared(gm)
        gm.meta.pop(LENGTHS, None)
        if self.is_run:
            self._memory = memory_of(gm, examples, self.config, self.facts, self._made_outside)
        memory = self._memory
        if memory is None:
            with self.settings(self.partition):
                return inductor_api.compile_fx(gm, examples, inner_compile=self.inner)
        with self.settings(self.partition, memory.tag), compile_caches.autograd_cache(self._recall):
            compiled = inductor_api.compile_fx(gm, examples, inner_compile=self.inner)
            if self._units is None and memory.recalled is not None:
                self._resume(memory.recalled)
        return compiled

    def prepared(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Returns a copy of a Dynamo graph, with numbers or symbols, ready to be traced.

        It has no ``needless_masks``, and wide products compute only the rows that are read.
        """
        gm = fx_graphs.copied(gm)
        if self.needless_masks:
            state.add_note(
                f"{len(self.needless_masks)} calls of attention run without the masks that the "
                "graph makes for them of positions alone: is_causal says the same"
            )
            masks = NeedlessMasks(allowed=self.needless_masks)
            gm = self.runner.run(gm, [masks], stage="dynamo-masks")
        if self.config.exact:
            return gm
        return self.runner.run(gm, [SliceFirst()], stage="dynamo-slices")

    def _recall(self, name: str) -> tuple[Half, Half] | None:
        """Returns functions for the halves kept under ``name``; they work after ``_resume``."""
        assert self._memory is not None, "the cache is used only with a memory"
        self._is_asked = True
        if not self._memory.recall(name, self.facts, self.runner, self.name):
            return None
        return self._run_forward(), self._run_backward()

    def _resume(self, recalled: Recalled) -> None:
        """Goes on where the kept capture had cut its step."""
        record = recalled.record
        for note in record.notes:
            state.add_note(note)
        numbers = (*record.sizes.items(), *record.flags.items())
        self.numbers = {int(at): value for at, value in numbers}
        static_names = frozenset(record.static_names)
        with recalled.fakes.tracing(None):
            self.cut_before(
                recalled.cut, record.num_results, static_names, ties_inputs=record.ties_inputs
            )

    @contextlib.contextmanager
    def settings(self, partition: Callable[..., Any], uuid: str | None = None) -> Iterator[None]:
        """Inside, torch captures a graph and cuts it by ``partition``; ``uuid`` is its key."""
        partitioner = Partitioner(partition, uuid)
        with (
            autograd.functorch_patch(
                force_non_lazy_backward_lowering=True,
                enable_autograd_cache=False,
                enable_remote_autograd_cache=False,
            ),
            inductor_api.inductor_patch(
                {
                    **self.config.inductor_options,  # which torch's passes over the graph read too
                    "custom_partitioner_fn": partitioner,
                    **inductor_api.NO_GRAPH_CACHE,
                }
            ),
        ):
            try:
                yield
            finally:
                partitioner.close()

    def captured_again(self, step: CapturedStep, config: MemoConfig) -> CapturedStep:
        """Returns ``step``, captured here for a plan only, as captured under another ``config``.

        Only the joint graph is cut anew: AOTAutograd's trace does not depend on memo's options.
        """
        assert self._joint is not None, "nothing runs, and the partitioner was called"
        traced, joint_inputs, settings = self._joint
        other = StepCapture(config, self.facts, next_graph_name(), self.finish, is_run=False)
        other._made_outside, other._num_examples = self._made_outside, self._num_examples
        other._written_between = self._written_between
        with other.settings(other.partition):
            forward, backward = other.partition(fx_graphs.copied(traced), joint_inputs, **settings)
        other.runner.write_times()
        assert other._units is not None, "the partitioner has run"
        return replace(
            step,
            name=other.name,
            forward=without_tokens(fx_graphs.copied(forward)),
            backward=without_tokens(fx_graphs.copied(backward)),
            units=other._units,
            droppable=other._droppable,
            runner=other.runner,
        )

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **settings: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cuts ``joint`` into forward and backward, with the saved activations in the frame.

        Raises UnsupportedGraph: the graph holds sizes that are not numbers, or a result that torch
        describes wrongly.
        """
        self._is_asked = True
        if not self.is_run:
            self._joint = fx_graphs.copied(joint), joint_inputs, settings
        with state.noting() as self._notes:
            return self._partition(joint, joint_inputs, **settings)

    def _partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """As ``partition``: memo's passes, the cut, the halves, a handle for what is saved."""
        if self.facts.gpu is not None:
            retarget = Retarget(device=self.facts.device)
            joint = self.runner.run(joint, (retarget,), stage="joint")
        _require_known(joint)
        _note_users_checkpoints(joint)
        _note_masks(joint)
        self._ties_inputs = ties_inputs(joint.graph, num_fwd_outputs)
        passes = (
            TracedCollectives(),
            MergeCommonSubexpressions(),
            HoistInvariants(),
            *(() if self.config.exact else (GradientOfLoss(),)),
            KeepJumps(weights=frozenset(static_lifetime_input_indices or ())),
            KeepOverwritten(num_fwd_outputs=num_fwd_outputs),
            *self._own_inputs(joint),
        )
        joint = self.runner.run(joint, passes, stage="joint")
        units = tag_units(joint, segments=self.config.memory_budget is not None)
        static = static_lifetime_input_indices
        min_cut, *later_cuts = self._cuts(joint, units, joint_inputs, num_fwd_outputs, static)
        joint = self.runner.run(joint, (min_cut,), stage="joint")
        self._droppable = dropped_sizes(joint, units)
        joint = self.runner.run(joint, tuple(later_cuts), stage="joint")

        def halves() -> tuple[fx.GraphModule, fx.GraphModule]:
            forward, backward = extract_halves(
                joint, saved_nodes(joint), num_fwd_outputs=num_fwd_outputs
            )
            for half in (forward, backward):
                tag_saved(half, ())
            return forward, reordering_to_mimic_autograd_engine(backward)

        forward, backward = self.runner.derive(
            "halves",
            joint,
            halves,
            stage="joint",
            graphs=lambda made: {"forward": made[0], "backward": made[1]},
        )
        self._units, self.num_results = units, num_fwd_outputs
        if self.config.attempt.stores_float8:
            forward, backward = self._stored_as_float8(forward, backward)
        forward, backward = self._leased(forward, backward)
        self.num_results -= num_tokens(forward)
        return forward, backward

    def _cuts(
        self,
        joint: fx.GraphModule,
        units: JointUnits,
        joint_inputs: Any,
        num_fwd_outputs: int,
        static_inputs: list[int] | None,
    ) -> tuple[SaveMinCut | EqualCut | SufficientCut | GatherOnce, ...]:
        """Returns the passes that choose the saved activations, torch's min cut first."""
        min_cut = SaveMinCut(
            joint_inputs=joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_inputs=static_inputs,
            chosen=self.chosen,
        )
        sufficient = SufficientCut(
            units=units,
            num_fwd_outputs=num_fwd_outputs,
            static_inputs=tuple(static_inputs or ()),
            changing_inputs=self._changing(joint),
        )
        return (
            min_cut,
            EqualCut(
                units=units,
                drops_above=self.config.drops_above(),
                drops_heads=self.config.attempt.by_heads,
            ),
            sufficient,
            *(() if self.config.drops_above() is None else (GatherOnce(),)),
        )

    def _own_inputs(self, joint: fx.GraphModule) -> tuple[OwnInputs, ...]:
        """Returns the pass that copies inputs where tensors may move: under a budget, or a policy.

        An input that other code computed can then move like a saved tensor, and one that may be
        written between the halves is read once. None is copied where AOTAutograd has other inputs
        than Dynamo (several that share memory).
        """
        moves = self.config.memory_budget is not None or self.config.policy not in ("auto", "save")
        if not moves or len(inputs_of(joint.graph)) != self._num_examples:
            return ()
        return (OwnInputs(positions=self._made_outside, changing=self._changing(joint)),)

    def _changing(self, joint: fx.GraphModule) -> tuple[int, ...]:
        """Returns the positions of inputs that the program may write between the halves."""
        is_known = len(inputs_of(joint.graph)) == self._num_examples
        return self._written_between if is_known else ()

    def _stored_as_float8(
        self, forward: fx.GraphModule, backward: fx.GraphModule
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Returns the halves with float8 between them in place of wide saved activations."""
        assert self._units is not None, "the units are tagged before the halves are made"
        store = StoreFloat8(num_fwd_outputs=self.num_results)
        forward = self.runner.run(forward, [store], stage="forward")
        read = ReadFloat8(stored=stored_values(forward), units=self._units)
        backward = self.runner.run(backward, [read], stage="backward")
        if read.stored:
            state.add_note(
                f"saved_dtype='float8': {len(read.stored)} saved activations are rounded to "
                f"float8; their names in the decisions end with {FLOAT8_NAME}"
            )
        return forward, backward

    def _leased(
        self, forward: fx.GraphModule, backward: fx.GraphModule
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Returns the halves with a handle between them in place of the saved activations."""
        mode = fx_graphs.detect_fake_mode([node.meta.get("val") for node in forward.graph.nodes])
        if mode is None:
            raise UnsupportedGraph("the joint graph carries no fake tensors")
        with mode:
            handle = torch.empty(NUM_BITS, dtype=torch.uint8, device="cpu")
        lease = LeaseSaved(num_fwd_outputs=self.num_results, handle_value=handle)
        forward = self.runner.run(forward, [lease], stage="forward")
        fetch = FetchLeased(leased=leased_names(forward), handle_value=handle)
        backward = self.runner.run(backward, [fetch], stage="backward")
        self.refuse_compiled_autograd(backward)
        return forward, backward

    def refuse_compiled_autograd(self, backward: fx.GraphModule) -> None:
        """Makes compiled autograd raise RuntimeMisuse when it copies ``backward``."""
        dynamo.refuse_compiled_autograd(backward, lambda: RuntimeMisuse(COMPILED_AUTOGRAD))

    def inner(
        self, gm: fx.GraphModule, examples: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """Compiles one graph: inference plainly; a forward waits for its backward."""
        is_backward = bool(kwargs.get("is_backward"))
        if self._units is None or kwargs.get("is_inference"):
            run = plain_inner(gm, examples, self.config, kwargs) if self.is_run else _never_run
        elif is_backward:
            run = self._backward(gm)
        else:
            run = self._forward_half(gm, kwargs)
        if self._memory is None:
            return run
        half = self._memory.half(run, is_backward=is_backward)
        if is_backward and self.assembly is not None:
            cut = self.assembly.lowered.cut
            self._memory.remember(cut, self.num_results, self.numbers, self._notes)
        return half

    def _forward_half(self, gm: fx.GraphModule, kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Keeps the forward until its backward comes; returns what runs it then."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        static = frozenset(placeholders[i].name for i in kwargs.get("static_input_idxs", ()))
        self.facts.read_forward(placeholders, static, ties_inputs=self._ties_inputs)
        self._own_results = autograd.results_of_their_own()
        results = enumerate(results_of(gm.graph)[: self.num_results])
        self.numbers = {
            at: value
            for at, value in results
            if value is not None and not isinstance(value, fx.Node)
        }
        self._forward = fx_graphs.copied(gm)
        return self._run_forward()

    def cut_before(
        self, cut: CutStep, num_results: int, static_names: frozenset[str], *, ties_inputs: bool
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Assembles a step that was cut before; returns functions that run its halves."""
        placeholders = cut.forward.half_graph.graph.find_nodes(op="placeholder")
        self.facts.read_forward(placeholders, static_names, ties_inputs=ties_inputs)
        self._units, self.num_results = cut.units, num_results
        self._assemble(replace(cut, name=self.name, facts=self.facts, runner=self.runner))
        return self._run_forward(), self._run_backward()

    def _run_forward(self) -> Callable[..., Any]:
        """Returns what runs the forward once the step is assembled."""

        def forward(args: list[Any]) -> Any:
            if self.steps is None:
                raise UnsupportedGraph("the backward of this graph was never compiled")
            if dynamo.compiles_autograd():
                raise RuntimeMisuse(COMPILED_AUTOGRAD)
            with hidden_from_modes():
                results = self.steps.forward(args)
            watch_handles(results)
            for at, number in self.numbers.items():
                results[at] = number
            return results

        forward._boxed_call = True  # type: ignore[attr-defined]
        return forward

    def _backward(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """Assembles the step, of which ``gm`` is the last half; returns what runs this half."""
        assert self._forward is not None, "the backward is compiled after its forward"
        assert self._units is not None, "the partitioner runs before the inner compiler"
        autograd.allow_second_backward()
        captured = CapturedStep(
            name=self.name,
            forward=self._forward,
            backward=fx_graphs.copied(gm),
            units=self._units,
            facts=self.facts,
            num_results=self.num_results,
            own_results=self._own_results,
            droppable=self._droppable,
            runner=self.runner,
        )
        self._assemble(captured)
        return self._run_backward()

    def _assemble(self, step: CapturedStep | CutStep) -> None:
        """Takes both halves through the stages, after which they can run."""
        self._is_asked = True
        try:
            self.assembly = self.finish(step)
        finally:
            self.runner.write_times()
        self._finished = True
        if self.assembly is not None:
            self.steps = StepPart(self.assembly)

    def _run_backward(self) -> Callable[..., Any]:
        """Returns what runs the backward once the step is assembled."""

        def backward(args: list[Any]) -> Any:
            assert self.steps is not None, "its forward ran"
            if any(map(autograd.is_batched, args)):
                raise RuntimeMisuse(BATCHED)
            args[:] = map(plain_handle, args)
            with hidden_from_modes():
                return self.steps.backward(args)

        backward._boxed_call = True  # type: ignore[attr-defined]
        return backward


def _never_run(*_: Any) -> Never:
    raise RuntimeMisuse("this graph was captured for its plan only, and is not compiled")


def _note_users_checkpoints(joint: fx.GraphModule) -> None:
    """Says what becomes of the tags of checkpoint(), and of torch's own budget."""
    tags = [node.meta["recompute"].name for node in joint.graph.nodes if "recompute" in node.meta]
    obeyed = sum(tag in ("MUST_SAVE", "MUST_RECOMPUTE") for tag in tags)
    if tags:
        state.add_note(
            f"the model's own checkpoint(): {obeyed} MUST_* tags are obeyed, "
            f"{len(tags) - obeyed} PREFER_* tags and those to offload give way to the plan"
        )
    if (share := activation_memory_budget()) < 1:
        state.add_note(
            f"torch._functorch.config.activation_memory_budget = {share}: what torch recomputes "
            "for it, plans do too; leave it at 1.0, and memory_budget bounds the step"
        )


def _note_masks(joint: fx.GraphModule) -> None:
    """Warns of masks as large as attention's scores, and says what to do instead."""
    for mask in large_masks(joint.graph):
        size = f"{mask.rows} x {mask.columns} numbers ({format_bytes(mask.size_bytes)})"
        cause = (
            "of what it is given (an attention_mask): where no token is padding, leave that out"
            if mask.is_given
            else "of positions alone, as transformers does while it is compiled"
        )
        state.warn_once(
            f"attention reads a mask of {size}, which the graph makes {cause}. If each token sees "
            "all before it and nothing else, attention needs no mask, and takes a faster kernel "
            "without one: docs/how-to/does-not-fit.md, masks"
        )


def _require_known(joint: fx.GraphModule) -> None:
    """Raises UnsupportedGraph: sizes, layouts or memory of a value are not known before it runs."""
    for node in joint.graph.nodes:
        if why := fx_graphs.wrong_fake(node):
            raise UnsupportedGraph(f"{node.name}: {why}")
        if gives_other_memory(node):
            raise UnsupportedGraph(
                f"{node.name} gives an input memory that the step makes (set_, or input.data = ...)"
                "; write into the input instead, with copy_"
            )
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise UnsupportedGraph(f"{node.name} is a size that is only known at run time")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise UnsupportedGraph(f"{node.name} is a sparse tensor, whose parts are not followed")
        if isinstance(value, torch.Tensor) and not all(isinstance(s, int) for s in value.shape):
            raise UnsupportedGraph(
                f"{node.name} has a shape that is only known at run time: {tuple(value.shape)}"
            )
