"""``memo_compile.offload``: updates equal the plain optimizer's to the last bit, and take less."""

import copy
import gc
import itertools
import signal
from collections.abc import Callable

import pytest
import torch
from memo_runtime.host_state import host_state
from memo_runtime.host_tensors import place_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memo_compile
from memo_compile.errors import ConfigError, Infeasible
from memo_compile.training_state import update as update_module
from memo_compile.training_state.gradient_homes import IN_A_BUFFER
from tests import models
from tests.numerics.training import ATEN

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adam, lr a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=1e-2),
}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """1.3 MB of parameters in float32: twenty chunks, and matrices of several slices."""
    torch.manual_seed(1)
    layers = [nn.Linear(250, 640), nn.Tanh(), nn.Linear(640, 250), nn.LayerNorm(250)]
    return nn.Sequential(*layers, nn.Linear(250, 33)).to(dtype)


UPDATES = pytest.mark.parametrize("update", ["device", "host"])


def pair(
    make: Make, dtype: torch.dtype = torch.float32, update: str = "device"
) -> tuple["Training", "Training"]:
    """The plain optimizer and the offloaded one, of equal models."""
    plain, ours = Training(net(dtype)), Training(net(dtype))
    plain.optimizer = make(list(plain.model.parameters()))
    ours.optimizer = memo_compile.offload(make(list(ours.model.parameters())), update=update)
    return plain, ours


