"""Runs a script up to its first training step, and hands that call over instead of running it.

While the script runs, ``torch.compile(..., backend="memo")`` returns a stand-in. Its first call
with gradients is handed over with its arguments, in the script's own context (autocast, hooks,
attention kernels), and then ends the script.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from memo_compile.backends import entry
from memo_compile.errors import InputError
from memo_compile.offline.script import EnoughError, run_script


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCall:
    """The function that a script compiled for memo, and the arguments of its first call."""

    function: Callable[..., Any]
    """The script's own: a module, or a function that makes the loss."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any] | None
    mode: str | None

    @property
    def name(self) -> str:
        """Returns the module's class, or the function's name."""
        return _name(self.function)

    @property
    def module(self) -> torch.nn.Module | None:
        """Returns the model, where it is what was compiled."""
        return self.function if isinstance(self.function, torch.nn.Module) else None


def at_first_call(
    script: Path, arguments: list[str], take: Callable[[FirstCall], None]
) -> int | None:
    """Runs ``script`` up to its first training step and hands that to ``take``.

    Returns the script's exit code where it ended before, else None. Raises InputError: the script
    compiles several things for memo, so that no call is the step; and what ``take`` raises.
    """
    watch = _Watch(take)
    with watch.watching():
        code = run_script(script, arguments, passes=(EnoughError,))
    if watch.error is not None:
        raise watch.error
    return None if watch.is_taken else code


@dataclass
class _Watch:
    """Replaces torch.compile where the backend is memo, and waits for the first training call."""

    take: Callable[[FirstCall], None]
    is_taken: bool = False
    error: Exception | None = None
    """What ``take`` raised."""
    compiled: list[str] = field(default_factory=list)
    """Names of all that the script compiles for memo."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, torch.compile is replaced."""
        original = torch.compile
        setattr(torch, "compile", self._standing_in(original))  # noqa: B010 - replaced on purpose
        try:
            yield
        finally:
            setattr(torch, "compile", original)  # noqa: B010

    def _standing_in(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what stands for torch.compile, ``original``: other backends get that itself."""

        @functools.wraps(original)
        def compile(model: Any = None, **settings: Any) -> Any:
            if settings.get("backend") not in ("memo", entry.memo):
                return original(model, **settings)
            if model is None:  # a decorator
                return functools.partial(compile, **settings)
            return self._caught(model, original, settings)

        return compile

    def _caught(
        self, model: Any, original: Callable[..., Any], settings: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Returns the stand-in that the script gets for the compiled ``model``."""
        owner = getattr(model, "__self__", None)
        # module.compile() compiles the module's method _call_impl, in place.
        in_place = isinstance(owner, torch.nn.Module) and model.__name__ == "_call_impl"
        function: Any = owner if in_place else model
        self.compiled.append(_name(function))

        def call(*args: Any, **kwargs: Any) -> Any:
            """Hands the first call that trains over, and ends the script; runs others eagerly."""
            trains = not isinstance(function, torch.nn.Module) or any(
                parameter.requires_grad for parameter in function.parameters()
            )
            if self.is_taken or not trains or not torch.is_grad_enabled():
                return model(*args, **kwargs)
            if in_place:
                function._compiled_call_impl = None  # which would lead back here
            options, mode = settings.get("options"), settings.get("mode")
            self._take(
                FirstCall(function=function, args=args, kwargs=kwargs, options=options, mode=mode)
            )
            raise EnoughError

        if not isinstance(model, torch.nn.Module):
            return functools.wraps(model)(call)
        stand_in: Any = original(model, backend="eager")  # a module with ``model``'s attributes
        stand_in.forward = call
        return stand_in

    def _take(self, call: FirstCall) -> None:
        """Hands ``call`` over to ``take``, and keeps what that raises."""
        self.is_taken = True
        try:
            self._require_one()
            self.take(call)
        except Exception as error:  # raised again where the script cannot catch it
            self.error = error

    def _require_one(self) -> None:
        """Raises InputError where several things are compiled, of which none is the whole step."""
        if len(self.compiled) > 1:
            names = ", ".join(sorted(set(self.compiled)))
            raise InputError(
                f"the script compiles {len(self.compiled)} things for memo ({names}), and the "
                "memory of one does not tell that of the step; compile the whole model, or the "
                "function that makes the loss, once"
            )


def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, torch.nn.Module):
        return type(function).__name__
    return str(getattr(function, "__qualname__", type(function).__name__))


def parameter_names(function: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Returns the names of the first ``count`` positional parameters; numbers: unknown."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = [*inspect.signature(called).parameters.values()]
    except (TypeError, ValueError):  # of a function in C
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    return tuple(names[i] if i < len(names) else str(i) for i in range(count))
