"""A loop with accelerate: memo by its name in the plugin, with options.

    python examples/tools/accelerate_loop.py [--offload]

Four micro-batches make two updates; the plugin takes memo's options. With ``--offload`` optimizer
state and gradients lie on the host, where parameters are updated.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from beside_eager import batches, compare, small_llama

import memo_compile
import memo_compile.huggingface


def train(with_memo: bool) -> list[float]:
    """The losses of the micro-batches."""
    plugin = None
    if with_memo:
        memo_compile.huggingface.enable()
        options = {"memory_budget": "2.6MiB", "gradients": "accumulated"}
        plugin = TorchDynamoPlugin(backend="memo", options=options)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dynamo_plugin=plugin)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if with_memo and "--offload" in sys.argv:
        optimizer = memo_compile.offload(optimizer, update="host")
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for ids in batches(4, tokens=64):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    AcceleratorState._reset_state()  # the next run of this process has another plugin
    return losses


if __name__ == "__main__":
    compare(train)
