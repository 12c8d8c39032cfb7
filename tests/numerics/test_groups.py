"""Blocks that are compiled one by one run as one group, with the numbers of eager."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from memo_runtime.arena import arena_of
from memo_runtime.leases import leases
from torch import nn
from torch.utils.checkpoint import checkpoint

import memo_compile
from memo_compile.backends import retile
from memo_compile.driver import joint_plan
from memo_compile.driver.between import Between
from memo_compile.driver.joint_steps import MAX_WATCHED
from memo_compile.driver.stages import PlanRequest
from memo_compile.errors import ConfigError, Infeasible
from memo_compile.reporting import state
from memo_compile.step.interludes import IGNORED_BYTES
from tests.numerics.small import in_two_threads
from tests.steps.running import CPU, Words

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo hides it by a filter
)

WORDS, LAYERS = 64, 4
ANEW = "a graph was compiled anew, in other tiles, because its steps needed more"
LIMIT = 2e-6
"""Of each parameter's largest gradient: sums in another order."""


def options(**more: Any) -> dict[str, Any]:
    debug = more.pop("debug", ())
    return {
        "lowering": "aten",
        "strict": True,
        "costs": "roofline",
        "token_granule": 4,
        "debug": ("poison", *debug),
        **more,
    }


Run = Callable[[nn.Module, torch.Tensor], Any]
"""What a step does with a model and its words."""


class Regional:
    """A model whose blocks are compiled one by one, and the same model in eager."""

    def __init__(self, num_layers: int = LAYERS, **more: Any) -> None:
        torch._dynamo.reset()
        state.reset()
        torch.manual_seed(0)
        self.model = Words(num_layers=num_layers, words=WORDS)
        self.eager = copy.deepcopy(self.model)
        for layer in self.model.layers:
            layer.compile(backend="memo", options=options(**more))
        self.both = (self.model, self.eager)

    def zero(self) -> None:
        for model in self.both:
            model.zero_grad()

    def step(self, tokens: int = 33, run: Run | None = None, name: str = "") -> None:
        """One step of both, on the same words; gradients are added to those that are there."""
        ids = torch.randint(0, WORDS, (2, tokens))
        for model in self.both:
            (run or _plainly)(model, ids)
        self.compare(name)

    def compare(self, what: str) -> None:
        pairs = zip(self.model.named_parameters(), self.eager.named_parameters(), strict=True)
        for (name, mine), (_, theirs) in pairs:
            if theirs.grad is None:
                assert mine.grad is None, (what, name)
                continue
            assert mine.grad is not None, (what, name)
            most = theirs.grad.abs().max().item() + 1e-12
            assert (mine.grad - theirs.grad).abs().max().item() <= LIMIT * most, (what, name)

    def group(self) -> Any:
        (found,) = memo_compile.report().groups
        return found


def _plainly(model: nn.Module, ids: torch.Tensor) -> None:
    model(ids).backward()


def first_block(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model.layers[0](model.entry(ids)).pow(2).mean()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not any(slab.leased for slab in arena_of(CPU)._slabs)
    assert not leases.any_live()


@pytest.mark.parametrize(
    ("policy", "schedule"),
    [
        ("save", "copies-late"),
        ("full-offload", "copies-early"),
        pytest.param("full-offload", "copies-late", marks=pytest.mark.full),
    ],
)
def test_all_forwards_are_planned_from_the_second_step_on(policy: str, schedule: str) -> None:
    blocks = Regional(policy=policy, debug=(schedule,))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in blocks.both]
    for _ in range(4):
        blocks.zero()
        blocks.step()
        for optimizer in optimizers:
            optimizer.step()
    report, group = memo_compile.report(), blocks.group()
    assert report.active
    assert report.unplanned_steps == LAYERS - 1
    assert group.num_instances == LAYERS
    assert group.check.ok
    assert group.offloaded_bytes == (group.host_bytes if policy == "full-offload" else 0)
    assert (group.recomputed_bytes > 0) == (policy == "full-recompute")


def test_a_budget_that_the_first_step_may_exceed_is_said() -> None:
    blocks = Regional(memory_budget="1GiB")
    blocks.step()
    (note,) = (note for note in memo_compile.report().notes if "memory_budget" in note)
    assert "in their first step, which is watched, each keeps memory_budget by itself or" in note
    assert "plans modules that share a graph from the first step on" in note
    assert not any("max_inflight" in own for own in memo_compile.report().notes)


def test_a_frame_holds_what_one_member_needs_when_all_others_are_offloaded() -> None:
    sizes = {}
    for num_layers in (3, 6):
        blocks = Regional(num_layers, policy="full-offload")
        for _ in range(2):
            blocks.zero()
            blocks.step()
        sizes[num_layers] = blocks.group().arena_bytes
    assert sizes[6] <= 1.05 * sizes[3]


