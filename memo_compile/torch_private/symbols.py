"""Symbolic sizes in torch's shape environments, and fakes with sizes. Read in 2.11.0 and 2.13.0."""

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
from torch.fx.experimental.symbolic_shapes import free_symbols as free_symbols
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only


class SizeSymbols:
    """Sizes that vary, each at least 2, in a shape environment of their own.

    Some may be functions of others, as Dynamo says of inputs of one length.
    """

    def __init__(self, hints: Sequence[int], elsewhere: Sequence[Any] = ()) -> None:
        """``hints`` are their values now; where torch looks at one, it writes a guard.

        ``elsewhere`` are their expressions in another environment, by default a symbol for each:
        sizes that are one symbol there are one here. Raises KeyError: a symbol there is no size.
        """
        self._env = ShapeEnv()
        self._hints = tuple(hints)
        self._free: dict[Any, int] = {}
        """Symbol -> the first position of a size that is this symbol."""
        symbol_here: dict[Any, Any] = {}
        expressions = elsewhere or [sympy.Symbol(f"own_{at}") for at in range(len(self._hints))]
        for at, expression in enumerate(expressions):
            if isinstance(expression, sympy.Symbol) and expression not in symbol_here:
                source = ConstantSource(f"memo_size_{at}")
                symbol_here[expression] = self._env.create_symbol(
                    self._hints[at], source, dynamic_dim=DimDynamic.DYNAMIC
                )
                self._free[symbol_here[expression]] = at
        self._sizes: list[Any] = []
        """Each size as an expression of the symbols."""
        self.values: list[torch.SymInt] = []
        for at, expression in enumerate(expressions):
            symbols = {symbol: symbol_here[symbol] for symbol in expression.free_symbols}
            self._sizes.append(expression.xreplace(symbols))
            value = self._env.create_symintnode(self._sizes[at], hint=self._hints[at])
            assert isinstance(value, torch.SymInt), "a size of at least 2 is a symbol"
            self.values.append(value)
        self.mode = FakeTensorMode(shape_env=self._env)

    def is_free(self) -> bool:
        """False once torch has replaced a symbol by something else, or asserts at run time."""
        return not self._env.replacements and not self._env.deferred_runtime_asserts

    def admits(self, *numbers: int) -> bool:
        """True where all that torch has assumed of the symbols so far holds for ``numbers``."""
        if not self.is_free():
            return False
        values = self._values(numbers)
        bounds = ((self._env.var_to_range[symbol], n) for symbol, n in values.items())
        if not all(bound.lower <= n <= bound.upper for bound, n in bounds):
            return False
        pairs = zip(self._sizes, numbers, strict=True)
        if any(size.xreplace(values) != n for size, n in pairs):
            return False
        return all(guard.expr.xreplace(values) == sympy.true for guard in self._env.guards)

    def at(self, numbers: Sequence[int]) -> Callable[[Any], int]:
        """Returns a function that evaluates numbers and expressions for the sizes ``numbers``.

        It caches each expression. It raises TypeError: an expression has other symbols.
        """
        values = self._values(numbers)
        cache: dict[Any, int] = {}

        def number(value: Any) -> int:
            if isinstance(value, int):
                return value
            expression = expression_of(value)
            if expression not in cache:
                cache[expression] = int(sympy.sympify(expression).xreplace(values))
            return cache[expression]

        return number

    def like(self, value: Any, positions: Mapping[Any, int]) -> Any:
        """Returns a size of another environment in this one.

        ``positions`` has for each symbol there its position here. Raises KeyError: there are more.
        """
        if isinstance(value, int):
            return value
        expression = expression_of(value)
        sizes = {symbol: self._sizes[positions[symbol]] for symbol in expression.free_symbols}
        expression = expression.xreplace(sizes)
        hint = int(expression.xreplace(self._values(self._hints)))
        return self._env.create_symintnode(expression, hint=hint)

    def near(self, numbers: Sequence[int], step: int, sizes: Sequence[Any]) -> tuple[int, ...]:
        """Returns ``numbers`` for a neighbouring length.

        The largest symbol in ``sizes``, and those equal to it, are larger by ``step``.
        """
        values = self._values(numbers)
        symbols = free_symbols(list(sizes))
        largest = max((n for symbol, n in values.items() if symbol in symbols), default=0)
        larger = {symbol: n + step if n == largest else n for symbol, n in values.items()}
        return tuple(int(size.xreplace(larger)) for size in self._sizes)

    def tracing(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, compilations write their assumptions into this environment."""
        return tracing(TracingContext(self.mode))

    def was_used_by(self, graph: Any) -> bool:
        """True for a graph of Inductor's that was lowered inside ``tracing``."""
        return graph.sizevars.shape_env is self._env

    def _values(self, numbers: Sequence[int]) -> dict[Any, Any]:
        return {symbol: sympy.Integer(numbers[at]) for symbol, at in self._free.items()}


def expression_of(value: Any) -> Any:
    """Returns the expression that a size is in its environment; a number as it is."""
    return value.node.expr if isinstance(value, torch.SymInt) else value


@functools.lru_cache(maxsize=4096)
def _first_of(expression: Any) -> Any:
    """Returns one object for equal expressions: sympy compares an object with itself faster."""
    return expression


def plain(value: Any) -> Any:
    """Returns a number as it is, and a symbolic size as its expression."""
    return value if isinstance(value, int) else _first_of(expression_of(value))


class SymbolicLayout(NamedTuple):
    """A tensor's sizes, strides and storage offset, in elements: numbers or expressions."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    start: Any
    dtype: torch.dtype
    device: torch.device


def layout_of(value: Any) -> Any:
    """Returns ``value`` with a ``SymbolicLayout`` for each symbolic fake in it.

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
        """Returns fakes for a result of ``layout_of``, with sizes that ``number`` evaluates."""
        if not isinstance(value, SymbolicLayout):
            several = isinstance(value, tuple | list)
            return type(value)([self.like(item, number) for item in value]) if several else value
        size, stride = ([*map(number, part)] for part in (value.size, value.stride))
        return self.empty(size, stride, number(value.start), dtype=value.dtype, device=value.device)

    def empty(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        start: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> FakeTensor:
        """Returns a fake that begins ``start`` elements behind the beginning of its storage."""
        with no_dispatch():  # through the mode it would take ten times as long
            meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            if start:
                last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
                meta = meta.new_empty(start + last + 1).as_strided(size, stride, start)
            return FakeTensor(self.mode, meta, device)

    def view(
        self, base: FakeTensor, layout: SymbolicLayout, number: Callable[[Any], int]
    ) -> FakeTensor:
        """Returns a view of ``base`` in ``layout``; an operator on fakes would take 3 ms."""
        size, stride = ([*map(number, part)] for part in (layout.size, layout.stride))
        with no_dispatch():
            meta = base.as_strided(size, stride, number(layout.start))
            return FakeTensor(self.mode, meta, base.fake_device)

    def derived(
        self, view: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Returns the result of the operator ``view`` on the fakes in ``args``, of one device."""
        (device,) = {arg.fake_device for arg in args if isinstance(arg, FakeTensor)}

        def fake(meta: torch.Tensor) -> FakeTensor:
            return meta if isinstance(meta, FakeTensor) else FakeTensor(self.mode, meta, device)

        with no_dispatch():  # on the meta tensors themselves, as in ``empty``
            return tree_map_only(torch.Tensor, fake, view(*args, **kwargs))

    @contextlib.contextmanager
    def tracing(self, metadata: Any) -> Iterator[None]:
        """Inside, graphs of these fakes are compiled, with AOTAutograd's ``metadata``.

        As AOTAutograd and ``compile_fx`` call a compiler (2.11, 2.13). The mode of a trace that is
        going on is left: it would refuse these fakes ("Mixing fake modes NYI").
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
    """Returns AOTAutograd's metadata of the graph that is being compiled (2.11, 2.13)."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def note_metadata(metadata: Any) -> None:
    """Sets AOTAutograd's metadata of the graph that is being compiled."""
    context = TracingContext.try_get()
    if context is not None:
        context.fw_metadata = metadata


def metadata_of_inputs(metadata: Any, left_out: Collection[int]) -> Any:
    """Returns ``metadata`` without the inputs ``left_out`` (2.11, 2.13)."""
    changed = copy.copy(metadata)
    infos = enumerate(metadata.input_info)
    changed.input_info = [info for at, info in infos if at not in left_out]
    return changed
