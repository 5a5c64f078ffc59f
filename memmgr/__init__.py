"""memmgr: trains PyTorch models under a byte budget, with the same bits in every parameter."""

from ._budget import budget, stats
from ._errors import BudgetError, RecomputeError
from ._managed import ManagedTensor, manage

__version__ = "0.1.0"

__all__ = ["BudgetError", "ManagedTensor", "RecomputeError", "__version__", "budget", "manage", "stats"]
