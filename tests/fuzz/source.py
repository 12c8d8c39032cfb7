"""A case's model as Python source: what runs is what a failing case prints."""

import re
import textwrap
from collections.abc import Mapping

from tests.fuzz import losses
from tests.fuzz.case import AFTER, BEFORE, KINDS, Case, Group, Piece
from tests.fuzz.grammar import Kind, expand

_HEADER = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

B, T, H, D, V = {batch}, {tokens}, {heads}, {head}, {vocabulary}
W = H * D


@torch.no_grad()
def no_grad_mean(h):
    return h.mean(-1, keepdim=True)


def inputs_of(seed, dtype, T=T):
    \"\"\"Token ids, vectors, which tokens count, labels (some -100), soft targets.\"\"\"
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (B, T), generator=source)
    vectors = torch.randn(B, T, W, generator=source).to(dtype)
    keep = torch.rand(B, T, generator=source) < 0.7
    keep[:, 0] = True
    labels = torch.randint(0, V, (B, T), generator=source)
    labels = labels.masked_fill(torch.rand(B, T, generator=source) < 0.2, -100)
    labels[:, -1] = 0
    soft = torch.randn(B, T, V, generator=source).softmax(-1).to(dtype)
    return ids, vectors, keep, labels, soft
"""

_MADE = "arange|linspace|ones|zeros"
"""What models make without saying where."""


def model_source(case: Case) -> str:
    """Source that defines ``Model``, ``inputs_of(seed, dtype)`` and ``loss_of(outputs, ...)``.

    ``Model()(ids, vectors, keep, labels, soft)`` returns a tuple whose first element is the loss,
    or what ``loss_of`` makes the loss of.
    """
    sizes = case.sizes
    header = _HEADER.format(
        batch=sizes.batch,
        tokens=sizes.tokens,
        heads=sizes.heads,
        head=sizes.head,
        vocabulary=sizes.vocabulary,
    )
    sizes_at = ["B, T = ids.shape"] if case.run["lengths"] else []
    blocks = [_block(f"Block{number}", group, sizes_at) for number, group in enumerate(case.groups)]
    parts = [header.strip(), *blocks, _model(case, sizes_at), _loss_of(case)]
    return _placed("\n\n".join(parts), case.device) + "\n"


def _placed(source: str, device: str) -> str:
    """``source`` with what models make on ``device``."""
    if device == "cpu":
        return source
    makers = [
        _function(
            f"made_{name}(*sizes, **more)",
            [f'return torch.{name}(*sizes, device="{device}", **more)'],
        )
        for name in _MADE.split("|")
    ]
    placed = re.sub(rf"\btorch\.({_MADE})\(", r"made_\1(", source)
    return placed.replace("\n\nclass ", "\n\n" + "\n\n".join(makers) + "\n\nclass ", 1)


def _block(name: str, group: Group, sizes_at: list[str]) -> str:
    init, body = [], [*sizes_at]
    for number, piece in enumerate(group.pieces):
        lines = _lines(KINDS[piece.kind], piece.options, f"p{number}")
        init += lines[0]
        body += [BEFORE[piece.before], *lines[1], AFTER[piece.after]]
    return _class(name, init, [("forward(self, x, ids, keep)", [*body, "return x"])])


def _model(case: Case, sizes_at: list[str]) -> str:
    stem = losses.STEMS[case.stem]
    head = _lines(losses.HEADS, case.head, "head")
    init = [*stem.init.splitlines()]
    body = [*sizes_at, *stem.text.splitlines(), "hidden = [x]"]
    for number, group in enumerate(case.groups):
        many = "[Block{0}()] * {1}" if group.shared else "Block{0}() for _ in range({1})"
        init.append(f"self.layers{number} = nn.ModuleList({many.format(number, group.repeats)})")
        call = "layer(x, ids, keep)"
        if case.run["checkpoint"]:
            call = "checkpoint(layer, x, ids, keep, use_reentrant=False)"
        body += [f"for layer in self.layers{number}:", f"    x = {call}", "    hidden.append(x)"]
    body += ["x = F.layer_norm(x, (W,), eps=1e-2) if W > 2 else x.tanh()", *head[1]]
    if case.run["loss_inside"]:
        body += _loss_lines(case.loss)
    first = "loss" if case.run["loss_inside"] else "logits, x"
    rest = losses.RETURNS[case.returns]
    body.append(f"return ({first}, {rest})" if rest else f"return ({first},)")
    forward = ("forward(self, ids, vectors, keep, labels, soft)", body)
    return _class("Model", [*init, *head[0]], [forward])


def _loss_of(case: Case) -> str:
    if case.run["loss_inside"]:
        body = ["return outputs[0]"]
    else:
        lengths = ["B, T = labels.shape"] if case.run["lengths"] else []
        body = [*lengths, "logits, x = outputs[:2]", *_loss_lines(case.loss), "return loss"]
    return _function("loss_of(outputs, labels, soft)", body)


def _loss_lines(piece: Piece) -> list[str]:
    lines = _lines(losses.LOSSES[piece.kind], piece.options, "loss")[1]
    return ["soft_targets = soft.to(logits.dtype)", *lines]


def _lines(kind: Kind, chosen: Mapping[str, str], prefix: str) -> tuple[list[str], list[str]]:
    """Lines of ``__init__`` and of the forward."""
    fragments = kind.fragments(chosen)
    values = {name: fragment.text for name, fragment in fragments.items()} | {"p": prefix}
    used = _used(kind, {name: fragment.text for name, fragment in fragments.items()})
    init = [kind.init, *(fragment.init for name, fragment in fragments.items() if name in used)]
    whole = ["\n".join(init), kind.body]
    return tuple(  # type: ignore[return-value]
        [line for line in expand(text, values).splitlines() if line.strip()] for text in whole
    )


def _used(kind: Kind, texts: Mapping[str, str]) -> set[str]:
    """The options whose fragments the template names, by way of other fragments too."""
    found: set[str] = set()
    open_texts = [kind.body, kind.init]
    while open_texts:
        text = open_texts.pop()
        new = {name for name in texts if f"${name}" in text or f"${{{name}}}" in text} - found
        found |= new
        open_texts += [texts[name] for name in new]
    return found


def _class(name: str, init: list[str], methods: list[tuple[str, list[str]]]) -> str:
    parts = [_function("__init__(self)", ["super().__init__()", *init])]
    parts += [_function(*method) for method in methods]
    return f"class {name}(nn.Module):\n" + textwrap.indent("\n\n".join(parts), "    ")


def _function(signature: str, body: list[str]) -> str:
    return f"def {signature}:\n" + textwrap.indent("\n".join(body), "    ")
