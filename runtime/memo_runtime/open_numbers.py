"""Operators that read an integer while they run, so that one plan serves all of its values.

The longest of packed sequences differs in each batch, and only attention's kernel reads it. It is
given in a tensor on the host, less one: regions are measured on zeros, and kernels refuse a longest
sequence of 0.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

_libraries: list[torch.library.Library] = []  # that keep what they define


def as_tensor(number: int) -> torch.Tensor:
    """Returns the tensor in which ``number`` is given."""
    return torch.tensor([number - 1], device="cpu")


def as_number(value: Any) -> int:
    """Returns the number that is given in a tensor, or as it is."""
    return int(value) + 1 if isinstance(value, torch.Tensor) else int(value)


@functools.cache
def reading(op: torch._ops.OpOverload, names: tuple[str, ...]) -> torch._ops.OpOverload:
    """Returns an overload of ``op`` whose integer arguments ``names`` are given in tensors.

    It has the operator's name, so that what is known of the operator holds for it. Raises
    ValueError: an argument is no plain integer, or a result may share memory with an argument.
    """
    schema, order = op._schema, [argument.name for argument in op._schema.arguments]
    if any(result.alias_info is not None for result in schema.returns):
        raise ValueError(f"{op} may return one of its arguments")
    declared = str(schema)[str(schema).index("(") :]
    for name in names:
        pattern = rf"\bSymInt {name}(=)?(?(1)[^,)]+)(?=[,)])"
        declared, count = re.subn(pattern, rf"Tensor? {name}\1", declared)
        if not count:
            raise ValueError(f"{name} of {op} is no plain integer")
        declared = declared.replace(f"Tensor? {name}=", f"Tensor? {name}=None")

    def calling(number: Callable[[Any], int]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(order, args, strict=False)) | kwargs
            return op(**given | {name: number(given[name]) for name in names})

        return run

    short, overload = op._schema.name.split("::")[1], "_".join(("open", op._overloadname, *names))
    _libraries.append(library := torch.library.Library(op.namespace, "FRAGMENT"))
    library.define(f"{short}.{overload}{declared}", tags=tuple(op.tags))
    library.impl(f"{short}.{overload}", calling(as_number), "CompositeExplicitAutograd")
    name = f"{op.namespace}::{short}.{overload}"
    torch.library.register_fake(name, calling(lambda _: 1), lib=library)
    made: torch._ops.OpOverload = getattr(
        getattr(getattr(torch.ops, op.namespace), short), overload
    )
    return made
