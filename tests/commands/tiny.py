"""The smallest shape of a language model, which tests of commands give names of their own."""

from memo_compile.costs.models import ModelShape

TINY = ModelShape(
    name="tiny",
    hidden=64,
    num_layers=2,
    ffn=256,
    num_heads=4,
    num_kv_heads=4,
    vocab=512,
    gated=False,
)
