"""What memo needs of ``torch.distributed`` that has no public name. Read in 2.11.0 and 2.13.0."""

from collections.abc import Sequence
from typing import Any

import torch


def num_ranks() -> int:
    """Ranks of the process group; 0 without one."""
    distributed = torch.distributed
    has_group = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if has_group else 0


def ranks_of_group(name: str) -> tuple[int, ...]:
    """The global ranks of the process group that functional collectives call ``name``."""
    names: Any = torch.distributed.distributed_c10d
    group = names._resolve_process_group(name)
    return tuple(torch.distributed.get_process_group_ranks(group))


def backend_of_group(name: str) -> str:
    """``gloo``, ``nccl`` ...: what carries that group's collectives."""
    names: Any = torch.distributed.distributed_c10d
    return str(torch.distributed.get_backend(names._resolve_process_group(name)))


def tell(key: str, text: str) -> None:
    """Other ranks of this job find ``text`` under ``key``."""
    _store().set(key, text)


def tell_first(key: str, text: str) -> str:
    """What stands under ``key`` for good: ``text``, unless another rank was first."""
    found: bytes = _store().compare_set(key, "", text)
    return found.decode()


def are_told(keys: Sequence[str]) -> bool:
    """True where something is told under each of ``keys``."""
    return bool(_store().check(list(keys)))


def told(key: str) -> str | None:
    """What another rank has told under ``key``; None: nothing."""
    if not are_told([key]):
        return None
    found: bytes = _store().get(key)
    return found.decode()


def take_back(key: str) -> None:
    """Nothing is told under ``key`` any more."""
    _store().delete_key(key)


def next_number(key: str) -> int:
    """One more than any rank was given before under ``key``."""
    number: int = _store().add(key, 1)
    return number


def _store() -> Any:
    """Where the ranks of the job met."""
    groups: Any = torch.distributed.distributed_c10d
    return groups._get_default_store()
