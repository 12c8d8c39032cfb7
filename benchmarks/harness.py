"""What the benchmark scripts share: arms in processes of their own, physical peaks, dated results.

An arm runs in a fresh child process, so that nothing it compiled, cached or allocated helps or
hurts the next one. Rounds are interleaved (every arm once, then every arm again) and medians are
taken over rounds, so that a slow minute of the machine falls on all arms. Arms that are judged by
their ratio live at the same time and take turns, step by step.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_RESULT_FILE = "BENCHMARK_RESULT_FILE"
_TURN_ENDED = "BENCHMARK_TURN_ENDED"
CHILD_TIMEOUT_S = 900.0
"""A cold compilation of the largest benchmark model takes 200 s on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run the benchmark: a name, arguments for the child, its extra environment."""

    name: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class ChildFailed(RuntimeError):
    """An arm's process died, timed out, or sent no result; the message ends with its last lines."""

    sent: Mapping[str, Any] | None = None
    """What it had sent before."""


def run_arm(module: str, arm: Arm, *, timeout_s: float = CHILD_TIMEOUT_S) -> dict[str, Any]:
    """Run ``python -m module *arm.arguments`` and return the object that it sent.

    Its compilation caches start empty. What it prints is shown only when it fails.

    Raises:
        ChildFailed: no result came.
    """
    return run_in_turns(module, [arm], timeout_s=timeout_s)[arm.name]


def run_in_turns(
    module: str, arms: Sequence[Arm], *, timeout_s: float = CHILD_TIMEOUT_S
) -> dict[str, dict[str, Any]]:
    """Run all ``arms`` at once, only one of them awake: each from one ``wait_turn`` to the next.

    A machine's speed drifts within minutes, so steps that are to be compared must be neighbours.

    Raises:
        ChildFailed: an arm sent no result, or one turn took longer than ``timeout_s``.
    """
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_Child(module, arm, timeout_s)) for arm in arms]
        awake = list(children)
        while awake:
            awake = [child for child in awake if child.take_turn()]
        return {child.arm.name: child.result() for child in children}


class _Child:
    """An arm's process, its folder, and the two pipes by which turns are given and ended."""

    def __init__(self, module: str, arm: Arm, timeout_s: float) -> None:
        self.arm = arm
        self._timeout_s = timeout_s
        self._failure = ""
        self._folder = tempfile.TemporaryDirectory(prefix="memo-bench-")
        path = Path(self._folder.name)
        self._result, self._log = path / "result.json", path / "log"
        self._ended, ended = os.pipe()
        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "passive",  # spinning threads measure the neighbours' load
            "TORCHINDUCTOR_CACHE_DIR": str(path),
            "TMPDIR": str(path),  # Inductor's precompiled C++ headers ignore its own cache folder
            **arm.environment,
            _RESULT_FILE: str(self._result),
            _TURN_ENDED: str(ended),
        }
        with self._log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arm.arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                pass_fds=(ended,),
            )
        os.close(ended)
        self._wait()  # up to its first turn

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.communicate()
        os.close(self._ended)
        self._folder.cleanup()

    def take_turn(self) -> bool:
        """Wake the process and wait for the end of its turn; False if there will be no other."""
        if self._process.poll() is None and not self._failure:
            assert self._process.stdin is not None
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
            self._wait()
        return self._process.poll() is None and not self._failure

    def _wait(self) -> None:
        """Until the process asks for a turn or is gone."""
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            if select.select([self._ended], [], [], 0.2)[0]:
                if not os.read(self._ended, 1):
                    self._process.wait()
                return
            if self._process.poll() is not None:
                return
        self._failure = f"no result within {self._timeout_s:.0f} s"

    def result(self) -> dict[str, Any]:
        code = self._process.poll()
        failure = self._failure or (f"exit code {code}" if code else "")
        if failure or not self._result.exists():
            tail = "\n".join(self._log.read_text().splitlines()[-15:])
            failed = ChildFailed(f"arm {self.arm.name}: {failure or 'sent no result'}\n{tail}")
            if self._result.exists():
                failed.sent = json.loads(self._result.read_text())
            raise failed
        return dict(json.loads(self._result.read_text()))


def wait_turn() -> None:
    """In the child: sleep until the parent of ``run_in_turns`` says go on; nothing by hand."""
    ended = os.environ.get(_TURN_ENDED)
    if ended is not None:
        os.write(int(ended), b".")
        sys.stdin.buffer.readline()


def send_result(result: Mapping[str, Any]) -> None:
    """In the child: hand ``result`` to the parent; without one (run by hand) print it.

    The last one counts; of a child that fails later it is ``ChildFailed.sent``.
    """
    path = os.environ.get(_RESULT_FILE)
    if path is None:
        print(json.dumps(result, indent=2))
    else:
        written = Path(f"{path}.new")  # the parent may stop this process at any time
        written.write_text(json.dumps(result))
        written.replace(path)


