"""What models contain and what surrounds them: graph breaks, hooks, checkpoints, odd tensors."""

import copy
import logging
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import memo_compile
from tests.numerics.closeness import assert_equals_eager
from tests.numerics.small import Pair, Stack, leased_slabs, rows
from tests.numerics.training import ATEN, assert_planned, in_ci, memo_compiled

# Dynamo itself reads .grad of the tensors that a resumed frame gets.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def test_threads_with_a_model_each():
    """Row 17: four steps at once; models of one class share the plan, so four frames of it."""
    pairs = [Pair(Stack(), max_inflight=4) for _ in range(4)]
    for pair in pairs:
        pair.assert_step(rows(0))
    failures = []

    def work(number):
        try:
            for seed in range(5):
                pairs[number].assert_step(rows(10 * number + seed))
        except BaseException as error:
            failures.append(error)

    _run_threads(work, 4)
    assert failures == []
    assert_planned()
    assert leased_slabs() == 0


def test_threads_sharing_one_compiled_model():
    """Row 17: the same plan twice at once; gradients by autograd.grad stay apart."""
    pair = Pair(Stack(), max_inflight=2)
    pair.assert_step(rows(0))
    found = {}

    def work(number):
        parameters = list(pair.ours.parameters())
        found[number] = [
            torch.autograd.grad(pair.compiled(rows(100 * number + seed)), parameters)
            for seed in range(5)
        ]

    _run_threads(work, 2)
    for number in range(2):
        for seed in range(5):
            loss = pair.eager(rows(100 * number + seed))
            expected = torch.autograd.grad(loss, list(pair.eager.parameters()))
            for ours, theirs in zip(found[number][seed], expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert_planned()
    assert leased_slabs() == 0


def _run_threads(work, count):
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)


class Checkpointed(Stack):
    """Each layer under the user's own checkpoint."""

    options: dict = {}  # noqa: RUF012

    def features(self, x):
        x = self.entry(x).tanh()
        for layer in self.layers:
            x = torch_checkpoint.checkpoint(layer, x, use_reentrant=False, **self.options)
        return x


def test_users_checkpoint():
    """Row 20: the user's tags reach the partitioner, and the gradients are right."""
    pair = Pair(Checkpointed())
    for seed in (1, 2):
        pair.assert_step(rows(seed))
    assert_planned(1)


@pytest.mark.parametrize(
    "decision", in_ci(["MUST_SAVE", "PREFER_RECOMPUTE", "MUST_RECOMPUTE"], "MUST_RECOMPUTE")
)
def test_users_selective_checkpoint(decision):
    """Row 20: matrix products by the user's decision, the rest is recomputed."""
    policy = getattr(torch_checkpoint.CheckpointPolicy, decision)
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def choose(_, op, *args, **kwargs):
        return policy if op in products else torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(Checkpointed):
        options = {  # noqa: RUF012
            "context_fn": lambda: torch_checkpoint.create_selective_checkpoint_contexts(choose)
        }

    pair = Pair(Selective())
    for seed in (1, 2):
        pair.assert_step(rows(seed))
    assert_planned(1)


def test_must_recompute_is_obeyed():
    """Row 20: a checkpointed product is not among the saved tensors, a plain one is."""

    def saved(model):
        torch._dynamo.reset()
        memo_compiled(model)(rows(1)).backward()
        return len(memo_compile.report().plans[-1].decisions)

    assert saved(Checkpointed()) < saved(Stack())


def test_torch_s_own_budget_is_named():
    """Row 20: what torch recomputes for it, every plan recomputes."""
    pair = Pair(Stack(num_layers=3))
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        pair.assert_step(rows(1))
    assert_planned(1)
    (note,) = [note for note in memo_compile.report().notes if "activation_memory_budget" in note]
    assert "= 0.5" in note


class Views(nn.Module):
    """Slices, transposes, expands, as_strided; outputs that are views of each other."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x):
        wide = (x.transpose(0, 1) @ self.weight.t()).unflatten(1, (2, 4))
        spread = self.scale.expand(8) * wide[:, 0, :].repeat(1, 2)
        strided = spread.as_strided((4, 4), (16, 2)).exp()
        return x.t(), wide.flatten(1)[:, ::2], strided, spread[1:]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: torch.cat([x, x], dim=1)[:, ::2],
        lambda x: x[:, :1].expand(8, 8),
        lambda x: torch.cat([x, x])[8:],
    ],
    ids=["plain", "transposed", "strided", "expanded", "offset"],
)
def test_views_of_all_kinds(change):
    """Row 25: shapes, strides and values of outputs and gradients are those of eager."""
    pair = Pair(Views())
    for seed in (1, 2):
        x = change(rows(seed, 8, 8))
        pair.zero_grad()
        ours, theirs = pair.compiled(x), pair.eager(x)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)
            assert mine.stride() == other.stride()
        sum(output.sum() for output in ours[1:]).backward()
        sum(output.sum() for output in theirs[1:]).backward()
        pair.assert_equal()
    assert_planned(1)


def test_parameter_and_input_returned_as_they_are():
    """Row 25: aliases of what the user gave are the user's."""

    class Alias(Views):
        def forward(self, x):
            return x, self.weight, self.weight.t(), (x @ self.weight).sum()

    pair = Pair(Alias())
    x = rows(1, 8, 8)
    same, weight, flipped, loss = pair.compiled(x)
    assert same.data_ptr() == x.data_ptr()
    assert weight.data_ptr() == flipped.data_ptr() == pair.ours.weight.data_ptr()
    (loss + flipped.sum()).backward()
    *_, flipped, loss = pair.eager(x)
    (loss + flipped.sum()).backward()
    pair.assert_equal()


