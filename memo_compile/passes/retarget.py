"""Moves a graph that was traced on the CPU to another device, which need not exist here."""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree

from memo_compile.torch_private import fx_graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Retarget:
    """Puts every value and every device argument of the CPU on ``device``.

    Rewrite:
        p: cpu                                   p: cuda:0
        a = arange(8, device=cpu)           ->   a = arange(8, device=cuda:0)
        r = add(p, a)                            r = add(p, a)
    """

    device: torch.device
    name: ClassVar[str] = "retarget"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        mode = fx_graphs.detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes])
        if mode is None:
            return PassResult(gm, False)
        moved = functools.partial(self._moved, moved_storages={})
        for node in gm.graph.nodes:
            node.meta.pop("tensor_meta", None)
            if "val" in node.meta:
                with mode:
                    node.meta["val"] = _pytree.tree_map_only(torch.Tensor, moved, node.meta["val"])
            if node.op == "call_function":
                node.args, node.kwargs = _pytree.tree_map_only(
                    torch.device, self._device, (node.args, node.kwargs)
                )
        return PassResult(gm, True)

    def _device(self, device: torch.device) -> torch.device:
        return self.device if device.type == "cpu" else device

    def _moved(
        self, value: torch.Tensor, moved_storages: dict[tuple[int, torch.dtype], torch.Tensor]
    ) -> torch.Tensor:
        """Returns a fake like ``value`` on the device; values keep sharing a storage."""
        if value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        key = storage._cdata, value.dtype
        if key not in moved_storages:
            length = storage.nbytes() // value.element_size()
            moved_storages[key] = torch.empty(length, dtype=value.dtype, device=self.device)
        return moved_storages[key].as_strided(value.shape, value.stride(), value.storage_offset())
