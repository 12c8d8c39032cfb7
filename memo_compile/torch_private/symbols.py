"""Sizes that are symbols to torch's shape environment, and what was assumed of them.

Read in torch 2.11.0 and 2.13.0.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import compiled_autograd
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only


class SizeSymbols:
    """Sizes that vary, each at least 2, in a shape environment of their own.

    Some may be functions of others, as Dynamo says of inputs of one length.
    """

    def __init__(self, hints: Sequence[int], said: Sequence[Any] = ()) -> None:
        """``hints`` are values that they have; where torch looks at one, it writes a guard.

        ``said`` is what each is in another environment, by default a symbol of its own: sizes that
        are one symbol there are one here. Raises KeyError: one depends on what is none of them.
        """
        self._env = ShapeEnv()
        self._hints = tuple(hints)
        self._free: dict[Any, int] = {}
        """Each symbol, and the first position that is it."""
        own: dict[Any, Any] = {}
        found = said or [sympy.Symbol(f"own_{at}") for at in range(len(self._hints))]
        for at, expression in enumerate(found):
            if isinstance(expression, sympy.Symbol) and expression not in own:
                source = ConstantSource(f"memo_size_{at}")
                own[expression] = self._env.create_symbol(
                    self._hints[at], source, dynamic_dim=DimDynamic.DYNAMIC
                )
                self._free[own[expression]] = at
        self._sizes: list[Any] = []
        """What each is of the symbols."""
        self.values: list[torch.SymInt] = []
        for at, expression in enumerate(found):
            put = {symbol: own[symbol] for symbol in expression.free_symbols}
            self._sizes.append(expression.xreplace(put))
            value = self._env.create_symintnode(self._sizes[at], hint=self._hints[at])
            assert isinstance(value, torch.SymInt), "a size of at least 2 is a symbol"
            self.values.append(value)
        self.mode = FakeTensorMode(shape_env=self._env)

    def is_free(self) -> bool:
        """False once torch has put something else in a symbol's place, or asserts at run time."""
        return not self._env.replacements and not self._env.deferred_runtime_asserts

    def admits(self, *numbers: int) -> bool:
        """True where all that was assumed, so far, of the symbols holds for ``numbers``."""
        if not self.is_free():
            return False
        put = self._put(numbers)
        bounds = ((self._env.var_to_range[symbol], n) for symbol, n in put.items())
        if not all(bound.lower <= n <= bound.upper for bound, n in bounds):
            return False
        pairs = zip(self._sizes, numbers, strict=True)
        if any(size.xreplace(put) != n for size, n in pairs):
            return False
        return all(guard.expr.xreplace(put) == sympy.true for guard in self._env.guards)

    def number(self, value: Any, *numbers: int) -> int:
        """``value``, a number or an expression, where the symbols are ``numbers``.

        Raises TypeError: it depends on another symbol.
        """
        if isinstance(value, int):
            return value
        return int(sympy.sympify(_expression(value)).xreplace(self._put(numbers)))

    def at(self, numbers: Sequence[int]) -> Callable[[Any], int]:
        """``number`` for these; each expression is evaluated once."""
        put = self._put(numbers)
        known: dict[Any, int] = {}

        def number(value: Any) -> int:
            if isinstance(value, int):
                return value
            expression = _expression(value)
            found = known.get(expression)
            if found is None:
                found = known[expression] = int(sympy.sympify(expression).xreplace(put))
            return found

        return number

    def like(self, value: Any, others: Mapping[Any, int]) -> Any:
        """A size of another environment in this one.

        ``others`` are symbols there, each with the position of its own here. Raises KeyError:
        there are more.
        """
        if isinstance(value, int):
            return value
        expression = _expression(value)
        put = {symbol: self._sizes[others[symbol]] for symbol in expression.free_symbols}
        own = expression.xreplace(put)
        hint = int(own.xreplace(self._put(self._hints)))
        return self._env.create_symintnode(own, hint=hint)

    def near(self, numbers: Sequence[int], more: int, sizes: Sequence[Any]) -> tuple[int, ...]:
        """``numbers`` where the largest symbol of ``sizes``, and its equals, grow by ``more``."""
        put = self._put(numbers)
        used = {
            symbol for size in sizes for symbol in getattr(_expression(size), "free_symbols", ())
        }
        largest = max((n for symbol, n in put.items() if symbol in used), default=0)
        other = {symbol: n + more if n == largest else n for symbol, n in put.items()}
        return tuple(int(size.xreplace(other)) for size in self._sizes)

    def tracing(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, what is compiled keeps its assumptions in this environment."""
        return tracing(TracingContext(self.mode))

    def was_used_by(self, graph: Any) -> bool:
        """True for a graph of Inductor's that was lowered inside ``tracing``."""
        return graph.sizevars.shape_env is self._env

    def _put(self, numbers: Sequence[int]) -> dict[Any, Any]:
        return {symbol: sympy.Integer(numbers[at]) for symbol, at in self._free.items()}


def expression_of(value: torch.SymInt) -> Any:
    """What a size is in its environment."""
    return value.node.expr


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else value


@functools.lru_cache(maxsize=4096)
def _first_of(expression: Any) -> Any:
    """The first of equal expressions, which sympy sees faster to equal itself than another."""
    return expression


def plain(value: Any) -> Any:
    """A number, or the expression that a size is."""
    return value if isinstance(value, int) else _first_of(_expression(value))


class SymbolicLayout(NamedTuple):
    """A tensor's sizes, strides and beginning, in elements: numbers or expressions."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    start: Any
    dtype: torch.dtype
    device: torch.device


def layout_of(value: Any) -> Any:
    """The ``SymbolicLayout`` of a symbolic fake, or of each of several; what is no tensor stays.

    Raises TypeError: a tensor has no strides.
    """
    if isinstance(value, tuple | list):
        return type(value)([layout_of(item) for item in value])
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided:
        raise TypeError(f"a value is {value.layout}")
    size, stride = (tuple(map(plain, part)) for part in (value.shape, value.stride()))
    return SymbolicLayout(size, stride, plain(value.storage_offset()), value.dtype, value.device)


class StaticFakes:
    """Fake tensors whose sizes are numbers, in a mode of their own."""

    def __init__(self) -> None:
        # Without a shape environment Inductor caches no graph.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def like(self, value: Any, number: Callable[[Any], int]) -> Any:
        """What lies as ``layout_of`` says, with sizes that ``number`` evaluates."""
        if not isinstance(value, SymbolicLayout):
            several = isinstance(value, tuple | list)
            return type(value)([self.like(item, number) for item in value]) if several else value
        size, stride = ([*map(number, part)] for part in (value.size, value.stride))
        return self.made(size, stride, number(value.start), dtype=value.dtype, device=value.device)

    def made(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        start: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> FakeTensor:
        """A tensor that begins ``start`` elements behind the beginning of its memory."""
        with no_dispatch():  # through the mode it would take ten times as long
            meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            if start:
                last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
                meta = meta.new_empty(start + last + 1).as_strided(size, stride, start)
            return FakeTensor(self.mode, meta, device)

    def view(
        self, of: FakeTensor, said: SymbolicLayout, number: Callable[[Any], int]
    ) -> FakeTensor:
        """Elements of ``of``, which lie as ``said``.

        An operator takes 3 ms for sizes that it has not seen.
        """
        size, stride = ([*map(number, part)] for part in (said.size, said.stride))
        with no_dispatch():
            meta = of.as_strided(size, stride, number(said.start))
            return FakeTensor(self.mode, meta, of.fake_device)

    def derived(
        self, view: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What the operator ``view`` shows of the fakes among ``args``, all of one device."""
        (device,) = {of.fake_device for of in args if isinstance(of, FakeTensor)}

        def fake(shown: torch.Tensor) -> FakeTensor:
            return shown if isinstance(shown, FakeTensor) else FakeTensor(self.mode, shown, device)

        with no_dispatch():  # on the meta tensors themselves, as in ``made``
            return tree_map_only(torch.Tensor, fake, view(*args, **kwargs))

    @contextlib.contextmanager
    def tracing(self, metadata: Any) -> Iterator[None]:
        """Inside, graphs of these are compiled, which AOTAutograd says ``metadata`` of.

        As AOTAutograd and ``compile_fx`` call a compiler (2.11, 2.13). The mode of a trace that is
        going on is left, which would refuse these fakes ("Mixing fake modes NYI").
        """
        context = TracingContext(self.mode)
        context.fw_metadata = metadata
        with (
            unset_fake_temporarily(),
            tracing(context),
            V.set_fake_mode(self.mode),
            enable_python_dispatcher(),
            compiled_autograd._disable(),
            torch.no_grad(),
            torch._C._DisableAutocast(),
        ):
            yield


def known_metadata() -> Any:
    """What AOTAutograd says of the graph that is being compiled (2.11, 2.13)."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def note_metadata(metadata: Any) -> None:
    """As if AOTAutograd had said ``metadata`` of the graph that is being compiled."""
    context = TracingContext.try_get()
    if context is not None:
        context.fw_metadata = metadata


def metadata_of_inputs(metadata: Any, left_out: Collection[int]) -> Any:
    """What AOTAutograd knows of a graph, as if it had no inputs ``left_out`` (2.11, 2.13)."""
    known = copy.copy(metadata)
    infos = enumerate(metadata.input_info)
    known.input_info = [info for at, info in infos if at not in left_out]
    return known
