"""Named transformer shapes, and what follows from a shape alone: parameters and FLOPs.

``llama-7b``, ``-65b``, ``-175b`` and ``llama2-70b`` are the shapes of Kwai's paper (USENIX ATC 24),
vocabulary 32004 included; ``gpt-7b`` to ``gpt-65b`` are MEMO's Table 2 (arXiv 2407.12117);
``gpt-300m``, ``-1.3b``, ``-23b``, ``-175b`` have the sizes of Lynx (arXiv 2406.08756), 23B
with a shape that adds up to its name. The rest are the models' published configurations.
"""

import difflib
import re
from dataclasses import dataclass

from memo_compile.errors import InputError, require_at_least

ELEMENT_BYTES = 2
"""Bytes of one number of an activation, which is in bfloat16."""


_SIZES = ("num_layers", "hidden", "ffn", "num_heads", "num_kv_heads", "vocab")
"""Fields of a shape that are counts, in the order of the table below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer with equal layers."""

    name: str
    hidden: int
    num_layers: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    gated: bool
    """True: gate, up and down projections (SwiGLU). False: two projections around a GELU."""
    adapter_rank: int = 0
    """LoRA: the weights are frozen, and adapters of this rank are trained; 0: all is trained."""

    def __post_init__(self) -> None:
        require_at_least(1, {name: getattr(self, name) for name in _SIZES})
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_kv_heads: expected a divisor of {self.num_heads}, got {self.num_kv_heads}"
            )

    @property
    def kv_ratio(self) -> float:
        """Width of keys (and of values) over the hidden size."""
        return self.num_kv_heads / self.num_heads

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's projections; norms and biases (below 0.1 %) are not counted."""
        attention = 2 * self.hidden * self.hidden * (self.num_heads + self.num_kv_heads)
        num_projections = 3 if self.gated else 2
        return attention // self.num_heads + num_projections * self.hidden * self.ffn

    @property
    def embedding_parameters(self) -> int:
        """Weights of the input embedding, and as many again of the output head."""
        return self.vocab * self.hidden

    @property
    def num_parameters(self) -> int:
        """Layers, input embedding and an untied head."""
        return self.num_layers * self.layer_parameters + 2 * self.embedding_parameters

    def flops_per_token(self, seq: int) -> float:
        """FLOPs that one token of a ``seq`` long causal sequence costs, forward and backward.

        6 per weight that multiplies (layers and head) and 6 h s per layer for attention: MFU's
        numerator, without recomputation.
        """
        weights = self.num_layers * self.layer_parameters + self.embedding_parameters
        return 6.0 * weights + 6.0 * self.num_layers * self.hidden * seq


def _shape(name: str, *sizes: int, gated: bool = True) -> ModelShape:
    return ModelShape(name=name, gated=gated, **dict(zip(_SIZES, sizes, strict=True)))


def _gpt(name: str, num_layers: int, hidden: int, heads: int) -> ModelShape:
    return _shape(name, num_layers, hidden, 4 * hidden, heads, heads, 50257, gated=False)


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _gpt("gpt-300m", 24, 1024, 16),
        _gpt("gpt-1.3b", 24, 2048, 16),
        _gpt("gpt-7b", 32, 4096, 32),
        _gpt("gpt-13b", 40, 5120, 40),
        _gpt("gpt-23b", 50, 6144, 48),
        _gpt("gpt-30b", 48, 7168, 56),
        _gpt("gpt-65b", 80, 8192, 64),
        _gpt("gpt-175b", 96, 12288, 96),
        _shape("llama-7b", 32, 4096, 11008, 32, 32, 32004),
        _shape("llama-13b", 40, 5120, 13824, 40, 40, 32004),
        _shape("llama-33b", 60, 6656, 17920, 52, 52, 32004),
        _shape("llama-65b", 80, 8192, 22016, 64, 64, 32004),
        _shape("llama-175b", 96, 12288, 32768, 96, 96, 32004),
        _shape("llama2-70b", 80, 8192, 28672, 64, 8, 32004),
        _shape("llama3-8b", 32, 4096, 14336, 32, 8, 128256),
        _shape("llama3-70b", 80, 8192, 28672, 64, 8, 128256),
        _shape("llama3-405b", 126, 16384, 53248, 128, 8, 128256),
        _shape("mistral-7b", 32, 4096, 14336, 32, 8, 32000),
        _shape("qwen3-8b", 36, 4096, 12288, 32, 8, 151936),
    )
}
"""Every named shape, by its canonical name."""

_ALIASES = {
    "7b": "llama-7b",
    "13b": "llama-13b",
    "33b": "llama-33b",
    "65b": "llama-65b",
    "70b": "llama2-70b",
    "175b": "llama-175b",
    "8b": "llama3-8b",
    "30b": "gpt-30b",
    "300m": "gpt-300m",
    "1.3b": "gpt-1.3b",
    "23b": "gpt-23b",
    "llama-70b": "llama2-70b",
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
    "llama2-7b": "llama-7b",
    "llama2-13b": "llama-13b",
    "gpt3-175b": "gpt-175b",
}
"""Other spellings; a bare size is the shape of Kwai's paper where that has one."""


def find_model(name: str) -> ModelShape:
    """The shape called ``name``, however written. Raises InputError: unknown; names the nearest."""
    names = {canonical: canonical for canonical in MODELS} | _ALIASES
    canonical_of = {_without_separators(name): canonical for name, canonical in names.items()}
    canonical = canonical_of.get(_without_separators(name))
    if canonical is not None:
        return MODELS[canonical]
    near = difflib.get_close_matches(name.lower(), MODELS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"model: unknown {name!r}; {hint}known: {', '.join(MODELS)}")


def _without_separators(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name.lower())
