"""Every wait and every deferral of memmgr/tiers/host.py, by the name of its call site, and how to switch one off.

test_mutations.py shows for each that the workload gives wrong bytes without it, and checks against the source that none
is missing here. Production code has no switch: `MutantTier` overrides the three helpers that all waits go through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memmgr.tiers.host import HostTier
from memmgr.tiers.streams import Block, Event, Stream, StreamApi


@dataclass(frozen=True)
class Mutation:
    """One call to leave out.

    Attributes:
        site: the name at the call.
        helper: which of the tier's three ways to order work it uses.
        harm: what goes wrong without it.
    """

    site: str
    helper: str
    harm: str


MUTATIONS = [
    Mutation("offload.last_write", "_wait", "the slot gets the bytes from before the op that made the cell"),
    Mutation("offload.touched", "_wait", "the slot misses what a raw kernel on another stream wrote"),
    Mutation(
        "offload.slot_reuse", "_wait", "a reload still running from the slot's former owner gets the new owner's bytes"
    ),
    Mutation("offload.source", "_free_after", "the dropped block is reused while it is still being read out"),
    Mutation("overwrite.write_done", "_wait", "the old version's slot gets bytes of the new version"),
    Mutation("drop.used", "_free_after", "the dropped block is reused while another stream still reads it"),
    Mutation("reload.allocated", "_wait", "the copy lands in memory that its former owner still uses"),
    Mutation("reload.write_done", "_wait", "the reload takes host bytes that have not arrived yet"),
    Mutation(
        "reload.target", "_free_after", "a prefetched block, dropped unused, is filled after its memory was reused"
    ),
    Mutation("reload.use", "_wait", "the consumer reads the block before it is filled"),
    Mutation("wait.write_done", "_synchronize", "wait() returns before the host bytes are there"),
    Mutation("wait.read_done", "_synchronize", "wait() returns while a reload is still under way"),
    Mutation("spill.write_done", "_synchronize", "the tier below is given an address whose bytes have not arrived yet"),
    Mutation("close.write_done", "_synchronize", "a write runs into a slab that was given back"),
    Mutation("close.read_done", "_synchronize", "a reload reads from a slab that was given back"),
]


class MutantTier(HostTier):
    """A host tier that leaves out the sites in `omit`, and counts how often each site was reached."""

    def __init__(self, streams: StreamApi, capacity_bytes: int, omit: frozenset[str] = frozenset()) -> None:
        super().__init__(streams, capacity_bytes)
        self.omit = omit
        self.reached: dict[str, int] = {}

    def _leaves_out(self, site: str) -> bool:
        self.reached[site] = self.reached.get(site, 0) + 1
        return site in self.omit

    def _wait(self, site: str, stream: Stream, event: Event) -> None:
        if not self._leaves_out(site):
            super()._wait(site, stream, event)

    def _free_after(self, site: str, block: Block, events: Sequence[Event], home: Stream | None) -> None:
        if not self._leaves_out(site):
            super()._free_after(site, block, events, home)

    def _synchronize(self, site: str, event: Event) -> None:
        if not self._leaves_out(site):
            super()._synchronize(site, event)
