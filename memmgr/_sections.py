"""Sections that end whatever happens in them, for where there is no compiler: the shim's are of the same names.

*Known limitation*: an interrupt that comes as Python enters `__exit__` keeps these from their work; the shim's are one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

C: Any = torch._C


class Below:
    """As it was recorded: below autograd and autocast, no mode, no gradient (rule 5).

    Args:
        recomputing: what is allocated in it is a replay's.
        told: called with that, returns what it was; None: nobody wants to know.
    """

    __slots__ = ("_before", "_grad", "_guards", "_recomputing", "_told")

    def __init__(self, recomputing: bool = False, told: Callable[[bool], bool] | None = None) -> None:
        self._recomputing = recomputing
        self._told = told if recomputing else None
        self._before: bool | None = None
        self._guards: list[Any] = []

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        try:
            C._set_grad_enabled(False)
            if self._told is not None:
                self._before = False
                self._before = self._told(True)
            self._guards = [C._DisableTorchDispatch()]
            for guard in (C._AutoDispatchBelowAutograd(), C._DisableAutocast()):
                guard.__enter__()
                self._guards.append(guard)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        for guard in reversed(self._guards[1:]):
            guard.__exit__(None, None, None)
        self._guards = []
        C._set_grad_enabled(self._grad)
        if self._told is not None and self._before is not None:
            self._told(self._before)


class Finally:
    """Calls what it is given, at its end; again if an interrupt came in it."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        late: BaseException | None = None
        for _ in range(100):
            try:
                self._call()
                break
            except Exception:
                raise
            except BaseException as interrupt:
                late = interrupt
        if late is not None:
            raise late


__all__ = ["Below", "Finally"]
