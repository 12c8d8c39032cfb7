"""Every wait, event, ``record_stream`` and order of a lane; and the runtime without some.

What is meant by the runtime is ``memo_runtime``, and the updates of ``memo_compile.offload``.
"""

import contextlib
import fnmatch
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import memo_runtime
import torch
from memo_runtime.copies import CopyEngine, Ticket, _CudaLanes

from memo_compile import training_state
from tests.cuda_emulated.device_calls import new_stream

ROOTS = {str(Path(package.__file__).parent) for package in (memo_runtime, training_state)}
FOUND = (
    (torch.cuda.Stream, "wait_event"),
    (torch.cuda.Stream, "record_event"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda, "synchronize"),
    (torch.Tensor, "record_stream"),
    (CopyEngine, "wait"),
    (CopyEngine, "wait_on_host"),
    (CopyEngine, "settle"),
    (_CudaLanes, "start"),
)
"""Calls that wait, record, hold, or put a copy into its lane, behind those before it."""

Site = tuple[str, ...]
"""The name of what is called, and the runtime's lines on the way to it, innermost first."""


def _site(name: str) -> Site:
    """Where the runtime called ``name``; only the name where something else did."""
    lines, frame = [name], sys._getframe(2)
    while frame is not None:
        path, _, file = frame.f_code.co_filename.rpartition("/")
        if path in ROOTS:
            code = frame.f_code
            name = code.co_qualname if code.co_name == "execute" else code.co_name
            function = f"{file.removesuffix('.py')}.{name}"
            lines.append(f"{function}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(lines)


def _instead(name: str, real: Callable[..., Any], acts: Callable[[Site], bool]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        site = _site(name)
        if len(site) > 1 and not acts(site):
            return _without(real, *args)
        return real(*args, **kwargs)

    return call


def _without(real: Callable[..., Any], *args: Any) -> Any:
    """What a call that is left out gives back."""
    if real.__name__ == "start":
        return _beside_its_lane(real, *args)
    return torch.cuda.Event() if real.__name__ == "record_event" else 0.0


def _beside_its_lane(start: Callable[..., Any], lanes: _CudaLanes, ticket: Ticket) -> None:
    """The copy runs in no order with the others of its lane."""
    lane = lanes.streams.get(ticket.lane) or torch.cuda.Stream(lanes.device)
    lanes.streams[ticket.lane] = new_stream()
    try:
        start(lanes, ticket)
    finally:
        lanes.streams[ticket.lane] = lane


@contextlib.contextmanager
def _calls(acts: Callable[[Site], bool]) -> Iterator[None]:
    """Where ``acts`` is False of a call's site, the call is left out."""
    with contextlib.ExitStack() as stack:
        for owner, name in FOUND:
            called = f"{owner.__name__}.{name}"
            instead = _instead(called, getattr(owner, name), acts)
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def sites_of(run: Callable[[], Any]) -> set[Site]:
    """The sites of all such calls that the runtime makes in ``run``.

    The collector is off: a step that it ends would seem to end wherever it happens to run.
    """
    found: set[Site] = set()

    def acts(site: Site) -> bool:
        found.add(site)
        return True

    gc.collect()
    gc.disable()
    try:
        with _calls(acts):
            run()
    finally:
        gc.enable()
    return found


_END = "leases._close < leases._end < leases.release"
_BACKWARD = "backward_run._end < backward_run.rest < run_step.run_backward"
_OWN = "EARLY and LATE copy on the stream that computes; after SERIAL's wait another one follows"
_KNOWN = "EARLY: the order of the frames knows the stream that computes"
_RELEASED = "copies.settle < copies.settle < leases.settle < leases._end < leases.release"
_SETTLED = "the host has waited for all copies of the step, and nothing else uses a host frame"
_WAITED = "at the end of a whole backward its plan has waited for all copies"
_HOST_WAITS = "the host waits for the copy's end besides"
_STREAM = "the stream waits besides, and what uses these bytes next is behind it"
_HOST_WAITED = "the host has waited for the stream that computes when the update began"
_NO_ORDER = (
    "each copy of an update, of a weight and of a captured half is waited for by itself before its "
    "bytes are used again"
)
_STARTED = "copies._start < copies.begin"
EXEMPT = {
    "Stream.record_event < copies.copy_now < *": _OWN,
    "Stream.wait_event < copies.finish < copies.begin < *": _OWN,
    f"Event.synchronize < {_RELEASED} < run_step.run_forward": _KNOWN,
    f"Stream.record_event < stream_order.end < host_store.release < {_END}": _SETTLED,
    f"Stream.record_event < stream_order.end < host_store.release < {_END} < run_step.*": _SETTLED,
    "Stream.wait_event < stream_order.begin < host_store.acquire < leases.lease_frame"
    " < run_step._planned_lease < run_step.reserve": "it does nothing with the host frame",
    f"Stream.record_event < stream_order.end < host_store.release < {_END} < leases.drop": _SETTLED,
    f"_CudaLanes.start < {_STARTED} < update._begin < *": _NO_ORDER,
    f"_CudaLanes.start < {_STARTED} < leases.issue < instructions.issue"
    " < instructions.StartReload.execute < run_step._execute < run_step.run_forward": _NO_ORDER,
    f"Stream.*_event < copies.start < {_STARTED} < update._begin < host_update.*": _HOST_WAITED,
    "Event.synchronize < copies.wait_on_host < host_update._wait < update._finish < *": _STREAM,
    "Stream.synchronize < instructions.timed < *": "seconds are measured there, no number is read",
    "CopyEngine.wait < copies.wait_on_host < *": _HOST_WAITS,
    "Stream.wait_event < copies.finish < copies.wait < copies.wait_on_host < *": _HOST_WAITS,
    "CopyEngine.wait < gradient_homes.take < *": _HOST_WAITS,
    f"CopyEngine.settle < leases.settle < {_BACKWARD}": _WAITED,
    "CopyEngine.wait < leases.wait < cuda_graphs._wait_for_copies < cuda_graphs._capture"
    " < cuda_graphs.graph_of < run_step.begin_backward < *": _WAITED,
    f"_CudaLanes.start < {_STARTED} < leases.issue < instructions.issue < instructions.Start*"
    " < cuda_graphs._capture < *": _NO_ORDER,
    f"CopyEngine.settle < leases.settle < leases._end < leases.release < {_BACKWARD}": _WAITED,
}
"""A site without lines, as a pattern of fnmatch -> why nothing can fail without it."""


def is_exempt(site: Site) -> bool:
    """True for a call whose absence cannot change a number, for the reason in EXEMPT."""
    return reason_of(site) != ""


def reason_of(site: Site) -> str:
    """Why nothing can fail without the call; "" where something must."""
    functions = " < ".join([site[0], *(line.partition(":")[0] for line in site[1:])])
    reasons = (why for pattern, why in EXEMPT.items() if fnmatch.fnmatchcase(functions, pattern))
    return next(reasons, "")


def without(*sites: Site) -> contextlib.AbstractContextManager[None]:
    """The runtime does not make the calls of ``sites``."""
    return _calls(lambda called: called not in sites)
