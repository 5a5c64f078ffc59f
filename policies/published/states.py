"""Published systems that move model states, by name."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import TierLink, Trace

from .patrickstar import patrickstar
from .streaming import l2l, zero_infinity, zero_offload

MODEL_STATE_SYSTEMS: MappingProxyType[str, Callable[[Trace, int, TierLink | None], Run]] = MappingProxyType(
    {"zero_offload": zero_offload, "zero_infinity": zero_infinity, "patrickstar": patrickstar, "l2l": l2l}
)
"""(a pass that is a cycle, budget in bytes, tier) -> its run; `rules.registry` has the names as policies."""
