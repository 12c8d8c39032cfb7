"""``memo fit``: the longest sequence and the largest batch of a script's step, which never runs."""

import json
import math
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

import memo_compile
from memo_compile.cli import fit_command
from memo_compile.cli.main import main
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.host import host_memory
from memo_compile.errors import Infeasible, InputError
from memo_compile.offline import fit as fitting
from memo_compile.offline.first_call import at_first_call
from memo_compile.offline.fit_question import FitQuestion, Vary
from memo_compile.offline.length_search import Need

MODEL = """
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Model(nn.Module):
    def __init__(self, width=32, num_layers=2):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

torch.manual_seed(0)
model = Model()
ids = torch.randint(64, (2, 64))
"""

LOOP = """
compiled = torch.compile(model, backend="memo", options=OPTIONS)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.no_grad():
    print("evaluated", float(compiled(ids)))
for _ in range(2):
    compiled(ids).backward()
    optimizer.step()
    print("TRAINED")
"""


@pytest.fixture
def script(tmp_path):
    """A file of the model and a loop."""

    def write(loop=LOOP, options="{}"):
        path = tmp_path / "train.py"
        path.write_text(MODEL + textwrap.dedent(loop).replace("OPTIONS", options))
        return path

    return write


@pytest.fixture(autouse=True)
def _light(monkeypatch):
    monkeypatch.setenv("MEMO_LOWERING", "aten")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def run(capfd, monkeypatch, tmp_path):
    """``memo fit ARGUMENTS``: exit code, what goes to stdout, and all else."""
    answer = tmp_path / "answer"

    def fit(*arguments):
        descriptor = os.open(answer, os.O_WRONLY | os.O_CREAT)
        monkeypatch.setattr(fit_command, "stdout_to_stderr", lambda: descriptor)
        with pytest.raises(SystemExit) as left:
            main(["fit", *map(str, arguments)])
        return left.value.code, answer.read_text() if answer.exists() else "", capfd.readouterr()

    return fit


def taken(path):
    """The calls that a script's first step is made of; its own exit code."""
    calls = []
    code = at_first_call(path, [], calls.append)
    return calls, code


def test_the_answer_and_nothing_is_trained(script):
    arguments = ["--memory", "400KB", "--vary", "batch", "--json", str(script())]
    done = subprocess.run(
        [sys.executable, "-m", "memo_compile.cli.main", "fit", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    err = done.stderr
    body = json.loads(done.stdout)
    assert "evaluated" in err
    assert "TRAINED" not in err
    assert body["step"] == "Model"
    assert body["inputs"] == {"ids": [2, 64]}
    assert (body["hardware"], body["budget_bytes"], body["fits"]) == ("cpu", 400_000, True)
    assert body["options"] == {"memory_budget": 400_000, "host_budget": "0"}
    (batch,) = body["found"]
    assert batch["dims"] == [{"tensor": "ids", "dim": 0}]
    assert (batch["vary"], batch["bound"], batch["buffers"]) == ("batch", "memory", "exact")
    assert batch["size"] > 0
    assert batch["peak_bytes"] <= 400_000
    assert f"batch of {batch['size']}: fits" in err
    assert f"batch of {batch['size'] + 1}: does not fit" in err


@pytest.mark.full
def test_what_it_says_is_what_the_backend_takes(script):
    calls, _ = taken(script())
    (call,) = calls
    question = FitQuestion(vary=(Vary.SEQUENCE,), memory="700KB", multiple_of=64)
    answer = fitting.Fitting(call, question).answer(lambda _: None, lambda *_: None)
    (found,) = answer.largest
    torch._dynamo.reset()
    compiled = torch.compile(call.function, backend="memo", options=dict(answer.options))
    compiled(torch.zeros(2, found.size, dtype=torch.long)).backward()
    plan = memo_compile.report().plans[-1]
    assert plan.peak_bytes <= 700_000
    assert plan.peak_bytes == found.step.plan.peak_bytes
    torch._dynamo.reset()
    call.function.zero_grad(set_to_none=True)
    compiled = torch.compile(call.function, backend="memo", options=dict(answer.options))
    with pytest.raises(Infeasible):
        compiled(torch.zeros(2, found.size + 64, dtype=torch.long))


SPELLINGS = {
    "a module": "step = torch.compile(model, backend='memo', options=dict(exact=True))",
    "in place": "model.compile(backend='memo', options=dict(exact=True)); step = model",
    "a function": """
def loss(ids):
    return model(ids)
step = torch.compile(loss, backend='memo', options=dict(exact=True))
""",
    "a decorator": """
@torch.compile(backend='memo', options=dict(exact=True))
def step(ids):
    return model(ids)
""",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_first_step_is_found_however_it_is_compiled(script, spelling):
    calls, code = taken(script(f"{SPELLINGS[spelling]}\nstep(ids).backward()\nsys.exit(5)"))
    (call,) = calls
    assert code is None
    assert call.options == {"exact": True}
    assert call.args[0].shape == (2, 64)
    assert call.function(*call.args).requires_grad  # the script's own, which leads nowhere else
    assert torch.compile(lambda x: x, backend="eager")(3) == 3  # torch's own again


def test_a_script_that_catches_everything_still_ends(script):
    loop = """
    compiled = torch.compile(model, backend="memo")
    try:
        compiled(ids).backward()
    except Exception:
        pass
    print("TRAINED")
    """

    def refuse(call):
        raise InputError("refused")

    with pytest.raises(InputError, match="refused"):
        at_first_call(script(loop), [], refuse)


def test_several_compiled_things_are_refused(script):
    loop = """
    for layer in model.layers:
        layer.compile(backend="memo")
    model(ids).backward()
    """
    with pytest.raises(InputError, match=r"compiles 2 things for memo \(Block\)"):
        taken(script(loop))


def test_frozen_models_and_other_backends_run_as_they_are(script):
    loop = """
    frozen = torch.compile(Model().requires_grad_(False), backend="memo")
    print("frozen", float(frozen(ids)))
    print("eager", torch.compile(model, backend="eager")(ids))
    """
    calls, code = taken(script(loop))
    assert (calls, code) == ([], 0)


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        ("print(1)", 'train.py: no training step went through torch.compile(backend="memo");'),
        ("sys.exit(7)", "(it left with exit code 7; its own output is above)"),
    ],
)
def test_a_script_without_a_step_is_bad_input(script, run, loop, says):
    code, out, err = run(script(loop))
    assert (code, out) == (2, "")
    assert says in err.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--vary", "width"), "vary: expected sequence, batch or both, got 'width'"),
        (("--dims", "ids:1"), "dims: say what they are: --vary sequence, or --vary batch"),
        (("--multiple-of", "0"), "multiple-of: expected at least 1, got 0"),
        (("--hardware", "h2000"), "h2000"),
        (("--memory", "lots"), "memory: expected"),
        (("--memory", "0B"), "memory: expected at least 1 byte"),
        (("--vary", "batch", "--dims", "idx:1"), "dims: expected NAME:DIM of ids 2 x 64"),
    ],
)
def test_wrong_options_are_named(script, run, arguments, says):
    code, out, err = run(*arguments, script())
    assert (code, out) == (2, "")
    assert says in err.err


