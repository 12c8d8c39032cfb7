"""Weights that lie on the host and are copied in before each pass of their layer."""

import contextlib
import copy
import gc
from collections.abc import Callable

import pytest
import torch
from memo_runtime.arena import arena_of
from memo_runtime.host_tensors import place_of
from torch import nn

import memo_compile
from memo_compile.costs.measure import watch_memory
from memo_compile.driver import assemble, step_planner
from memo_compile.errors import ConfigError, Infeasible
from tests.numerics.small import Stack
from tests.numerics.training import memo_compiled

TOKENS = 24


def model_of(num_layers: int = 4, hidden: int = 33) -> Stack:
    torch.manual_seed(0)
    return Stack(hidden, num_layers)


def trained(
    model: nn.Module, accumulate: int = 1, update: str | None = None, **options: object
) -> list[float]:
    """Losses of three steps; the model is changed. ``update``: that of an offloaded optimizer."""
    hidden = model.entry.in_features
    run, optimizer = memo_compiled(model, **options), torch.optim.AdamW(model.parameters(), 1e-2)
    optimizer = optimizer if update is None else memo_compile.offload(optimizer, update=update)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        for _ in range(accumulate):
            x = torch.randn(TOKENS, hidden, generator=generator, dtype=model.entry.weight.dtype)
            loss = run(x)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compared(make: Callable[[], Stack] = model_of, **options: object) -> Stack:
    """Trains a model with its weights on the device and an equal one, returned, with them on the
    host: losses and weights are the same."""
    plain, ours = make(), make()
    expected = trained(plain, **options)
    assert trained(ours, weights="host", **options) == expected
    assert_same(ours, plain)
    return ours


def each_run(
    run: Callable[[Stack, nn.Module], None], make: Callable[[], Stack] = model_of, **options: object
) -> tuple[Stack, Stack]:
    """``run(model, compiled)`` with its weights on the device, and again with them on the host."""
    models = []
    for weights in ("device", "host"):
        models.append(make())
        run(models[-1], memo_compiled(models[-1], weights=weights, **options))
    plain, ours = models
    assert weights_there(ours)
    return plain, ours


def assert_same(ours: nn.Module, other: nn.Module) -> None:
    for (name, first), second in zip(ours.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second), name


def assert_same_gradients(ours: nn.Module, other: nn.Module) -> None:
    for (name, first), second in zip(ours.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad), name


def weights_there(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if place_of(each) is not None}


@pytest.mark.parametrize("schedule", ["copies-early", "copies-late"])
def test_numbers_are_those_of_weights_on_the_device(schedule):
    ours = compared(accumulate=2, debug=("poison", schedule))
    large = {f"layers.{layer}.{name}.weight" for layer in range(4) for name in ("up", "down")}
    assert weights_there(ours) == large
    plan = memo_compile.report().plans[-1]
    sizes = sum(dict(ours.named_parameters())[name].nbytes for name in large)
    assert plan.training_state.parameters.host_bytes == sizes == plan.host_bytes
    rest = sum(each.nbytes for each in ours.parameters()) - sizes
    assert plan.training_state.parameters.device_bytes == rest


def test_a_budget_below_the_parameters_is_kept_and_weights_come_before_recomputation():
    plain, ours = model_of(8), model_of(8)
    expected = trained(plain, exact=True, gradients="accumulated")
    device = memo_compile.report().plans[-1].peak_bytes
    options = {"weights": "host", "exact": True, "policy": "full-recompute"}
    assert trained(ours, debug=("poison", "copies-late"), **options) == expected
    assert_same(ours, plain)
    plan = memo_compile.report().plans[-1]
    assert plan.recomputed_bytes
    assert plan.peak_bytes < device - plan.host_bytes // 2


