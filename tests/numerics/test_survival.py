"""What users do to a training step, and what goes wrong in one: never a wrong gradient."""

import gc
import logging

import pytest
import torch
from memo_runtime.arena import arena_of
from memo_runtime.instructions import RunCall
from memo_runtime.run_step import StepPlan
from torch import nn

import memo_compile
from memo_compile.driver import bind
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from tests.numerics.small import (
    Pair,
    Stack,
    leased_slabs,
    rows,
)
from tests.numerics.training import ATEN, assert_planned, in_ci


@pytest.fixture
def pair():
    return Pair(Stack())


def test_gradients_survive_the_next_step(pair):
    """Row 1: a kept gradient and a kept loss do not change when the arena is used again."""
    loss = pair.compiled(rows(1))
    loss.backward()
    kept = {name: parameter.grad for name, parameter in pair.ours.named_parameters()}
    copies = {name: gradient.clone() for name, gradient in kept.items()}
    value = loss.item()
    pair.ours.zero_grad(set_to_none=True)
    pair.compiled(rows(2)).backward()
    assert all(torch.equal(kept[name], copies[name]) for name in kept)
    assert loss.item() == value


def test_the_forward_leaves_only_what_the_backward_uses(pair, monkeypatch):
    """Autograd makes gradients of the results before the backward's first call could give back."""
    made = []

    def keep(**fields):
        made.append(StepPlan(**fields))
        return made[-1]

    monkeypatch.setattr(bind, "StepPlan", keep)
    pair.compiled(rows(1))
    first = next(call for call in made[0].backward.calls if isinstance(call, RunCall))
    assert made[0].forward.resident_bytes == first.resident_bytes
    assert made[0].backward.resident_bytes is None


def test_work_space_stays_for_the_next_layer_only_without_a_budget(monkeypatch):
    """Under a budget every megabyte counts; without one, faulting it in again costs time."""
    made = []

    def keep(**fields):
        made.append(StepPlan(**fields))
        return made[-1]

    monkeypatch.setattr(bind, "StepPlan", keep)
    for options in ({}, {"memory_budget": "1GiB"}):
        torch._dynamo.reset()
        Pair(Stack(), **options).compiled(rows(1))
    free, bound = ([call.planned_bytes for call in step.forward.calls] for step in made)
    more = [unbound - bounded for unbound, bounded in zip(free, bound, strict=True)]
    assert more[1] > 0  # the first of two equal layers
    assert more[0] == more[2] == 0


def test_a_forward_too_many_runs_unplanned_with_one_warning(pair, caplog):
    """Row 2: beyond max_inflight in ordinary memory, said once."""

    def three_live(model):
        losses = [model(rows(seed)) for seed in (1, 2, 3)]
        sum(losses).backward()

    with caplog.at_level(logging.WARNING, logger="memo"):
        pair.each(three_live)
        pair.each(three_live)
    pair.assert_equal()
    report = memo_compile.report()
    assert not report.active
    assert report.unplanned_steps == 4
    assert len(report.notes) == 1
    pair.each(lambda model: model(rows(4)).backward())
    assert memo_compile.report().active
    warnings = [record for record in caplog.records if record.name == "memo"]
    assert len(warnings) == 1
    assert "max_inflight" in warnings[0].getMessage()


class TwoHeads(Stack):
    """Returns two losses; the user may drop one."""

    def forward(self, x):
        x = self.features(x)
        return self.head(x).pow(2).mean(), x.sin().mean()


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_is_not_used(used):
    """Row 4: one output's gradient is zero; the frame still goes back."""
    pair = Pair(TwoHeads())
    for seed in (1, 2):
        pair.zero_grad()
        pair.each(lambda model: model(rows(seed))[used].backward())  # noqa: B023
        ours = {n: p.grad for n, p in pair.ours.named_parameters() if p.grad is not None}
        eager = {n: p.grad for n, p in pair.eager.named_parameters() if p.grad is not None}
        for name, theirs in eager.items():
            torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-7)
        assert all(ours[name].abs().max() == 0 for name in ours.keys() - eager.keys())
    assert leased_slabs() == 0
    assert_planned(1)


def test_two_losses_of_one_graph_backward_separately():
    """Row 5: retain_graph with another output's gradient in the second call."""
    pair = Pair(TwoHeads())

    def separately(model):
        first, second = model(rows(1))
        first.backward(retain_graph=True)
        second.backward()

    pair.each(separately)
    pair.assert_equal()
    assert_planned(1)


def test_backward_twice_without_retain_graph_is_refused(pair):
    """Row 5: torch's own error, and nothing left behind."""
    loss = pair.compiled(rows(1))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    pair.assert_step(rows(2))
    assert leased_slabs() == 0


