"""What belongs to a model beside the blocks of a group: embeddings, a head, their gradients."""

import gc
from collections.abc import Sequence

import torch


def parameters_around(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """The other parameters of the largest module that has all of ``parameters``.

    Nothing leads from a block to the model around it, so that all modules of the process are looked
    at: that takes some tens of milliseconds, once for each plan of a group.
    """
    own = {id(parameter) for parameter in parameters}
    largest: list[torch.nn.Parameter] = []
    for found in gc.get_objects():
        if not issubclass(type(found), torch.nn.Module):  # isinstance asks dead proxies
            continue
        others = list(found.parameters())
        if len(others) > len(largest) and own <= {id(parameter) for parameter in others}:
            largest = others
    return [parameter for parameter in largest if id(parameter) not in own]
