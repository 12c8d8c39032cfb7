"""Follow one training step of a three-layer model from torch's graph to the finished plan.

    python examples/follow_a_step.py

The step is compiled once with ``dump``; what is printed is read from the files of the dump.
docs/tutorial.md shows the same text and explains it; a test holds the two together.
"""

import inspect
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from memo_compile.check.check_plan import check
from memo_compile.step.plans import Plan
from memo_compile.step.problem import CallKind, Problem, arena_buffers, call_starts
from memo_compile.step.serialise import from_json
from memo_compile.units import format_bytes

TOKENS, WIDTH, INNER = 256, 32, 128

OPTIONS: Mapping[str, object] = {
    "memory_budget": "1100KiB",
    "policy": "memo",
    "alpha": 0.5,
    "lowering": "aten",
    "costs": "roofline",
    "token_tiles": 1,
    "strict": True,
}
"""MEMO's mix shows all three decisions in one step. ``aten`` and ``roofline`` compile and time
nothing, so that every machine prints the same."""


class Layer(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(TOKENS, WIDTH)`` -> the same shape."""
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """An entry, three layers, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of what the layers return."""
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def follow() -> Mapping[str, str]:
    """Title -> text of each part of the way, in order."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(TOKENS, WIDTH)
    with tempfile.TemporaryDirectory() as folder:
        equal = train_once(model, x, folder)
        (dump,) = Path(folder).iterdir()
        texts = {path.name: path.read_text() for path in dump.glob("*.txt")}
        problem = from_json((dump / "problem.json").read_text(), Problem)
        plan = from_json((dump / "plan.json").read_text(), Plan)
    files = {re.sub(r"^\d+-", "", name): text for name, text in sorted(texts.items())}
    joint = files["joint-keep-overwritten.after.txt"]
    return {
        "model": inspect.getsource(Layer) + "\n\n" + inspect.getsource(Model),
        "dump": "\n".join(sorted(texts)),
        "joint graph": "\n".join(between(list(short(joint)), "add", "add_1")),
        "halves": "\n".join(list(short(files["forward-lease-saved.after.txt"]))[-2:]),
        "cut": "\n".join(short(files["step-forward.txt"])),
        "step program": files["step-program.txt"].rstrip(),
        "placement": "\n".join(places(problem, plan)),
        "checker": "\n".join(verdicts(problem, plan)),
        "report": "\n".join([*decisions(plan), f"gradients equal eager's: {equal}"]),
    }


def train_once(model: nn.Module, x: Tensor, folder: str) -> bool:
    """One step eager, one under memo with its dump in ``folder``: are the gradients close?"""
    torch._dynamo.reset()
    model(x).backward()
    eager = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    torch.compile(model, backend="memo", options={**OPTIONS, "dump": folder})(x).backward()
    pairs = zip(eager, model.parameters(), strict=True)
    return all(torch.allclose(old, now.grad, rtol=1e-4, atol=1e-7) for old, now in pairs)


def short(graph: str) -> Iterator[str]:
    """The operators of a dumped graph, a line each, without what all lines have in common."""
    for line in graph.splitlines():
        if "= placeholder[" in line:
            continue
        line = re.sub(r" : \[num_users=\d+\] = call_function\[target=([\w.]+)\]", r" = \1", line)
        line = re.sub(r"\(args = \((.*?),?\), kwargs = \{\}\)", r"(\1)", line)
        line = re.sub(r"torch\.ops\.|memo_compile\.passes\.cut\.|memo_runtime\.ops\.", "", line)
        yield line.replace("torch.float32", "").replace("%", "").replace("# torch.", "# ")


def between(lines: list[str], first: str, last: str) -> Iterator[str]:
    """The lines behind the one that makes ``first``, down to the one that makes ``last``."""
    names = [line.split(" = ")[0] for line in lines]
    yield from lines[names.index(first) + 1 : names.index(last) + 1]


def places(problem: Problem, plan: Plan) -> Iterator[str]:
    """A line for each value that lives across calls: its bytes in the arena, and its life."""
    starts = call_starts(problem)
    yield f"arena {format_bytes(plan.arena_bytes)}, peak {format_bytes(plan.peak_bytes)}"
    for buffer in arena_buffers(problem):
        if buffer.transient:
            continue
        last = max(at for at, start in enumerate(starts[:-1]) if start < buffer.end)
        born, dies = problem.calls[buffer.call], problem.calls[last]
        outputs = problem.regions[born.region].outputs
        made = dict(zip((output.index for output in outputs), born.outputs, strict=True))
        offset = plan.offsets[buffer.id]
        bytes_ = f"[{offset:>6}:{offset + buffer.size_bytes:>6}]"
        yield f"{bytes_}  {made[buffer.index]:<15} {born.name} .. {dies.name}"


def verdicts(problem: Problem, plan: Plan) -> Iterator[str]:
    """What the checker says of the plan, of one with a buffer moved, of one without a wait."""
    yield f"the plan: {check(problem, plan)}"
    first, second = [buffer for buffer in arena_buffers(problem) if not buffer.transient][:2]
    moved = replace(plan, offsets={**plan.offsets, second.id: plan.offsets[first.id]})
    yield f"{second.id} moved onto {first.id}: {check(problem, moved).problems[0]}"
    wait = next(call for call in problem.calls if call.kind is CallKind.WAIT)
    calls = tuple(call for call in problem.calls if call is not wait)
    hasty = check(replace(problem, calls=calls), replace(plan, resident_bytes=()))
    (complaint,) = (text for text in hasty.problems if "waited for" in text)
    yield f"without {wait.name}: {complaint}"


def decisions(plan: Plan) -> Iterator[str]:
    """The report's rows: what happens to each saved tensor, and why."""
    assert plan.budget_bytes is not None, "the example sets a budget"
    yield f"budget {format_bytes(plan.budget_bytes)}, peak {format_bytes(plan.peak_bytes)}"
    for row in plan.decisions:
        line = (row.source or "").rpartition("/")[2]
        yield f"{row.decision:<10} {row.tensor}, {line}: {row.reason}"


def main() -> None:
    """Print every part under its title."""
    for title, text in follow().items():
        print(f"--- {title} ---\n{text}\n")


if __name__ == "__main__":
    main()