def needs(per_size, fits_to, refused_from=math.inf):
    """Stands in for plans: what a size needs, where it fits, and where it is no step."""

    def need(self, varied, size):
        if size >= refused_from:
            raise RuntimeError(f"position {size} out of range")
        return Need(per_size * size, size <= fits_to)

    return need


@pytest.fixture
def answered(script, monkeypatch):
    """The answer where ``need`` says what sizes take; what was tried on the way."""

    def answer(need, prepare=lambda call: None, **question):
        (call,), _ = taken(script())
        prepare(call)
        monkeypatch.setattr(fitting.Fitting, "need", need)
        monkeypatch.setattr(fitting.Fitting, "fastest", lambda *_: "a plan")
        asked = {"vary": (Vary.SEQUENCE,), "memory": "1MB", **question}
        tried = []
        found = fitting.Fitting(call, FitQuestion(**asked)).answer(
            lambda _: None, lambda *row: tried.append(row)
        )
        return found, tried

    return answer


@pytest.mark.parametrize("fits_to", [64, 100, 1000, 12_345])
def test_the_largest_multiple_is_found(answered, fits_to):
    answer, tried = answered(needs(1000, fits_to))
    (found,) = answer.largest
    assert (found.size, found.refused) == (fits_to // 64 * 64, "")
    assert tried[0] == (Vary.SEQUENCE, 64, True)


def test_a_batch_is_searched_one_by_one(answered):
    answer, _ = answered(needs(1000, 37), vary=(Vary.BATCH,))
    assert answer.largest[0].size == 37


def test_a_rounder_size_may_fit_where_an_uneven_one_does_not(answered):
    def need(self, varied, size):
        uneven = 3 if size % 8 else 1  # in no tiles
        return Need(1000 * size * uneven, 1000 * size * uneven <= 33_000)

    answer, tried = answered(need, vary=(Vary.BATCH,))
    assert answer.largest[0].size == 32
    assert (Vary.BATCH, 40, False) in tried


def test_round_sizes_are_tried_before_uneven_ones(answered):
    """Uneven sizes divide into no tiles: a search among them ended far below the answer."""

    def need(self, varied, size):
        uneven = 3 if size % 512 else 1
        return Need(100 * size * uneven, 100 * size * uneven <= 900_000)

    answer, tried = answered(need)
    assert answer.largest[0].size == 8704
    assert len(tried) <= 10
    assert tried[-1][1] in range(8704, 9216)


def test_a_search_that_the_bytes_mislead_ends(answered):
    def need(self, varied, size):
        return Need(math.inf, size <= 2**38 + 999_999)

    answer, tried = answered(need, multiple_of=64)
    (found,) = answer.largest
    assert len(tried) == fitting.MAX_TRIES
    assert any(f"{fitting.MAX_TRIES} sizes were tried" in note for note in found.notes)
    assert found.size <= 2**38 + 999_999


def test_both_kinds_share_the_sizes_that_are_tried(answered):
    misleading = needs(0, 2**38)
    both = tuple(Vary)
    _, tried = answered(misleading, vary=both, multiple_of=1)
    assert len(tried) == fitting.MAX_TRIES
    assert {what for what, *_ in tried} == set(both)


def test_the_answer_is_searched_to_a_percent_unless_a_multiple_is_named(answered):
    limit = 1_234_567
    answer, tried = answered(needs(1, limit), memory=str(limit))
    (found,) = answer.largest
    assert limit * 0.98 < found.size <= limit
    assert len(tried) <= 10
    (note,) = found.notes
    assert note.startswith("found to 1%: one below 1,2")
    assert note.endswith("may fit as well, --multiple-of 64 searches it")


def test_a_search_ends_when_its_processor_time_is_spent(answered, monkeypatch):
    """Fewer sizes where each takes long, but never before one fits."""
    clock = iter(range(0, 10**9, 20))
    monkeypatch.setattr(fitting, "time", SimpleNamespace(process_time=lambda: next(clock)))
    monkeypatch.setattr(fitting, "SLOW_TRIES", 3)
    answer, tried = answered(lambda self, varied, size: Need(math.inf, size <= 2**30))
    (found,) = answer.largest
    assert found.size > 0
    assert len(tried) == 5
    assert found.notes[0].startswith("5 sizes were tried: one between ")
    answer, tried = answered(needs(10**5, 7), multiple_of=1)
    assert answer.largest[0].size == 7
    assert tried[-1][1] < 64


def test_where_the_model_refuses_longer_ones_that_is_said(answered):
    answer, _ = answered(needs(10, math.inf, refused_from=512))
    (found,) = answer.largest
    assert found.size == 448
    assert "RuntimeError: position 512 out of range" in found.refused


def test_a_step_that_does_not_trace_at_its_own_size_is_the_error(answered):
    with pytest.raises(RuntimeError, match="position 64 out of range"):
        answered(needs(10, math.inf, refused_from=64))


def test_dimensions_that_belong_together_are_asked_for(answered):
    def need(self, varied, size):
        if size == 64:
            return Need(2e6, False)
        raise RuntimeError("shapes differ")

    with pytest.raises(InputError, match=r"ids\[1\] of \d+ instead of 64 fails: .*--dims NAME:DIM"):
        answered(need, multiple_of=8)


def test_nothing_that_fits_names_the_floor(answered):
    answer, _ = answered(needs(100_000, 0))
    (found,) = answer.largest
    assert (found.size, found.step, found.floor_bytes, answer.fits) == (0, None, 6_400_000, False)
    with pytest.raises(Infeasible, match=r"not even a sequence of 64 fits .* needs 6.10 MiB"):
        fitting.require_fits(answer)


def test_nothing_that_fits_is_exit_code_1(script, run):
    code, out, err = run("--memory", "10KB", "--vary", "batch", script())
    assert code == 1
    assert "largest batch: none, not even 1" in out
    assert "memo: not even a batch of 1 fits into 9.77 KiB, which needs" in err.err


def test_what_stays_and_what_the_model_declares_is_noted(answered):
    def prepare(call):
        call.kwargs["max_length"] = 64
        call.function.config = type("Config", (), {"max_position_embeddings": 128})

    (found,) = answered(needs(1000, 1000), prepare)[0].largest
    assert found.notes == (
        "max_length is 64 and stays that, whatever the sequence",
        "the model's configuration has max_position_embeddings=128: longer sequences are planned, "
        "and may fail or train badly",
    )


def test_inputs_larger_than_the_memory_are_never_made(script):
    (call,), _ = taken(script())
    question = FitQuestion(memory="1MB")
    asked = fitting.Fitting(call, question)
    varied = asked._arguments.varied(Vary.SEQUENCE)
    assert asked.need(varied, 2**38) == Need(math.inf, False)


def test_the_budget_is_the_scripts_the_hardwares_or_what_is_free(script, monkeypatch):
    def budget(options, **question):
        (call,), _ = taken(script(options=options))
        asked = fitting.Fitting(call, FitQuestion(**question))
        return asked.options()["memory_budget"]

    h200 = find_hardware("h200")
    assert budget("dict(memory_budget='3MiB')") == 3 * 2**20
    assert budget("dict(memory_budget='3MiB')", memory="5MB") == 5_000_000
    assert budget("dict(memory_budget='3MiB')", hardware=h200) == h200.memory_bytes - 2**30
    assert budget("{}", hardware=h200, memory="50%") == h200.memory_bytes // 2
    usable = host_memory().usable_bytes
    assert abs(budget("{}") - usable) < 0.2 * usable  # others use memory meanwhile


def test_copies_within_one_memory_are_not_planned_on_cpu(script):
    def host(options, **question):
        (call,), _ = taken(script(options=options))
        asked = fitting.Fitting(call, FitQuestion(**question))
        return asked.options().get("host_budget")

    assert host("{}") == "0"
    assert host("dict(host_budget='1GiB')") == "1GiB"
    assert host("{}", host_budget="2GiB") == "2GiB"
    assert host("dict(host_store='file:/tmp')") is None
    assert host("{}", hardware=find_hardware("h200")) is None