def no_gradients(model: nn.Module, ids: torch.Tensor) -> None:
    with torch.no_grad():
        model(ids)
    model(ids)  # with gradients, which nobody asks for
    model(ids).backward()


def _fails(*_: Any) -> None:
    raise ValueError("half way")


def fails_in_forward(number: int) -> Run:
    def run(model: nn.Module, ids: torch.Tensor) -> None:
        hook = model.layers[number].register_forward_pre_hook(_fails)
        try:
            with pytest.raises(ValueError, match="half way"):
                model(ids)
        finally:
            hook.remove()
        model(ids).backward()

    return run


def fails_in_backward(number: int) -> Run:
    """The gradient of a block's result arrives when the blocks behind it have run."""

    def run(model: nn.Module, ids: torch.Tensor) -> None:
        before = [None if own.grad is None else own.grad.clone() for own in model.parameters()]
        x = model.entry(ids)
        for at, layer in enumerate(model.layers):
            x = layer(x)
            if at == number:
                x.register_hook(_fails)
        with pytest.raises(ValueError, match="half way"):
            x.square().mean().backward()
        for own, old in zip(model.parameters(), before, strict=True):
            own.grad = old
        del x
        model(ids).backward()

    return run


def without(number: int) -> Run:
    def run(model: nn.Module, ids: torch.Tensor) -> None:
        x = model.entry(ids)
        for at, layer in enumerate(model.layers):
            x = layer(x) if at != number else x
        x.square().mean().backward()

    return run


def with_unused(number: int) -> Run:
    """The block runs, and nothing reads what it made."""

    def run(model: nn.Module, ids: torch.Tensor) -> None:
        x = model.entry(ids)
        for at, layer in enumerate(model.layers):
            made = layer(x)
            x = x * 2 if at == number else made
        x.square().mean().backward()

    return run


def kept(model: nn.Module, ids: torch.Tensor) -> None:
    loss = model(ids)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def partly_first(model: nn.Module, ids: torch.Tensor) -> None:
    made = [model.entry(ids)]
    for layer in model.layers:
        made.append(layer(made[-1]))
    loss = made[-1].square().mean()
    (found,) = torch.autograd.grad(loss, made[2], retain_graph=True)
    (loss + (made[1] * found.mean()).sum()).backward()


def in_another_order(model: nn.Module, ids: torch.Tensor) -> None:
    x = model.entry(ids).detach().requires_grad_()
    losses = [layer(x).square().mean() for layer in model.layers]
    for number in (1, 3, 0, 2):
        losses[number].backward()


def reentrant(model: nn.Module, ids: torch.Tensor) -> None:
    x = model.entry(ids)
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=True)
    x.square().mean().backward()


def not_reentrant(model: nn.Module, ids: torch.Tensor) -> None:
    x = model.entry(ids)
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    x.square().mean().backward()


PLACES = (0, 2, LAYERS - 1)
"""The first member, one between two others, the last."""

INSIDE: dict[str, Run] = {
    "no gradients": no_gradients,
    **{f"fails in forward {at}": fails_in_forward(at) for at in PLACES},
    **{f"fails in backward {at}": fails_in_backward(at) for at in PLACES},
    **{f"without {at}": without(at) for at in PLACES},
    **{f"unused {at}": with_unused(at) for at in PLACES},
    "kept": kept,
    "partly first": partly_first,
    "in another order": in_another_order,
    "reentrant": reentrant,
}
"""What a group's frame serves although it was planned for something else."""


@pytest.mark.parametrize(
    ("policy", "schedule"),
    [
        ("full-offload", "copies-late"),
        pytest.param("full-recompute", "copies-early", marks=pytest.mark.full),
        pytest.param("memo", "copies-early", marks=pytest.mark.full),
    ],
)
def test_whatever_comes_the_numbers_are_right(policy: str, schedule: str) -> None:
    blocks = Regional(policy=policy, debug=(schedule,))
    for _ in range(2):
        blocks.zero()
        blocks.step()
    assert blocks.group().num_instances == LAYERS
    for name, run in INSIDE.items():
        before = memo_compile.report().unplanned_steps
        blocks.zero()
        for _ in range(2):  # accumulated
            blocks.step(run=run, name=name)
        blocks.step(name=f"after {name}")
        report = memo_compile.report()
        assert report.unplanned_steps == before, name
        assert report.active, name


def test_more_forwards_than_members_run_in_ordinary_memory() -> None:
    blocks = Regional(policy="full-offload")
    for _ in range(2):
        blocks.zero()
        blocks.step()

    def run(model: nn.Module, ids: torch.Tensor) -> None:
        x = model.entry(ids)
        for layer in (*model.layers, model.layers[1]):
            x = layer(x)
        x.square().mean().backward()

    for more, used in ((1, run), (LAYERS, not_reentrant)):
        before = memo_compile.report().unplanned_steps
        blocks.step(run=used)
        assert memo_compile.report().unplanned_steps - before in (more, 0)
        blocks.step()
        assert memo_compile.report().active


