"""Systems that only swap: vDNN, FlashNeuron, SwapAdvisor.

- `vdnn_all`, `vdnn_conv` (Rhu et al., MICRO 2016, section III): while a layer runs forward its input is offloaded, and the layer
  ends when the copy does; in backward the input of the layer before is prefetched while a layer runs. *all*: every layer,
  *conv*: convolutions alone. The choice does not depend on the budget.
- `flashneuron` (Bae et al., FAST 2021, *linear tensor selection*): tensors in the order in which they are made are offloaded
  until the rest fits, or until the copies would take longer than forward computes. Its second phase compresses, and
  that would change bits.
- `swapadvisor` (Huang, Jin, Li, ASPLOS 2020): the victim is the tensor used last (Belady); the tensor used next is read
  as soon as there is room. Its genetic search is over the order of ops and the places in memory; both are given here.

*Known limitations*: a layer is an op. No op runs again, so the outputs of the program itself must fit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from memmgr.policies.rules.directors import DIRECTORS
from memmgr.policies.rules.filters import FILTERS
from memmgr.policies.rules.prefetchers import off
from memmgr.policies.rules.registry import Policy
from memmgr.policies.rules.types import Action
from memmgr.policies.simulate.decided import Accesses
from memmgr.policies.simulate.simulator import DoesNotFit, Run, Simulation, finished
from memmgr.policies.trace import TierLink, Trace

from .chain import Chain
from .copies import Swap, across, around_shortage, with_copies
from .runs import judged, largest_that_fits, refused, runs_of

NEEDS_TIER = "needs a tier below"


def vdnn_all(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Inputs of all layers."""
    return _vdnn("vdnn_all", trace, budget_bytes, tier, lambda name: True)


def vdnn_conv(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Inputs of convolutions."""
    return _vdnn("vdnn_conv", trace, budget_bytes, tier, lambda name: "conv" in name)


def _vdnn(name: str, trace: Trace, budget: int, tier: TierLink | None, layer: Callable[[str], bool]) -> Run:
    if tier is None:
        return refused(name, trace, budget, NEEDS_TIER)
    pairs = across(trace, Accesses.of(trace), Chain(trace).turn)
    inputs = {
        s: (k, back) for s, (k, back) in pairs.items() if trace.storages[s].maker < k and layer(trace.ops[k].name)
    }
    uses = sorted({back for _, back in inputs.values()})
    swaps = [
        Swap(s, out=k - 1, back=back, gone=k, asked=uses[max(bisect_left(uses, back) - 1, 0)])
        for s, (k, back) in inputs.items()
    ]
    return judged(
        name, trace, budget, tier, with_copies(trace, runs_of(range(len(trace.ops)), again=False), swaps, tier)
    )


def flashneuron(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """The shortest list of tensors, in the order of making, that lets the rest fit."""
    if tier is None:
        return refused("flashneuron", trace, budget_bytes, NEEDS_TIER)
    accesses, turn = Accesses.of(trace), Chain(trace).turn
    events = runs_of(range(len(trace.ops)), again=False)
    chosen: list[Swap] = []
    left = accesses.start[turn]
    for s, (k, back) in sorted(across(trace, accesses, turn).items()):
        left -= tier.latency_seconds + trace.storages[s].size_bytes / tier.write_bytes_per_second
        if left < 0:
            break
        chosen.append(Swap(s, k, back))

    def run(fewer: int) -> Run:
        swaps = around_shortage(chosen[: len(chosen) - fewer], accesses.used_bytes, budget_bytes)
        return judged("flashneuron", trace, budget_bytes, tier, with_copies(trace, events, swaps, tier))

    return largest_that_fits(len(chosen) + 1, run)


SWAPADVISOR = Policy("swapadvisor", FILTERS["lru"], DIRECTORS["offload"], off, recomputes=False)


def swapadvisor(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Belady, and prefetching."""
    if tier is None:
        return refused("swapadvisor", trace, budget_bytes, NEEDS_TIER)
    return finished(_Belady(trace, budget_bytes, SWAPADVISOR, tier))


class _Belady(Simulation):
    """A simulation that knows when everything is used next."""

    def __init__(self, trace: Trace, budget_bytes: int, policy: Policy, tier: TierLink | None) -> None:
        super().__init__(trace, budget_bytes, policy, tier)
        self.uses = Accesses.of(trace).ops
        self.orders = sorted((k, s) for s, uses in enumerate(self.uses) for k in uses[1:])

    def _next(self, s: int) -> int:
        at = bisect_left(self.uses[s], self.clock.computed)
        return self.uses[s][at] if at < len(self.uses[s]) else len(self.trace.ops)

    def room(self, need_bytes: int) -> None:
        short = self.clock.used + need_bytes - self.budget
        if short <= 0:
            return
        able = [s for s in self.able().nonzero()[0].tolist() if self.held[s]]
        for s in sorted(able, key=lambda s: -self._next(s)):
            self.leave(s, Action.OFFLOAD)
            if self.clock.used + need_bytes <= self.budget:
                return
        raise DoesNotFit(f"op {self.clock.computed}: {need_bytes} bytes do not fit, and nothing more can leave")

    def prefetch(self, k: int) -> None:
        """Reads the storage that is used next first, as long as the room lasts for it and for the ops until then."""
        room = self.budget - self.clock.used
        made = 0
        for at in range(bisect_right(self.orders, (k, len(self.uses))), len(self.orders)):
            use, s = self.orders[at]
            made = max(made, sum(int(self.size[i]) for i in self.trace.ops[use].outputs))
            if not self.clean[s] or self.resident[s] or not self.held[s]:
                continue
            if made + int(self.size[s]) > room:
                return
            self.read(s)
            room -= int(self.size[s])
