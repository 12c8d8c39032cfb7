"""``memo_compile.parameters_on_host``: a model whose layers' weights lie on the host.

    model = memo_compile.parameters_on_host(model, device="cuda")
    model = torch.compile(model, backend="memo")

A planned step copies a layer's weights to the device before its forward and before its backward. So
a model can train that is larger than the device, with most of it frozen (LoRA) or updated at home.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from memo_runtime.host_tensors import place_of
from torch import nn

from memo_compile.config import resolve
from memo_compile.driver.layer_weights import LEAST_BYTES, LEAST_SHARE, place_on_host
from memo_compile.errors import ConfigError
from memo_compile.torch_private import storages


def parameters_on_host(
    model: nn.Module, device: torch.device | str | None = None, *, kind: str = "auto"
) -> nn.Module:
    """Moves the large parameters of ``model``'s repeating layers to the host; returns ``model``.

    They become, or stay, tensors of the device: kernels read and write them over the link. Call it
    before ``torch.compile``; all else is moved to the device.

    Args:
        model: Its layers are the modules of its lists (``nn.ModuleList``, ``nn.Sequential``).
        device: Where the model is to run; by default where its parameters are.
        kind: ``auto`` (pinned on CUDA, else ``shm``), ``pinned`` or ``shm``.

    Raises:
        ConfigError: it has no layers, or a parameter that is no plain tensor.
        HostStoreError: the memory was refused.
    """
    if kind not in ("auto", "pinned", "shm"):
        raise ConfigError(f"parameters_on_host: kind: expected auto, pinned or shm, got {kind!r}")
    parameters = list(model.parameters())
    if not parameters:
        raise ConfigError("parameters_on_host: the model has no parameters")
    target = torch.device(parameters[0].device if device is None else device)
    if kind == "shm" and target.type == "cuda":
        raise ConfigError("parameters_on_host: kind: kernels of CUDA read pinned memory, not shm")
    kind = resolve(None, None).kind_for_kernels(target.type) if kind == "auto" else kind
    layers = list(_layers(model))
    if not layers:
        raise ConfigError(
            "parameters_on_host: expected layers in an nn.ModuleList or nn.Sequential, found none"
        )
    owners = Counter(id(each) for module in model.modules() for each in _own(module))
    largest = max(each.nbytes for layer in layers for each in layer.parameters())
    least = max(LEAST_BYTES, LEAST_SHARE * largest)
    for layer in layers:
        moving = [
            each for each in layer.parameters() if owners[id(each)] == 1 and each.nbytes >= least
        ]
        _require_plain(moving)
        # What another tensor shows stays: it would not see what is written here later.
        moving = [
            each for each in moving if place_of(each) is None and storages.is_plain_alone(each)
        ]
        if moving:
            with torch.no_grad():
                place_on_host(moving, target, kind)
    return _rest_on(model, target)


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return (each for each in module._parameters.values() if each is not None)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of the outermost lists that hold at least two with parameters."""
    members = [each for each in model.children() if any(True for _ in each.parameters())]
    if isinstance(model, nn.ModuleList | nn.Sequential) and len(members) > 1:
        yield from members
    else:
        for module in members:
            yield from _layers(module)


def _require_plain(parameters: list[nn.Parameter]) -> None:
    for each in parameters:
        if type(each) is not nn.Parameter or each.device.type == "meta":
            what = "a meta tensor" if each.device.type == "meta" else f"a {type(each).__name__}"
            raise ConfigError(
                f"parameters_on_host: a weight is {what}: load the model first, as plain parameters"
            )


def _rest_on(model: nn.Module, device: torch.device) -> nn.Module:
    """Moves what is not on ``device`` there: embeddings, heads, norms, buffers."""
    for module in model.modules():
        for each in _own(module):
            if each.device != device and each.device.type != "meta":
                each.data = each.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model