def test_a_changed_number_of_layers_is_planned_again() -> None:
    blocks = Regional(policy="full-offload")
    for _ in range(2):
        blocks.zero()
        blocks.step()
    for model in blocks.both:
        model.layers.append(copy.deepcopy(blocks.eager.layers[0]))
    blocks.model.layers[-1].compile(backend="memo", options=options(policy="full-offload"))
    before = memo_compile.report().unplanned_steps
    for _ in range(4):
        blocks.zero()
        blocks.step()
    assert blocks.group().num_instances == LAYERS + 1
    assert memo_compile.report().unplanned_steps == before + 2
    assert memo_compile.report().active


def test_two_models_that_share_code() -> None:
    blocks = Regional(policy="full-offload")
    other = copy.deepcopy(blocks.eager)
    eager = copy.deepcopy(blocks.eager)
    for layer in other.layers:
        layer.compile(backend="memo", options=options(policy="full-offload"))
    for _ in range(3):
        blocks.zero()
        blocks.step()
        ids = torch.randint(0, WORDS, (2, 33))
        for model in (other, eager):
            model.zero_grad()
            model(ids).backward()
        for mine, theirs in zip(other.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_two_threads_do_not_meet_in_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Regional(policy="full-offload")
    for _ in range(2):
        blocks.zero()
        blocks.step()
    words = [torch.randint(0, WORDS, (2, 33)) for _ in range(2)]

    def run(model: nn.Module, at: int) -> Any:
        return torch.autograd.grad(model(words[at]), list(model.parameters()))

    found = in_two_threads(monkeypatch, lambda at: run(blocks.model, at))
    eager = [run(blocks.eager, at) for at in range(2)]
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-6)


def test_a_second_length_is_a_group_of_its_own() -> None:
    blocks = Regional(2, policy="full-offload")
    for tokens in (33, 33, 21, 21, 33, 21):
        blocks.zero()
        blocks.step(tokens)
    # The third is of the graph for all lengths, which 33 tokens meet when they come again.
    assert [group.num_instances for group in memo_compile.report().groups] == 3 * [2]


@pytest.mark.full
def test_a_budget_below_the_floor_is_refused_with_the_floor() -> None:
    blocks = Regional(memory_budget=1_200_000)
    blocks.step()
    with pytest.raises(Infeasible, match="floor") as refused:
        blocks.step()
    assert refused.value.floor_bytes is not None
    # What runs between blocks is measured anew, and is most of what so small a model needs.
    budget = refused.value.floor_bytes + 4 * IGNORED_BYTES
    blocks = Regional(memory_budget=budget)
    for _ in range(3):
        blocks.zero()
        blocks.step()
    assert memo_compile.report().unplanned_steps == LAYERS - 1
    assert blocks.group().peak_bytes <= budget


def test_the_refusal_of_the_first_block_names_the_floor_of_all() -> None:
    """Nothing has run: modules that are compiled alike, in one model, are taken for a group."""
    blocks = Regional(memory_budget=1)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as refused:
        blocks.step()
    error = refused.value.inner_exception
    assert f"the floor of {LAYERS} blocks that are compiled alike" in str(error)
    blocks = Regional(memory_budget=error.floor_bytes + 4 * IGNORED_BYTES)
    for _ in range(3):
        blocks.zero()
        blocks.step()
    assert memo_compile.report().unplanned_steps == LAYERS - 1
    parameters = sum(own.nbytes for own in blocks.model.parameters())
    assert error.floor_bytes > 2 * parameters, "those of all blocks, and their gradients"


def test_a_declared_group_is_planned_in_its_first_step() -> None:
    torch.manual_seed(0)
    blocks = Regional.__new__(Regional)
    blocks.model = Words(num_layers=LAYERS, words=WORDS)
    blocks.eager = copy.deepcopy(blocks.model)
    blocks.both = (blocks.model, blocks.eager)
    memo_compile.group(blocks.model.layers, **options(policy="full-offload"))
    for _ in range(3):
        blocks.zero()
        blocks.step()
        report = memo_compile.report()
        assert report.active
        assert report.unplanned_steps == 0
        assert blocks.group().num_instances == LAYERS


def test_without_the_copy_of_the_input_the_numbers_are_the_same() -> None:
    blocks = Regional(policy="full-offload", passes=("-own-inputs",))
    for _ in range(3):
        blocks.zero()
        blocks.step()
    held = blocks.group().host_bytes
    copied = Regional(policy="full-offload")
    for _ in range(2):
        copied.zero()
        copied.step()
    assert copied.group().host_bytes > held