def interleaved(
    module: str, arms: Sequence[Arm], num_rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Every arm's results, one per round; the order of the arms is reversed in odd rounds."""
    results: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for number in range(num_rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            print(f"round {number + 1}/{num_rounds}: {arm.name}", file=sys.stderr, flush=True)
            results[arm.name].append(run_arm(module, arm))
    return results


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per key the median over ``rounds`` where all are numbers, else the last round's value."""
    merged: dict[str, Any] = {}
    for key in rounds[-1]:
        values = [measured[key] for measured in rounds]
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        merged[key] = statistics.median(values) if numeric else values[-1]
    return merged


@dataclass(slots=True, kw_only=True)
class Peak:
    """Filled when the block of ``physical_peak`` ends."""

    peak_bytes: int = 0
    growth_bytes: int = 0
    all_bytes: int = 0
    """CPU: the peak with shared memory, where a host store lies; elsewhere the peak."""
    others_bytes: int = 0
    """CPU: what was in memory at entry beside what the caller said was held."""


@contextlib.contextmanager
def physical_peak(device: Any, held_bytes: int) -> Iterator[Peak]:
    """The physical peak of the block: ``held_bytes`` (tensors alive at entry) plus the growth.

    On CPU growth is that of anonymous resident memory over a baseline read after freed heap went
    back to the kernel; on CUDA it is the caching allocator's. memo's arena keeps pages between
    steps: on CPU they are given back first, on CUDA its size belongs into ``held_bytes``.
    """
    import torch
    from memo_runtime.arena import arena_of

    from memo_compile.costs.measure import watch_memory

    peak = Peak()
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.growth_bytes = torch.cuda.max_memory_allocated(device) - before
        peak.all_bytes = held_bytes + peak.growth_bytes
    else:
        arena_of(torch.device(device)).release_pages()
        with watch_memory() as watch:
            peak.others_bytes = watch.baseline_bytes - held_bytes
            yield peak
        peak.growth_bytes = watch.growth_bytes
        peak.all_bytes = held_bytes + watch.growth_with_shared_bytes
    peak.peak_bytes = held_bytes + peak.growth_bytes


def held_bytes(
    model: Any, optimizer: Any, inputs: Sequence[Any], *, arena_device: Any = None
) -> int:
    """Bytes of parameters, buffers, gradients, optimizer state, ``inputs``, and memo's arena.

    The arena counts when ``arena_device`` names a CUDA device: see ``physical_peak``.
    """
    import torch

    tensors = [*model.parameters(), *model.buffers(), *inputs]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for state in optimizer.state.values() if optimizer is not None else ():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    total = sum(storages.values())
    if arena_device is not None and torch.device(arena_device).type == "cuda":
        from memo_runtime.arena import arena_of

        total += arena_of(torch.device(arena_device)).size_bytes
    return total


def hardware() -> dict[str, Any]:
    """What the numbers were measured on, and with."""
    import psutil
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_at_start": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def code() -> str:
    """The commit that changed compiler or runtime last, and whether they differ from it."""
    rooms = ("memo_compile", "runtime")
    commit = _git("log", "-1", "--format=%h", "--", *rooms)
    return f"{commit}, changed" if _git("status", "--porcelain", "--", *rooms) else commit


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git on this machine
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def results_path(name: str, payload: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Where the result of a benchmark lies: ``NAME-DATE.json``."""
    return folder / f"{name}-{payload['hardware']['date']}.json"


def todays_result(name: str) -> dict[str, Any]:
    """What a run of this day wrote; empty where none did."""
    path = results_path(name, {"hardware": hardware()})
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write_results(name: str, payload: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write ``payload`` as ``NAME-DATE.json``; a second run on the same day replaces it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = results_path(name, payload, folder)
    path.write_text(json.dumps(payload, indent=2) + "\n")
    return path


def conclude(name: str, payload: Mapping[str, Any], *, save: bool) -> int:
    """Write the result, say what failed and whether the machine was quiet; the exit code."""
    if save:
        print(f"written: {write_results(name, payload)}", file=sys.stderr)
    if payload.get("note"):
        print(f"NOT QUIET: {payload['note']}", file=sys.stderr)
    for failure in payload["failures"]:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if payload["failures"] else 0


def parser(doc: str | None, *, sizes: Mapping[str, int] | None = None) -> argparse.ArgumentParser:
    """A benchmark's command line: ``--no-save``, ``--child`` for its arms, an int per size."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name, default in (sizes or {}).items():
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--no-save", action="store_true", help="write nothing to benchmarks/results")
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


def passed_on(options: argparse.Namespace, *names: str) -> tuple[str, ...]:
    """These options as arguments for a child."""
    return tuple(f"--{name}={getattr(options, name.replace('-', '_'))}" for name in names)


def register_memo() -> None:
    """``backend="memo"`` is known where the package was not installed, only put on the path."""
    from torch._dynamo import list_backends, register_backend

    if "memo" not in list_backends():
        from memo_compile.backends.entry import memo

        register_backend(memo, name="memo")


def run_benchmark(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Mapping[str, Any]],
    child: Callable[[argparse.Namespace], Mapping[str, Any]],
) -> int:
    """The exit code of a benchmark, or of one of its arms.

    In an arm's process ``child`` is run and its result sent. Else ``measure`` runs the arms, prints
    the tables, and gives what is written: ``failures`` among it, and a ``note`` where the machine
    was not quiet.
    """
    if options.child:
        send_result(child(options))
        return 0
    at_start = hardware()
    payload = {"hardware": at_start, **measure(options)}
    if getattr(options, "json", False):
        print(json.dumps(payload))
    return conclude(name, payload, save=not options.no_save)


def llama(*, layers: int, hidden: int, tokens: int, vocab: int, **more: Any) -> Any:
    """An unmodified Llama of transformers in train mode, from a config and a seed: no download.

    ``more`` are fields of its configuration that differ from the benchmarks' usual ones.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": -(-8 * hidden // 3 // 64) * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": tokens,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**config, **more})).train()


def llama_with_ids(options: argparse.Namespace, *, vocab: int) -> tuple[Any, Any]:
    """``llama`` of the sizes in ``options``, its token ids, and a thread for every core."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = llama(layers=options.layers, hidden=options.hidden, tokens=options.tokens, vocab=vocab)
    generator = torch.Generator().manual_seed(1)
    return model, torch.randint(vocab, (1, options.tokens), generator=generator)


def fake_stage(shape: str, *, layers: int | None, tokens: int) -> tuple[Any, Any]:
    """A named shape in bfloat16 and its inputs as fake tensors, for plans that never run.

    ``layers`` replaces the shape's own number of layers.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from memo_compile.costs.models import find_model
    from memo_compile.offline.shapes.degrees import Degrees
    from memo_compile.offline.shapes.transformer import first_stage

    torch._dynamo.reset()
    found = find_model(shape)
    found = found if layers is None else replace(found, num_layers=layers)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return first_stage(found, Degrees(), seq=tokens, batch=1, dtype=torch.bfloat16)


def floor_of(run: Callable[[], Any]) -> int:
    """The floor that memo names when it refuses the budget of ``run``, which no plan fits."""
    floor = floor_if_refused(run)
    if floor is None:
        raise RuntimeError("a budget that no plan fits was accepted")
    return floor


def floor_if_refused(run: Callable[[], Any]) -> int | None:
    """The floor that memo names when it refuses the budget of ``run``; None: it is accepted."""
    from memo_compile.errors import Infeasible

    try:
        run()
    except Exception as error:  # Dynamo's, around memo's
        refusal = getattr(error, "inner_exception", error)
        if isinstance(refusal, Infeasible) and refusal.floor_bytes is not None:
            return refusal.floor_bytes
        raise
    return None


def processor_s() -> float:
    """Processor time of this process, and of the compilers that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def result_of_ranks(run_rank: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    """What two gloo ranks found, each a process with one thread.

    ``run_rank(rank, folder, *arguments)`` runs on each, enters ``joined_ranks``, and writes its
    JSON to ``folder/foundRANK.json``. Returns ``{"ranks": [...]}``, what each wrote.
    """
    import torch.multiprocessing

    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE="2")
    with tempfile.TemporaryDirectory(prefix="memo-bench-ranks-") as folder:
        torch.multiprocessing.spawn(run_rank, (folder, *arguments), nprocs=2)
        files = sorted(Path(folder).glob("found*.json"))
        return {"ranks": [json.loads(file.read_text()) for file in files]}


@contextlib.contextmanager
def joined_ranks(rank: int, folder: str, *, backend: str = "gloo") -> Iterator[None]:
    """Inside, this process is ``rank`` of two in a group that met in ``folder``."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    yield
    dist.barrier()
    dist.destroy_process_group()


def gradient_error(ours: Any, eager: Any) -> float:
    """The largest difference of two gradients, relative to that parameter's own largest entry.

    Infinite where a gradient is not a number: Python's ``max`` would pass over it.
    """
    largest = 0.0
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        difference = float((mine.grad - theirs.grad).abs().max())
        error = difference / max(float(theirs.grad.abs().max()), 1e-30)
        largest = max(largest, math.inf if math.isnan(error) else error)
    return largest


def memo_plan() -> Any:
    """In the child: the plan that memo made last.

    Raises:
        RuntimeError: memo stepped aside, so that something else was measured.
    """
    import memo_compile

    report = memo_compile.report()
    if not report.active or report.unplanned_steps:
        raise RuntimeError(f"memo stepped aside:\n{report}")
    return report.plans[-1]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; the first column is left-aligned, the others right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 160
    Console(width=width, highlight=False).print(table)
