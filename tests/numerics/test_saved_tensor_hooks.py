"""The handle goes through saved-tensor hooks as any saved tensor: dropped, copied or packed."""

import copy
import functools
import gc
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from memo_runtime.leases import leases
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import memo_compile
from memo_compile.reporting import state

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo hides it by a filter
)

LIMIT = 2e-6
"""Of each parameter's largest gradient: sums in another order."""

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks:
    """Blocks that are compiled one by one, and the same in eager."""

    keeps_gradients = False

    def __init__(self, count: int = 4, **options: Any) -> None:
        torch._dynamo.reset()
        state.reset()
        torch.manual_seed(0)
        self.eager = nn.ModuleList(Block() for _ in range(count))
        self.compiled = copy.deepcopy(self.eager)
        given = {"lowering": "aten", "strict": True, "costs": "roofline", "debug": ("poison",)}
        for block in self.compiled:
            block.compile(backend="memo", options=given | options)

    def step(
        self,
        run: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor],
        rows: int,
        of: int | None = None,
    ) -> None:
        """One step of both, in which ``run`` calls the blocks, or the first ``of`` them."""
        x = torch.randn(rows, WIDTH)
        for blocks in (self.eager, self.compiled):
            if not self.keeps_gradients:
                blocks.zero_grad()
            run(blocks, x.clone().requires_grad_()).square().mean().backward()
        self.compare(of)

    def compare(self, of: int | None = None) -> None:
        both = (self.compiled[:of].parameters(), self.eager[:of].parameters())
        for mine, theirs in zip(*both, strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            most = theirs.grad.abs().max().item()
            assert (mine.grad - theirs.grad).abs().max().item() <= LIMIT * most


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not leases.any_live()


def one_after_the_other(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def checkpointed(
    blocks: nn.ModuleList, x: torch.Tensor, inner: int = 1, **options: Any
) -> torch.Tensor:
    """``inner`` blocks in each checkpoint."""
    before = leases.num_live()
    for first in range(0, len(blocks), inner):
        part = blocks[first : first + inner]
        run = functools.partial(one_after_the_other, part)
        options.setdefault("use_reentrant", False)
        x = torch_checkpoint.checkpoint(run, x, **options)
        assert leases.num_live() == before  # what was dropped is free
    return x


def test_a_dropped_forward_frees_its_frame() -> None:
    blocks = Blocks()
    for reentrant, inner, _ in itertools.product((False, True), (1, 2), range(2)):
        blocks.step(functools.partial(checkpointed, inner=inner, use_reentrant=reentrant), rows=8)
    assert not [note for note in memo_compile.report().notes if "max_inflight" in note]


@pytest.mark.parametrize("count", [1, 3])
def test_a_backward_through_checkpoints_may_run_twice(count: int) -> None:
    """A checkpoint gives the handle away; the frame is put back for the second run all the same."""
    blocks = Blocks(count)
    for _ in range(3):
        x = torch.randn(8, WIDTH)
        for some in (blocks.eager, blocks.compiled):
            some.zero_grad()
            loss = checkpointed(some, x.clone().requires_grad_()).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        blocks.compare()


@pytest.mark.parametrize("debug", ["copies-early", "copies-late"])
def test_a_copy_on_the_host_outlives_a_write_to_what_was_copied(debug: str) -> None:
    """``save_on_cpu`` copies the weights: they may be written, and another forward may come."""
    blocks = Blocks(2, debug=("poison", debug))
    for _ in range(3):
        x = torch.randn(8, WIDTH)
        for some in (blocks.eager, blocks.compiled):
            some.zero_grad()
            with save_on_cpu():
                loss = one_after_the_other(some, x.clone().requires_grad_()).square().mean()
            with torch.no_grad():
                for parameter in some.parameters():
                    parameter.mul_(0.9)
            with save_on_cpu():
                other = one_after_the_other(some, x.clone().requires_grad_()).square().mean()
            (loss + other).backward()
        blocks.compare()


def to_float8(value: torch.Tensor) -> Any:
    packs = value.is_floating_point() and not isinstance(value, nn.Parameter)
    return value.to(torch.float8_e4m3fn) if packs else value


def from_float8(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype is torch.float8_e4m3fn else value


def test_the_backward_uses_what_the_second_forward_computes() -> None:
    """Hooks round what a checkpoint keeps: the second forward has other numbers than the first."""

    def run(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(to_float8, from_float8):
            return checkpointed(blocks, x)

    blocks = Blocks()
    for _ in range(3):
        blocks.step(run, rows=8)


def test_selective_checkpoints_of_all_kinds() -> None:
    """Operators that a policy saves, or asks for, are the user's; memo's are not among them."""

    def saves(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return kind

    blocks = Blocks()
    for kind in torch_checkpoint.CheckpointPolicy:
        if "OFFLOAD" in kind.name:
            continue
        contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, saves)
        for inner in (1, 2):
            blocks.step(functools.partial(checkpointed, inner=inner, context_fn=contexts), rows=8)


class Stored:
    """Keeps what it packs in a list, and its place there in the graph."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def pack(self, value: torch.Tensor) -> int:
        self.kept.append(value)
        return len(self.kept) - 1

    def unpack(self, place: int) -> torch.Tensor:
        return self.kept[place]


def bytes_of(value: torch.Tensor) -> tuple[bytes, torch.dtype, torch.Size]:
    return value.detach().numpy().tobytes(), value.dtype, value.shape


def from_bytes(packed: tuple[bytes, torch.dtype, torch.Size]) -> torch.Tensor:
    content, dtype, shape = packed
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


PACKERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "the same": (lambda value: value, lambda value: value),
    "detached": (lambda value: value.detach(), lambda value: value),
    "cloned": (lambda value: value.clone(), lambda value: value),
    "copied deeply": (lambda value: copy.deepcopy(value.detach()), lambda value: value),
    "copied into another": (
        lambda value: torch.empty(value.shape, dtype=value.dtype).copy_(value),
        lambda value: value,
    ),
    "a view that is copied": (lambda value: value[None].clone(), lambda value: value[0]),
    "to the CPU": (lambda value: value.cpu(), lambda value: value),
    "pickled": (lambda value: pickle.dumps(value.detach()), pickle.loads),
    "as bytes": (bytes_of, from_bytes),
    "as a list": (
        lambda value: (value.tolist(), value.dtype),
        lambda packed: torch.tensor(packed[0], dtype=packed[1]),
    ),
    "as double": (
        lambda value: (value.double(), value.dtype),
        lambda packed: packed[0].to(packed[1]),
    ),
}


def test_packers_that_keep_or_copy() -> None:
    """Also where nothing is left of the handle but a copy of its numbers."""
    stored, blocks = Stored(), Blocks(count=2)
    kinds = [functools.partial(saved_tensors_hooks, *pair) for pair in PACKERS.values()]
    kinds += [save_on_cpu, functools.partial(saved_tensors_hooks, stored.pack, stored.unpack)]
    for hooks in kinds:

        def run(blocks: nn.ModuleList, x: torch.Tensor, hooks: Any = hooks) -> torch.Tensor:
            with hooks():
                return one_after_the_other(blocks, x)

        blocks.step(run, rows=8)
        stored.kept.clear()
    assert memo_compile.report().active


def test_a_packer_that_rounds_integers_too_finds_the_step() -> None:
    """Whatever lease comes: its number has no digit that rounding changes."""
    blocks = Blocks(count=3)
    for dtype, _ in itertools.product((torch.float8_e4m3fn, torch.float8_e5m2), range(5)):
        with saved_tensors_hooks(
            lambda value, dtype=dtype: (value.to(dtype), value.dtype),
            lambda packed: packed[0].to(packed[1]),
        ):
            out = one_after_the_other(blocks.compiled, torch.randn(8, WIDTH))
        out.square().mean().backward()
    assert memo_compile.report().active


def test_a_copy_of_a_handle_does_not_outlive_its_graph() -> None:
    blocks = Blocks(count=2)
    with saved_tensors_hooks(lambda value: value.clone(), lambda value: value):
        out = one_after_the_other(blocks.compiled, torch.randn(8, WIDTH))
    assert leases.any_live()
    del out
    assert not leases.any_live()


def test_a_packer_that_raises_leaves_nothing() -> None:
    def refuses(value: torch.Tensor) -> Any:
        raise ValueError("not this one")

    blocks = Blocks(count=2)
    for _ in range(2):
        with (
            saved_tensors_hooks(refuses, lambda value: value),
            pytest.raises(ValueError, match="not this one"),
        ):
            one_after_the_other(blocks.compiled, torch.randn(8, WIDTH))
        gc.collect()
        assert not leases.any_live()
        blocks.step(one_after_the_other, rows=8)


class Seen(TorchDispatchMode):
    """Notes which operators it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


class SeenByCheckpoint(Seen):
    """Stays active while compiled code runs, as the modes of selective checkpointing do."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


INTERNAL = {"aten.empty.memory_format", "aten.set_.source_Storage_storage_offset", "aten.clone"}
PRODUCT = "aten.mm.out"


def test_modes_see_compiled_code_and_nothing_of_what_runs_it() -> None:
    block = Blocks(count=1, policy="full-offload").compiled[0]
    x = torch.randn(8, WIDTH)
    block(x).sum().backward()
    for mode, sees in ((Seen(), True), (SeenByCheckpoint(), False)):
        out = block(x).sum()
        with mode:
            out.backward()
        assert not mode.names & INTERNAL
        assert (PRODUCT in mode.names) is sees


def test_operations_of_compiled_code_are_counted() -> None:
    blocks = Blocks(count=1)
    counts = []
    for (block,) in (blocks.eager, blocks.compiled):
        out = block(torch.randn(8, WIDTH, requires_grad=True)).sum()
        with FlopCounterMode(display=False) as counter:
            out.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_default_device_is_not_for_handles() -> None:
    block = Blocks(count=1, policy="full-offload").compiled[0]
    with torch.device("meta"):
        block(torch.randn(8, WIDTH, device="cpu")).sum().backward()
    assert all(parameter.grad.device.type == "cpu" for parameter in block.parameters())
