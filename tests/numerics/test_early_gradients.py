"""Gradients that reach autograd while the backward runs: the right ones, and each hook once."""

import functools
import gc

import pytest
import torch
from memo_runtime.backward_run import StepError
from torch import nn

import memo_compile
from memo_compile.errors import Infeasible, RuntimeMisuse
from tests.numerics.early_attack import attack
from tests.numerics.small import Pair, Stack, leased_slabs, rows, watched_calls
from tests.numerics.training import ATEN, memo_compiled

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo looks at any input's
)
WIDE, NUM_LAYERS = 128, 3
NO_STATE = {
    "optimizer_state_bytes_per_parameter": 0,
    "costs": "roofline",
    "token_tiles": 1,
    **ATEN,
}


@pytest.mark.parametrize("seed", range(2))
def test_random_models_in_random_modes(seed):
    attack(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 40))
def test_more_random_models_in_random_modes(seed):
    attack(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60, 64))
def test_random_models_through_inductor(seed):
    attack(seed, lowering="inductor")


def calls_before_hooks(monkeypatch, **options):
    """Parameter -> how many calls of the backward had run when its hook did."""
    model = Stack(num_layers=3)
    compiled = memo_compiled(model, **ATEN, **options)
    compiled(rows(1)).backward()
    calls, seen = watched_calls(monkeypatch), {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: seen.update({name: calls.count})
        )
    compiled(rows(2)).backward()
    return seen, calls.count


def test_a_hook_runs_while_the_rest_of_the_backward_is_to_come(monkeypatch):
    seen, total = calls_before_hooks(monkeypatch)
    assert seen["head.weight"] < seen["layers.2.up.weight"] < seen["layers.0.up.weight"]
    assert seen["layers.0.up.weight"] < total
    assert seen["entry.weight"] == total


def test_switched_off_all_hooks_run_at_the_end(monkeypatch):
    seen, total = calls_before_hooks(monkeypatch, early_gradients=False)
    assert set(seen.values()) == {total}


def test_an_early_gradient_is_not_copied():
    """Autograd takes over the tensor that the step made; a copy would need the memory twice."""
    model = Stack()
    compiled = memo_compiled(model, **ATEN)
    pointers = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: pointers.update({name: grad.data_ptr()}))
    compiled(rows(1)).backward()
    assert {n: p.grad.data_ptr() for n, p in model.named_parameters()} == pointers


def test_a_frame_goes_back_after_an_exception_in_a_hook():
    """The loss is held, and with it the graph; the next forward is planned all the same."""
    model = Stack()
    compiled = memo_compiled(model, **ATEN)
    compiled(rows(1)).backward()

    def fail(_):
        raise ZeroDivisionError

    handle = model.head.weight.register_post_accumulate_grad_hook(fail)
    loss = compiled(rows(2))
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert not leased_slabs()
    handle.remove()
    compiled(rows(2)).backward()
    assert memo_compile.report().unplanned_steps == 0
    assert loss is not None


def test_a_hook_that_writes_into_what_is_still_read_is_refused():
    """Row 2 of the situations, in the middle of a backward: the next step is right again."""
    pair = Pair(Stack(), **ATEN)
    pair.assert_step(rows(1))

    def write(_):
        with torch.no_grad():
            pair.ours.entry.weight.mul_(1)
            pair.ours.layers[0].up.weight.mul_(1)

    handle = pair.ours.head.weight.register_post_accumulate_grad_hook(write)
    with pytest.raises(StepError, match="a hook wrote in place"):
        pair.compiled(rows(2)).backward()
    handle.remove()
    assert not leased_slabs()
    pair.assert_step(rows(3))


def wide(num_layers=NUM_LAYERS):
    torch.manual_seed(0)
    return Stack(hidden=WIDE, num_layers=num_layers)


def gradient_bytes(model):
    return sum(parameter.nbytes for parameter in model.parameters())


def floor(model, **options):
    torch._dynamo.reset()
    with pytest.raises(Infeasible) as raised:
        memo_compiled(model, memory_budget="64KiB", **NO_STATE, **options)(rows(1, hidden=WIDE))
    return raised.value.floor_bytes


@functools.cache
def accumulated_floor():
    return floor(wide(), gradients="accumulated")


def step_and_free(parameter):
    with torch.no_grad():
        parameter -= 0.01 * parameter.grad
    parameter.grad = None


def test_the_floor_of_accumulation_holds_one_copy_of_the_gradients():
    model = wide()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    early = floor(model)
    gained = floor(model, early_gradients=False) - early
    layer = gradient_bytes(model.layers[0])
    assert gained >= 0.98 * (gradient_bytes(model) - layer - gradient_bytes(model.entry))
    assert accumulated_floor() == early


@pytest.mark.full
def test_the_floor_with_hooks_that_use_gradients_up_holds_those_of_one_layer():
    model = wide()
    late = floor(model, early_gradients=False)
    without_hooks = floor(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_and_free)
    early = floor(model)
    layer = gradient_bytes(model.layers[0])
    assert late == without_hooks
    assert late - early >= 0.98 * (gradient_bytes(model) - layer - gradient_bytes(model.entry))