class Training:
    """A model in training."""

    optimizer: torch.optim.Optimizer

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.dtype = next(model.parameters()).dtype

    def backward(self, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        x = torch.randn(5, 250).to(self.dtype)
        loss = self.model(x).float().square().mean()
        loss.backward()
        return loss

    def step(self, seed: int) -> None:
        self.optimizer.zero_grad()
        self.backward(seed)
        self.optimizer.step()


def assert_equal(plain: Training, ours: Training) -> None:
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    of_ours, of_plain = ours.optimizer.state_dict(), plain.optimizer.state_dict()
    assert of_ours["state"].keys() == of_plain["state"].keys()
    for number, state in of_plain["state"].items():
        assert list(of_ours["state"][number]) == list(state)
        for name, value in state.items():
            assert_same(of_ours["state"][number][name], value)
    for mine, theirs in zip(of_ours["param_groups"], of_plain["param_groups"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert_same(mine[name], value)


def assert_same(mine: object, theirs: object) -> None:
    if isinstance(theirs, torch.Tensor):
        assert isinstance(mine, torch.Tensor)
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    else:
        assert mine == theirs


@UPDATES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_and_state_are_those_of_the_plain_optimizer(
    update: str, name: str, dtype: torch.dtype
) -> None:
    plain, ours = pair(OPTIMIZERS[name], dtype, update)
    for seed in range(3):
        plain.step(seed)
        ours.step(seed)
    assert_equal(plain, ours)
    assert isinstance(ours.optimizer, torch.optim.Optimizer)


def test_state_lies_in_shared_memory_between_updates() -> None:
    _, ours = pair(OPTIMIZERS["adamw"])
    ours.step(0)
    parameter = next(ours.model.parameters())
    state = host_state(parameter)
    assert state is not None
    assert state.host_bytes == 8 * parameter.numel()
    held = ours.optimizer.state[parameter]["exp_avg"]
    assert held.untyped_storage().nbytes() > held.nbytes  # of a store, not of its own


@UPDATES
@pytest.mark.parametrize("schedule", ["copies-early", "copies-late"])
def test_copies_as_early_and_as_late_as_they_may_be(
    schedule: str, update: str, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: memo_compile.configure(debug=None))
    memo_compile.configure(debug=schedule)
    plain, ours = pair(OPTIMIZERS["adam amsgrad"], update=update)
    for seed in range(4):
        plain.step(seed)
        ours.step(seed)
    assert_equal(plain, ours)


@UPDATES
def test_a_loop_with_all_that_loops_have(update: str) -> None:
    """Groups, a schedule, accumulation, clipping, a frozen layer, a closure, a new group."""

    def groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        split = [
            {"params": parameters[:3], "weight_decay": 0.1},
            {"params": parameters[3:5], "lr": 1e-3, "betas": (0.5, 0.9)},
        ]
        return torch.optim.AdamW(split, lr=1e-2)

    plain, ours = pair(groups, update=update)
    plain.model[0].bias.requires_grad_(False)
    ours.model[0].bias.requires_grad_(False)
    for each in (plain, ours):
        schedule = torch.optim.lr_scheduler.LambdaLR(each.optimizer, lambda at: min(1.0, at / 3))
        for seed in range(6):
            each.optimizer.zero_grad()
            each.backward(seed)
            each.backward(seed + 50)
            if each is plain:
                held = [p for group in plain.optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(held, 0.1)
            else:
                ours.optimizer.clip_grad_norm_(0.1)
            nn.utils.clip_grad_value_(each.model.parameters(), 0.01)
            loss = each.optimizer.step(lambda: torch.tensor(3.0))
            assert loss == 3.0
            if seed < 3:
                schedule.step()
            if seed == 3:  # from here on without a schedule, which knows no new groups
                each.model[0].bias.requires_grad_(True)
                each.optimizer.add_param_group({"params": list(each.model[4].parameters())})
    assert_equal(plain, ours)


@UPDATES
def test_a_tied_weight_and_one_in_another_layout(update: str) -> None:
    def tied(offloads: bool) -> Training:
        torch.manual_seed(0)
        first = nn.Conv2d(40, 40, 3, padding=1).to(memory_format=torch.channels_last)
        second = nn.Conv2d(40, 40, 3, padding=1)
        second.weight = first.weight
        training = Training(nn.Sequential(nn.Unflatten(1, (40, 2, 2)), first, second))
        optimizer = torch.optim.Adam(training.model.parameters(), lr=1e-2)
        training.optimizer = (
            memo_compile.offload(optimizer, update=update) if offloads else optimizer
        )
        return training

    plain, ours = tied(False), tied(True)
    for each in (plain, ours):
        for seed in range(3):
            torch.manual_seed(seed)
            each.optimizer.zero_grad()
            each.model(torch.randn(2, 160)).square().mean().backward()
            each.optimizer.step()
    assert_equal(plain, ours)


@UPDATES
@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "muon"])
def test_a_checkpoint_goes_from_one_kind_to_the_other_and_back(update: str, name: str) -> None:
    plain, ours = pair(OPTIMIZERS[name], update=update)
    for seed in range(2):
        plain.step(seed)
        ours.step(seed)
    saved = [copy.deepcopy(each.optimizer.state_dict()) for each in (plain, ours)]
    weights = copy.deepcopy(ours.model.state_dict())
    resumed_plain, resumed = pair(OPTIMIZERS[name], update=update)
    resumed.step(7)  # what it had before goes
    for each, state in ((resumed_plain, saved[1]), (resumed, saved[0])):
        each.model.load_state_dict(weights)
        each.optimizer.load_state_dict(state)
    for seed in range(2, 4):
        for each in (plain, ours, resumed_plain, resumed):
            each.step(seed)
    assert_equal(plain, ours)
    assert_equal(plain, resumed_plain)
    assert_equal(plain, resumed)


@UPDATES
@pytest.mark.parametrize("name", ["adamw", "adamw fused"])
def test_a_gradient_scaler_skips_the_same_steps(update: str, name: str) -> None:
    plain, ours = pair(OPTIMIZERS[name], update=update)
    for each in (plain, ours):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for seed in range(4):
            each.optimizer.zero_grad()
            torch.manual_seed(seed)
            loss = each.model(torch.randn(5, 250)).square().mean()
            scaler.scale(loss * (float("inf") if seed == 1 else 1.0)).backward()
            scaler.unscale_(each.optimizer)
            scaler.step(each.optimizer)
            scaler.update()
    assert_equal(plain, ours)


@UPDATES
def test_state_that_was_made_before_goes_to_the_host(update: str) -> None:
    plain, ours = pair(OPTIMIZERS["sgd"], update=update)
    for each in (plain, ours):
        each.optimizer = torch.optim.Adam(each.model.parameters(), lr=1e-2)
        each.step(0)
    ours.optimizer = memo_compile.offload(ours.optimizer, update=update)
    for each in (plain, ours):
        each.step(1)
    assert_equal(plain, ours)


@UPDATES
def test_options_and_state_that_the_program_changes_are_taken_up(update: str) -> None:
    plain, ours = pair(OPTIMIZERS["sgd"], update=update)
    for each in (plain, ours):
        each.step(0)
        each.optimizer.param_groups[0]["momentum"] = 0.9
        each.step(1)
        each.step(2)
        each.optimizer.state.clear()
        each.step(3)
        parameter = next(each.model.parameters())
        each.optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        each.step(4)
    assert_equal(plain, ours)


@UPDATES
def test_a_checkpoint_with_other_options_is_taken(update: str) -> None:
    plain, ours = pair(OPTIMIZERS["adamw"], update=update)
    saved, _ = pair(OPTIMIZERS["adam amsgrad"], update=update)
    saved.step(0)
    for each in (plain, ours):
        each.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
        each.step(1)
        each.step(2)
    assert_equal(plain, ours)


def test_plans_count_the_state_again_when_the_optimizer_is_gone() -> None:
    _, ours = pair(OPTIMIZERS["adamw"])
    parameter = next(ours.model.parameters())
    assert host_state(parameter) is not None
    del ours.optimizer
    gc.collect()
    assert host_state(parameter) is None


@UPDATES
def test_ctrl_c_waits_for_the_whole_update(update: str, request: pytest.FixtureRequest) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores Ctrl-C
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    plain, ours = pair(OPTIMIZERS["adamw"], update=update)
    for each in (plain, ours):
        each.step(0)
        each.optimizer.zero_grad()
        each.backward(1)
    plain.optimizer.step()
    with pytest.raises(KeyboardInterrupt), Interrupting():
        ours.optimizer.step()
    assert_equal(plain, ours)


class Interrupting(TorchDispatchMode):
    """Ctrl-C comes with the first operator of the update."""

    sent = False

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        if not self.sent and "addcdiv" in str(func):
            self.sent = True
            signal.raise_signal(signal.SIGINT)
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot be updated in parts"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam cannot be updated in parts"),
        (lambda p: Own(p, {}), "expected an optimizer of torch.optim, got Own"),
        (lambda p: p, "expected an optimizer, got list"),
        (lambda p: memo_compile.offload(torch.optim.SGD(p)), "on the host already"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_in_one_sentence(make: Make, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        memo_compile.offload(make(list(net().parameters())))


class Own(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Does nothing."""


def test_a_place_that_is_none_is_refused() -> None:
    optimizer = torch.optim.SGD(net().parameters())
    with pytest.raises(ConfigError, match="state: expected one of"):
        memo_compile.offload(optimizer, state="disk")
    assert memo_compile.offload(optimizer, state="device") is optimizer


@pytest.fixture
def trained() -> Callable[..., tuple[list[torch.Tensor], int]]:
    """Trains a small Llama under a budget; gives its weights and the planned peak."""

    def train(
        update: str | None, budget: int | None = None, microbatches: int = 1, **more: object
    ) -> tuple[list[torch.Tensor], int]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        start, inputs, loss = models.llama(num_layers=3, seq=32)
        model = copy.deepcopy(start)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = memo_compile.offload(optimizer, update=update) if update else optimizer
        options = {**ATEN, "costs": "roofline"} | ({"memory_budget": budget} if budget else {})
        options |= more
        compiled = torch.compile(model, backend="memo", options=options)
        for _ in range(3):
            for _ in range(microbatches):
                loss(compiled, **inputs).backward()
            held = [each.grad for each in model.parameters() if each.grad is not None]
            assert update != "host" or all(map(place_of, held))
            optimizer.step()
            optimizer.zero_grad()
            del held
        plan = memo_compile.report().plans[-1]
        assert plan.check.ok
        return [each.detach() for each in model.parameters()], plan.peak_bytes

    return train


def test_a_plan_counts_the_update_in_place_of_the_state(
    trained: Callable[..., tuple[list[torch.Tensor], int]],
) -> None:
    plain, peak_bytes = trained(None)
    ours, less_bytes = trained("device")
    assert all(map(torch.equal, plain, ours))
    state = memo_compile.report().training_state
    assert state is not None
    parameters_bytes = sum(each.nbytes for each in ours)
    assert state.optimizer_state.host_bytes == 2 * parameters_bytes
    assert state.optimizer_state.device_bytes == 0
    assert state.update == "device"
    assert less_bytes < peak_bytes
    floor_bytes = floor(trained, "device")
    assert floor_bytes <= peak_bytes - 1.5 * parameters_bytes
    at_floor, planned_bytes = trained("device", budget=floor_bytes)
    assert planned_bytes <= floor_bytes
    assert len(at_floor) == len(plain)


def floor(trained: Callable[..., tuple[list[torch.Tensor], int]], update: str) -> int:
    """The smallest budget for which there is a plan."""
    with pytest.raises(Infeasible) as refused:
        trained(update, budget=1)
    assert refused.value.floor_bytes is not None
    return refused.value.floor_bytes


@pytest.mark.parametrize(
    ("microbatches", "schedule"),
    [(3, "copies-late"), pytest.param(1, "copies-early", marks=pytest.mark.full)],
)
def test_gradients_leave_as_they_are_made(
    trained: Callable[..., tuple[list[torch.Tensor], int]], microbatches: int, schedule: str
) -> None:
    plain, _ = trained(None, microbatches=microbatches)
    parameters_bytes = sum(each.nbytes for each in plain)
    budget = 2 * parameters_bytes  # of parameters and gradients alone
    ours, planned_bytes = trained("host", budget, microbatches, debug=("poison", schedule))
    assert planned_bytes <= budget
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)  # in tiles of tokens
    state = memo_compile.report().training_state
    assert state is not None
    assert state.gradients.device_bytes == 0
    assert state.gradients.host_bytes == parameters_bytes
    assert state.update == "host"


def test_the_update_moves_to_the_host_where_a_step_does_not_fit(
    trained: Callable[..., tuple[list[torch.Tensor], int]],
) -> None:
    plain, _ = trained("auto")
    state = memo_compile.report().training_state
    assert state is not None
    assert state.update == "device"
    budget = int(2.4 * sum(each.nbytes for each in plain))
    ours, planned_bytes = trained("auto", budget, exact=True)
    state = memo_compile.report().training_state
    assert state is not None
    assert state.update == "host"
    assert any("the optimizer updates on the host" in note for note in memo_compile.report().notes)
    assert planned_bytes <= budget
    assert all(map(torch.equal, ours, plain))


def test_the_update_stays_where_a_declared_host_budget_holds_no_gradients(
    trained: Callable[..., tuple[list[torch.Tensor], int]],
) -> None:
    plain, _ = trained("auto")
    budget = int(2.4 * sum(each.nbytes for each in plain))
    with pytest.raises(Infeasible, match="more than host_budget 0 B"):
        trained("auto", budget, exact=True, host_budget=0)


def test_gradients_go_where_kernels_read_them_whatever_activations_are_offloaded_to(
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(lambda: memo_compile.configure(host_store=None))
    memo_compile.configure(host_store="shm")
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    ours = memo_compile.offload(optimizer, update="host")
    assert ours._gradients.kind_on(torch.device("cuda")) == "pinned"
    assert ours._gradients.kind_on(torch.device("cpu")) == "shm"


def test_gradients_that_the_program_makes_or_keeps_itself() -> None:
    """One set by hand, one of a graph of gradients, zeros kept, a forward before the update."""
    plain, ours = pair(OPTIMIZERS["adamw"], update="host")
    for each in (plain, ours):
        parameters = list(each.model.parameters())
        for seed in range(4):
            loss = each.backward(seed)
            if seed == 1:
                parameters[0].grad = torch.ones_like(parameters[0])
            if seed == 2:
                loss = each.model(torch.ones(2, 250)).sum()
                made = torch.autograd.grad(loss, parameters, create_graph=True)
                torch.stack([gradient.square().sum() for gradient in made]).sum().backward()
            each.model(torch.ones(2, 250))
            each.optimizer.step()
            each.optimizer.zero_grad(set_to_none=seed % 2 == 0)
    assert_equal(plain, ours)


def test_a_layer_is_frozen_at_first_and_the_optimizer_goes() -> None:
    model = net()
    weight = model[0].weight
    weight.requires_grad_(False)
    optimizer = memo_compile.offload(torch.optim.SGD(model.parameters(), lr=0.1), update="host")
    x = torch.ones(2, 250)
    model(x).sum().backward()
    assert weight.grad is None
    optimizer.step()
    weight.requires_grad_(True)
    model(x).sum().backward()
    assert weight.grad is not None
    assert place_of(weight.grad) is not None
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    model(x).sum().backward()
    assert place_of(weight.grad) is None


def test_host_memory_of_gradients_is_used_again_once_nobody_holds_them() -> None:
    _, ours = pair(OPTIMIZERS["sgd"], update="host")
    parameter = next(ours.model.parameters())
    places, held = [], []
    for seed in range(4):
        ours.step(seed)
        assert parameter.grad is not None
        places.append(parameter.grad.data_ptr())
        if seed == 2:
            held = [parameter.grad, parameter.grad.clone()]
    assert places[0] == places[1] == places[2] != places[3]
    assert torch.equal(*held)


def test_free_heap_goes_back_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary tensors of each chunk would touch another part of it."""
    trims: list[None] = []
    resident_bytes = itertools.chain([0], itertools.repeat(2**40))
    monkeypatch.setattr(update_module, "trim_heap", lambda: trims.append(None))
    monkeypatch.setattr(update_module, "anonymous_bytes", lambda: next(resident_bytes))
    _, ours = pair(OPTIMIZERS["sgd momentum"], update="host")
    ours.step(0)
    assert len(trims) > 10


def test_gradients_in_a_buffer_of_the_program_stay_there() -> None:
    """For example one that is reduced among ranks, or cleared, as a whole."""
    model = nn.Linear(32, 32)
    optimizer = memo_compile.offload(torch.optim.SGD(model.parameters(), lr=0.1), update="host")
    flat = torch.zeros(sum(each.numel() for each in model.parameters()))
    start = 0
    for parameter in model.parameters():
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    x = torch.randn(4, 32)
    for _ in range(3):
        flat.zero_()
        model(x).sum().backward()
        assert torch.equal(model.bias.grad, torch.full((32,), 4.0))
        assert flat[-1] == 4.0
        optimizer.step()
    assert memo_compile.report().notes == (IN_A_BUFFER,)
