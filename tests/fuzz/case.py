"""One random case as plain data: a model, and how it is trained under memo. JSON both ways."""

import dataclasses
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.fuzz import attention, buffers, losses, mixing, pointwise
from tests.fuzz.driver import OPTIMIZERS
from tests.fuzz.grammar import Kind, Sizes, draw_sizes

KINDS: Mapping[str, Kind] = {
    **pointwise.KINDS,
    **attention.KINDS,
    **mixing.KINDS,
    **buffers.KINDS,
}

BEFORE = {
    "none": "h = x",
    "layer": "h = F.layer_norm(x, (W,), eps=1e-2)",
    "rms": "h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2)",
}
AFTER = {
    "residual": "x = x + y",
    "replace": "x = y",
    "normed": "x = F.layer_norm(x + y, (W,), eps=1e-2)",
    "half": "x = x + y * 0.5",
    "in_place": "x = x.clone().add_(y)",
}

RUN: Mapping[str, tuple[Any, ...]] = {
    "steps": (1, 2, 3),
    "accumulate": (1, 2),
    "optimizer": ("sgd", "adamw"),
    "hold": (False, True),
    "keep_zero": (False, False, False, True),
    "in_place": (False, False, True),
    "retain": (False, False, False, False, False, True),
    "overlap": (False, False, False, False, False, True),
    "loss_inside": (True, False),
    "input_gradient": (False, True),
    "frozen": (False, False, False, True),
    "checkpoint": (False, False, False, False, True),
}
"""How the loop is written, the simplest first.

``hold``: outputs stay in scope over all steps; ``keep_zero``: zero_grad(set_to_none=False);
``in_place``: an output is written after its backward; ``retain``: the backward runs twice;
``overlap``: two forwards, then their backwards; ``frozen``: the first parameters need no gradient;
``checkpoint``: the user checkpoints every layer.
"""

UPDATES: Mapping[str, tuple[Any, ...]] = {
    "optimizer": tuple(OPTIMIZERS),
    "groups": (1, 2, 3),
    "clip": (None, "norm", "value"),
    "offload": (None, "device", "host", "auto"),
}
"""How parameters are updated in some runs, the simplest first: parameter groups, what of the
gradients is clipped, ``update`` of ``memo_compile.offload``. Others leave ``offload`` out."""

PLAIN_UPDATE = {"groups": 1, "clip": None, "offload": None}

OFFLOADED = 0.3
"""How many models are trained so."""

LENGTHS: tuple[tuple[int, ...], ...] = (
    *((), (), ()),
    (9, 12, 15, 10, 13),
    (3, 7, 5, 6, 4),
    (16, 9, 11, 14, 31),
)
"""``lengths`` of a run: tokens of the forwards behind the first, in turn; mostly none."""

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "policy": ("auto", "auto", "auto", "full-recompute", "full-offload", "memo", "greedy", "save"),
    "alpha": (None, 0.0, 0.125, 0.25, 0.5, 1.0),
    "token_granule": (1, 2, 3, 4, 128),
    "token_tiles": (None, None, 1, 2, 2, 3, 4, 8),
    "debug": (
        *((), ("poison",), ("poison",), ("poison", "copies-early"), ("poison", "copies-late")),
        *(("copies-late",), ("copies-early",)),
    ),
    "exact": (False, False, False, False, True),
    "host_budget": (None, None, None, 0),
    "costs": ("roofline", "roofline", "roofline", "measured"),
    "weights": ("device", "device", "device", "host"),
}

MLPS = ("mlp", "gated", "fused_gate")

LAYERED = 0.25
"""How many models are stacks of equal layers of attention and an MLP; others rarely repeat."""

READING = 0.06
"""How many models read a product of 1024 terms for equality, order or an index, where another
number of rows (of 200, or a single one) is summed in another order."""

MOVABLE = 256
"""Entries of a hidden state that may move in every dtype: less than 512 B stays where it is."""

BUDGETS = ((), (0.7,), (0.5,), (), (0.3,), (), (0.0,))
"""How much of the arena of the step that keeps everything a budget leaves; what is refused is
tried again at the floor that the refusal names."""

