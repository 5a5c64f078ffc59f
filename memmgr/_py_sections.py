"""Sections that end whatever happens in them, for where there is no compiler: the shim's are of the same names.

A signal that comes while one of these functions begins or runs is put off (`_py_signals`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from ._py_versions import C

# A backward may run inside vmap (is_grads_batched, torch.func.vmap over a backward); the recorded op did not.
_TRANSFORMS = functools.reduce(
    operator.or_,
    (
        C.DispatchKeySet(C._dispatch_key_parse(name))
        for name in (
            "FuncTorchDynamicLayerFrontMode",
            "FuncTorchDynamicLayerBackMode",
            "FuncTorchBatched",
            "FuncTorchVmapMode",
            "FuncTorchGradWrapper",
            "Batched",
            "VmapMode",
        )
    ),
)


class Below:
    """As it was recorded: below autograd and autocast, no mode, no layer of a functorch transform, no gradient (rule 5).

    Args:
        told: called with True, and at the end with what it returned then; None: nobody wants to know.
    """

    __slots__ = ("_before", "_grad", "_guards", "_told")

    def __init__(self, told: Callable[[bool], bool] | None = None) -> None:
        self._told = told

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        C._set_grad_enabled(False)
        self._guards: Any = (
            C._DisableTorchDispatch(),
            C._AutoDispatchBelowAutograd(),
            C._DisableAutocast(),
            C._ExcludeDispatchKeyGuard(_TRANSFORMS),
        )
        for guard in self._guards[1:]:
            guard.__enter__()
        if self._told is not None:
            self._before = self._told(True)

    def __exit__(self, *exc: object) -> None:
        if self._told is not None:
            self._told(self._before)
        for guard in reversed(self._guards[1:]):
            guard.__exit__(None, None, None)
        self._guards = ()
        C._set_grad_enabled(self._grad)


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
