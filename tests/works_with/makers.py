"""What makes the small models of ``rows.toml``, their inputs and their losses."""

import functools
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests import models
from tests.models import ModelCase, own_loss
from tests.numerics.training import without_dropout

TOKENS, LAYERS = 16, 2
"""Of a sequence; a batch has two."""
ADAPTED = ["q_proj", "v_proj", "up_proj"]


def numbers(*shape: int) -> torch.Tensor:
    """The same random numbers for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def without_randomness(settings: Any) -> Any:
    """A configuration, or a module, with every probability to drop something at zero."""
    for name, value in list(vars(settings).items()):
        if "drop" in name and type(value) in (int, float):
            setattr(settings, name, type(value)(0))
    return settings


def deterministic(model: nn.Module) -> nn.Module:
    for module in model.modules():
        without_randomness(module)
    return without_dropout(model)


_WORDS = models.causal_inputs(TOKENS)["input_ids"]
_BEHIND_PICTURE = torch.cat(
    [torch.full((2, 16), models.VOCABULARY - 1), _WORDS.clamp(3, models.VOCABULARY - 2)], 1
)
_NAMED = {
    "words": _WORDS,
    "words behind a picture": _BEHIND_PICTURE,  # of 16 patches
    "letters": torch.arange(3, 15).view(2, 6),
    "answers": torch.tensor([1, 5]),
    "moments": torch.tensor([3, 7]),
    "fractions": torch.tensor([0.3, 0.7]),
    "places": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
    "origins": torch.zeros(6, 3),
    "six words": torch.ones(2, 6, dtype=torch.bool),
}
Wanted = Mapping[str, str | list[int]]
"""Inputs by name: a tensor by its name, or random numbers by their shape."""


def _inputs(wanted: Wanted) -> dict[str, torch.Tensor]:
    return {
        name: _NAMED[each].clone() if isinstance(each, str) else numbers(*each)
        for name, each in wanted.items()
    }


def transformer(
    *, kind: str, model_class: str, inputs: Wanted, calls: str = "", **fields: Any
) -> ModelCase:
    """A model of transformers from the fields of its configuration, and its own loss.

    ``calls`` is a method of the model that is called first.
    """
    import transformers

    config = without_randomness(transformers.AutoConfig.for_model(kind, **fields))
    config.use_cache = False
    made = getattr(transformers, model_class)
    model = made.from_config(config) if "Auto" in model_class else made(config)
    if "CausalLM" in model_class:
        model.loss_type = "ForCausalLM"
    if calls:
        getattr(model, calls)()
    return model.train(), _inputs(inputs), own_loss


def contrastive(**fields: Any) -> ModelCase:
    """A text and an image encoder; the loss is of which text belongs to which image."""
    model, inputs, _ = transformer(**fields)
    return model, inputs, lambda model, **inputs: model(**inputs, return_loss=True).loss


def pictures(*, model: str, size: int = 64, dtype: str = "float32", **fields: Any) -> ModelCase:
    """A model of timm that tells classes of images.

    Batch norm over two small images has few digits in float32, which are no fault of memo's.
    """
    wanted = getattr(torch, dtype)
    made = import_timm().create_model(model, num_classes=8, **fields).to(wanted).train()
    inputs = {"pixels": numbers(2, 3, size, size).to(wanted), "labels": _NAMED["answers"]}
    return made, inputs, models.classifier_loss


def denoiser(
    *,
    model_class: str,
    inputs: Wanted,
    fixed: Mapping[str, Any] | None = None,
    **fields: Any,
) -> ModelCase:
    """A model of diffusers; its loss is how far it is from noise."""
    import diffusers

    model = getattr(diffusers, model_class)(**fields)
    tensors = _inputs(inputs)

    def loss(model: nn.Module, noise: torch.Tensor, **tensors: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(model(**tensors, **(fixed or {})).sample, noise)

    first = next(iter(tensors.values()))
    return model.train(), {**tensors, "noise": numbers(*first.shape)}, loss


def bfloat16() -> ModelCase:
    model, inputs, loss = models.llama(LAYERS)
    return model.bfloat16(), inputs, loss


def autocast() -> ModelCase:
    model, inputs, loss = models.llama(LAYERS)

    def cast(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, **inputs)

    return model, inputs, cast


def float8(*, recipe: str) -> ModelCase:
    """torchao's float8 training; its products are of float32, since a CPU has none of float8."""
    import dataclasses

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model, inputs, loss = models.llama(LAYERS)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name != "lm_head"
    )
    return model, inputs, loss