DTYPES = ("float32", "float32", "float32", "float64", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A kind and what was chosen for each of its options; how it stands in the residual stream."""

    kind: str
    options: Mapping[str, str]
    before: str = "none"
    after: str = "residual"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Pieces that make one layer, ``repeats`` times; ``shared``: all with the same weights."""

    pieces: tuple[Piece, ...]
    repeats: int = 1
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything that one case does; equal cases do the same."""

    seed: int
    """Of parameters and inputs."""
    sizes: Sizes
    dtype: str
    stem: str
    groups: tuple[Group, ...]
    head: Mapping[str, str]
    loss: Piece
    returns: str
    run: Mapping[str, Any]
    options: Mapping[str, Any]
    """memo's, less the budget."""
    budgets: tuple[float, ...]
    device: str = "cpu"
    """Where it is trained; with the same seed the model is the same everywhere."""

    def pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for group in self.groups for piece in group.pieces)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def from_dict(data: Mapping[str, Any]) -> Case:
    """The inverse of ``Case.as_dict``, also after JSON made lists of its tuples."""
    groups = tuple(
        Group(**{**group, "pieces": tuple(Piece(**piece) for piece in group["pieces"])})
        for group in data["groups"]
    )
    options = {**data["options"], "debug": tuple(data["options"]["debug"])}
    run = {**PLAIN_UPDATE, **data["run"], "lengths": tuple(data["run"].get("lengths", ()))}
    return Case(
        **{
            **data,
            "sizes": Sizes(**data["sizes"]),
            "groups": groups,
            "loss": Piece(**data["loss"]),
            "run": run,
            "options": options,
            "budgets": tuple(data["budgets"]),
        }
    )


def is_allowed(case: Case) -> bool:
    """False for a case that eager torch would refuse, or whose numbers would mean nothing."""
    kinds = [KINDS[piece.kind] for piece in case.pieces()]
    if case.options["exact"] and (case.options["token_tiles"] or 1) > 1:
        return False
    if case.options["alpha"] is not None and case.options["policy"] != "memo":
        return False
    if case.dtype == "bfloat16" and any(kind.sharp for kind in kinds):
        return False
    if any(kind.stateful for kind in kinds) and not _once(case):
        return False
    if case.run["lengths"] and _knows_tokens(case):
        return False
    return all(kind.allowed(case.sizes) for kind in kinds)


def _knows_tokens(case: Case) -> bool:
    """True where the model's parameters or buffers are of one number of tokens."""
    chosen = [(KINDS[piece.kind], piece.options) for piece in case.pieces()]
    texts = [losses.STEMS[case.stem].init]
    for kind, options in chosen:
        texts.append(kind.init)
        texts += (fragment.init for fragment in kind.fragments(options).values())
    return any(re.search(r"\bT\b(?!\()", text) for text in texts)


def _once(case: Case) -> bool:
    """True where every layer's forward runs once between the start of a step and its backward."""
    again = case.run["checkpoint"] or case.run["overlap"]
    return not again and not any(group.shared for group in case.groups)


def draw_case(seed: int, lowering: str) -> Case:
    """The case of ``seed``; cases for Inductor are smaller because it compiles each for long."""
    source = random.Random(f"{lowering}-{seed}")
    dtype = source.choice(DTYPES)
    small = lowering == "inductor"
    layered = source.random() < LAYERED
    sizes = draw_sizes(source)
    while layered and sizes.batch * sizes.tokens * sizes.width < MOVABLE:
        sizes = draw_sizes(source)
    if layered:
        groups = [_transformer_layers(source, sizes, dtype)]
    else:
        counts = (1, 1, 2) if small else (1, 1, 2, 2, 3)
        groups = [_group(source, sizes, dtype, (1, 2, 2, 3, 3, 4), counts)]
    if source.random() < (0.1 if small else 0.3):
        groups.append(_group(source, sizes, dtype, (1, 1, 2), (1,)))
    head = _chosen(source, losses.HEADS)
    stateful = any(KINDS[piece.kind].stateful for group in groups for piece in group.pieces)
    run = {name: source.choice(values) for name, values in RUN.items()}
    if stateful:
        run |= {"checkpoint": False, "overlap": False}
        groups = [dataclasses.replace(group, shared=False) for group in groups]
    head["weight"] = "self.head.weight" if head["head"] == "linear" else "self.embed.weight"
    kind = _weighted(source, losses.LOSSES)
    options = {name: source.choice(values) for name, values in OPTIONS.items()}
    if layered and source.random() < 0.6:  # slices of tokens are recomputed by this policy mostly
        options |= {"policy": "memo", "exact": False, "host_budget": None}
        options["token_granule"] = source.choice((1, 1, 2, 3))
        options["alpha"] = source.choice((0.125, 0.25, 0.5))
    if options["policy"] != "memo":
        options["alpha"] = None
    if options["exact"]:
        options["token_tiles"] = None
    run |= {"lengths": (), **PLAIN_UPDATE}
    case = Case(
        seed=seed,
        sizes=sizes,
        dtype=dtype,
        stem=source.choice(tuple(losses.STEMS)),
        groups=tuple(groups),
        head=head,
        loss=Piece(kind=kind, options=_chosen(source, losses.LOSSES[kind])),
        returns=source.choice(tuple(losses.RETURNS)),
        run=run,
        options={**options, "lowering": lowering},
        budgets=source.choice(BUDGETS),
    )
    lengths = source.choice(LENGTHS)  # last, so that other seeds keep their models
    apart = random.Random(f"reading-{lowering}-{seed}")
    if apart.random() < READING:
        case = _reading(apart, case)
    elif lengths:
        several = {"lengths": lengths, "steps": 3, "accumulate": 2}
        varied = dataclasses.replace(case, run={**case.run, **several})
        case = varied if is_allowed(varied) else case
    return _offloaded(random.Random(f"updates-{lowering}-{seed}"), case)


