"""memmgr: trains PyTorch models under a byte budget, with the same bits in every parameter."""

from __future__ import annotations

import os
import sys

# Instead of typing's: its import would take most of the time before an interrupt of the command is one line.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .api.budget import budget, explain, stats
    from .api.manage import ManagedTensor, manage
    from .api.pin import pin
    from .common.errors import BudgetError, RankError, RecomputeError

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ManagedTensor",
    "RankError",
    "RecomputeError",
    "__version__",
    "budget",
    "explain",
    "manage",
    "pin",
    "stats",
]

# `import torch` imports this package for its entry point (`_environ`), in every process of the environment. The other
# modules are loaded at their first use, so that only programs that use them pay for it.
_HOMES = {
    "budget": "api.budget",
    "explain": "api.budget",
    "stats": "api.budget",
    "BudgetError": "common.errors",
    "RankError": "common.errors",
    "RecomputeError": "common.errors",
    "ManagedTensor": "api.manage",
    "manage": "api.manage",
    "pin": "api.pin",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise _explained(error) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _explained(error: Exception) -> Exception:
    """In a checkout the folder ./memmgr hides the package that is installed, and is only a part of it."""
    if getattr(error, "name", None) not in ("memmgr.policies", "memmgr.tools"):
        return error
    return ImportError(
        f"this memmgr is a folder of its sources ({__path__[0]}), and hides the one that is installed: run the script from "
        "another folder, or with python -P"
    )


def _install() -> None:
    """Enables the dispatch key (`native.dispatch`), and CUDA's allocator where there is CUDA (`native.cuda`). torch is there."""
    torch = sys.modules["torch"]
    from .config.torch_versions import unfit
    from .native import dispatch
    from .readers import works
    from .readers.exported import exported

    if not unfit(torch.__version__):
        dispatch.include()
        exported.begin()
        works.begin()
    if torch.version.cuda is None or not torch.backends.cuda.is_built():
        return
    from .native import cuda

    cuda.install()


def _torch_is_loading() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


# Did the script ask for us, or torch, for its entry point? An `import memmgr` before torch's is finished by `_environ`.
_wanted = not _torch_is_loading()
if _wanted and "torch" in sys.modules:
    _install()
if _wanted and "MEMMGR_BUDGET" not in os.environ and ("MEMMGR_CONF" in os.environ or "MEMMGR_DISK" in os.environ):
    from .config.conf import warn_if_wrong

    warn_if_wrong()
