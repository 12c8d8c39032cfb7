"""The dtype of a model, and over how many devices it is divided."""

from dataclasses import dataclass

from memo_compile.costs.models import ModelShape
from memo_compile.errors import InputError, require_at_least

DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float32": "float32",
    "fp32": "float32",
}


def parse_dtype(name: str) -> str:
    """Returns torch's name of the dtype called ``name``. Raises InputError: there is none."""
    if name not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


RING, ULYSSES = "ring", "ulysses"
CP_KINDS = (RING, ULYSSES)
"""How context parallel devices share attention: keys go around, or heads for tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Over how many devices tokens, heads, layers and batches are spread."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    cp_kind: str | None = None
    """One of CP_KINDS; None: not chosen yet, or ``cp`` is 1."""

    def __post_init__(self) -> None:
        require_at_least(1, self.sizes)
        if self.cp_kind not in (None, *CP_KINDS):
            raise InputError(f"cp-kind: expected {' or '.join(CP_KINDS)}, got {self.cp_kind!r}")
        if self.cp_kind is not None and self.cp == 1:
            raise InputError("cp-kind: it is of --cp devices; give --cp N with it")

    @property
    def sizes(self) -> dict[str, int]:
        """The number of devices by the name of what is spread over them."""
        return {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.dp}

    def require_divides(self, shape: ModelShape, seq: int) -> None:
        """Raises InputError: a degree does not divide what it cuts of ``shape`` or ``seq``."""
        kv_heads = shape.num_kv_heads
        checks = (
            ("tp", self.tp, "the attention heads", shape.num_heads),
            ("tp", self.tp, "the ffn width", shape.ffn),
            ("cp", self.cp, "the sequence", seq),
            ("tp * cp", self.tp * self.cp, "the sequence", seq),
            ("pp", self.pp, "the layers", shape.num_layers),
        )
        for name, degree, what, number in checks:
            if number % degree:
                raise InputError(f"{name}: {degree} does not divide {what} ({number})")
        if kv_heads % self.tp and self.tp % kv_heads:
            raise InputError(
                f"tp: {self.tp} neither divides the key/value heads ({kv_heads}) nor is "
                "a multiple of them"
            )
        if self.cp_kind == ULYSSES:
            self.require_heads_divide(shape)

    def require_heads_divide(self, shape: ModelShape) -> None:
        """Raises InputError: Ulysses cannot give each of ``cp`` devices as many heads."""
        heads, kv = shape.num_heads // self.tp, max(1, shape.num_kv_heads // self.tp)
        if heads % self.cp or (kv % self.cp and self.cp % kv):
            raise InputError(
                f"cp-kind: ulysses divides heads over devices, and {self.cp} devices do not divide "
                f"{heads} attention heads ({kv} of keys and values); take ring"
            )
