"""The handle: a tensor that autograd saves for a lease, and that ends the lease when it is freed.

The handle is a small tensor whose numbers, 0 and 1, are the lease's number in binary: a packer of
saved tensors that copies it, pickles it, or stores it as float8, gives it back unharmed. Its memory
belongs to a Python object with a finalizer. Without saved-tensor hooks the lease ends when autograd
frees that memory.

With hooks a packer may keep the handle, or store a copy and drop the handle (``save_on_cpu``), or
drop it and run the forward again (``torch.utils.checkpoint``). A copy must be read. So a handle
that nobody has read ends its lease when it is dropped; behind one that was read a copy may exist,
and the lease ends with the node of autograd's graph whose backward it is for.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

NUM_BITS = 64
"""How many numbers a handle has."""

_NODE = "CompiledFunctionBackward"
"""AOTAutograd's name of the node of a graph."""


class _Tag(bytearray):
    """The memory of a handle, which can be watched by a finalizer."""


class HandleLife:
    """Ends a lease when no backward can come: when the handle's memory is freed, or this object."""

    __slots__ = ("__weakref__", "_end", "_with_memory")

    def __init__(self, tag: _Tag, end: Callable[[], None]) -> None:
        self._end = end
        self._with_memory = weakref.finalize(tag, end)
        self._with_memory.atexit = False

    def was_read(self) -> None:
        """Notes that a copy of the handle may exist: then freeing its memory ends nothing."""
        if self._with_memory.detach() is not None:
            weakref.finalize(self, self._end).atexit = False


class Handle(torch.Tensor):
    """A handle that notes whether it is read; what shares its memory is a handle as well."""

    plain: torch.Tensor
    life: HandleLife

    @staticmethod
    def __new__(cls, plain: torch.Tensor, life: HandleLife) -> "Handle":
        """``plain``, watched."""
        handle: Handle = torch.Tensor._make_subclass(cls, plain)
        handle.plain, handle.life = plain, life
        return handle

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator on the plain tensors."""
        arguments = (args, kwargs or {})
        handles = [value for value in pytree.tree_leaves(arguments) if isinstance(value, Handle)]
        args, kwargs = pytree.tree_map_only(Handle, lambda value: value.plain, arguments)
        result = func(*args, **kwargs)
        for handle in handles:
            if result is handle.plain:
                return handle
            if isinstance(result, torch.Tensor) and _share_memory(result, handle.plain):
                return Handle(result, handle.life)
            handle.life.was_read()
        return result


def _share_memory(value: torch.Tensor, other: torch.Tensor) -> bool:
    return value.untyped_storage()._cdata == other.untyped_storage()._cdata


def _reader(name: str) -> Callable[..., Any]:
    """A method of tensors that reads memory without calling an operator."""

    def read(handle: Handle, *args: Any, **kwargs: Any) -> Any:
        handle.life.was_read()
        return getattr(handle.plain, name)(*args, **kwargs)

    return read


_READERS = "numpy tolist data_ptr untyped_storage storage __array__ __dlpack__ __repr__"
for _name in (*_READERS.split(), "__deepcopy__", "__reduce_ex__"):
    setattr(Handle, _name, _reader(_name))


class _Watched(threading.local):
    lives: list[HandleLife] | None = None
    """Of handles that this thread made in the call of a graph that runs under hooks."""


_watched = _Watched()


def make_handle(number: int, end: Callable[[], None]) -> torch.Tensor:
    """Returns the handle of lease ``number``; calls ``end`` when no backward of it can come."""
    tag = _Tag(map(int, f"{number:0{NUM_BITS}b}"))
    plain = torch.frombuffer(tag, dtype=torch.uint8)
    plain.memo_life = HandleLife(tag, end)  # type: ignore[attr-defined]
    return plain


def watch_handles(results: list[Any]) -> None:
    """Replaces each plain handle among ``results`` by a ``Handle``, if hooks will pack it."""
    if _watched.lives is None:
        return
    for at, value in enumerate(results):
        life = getattr(value, "memo_life", None)
        if life is not None:
            results[at] = Handle(value, life)
            _watched.lives.append(life)


def plain_handle(value: Any) -> Any:
    """Returns ``value``; a ``Handle`` as its plain tensor."""
    return value.plain if isinstance(value, Handle) else value


def number_of(handle: torch.Tensor) -> int:
    """Reads the lease's number from a handle, or from what a packer has made of it."""
    numbers = plain_handle(handle).detach().cpu().flatten().tolist()
    return sum(1 << at for at, bit in enumerate(reversed(numbers)) if bit > 0.5)


def hooks_pack() -> bool:
    """True where hooks pack what autograd saves now: it may keep copies, or nothing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def under_hooks(run: Callable[..., Any], *args: Any) -> Any:
    """Runs a graph by ``run`` of AOTAutograd, on ``args``; returns the results.

    Under saved-tensor hooks the lives of its handles are kept by its node of autograd's graph.
    """
    if not hooks_pack():
        return run(*args)
    before, _watched.lives = _watched.lives, []
    try:
        results = run(*args)
        lives = _watched.lives
    finally:
        _watched.lives = before
    if lives and (node := _node_of(results)) is not None:
        node.metadata["memo"] = lives
    return results


def _node_of(results: Any) -> Any:
    """Finds the autograd node of the graph with ``results``; nodes of views may be in front."""
    tensors = (value for value in pytree.tree_leaves(results) if isinstance(value, torch.Tensor))
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop(0)
        if node.name() == _NODE:
            return node
        if id(node) not in seen:
            seen.add(id(node))
            waiting += (before for before, _ in node.next_functions if before is not None)
    return None
