"""Finds the seed and the offset of random numbers among the results of torch's attention kernels.

Outside of CUDA graphs memory-efficient attention returns them in host memory, whatever their fake
results say, and its backward reads them there: if they are on the device, the process ends (torch
2.11 to 2.13). Flash attention and cuDNN's attention have theirs on the device.
"""

import operator

import torch
from torch import fx

from memo_compile.analysis.structure import argument, namespace, op_name

NUM_NUMBERS = 2
"""Elements of a random state in one tensor: a seed, an offset, or both."""

_READ_ON_HOST = ("philox_seed", "philox_offset")
"""Arguments of memory-efficient attention's backward."""


def is_random_state(item: fx.Node) -> bool:
    """True for the seed or the offset of the random numbers that torch's attention used."""
    if item.target is not operator.getitem:
        return False
    maker, value = item.args[0] if item.args else None, item.meta.get("val")
    if not isinstance(maker, fx.Node) or not isinstance(value, torch.Tensor):
        return False
    is_attention = namespace(maker) == "aten" and "attention" in op_name(maker)
    return is_attention and not value.is_floating_point() and value.numel() <= NUM_NUMBERS


def is_read_on_host(value: fx.Node) -> bool:
    """True for a value that a kernel of the device reads in host memory."""
    return any(
        "efficient_attention_backward" in op_name(user)
        and any(argument(user, name) is value for name in _READ_ON_HOST)
        for user in value.users
        if isinstance(user.target, torch._ops.OpOverload)
    )
