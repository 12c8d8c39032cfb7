"""Orders the work of CUDA streams on memory that is lent to one user after another."""

from typing import Any

import torch


class StreamOrder:
    """Orders the users of one piece of memory that may work on different streams.

    The host gives memory back when it has launched the last kernel or copy, which may still run
    then. Without a CUDA ``device`` nothing is to be done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._freed: Any = None

    def begin(self) -> None:
        """From here on the current stream works after the last user's work has ended."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
            if self._freed is not None:
                self._stream.wait_event(self._freed)

    def end(self, memory: torch.Tensor | None = None) -> None:
        """The user has launched all its work, on the stream of ``begin`` or waited for by it.

        ``memory`` is what torch's allocator must not free before, None where it is not torch's.
        """
        if self._stream is not None:
            if memory is not None:
                memory.record_stream(self._stream)
            self._freed = self._stream.record_event()
