"""What torch's min-cut partitioner saves of a joint graph, found again by the graph's content.

It takes seconds, and a second process asks it the same. Only names are remembered, and they are
only a proposal: what a backward needs beside them is saved whatever they are (``equal_cut``).
"""

import logging
from dataclasses import dataclass
from typing import Any

from torch import fx

from memo_compile.analysis.joint_units import UNIT
from memo_compile.analysis.structure import spec_of
from memo_compile.file_store import FileStore, code_digest, digest_of
from memo_compile.passes.at_numbers import SIZES
from memo_compile.torch_private import partitioner

log = logging.getLogger("memo")

NOT_READ = frozenset(
    (
        "val tensor_meta stack_trace nn_module_stack fwd_nn_module_stack source_fn_stack seq_nr "
        "fwd_source_fn_stack original_aten from_node desc eager_input_vals output_stack_traces "
        "torch_fn annotation example_value dynamo_flat_name_to_original_fqn"
    ).split()
)
"""Of a node's notes, where it comes from; ``val`` is said by itself. All others are in the key."""


Chosen = dict[tuple[str, ...], list[str]]
"""Names of a joint graph's nodes -> those that were chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinCut:
    """Asks torch's partitioner, each question once if there is a ``store``."""

    num_fwd_outputs: int
    static_lifetime_input_indices: list[int] | None
    store: FileStore | None = None
    chosen: Chosen | None = None
    """What was chosen of this graph at other sizes, which is chosen again."""

    def names(self, joint: fx.GraphModule, joint_inputs: Any) -> list[str]:
        """Names of the nodes to save. ``joint`` is unchanged."""
        if self.chosen is None:
            return self._found(joint, joint_inputs)
        nodes = tuple(node.name for node in joint.graph.nodes)
        if nodes not in self.chosen:
            self.chosen[nodes] = self._found(joint, joint_inputs)
        return self.chosen[nodes]

    def _found(self, joint: fx.GraphModule, joint_inputs: Any) -> list[str]:
        store = None if partitioner.ranks_cut_together() else self.store
        if store is None:
            return self._made(joint, joint_inputs)
        key = self._key(joint)
        known = {node.name for node in joint.graph.nodes}
        for body in store.read(key):
            if isinstance(body, list) and all(type(name) is str for name in body):
                if known.issuperset(body):
                    return body
            log.warning("memo: what was remembered of a cut is not used: it is of another graph")
        names = self._made(joint, joint_inputs)
        store.write(key, names)
        return names

    def _made(self, joint: fx.GraphModule, joint_inputs: Any) -> list[str]:
        return partitioner.min_cut_saved_names(
            joint,
            joint_inputs,
            num_fwd_outputs=self.num_fwd_outputs,
            static_lifetime_input_indices=self.static_lifetime_input_indices,
        )

    def _key(self, joint: fx.GraphModule) -> dict[str, Any]:
        static = self.static_lifetime_input_indices
        return {
            "kind": "cut",
            "memo": code_digest(),
            "settings": partitioner.partitioner_settings(),
            "num_fwd_outputs": self.num_fwd_outputs,
            "static": None if static is None else list(static),
            "graph": digest_of([_said(node) for graph in _graphs(joint) for node in graph.nodes]),
        }


def _graphs(joint: fx.GraphModule) -> list[fx.Graph]:
    """The joint graph, and those that its operators are given."""
    modules = (module for module in joint.modules() if isinstance(module, fx.GraphModule))
    return [module.graph for module in modules]


def _said(node: fx.Node) -> list[str]:
    """What the partitioner may read of a node."""
    notes = [
        f"{key}={value!r}"
        for key, value in sorted(node.meta.items(), key=lambda item: str(item[0]))
        if key not in NOT_READ and key not in (UNIT, SIZES)
    ]
    made = f"{node.name} = {node.op} {node.target} {node.args} {node.kwargs}"
    return [made, spec_of(node.meta.get("val")), *notes]
