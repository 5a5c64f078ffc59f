"""Version counters as Python can get at them (rule 3)."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch

C: Any = torch._C

_set_version = C._autograd._unsafe_set_version_counter
_get_version: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_ADINPLACE = C.DispatchKey.ADInplaceOrView
_empty: dict[torch.device, torch.Tensor] = {torch.device("cpu"): torch.empty(0)}


def quiet() -> Any:
    """While the result lives, this thread's ops do not reach any dispatch mode."""
    return C._DisableTorchDispatch()


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of zero bytes with the version counter of `tensor`: it keeps no memory alive."""
    empty = _empty.get(tensor.device)
    if empty is None:
        silence = quiet()
        empty = _empty[tensor.device] = torch.empty(0, device=tensor.device)
        del silence
    return under_counter(tensor, empty)


def bytes_of(storage: Any) -> torch.Tensor:
    """All of it, as a tensor."""
    silence = quiet()
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    del silence
    return tensor


def under_counter(twin: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` once more, with the version counter of `twin`.

    Sharing the counter is the work of a dispatch layer that is switched off inside a dispatch mode.
    """
    silence = quiet()
    with C._SetExcludeDispatchKeyGuard(_ADINPLACE, False):
        out = twin.detach()
    out.data = tensor
    del silence
    return out


def same_counter(twin: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Torch does not show the counter itself, so it is moved, looked at and put back. Callers hold the lock.

    The three steps are one call into C, so that no other thread of Python's, and no signal, comes between them.
    """
    now = twin._version
    if tensor._version != now:
        return False
    steps = (
        partial(_set_version, (twin,), (now + 1,)),
        partial(_get_version, tensor),
        partial(_set_version, (twin,), (now,)),
    )
    _, seen, _ = map(operator.call, steps)
    return bool(seen != now)


class Version:
    """A version counter, the value at which the cell's bytes were seen, and whether autograd would look at it."""

    __slots__ = ("at", "saved", "twin")

    def __init__(self, tensor: torch.Tensor, saved: bool = False) -> None:
        self.twin = alias(tensor)
        self.at = self.twin._version
        self.saved = saved

    def copy(self) -> Version:
        """The same counter and value, for another cell."""
        other = Version.__new__(Version)
        other.twin, other.at, other.saved = self.twin, self.at, self.saved
        return other
