"""The seed and the offset of the random numbers that torch's attention kernels draw.

Outside of CUDA graphs memory-efficient attention puts them into the host's memory, whatever their
fake results say, and its backward reads them there: on the device they end the process (torch 2.11
to 2.13). Flash attention and cuDNN's have theirs on the device.
"""

import operator

import torch
from torch import fx

from memo_compile.analysis.structure import argument, namespace, op_name

NUM_NUMBERS = 2
"""A random state is a seed and an offset: two tensors, or the two numbers of one."""

_READ_ON_HOST = ("philox_seed", "philox_offset")
"""Arguments of memory-efficient attention's backward."""


def is_random_state(item: fx.Node) -> bool:
    """True for the seed or the offset of the random numbers that torch's attention used."""
    if item.target is not operator.getitem:
        return False
    made, value = item.args[0] if item.args else None, item.meta.get("val")
    if not isinstance(made, fx.Node) or not isinstance(value, torch.Tensor):
        return False
    is_attention = namespace(made) == "aten" and "attention" in op_name(made)
    return is_attention and not value.is_floating_point() and value.numel() <= NUM_NUMBERS


def is_read_on_host(value: fx.Node) -> bool:
    """True for what a kernel of the device reads in the host's memory."""
    return any(
        "efficient_attention_backward" in op_name(user)
        and any(argument(user, name) is value for name in _READ_ON_HOST)
        for user in value.users
        if isinstance(user.target, torch._ops.OpOverload)
    )
