"""Facts about a graph's inputs that a plan needs: device, parameters, buffers, bytes."""

import collections
import weakref
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from memo_runtime.host_state import gradient_goes_home, host_state, update_bytes
from memo_runtime.host_tensors import place_of
from torch import fx

from memo_compile.analysis.joint_units import is_tangent
from memo_compile.analysis.views import is_tensor
from memo_compile.costs.host import host_memory
from memo_compile.costs.measure import resident_bytes
from memo_compile.errors import RuntimeMisuse
from memo_compile.gpus import GpuFacts
from memo_compile.lowering.cublas import libraries_bytes
from memo_compile.step.problem import FixedBytes, align
from memo_compile.torch_private.distributed import local_part

OPTIMIZER_TENSORS = 2
"""Tensors of optimizer state assumed for each trained parameter, in its dtype: Adam's moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """What the optimizer keeps for trained parameters, and what of it is on the host."""

    assumed_bytes: int
    """Of parameters whose state is on the device: OPTIMIZER_TENSORS tensors of each."""
    num_on_device: int
    """Numbers in those parameters."""
    known_bytes: int
    """Of parameters whose state is on the host: what stays on the device even so."""
    update_bytes: int
    """The least that their update borrows of the device."""
    host_bytes: int
    """Their state on the host."""
    gradients_on_host: int
    """The gradients that go to the host as they are made."""

    @classmethod
    def of(
        cls, trained: Sequence[torch.Tensor], size_of: Callable[[torch.Tensor], int]
    ) -> "OptimizerState":
        """Asks where the state of each parameter is (``memo_compile.offload``).

        ``size_of`` says what a tensor takes of the device.
        """
        states = [(parameter, host_state(parameter)) for parameter in trained]
        on_device = [parameter for parameter, state in states if state is None]
        on_host = [state for _, state in states if state is not None]
        return cls(
            assumed_bytes=OPTIMIZER_TENSORS * sum(map(size_of, on_device)),
            num_on_device=sum(local_part(parameter).numel() for parameter in on_device),
            known_bytes=sum(state.device_bytes for state in on_host),
            update_bytes=update_bytes(trained),
            host_bytes=sum(state.host_bytes for state in on_host),
            gradients_on_host=sum(state.gradient_bytes for state in on_host),
        )

    def device_bytes(self, bytes_per_parameter: float | None) -> int:
        """Returns what is on the device: ``bytes_per_parameter`` a number, or what is assumed."""
        if bytes_per_parameter is None:
            return self.assumed_bytes + self.known_bytes
        return int(self.num_on_device * bytes_per_parameter) + self.known_bytes


@dataclass(eq=False, slots=True)
class GraphFacts:
    """Facts about one Dynamo graph, read from its real example inputs and the AOT forward.

    No reference is kept to a tensor: the model alone keeps them alive.
    """

    example_inputs: InitVar[Sequence[Any]]
    untraced: InitVar[Sequence[torch.Tensor]] = ()
    """Parameters and buffers of layers that the graph lacks and the step has (see
    ``offline.longer_model``)."""
    gpu: GpuFacts | None = None
    """The step is planned for such a GPU, which need not be here; the inputs lie on the CPU."""
    device: torch.device = field(init=False)
    static_names: frozenset[str] = frozenset()
    """Inputs of the AOT forward that are parameters and buffers."""
    ties_inputs: bool = False
    """As of ``purity.ties_inputs``."""
    _inputs: list[weakref.ref[torch.Tensor] | None] = field(init=False)
    _parameters: list[weakref.ref[torch.Tensor]] = field(init=False)
    """One for each storage: tied weights count once."""
    _state: OptimizerState = field(init=False)
    _names: tuple[str, ...] = ()
    """Of the inputs, in the forward; empty where it has others."""
    _parameter_bytes: int = field(init=False)
    _all_trained_bytes: int = field(init=False)
    """Of parameters that are trained, wherever their gradients are."""
    _bytes_on_host: int = field(init=False)
    """Of parameters."""
    _trained_bytes: int = field(init=False)
    """Of parameters whose gradients stay on the device."""
    _untraced_bytes: int = field(init=False)
    _static_bytes: int = 0
    _input_bytes: int = 0

    def __post_init__(
        self, example_inputs: Sequence[Any], untraced: Sequence[torch.Tensor]
    ) -> None:
        tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
        self.device = _main_device(tensors) if self.gpu is None else torch.device("cuda", 0)
        parameters = {
            tensor.untyped_storage()._cdata: tensor
            for tensor in (*tensors, *untraced)
            if isinstance(tensor, torch.nn.Parameter)
        }.values()
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        on_host = [parameter for parameter in parameters if place_of(parameter) is not None]
        self._inputs = [
            weakref.ref(value) if isinstance(value, torch.Tensor) else None
            for value in example_inputs
        ]
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._state = OptimizerState.of(trained, self._allocated_bytes)
        self._parameter_bytes = sum(map(self._allocated_bytes, parameters))
        self._all_trained_bytes = sum(map(self._allocated_bytes, trained))
        self._bytes_on_host = sum(parameter.nbytes for parameter in on_host)
        self._trained_bytes = sum(map(self._allocated_bytes, staying(trained)))
        self._untraced_bytes = sum(map(self._allocated_bytes, untraced))

    @property
    def num_with_state(self) -> int:
        """Trained numbers whose optimizer state is on the device."""
        return self._state.num_on_device

    def _allocated_bytes(self, tensor: torch.Tensor) -> int:
        """As ``allocated_bytes``, on the device that the step is planned for."""
        size_bytes = allocated_bytes(tensor)
        return size_bytes if self.gpu is None else align(size_bytes)

    def device_bytes(self) -> int | None:
        """Returns all memory of the device that the arena lies on; None where it is unknown."""
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return host_memory().total_bytes

    def bytes_left(self) -> int | None:
        """Device memory that this process holds or may still take; None where it is unknown."""
        if self.gpu is not None:
            return None
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            cached = torch.cuda.memory_reserved(self.device)
            return int(free) + int(cached)
        usable = host_memory().usable_bytes
        try:
            return None if usable is None else usable + resident_bytes()
        except RuntimeMisuse:
            return None

    def read_forward(
        self, placeholders: Sequence[fx.Node], static: frozenset[str], *, ties_inputs: bool
    ) -> None:
        """Reads the bytes of the AOT forward's inputs; ``static`` are parameters and buffers."""
        self.static_names, self.ties_inputs = static, ties_inputs
        names = tuple(node.name for node in placeholders)
        self._names = names if len(names) == len(self._inputs) else ()
        tensors = filter(is_tensor, placeholders)
        sizes = {node.name: allocated_bytes(node.meta["val"]) for node in tensors}
        static_bytes = sum(size for name, size in sizes.items() if name in static)
        self._static_bytes = self._untraced_bytes + static_bytes
        self._input_bytes = sum(sizes.values()) - static_bytes

    def existing_gradient_bytes(self) -> int:
        """Bytes of the gradients that exist now; a backward makes new ones beside them."""
        return gradient_bytes([ref() for ref in self._parameters])

    def inputs(self) -> list[torch.Tensor | None]:
        """Returns the graph's inputs by position; None where it is no tensor, or is freed."""
        return [None if ref is None else ref() for ref in self._inputs]

    def trains_most(self) -> bool:
        """True unless most of the parameters' bytes are frozen."""
        return self._all_trained_bytes >= self._parameter_bytes // 2

    def parameters(self, inputs: Sequence[Any] | None = None) -> dict[str, torch.nn.Parameter]:
        """Returns the inputs that are parameters, by their names in the forward.

        ``inputs`` are those of a later call, whose parameters may be other objects.
        """
        named = zip(self._names, self.inputs() if inputs is None else inputs, strict=False)
        return {name: value for name, value in named if isinstance(value, torch.nn.Parameter)}

    @property
    def parameter_bytes(self) -> int:
        """Parameters on the device."""
        return max(0, self._parameter_bytes - self._bytes_on_host)

    def constant_bytes(self, state_bytes_per_parameter: float | None = None) -> int:
        """Returns the bytes of parameters, their gradients and optimizer state on the device."""
        fixed = self.fixed_bytes(0, state_bytes_per_parameter)
        return fixed.parameters + fixed.new_gradients + fixed.optimizer_state

    def fixed_bytes(
        self,
        outputs_bytes: int,
        state_bytes_per_parameter: float | None = None,
        gradients: str = "auto",
        *,
        tunes: bool = False,
    ) -> FixedBytes:
        """Returns the device memory of the step outside the arena.

        A gradient counts twice where a ``.grad`` exists already (it is accumulated into), or will
        by the option ``gradients``; one that goes to the host does not count. Optimizer state:
        ``OptimizerState.device_bytes``. ``tunes``: Inductor tunes kernels.
        """
        existing = {"fresh": 0, "accumulated": self._trained_bytes}
        if gradients not in existing:
            existing[gradients] = self.existing_gradient_bytes()
        return FixedBytes(
            parameters=self.parameter_bytes,
            parameters_on_host=self._bytes_on_host,
            buffers=max(0, self._static_bytes - self._parameter_bytes),
            gradients=self._trained_bytes + existing[gradients],
            optimizer_state=self._state.device_bytes(state_bytes_per_parameter),
            new_gradients=self._trained_bytes,
            inputs=self._input_bytes,
            outputs=outputs_bytes,
            libraries=self._libraries_bytes(tunes=tunes),
            state_on_host=self._state.host_bytes,
            gradients_on_host=self._state.gradients_on_host,
            update=self._state.update_bytes,
        )

    def _libraries_bytes(self, *, tunes: bool) -> int:
        """Returns what CUDA's libraries take, and Inductor while it tunes kernels."""
        if self.device.type != "cuda":
            return 0
        if self.gpu is not None:
            return libraries_bytes(self.gpu.major, self.gpu.l2_bytes if tunes else 0)
        major, _ = torch.cuda.get_device_capability(self.device)
        return libraries_bytes(major, flushed_bytes(self.device) if tunes else 0)


