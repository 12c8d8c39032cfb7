"""Other people's tools beside memo at their memory: ``python -m benchmarks.peers``.

One model, unmodified and from transformers, is run by each way in a process of its own: offloading
hooks, torchtitan's activation checkpointing, DeepSpeed's. First the physical peak of a step, and
its gradients against eager's; then memo is given that peak as its budget, and steps of both are
run in turn. ``benchmarks.budget`` has checkpointing and torch's own budget, and says how peaks are
measured; here too the results of the forward are held to the end of the step.

* ``hooks``: ``torch.autograd.graph.saved_tensors_hooks`` that copy to shared memory, where memo
  offloads to as well, and back when the backward asks. ``save_on_cpu`` is such a pair of hooks, but
  on a CPU it copies nothing, since the tensors are there already: ``save_on_cpu_copies`` says so
  (with ``pin_memory`` into memory that counts as much as theirs). Parameters are left where they
  are, which ``save_on_cpu`` does not.
* ``torchtitan-...``: its ``apply_ac``, with the operators that its Llama saves and the kernel that
  attention is on a CPU. ``op`` keeps those, ``2`` checkpoints every second layer, ``full`` each.
  The model is compiled as one, not block by block.
* ``deepspeed``: ``deepspeed.checkpointing.checkpoint`` around each layer, which Dynamo does not
  enter; with ``+inductor`` each layer is compiled by itself inside it. ``checkpoint_in_cpu`` copies
  from the accelerator to the CPU: on a CPU alone, that is nowhere.

torchtitan and DeepSpeed are not among memo's requirements: a way whose package is missing is said,
and the others are measured. The environment of ``make examples`` has torchtitan. DeepSpeed comes
with ``DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation deepspeed hjson py-cpuinfo einops
msgpack ninja``.
"""

import argparse
import functools
import importlib.metadata
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import budget, harness

MODULE = "benchmarks.peers"
PEERS = (
    "inductor",
    "hooks",
    "hooks+inductor",
    "torchtitan-op",
    "torchtitan-2",
    "torchtitan-full",
    "deepspeed",
    "deepspeed+inductor",
)
MAX_DIFFERENCE = 1e-4
"""Of a gradient from eager's, over the largest number of that gradient: both are float32."""
MIN_OFFLOADED_BYTES = 4096
"""By the hooks; a smaller tensor is not worth a mapping of shared memory."""