def test_what_cannot_be_a_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 modules, got 1"):
        memo_compile.group([nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match="expected modules, got int"):
        memo_compile.group([nn.Linear(2, 2), 3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="unknown option 'memory_budge'"):
        memo_compile.group([nn.Linear(2, 2), nn.Linear(2, 2)], memory_budge=3)


def test_one_module_that_is_called_twice_is_no_group() -> None:
    blocks = Regional(policy="full-offload")
    layer = blocks.model.layers[0]
    for _ in range(2):
        x = torch.randn(2, 33, 32, requires_grad=True)
        (layer(x) + layer(2 * x)).square().mean().backward()
    assert not memo_compile.report().groups


@pytest.mark.full
def test_inductor_lowers_the_blocks() -> None:
    blocks = Regional(2, policy="full-offload", lowering="inductor", debug=("copies-late",))
    for _ in range(3):
        blocks.zero()
        blocks.step()
    assert memo_compile.report().unplanned_steps == 1
    assert blocks.group().offloaded_bytes == blocks.group().host_bytes > 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("policy", ["full-offload", "full-recompute", "memo"])
def test_models_of_transformers(kind: str, policy: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
        config = transformers.LlamaConfig(vocab_size=97, **sizes, **heads)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=97, n_embd=64, n_layer=5, n_head=4, n_positions=64, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    blocks = Regional.__new__(Regional)
    blocks.model, blocks.eager = model.train(), copy.deepcopy(model).train()
    blocks.both = (blocks.model, blocks.eager)
    layers = model.model.layers if kind == "llama" else model.transformer.h
    for layer in layers:
        layer.compile(backend="memo", options=options(policy=policy, debug=("copies-late",)))

    def run(model: nn.Module, ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in blocks.both]
    for number in range(4):
        blocks.zero()
        blocks.step(37, run, f"{kind} {policy} {number}")
        blocks.step(37, run, f"{kind} {policy} {number}, accumulated")
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():  # what AdamW makes of rounding does not grow from step to step
            for mine, theirs in zip(*(both.parameters() for both in blocks.both), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)
                mine.copy_(theirs)
    assert memo_compile.report().active
    assert memo_compile.report().unplanned_steps == 4
    assert blocks.group().num_instances == 5


def test_other_tiles_are_compiled_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no tiles of the block serve is compiled before the next step, under its modes."""
    refused: list[PlanRequest] = []

    def refuse(*args: Any) -> Any:
        refused.append(args[2])
        raise Infeasible("in these tiles", floor_bytes=1)

    def run(model: nn.Module, ids: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids)
        loss.backward()

    blocks = Regional(memory_budget=50 * 2**20, token_tiles=None)
    with monkeypatch.context() as patched:
        patched.setattr(joint_plan, "plan_shared", refuse)
        blocks.step(run=run)
    assert [request.joint.num_members for request in refused if request.joint] == [LAYERS]
    monkeypatch.setattr(retile, "shared_memory", lambda *_: pytest.fail("compiled in a later step"))
    assert ANEW in memo_compile.report().notes
    for _ in range(3):
        blocks.zero()
        blocks.step(run=run)
    assert memo_compile.report().unplanned_steps == LAYERS - 1
    assert blocks.group().check.ok


def test_what_runs_between_blocks_counts_without_a_budget() -> None:
    num_bytes = 2**26

    def takes_more(model: nn.Module, ids: torch.Tensor) -> None:
        x = model.entry(ids)
        for layer in model.layers:
            x = layer(x)
        (x.square().mean() + torch.zeros(num_bytes // 4).add_(1).mean()).backward()

    blocks = Regional()
    for _ in range(2):
        blocks.zero()
        blocks.step(run=takes_more)
    assert blocks.group().between_bytes == pytest.approx(num_bytes, rel=0.05)
    assert blocks.group().peak_bytes > num_bytes


def test_nobody_looks_at_the_memory_of_a_graph_that_is_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes a garbage collection each time. What becomes a group later is looked at then."""
    looks = []
    begin = Between.begin

    def count(self: Between, *args: int) -> None:
        looks.append(len(looks))
        begin(self, *args)

    monkeypatch.setattr(Between, "begin", count)
    blocks = Regional(memory_budget=50 * 2**20)
    for _ in range(MAX_WATCHED):
        blocks.zero()
        blocks.step(run=lambda model, ids: first_block(model, ids).backward())
    assert looks
    looks.clear()
    for _ in range(3):
        blocks.zero()
        blocks.step(run=lambda model, ids: first_block(model, ids).backward())
    assert not looks
    for _ in range(4):
        blocks.zero()
        blocks.step()
    assert blocks.group().between_bytes >= 0
    assert len(looks) == 2 * LAYERS - 1, "in one step, between its halves"