@pytest.mark.parametrize(("dynamic", "num_plans"), in_ci([(None, 4), (True, 3)], (None, 4)))
def test_new_shapes_get_plans_of_their_own(dynamic, num_plans):
    """Row 9: one plan for each shape, each right, all over one arena.

    By default the first shape is compiled alone, and again when it comes back as one of many.
    """
    model = Stack()
    pair = Pair(model)
    options = {"lowering": "aten", "strict": True, "debug": "poison"}
    pair.compiled = torch.compile(model, backend="memo", options=options, dynamic=dynamic)
    for num_rows in (8, 12, 20, 12, 8):
        pair.assert_step(rows(num_rows, num_rows))
    assert_planned(num_plans)
    assert leased_slabs() == 0


def test_more_shapes_than_plans():
    """Row 9: the least recently used plan goes; results stay right."""
    pair = Pair(Stack(), max_plans=2)
    for num_rows in (8, 12, 16, 20, 12):
        pair.assert_step(rows(num_rows, num_rows))
    assert memo_compile.report().unplanned_steps == 0
    gc.collect()
    assert leased_slabs() == 0


def test_shapes_that_never_settle_break_no_budget():
    """Row 9: plain Inductor knows no budget."""
    pair = Pair(Stack(), max_plans=1, memory_budget="1GiB")

    def many_shapes() -> None:
        for num_rows in (6, 8, 10, 12, 14, 16):
            pair.assert_step(rows(1, num_rows))

    with pytest.raises(Infeasible, match=r"kept for a graph after .* pad to fewer shapes"):
        many_shapes()


@pytest.mark.usefixtures("aside_op_by_op")
@pytest.mark.parametrize("budget", in_ci([None, "1GiB"], "1GiB"))
def test_inference_of_any_number_of_shapes(budget):
    """Row 10: it has no plan, so that new shapes are neither compiled for ever nor refused."""
    pair = Pair(Stack(), max_plans=1, memory_budget=budget)
    for num_rows in range(4, 14):
        with torch.no_grad():
            ours, eager = pair.compiled(rows(1, num_rows)), pair.eager(rows(1, num_rows))
        torch.testing.assert_close(ours, eager)
    pair.assert_step(rows(2, 8))
    assert_planned(1)


@pytest.mark.usefixtures("aside_op_by_op")
def test_training_of_shapes_that_never_settle():
    """Row 9: plain Inductor in the end, and the report says so."""
    pair = Pair(Stack(), max_plans=1)
    for num_rows in (6, 8, 10, 12, 14, 16):
        pair.assert_step(rows(1, num_rows))
    report = memo_compile.report()
    assert not report.active
    assert report.unplanned_steps >= 1
    assert any("pad to fewer shapes" in note for note in report.notes)


def test_a_length_that_does_not_fit_is_refused_with_one_that_does():
    """Row 43: nothing of it has run, and shorter ones run on."""
    pair = Pair(Stack(), memory_budget="2MiB", costs="roofline", token_tiles=1)
    for num_rows in (8, 40, 12):
        pair.assert_step(rows(num_rows, num_rows))
    with pytest.raises(Infeasible, match=r"sizes are 40000; the largest so far that fit: 40\."):
        pair.compiled(rows(1, 40000))
    pair.assert_step(rows(2, 40))
    assert leased_slabs() == 0


@pytest.mark.full
def test_a_float_that_never_settles_is_named():
    """An annealed weight: each value is a plan, and the refusal says what to pass instead."""
    model = Stack()
    options = {**ATEN, "max_plans": 1, "memory_budget": "1GiB", "costs": "roofline"}
    runner = torch.compile(
        lambda x, weight: model(x).sum() * weight, backend="memo", options=options
    )

    def train(weights) -> None:
        for weight in weights:
            runner(rows(1, 8), weight).backward()

    annealed = [0.1 + 0.1 * number for number in range(8)]
    with pytest.raises(Infeasible, match=r"pass a float that changes .* as torch\.tensor"):
        train(annealed)
    train(map(torch.tensor, annealed))


@torch._dynamo.config.patch(recompile_limit=2)
def test_a_function_that_dynamo_gives_up_is_named():
    """Row 9: it runs eagerly from then on."""
    pair = Pair(Stack())
    pair.compiled = torch.compile(pair.ours, backend="memo", options=ATEN, dynamic=False)
    for num_rows in (6, 8):
        pair.assert_step(rows(1, num_rows))
    assert_planned(2)
    pair.assert_step(rows(1, 10))
    report = memo_compile.report()
    assert not report.active
    assert any("memo is OFF for a function" in note for note in report.notes)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_graph_breaks_are_counted():
    """Row 31: each piece has a plan; the report says that there are pieces."""

    class Broken(Stack):
        def forward(self, value):
            value = self.features(value)
            torch._dynamo.graph_break()
            return self.head(value).pow(2).mean()

    pair = Pair(Broken())
    pair.assert_step(rows(1))
    assert_planned(2)
    (note,) = memo_compile.report().notes
    assert note.startswith("1 graph break(s)")
    state.reset()
    assert memo_compile.report().notes == ()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_leaves_a_live_step_alone(pair, context):
    """Row 10: evaluation between a forward and its backward."""
    loss = pair.compiled(rows(1))
    with context():
        ours = pair.compiled(rows(2))
        eager = pair.eager(rows(2))
    torch.testing.assert_close(ours, eager)
    loss.backward()
    pair.eager(rows(1)).backward()
    pair.assert_equal()
    assert_planned(1)
    assert leased_slabs() == 0


