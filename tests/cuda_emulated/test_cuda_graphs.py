"""CUDA graphs that are asked for: by options, and by a capture around a step or a compilation."""

import contextlib
import gc
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from memo_runtime import cuda_graphs
from memo_runtime.arena import arena_of
from memo_runtime.run_step import StepError

import memo_compile
from memo_compile.errors import RuntimeMisuse
from memo_compile.reporting import state
from tests.cuda_emulated import captured_scenarios, computing
from tests.cuda_emulated.computing import CUDA, Computing, assert_close, leased, ordered, rows_of
from tests.cuda_emulated.device_calls import Counts, counts
from tests.cuda_emulated.test_attention import attention_model
from tests.cuda_emulated.test_survival import run_threads
from tests.numerics.small import Stack
from tests.numerics.training import ATEN

pytestmark = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
REFUSED = r"cannot be captured into a CUDA graph.*torch\.cuda\.graph"


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    state.reset()


@pytest.fixture
def steps():
    found = Computing()
    found.begin()
    return found


def test_a_forward_is_not_captured(steps):
    """CUDA itself says no more than that some dependency is not part of the capture."""
    x = rows_of(1).to(CUDA)
    with pytest.raises(StepError, match=REFUSED), torch.cuda.graph(torch.cuda.CUDAGraph()):
        steps.compiled(x)
    gc.collect()
    assert leased() == 0
    steps.assert_step(2)


def test_a_backward_is_not_captured(steps):
    """Its forward ran on the stream that is captured: autograd runs it there."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        loss = steps.compiled(rows_of(1).to(CUDA))
    captured = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream)
    with pytest.raises(StepError, match=REFUSED), captured:
        loss.backward()
    del loss
    gc.collect()
    assert leased() == 0
    steps.assert_step(2)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of what was given up
def test_graphed_callables_are_refused(steps):
    x = rows_of(1).to(CUDA).requires_grad_()
    with pytest.raises(StepError, match=REFUSED):
        torch.cuda.make_graphed_callables(steps.compiled, (x,))
    gc.collect()
    assert leased() == 0
    steps.assert_step(2)


def test_nothing_is_compiled_in_a_capture():
    """What is measured and compared then would be of a device that does nothing."""
    steps = Computing()
    x = rows_of(1).to(CUDA)
    with (
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised,
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        steps.compiled(x)
    assert isinstance(raised.value.inner_exception, RuntimeMisuse)
    assert "first called while a CUDA graph is captured" in str(raised.value)
    steps.begin()


GRAPHS = {"mode": "reduce-overhead"}
WARM_UP = 4
CHANCES = (None, 0.0, 0.5)
"""As of ``ordered``."""


@pytest.fixture
def graphed():
    """Steps of which both halves are captured: the backward behind the forward's last capture."""
    made = Computing(**GRAPHS)
    begin(made)
    return made


def begin(steps: Computing) -> None:
    """The steps that are not replayed. Batches stay alive, so that each lies elsewhere."""
    steps.begin()
    batches = [rows_of(seed).to(CUDA) for seed in range(WARM_UP)]
    for batch in batches:
        steps.compiled(batch).backward()


def notes() -> list[str]:
    """What the report says of CUDA graphs."""
    option = "mode='reduce-overhead': "
    found = (note for note in memo_compile.report().notes if note.startswith(option))
    return [note.removeprefix(option).partition(": ")[2] for note in found]


@contextlib.contextmanager
def counting(graphs: int | None = None) -> Iterator[list[int]]:
    """Puts what the block has launched and copied into the list: so many graphs, if given."""
    before, found = counts(), []
    yield found
    found += [end - begin for begin, end in zip(before, counts(), strict=True)]
    launched = found[Counts._fields.index("graph_launches")]
    assert graphs in (None, launched), notes()


