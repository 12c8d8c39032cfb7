"""The budget holds in every step, the first included, in the usual ways to write one.

Measured: anonymous resident memory from the forward's entry to the step's end, above what is there
when the forward begins. What compiling leaves behind, or gives back, is not the step's: the watch
begins when the plan stands.
"""

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from memo_runtime.arena import arena_of
from torch import nn
from torch.nn import functional

import memo_compile
from memo_compile.costs.measure import watch_memory
from memo_compile.driver import assemble
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from tests.numerics.small import CPU, Block
from tests.numerics.training import FLOOR, assert_planned, gradient_error, in_ci

pytestmark = pytest.mark.usefixtures("probes_once")

HIDDEN, ROWS, VOCABULARY = 64, 4096, 512
LOGITS_BYTES = 4 * ROWS * VOCABULARY
MOST_OVER_BUDGET = 1.005
NOISE_BYTES = 0
"""What the process's own heap grows by in a step, whatever its size; models here are small."""
OPTIONS = {
    "lowering": "aten",
    "strict": True,
    "costs": "roofline",
    "token_granule": 512,
    "token_tiles": 8,
    "optimizer_state_bytes_per_parameter": 0,
}


class Decoder(nn.Module):
    """Residual layers and a wide head. ``returns``: what beside the loss, or ``logits`` alone."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(HIDDEN) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.returns = returns

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        logits = self.head(states[-1])
        if self.returns == "logits":
            return {"logits": logits}
        loss = functional.cross_entropy(logits, y)
        if self.returns == "states":
            return {"loss": loss, "states": tuple(states)}
        return {"loss": loss, "logits": logits.view(2, ROWS // 2, VOCABULARY)}


@dataclass(slots=True, kw_only=True)
class Training:
    """A model, its data, and every tensor that the program holds between steps."""

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    names: dict[str, Any] = field(default_factory=dict)
    """What the program's variables hold."""
    peaks: list[int] = field(default_factory=list)
    """Measured, one a step."""

    def held_bytes(self) -> int:
        tensors = [*self.model.parameters(), self.x, self.y, *_tensors(self.names)]
        tensors += [
            parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
        ]
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors
        }
        return sum(storage.nbytes() for storage in storages.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


Step = Callable[[Training, nn.Module], None]


def output_in_scope(training: Training, runner: nn.Module) -> None:
    training.model.zero_grad()
    training.names["out"] = runner(training.x, training.y)
    training.names["out"]["loss"].backward()


def outputs_in_a_list(training: Training, runner: nn.Module) -> None:
    training.model.zero_grad()
    kept = training.names.setdefault("outs", [])
    kept.append(runner(training.x, training.y))
    kept[-1]["loss"].backward()


def loss_outside(training: Training, runner: nn.Module) -> None:
    training.model.zero_grad()
    training.names["out"] = runner(training.x, training.y)
    functional.cross_entropy(training.names["out"]["logits"], training.y).backward()


def shifted_loss_outside(training: Training, runner: nn.Module) -> None:
    training.model.zero_grad()
    logits = runner(training.x, training.y)["logits"].view(64, -1, VOCABULARY)
    shifted, labels = logits[:, :-1], training.y.view(64, -1)[:, 1:]
    loss = functional.cross_entropy(shifted.reshape(-1, VOCABULARY), labels.reshape(-1))
    training.names["loss"] = loss
    loss.backward()


def distilled(training: Training, runner: nn.Module) -> None:
    """A loss of the graph, and another on the logits that it returns beside it."""
    training.model.zero_grad()
    training.names["out"] = out = runner(training.x, training.y)
    teacher = functional.softmax(training.names["teacher"], dim=-1)
    student = functional.log_softmax(out["logits"], dim=-1)
    (out["loss"] + functional.kl_div(student, teacher, reduction="sum")).backward()


def penalty_outside(training: Training, runner: nn.Module) -> None:
    training.model.zero_grad()
    loss = runner(training.x, training.y)["loss"]
    held = training.x.new_ones(2**24)  # 64 MiB that no plan knows of, until the step ends
    loss.backward()
    training.names["held"] = held[:1].clone()


def gradients_kept(training: Training, runner: nn.Module) -> None:
    training.names["out"] = runner(training.x, training.y)
    training.names["out"]["loss"].backward()


def dropped(training: Training, runner: nn.Module) -> None:
    training.model.zero_grad()
    runner(training.x, training.y)["loss"].backward()


def training_of(returns: str) -> Training:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, HIDDEN, generator=generator)
    y = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    return Training(model=Decoder(returns), x=x, y=y)


