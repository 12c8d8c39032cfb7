"""Real training graphs as placement problems: Hugging Face models, captured by the backend.

``captured(name, num_layers, cache)`` compiles an unmodified transformers model with
``backend="memo"`` in a process of its own, takes the Problem that the backend planned, and ends
before the step runs. ``moved_step`` derives from it a step whose saved activations are offloaded
and recomputed.

By hand: ``python -m benchmarks.graphs --cache DIR --layers 2 8`` fills the cache.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from memo_compile.step.problem import Problem
from memo_compile.step.serialise import from_json

MODULE = "benchmarks.graphs"
HIDDEN = 256
INNER = 688
"""Width of the gated MLPs, 2.7 times the hidden size as in Llama."""
HEADS = 4
VOCABULARY = 4096
TOKENS = 512
BATCH = 2
CAPTURE_TIMEOUT_S = 1800.0
"""T5 with 160 layers is traced for minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Which step is captured."""

    model: str
    num_layers: int
    """T5: per stack."""
    lowering: str = "aten"

    @property
    def name(self) -> str:
        """Also the name of its file in the cache."""
        return f"{self.model}-{self.num_layers}-{self.lowering}"


def captured(graph: Graph, cache: Path) -> Problem:
    """The Problem that the backend plans for ``graph``; from ``cache`` when it is there.

    Raises:
        ChildFailed: the model could not be compiled.
    """
    path = cache / f"{graph.name}.json"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="memo-graphs-") as folder:
            arguments = (
                f"--child={graph.model}",
                f"--layers={graph.num_layers}",
                f"--lowering={graph.lowering}",
                f"--cache={folder}",
            )
            arm = harness.Arm(name=graph.name, arguments=arguments)
            harness.run_arm(MODULE, arm, timeout_s=CAPTURE_TIMEOUT_S)
            found = sorted(Path(folder).glob("*/problem.json"), key=lambda p: p.stat().st_size)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(found[-1].read_text())
            partial.replace(path)
    return from_json(path.read_text(), Problem, where=str(path))


def _gpt2(num_layers: int) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=num_layers,
        n_head=HEADS,
        n_positions=TOKENS,
        bos_token_id=1,
        eos_token_id=2,
    )


def _sizes(num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "max_position_embeddings": TOKENS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _decoder(name: str, **more: Any) -> Callable[[int], Any]:
    """Makes a configuration of transformers' class ``name`` for a number of layers."""

    def config(num_layers: int) -> Any:
        import transformers

        return getattr(transformers, name)(**_sizes(num_layers), **more)

    return config


def _t5(num_layers: int) -> Any:
    from transformers import T5Config

    return T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=HIDDEN // HEADS,
        d_ff=4 * HIDDEN,
        num_layers=num_layers,
        num_decoder_layers=num_layers,
        num_heads=HEADS,
        decoder_start_token_id=0,
    )


CONFIGS: dict[str, Callable[[int], Any]] = {
    "gpt2": _gpt2,
    "llama": _decoder("LlamaConfig"),
    # Five layers of local attention, then one of global attention.
    "gemma3": _decoder("Gemma3TextConfig", head_dim=HIDDEN // HEADS, sliding_window=TOKENS // 4),
    "mixtral": _decoder(
        "MixtralConfig",
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="batched_mm",
    ),
    "t5": _t5,
}


class _Planned(Exception):
    """Raised inside the backend when the plan stands: the step itself need not run."""


def capture(graph: Graph, dump: Path) -> None:
    """``dump`` holds the backend's problem.json of ``graph``; nothing of the step has run."""
    import torch
    from torch._dynamo.exc import BackendCompilerFailed
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    import memo_compile

    def plan_and_stop(gm: Any, examples: Any) -> Any:
        options = {"lowering": graph.lowering, "strict": True, "dump": str(dump)}
        memo_compile.backend(gm, examples, options=options)
        raise _Planned

    torch.manual_seed(0)
    config = CONFIGS[graph.model](graph.num_layers)
    config.use_cache = False
    loader = AutoModelForSeq2SeqLM if graph.model == "t5" else AutoModelForCausalLM
    model = loader.from_config(config).train()
    if graph.model == "gpt2":
        model.loss_type = "ForCausalLM"  # else transformers guesses it and breaks the graph
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    try:
        torch.compile(model, backend=plan_and_stop)(input_ids=ids, labels=ids.clone())
    except BackendCompilerFailed as failure:
        if not isinstance(failure.inner_exception, _Planned):
            raise


def main() -> None:
    """Captures what is not in the cache; with ``--child`` one graph, in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(CONFIGS), choices=CONFIGS)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32, 80])
    parser.add_argument("--lowering", default="aten", choices=("aten", "inductor"))
    parser.add_argument("--child", choices=CONFIGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        begin = time.perf_counter()
        graph = Graph(model=options.child, num_layers=options.layers[0], lowering=options.lowering)
        capture(graph, options.cache)
        harness.send_result({"capture_s": time.perf_counter() - begin})
        return
    for depth in options.layers:
        for model in options.models:
            begin = time.perf_counter()
            graph = Graph(model=model, num_layers=depth, lowering=options.lowering)
            problem = captured(graph, options.cache)
            took = time.perf_counter() - begin
            print(f"{graph.name:20} {len(problem.calls):4} calls {took:7.1f} s", flush=True)


if __name__ == "__main__":
    main()
