"""How many bytes plain Inductor keeps alive in a step, line by line: shares no code with memo.

While Inductor's generated ``call`` functions run, a trace function looks at their local variables
before every line and adds up the distinct storages behind the tensors. Not counted: what was there
before the step (parameters, inputs) and what the step hands to the user (loss, gradients), because
memo's arena does not hold those either.
"""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch


class LiveBytes:
    """Context manager; run one whole step (forward and backward) inside, then read ``peak()``."""

    def __init__(self) -> None:
        self._moments: list[dict[int, int]] = []
        """Per line: storage address -> bytes, of everything the running ``call`` can see."""
        self._calls: list[tuple[set[int], set[int]]] = []
        """Per call: addresses of its arguments, addresses of its results."""
        self._given: set[int] = set()
        self._keep: list[torch.Tensor] = []

    def __enter__(self) -> "LiveBytes":
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if event == "call" and code.co_name == "call" and "empty_strided_cpu" in frame.f_globals:
            self._given = {_address(one) for one in _tensors(frame.f_locals.get("args", []))}
            return self._on_line
        return None

    def _on_line(self, frame: FrameType, event: str, value: Any) -> Callable[..., Any]:
        tensors = list(_tensors(frame.f_locals.values()))
        self._moments.append({_address(one): _bytes(one) for one in tensors})
        if event == "return" and value is not None:
            results = list(_tensors(value))
            self._keep += results  # an address must not be used again while it is in the books
            self._calls.append((self._given, {_address(one) for one in results}))
        return self._on_line

    def peak(self) -> int:
        """The most bytes alive at one line, less what is the user's before or after the step."""
        saved = {one for _, made in self._calls[:-1] for one in made}
        saved &= {one for given, _ in self._calls[1:] for one in given}
        users = {one for given, made in self._calls for one in given | made} - saved
        return max(
            sum(size for address, size in moment.items() if address not in users)
            for moment in self._moments
        )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, tuple | list):
            yield from _tensors(one)
