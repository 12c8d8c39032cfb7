"""What a random model is made of: kinds of pieces, each a template of source with named options.

A piece reads ``h`` (``[B, T, W]``) and makes ``y`` of the same shape. Its template is Python source
in which ``$option`` stands for the fragment that the piece's option names, and ``$p`` for the
prefix of its own parameters and buffers. In every list the simplest comes first: a failing case
shrinks towards the front.
"""

import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Batch, tokens, heads, width of a head, vocabulary; the width is ``heads * head``."""

    batch: int
    tokens: int
    heads: int
    head: int
    vocabulary: int

    @property
    def width(self) -> int:
        return self.heads * self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """What stands for one value of an option: source in the forward, and lines of ``__init__``."""

    text: str
    init: str = ""


Allowed = Callable[[Sizes], bool]


def anywhere(sizes: Sizes) -> bool:
    del sizes
    return True


def some_tokens(sizes: Sizes) -> bool:
    return sizes.tokens > 1


def _normalised(sizes: Sizes) -> bool:
    return sizes.batch * sizes.tokens > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of piece: its template and the fragments that each option may name."""

    body: str
    init: str = ""
    options: Mapping[str, Mapping[str, str | Fragment]] = field(default_factory=dict)
    allowed: Allowed = anywhere
    sharp: bool = False
    """Its result jumps where two values are nearly equal: not for bfloat16."""
    stateful: bool = False
    """It writes a buffer, so that running its forward twice is not running it once."""
    weight: int = 1
    """How often it is drawn, relative to others."""

    def fragments(self, chosen: Mapping[str, str]) -> dict[str, Fragment]:
        """Option -> fragment. Raises KeyError for an option or a value that does not exist."""
        found = {name: values[chosen[name]] for name, values in self.options.items()}
        return {
            name: value if isinstance(value, Fragment) else Fragment(text=value)
            for name, value in found.items()
        }


def expand(text: str, values: Mapping[str, str]) -> str:
    """``text`` with every ``$name`` replaced, also those that stand in what replaces another."""
    before = None
    while before != text:
        before, text = text, string.Template(text).substitute(values)
    return text


def same(*values: str) -> dict[str, str]:
    """Options whose names are the fragments themselves."""
    return {value: value for value in values}


def draw_sizes(random: random.Random) -> Sizes:
    """Small sizes, of which several are mostly equal."""
    common = random.choice((1, 2, 2, 3, 4, 4, 5, 6, 8))

    def size(*others: int) -> int:
        return common if random.random() < 0.5 else random.choice(others)

    heads = size(1, 2, 2, 3, 4)
    return Sizes(
        batch=size(1, 2, 2, 3, 4),
        tokens=size(2, 3, 4, 5, 7, 8, 16),
        heads=heads,
        head=1 if heads > 2 and random.random() < 0.25 else random.choice((2, 4, 4, 8)),
        vocabulary=max(2, size(3, 7, 16, 61)),
    )
