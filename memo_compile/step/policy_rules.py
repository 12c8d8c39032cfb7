"""Rules of the user: saved tensors that are kept, offloaded or recomputed whatever a plan would do.

@memo_compile.policy_rule
def rule(tensor):
if tensor.role.startswith("mlp."):
return "recompute"
return None  # the plan decides
"""

from collections.abc import Callable
from dataclasses import dataclass

from memo_compile.errors import ConfigError
from memo_compile.step.problem import TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A saved tensor of one kind of layer, as a rule sees it."""

    role: str
    """The module of the layer that made it: ``mlp.up_proj``, ``attention output``."""
    op: str
    """The operator that made it: ``aten.mm.default``."""
    source: str | None
    """``file:line`` of the program that made it."""
    shape: tuple[int, ...]
    dtype: str
    """``bfloat16``."""
    size_bytes: int
    """Bytes in one layer."""


PolicyRule = Callable[[SavedTensor], str | None]

DECISIONS = ("keep", "offload", "recompute")

_rules: list[PolicyRule] = []


def policy_rule(rule: PolicyRule) -> PolicyRule:
    """Lets ``rule`` decide about saved tensors of every step that is planned from now on.

    ``rule`` gets a ``SavedTensor`` and returns ``"keep"``, ``"offload"``, ``"recompute"``, or None
    where the plan is to decide. Of several rules the first that decides counts. What a step cannot
    do (recompute what another layer made) the plan decides; a note of the report says so.

    Returns ``rule``, so that it can be used as a decorator.
    """
    _rules.append(rule)
    return rule


def clear_policy_rules() -> None:
    """Forgets all rules; steps that were planned stay as they are."""
    _rules.clear()


def has_rules() -> bool:
    """True while there are rules."""
    return bool(_rules)


def decision_of(info: TensorInfo, size_bytes: int) -> str | None:
    """What the rules decide about a tensor; None: the plan decides.

    Raises ConfigError: a rule raises, or returns something else.
    """
    tensor = SavedTensor(
        role=info.role,
        op=info.op,
        source=info.source,
        shape=info.shape,
        dtype=info.dtype,
        size_bytes=size_bytes,
    )
    for rule in _rules:
        name = getattr(rule, "__name__", repr(rule))
        try:
            decision = rule(tensor)
        except Exception as error:
            raise ConfigError(
                f"policy_rule: {name} raised {type(error).__name__}: {error}"
            ) from error
        if decision is None:
            continue
        if decision not in DECISIONS:
            raise ConfigError(
                f"policy_rule: expected {', '.join(DECISIONS)} or None of {name}, got {decision!r}"
            )
        return decision
    return None