def test_auto_moves_weights_only_where_nothing_fits_otherwise():
    roomy, tight = model_of(), model_of()
    expected = trained(roomy, memory_budget="1GiB", weights="auto")
    assert not weights_there(roomy)
    with pytest.raises(Infeasible) as refused:
        trained(model_of(), memory_budget=1, exact=True)
    budget = refused.value.floor_bytes - 4096
    assert trained(tight, memory_budget=budget, weights="auto", exact=True) == expected
    assert weights_there(tight)
    assert any("weights='auto'" in note for note in memo_compile.report().notes)


def test_auto_moves_no_weights_that_a_declared_host_budget_does_not_hold():
    model = model_of()
    with pytest.raises(Infeasible) as refused:
        trained(model_of(), memory_budget=1, exact=True, host_budget=0)
    floor = refused.value.floor_bytes
    options = {"memory_budget": floor - 4096, "weights": "auto", "exact": True}
    with pytest.raises(Infeasible, match="more than host_budget 0 B") as refused:
        trained(model, host_budget=0, **options)
    assert refused.value.floor_bytes == floor
    assert not weights_there(model)
    trained(model, host_budget="1GiB", **options)
    assert weights_there(model)


def test_weights_at_home_are_taken_off_a_declared_host_budget_once(monkeypatch):
    """A later length finds less free memory on the host: its own weights lie in the rest."""
    model = model_of()
    room = 2 * sum(each.nbytes for each in model.parameters())

    def left(*_: object) -> int:
        return room - sum(each.nbytes for each in model.parameters() if place_of(each) is not None)

    monkeypatch.setattr(step_planner, "default_host_budget_bytes", left)
    run = memo_compiled(model, weights="host", host_budget=room)
    for rows in (TOKENS, TOKENS + 8):
        run(torch.randn(rows, 33)).backward()
        assert left() < room
    assert len(memo_compile.report().plans) == 2


def test_a_model_on_the_host_is_planned_so_without_an_option():
    plain, ours = model_of(), model_of()
    expected = trained(plain)
    assert memo_compile.parameters_on_host(ours) is ours
    there = weights_there(ours)
    torch._dynamo.reset()  # else the code that was compiled for the other model runs this one
    assert trained(ours) == expected
    assert weights_there(ours) == there != set()
    assert_same(ours, plain)
    assert memo_compile.report().plans[-1].training_state.parameters.host_bytes
    fresh = model_of()
    fresh.load_state_dict(ours.state_dict())
    assert_same(fresh, ours)


