"""Steps under a bound whose shapes, parameters or use are out of the ordinary."""

import functools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import memo_compile
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from memo_compile.step.plans import Plan
from tests import models
from tests.models import ModelCase
from tests.numerics import closeness
from tests.numerics.budget_cases import (
    Case,
    assert_bitwise,
    assert_close,
    assert_moved,
    floor_bytes,
    replanned,
    run,
    save_run,
    traced,
)
from tests.numerics.closeness import Reference
from tests.numerics.small import leased_slabs
from tests.numerics.traced import Options, TracedStep
from tests.numerics.training import (
    ATEN,
    Run,
    Starts,
    assert_planned,
    in_ci,
    memo_compiled,
    sgd,
    train,
)

MOVING = {"costs": "roofline", "token_granule": 8, "token_tiles": 1}
POLICIES = {
    "out": {"policy": "full-offload"},
    "again": {"policy": "full-recompute"},
    "mix": {"policy": "memo", "alpha": 0.5},
}


def under(case: ModelCase, starts: Starts = (), **options: object) -> tuple[Run, Plan]:
    torch._dynamo.reset()
    done = training(case, starts)({**ATEN, **MOVING, **options})
    assert_planned()
    return done, memo_compile.report().plans[-1]


def training(case: ModelCase, starts: Starts = ()) -> Callable[[Options], Run]:
    """Trains the case under the options that it is given."""

    def with_options(options: Options) -> Run:
        compiled = functools.partial(torch.compile, backend="memo", options=options)
        return train(case, compiled, [sgd], 2, starts)

    return with_options


def assert_equal_eager(
    case: ModelCase, policies: Iterable[str], subtests: pytest.Subtests, **options: object
) -> dict[str, Plan]:
    """Gradients are eager's, and those of policy save bit for bit where nothing is made again."""
    reference = Reference(case, [sgd], 2)
    options = {**ATEN, **MOVING, **options}
    step = TracedStep(training(case, reference.eager.starts), {**options, "policy": "save"})
    plans = {}
    for policy in policies:
        with subtests.test(policy):
            ours, plan = step.run({**options, **POLICIES[policy]})
            plans[policy] = plan
            reference.assert_close(ours)
            if not plan.recomputed_bytes:
                assert_bitwise(ours, step.first[0])
            assert plan.offloaded_bytes + plan.recomputed_bytes > 0
    return plans


def flat(seq: int, batch: int = 1) -> ModelCase:
    model, inputs, loss = models.functional_transformer(num_layers=3, seq=seq)
    return model, {key: value[:batch] for key, value in inputs.items()}, loss


def test_two_sequences_split_between_them(subtests):
    """With a batch the rows are sequences: a mix copies one of two and makes the other again."""
    plan = assert_equal_eager(flat(32, batch=2), POLICIES, subtests, token_granule=1)["mix"]
    assert plan.offloaded_bytes > 0
    assert plan.recomputed_bytes > 0
    assert {row.token_fraction for row in plan.decisions} == {0.5, 1.0}


@pytest.mark.full
@pytest.mark.parametrize("seq", [24, 30, 31])
def test_lengths_that_the_granule_does_not_divide(seq, subtests):
    """Tokens 30 in granules of 8: 16 are made again, 14 copied."""
    plan = assert_equal_eager(flat(seq), ("mix", "out"), subtests)["mix"]
    mixed = [row for row in plan.decisions if 0 < row.token_fraction < 1]
    again = {round(row.token_fraction * seq) for row in mixed if row.decision == "RECOMPUTE"}
    assert again == {16}


@pytest.mark.full
def test_alpha_moves_bytes_from_recomputation_to_copies():
    """Every alpha of MEMO's copies more than the one before and makes less again."""
    counted = []
    step = traced(Case(model="llama", decision="memo"))
    for decision in ("memo-0", "memo-0.25", "memo-1"):
        case = Case(model="llama", decision=decision)
        ours, plan = step.run(case.options())
        assert_close(ours, case)
        counted.append((plan.offloaded_bytes, plan.recomputed_bytes))
    offloaded, again = zip(*counted, strict=True)
    assert list(offloaded) == sorted(set(offloaded))
    assert list(again) == sorted(set(again), reverse=True)
    assert again[-1] == 0
    assert len({sum(ways) for ways in counted}) == 1  # the same tensors by either way


@pytest.mark.parametrize("policy", in_ci(POLICIES, "mix"))
def test_accumulated_gradients(policy):
    """Four micro-batches into one gradient, twice; kept gradients count against the budget."""
    model, inputs, loss = flat(32)
    eager_model = flat(32)[0]
    eager_model.load_state_dict(model.state_dict())
    compiled = memo_compiled(model, **MOVING, **POLICIES[policy])
    for update in (sgd(model), sgd(eager_model)):
        runner = compiled if update.param_groups[0]["params"][0] is model.embedding else eager_model
        for _ in range(2):
            update.zero_grad()
            for _ in range(4):
                (loss(runner, **inputs) / 4).backward()
            update.step()
    closeness.assert_equals_eager(model, eager_model)
    assert_planned()
    assert leased_slabs() == 0


