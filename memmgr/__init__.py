"""memmgr: trains PyTorch models under a byte budget, with the same bits in every parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._budget import budget, stats
    from ._errors import BudgetError, RecomputeError
    from ._managed import ManagedTensor, manage

__version__ = "0.1.0"

__all__ = ["BudgetError", "ManagedTensor", "RecomputeError", "__version__", "budget", "manage", "stats"]

# `import torch` imports this package for its entry point (`_environ`), in every process of the environment: what the rest
# costs to load is paid by those who ask for it.
_HOMES = {
    "budget": "_budget",
    "stats": "_budget",
    "BudgetError": "_errors",
    "RecomputeError": "_errors",
    "ManagedTensor": "_managed",
    "manage": "_managed",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
