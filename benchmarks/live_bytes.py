"""How many bytes plain Inductor keeps alive in a step, line by line: shares no code with memo.

While Inductor's generated ``call`` functions run, a trace function looks at their local variables
before every line and adds up the distinct storages behind the tensors. Not counted: what was there
before the step (parameters, inputs, incoming gradients). What the step hands to the user (loss,
logits, gradients), which memo's arena does not hold, is counted or not.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch


class LiveBytes:
    """Context manager; run one whole step (forward and backward) inside, then read ``peak()``."""

    def __init__(self) -> None:
        self._moments: list[dict[int, int]] = []
        """Per line: storage -> bytes, of everything the running ``call`` can see. A storage is a
        number of its own: addresses are used again."""
        self._calls: list[tuple[set[int], set[int]]] = []
        """Per call: the storages of its arguments, and of its results."""
        self._given: set[int] = set()
        self._kept: dict[int, int] = {}
        """Address -> storage of every result; the results are held, so their addresses stay."""
        self._results: list[torch.Tensor] = []
        self._visible: dict[int, int] = {}
        """Address -> storage of what the running ``call`` saw on its last line."""
        self._numbers = itertools.count()

    def __enter__(self) -> "LiveBytes":
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if event == "call" and code.co_name == "call" and "empty_strided_cpu" in frame.f_globals:
            self._visible = {}
            self._given = set(self._look(list(_tensors(frame.f_locals.get("args", [])))))
            return self._on_line
        return None

    def _look(self, tensors: list[torch.Tensor]) -> dict[int, int]:
        """Storage -> bytes of ``tensors``; an address not seen on the last line is a new one's."""
        seen = {}
        for address in map(_address, tensors):
            known = self._kept.get(address, self._visible.get(address))
            seen[address] = next(self._numbers) if known is None else known
        self._visible = seen
        return {seen[_address(tensor)]: _bytes(tensor) for tensor in tensors}

    def _on_line(self, frame: FrameType, event: str, value: Any) -> Callable[..., Any]:
        tensors = list(_tensors(frame.f_locals.values()))
        results = list(_tensors(value)) if event == "return" and value is not None else []
        self._moments.append(self._look([*tensors, *results]))
        if results:
            made = {_address(result): self._visible[_address(result)] for result in results}
            self._results += results
            self._kept |= made
            self._calls.append((self._given, set(made.values())))
        return self._on_line

    def peak(self) -> int:
        """The most bytes alive at one line."""
        return self._most(self._given_before())

    def peak_without_results(self, outputs: Iterable[torch.Tensor]) -> int:
        """The same less what the user gets, from its birth on: a buffer may become a gradient late.

        ``outputs`` are what the forward returned to the user, still alive.
        """
        read = {storage for given, _ in self._calls[1:] for storage in given}
        results = {storage for _, made in self._calls for storage in made} - read
        results |= {self._kept[_address(output)] for output in outputs}
        return self._most(self._given_before() | results)

    def _given_before(self) -> set[int]:
        """What no call had made before it was given to one."""
        found: set[int] = set()
        made: set[int] = set()
        for given, results in self._calls:
            found |= given - made
            made |= results
        return found

    def _most(self, left_out: set[int]) -> int:
        return max(
            sum(size for storage, size in moment.items() if storage not in left_out)
            for moment in self._moments
        )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