def compiled(model: nn.Module, budget: int, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    state.reset()
    options = {**OPTIONS, "memory_budget": budget, **options}
    return torch.compile(model, backend="memo", options=options)


def refusal(returns: str, **options: Any) -> tuple[int, str]:
    """The floor that a budget of one byte names, and the words."""
    return _refusal(returns, tuple(sorted({**OPTIONS, **options}.items())))


@functools.cache
def _refusal(returns: str, options: tuple[tuple[str, Any], ...]) -> tuple[int, str]:
    training = training_of(returns)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(training.model, 1, **dict(options))(training.x, training.y)
    error = raised.value.inner_exception
    assert isinstance(error, Infeasible)
    assert error.floor_bytes is not None
    return error.floor_bytes, str(error)


def floor_of(returns: str, **options: Any) -> int:
    return refusal(returns, **options)[0]


@contextlib.contextmanager
def measured(training: Training, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The block's step is measured from its planned forward on."""
    run_forward = assemble.run_forward
    watch = contextlib.ExitStack()
    seen: list[Any] = []

    def watched(*args: Any) -> Any:
        arena_of(CPU).release_pages()
        gc.collect()
        if not seen:
            seen.append((training.held_bytes(), watch.enter_context(watch_memory())))
        return run_forward(*args)

    with monkeypatch.context() as patched, watch:
        patched.setattr(assemble, "run_forward", watched)
        yield
    ((held, memory),) = seen
    training.peaks.append(held + memory.growth_bytes)


def assert_within(
    returns: str,
    step: Step,
    budget: int,
    monkeypatch: pytest.MonkeyPatch,
    num_steps: int = 3,
    **options: Any,
) -> None:
    training = training_of(returns)
    twin = copy.deepcopy(training)
    runner = compiled(training.model, budget, **options)
    for _ in range(num_steps):
        with measured(training, monkeypatch):
            step(training, runner)
        step(twin, twin.model)
        assert gradient_error(training.model, twin.model) <= FLOOR
    ratios = [(peak - NOISE_BYTES) / budget for peak in training.peaks]
    assert max(ratios) <= MOST_OVER_BUDGET, ratios
    assert_planned()


@pytest.mark.parametrize(
    "options",
    in_ci([{}, {"token_tiles": None}, {"lowering": "inductor", "token_tiles": 1}], {}),
    ids=str,
)
def test_output_in_scope(options, monkeypatch):
    """``out = model(...); out.loss.backward()``; the logits are a view of a product."""
    budget = floor_of("both", **options)
    assert_within("both", output_in_scope, budget, monkeypatch, **options)


@pytest.mark.full
def test_outputs_of_three_steps_in_a_list(monkeypatch):
    """What is held is learned while the program runs: too late for a plan in other tiles."""
    budget = floor_of("both", token_tiles=1) + 2 * LOGITS_BYTES
    assert_within("both", outputs_in_a_list, budget, monkeypatch, token_tiles=1)


def test_the_report_has_the_plan_that_ran(monkeypatch):
    """Results are replaced, which a third step knows: it runs the first plan again."""
    budget = floor_of("both") + 3 * LOGITS_BYTES // 2
    training = training_of("both")
    runner = compiled(training.model, budget)
    for _ in range(4):
        with measured(training, monkeypatch):
            output_in_scope(training, runner)
        (plan,) = memo_compile.report().plans
        assert training.peaks[-1] <= MOST_OVER_BUDGET * plan.peak_bytes
        assert plan.peak_bytes <= budget
    assert plan.fixed.earlier_outputs == 0


@pytest.mark.full
def test_hidden_states(monkeypatch):
    assert_within("states", output_in_scope, floor_of("states"), monkeypatch)


def test_loss_outside_the_graph(monkeypatch):
    assert_within("logits", loss_outside, floor_of("logits"), monkeypatch)


@pytest.mark.full
def test_shifted_loss_outside_the_graph(monkeypatch):
    assert_within("logits", shifted_loss_outside, floor_of("logits"), monkeypatch)


def with_teacher() -> Training:
    training = training_of("both")
    training.names["teacher"] = torch.zeros(2, ROWS // 2, VOCABULARY)
    return training


def test_a_second_loss_outside_counts_once_a_backward_has_shown_it(monkeypatch):
    training = with_teacher()
    budget = floor_of("both")
    runner = compiled(training.model, budget)
    distilled(training, runner)
    with pytest.raises(Infeasible, match="set outside_loss=True") as raised:
        distilled(training, runner)
    floor = raised.value.floor_bytes
    assert floor is not None
    assert floor > budget
    budget = 2 * floor
    runner = compiled(training.model, budget)
    teacher_bytes = training.names["teacher"].nbytes
    for number in range(
        5
    ):  # results are held, and replaced: later steps have the plan's other form
        with measured(training, monkeypatch):
            distilled(training, runner)
        (plan,) = memo_compile.report().plans
        assert plan.peak_bytes <= budget
        if number:
            assert plan.peak_bytes >= floor
            peak = training.peaks[-1] - teacher_bytes - NOISE_BYTES
            assert peak <= MOST_OVER_BUDGET * plan.peak_bytes, (number, training.peaks)
    assert sum("outside_loss" in note for note in memo_compile.report().notes) == 1
    assert_planned()


@pytest.mark.full
def test_a_second_loss_outside_that_is_said_counts_from_the_first_step_on(monkeypatch):
    training = with_teacher()
    twin = copy.deepcopy(training)
    budget = floor_of("both", outside_loss=True)
    runner = compiled(training.model, budget, outside_loss=True)
    for _ in range(3):
        with measured(training, monkeypatch):
            distilled(training, runner)
        distilled(twin, twin.model)
        assert gradient_error(training.model, twin.model) <= FLOOR
    teacher_bytes = training.names["teacher"].nbytes  # which no plan of the student counts
    ratios = [(peak - teacher_bytes - NOISE_BYTES) / budget for peak in training.peaks]
    assert max(ratios) <= MOST_OVER_BUDGET, ratios
    assert_planned()


def test_what_the_plan_cannot_know_of_is_said_once_it_is_there():
    """A loss of the graph is taken for the only one until a backward shows another."""
    training = training_of("both")
    runner = compiled(training.model, floor_of("both"))
    for _ in range(3):
        output_in_scope(training, runner)
    told = " ".join(memo_compile.report().notes)
    assert "outside_loss" not in told
    assert "no plan knows of" not in told
    penalty_outside(training, runner)
    assert any("no plan knows of" in note for note in memo_compile.report().notes)


def test_a_second_live_step_finds_the_gradients_of_the_first():
    """Two forwards before their backwards: the gradients of one are there when the other's run."""
    gradients = sum(4 * parameter.numel() for parameter in Decoder("both").parameters())
    training = training_of("both")
    runner = compiled(training.model, 10 * 2**30, max_inflight=2)
    losses = [runner(training.x, training.y)["loss"] for _ in range(2)]
    sum(losses).backward()
    (plan,) = memo_compile.report().plans
    assert plan.fixed.gradients == 2 * gradients


@pytest.mark.full
def test_gradients_kept(monkeypatch):
    """The first refusal names what is needed where gradients exist before the step."""
    floor, words = refusal("both")
    gradients = sum(4 * parameter.numel() for parameter in Decoder("both").parameters())
    assert memo_compile.units.format_enough(floor + gradients) in words
    assert "accumulation" in words
    assert_within("both", gradients_kept, floor + gradients, monkeypatch)


@pytest.mark.full
def test_outputs_that_are_dropped_need_less(monkeypatch):
    floor = floor_of("both", outputs="dropped")
    assert floor < floor_of("both")
    assert_within("both", dropped, floor, monkeypatch, outputs="dropped")


def test_a_promise_that_is_not_kept_is_refused():
    """What was said to be dropped is still held when the next step begins."""
    training = training_of("states")
    runner = compiled(training.model, floor_of("states", outputs="dropped"), outputs="dropped")
    out = runner(training.x, training.y)
    out["loss"].backward()
    training.model.zero_grad()
    with pytest.raises(Infeasible, match="results of earlier steps are held"):
        runner(training.x, training.y)


def test_retain_graph_fits_or_is_refused(monkeypatch):
    """The copy of the frame counts; gradients of the first backward exist in the second."""
    floor = floor_of("both")
    training = training_of("both")
    twin = copy.deepcopy(training)
    runner = compiled(training.model, floor)
    out = runner(training.x, training.y)
    with pytest.raises(Infeasible, match="copy of the arena") as refused:
        out["loss"].backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert "raise memory_budget" in str(refused.value)
    assert refused.value.floor_bytes is None  # with more, a plan is chosen that needs more
    training.names["out"] = out
    del out
    runner = compiled(training.model, 6 * floor)
    with measured(training, monkeypatch):
        twice(training, runner)
    twice(twin, twin.model)
    assert gradient_error(training.model, twin.model) <= FLOOR
    (plan,) = memo_compile.report().plans
    assert training.peaks[0] <= MOST_OVER_BUDGET * plan.peak_bytes <= MOST_OVER_BUDGET * 6 * floor


def replaced_at_last(training: Training, runner: nn.Module) -> None:
    training.model.zero_grad()
    out = runner(training.x, training.y)
    out["loss"].backward()
    training.names["out"] = out


def two_at_once(training: Training, runner: nn.Module) -> None:
    """Gradients are kept, made, and wait in autograd to be added up, at the same time."""
    outs = [runner(training.x, training.y) for _ in range(2)]
    sum(out["loss"] for out in outs).backward()


@pytest.mark.full
@pytest.mark.parametrize(
    ("step", "options"),
    in_ci([(replaced_at_last, {}), (two_at_once, {"max_inflight": 2})], (replaced_at_last, {})),
)
def test_what_a_refusal_names_while_the_program_runs_is_enough(step, options, monkeypatch):
    training = training_of("both")
    runner = compiled(training.model, floor_of("both", **options), **options)
    step(training, runner)
    with pytest.raises(Infeasible) as refused:
        step(training, runner)
    assert refused.value.floor_bytes is not None
    assert_within("both", step, refused.value.floor_bytes, monkeypatch, **options)


def twice(training: Training, runner: nn.Module) -> None:
    training.names["out"] = runner(training.x, training.y)
    training.names["out"]["loss"].backward(retain_graph=True)
    training.names["out"]["loss"].backward()


def test_the_report_says_what_dropping_would_save():
    training = training_of("both")
    dropped(training, compiled(training.model, 10 * 2**30))
    (plan,) = memo_compile.report().plans
    assert plan.fixed.outputs > LOGITS_BYTES
    assert plan.dropping_saves_bytes > 0
    assert "outputs='dropped'" in str(memo_compile.report())
