"""Keeps captured steps, so that neither this process nor another traces them again.

AOTAutograd's metadata, its trace of forward and backward, Inductor's joint passes and memo's own
take most of a second process's first step. Torch's cache of AOTAutograd keeps what runs around the
two halves, under torch's own key for graph, inputs, settings and versions. Memo adds to the key all
that its own passes read beside those (``tag_of``), and keeps the halves, cut into regions, in a
record of its own. Where either is in doubt (tensor subclasses, custom operators, several ranks, a
dump) the step is traced.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import fx

from memo_compile.analysis.joint_units import source_line
from memo_compile.analysis.module_paths import module_path
from memo_compile.config import MemoConfig
from memo_compile.driver.capture_record import CaptureRecord, capture_record, cut_again, from_plain
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.stages import CutStep
from memo_compile.errors import InputError, UnsupportedGraph
from memo_compile.file_store import FileStore, code_digest, digest_of
from memo_compile.passes.runner import PassRunner
from memo_compile.step.serialise import plain
from memo_compile.torch_private import compile_caches, distributed, partitioner
from memo_compile.torch_private.compile_caches import Half, RememberedHalf
from memo_compile.torch_private.symbols import StaticFakes

log = logging.getLogger("memo")

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of inputs of which torch's key says everything."""

_NOT_READ = ("cache", "dump", "strict")
"""Options that change nothing about a captured step."""


@dataclass(slots=True)
class CaptureCounts:
    """How many graphs of this process were found in the cache, or put there."""

    recalled: int = 0
    made: int = 0
    """Traced, and written now. Torch may refuse its own part; then each process traces it."""
    refused: int = 0
    """Traced, and of a kind that cannot be kept."""


counts = CaptureCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """A captured step from the cache."""

    record: CaptureRecord
    cut: CutStep
    fakes: StaticFakes


@dataclass(eq=False, slots=True, kw_only=True)
class CaptureMemory:
    """Finds or keeps the step of one graph that is being captured."""

    store: FileStore
    tag: str
    recalled: Recalled | None = None
    _halves: list[RememberedHalf] = field(default_factory=list)

    def half(self, run: Half, *, is_backward: bool) -> RememberedHalf:
        """Returns ``run`` as AOTAutograd's cache wants it."""
        half = RememberedHalf(run=run, is_backward=is_backward)
        self._halves.append(half)
        return half

    def remember(
        self, cut: CutStep, num_results: int, numbers: Mapping[int, Any], notes: Sequence[str]
    ) -> None:
        """Writes the record of the step, and its name into the halves; not if it cannot be kept."""
        try:
            body = plain(capture_record(cut, num_results, numbers, (*notes, *cut.notes)))
        except UnsupportedGraph as error:
            counts.refused += 1
            log.info("memo: %s is traced in each process: %s", cut.name, error)
            return
        counts.made += 1
        name = digest_of(body)
        self.store.write(_key(name), body)
        for half in self._halves:
            half.record = name

    def recall(self, name: str, facts: GraphFacts, runner: PassRunner, graph: str) -> bool:
        """Sets ``recalled`` to the step kept under ``name``; False: there is none."""
        if self.recalled is not None:
            return True
        for body in self.store.read(_key(name)):
            try:
                if digest_of(body) != name:
                    raise InputError("it was written for something else")
                record, fakes = from_plain(body), StaticFakes()
                cut = cut_again(record, facts, runner, graph, fakes)
            except InputError as error:
                log.warning("memo: what was remembered of a graph is not used: %s", error)
                continue
            self.recalled = Recalled(record=record, cut=cut, fakes=fakes)
            counts.recalled += 1
            return True
        return False


def _key(name: str) -> Mapping[str, Any]:
    return {"kind": "capture", "content": name}


def memory_of(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    config: MemoConfig,
    facts: GraphFacts,
    made_outside: tuple[int, ...],
) -> CaptureMemory | None:
    """Returns a memory for ``gm``; None: its step cannot be kept."""
    store = config.store()
    is_plain = config.dump is None and not config.passes and facts.gpu is None
    if store is None or not is_plain or not compile_caches.remembers_autograd():
        return None
    is_alone = distributed.num_ranks() < 2 and not partitioner.ranks_cut_together()
    if not is_alone or not all(map(_is_known_input, examples)):
        return None
    if not all(map(_is_known, _nodes(gm))):
        return None
    return CaptureMemory(store=store, tag=tag_of(gm, examples, config, made_outside))


def tag_of(
    gm: fx.GraphModule, examples: Sequence[Any], config: MemoConfig, made_outside: tuple[int, ...]
) -> str:
    """Returns a digest of what a captured step depends on beside torch's own key."""
    options = {name: repr(of) for name, of in asdict(config).items() if name not in _NOT_READ}
    contents = {
        "memo": code_digest(),
        "options": options,
        "made_outside": made_outside,
        "inputs": _inputs(examples),
        "places": [f"{module_path(node)} {source_line(node)}" for node in _nodes(gm)],
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()),
        "autocast": _autocast(examples),
        "attention": _attention_kernels(),
    }
    return f"memo-{digest_of(contents)}"


def _autocast(examples: Sequence[Any]) -> dict[str, str]:
    """Kind of device -> autocast's dtype where it is on; torch 2.11's key says only that it is."""
    kinds = {value.device.type for value in examples if isinstance(value, torch.Tensor)} | {"cpu"}
    return {
        kind: str(torch.get_autocast_dtype(kind))
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    }


def _attention_kernels() -> list[bool]:
    """Says which kernels torch may choose where the graph does not say so itself."""
    cuda = torch.backends.cuda
    return [
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    ]


def _nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """Returns the nodes of ``gm``, and of the graphs that its operators are given."""
    modules = (module for module in gm.modules() if isinstance(module, fx.GraphModule))
    return [node for module in modules for node in module.graph.nodes]


def _is_known(node: fx.Node) -> bool:
    """False for an operator whose meaning may change while its name stays."""
    target: Callable[..., Any] | str = node.target
    if not isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True  # torch's own key refuses those that it does not know
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else str(target)
    return name.replace("::", ".").partition(".")[0] in ("aten", "prims")


def _is_known_input(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) in _PLAIN and value.layout is torch.strided
    return value is None or type(value) in (bool, int, float)


def _inputs(examples: Sequence[Any]) -> list[str]:
    """Describes of each input what torch's key leaves out, and whose memory it shares."""
    tensors = [value for value in examples if isinstance(value, torch.Tensor)]
    sharing = Counter(value.untyped_storage()._cdata for value in tensors)
    storages: dict[int, int] = {}
    descriptions = []
    for value in examples:
        if not isinstance(value, torch.Tensor):
            descriptions.append(repr(value))
            continue
        storage = value.untyped_storage()._cdata
        number = storages.setdefault(storage, len(storages))
        place = (number, value.storage_offset(), value.is_leaf, value.requires_grad)
        text = f"{type(value).__name__} {place} {value._is_view()}"
        descriptions.append(f"{text} {_base(value)}" if sharing[storage] > 1 else text)
    return descriptions


def _base(value: torch.Tensor) -> str:
    """Describes the whole that ``value`` is a part of: AOTAutograd traces writes into it."""
    base = value if value._base is None else value._base
    layout = (base.dtype, tuple(base.shape), base.stride(), base.storage_offset())
    return f"{layout} {base.requires_grad} {value.untyped_storage().nbytes()}"
