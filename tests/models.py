"""Tiny instances of the models that memo is for, unmodified; each builder returns a ModelCase.

A builder returns ``(model, inputs, loss)``: ``loss(model, **inputs)`` is a scalar that needs
gradients. Hidden size 64, vocabulary 256, batch 2, sequences of 32 to 64 tokens.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

Loss = Callable[..., torch.Tensor]
ModelCase = tuple[nn.Module, dict[str, torch.Tensor], Loss]

HIDDEN = 64
VOCABULARY = 256
BATCH = 2


def own_loss(model: nn.Module, **inputs: object) -> torch.Tensor:
    """The loss that a transformers model computes when it is given labels."""
    return model(**inputs).loss


def causal_inputs(seq: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, seq), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _decoder(config: object, seq: int, attention: str = "sdpa") -> ModelCase:
    from transformers import AutoModelForCausalLM

    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.loss_type = (
        "ForCausalLM"  # for GPT-2 transformers guesses it, warns, and breaks the graph
    )
    return model.train(), causal_inputs(seq), own_loss


def _sizes(num_layers: int, **more: object) -> Mapping[str, object]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def llama(num_layers: int = 3, seq: int = 32, tied: bool = False) -> ModelCase:
    from transformers import LlamaConfig

    return _decoder(LlamaConfig(**_sizes(num_layers, tie_word_embeddings=tied)), seq)


def qwen3(num_layers: int = 3, seq: int = 32) -> ModelCase:
    from transformers import Qwen3Config

    return _decoder(Qwen3Config(**_sizes(num_layers, head_dim=16)), seq)


def gemma2(num_layers: int = 4, seq: int = 32) -> ModelCase:
    """Local and global attention take turns; attention is written out, with a soft cap."""
    from transformers import Gemma2Config

    sizes = _sizes(num_layers, head_dim=16, sliding_window=8)
    return _decoder(Gemma2Config(**sizes), seq, attention="eager")


def gemma3(num_layers: int = 6, seq: int = 32) -> ModelCase:
    """Five layers of local attention, then one of global attention."""
    from transformers import Gemma3TextConfig

    sizes = _sizes(num_layers, head_dim=16, sliding_window=8)
    return _decoder(Gemma3TextConfig(**sizes), seq)


def mixtral(num_layers: int = 3, seq: int = 32) -> ModelCase:
    from transformers import MixtralConfig

    config = MixtralConfig(
        **_sizes(num_layers, num_local_experts=4, num_experts_per_tok=2),
        experts_implementation="batched_mm",
    )
    return _decoder(config, seq)


def qwen3_moe(num_layers: int = 3, seq: int = 32, sparse_step: int = 1) -> ModelCase:
    """Mixture of experts in every ``sparse_step``-th layer, the other layers dense."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        **_sizes(num_layers, head_dim=16, num_experts=4, num_experts_per_tok=2),
        moe_intermediate_size=32,
        decoder_sparse_step=sparse_step,
        experts_implementation="batched_mm",
    )
    return _decoder(config, seq)


def gpt2(num_layers: int = 3, seq: int = 32, dropout: float = 0.1) -> ModelCase:
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=num_layers,
        n_head=4,
        n_positions=128,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _decoder(config, seq)


def bert(num_layers: int = 3, seq: int = 32) -> ModelCase:
    """Norm after the residual addition; dropout; masked language model."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = _sizes(num_layers)
    del sizes["num_key_value_heads"]
    model = BertForMaskedLM(BertConfig(**sizes))
    return model.train(), causal_inputs(seq), own_loss


def t5(num_layers: int = 3, seq: int = 32, dropout: float = 0.1) -> ModelCase:
    """Encoder and decoder; the first layer of each makes the relative bias for the others."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=128,
        num_layers=num_layers,
        num_decoder_layers=num_layers,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config).train(), causal_inputs(seq), own_loss


def vit(num_layers: int = 3, image: int = 32) -> ModelCase:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        image_size=image,
        patch_size=4,
        num_labels=8,
        problem_type="single_label_classification",  # else found in the first step: compiled twice
    )
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "pixel_values": torch.randn(BATCH, 3, image, image, generator=generator),
        "labels": torch.tensor([1, 5]),
    }
    return ViTForImageClassification(config).train(), inputs, own_loss


