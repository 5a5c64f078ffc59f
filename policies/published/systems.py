"""Published systems by name, for the simulator. `memmgr.runtime.planners` has those that also run live."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import TierLink, Trace

from .autotm import autotm
from .capuchin import capuchin
from .checkmate import checkmate, moccasin
from .checkpointing import chen_greedy, sqrt_n
from .coop import coop
from .delta import delta_online, delta_taco
from .pofo import pofo
from .rockmate import rockmate
from .rotor import rotor
from .states import MODEL_STATE_SYSTEMS
from .superneurons import superneurons
from .swapping import flashneuron, swapadvisor, vdnn_all, vdnn_conv
from .tcontrol import tcontrol
from .tsplit import tsplit

System = Callable[[Trace, int, TierLink | None], Run]
"""(a pass, budget in bytes, tier) -> its run."""

EITHER: MappingProxyType[str, System] = MappingProxyType(
    {
        "capuchin": capuchin,
        "delta_paper": delta_online,
        "delta_taco": delta_taco,
        "superneurons": superneurons,
        "tsplit": tsplit,
    }
)
"""With a tier below or without one."""

RECOMPUTING: MappingProxyType[str, System] = MappingProxyType(
    {
        "sqrt_n": sqrt_n,
        "chen_greedy": chen_greedy,
        "coop": coop,
        "tcontrol": tcontrol,
        "checkmate": checkmate,
        "moccasin": moccasin,
        "rotor": rotor,
        "rockmate": rockmate,
    }
)
"""These run again the ops of dropped storages; a tier is not used."""

OFFLOADING: MappingProxyType[str, System] = MappingProxyType(
    {
        "pofo": pofo,
        "vdnn_all": vdnn_all,
        "vdnn_conv": vdnn_conv,
        "flashneuron": flashneuron,
        "swapadvisor": swapadvisor,
        "autotm": autotm,
    }
)
"""Need a tier below."""

PUBLISHED: MappingProxyType[str, System] = MappingProxyType(
    {**EITHER, **RECOMPUTING, **OFFLOADING, **MODEL_STATE_SYSTEMS}
)


def applicable(trace: Trace, tier: TierLink | None) -> list[str]:
    """The names of those that have something to do here: model states move in a cycle with a tier alone."""
    if tier is None:
        return [*EITHER, *RECOMPUTING]
    return [*EITHER, *OFFLOADING, *(MODEL_STATE_SYSTEMS if trace.cycle else ())]