class Adapted(nn.Module):
    """A frozen layer, and beside it a product of two small matrices that are trained (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("update", [None, "host"])
def test_a_frozen_base_in_bfloat16_with_adapters(update):
    def adapted() -> Stack:
        model = model_of(3, 64)
        for layer in model.layers:
            layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
        return model.bfloat16()

    ours = compared(adapted, update=update, debug=("poison", "copies-late"))
    bases = {f"layers.{layer}.{name}.base.weight" for layer in range(3) for name in ("up", "down")}
    assert weights_there(ours) == bases
    fresh = dict(adapted().named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, fresh[name]) == (".base." in name)


def test_a_weight_written_between_forward_and_backward_is_refused():
    model = model_of()
    run = memo_compiled(model, weights="host")
    x = torch.randn(TOKENS, 33)
    run(x).backward()
    loss = run(x)
    with torch.no_grad():
        model.layers[1].up.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|written in place"):
        loss.backward()


def test_a_hook_may_update_a_weight_once_its_gradient_has_left():
    def stepping() -> Stack:
        def update(parameter: nn.Parameter) -> None:
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        model = model_of()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        return model

    def run(_: Stack, compiled: nn.Module) -> None:
        for seed in range(3):
            torch.manual_seed(seed)
            compiled(torch.randn(TOKENS, 33)).backward()

    plain, ours = each_run(run, stepping, debug=("poison", "copies-late"))
    assert_same(ours, plain)


def test_a_graph_runs_backward_twice_and_without_gradients():
    x = torch.randn(TOKENS, 33)

    def run(_: Stack, compiled: nn.Module) -> None:
        loss = compiled(x)
        loss.backward(retain_graph=True)
        loss.backward()
        with torch.no_grad():
            compiled(x)

    plain, ours = each_run(run)
    assert_same_gradients(ours, plain)


def test_weights_that_others_show_stay():
    def shared() -> Stack:
        model = model_of()
        model.register_buffer("seen", model.layers[1].up.weight.detach())
        model.layers[2].down.weight = model.layers[3].down.weight
        return model

    model = compared(shared)
    assert "layers.1.up.weight" not in weights_there(model)
    assert "layers.2.down.weight" in weights_there(model)
    assert torch.equal(model.seen, model.layers[1].up.weight)


def test_weights_that_the_program_brings_back_return_to_the_host():
    """As by ``model.cpu()``, ``model.cuda()`` and by loading other parameters."""
    x = torch.randn(TOKENS, 33)

    def run(model: Stack, compiled: nn.Module) -> None:
        compiled(x).backward()
        there = weights_there(model)
        model.double().float()
        assert not weights_there(model)
        compiled(x).backward()
        assert weights_there(model) == there
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        compiled(x).backward()
        assert weights_there(model) == there

    plain, ours = each_run(run)
    assert_same_gradients(ours, plain)


def test_a_weight_that_comes_back_into_shared_memory_stays_and_the_report_says_so():
    model = model_of()
    run = memo_compiled(model, weights="host")
    x = torch.randn(TOKENS, 33)
    run(x).backward()
    weight = model.layers[1].up.weight
    shown = weight.detach().clone()
    weight.data = shown
    run(x).backward()
    assert weight.data_ptr() == shown.data_ptr()
    assert any("other tensors show" in note for note in memo_compile.report().notes)


def test_what_parameters_on_host_refuses():
    with pytest.raises(ConfigError, match="expected layers"):
        memo_compile.parameters_on_host(nn.Linear(4, 4))
    with torch.device("meta"):
        model = Stack()
    with pytest.raises(ConfigError, match="meta tensor"):
        memo_compile.parameters_on_host(model)
    with pytest.raises(ConfigError, match="kind"):
        memo_compile.parameters_on_host(Stack(), kind="file:x")
    with pytest.raises(ConfigError, match="pinned memory, not shm"):
        memo_compile.parameters_on_host(Stack(), "cuda", kind="shm")


def test_a_budget_below_the_weights_holds_in_memory(monkeypatch):
    """Ordinary memory of three steps, the first included; the host's is shared memory."""
    hidden, layers = 256, 8
    x = torch.randn(TOKENS, hidden)
    options = {"weights": "host", "exact": True, "gradients": "fresh", "debug": ()}
    options["optimizer_state_bytes_per_parameter"] = 0
    with pytest.raises(Infeasible) as refused:
        memo_compiled(model_of(layers, hidden), memory_budget=1, **options)(x)
    budget = refused.value.floor_bytes
    ours, plain = model_of(layers, hidden), model_of(layers, hidden)
    all_bytes = sum(each.nbytes for each in ours.parameters())
    assert budget < 1.5 * all_bytes  # gradients take as much, and two layers' weights
    torch._dynamo.reset()
    run = memo_compiled(ours, memory_budget=budget, **options)
    run_forward, peaks = assemble.run_forward, []

    def watched(*args: object) -> object:
        arena_of(torch.device("cpu")).release_pages()
        gc.collect()
        held = sum(each.nbytes for each in ours.parameters() if place_of(each) is None)
        peaks.append((held + x.nbytes, stack.enter_context(watch_memory())))
        return run_forward(*args)

    monkeypatch.setattr(assemble, "run_forward", watched)
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            run(x).backward()
        plain(x).backward()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
            mine.grad = theirs.grad = None
    assert max(held + memory.growth_bytes for held, memory in peaks) <= 1.005 * budget


def test_weights_that_share_memory_stay_shared() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    layers[1].weight = nn.Parameter(layers[0].weight.detach())  # tied by memory, as loaders do it
    memo_compile.parameters_on_host(layers)
    assert place_of(layers[2].weight) is not None
    with torch.no_grad():
        layers[0].weight.zero_()
    assert not layers[1].weight.any()