def test_dropout_is_that_of_policy_save(subtests):
    """Random numbers are drawn once: masks are kept or moved, and results are equal bit for bit."""
    model, inputs, loss = models.gpt2(num_layers=3, seq=16, dropout=0.2)
    trained = training((model, {key: value[:1] for key, value in inputs.items()}, loss))

    def seeded(options: Options) -> Run:
        torch.manual_seed(11)
        return trained(options)

    options = {**ATEN, **MOVING, "token_granule": 4}
    step = TracedStep(seeded, {**options, "policy": "save"})
    for name, policy in POLICIES.items():
        with subtests.test(name):
            ours, plan = step.run({**options, **policy})
            assert plan.offloaded_bytes + plan.recomputed_bytes > 0
            assert_bitwise(ours, step.first[0])


@pytest.mark.full
def test_tied_weights(subtests):
    case = models.llama(num_layers=2, seq=32, tied=True)
    assert case[0].lm_head.weight is case[0].model.embed_tokens.weight
    assert_equal_eager(case, ["out"], subtests)


class Adapted(nn.Module):
    """A frozen product and a trainable one of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.full
def test_adapters_on_frozen_layers(subtests):
    """Only what the adapters' gradients need is saved, and that moves."""
    model, inputs, loss = models.llama(num_layers=2, seq=32)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    case = model, {key: value[:1] for key, value in inputs.items()}, loss
    trainable = sum(
        parameter.numel() * 4 for parameter in model.parameters() if parameter.requires_grad
    )
    for plan in assert_equal_eager(case, ("mix", "again"), subtests).values():
        assert plan.fixed.new_gradients == trainable


@pytest.mark.parametrize("decision", ["auto", "greedy", "memo"])
def test_a_smaller_budget_never_gives_a_larger_peak(decision):
    case = Case(model="gpt2", decision=decision)
    floor = floor_bytes(case)
    top = save_run(case)[1].peak_bytes
    budgets = [floor + step * (max(top, floor) - floor) // 3 for step in range(4)]
    peaks = [replanned(case, budget).peak_bytes for budget in budgets]
    assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))
    assert peaks == sorted(peaks)
    assert peaks[0] == floor
    with pytest.raises(Infeasible, match="floor"):
        replanned(case, floor - 1)


@pytest.mark.usefixtures("probes_once")
@pytest.mark.parametrize("asks_for_less", in_ci([False, True], False))
def test_the_floor_with_tiles_can_be_had(asks_for_less):
    """What the error of torch.compile names is enough, and nothing less; wide chains are tiled."""
    model, inputs, loss = models.functional_transformer(num_layers=2, seq=32)
    case = model, {key: value[:1] for key, value in inputs.items()}, loss

    def floor_of(**options: object) -> int:
        state.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
            under(case, **options)
        state.reset()
        error = raised.value.inner_exception
        assert isinstance(error, Infeasible)
        assert error.floor_bytes is not None
        return error.floor_bytes

    floor = floor_of(memory_budget=1, token_tiles=None)
    assert floor < floor_of(memory_budget=1)
    reference = Reference(case, [sgd], 2)
    ours, plan = under(case, reference.eager.starts, memory_budget=floor, token_tiles=None)
    reference.assert_close(ours)
    assert plan.peak_bytes == floor
    if asks_for_less:
        assert floor_of(memory_budget=floor - 1, token_tiles=None) == floor


INDUCTOR = ("llama", "gpt2", "gemma", "mixtral", "t5")


def _inductor(name: str, tmp_path: object) -> None:
    """Both ways of moving, into files."""
    case = Case(model=name, decision="memo-0.5", lowering="inductor")
    ours, plan = run(case, host_store=f"file:{tmp_path}")
    assert_close(ours, case)
    assert_moved(case, plan, None)
    assert list(tmp_path.iterdir()) == []  # unlinked at once: nothing is left behind a crash


@pytest.mark.parametrize("name", in_ci(INDUCTOR))
def test_inductor_with_files(name, tmp_path):
    _inductor(name, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("decision", ["full-offload", "memo-1"])
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor_moves_only(name, decision):
    """Compiled regions compute the same whether their inputs were away or not."""
    case = Case(model=name, decision=decision, lowering="inductor")
    ours, plan = run(case)
    assert_moved(case, plan, None)
    assert_bitwise(ours, save_run(case)[0])


@pytest.mark.parametrize("name", in_ci(INDUCTOR))
def test_inductor_at_the_floor(name):
    """A floor that was named is kept. The plan that keeps gpt2's was estimated to need more."""
    case = Case(model=name, decision="auto", lowering="inductor")
    step = traced(case)
    budget = floor_bytes(case)
    ours, plan = step.run({**case.options(), "memory_budget": budget})
    assert plan.peak_bytes <= budget
    assert_close(ours, case)