def main() -> int:
    """Measure every peer, print the tables, write the result; 1 when a promise breaks."""
    sizes = {"layers": 4, "hidden": 512, "tokens": 2048, "vocab": 4096}
    parser = harness.parser(__doc__, sizes=sizes)
    budget.add_shared(parser, peers=PEERS)
    return harness.run_benchmark("peers", parser.parse_args(), measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every peer in a process of its own."""
    peers: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="memo-bench-kernels-") as cache:
        runner = budget.Runner(MODULE, options, cache)
        floors = runner.floors(options.hosts.split(","))
        for name in options.peers.split(","):
            try:
                peers[name] = runner(name, *budget.told(floors))
            except harness.ChildFailed as error:  # it costs the others nothing
                peers[name] = {"failed": str(error)}
    budget.show_peers("outputs held", peers, options.hosts.split(","))
    settings = {key: getattr(options, key) for key in ("layers", "hidden", "tokens", "vocab")}
    return {
        "settings": settings,
        "floor_bytes": floors,
        "save_on_cpu_copies": save_on_cpu_copies(),
        "peers": peers,
        "failures": judge(peers),
    }


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """In the child: memo's floor, or a peer's peak and gradients, and memo at its memory."""
    if options.child == "floor":
        return budget.run_floor(options)
    model, ids = budget.make_model(options)
    try:
        step, versions = prepared(model, options.child)
    except ImportError as error:
        return {"missing": str(error)}
    kept: dict[str, Any] = {}
    run = budget.make_step(model, step, ids, options.way, kept)
    for _ in range(2):
        run()
    eager, _ = budget.make_model(options)
    eager(input_ids=ids, labels=ids).loss.backward()
    difference = harness.gradient_error(model, eager)
    peak = budget.measured_peak(model, ids, run, kept)
    rows = budget.memo_rows_at(options, run, peak)
    return {"versions": versions, "gradient_difference": difference, **peak, "memo": rows}


def prepared(model: Any, name: str) -> tuple[Callable[..., Any], dict[str, str]]:
    """``model`` as the peer ``name`` runs it, and the versions of the packages that do.

    Raises:
        ImportError: a package of the peer is not installed.
        ValueError: no peer has this name.
    """
    import torch

    tool, _, how = name.partition("+")
    package, _, policy = tool.partition("-")
    if package == "torchtitan":
        under_torchtitan(model, policy)
    elif package == "deepspeed":
        under_deepspeed(model, is_compiled=how == "inductor")
    elif package not in ("hooks", "inductor"):
        raise ValueError(f"no peer {name!r}: expected some of {', '.join(PEERS)}")
    is_compiled = how == "inductor" or package in ("inductor", "torchtitan")
    step = torch.compile(model, backend="inductor") if is_compiled else model
    if package == "hooks":
        return functools.partial(offloaded, step, storages_of(model)), {}
    used = [package] if package in ("torchtitan", "deepspeed") else []
    return step, {package: importlib.metadata.version(package) for package in used}


def under_torchtitan(model: Any, policy: str) -> None:
    """The layers of ``model`` are checkpointed by torchtitan; ``policy``: op, full, a number.

    Raises:
        ImportError: torchtitan is not installed.
    """
    import torch
    from torchtitan.config.job_config import ActivationCheckpoint
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3.infra import parallelize

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    if policy == "full":
        settings = ActivationCheckpoint(mode="full")
    else:
        settings = ActivationCheckpoint(mode="selective", selective_ac_option=policy)
    saved = {*parallelize._op_sac_save_list, attention}
    apply_ac(model.model, settings, model_compile_enabled=True, op_sac_save_list=saved)


def under_deepspeed(model: Any, *, is_compiled: bool) -> None:
    """Each layer of ``model`` is checkpointed by DeepSpeed, and compiled inside that if asked.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    import deepspeed
    import torch
    from torch import nn

    class Checkpointed(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer
            self.step = torch.compile(layer, backend="inductor") if is_compiled else layer

        def forward(self, hidden: torch.Tensor, **named: Any) -> Any:
            run = functools.partial(self.step, **named)
            return deepspeed.checkpointing.checkpoint(run, hidden)

    layers = model.model.layers
    for at, layer in enumerate(layers):
        layers[at] = Checkpointed(layer)


def storages_of(model: Any) -> frozenset[int]:
    """Where the parameters and buffers of ``model`` lie."""
    tensors = [*model.parameters(), *model.buffers()]
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def offloaded(step: Callable[..., Any], stay: frozenset[int], **inputs: Any) -> Any:
    """``step`` with every saved activation in shared memory from forward to backward."""
    import torch

    def pack(tensor: torch.Tensor) -> Any:
        in_place = tensor.untyped_storage().data_ptr() in stay
        if in_place or tensor.nbytes < MIN_OFFLOADED_BYTES:
            return tensor
        storage = torch.UntypedStorage._new_shared(tensor.nbytes)
        host = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)
        return (host.copy_(tensor), tensor.stride())

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        host, strides = packed
        return torch.empty_strided(host.shape, strides, dtype=host.dtype).copy_(host)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return step(**inputs)


def save_on_cpu_copies() -> bool:
    """Whether torch's ``save_on_cpu`` makes a copy of a tensor that is on the CPU."""
    import torch

    weight = torch.ones(8, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        product = weight * weight
    saved = product.grad_fn._saved_self  # type: ignore[union-attr]
    return bool(saved.data_ptr() != weight.data_ptr())


def judge(peers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The promises that do not hold, as sentences."""
    failures = []
    for name, peer in peers.items():
        if "failed" in peer:
            failures.append(f"{name} did not run: {peer['failed'].splitlines()[-1]}")
        if peer.get("gradient_difference", 0.0) > MAX_DIFFERENCE:
            failures.append(f"{name}: gradients {peer['gradient_difference']:.1e} from eager's")
    return failures + list(budget.judge_times(peers))


if __name__ == "__main__":
    sys.exit(main())