@pytest.mark.parametrize("chance", CHANCES)
def test_later_steps_launch_each_half_as_a_whole(graphed, chance):
    """Order and numbers are those of other steps, also on another stream."""
    with ordered(chance), counting(graphs=8):
        for seed in range(3):
            graphed.assert_step(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            graphed.assert_step(3)
    assert graphed.is_planned()
    assert notes() == ["the forward is a CUDA graph", "the backward is a CUDA graph"]


@pytest.mark.parametrize("debug", ["poison,copies-early", "copies-late"])
def test_replays_poison_and_copy_as_they_are_told(debug):
    steps = Computing(debug=debug, **GRAPHS)
    begin(steps)
    with ordered(0.5), counting(graphs=4):
        steps.assert_step(2)
        steps.assert_step(3)


def test_results_are_the_users_own(graphed):
    """The next replay writes where the last one's gradients were."""
    kept = [graphed.gradients_of(seed) for seed in range(3)]
    for seed, gradients in enumerate(kept):
        assert_close(gradients, graphed.wanted(seed))
    graphed.ours.zero_grad(set_to_none=True)
    with counting(graphs=4):
        for seed in range(2):  # the second one is added
            graphed.compiled(rows_of(seed).to(CUDA)).backward()
    pairs = zip(graphed.wanted(0), graphed.wanted(1), strict=True)
    assert_close(graphed.gradients(), [first + second for first, second in pairs])


def test_a_captured_step_allocates_what_others_do(graphed):
    """In the same arena; what its graphs hold was taken when they were captured."""

    def peak(steps: Computing) -> tuple[int, int]:
        steps.step(2)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        steps.step(3)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, arena_of(CUDA).size_bytes

    with counting(graphs=4):
        captured, arena_bytes = peak(graphed)
    del graphed
    torch._dynamo.reset()
    plain = Computing()
    plain.begin()
    uncaptured, plain_arena_bytes = peak(plain)
    assert arena_bytes == plain_arena_bytes
    assert captured <= uncaptured


def test_parameters_that_move_are_captured_anew_and_at_last_no_more(graphed):
    for seed in range(7):
        for parameter in graphed.ours.parameters():
            parameter.data = parameter.data.clone()
        kept = [parameter.data for parameter in graphed.ours.parameters()]
        graphed.assert_step(seed)
        del kept
    with counting(graphs=2):  # what has moved is copied from then on
        graphed.assert_step(8)
    assert graphed.is_planned()


def test_a_host_that_waits_is_not_captured(monkeypatch):
    """Torch leaves much open where a capture fails: random numbers, memory, the next capture."""

    def waits_on_host(engine, ticket):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
        return wait(engine, ticket)

    steps, wait = Computing(**GRAPHS), computing.CopyEngine.wait
    steps.begin()
    monkeypatch.setattr(computing.CopyEngine, "wait", waits_on_host)
    with ordered(0.5), counting(graphs=0):
        for seed in range(3):
            steps.assert_step(seed)
    assert len(notes()) == 2
    assert all("runs call by call: " in note for note in notes())
    assert torch.rand(4, device=CUDA).shape == (4,)
    assert leased() == 0
    monkeypatch.undo()
    torch._dynamo.reset()
    again = Computing(**GRAPHS)
    begin(again)
    with counting(graphs=2):
        again.assert_step(2)


def test_a_budget_without_room_for_graphs_is_kept():
    plain = Computing()
    plain.begin()
    peak_bytes = memo_compile.report().plans[-1].peak_bytes
    torch._dynamo.reset()
    state.reset()
    tight = Computing(memory_budget=peak_bytes + 2**20, **GRAPHS)
    begin(tight)
    with counting(graphs=0):
        for seed in range(4):
            tight.assert_step(seed)
    assert len(notes()) == 2
    assert all("more than memory_budget leaves" in note for note in notes())
    torch._dynamo.reset()
    state.reset()
    roomy = Computing(memory_budget=peak_bytes + 2**26, **GRAPHS)
    begin(roomy)
    with counting(graphs=2):
        roomy.assert_step(2)


class Counting(Stack):
    """Writes into a buffer."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers=num_layers)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(x.detach().mean())
        return super().forward(x)


def test_a_buffer_is_written_by_each_replay_and_may_not_move(monkeypatch):
    monkeypatch.setattr(computing, "Stack", Counting)
    steps = Computing(**GRAPHS)
    steps.begin()
    for seed in range(1, 5):
        steps.assert_step(seed)
    torch.testing.assert_close(steps.ours.seen.cpu(), steps.eager.seen)
    for seed in range(5, 8):
        before = steps.ours.seen
        steps.ours.seen.data = steps.ours.seen.data.clone()
        steps.assert_step(seed)
        del before
    torch.testing.assert_close(steps.ours.seen.cpu(), steps.eager.seen)
    assert "the forward runs call by call: it writes into an input that moves" in notes()


class Drawing(Stack):
    """The host draws a number, which reaches a kernel as a number."""

    def forward(self, x):
        return super().forward(x * (1 + torch.rand(())))


def test_what_the_host_draws_is_drawn_in_each_step(monkeypatch):
    """A replay would repeat the number of the capture."""
    monkeypatch.setattr(computing, "Stack", Drawing)
    steps = Computing(**GRAPHS)
    batch, losses = rows_of(0).to(CUDA), []
    with computing.believing():
        for _ in range(5):
            losses.append(steps.compiled(batch))
            losses[-1].backward()
    assert len({loss.item() for loss in losses}) == 5
    assert "the forward runs call by call: the host makes some of its values" in notes()


def test_a_random_state_that_the_host_reads_is_not_captured():
    """A backward that runs call by call would read memory of the device there, and crash."""
    model, x = attention_model(torch.float32, 0.1)
    options = {"strict": True, "lowering": "aten", "costs": "roofline", **GRAPHS}
    planned = torch.compile(model, backend="memo", options=options)
    with counting(graphs=0):
        for _ in range(3):
            planned(x).sum().backward()
    assert "the forward runs call by call: the host keeps the random state" in str(notes())


def test_a_capture_that_python_ends_says_why(monkeypatch):
    """CUDA has refused nothing, and torch has nothing to forget: the backward is captured."""
    execute = cuda_graphs.RunCall.execute

    def raises(call, running):
        if torch.cuda.is_current_stream_capturing() and not notes():
            raise ValueError("not now")
        execute(call, running)

    steps = Computing(**GRAPHS)
    monkeypatch.setattr(cuda_graphs.RunCall, "execute", raises)
    begin(steps)
    assert "the forward runs call by call: not now" in notes()
    with counting(graphs=1), ordered(0.5):
        steps.assert_step(0)


def test_tensors_are_copied_whatever_their_type(monkeypatch):
    """The kernel that copies many knows no unsigned integers, for example; NaN keeps its bits."""
    known = {torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128}
    copy = torch._foreach_copy_

    def strictly(targets, sources):
        assert {tensor.dtype for tensor in (*targets, *sources)} <= known
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", strictly)
    bits = torch.arange(256, dtype=torch.uint8)
    types = (
        *(torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float32),
        *(torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.complex64, torch.complex128),
    )
    sources = [bits.view(dtype)[::2] for dtype in types]
    copies = [cuda_graphs._memory_like(source) for source in sources]
    cuda_graphs._copy_all(copies, sources)
    for source, copied in zip(sources, copies, strict=True):
        as_bits = [each.as_strided((len(each),), (2,)).contiguous() for each in (source, copied)]
        assert torch.equal(*(each.view(torch.uint8) for each in as_bits)), source.dtype
    with pytest.raises(RuntimeError, match="conjugated"):
        cuda_graphs._require_capturable(torch.ones(2, dtype=torch.complex64, device=CUDA).conj())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_members_of_a_group_run_call_by_call():
    steps = Computing(**GRAPHS)
    for layer in steps.ours.layers:
        layer.compile(backend="memo", options={**computing.MIX, **ATEN, **GRAPHS, "debug": ""})
    steps.compiled = steps.ours
    with counting(graphs=0), ordered(0.5):
        for seed in range(5):
            steps.step(seed)
    assert memo_compile.report().groups
    assert len(notes()) == 2
    assert all(note.endswith("several graphs run as one step") for note in notes())


def test_threads_capture_and_launch_one_after_another():
    """Of two captures at once the second would find Python's collector off, and leave it so."""
    shared, busy = cuda_graphs._graphs_of(CUDA), []
    use = captured_scenarios.graphed().graphs

    def alone():
        assert not busy
        busy.append(1)
        time.sleep(0.02)
        busy.clear()

    def work(number: int) -> None:
        for _ in range(3):
            with shared.capturing(use, torch.cuda.CUDAGraph(), None):
                alone()
            shared.launch(SimpleNamespace(replay=alone))

    run_threads(work)
    assert gc.isenabled()


def test_the_setting_of_inductor_is_taken():
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        steps = Computing(lowering="inductor", policy="save")
        for seed in range(WARM_UP):
            steps.step(seed)
        with counting(graphs=2):
            steps.step(2)
    assert memo_compile.report().active
