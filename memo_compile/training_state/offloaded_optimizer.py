"""``memo_compile.offload``: an optimizer whose state lies on the host between updates.

    optimizer = memo_compile.offload(torch.optim.AdamW(model.parameters(), lr=1e-5))

AdamW keeps two numbers for each parameter: often they are the largest part of what lies on a
device. The wrapped optimizer keeps them on the host and brings them to the device in chunks while
``step()`` updates the parameters, in memory that activations leave idle then. Results are those of
the plain optimizer, to the last bit: the same kernels run on the same device.
"""

import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from memo_runtime import host_state
from memo_runtime.arena import arena_of
from memo_runtime.copies import CopyEngine, CopySchedule, engine_of
from memo_runtime.host_state import HostState

from memo_compile.config import MemoConfig, resolve
from memo_compile.errors import ConfigError
from memo_compile.torch_private.distributed import is_distributed, local_part
from memo_compile.training_state.gradient_homes import GradientHomes
from memo_compile.training_state.homes import Homes
from memo_compile.training_state.host_update import HostUpdate, host_group, on_host
from memo_compile.training_state.sizes import (
    MOST_CHUNK_BYTES,
    borrowed_per_byte,
    chunk_bytes,
    update_borrows,
)
from memo_compile.training_state.traits import StateTraits, traits_of
from memo_compile.training_state.update import ChunkedUpdate
from memo_compile.training_state.update_pieces import UpdatePiece, chunks_of, pieces_of

log = logging.getLogger("memo")

_PLACES = ("auto", "host", "device")


def offload(
    optimizer: torch.optim.Optimizer, *, state: str = "auto", update: str = "auto"
) -> torch.optim.Optimizer:
    """Keeps the state of ``optimizer`` on the host; plans made from now on do not count it.

    Call it before the first step of the compiled model. The result is used in place of
    ``optimizer``: its parameter groups are the same objects, and its ``state_dict()`` is the plain
    optimizer's, with state on the CPU.

    Args:
        optimizer: One of torch.optim whose ``step()`` needs no closure.
        state: ``"host"`` (also ``"auto"``), or ``"device"`` to leave it where it is.
        update: Where parameters are updated: ``"device"``, or ``"host"``; then each gradient goes
            to the host as soon as it is made. ``"auto"``: on the host where a step of the model
            does not fit its ``memory_budget`` otherwise.

    Raises:
        ConfigError: the optimizer or its parameters cannot be treated so; the message says why.
    """
    for name, value in (("state", state), ("update", update)):
        if value not in _PLACES:
            raise ConfigError(
                f"offload: {name}: expected one of {', '.join(_PLACES)}, got {value!r}"
            )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"offload: expected an optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, OffloadedOptimizer):
        raise ConfigError("offload: this optimizer's state is on the host already")
    if state == "device":
        if update == "host":
            raise ConfigError(
                "offload: update='host' needs state='host': the update reads it there"
            )
        return optimizer
    offloaded = OffloadedOptimizer(optimizer, resolve(None, None), may_move=update == "auto")
    if update == "host":
        offloaded.send_gradients_home()
    return offloaded