def test_eval_mode(pair):
    """Row 10: eval() compiles anew; training goes on with its plan."""
    pair.assert_step(rows(1))
    pair.ours.eval()
    with torch.no_grad():
        torch.testing.assert_close(pair.compiled(rows(2)), pair.eager(rows(2)))
    pair.ours.train()
    pair.assert_step(rows(3))
    assert memo_compile.report().unplanned_steps == 0
    assert leased_slabs() == 0


def test_freezing_and_unfreezing(pair):
    """Row 11: a new plan without the frozen gradients; the old one serves again afterwards."""
    pair.assert_step(rows(1))

    def freeze(frozen):
        for model in (pair.ours, pair.eager):
            model.zero_grad(set_to_none=True)
            for parameter in model.layers[0].parameters():
                parameter.requires_grad_(not frozen)

    freeze(True)
    pair.assert_step(rows(2))
    assert all(parameter.grad is None for parameter in pair.ours.layers[0].parameters())
    freeze(False)
    pair.assert_step(rows(3))
    assert memo_compile.report().unplanned_steps == 0
    assert leased_slabs() == 0


_library = torch.library.Library("memo_test_survival", "DEF")
_library.define("by_numpy(Tensor x) -> Tensor")
_library.impl("by_numpy", lambda x: torch.from_numpy(x.numpy() * 2), "CPU")
torch.library.register_fake("memo_test_survival::by_numpy", torch.empty_like, lib=_library)


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.ops.memo_test_survival.by_numpy(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class StackByNumpy(Stack):
    def features(self, x):
        return super().features(ByNumpy.apply(super().features(x)))


@pytest.mark.full
def test_an_operator_that_shows_the_arena_to_numpy_does_not_stop_the_next_plan():
    """Numpy's storages can never be resized."""
    arena = arena_of(torch.device("cpu"))
    arena._slabs.clear()
    pair = Pair(StackByNumpy())
    for num_rows in (8, 64, 512):  # each plan needs a larger arena
        pair.assert_step(rows(num_rows, num_rows))
    assert_planned()
    assert len(arena._slabs) == 1


def test_dropping_a_compiled_model_frees_its_plan():
    """Row 11: the views of a dead plan do not hold the arena."""
    arena = arena_of(torch.device("cpu"))

    def plans() -> set[int]:
        return {key for slab in arena._slabs for key in slab._tables}

    others = plans()
    pair = Pair(Stack())
    pair.assert_step(rows(1))
    ours = plans() - others
    assert ours
    del pair
    torch._dynamo.reset()
    gc.collect()
    assert not ours & plans()


def test_only_an_input_needs_a_gradient():
    """Row 11: a fully frozen model under a trainable input, as in prompt tuning."""
    model = Stack().requires_grad_(False)
    pair = Pair(model)
    ours = rows(1).requires_grad_()
    eager = rows(1).requires_grad_()
    pair.compiled(ours).backward()
    pair.eager(eager).backward()
    torch.testing.assert_close(ours.grad, eager.grad, rtol=1e-5, atol=1e-7)
    assert_planned(1)


def test_an_error_in_a_users_hook(pair):
    """Row 7: raised by a tensor hook in the middle of backward; the next step is right."""

    def explode(_):
        raise ValueError("hook")

    hook = next(pair.ours.parameters()).register_hook(explode)
    with pytest.raises(ValueError, match="hook"):
        pair.compiled(rows(1)).backward()
    hook.remove()
    gc.collect()
    assert leased_slabs() == 0
    pair.assert_step(rows(2))


class Sigmoid(nn.Module):
    """Its backward reads what it returned."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).sigmoid()


def test_writing_into_an_output_that_is_saved():
    """Row 26: the version counter notices, as in eager, and the next step is right."""
    pair = Pair(Sigmoid())
    for run in (pair.compiled, pair.eager):
        out = run(rows(1, hidden=8))
        out.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    del out
    gc.collect()
    pair.zero_grad()
    pair.each(lambda run: run(rows(2, hidden=8)).sum().backward())
    pair.assert_equal()
    assert leased_slabs() == 0


class Logits(Stack):
    def forward(self, x):
        return self.head(self.features(x))


def test_writing_into_an_output_that_is_not_saved():
    """Row 26: outputs are the user's own memory."""
    pair = Pair(Logits())

    def write(model):
        out = model(rows(1))
        out.mul_(2)
        out.sum().backward()

    pair.each(write)
    pair.assert_equal()
    assert_planned(1)