def gradient_bytes(inputs: Sequence[Any]) -> int:
    """Bytes of the gradients of parameters among ``inputs`` that exist now, on the device."""
    leaves = (value for value in inputs if isinstance(value, torch.Tensor) and value.is_leaf)
    gradients = (leaf.grad for leaf in leaves if leaf.grad is not None)
    return sum(allocated_bytes(gradient) for gradient in gradients if place_of(gradient) is None)


def staying(trained: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of ``trained`` whose gradients stay on the device until the program frees them."""
    return [parameter for parameter in trained if not gradient_goes_home(parameter)]


def tangents(placeholders: Sequence[fx.Node]) -> dict[str, int]:
    """Returns the bytes of each gradient that a backward is given; zeros for unused results."""
    return {
        node.name: allocated_bytes(node.meta["val"])
        for node in placeholders
        if is_tangent(node) and is_tensor(node)
    }


def profile_name(device: torch.device) -> str:
    """Returns the name of the device: ``NVIDIA H200``, ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def flushed_bytes(device: torch.device) -> int:
    """Returns the bytes that Inductor allocates while it tunes a kernel, in the kernel's first run.

    Between two timings it writes a buffer of the size of the device's L2 cache, to empty the cache.
    """
    if device.type != "cuda":
        return 0
    return align(int(torch.cuda.get_device_properties(device).L2_cache_size))


def allocated_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes of its device. CUDA's allocator rounds up, as the arena does."""
    size_bytes = tensor.numel() * tensor.element_size()
    return align(size_bytes) if tensor.device.type == "cuda" else size_bytes


def _main_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device with most of the inputs' bytes; the CPU only if no other has any."""
    held: collections.Counter[torch.device] = collections.Counter()
    for tensor in tensors:
        held[tensor.device] += allocated_bytes(tensor)
    cpu = torch.device("cpu")
    return max(held, key=lambda device: (device.type != "cpu", held[device]), default=cpu)
