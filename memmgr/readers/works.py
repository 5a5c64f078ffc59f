"""Collectives that began while no budget was open. Their backend has the addresses of tensors (rule 3).

From `import memmgr` on, the works that process groups and their backends return are noted, weakly. A budget that opens before
one of them has ended keeps all tensors from before it where they are: a work does not tell its tensors. Inside of a budget
the pager pins a collective's tensors until its end.

Known limitations: a work from before `import memmgr` is not known, nor is one that nobody holds.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

_begun: dict[int, weakref.ref[Any]] = {}
"""The works that live, by their ids: another thread may begin one while they are looked through."""


def begin() -> None:
    """Notes works from now on. Only once a process."""
    if not torch.distributed.is_available():
        return
    c10d: Any = torch._C._distributed_c10d
    if hasattr(c10d.ProcessGroup.allreduce, "_memmgr"):
        return
    for owner in (c10d.ProcessGroup, c10d.Backend):
        for name, method in list(vars(owner).items()):
            if "-> c10d::Work" in (getattr(method, "__doc__", None) or ""):
                setattr(owner, name, _noting(method))


def under_way() -> bool:
    """Has a work that is known not ended? One of a functional collective counts until it has been waited for."""
    if not torch.distributed.is_available():
        return False
    registered = getattr(torch._C._distributed_c10d, "_get_work_registry_size", int)
    return registered() > 0 or any(
        (work := living()) is not None and not work.is_completed() for living in list(_begun.values())
    )


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def begin_work(*args: Any, **kwargs: Any) -> Any:
        work = original(*args, **kwargs)
        if work is not None:
            key = id(work)
            _begun[key] = weakref.ref(work, lambda _: _begun.pop(key, None))
        return work

    begin_work._memmgr = True  # type: ignore[attr-defined]
    return begin_work