def test_accumulation_at_its_floor_is_right_and_planned():
    model = wide()
    bound = accumulated_floor()
    torch._dynamo.reset()
    pair = Pair(model, memory_budget=bound, gradients="accumulated", **NO_STATE)
    for seed in range(3):
        pair.each(lambda model, seed=seed: model(rows(seed, hidden=WIDE)).backward())
    pair.assert_equal()
    plan = memo_compile.report().plans[-1]
    assert plan.peak_bytes <= bound
    assert plan.check.ok
    assert memo_compile.report().unplanned_steps == 0


def accumulating(model, bound):
    """The model under a budget that holds only where gradients leave early; one step has run."""
    torch._dynamo.reset()
    compiled = memo_compiled(model, memory_budget=bound, gradients="accumulated", **NO_STATE)
    compiled(rows(1, hidden=WIDE)).backward()
    return compiled


def test_modes_that_keep_gradients_are_refused_before_they_break_the_budget():
    model = wide()
    bound = accumulated_floor() + gradient_bytes(model) // 4
    compiled = accumulating(model, bound)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    refused = pytest.raises(Infeasible, match=r"autograd\.grad or inputs= are used")
    with refused:
        torch.autograd.grad(compiled(rows(2, hidden=WIDE)), list(model.parameters()))
    with refused:
        compiled(rows(2, hidden=WIDE)).backward(inputs=[model.head.weight])
    with pytest.raises(Infeasible, match="has not begun"):
        compiled(rows(2, hidden=WIDE)).backward(retain_graph=True)
    assert all(torch.equal(before[name], p.grad) for name, p in model.named_parameters())
    gc.collect()
    compiled(rows(2, hidden=WIDE)).backward()


def test_gradients_that_wait_for_other_code_stop_the_backward_before_it_breaks_the_budget():
    model = wide()
    bound = accumulated_floor() + gradient_bytes(model) // 4
    compiled = accumulating(model, bound)
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    penalty = sum(weight.pow(2).sum() for weight in weights)  # its backward comes after ours
    loss = compiled(rows(2, hidden=WIDE)) + penalty
    with pytest.raises(Infeasible, match="are still there after they were given to autograd"):
        loss.backward()
    assert not leased_slabs()


def test_hooks_that_only_look_are_found_out_before_the_budget_breaks():
    model = wide()
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    bound = floor(model) + gradient_bytes(model) // 4
    torch._dynamo.reset()
    compiled = memo_compiled(model, memory_budget=bound, **NO_STATE)
    loss = compiled(rows(1, hidden=WIDE))
    with pytest.raises(Infeasible, match="or a hook keeps them"):
        loss.backward()
    assert 0 < len(seen) < len(list(model.parameters()))
    model.zero_grad()
    with pytest.raises(Infeasible):  # planned for what hooks were seen to do
        compiled(rows(1, hidden=WIDE))


def test_gradients_that_autograd_drops_show_nothing_of_hooks():
    """torch's pipelines find out shapes so: gradients of inputs alone, before the first step."""
    model, twin = wide(), wide()
    bound = accumulated_floor()
    torch._dynamo.reset()
    compiled = memo_compiled(model, memory_budget=bound, gradients="accumulated", **NO_STATE)
    given = [rows(seed, hidden=WIDE).requires_grad_() for seed in range(3)]
    torch.autograd.grad(compiled(given[0]), given[:1])
    assert all(parameter.grad is None for parameter in model.parameters())
    for x in given[1:]:
        compiled(x).backward()
        twin(x).backward()
    for ours, eager in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, eager.grad, rtol=1e-4, atol=1e-5)


def test_an_optimizer_in_hooks_trains_as_in_eager_at_its_floor():
    model = wide()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_and_free)
    bound = floor(model)
    torch._dynamo.reset()
    twin = wide()
    for parameter in twin.parameters():
        parameter.register_post_accumulate_grad_hook(step_and_free)
    compiled = memo_compiled(model, memory_budget=bound, **NO_STATE)
    for seed in range(3):
        compiled(rows(seed, hidden=WIDE)).backward()
        twin(rows(seed, hidden=WIDE)).backward()
    for ours, eager in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    assert memo_compile.report().plans[-1].peak_bytes <= bound


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return (x @ self.weight).tanh() @ self.weight


def test_a_weight_that_two_graphs_share_is_added_up_before_its_hook_runs():
    first, second = Twice(), Twice()
    second.weight = first.weight
    counted = []
    first.weight.register_post_accumulate_grad_hook(lambda leaf: counted.append(leaf.grad.clone()))
    ours = [memo_compiled(module, **ATEN) for module in (first, second)]
    expected = torch.autograd.grad(second(first(rows(1))).sum(), first.weight)[0]
    ours[1](ours[0](rows(1))).sum().backward()
    assert len(counted) == 1
    torch.testing.assert_close(counted[0], expected)


def test_gradients_in_batches_are_refused_and_the_next_step_is_right():
    model = Stack(num_layers=3)
    compiled = memo_compiled(model, **ATEN)
    leaf = rows(1).requires_grad_()
    result = compiled(leaf)
    batch = torch.stack([torch.ones_like(result), 2 * torch.ones_like(result)])
    with pytest.raises(RuntimeMisuse, match="is_grads_batched"):
        torch.autograd.grad(result, [leaf], grad_outputs=batch, is_grads_batched=True)
    del result
    (expected,) = torch.autograd.grad(model(leaf).sum(), leaf)
    (found,) = torch.autograd.grad(compiled(leaf).sum(), leaf)
    torch.testing.assert_close(found, expected)
    assert memo_compile.report().unplanned_steps == 0
