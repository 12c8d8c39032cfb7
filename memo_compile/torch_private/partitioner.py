"""Private torch APIs of the partitioner of the joint graph. Read in torch 2.11.0 and 2.13.0."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch import partitioners
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from memo_compile.torch_private.autograd import functorch_patch
from memo_compile.torch_private.dynamo import nothing_else_compiles
from memo_compile.torch_private.fx_graphs import copied
from memo_compile.torch_private.patches import replaced

reordering_to_mimic_autograd_engine = partitioners.reordering_to_mimic_autograd_engine


class Partitioner(CustomPartitionerFn):
    """``run(joint, joint_inputs, **kwargs)`` as the object that Inductor's configuration wants."""

    def __init__(self, run: Callable[..., Any], uuid: str | None = None) -> None:
        self._run: Callable[..., Any] | None = run
        self._uuid = uuid

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        """Returns the halves of ``gm``."""
        assert self._run is not None, "it is called while its settings hold"
        return self._run(gm, joint_inputs, **kwargs)

    def close(self) -> None:
        """Drops ``run``: torch's copies of its configuration keep this object for good."""
        self._run = None

    def uuid(self) -> str | None:
        """Returns its key in caches; None: it has none."""
        return self._uuid

    def __reduce__(self) -> Any:
        """Pickles as its ``uuid``: caches digest Inductor's whole configuration."""
        if self._uuid is None:
            raise TypeError("a partitioner that nothing is known by")
        return str, (self._uuid,)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Partitioner":
        return self  # Inductor copies its whole configuration when it saves it


def extract_halves(
    joint: fx.GraphModule, saved: list[fx.Node], *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns forward and backward of ``joint`` with ``saved`` between, in AOTAutograd's order."""
    return partitioners._extract_fwd_bwd_modules(
        joint, list(saved), saved_sym_nodes=[], num_fwd_outputs=num_fwd_outputs
    )


def min_cut_saved_names(
    joint: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None,
) -> list[str]:
    """Returns the names of nodes that torch's own min-cut partitioner would save.

    ``joint`` stays unchanged. Common subexpressions stay apart (``cse=False``), so that the names
    are those of ``joint``. The partitioner is stopped before it makes halves of its choice.
    """
    try:
        with functorch_patch(cse=False), _halves_are_not_made():
            partitioners.min_cut_rematerialization_partition(
                copied(joint),
                joint_inputs,
                num_fwd_outputs=num_fwd_outputs,
                static_lifetime_input_indices=static_lifetime_input_indices,
            )
    except _Chosen as chosen:
        return [node.name for node in chosen.saved]
    raise AssertionError("torch's partitioner takes the halves apart by another function")


def activation_memory_budget() -> float:
    """Returns the share of activations that torch's min-cut partitioner may save; 1.0: all."""
    return float(functorch_config.activation_memory_budget)


def ranks_cut_together() -> bool:
    """True where the min-cut partitioner of each rank talks to the others'."""
    return bool(getattr(functorch_config, "_sync_decision_cross_ranks", False))


class _Chosen(Exception):
    def __init__(self, saved: list[fx.Node]) -> None:
        super().__init__("what torch's partitioner saves was asked for, and is known")
        self.saved = saved


@contextlib.contextmanager
def _halves_are_not_made() -> Iterator[None]:
    """Inside, torch's partitioners raise _Chosen when they have chosen what is saved."""

    def chosen(_joint: fx.GraphModule, saved: list[fx.Node], *_: Any, **__: Any) -> None:
        raise _Chosen(saved)

    with nothing_else_compiles(), replaced(partitioners, _extract_fwd_bwd_modules=chosen):
        yield