class OffloadedOptimizer(torch.optim.Optimizer):
    """The optimizer ``inner``, whose state is on the host between updates."""

    def __init__(
        self, inner: torch.optim.Optimizer, config: MemoConfig, *, may_move: bool = False
    ) -> None:
        self.inner = inner
        self._config = config
        self._may_move = may_move
        """The update moves to the host where a step does not fit otherwise."""
        self._gradients: GradientHomes | None = None
        """Where gradients go as they are made, where the update is on the host."""
        self._homes: dict[torch.device, Homes] = {}
        self._traits: dict[tuple[int, torch.dtype], StateTraits] = {}
        """By parameter group and dtype, for the groups' options in ``_options``."""
        self._options: list[str] = []
        self._group_of: dict[torch.Tensor, int] = {}
        super().__init__(inner.param_groups, inner.defaults)
        self._step_supports_amp_scaling = getattr(inner, "_step_supports_amp_scaling", False)
        self._share()

    def send_gradients_home(self) -> None:
        """Lets gradients go to the host as they are made, and updates there.

        Raises ConfigError: the optimizer or a parameter cannot be treated so.
        """
        kind_on, engine_on = functools.partial(_kind_on, self._config), self._engine
        self._gradients = GradientHomes(kind_on=kind_on, engine_on=engine_on)
        self._learn_traits()

    def move_update_to_host(self, require_room: Callable[[int], None]) -> bool:
        """Does so if the program has left the choice; called where a step does not fit."""
        if self._gradients is not None or not self._may_move:
            return False
        require_room(self._all_bytes)
        try:
            self.send_gradients_home()
        except ConfigError as error:
            log.info("memo: updates stay on the device: %s", error)
            self._gradients = None
            self._learn_traits()
        return self._gradients is not None

    def _share(self) -> None:
        """Uses the inner optimizer's groups and state as its own, and moves the state to the host.

        Needed wherever the inner optimizer has made them anew, as its ``load_state_dict`` does.
        """
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.defaults = self.inner.defaults
        self._learn_traits()
        for parameter in list(self.state):
            self._send_home(parameter)

    def _learn_traits(self) -> None:
        """Tries the optimizer with the options that its groups have now, and tells the plans."""
        self._traits.clear()
        self._group_of.clear()
        self._options = [_options_of(group) for group in self.param_groups]
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                _require_plain(parameter)
                self._group_of[parameter] = number
                key = (number, parameter.dtype)
                if key not in self._traits:
                    self._traits[key] = self._tried(group, parameter)
                if is_distributed(parameter):
                    _require_by_elements(self.inner, self._traits[key])
        if self._gradients is not None:
            self._gradients.follow(self._group_of)
        self._tell_plans()

    def _tried(self, group: dict[str, Any], parameter: torch.Tensor) -> StateTraits:
        """Tries the optimizer where it updates ``parameter``."""
        device = parameter.device
        if self._gradients is not None:
            _require_dense(parameter)
            group, device = host_group(group, device), torch.device("cpu")
        return traits_of(self.inner, group, parameter.dtype, device)

    def _follow_changes(self) -> None:
        """Takes up what the program has changed since the last step: options of groups, state.

        For example a schedule that cycles momentum, or ``optimizer.state.clear()``.
        """
        self.inner.param_groups, self.inner.state = self.param_groups, self.state
        if self._options != [_options_of(group) for group in self.param_groups]:
            self._learn_traits()
        for homes in self._homes.values():
            for parameter, at_home in homes.of_parameter.items():
                state = self.state.get(parameter, {})
                for name in [n for n, home in at_home.items() if state.get(n) is not home.tensor]:
                    del at_home[name]
        for parameter in list(self.state):
            self._send_home(parameter)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters, chunk by chunk; returns what ``closure`` does.

        Ctrl-C is raised when the update is whole.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_changes()
        is_on_host = self._gradients is not None
        with _passed_on(self, self.inner, is_on_host), _without_interrupts():
            pieces = list(pieces_of(self.param_groups, self._traits, self._chunk_bytes))
            for device in dict.fromkeys(piece.parameter.device for piece in pieces):
                here = [piece for piece in pieces if piece.parameter.device == device]
                homes, engine = self._homes_on(device), self._engine(device)
                if self._gradients is None:
                    chunks = list(chunks_of(here, self._granted_bytes(device, here)))
                    ChunkedUpdate(self.inner, homes, engine, chunks).run()
                else:
                    chunks = list(chunks_of(here, self._chunk_bytes))
                    HostUpdate(self.inner, homes, engine, chunks).run()
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients to a norm of at most ``max_norm``; returns what it was before."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; state of the new parameters is on the host, too."""
        super().add_param_group(param_group)
        if self.param_groups is self.inner.param_groups:  # not inside of __init__
            self._share()

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's, with state on the CPU."""
        self._finish_copies()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of this or of the plain optimizer, straight to the host.

        Raises ValueError: as torch's, where groups or parameters are others.
        """
        self._finish_copies()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameter_of = dict(zip(numbers, parameters, strict=False))
        self.inner.load_state_dict({**state_dict, "state": {}})  # the groups' options
        for homes in self._homes.values():
            homes.drop(parameters)
        self._share()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        small: dict[Any, Any] = {}
        large: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        for number, state in state_dict["state"].items():
            parameter = parameter_of.get(number)
            if parameter is None:
                small[number] = state
                continue
            small[number] = {}
            names = self._traits_of(parameter).itemsizes
            for name, value in state.items():
                if name in names and isinstance(value, torch.Tensor):
                    large.append((parameter, name, value))
                else:
                    small[number][name] = value
        self.inner.load_state_dict({**state_dict, "state": small})
        for parameter, name, value in large:  # cast as torch casts it
            is_floating = parameter.is_floating_point()
            cast = value.to(parameter.dtype) if is_floating else value
            self.inner.state[parameter][name] = cast
        self._share()

    def _send_home(self, parameter: torch.Tensor) -> None:
        """Copies the state of ``parameter`` to the host, wherever it is."""
        state, names = self.state[parameter], self._traits_of(parameter).itemsizes
        homes = self._homes_on(parameter.device)
        at_home = homes.of_parameter.get(parameter, {})
        wanted = {
            name: value.dtype
            for name, value in state.items()
            if name in names and name not in at_home and isinstance(value, torch.Tensor)
        }
        homes.take_in({parameter: wanted})
        for name in wanted:
            home = homes.of_parameter[parameter][name].tensor
            local_part(home).copy_(local_part(state[name]))
            state[name] = home

    def _tell_plans(self) -> None:
        """Tells plans the bytes of each parameter's state, and of the smallest update.

        All name the same update, that of the whole optimizer: its largest chunk counts.
        """
        states: list[tuple[torch.Tensor, int, int]] = []
        borrowed = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                kind, local = self._traits_of(parameter), local_part(parameter)
                sums = _sums_bytes(parameter) if kind.has_sums else 0
                if self._gradients is not None and parameter.device.type != "cpu":
                    sums = 0
                states.append((parameter, local.numel() * kind.bytes_per_element, sums))
                is_sliced = kind.is_elementwise and local.is_contiguous()
                least = 0 if is_sliced else local.nbytes
                chunk = max(least, min(self._all_bytes, self._chunk_bytes))
                borrowed = max(borrowed, int(chunk * self._borrowed_per_byte(kind, parameter)))
        for parameter, host_bytes, device_bytes in states:
            goes_home = self._gradients is not None and self._gradients.is_followed(parameter)
            told = HostState(
                host_bytes=host_bytes,
                device_bytes=device_bytes,
                update_bytes=borrowed,
                gradient_bytes=parameter.nbytes if goes_home else 0,
            )
            host_state.keep_on_host(parameter, told, self)

    def _borrowed_per_byte(self, kind: StateTraits, parameter: torch.Tensor) -> float:
        """Device memory that the update of a byte of ``parameter`` borrows."""
        return update_borrows(
            kind.bytes_per_element,
            parameter.element_size(),
            updates_on_host=self._gradients is not None,
            on_cpu=parameter.device.type == "cpu",
        )

    @property
    def _all_bytes(self) -> int:
        parameters = (each for group in self.param_groups for each in group["params"])
        return sum(local_part(parameter).nbytes for parameter in parameters)

    @property
    def _chunk_bytes(self) -> int:
        """Bytes of parameters in the smallest chunk."""
        return chunk_bytes(self._all_bytes)

    def _granted_bytes(self, device: torch.device, pieces: list[UpdatePiece]) -> int:
        """Bytes of parameters in a chunk, by what is idle on the device after a backward."""
        per_byte = (
            borrowed_per_byte(each.traits.bytes_per_element, each.parameter.element_size())
            for each in pieces
        )
        most = max(per_byte, default=1.0)
        idle = arena_of(device).idle_bytes()
        return max(self._chunk_bytes, min(int(idle / most), MOST_CHUNK_BYTES))

    def _traits_of(self, parameter: torch.Tensor) -> StateTraits:
        return self._traits[self._group_of[parameter], parameter.dtype]

    def _homes_on(self, device: torch.device) -> Homes:
        if device not in self._homes:
            kind = self._config.host_kind(device.type)
            self._homes[device] = Homes(kind=kind, device=device, of_parameter={})
        return self._homes[device]

    def _engine(self, device: torch.device) -> CopyEngine:
        schedule = CopySchedule(self._config.copy_schedule())
        return engine_of(arena_of(device).device, schedule, self._config.copy_speeds(), False)

    def _finish_copies(self) -> None:
        """Waits on the host for copies that a device may still make."""
        for device in self._homes:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def _kind_on(config: MemoConfig, device: torch.device) -> str:
    """Kind of host memory, as of ``HostStore``, for gradients of ``device``."""
    return config.kind_for_kernels(device.type)


def _options_of(group: dict[str, Any]) -> str:
    """The options that may decide which state there is; the learning rate never does."""
    return repr({name: group[name] for name in group if name not in ("params", "lr", "initial_lr")})


def _require_plain(parameter: torch.Tensor) -> None:
    """Raises ConfigError: the parameter is neither an ordinary tensor nor a DTensor."""
    if type(local_part(parameter)) not in (torch.nn.Parameter, torch.Tensor):
        raise ConfigError(
            f"offload: a parameter is a {type(parameter).__name__}, whose state cannot be kept on "
            "the host yet; leave this optimizer as it is"
        )


def _require_by_elements(optimizer: torch.optim.Optimizer, traits: StateTraits) -> None:
    """Raises ConfigError: the optimizer needs all of a parameter that ranks share."""
    if not traits.is_elementwise:
        raise ConfigError(
            f"offload: {type(optimizer).__name__} updates whole parameters, and one of them is a "
            "DTensor, of which this rank has a part; leave this optimizer as it is"
        )


def _require_dense(parameter: torch.Tensor) -> None:
    """Raises ConfigError: the parameter is a DTensor, or has holes on a device."""
    if is_distributed(parameter):
        raise ConfigError(
            "offload: update='host' does not take the gradients of DTensors; leave it out"
        )
    is_dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    if parameter.device.type != "cpu" and not is_dense:
        raise ConfigError(
            "offload: update='host' copies whole parameters, and one of them has holes between its "
            "numbers; make it contiguous, or leave update='host' out"
        )


def _sums_bytes(parameter: torch.Tensor) -> int:
    """Bytes of sums over the rows and over the columns of each matrix, in float32."""
    if parameter.dim() < 2:
        return 4 * parameter.numel()
    rows, columns = parameter.shape[-2:]
    return 4 * (parameter.numel() // max(1, rows) + parameter.numel() // max(1, columns))


@contextlib.contextmanager
def _passed_on(
    outer: torch.optim.Optimizer, inner: torch.optim.Optimizer, is_on_host: bool
) -> Iterator[None]:
    """Gives ``inner`` for one step what torch.amp.GradScaler has set on ``outer``.

    A fused step divides gradients by ``grad_scale`` itself, and does nothing where ``found_inf``.
    """
    names = [name for name in ("grad_scale", "found_inf") if hasattr(outer, name)]
    for name in names:
        value = getattr(outer, name)
        setattr(inner, name, on_host(value) if is_on_host else value)
    try:
        yield
    finally:
        for name in names:
            delattr(inner, name)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Holds Ctrl-C back: half of an update would be neither the old weights nor the new ones."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if caught:
        handler(*caught[0])
