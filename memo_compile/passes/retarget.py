"""Makes a graph that was traced on one device one of another, which need not be here."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree

from memo_compile.torch_private import fx_graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Retarget:
    """Every value and every device argument of the CPU is on ``device``.

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
        moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        for node in gm.graph.nodes:
            node.meta.pop("tensor_meta", None)
            if "val" in node.meta:
                with mode:
                    node.meta["val"] = _pytree.tree_map_only(
                        torch.Tensor, lambda value: self._moved(value, moved), node.meta["val"]
                    )
            if node.op == "call_function":
                node.args, node.kwargs = _pytree.tree_map_only(
                    torch.device, self._device, (node.args, node.kwargs)
                )
        return PassResult(gm, True)

    def _device(self, given: torch.device) -> torch.device:
        return self.device if given.type == "cpu" else given

    def _moved(
        self, value: torch.Tensor, moved: dict[tuple[int, torch.dtype], torch.Tensor]
    ) -> torch.Tensor:
        """A fake like ``value``; what shares a storage does so there too."""
        if value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        key = storage._cdata, value.dtype
        if key not in moved:
            length = storage.nbytes() // value.element_size()
            moved[key] = torch.empty(length, dtype=value.dtype, device=self.device)
        return moved[key].as_strided(value.shape, value.stride(), value.storage_offset())
