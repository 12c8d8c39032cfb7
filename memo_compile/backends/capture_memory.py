"""A step that was captured before, in this process or in another, is not traced again.

AOTAutograd's metadata, its trace of forward and backward, Inductor's joint passes and memo's own
take most of a second process's first step. Torch's cache of AOTAutograd keeps what runs around the
two halves, under torch's own key for graph, inputs, settings and versions; memo adds to it all that
its own passes read beside those (``tag_of``), and keeps the halves, cut into regions, in a record
of its own. Where either is in doubt (tensor subclasses, custom operators, several ranks, a dump)
the step is traced as if nothing was known.
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
from memo_compile.driver.capture_record import (
    CaptureRecord,
    capture_record,
    cut_again,
    from_plain,
)
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
"""Types of inputs of which torch's key says everything; others describe themselves."""

_NOT_READ = ("cache", "dump", "strict")
"""Options that change nothing about a captured step."""


@dataclass(slots=True)
class CaptureCounts:
    """What came of the graphs of this process that could be remembered."""

    recalled: int = 0
    made: int = 0
    """Traced, and written now. Torch may refuse its own part; then each process traces it."""
    refused: int = 0
    """Traced, and of a kind that is not remembered."""


counts = CaptureCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """A step that another capture has made."""

    record: CaptureRecord
    cut: CutStep
    fakes: StaticFakes


@dataclass(eq=False, slots=True, kw_only=True)
class CaptureMemory:
    """What is remembered of one graph that is being captured."""

    store: FileStore
    tag: str
    recalled: Recalled | None = None
    _halves: list[RememberedHalf] = field(default_factory=list)

    def half(self, run: Half, *, is_backward: bool) -> RememberedHalf:
        """``run`` as AOTAutograd's cache wants it."""
        made = RememberedHalf(run=run, is_backward=is_backward)
        self._halves.append(made)
        return made

    def remember(
        self, cut: CutStep, num_results: int, numbers: Mapping[int, Any], notes: Sequence[str]
    ) -> None:
        """The step of all halves so far is found again; where that cannot be, it is not."""
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
        """True where ``recalled`` is what was remembered under ``name``."""
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
    """What may be remembered of ``gm``; None: nothing, it is traced."""
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
    """What a captured step depends on beside what is in torch's own key."""
    options = {name: repr(of) for name, of in asdict(config).items() if name not in _NOT_READ}
    said = {
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
    return f"memo-{digest_of(said)}"


def _autocast(examples: Sequence[Any]) -> dict[str, str]:
    """By kind of device where it is on: to what; torch 2.11's key says only whether it is on."""
    kinds = {value.device.type for value in examples if isinstance(value, torch.Tensor)} | {"cpu"}
    return {
        kind: str(torch.get_autocast_dtype(kind))
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    }


def _attention_kernels() -> list[bool]:
    """Which of them may be chosen where the graph does not say so itself."""
    cuda = torch.backends.cuda
    return [
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    ]


def _nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """Those of ``gm``, and of the graphs that its operators are given."""
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
    """Of each input what torch's key leaves out, and whose memory it shares."""
    tensors = [value for value in examples if isinstance(value, torch.Tensor)]
    sharing = Counter(value.untyped_storage()._cdata for value in tensors)
    storages: dict[int, int] = {}
    found = []
    for value in examples:
        if not isinstance(value, torch.Tensor):
            found.append(repr(value))
            continue
        storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
        place = (storage, value.storage_offset(), value.is_leaf, value.requires_grad)
        said = f"{type(value).__name__} {place} {value._is_view()}"
        is_shared = sharing[value.untyped_storage()._cdata] > 1
        found.append(f"{said} {_memory(value)}" if is_shared else said)
    return found


def _memory(value: torch.Tensor) -> str:
    """The whole that ``value`` is a part of; AOTAutograd traces that where the part is written."""
    base = value if value._base is None else value._base
    layout = (base.dtype, tuple(base.shape), base.stride(), base.storage_offset())
    return f"{layout} {base.requires_grad} {value.untyped_storage().nbytes()}"