class FlatTransformer(nn.Module):
    """A transformer whose layers are a loop over lists of weights: no sub-modules to see."""

    def __init__(self, num_layers: int, num_outputs_per_layer: int = 0) -> None:
        super().__init__()
        shapes = {"qkv": 3 * HIDDEN, "out": HIDDEN, "up": 4 * HIDDEN}
        self.num_layers = num_layers
        self.num_outputs_per_layer = num_outputs_per_layer
        self.embedding = nn.Parameter(0.02 * torch.randn(VOCABULARY, HIDDEN))
        for name, width in shapes.items():
            shape = (num_layers, HIDDEN, width)
            for layer in range(num_layers):
                weight = nn.Parameter(0.1 * torch.randn(shape[1:]))
                self.register_parameter(f"{name}_{layer}", weight)
        for layer in range(num_layers):
            down = nn.Parameter(0.1 * torch.randn(4 * HIDDEN, HIDDEN))
            self.register_parameter(f"down_{layer}", down)

    def layer(self, x: torch.Tensor, index: int) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        normed = functional.layer_norm(x, (hidden,))
        qkv = normed @ getattr(self, f"qkv_{index}")
        q, k, v = qkv.view(batch, tokens, 3, 4, hidden // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        flat = mixed.transpose(1, 2).reshape(batch, tokens, hidden)
        x = x + flat @ getattr(self, f"out_{index}")
        normed = functional.layer_norm(x, (hidden,))
        inner = functional.gelu(normed @ getattr(self, f"up_{index}"))
        return x + inner @ getattr(self, f"down_{index}")

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = self.embedding[input_ids]
        extra = []
        for index in range(self.num_layers):
            x = self.layer(x, index)
            if self.num_outputs_per_layer:
                extra.append(x.float().pow(2).mean(-1))
        return functional.layer_norm(x, (HIDDEN,)) @ self.embedding.t(), extra


def _flat_loss(model: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits, extra = model(input_ids)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + 1e-3 * sum(item.mean() for item in extra)


def functional_transformer(num_layers: int = 4, seq: int = 32) -> ModelCase:
    return FlatTransformer(num_layers), causal_inputs(seq), _flat_loss


def functional_with_outputs(num_layers: int = 4, seq: int = 32) -> ModelCase:
    """Every layer returns an extra output that only the loss reads."""
    return FlatTransformer(num_layers, 1), causal_inputs(seq), _flat_loss


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with batch norms and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        out = 4 * channels
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet(depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 4) -> ModelCase:
    """ResNet-50's arrangement of blocks, 16 times narrower by default."""
    blocks: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            stride = 2 if index == 0 and stage > 0 else 1
            blocks.append(Bottleneck(channels, width << stage, stride))
            channels = 4 * (width << stage)
    blocks += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "pixels": torch.randn(BATCH, 3, 64, 64, generator=generator),
        "labels": torch.tensor([1, 5]),
    }
    return nn.Sequential(*blocks).train(), inputs, classifier_loss


class UnetBlock(nn.Module):
    """Two 3x3 convolutions, each behind a group norm, and a shortcut."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(4, channels_in),
            nn.SiLU(),
            nn.Conv2d(channels_in, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.shortcut = nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.shortcut(x)


class Unet(nn.Module):
    """What the encoder makes at each scale is read again by the decoder at that scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = (
            nn.Conv2d(*sizes, 3, padding=1) for sizes in ((3, width), (width, 3))
        )
        wide = 2 * width
        self.down = nn.ModuleList([UnetBlock(width, width), UnetBlock(width, wide)])
        self.middle = nn.Sequential(UnetBlock(wide, wide), UnetBlock(wide, wide))
        self.up = nn.ModuleList([UnetBlock(2 * wide, width), UnetBlock(wide, width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2.0), kept.pop()], dim=1))
        return self.last(x)


def unet(width: int = 8) -> ModelCase:
    """A network for images with no two equal layers in a row, and long connections."""
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, 3, 32, 32)
    inputs = {name: torch.randn(shape, generator=generator) for name in ("noisy", "noise")}
    return Unet(width), inputs, _noise_loss


def _noise_loss(model: nn.Module, noisy: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(noisy), noise)


def classifier_loss(model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(pixels), labels)
