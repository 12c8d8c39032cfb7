"""Who else shows the memory of a tensor."""

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