def _offloaded(source: random.Random, case: Case) -> Case:
    """``case``, or the same one with an optimizer whose state lies on the host."""
    if source.random() >= OFFLOADED:
        return case
    chosen = {name: source.choice(values) for name, values in UPDATES.items()}
    chosen["offload"] = source.choice(UPDATES["offload"][1:])
    return dataclasses.replace(case, run={**case.run, **chosen, "steps": 3})


def _reading(source: random.Random, case: Case) -> Case:
    """``case`` with other layers, of sizes at which a part of the rows is made otherwise."""
    tokens = source.choice((2, 2, 200))
    sizes = Sizes(batch=1, tokens=tokens, heads=1, head=256, vocabulary=case.sizes.vocabulary)
    dtype = source.choice(("float32", "float32", "bfloat16"))
    reads = _piece(source, sizes, dtype, {"read": KINDS["read"]})
    pieces = [dataclasses.replace(reads, before="layer", after="normed")]
    if source.random() < 0.4:
        pieces.append(_piece(source, sizes, dtype, {"mlp": KINDS["mlp"]}))
    policy = source.choice(("memo", "memo", "full-recompute", "auto"))
    options = {**case.options, "policy": policy, "alpha": 0.5 if policy == "memo" else None}
    options |= {"exact": False, "token_granule": 1, "host_budget": None}
    run = {**case.run, "checkpoint": False, "steps": min(2, case.run["steps"])}
    groups = (Group(pieces=tuple(pieces), repeats=5),)
    return dataclasses.replace(
        case, sizes=sizes, dtype=dtype, groups=groups, options=options, run=run
    )


def _group(
    source: random.Random,
    sizes: Sizes,
    dtype: str,
    repeats: tuple[int, ...],
    counts: tuple[int, ...],
) -> Group:
    pieces = tuple(_piece(source, sizes, dtype) for _ in range(source.choice(counts)))
    return Group(pieces=pieces, repeats=source.choice(repeats), shared=source.random() < 0.1)


def _transformer_layers(source: random.Random, sizes: Sizes, dtype: str) -> Group:
    """Attention and an MLP, which memo finds as layers and may recompute by slices of tokens.

    Three of them: policy memo never moves the last two.
    """
    pieces = [
        _piece(source, sizes, dtype, attention.KINDS),
        _piece(source, sizes, dtype, {name: pointwise.KINDS[name] for name in MLPS}),
    ]
    if source.random() < 0.4:
        pieces.insert(source.randrange(3), _piece(source, sizes, dtype))
    kept = [dataclasses.replace(piece, after="residual") for piece in pieces]
    return Group(pieces=tuple(kept), repeats=3)


def _piece(
    source: random.Random, sizes: Sizes, dtype: str, kinds: Mapping[str, Kind] = KINDS
) -> Piece:
    fit = {
        name: kind
        for name, kind in kinds.items()
        if kind.allowed(sizes) and not (kind.sharp and dtype == "bfloat16")
    }
    name = _weighted(source, fit)
    return Piece(
        kind=name,
        options=_chosen(source, KINDS[name]),
        before=source.choice(tuple(BEFORE)),
        after=source.choice(tuple(AFTER)),
    )


def _weighted(source: random.Random, kinds: Mapping[str, Kind]) -> str:
    names = sorted(kinds)
    return source.choices(names, [kinds[name].weight for name in names])[0]


def _chosen(source: random.Random, kind: Kind) -> dict[str, str]:
    return {name: source.choice(tuple(values)) for name, values in kind.options.items()}
