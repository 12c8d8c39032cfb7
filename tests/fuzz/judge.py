"""Whether a run's numbers are eager's: every loss, output, gradient and buffer by its own size.

Imports torch only: a failing case's script carries this file with it.
"""

import re
from collections.abc import Mapping, Sequence

import torch

RELATIVE = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 5e-2}
"""Of a tensor's own largest entry: what rounding in another order may differ by."""

OWN_ERROR = 20.0
"""Times what eager itself misses a more precise run by: a sum that cancels is judged by that."""

LARGEST = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 1e-2}
"""Of the step's largest of its kind (gradient, output): one below it is what rounding left."""

COARSE = 2.0**-29
"""float64's rounding is that part of float32's, which is what is known of a float64 model."""


def tolerances(
    exact: Sequence[Mapping[str, torch.Tensor]],
    eager: Sequence[Mapping[str, torch.Tensor]],
    dtype: str,
) -> list[dict[str, float]]:
    """Per step and name how far a run may be from ``exact``.

    ``exact``: the float64 run; ``eager``: the model's own, for float64 models a float32 run.
    """
    factor = OWN_ERROR * (COARSE if dtype == "float64" else 1.0)
    found = []
    for precise, own in zip(exact, eager, strict=True):
        largest: dict[str, float] = {}
        for name, value in precise.items():
            largest[_kind(name)] = max(largest.get(_kind(name), 0.0), _size(value))
        found.append(
            {
                name: RELATIVE[dtype] * _size(value)
                + factor * distance(own[name], value)
                + LARGEST[dtype] * largest[_kind(name)]
                for name, value in precise.items()
            }
        )
    return found


def _kind(name: str) -> str:
    """``gradient`` of "gradient head.weight"."""
    return name.split()[0]


def faults(
    ours: Sequence[Mapping[str, torch.Tensor]],
    exact: Sequence[Mapping[str, torch.Tensor]],
    eager: Sequence[Mapping[str, torch.Tensor]],
    allowed: Sequence[Mapping[str, float]],
) -> list[str]:
    """What is wrong in the first step that is; what eager itself leaves undefined is not judged."""
    for step, (mine, precise, own) in enumerate(zip(ours, exact, eager, strict=True)):
        one_sided = sorted(mine.keys() ^ own.keys())
        if not all(_is_no_gradient(name, mine, own) for name in one_sided):
            return [f"step {step}: only one has {one_sided}"]
        found = [
            f"step {step}: {name}: {error:.2e} off, {bound:.2e} allowed, largest {_size(value):.2e}"
            for name, value in precise.items()
            if name in mine
            and (bound := allowed[step][name]) == bound
            and not (error := _off(mine[name], value, own[name])) <= bound
            and not _is_tie(mine[name], name, precise, allowed[step])
        ]
        if found:
            return found
    return []


def wrong_updates(updates: Mapping[str, float], dtype: str, *, are_same_kernels: bool) -> list[str]:
    """Parameters that an offloaded update leaves otherwise than the plain optimizer does."""
    most = 0.0 if are_same_kernels else RELATIVE[dtype]
    return [
        f"update of {name}: {off:.2e} of its largest entry off, {most:.0e} allowed"
        for name, off in updates.items()
        if not off <= most
    ]


def _is_no_gradient(name: str, *records: Mapping[str, torch.Tensor]) -> bool:
    """True for a gradient of zeros that one of two has: what only unused results depend on.

    AOTAutograd gives zeros where eager gives None.
    """
    found = [record[name] for record in records if name in record]
    return name.startswith("gradient ") and not any(value.any() for value in found)


def _is_tie(
    ours: torch.Tensor,
    name: str,
    exact: Mapping[str, torch.Tensor],
    allowed: Mapping[str, float],
) -> bool:
    """True for places of largest logits, result 0, that rounding cannot tell from the exact ones.

    ``name`` is ``output 1.3``, or that with words around it, for the fourth result.
    """
    found = re.search(r"output \d+\.(?=\d)", name)
    logits_name = f"{name[: found.end()]}0" if found else ""
    logits, places = exact.get(logits_name), exact[name]
    if logits is None or ours.is_floating_point() or ours.dtype != places.dtype:
        return False
    if not logits.dim() or not torch.equal(logits.argmax(-1), places):
        return False
    if ours.shape != places.shape or ours.lt(0).any() or ours.ge(logits.shape[-1]).any():
        return False
    largest, taken = (logits.gather(-1, at.unsqueeze(-1)) for at in (places, ours))
    return float((largest - taken).max()) <= 2 * allowed[logits_name]


def _off(ours: torch.Tensor, exact: torch.Tensor, own: torch.Tensor) -> float:
    if ours.shape != exact.shape or ours.dtype != own.dtype:
        return float("inf")
    defined = torch.isfinite(own.double()) & torch.isfinite(exact.double())
    return distance(ours[defined], exact[defined])


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest difference of two entries; NaN when one is, infinite entries may be equal."""
    if first.numel() == 0:
        return 0.0
    difference = (first.double() - second.double()).abs()
    return float(difference.masked_fill(first == second, 0.0).max())


def _size(tensor: torch.Tensor) -> float:
    finite = tensor.double()[torch.isfinite(tensor.double())]
    return float(finite.abs().max()) if finite.numel() else 0.0