def with_adapters(model: nn.Module, **fields: Any) -> nn.Module:
    """PEFT's adapters around some products; both of their factors are random, so both train."""
    from peft import LoraConfig, get_peft_model

    fixed = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(target_modules=ADAPTED, **fixed, **fields)).train()


def adapted(**fields: Any) -> ModelCase:
    model, inputs, loss = models.llama(LAYERS)
    return with_adapters(model, **fields), inputs, loss


def adapted_4bit() -> ModelCase:
    """QLoRA: PEFT's adapters on products with bitsandbytes' 4-bit weights."""
    model, inputs, loss = models.llama(LAYERS)
    _replace_products(model, _packed_by_bitsandbytes)
    model.is_loaded_in_4bit = True  # by which PEFT knows
    return with_adapters(model), inputs, loss


def adapted_nf4(**fields: Any) -> ModelCase:
    """torchao's frozen 4-bit weights, with adapters by hand."""
    model, inputs, loss = transformer(**fields)
    model.requires_grad_(False)
    _replace_products(model, _NF4Linear)
    return model, inputs, loss


def _replace_products(model: nn.Module, replaced: Callable[[nn.Linear], nn.Module]) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(module, name, replaced(child))


def _packed_by_bitsandbytes(linear: nn.Linear) -> nn.Module:
    import bitsandbytes

    how = {"bias": False, "compute_dtype": torch.float32, "quant_type": "nf4"}
    packed = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, **how)
    packed.load_state_dict({"weight": linear.weight.detach()})
    packed.weight.requires_grad_(False)
    return packed.to("cpu")  # which packs


class _NF4Linear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        from torchao.quantization import to_nf4

        self.weight = nn.Parameter(to_nf4(linear.weight.detach()), requires_grad=False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight) + self.up(self.down(x))


def packed(*, masked: bool = False) -> ModelCase:
    """Three texts in a row: positions begin anew, and no text attends to another."""
    model, _, _ = models.llama(LAYERS)
    positions = torch.cat([torch.arange(length) for length in (16, 9, 23)])[None]
    ids = models.causal_inputs(positions.shape[1])["input_ids"][:1]
    inputs = {"input_ids": ids, "labels": ids, "position_ids": positions}
    if masked:
        text = (positions == 0).cumsum(1)
        inputs["attention_mask"] = (text[:, :, None] == text[:, None, :]).tril()[:, None]
    return model, inputs, own_loss


def varlen(*, kernel: str) -> ModelCase:
    """Three texts in a row for a kernel that is told where they end, and how long the longest is.

    flash-attn's operators are those of the tests, since its kernels need a GPU.
    """
    from tests.steps.packed_sequences import KERNELS, Decoder, batch_of

    *tensors, longest = batch_of([16, 9, 23], 0)
    inputs = dict(zip(("ids", "labels", "places", "ends"), tensors, strict=True))
    return Decoder(KERNELS[kernel]), inputs, lambda model, **given: model(**given, longest=longest)


def checkpointed() -> ModelCase:
    model, inputs, loss = models.llama(LAYERS)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, inputs, loss


def adam_8bit(model: nn.Module) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.Adam8bit(model.parameters(), lr=1e-3)


@functools.cache
def import_timm() -> ModuleType:
    """timm, which imports torchvision: that has no binary for a CPU's torch beside its wheel.

    It misses two operators then, which no model here needs.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)
    return importlib.import_module("timm")


_LIBRARIES: list[torch.library.Library] = []
