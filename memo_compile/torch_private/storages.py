"""Memory of tensors: who else shows it, and what it holds before it is written."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

_ONE_TENSOR = 2
"""Uses of a storage that one tensor has: the tensor's, and that of the object that is asked."""


def is_plain_alone(parameter: torch.Tensor) -> bool:
    """True for a plain parameter, or a fake one, whose whole memory no other tensor shows."""
    if isinstance(parameter, torch._subclasses.FakeTensor):
        return True
    if type(parameter) is not torch.nn.Parameter:
        return False
    storage = parameter.untyped_storage()
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return storage.nbytes() == parameter.nbytes and uses <= _ONE_TENSOR


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Lets torch forget a capture into ``pool`` that CUDA has refused (2.11, 2.13).

    ``CUDAGraph.capture_end`` raises before it does so. Memory that is freed would be kept, and in
    2.11 random numbers outside of a capture would be refused.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    torch._C._cuda_endAllocateToPool(index, pool)
    torch._C._cuda_releasePool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Inside, memory that a kernel allocates and leaves unwritten is NaN (2.11, 2.13).

    Torch fills it where algorithms are to be deterministic, and warns of those that are not. The
    public function would change Inductor's settings as well.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(enabled, warn_only=only_warns)