class Mutating(nn.Module):
    """Writes into its input and into a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x):
        x.mul_(2)
        y = self.linear(x).sigmoid()
        self.total += y.detach().sum(0)
        return (y * self.total).sum()


def test_mutated_input_and_buffer():
    """Row 26: both are written once per step, as in eager."""
    pair = Pair(Mutating())
    for seed in (1, 2, 3):
        ours, theirs = rows(seed, 8, 8), rows(seed, 8, 8)
        pair.zero_grad()
        pair.compiled(ours).backward()
        pair.eager(theirs).backward()
        pair.assert_equal()
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(pair.ours.total, pair.eager.total)
    assert_planned(1)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        entry = nn.Linear(8, 8, bias=False)  # a batch norm takes a bias out: no gradient but noise
        self.body = nn.Sequential(entry, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x):
        return self.body(x).pow(2).mean()


def test_batch_norm_statistics():
    """Row 26: running mean and variance and the batch counter equal eager's, also in eval."""
    pair = Pair(Normed())
    for seed in (1, 2, 3):
        pair.assert_step(rows(seed, 16, 8))
    for (name, ours), theirs in zip(pair.ours.named_buffers(), pair.eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    pair.ours.eval()
    pair.eager.eval()
    pair.assert_step(rows(4, 16, 8))
    assert memo_compile.report().unplanned_steps == 0


def test_deepcopy_and_pickle_of_a_compiled_model():
    """Row 28: memo owns no parameters; copies train on their own."""
    pair = Pair(Stack())
    pair.assert_step(rows(1))
    copied = copy.deepcopy(pair.ours)
    restored = pickle.loads(pickle.dumps(pair.ours))
    assert list(pair.compiled.state_dict()) == [f"_orig_mod.{n}" for n in pair.ours.state_dict()]
    for twin in (copied, restored):
        twin.zero_grad()
        memo_compiled(twin)(rows(2)).backward()
        pair.eager.zero_grad()
        pair.eager(rows(2)).backward()
        assert_equals_eager(twin, pair.eager)
    pair.assert_step(rows(3))


def test_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """Row 28: bit for bit, optimizer state included, in a fresh compilation."""

    def steps(model, optimizer, compiled, seeds):
        for seed in seeds:
            optimizer.zero_grad()
            compiled(rows(seed)).backward()
            optimizer.step()

    torch.manual_seed(3)
    straight = Stack()
    start = copy.deepcopy(straight.state_dict())
    optimizer = torch.optim.AdamW(straight.parameters(), lr=1e-2)
    steps(straight, optimizer, memo_compiled(straight), range(6))

    first = Stack()
    first.load_state_dict(start)
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    steps(first, optimizer, memo_compiled(first), range(3))
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    torch._dynamo.reset()
    saved = torch.load(tmp_path / "c")
    second = Stack()
    second.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(second.parameters(), lr=1e-2)
    optimizer.load_state_dict(saved["optimizer"])
    steps(second, optimizer, memo_compiled(second), range(3, 6))
    for ours, theirs in zip(second.parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, theirs)


_FORK = """
import os, sys, memo_compile
assert "torch" not in sys.modules
import torch, memo_runtime, memo_compile.backends.entry
assert not torch.cuda.is_initialized()
from torch.utils.data import DataLoader
from tests.numerics.closeness import assert_equals_eager
from tests.numerics.small import Pair, Stack, rows
torch.set_num_threads(1)
pair = Pair(Stack())
pair.assert_step(rows(0))
if not torch.backends.cuda.is_built():  # whose autograd does not survive a fork, eager or not
    child = os.fork()
    if child == 0:
        pair.assert_step(rows(1))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
data = [rows(seed) for seed in range(4)]
for batch in DataLoader(data, batch_size=None, num_workers=1):
    pair.assert_step(batch)
print("both ran")
"""


def test_imports_fork_and_data_loader_workers():
    """Row 29: a forked child trains on, and workers start beside a live arena.

    Importing memo does not load torch, and with it no device is touched.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["runtime", "."])}
    run = subprocess.run(
        [sys.executable, "-c", _FORK],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "both ran"


@pytest.fixture
def suppressed():
    with torch._dynamo.config.patch(suppress_errors=True):
        yield


@pytest.mark.usefixtures("suppressed")
@pytest.mark.parametrize("strict", in_ci([False, True], True))
def test_a_crash_in_the_backend_is_loud(monkeypatch, caplog, strict):
    """Row 30: whatever Dynamo hides is logged at ERROR, and the report says that memo is off."""
    from memo_compile.backends import entry

    def crash(*args, **kwargs):
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(entry, "assemble", crash)
    model = Stack()
    eager = copy.deepcopy(model)
    with caplog.at_level(logging.ERROR, logger="memo"):
        memo_compiled(model, strict=strict)(rows(1)).backward()
    eager(rows(1)).backward()
    assert_equals_eager(model, eager)
    assert not memo_compile.report().active
    assert any("injected" in note for note in memo_compile.report().notes)
    logged = [record.levelname for record in caplog.records if record.name == "memo"]
    assert set(logged) == {"ERROR"}  # in strict mode Dynamo tries the inner frames one by one


@pytest.mark.usefixtures("suppressed")
def test_a_bad_option_is_loud_under_suppress_errors(caplog):
    """Row 30: eager runs, and the log and the report name the option."""
    model = Stack()
    with caplog.at_level(logging.ERROR, logger="memo"):
        memo_compiled(model, memory_bugdet="1GiB")(rows(1)).backward()
    assert not memo_compile.report().active
    assert any("memory_budget" in note for note in memo_compile.report().notes)
    assert any("memory_budget" in record.getMessage() for record in caplog.records)


@pytest.fixture(scope="module")
def cube():
    """A custom operator with a backward of its own; counts how often its forward runs."""
    counts = {"forward": 0}

    @torch.library.custom_op("memo_tests::cube", mutates_args=())
    def run(x: torch.Tensor) -> torch.Tensor:
        counts["forward"] += 1
        return x**3

    @run.register_fake
    def _(x):
        return torch.empty_like(x)

    run.register_autograd(
        lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return run, counts


def test_unknown_operator_is_saved_and_not_run_again(cube):
    """Row 31: its result is kept; it runs once per step."""
    run, counts = cube

    class Cubed(Stack):
        def features(self, x):
            x = self.entry(x)
            for layer in self.layers:
                x = layer(run(x.tanh())).tanh()
            return x

    pair = Pair(Cubed())
    pair.assert_step(rows(1))
    counts["forward"] = 0
    pair.compiled(rows(2)).backward()
    assert counts["forward"] == 2
    pair.assert_step(rows(3))
    assert_planned(1)


class Selecting(Stack):
    """``nonzero``: the number of rows depends on the data."""

    def forward(self, x):
        x = self.features(x)
        chosen = x[(x.sum(-1) > 0).nonzero().squeeze(-1)]
        return self.head(chosen).pow(2).sum() + self.head(x).mean()


def test_data_dependent_shape_breaks_the_graph():
    """Row 27: by default Dynamo breaks the graph there; both parts are right."""
    pair = Pair(Selecting())
    for seed in (1, 2):
        pair.assert_step(rows(seed))
    assert memo_compile.report().active
    assert memo_compile.report().unplanned_steps == 0


@pytest.mark.usefixtures("aside_op_by_op")
def test_data_dependent_shape_inside_a_graph_is_reported():
    """Row 27: captured it cannot be planned; plain Inductor runs it, and the report says so."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        model = Selecting()
        pair = Pair(model)
        pair.compiled = torch.compile(model, backend="memo", options={"lowering": "aten"})
        pair.assert_step(rows(1))
    report = memo_compile.report()
    assert not report.active
    assert any("only known at run time" in note for note in report.notes)


@pytest.mark.parametrize(
    ("chosen", "asks"),
    [
        ({"mode": "max-autotune-no-cudagraphs"}, ""),
        pytest.param({"mode": "max-autotune"}, "mode='max-autotune'", marks=pytest.mark.full),
        ({"mode": "reduce-overhead"}, "mode='reduce-overhead'"),
        pytest.param(
            {"options": {"inductor_options": {"triton.cudagraphs": True}}},
            "triton.cudagraphs",
            marks=pytest.mark.full,
        ),
    ],
)
def test_modes_are_accepted(chosen, asks, monkeypatch, caplog):
    """Row 34: one note on the CPU where CUDA graphs are asked for, else none."""
    for key in ("lowering", "debug", "strict"):
        monkeypatch.setenv(f"MEMO_{key.upper()}", str(ATEN[key]).lower())
    model = Stack()
    pair = Pair(model)
    pair.compiled = torch.compile(model, backend="memo", **chosen)
    with caplog.at_level(logging.WARNING, logger="memo"):
        pair.assert_step(rows(1))
        pair.assert_step(rows(1, 12))
    assert not [record for record in caplog.records if record.name == "memo"]
    notes = [note for note in memo_compile.report().notes if "CUDA graphs" in note]
    assert len(notes) == bool(asks)
    assert all(f"{asks}: CUDA graphs are not used" in note for note in notes)
    assert_planned(2)
