"""What tests of commands plan: the smallest language model, on a torch that lowers for no GPU."""

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

CPU_BUILD = "2.0.0+cpu"
"""The version of a torch that lowers for no GPU."""
