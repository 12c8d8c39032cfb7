"""Lets Inductor lower for a GPU that is not here: no driver, no CUDA build, no compiled kernel.

Inductor's questions about the device are answered from figures; nothing that is lowered can run.
Read in torch 2.11.0 and 2.13.0, triton 3.6 and 3.7.
"""

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import scheduler
from torch._subclasses import fake_tensor
from torch.utils import _triton

from memo_compile.gpus import GpuFacts
from memo_compile.torch_private.patches import replaced


def decomposed(operator: Any) -> Callable[..., Any]:
    """Returns torch's decomposition of ``operator``, which Inductor uses."""
    decomposition: Callable[..., Any] = decomposition_table[operator]
    return decomposition


@contextlib.contextmanager
def lowering_for(gpu: GpuFacts, memory_bytes: int) -> Iterator[None]:
    """Inside, cuda:0 is ``gpu`` to whoever lowers for it; there, nothing can run on CUDA."""
    properties = _properties(gpu, memory_bytes)
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "get_device_capability", (gpu.major, gpu.minor)),
        (torch.cuda, "get_device_name", gpu.device_name),
        (torch.cuda, "current_device", 0),
        (torch.cuda, "device_count", 1),
        (torch.cuda, "is_bf16_supported", True),
        (CudaInterface, "is_available", True),
        (CudaInterface, "get_device_properties", properties),
        (CudaInterface, "get_compute_capability", gpu.capability),
        (CudaInterface, "current_device", 0),
        (CudaInterface, "device_count", 1),
        (CudaInterface, "is_bf16_supported", True),
        (CudaInterface, "is_triton_capable", True),
        (CudaInterface, "raise_if_triton_unavailable", None),
        (CudaInterface, "get_raw_stream", 0),
        (torch._C, "_cuda_getCurrentRawStream", 0),
        (_triton, "has_triton", True),
        (scheduler, "has_triton", True),
        (fake_tensor, "init_gpu_context", None),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(_answering(owner, name, answer))
        stack.enter_context(_driver_of(gpu))
        yield


def _properties(gpu: GpuFacts, memory_bytes: int) -> types.SimpleNamespace:
    """Returns what ``torch.cuda.get_device_properties`` would say of ``gpu``."""
    return types.SimpleNamespace(
        name=gpu.device_name,
        major=gpu.major,
        minor=gpu.minor,
        total_memory=memory_bytes,
        multi_processor_count=gpu.num_processors,
        regs_per_multiprocessor=65536,
        warp_size=32,
        max_threads_per_multi_processor=gpu.processor_threads,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=gpu.block_shared_bytes,
        shared_memory_per_multiprocessor=gpu.shared_bytes,
        L2_cache_size=gpu.l2_bytes,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        clock_rate=1_980_000,
    )


def _answering(owner: Any, name: str, answer: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, ``owner.name`` is a function that returns ``answer``."""

    def call(*_: Any, **__: Any) -> Any:
        return answer

    return replaced(owner, **{name: staticmethod(call) if isinstance(owner, type) else call})


def _driver_of(gpu: GpuFacts) -> contextlib.AbstractContextManager[None]:
    """Inside, Triton's active driver names ``gpu`` as its target."""
    runtime = importlib.import_module("triton.runtime.driver")
    target = importlib.import_module("triton.backends.compiler").GPUTarget

    class Driver:
        def get_current_target(self) -> Any:
            return target("cuda", gpu.capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_device_interface(self) -> Any:
            return torch.cuda

        @staticmethod
        def is_active() -> bool:
            return True

    driver = Driver()
    return replaced(runtime.driver, _default=driver, _active=driver)
