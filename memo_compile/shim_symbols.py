"""A size that is a symbol to torch's shape environment, and what was assumed of it.

Read in torch 2.11.0 and 2.13.0.
"""

import contextlib
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv


class SizeSymbol:
    """One size that varies, at least 2, in a shape environment of its own."""

    def __init__(self, hint: int) -> None:
        """``hint`` is a value that it has; where torch looks at it, it writes a guard."""
        self._env = ShapeEnv()
        source = ConstantSource("memo_size")
        self._symbol = self._env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        self.value = self._env.create_symintnode(self._symbol, hint=hint, source=source)
        self.mode = FakeTensorMode(shape_env=self._env)

    def is_free(self) -> bool:
        """False once torch has put something else in the symbol's place, or asserts at run time."""
        return not self._env.replacements and not self._env.deferred_runtime_asserts

    def admits(self, number: int) -> bool:
        """True where all that was assumed, so far, of the symbol holds for ``number``."""
        bounds = self._env.var_to_range[self._symbol]
        return (
            self.is_free()
            and bool(bounds.lower <= number <= bounds.upper)
            and all(self._replaced(guard.expr, number) == sympy.true for guard in self._env.guards)
        )

    def number(self, value: Any, number: int) -> int:
        """``value``, a number or an expression, where the symbol is ``number``.

        Raises TypeError: it depends on another symbol.
        """
        if isinstance(value, int):
            return value
        expression = value.node.expr if isinstance(value, torch.SymInt) else value
        return int(self._replaced(expression, number))

    def tracing(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, what is compiled keeps its assumptions in this environment."""
        return tracing(TracingContext(self.mode))

    def was_used_by(self, graph: Any) -> bool:
        """True for a graph of Inductor's that was lowered inside ``tracing``."""
        return graph.sizevars.shape_env is self._env

    def _replaced(self, expression: Any, number: int) -> Any:
        return sympy.sympify(expression).xreplace({self._symbol: sympy.Integer(number)})
