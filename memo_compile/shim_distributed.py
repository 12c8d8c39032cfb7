"""What memo needs of ``torch.distributed`` that has no public name. Read in 2.11.0 and 2.13.0."""

from datetime import timedelta
from typing import Any

import torch


def ranks_of_group(name: str) -> tuple[int, ...]:
    """The global ranks of the process group that functional collectives call ``name``."""
    names: Any = torch.distributed.distributed_c10d
    group = names._resolve_process_group(name)
    return tuple(torch.distributed.get_process_group_ranks(group))


def tell(key: str, text: str) -> None:
    """Other ranks of this job find ``text`` under ``key``."""
    _store().set(key, text)


def told(key: str, timeout_s: float) -> str | None:
    """What another rank has told under ``key``; None: nothing within so many seconds."""
    try:
        _store().wait([key], timedelta(seconds=max(timeout_s, 0.01)))
    except RuntimeError:  # DistStoreError is one
        return None
    found: bytes = _store().get(key)
    return found.decode()


def _store() -> Any:
    """Where the ranks of the job met."""
    groups: Any = torch.distributed.distributed_c10d
    return groups._get_default_store()
