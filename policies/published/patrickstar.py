"""PatrickStar (Fang et al., arXiv 2108.05818; TPDS 2023), as published: model states in chunks of equal size.

- Tensors of one kind (parameters, gradients, optimizer states) are packed into chunks in the order of use. A chunk is where all
  of its tensors are, and moves whole (*chunk-based memory management*).
- The size is the one that leaves least unused, found by a search before training (*chunk size searching*).
- A chunk is read when an op needs one of its tensors; there is no prefetch. If there is no room for it, the chunk that
  is used last is evicted, of those that the running op does not use (*chunk eviction strategy*: Belady's choice over
  the moments of a warm-up iteration). A chunk lives in one place, so it is written when it is evicted, changed or not.
- Tensors outside of chunks (activations) are never evicted; chunks have the rest of the room at every moment (*runtime
  memory tracer*).

*Known limitations*: it updates parameters on the CPU where the states have no room on the device (*device-aware operator
placement*), and its gradients take the parameters' places in their chunks; here the step runs on the device, and gradients have
chunks of their own. A chunk's unused end takes room and is not copied.
"""

from __future__ import annotations

from collections.abc import Iterable

from memmgr.policies.simulate.cycle import RESIDENT, Cycle, Full, run_cycle
from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.blocks import Program, Role, roles

_SIZES = 16
"""Chunk sizes that are tried, from the largest tensor's up to twice that."""


def patrickstar(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Chunks on demand, and the one that is used last goes."""
    return run_cycle("patrickstar", trace, budget_bytes, tier, lambda p, link: Chunked(p, budget_bytes, link))


def packed(sizes: dict[int, int], chunk_bytes: int) -> list[list[int]]:
    """The tensors in chunks, in their order: one that does not fit the chunk at hand opens the next."""
    chunks: list[list[int]] = []
    room = 0
    for k, size in sizes.items():
        if not chunks or size > room:
            chunks.append([])
            room = chunk_bytes
        chunks[-1].append(k)
        room -= size
    return chunks


def chunked(p: Program) -> tuple[int, list[list[int]]]:
    """(bytes of a chunk, the chunks), of the size that leaves least unused."""
    which = roles(p)
    lists = [
        {k: b.size for k, b in sorted(enumerate(p.blocks), key=lambda kb: kb[1].touches[:1]) if which[k] is kind and not b.stays}
        for kind in (Role.PARAMETER, Role.GRADIENT, Role.STATE)
    ]  # fmt: skip
    largest = max((size for sizes in lists for size in sizes.values()), default=1)
    found: list[tuple[int, int, list[list[int]]]] = []
    for i in range(_SIZES + 1):
        size = largest + largest * i // _SIZES
        chunks = [chunk for sizes in lists for chunk in packed(sizes, size)]
        found.append((size * len(chunks), size, chunks))
    _, size, chunks = min(found, key=lambda one: one[:2])
    return size, chunks


class Chunked(Cycle):
    """Memory in chunks: a chunk that is there takes its whole size."""

    def __init__(self, p: Program, budget_bytes: int, link: TierLink) -> None:
        self.chunk_bytes, self.chunks = chunked(p)
        self.chunk_of = {k: c for c, chunk in enumerate(self.chunks) for k in chunk}
        self.there: set[int] = set()
        super().__init__(p, budget_bytes, link)
        self.loose = set(self.chunk_of)
        self.wanted = [
            list(dict.fromkeys([*touched, *(k for c in sorted(self._chunks(touched)) for k in self.chunks[c])]))
            for touched in p.touched
        ]

    def _chunks(self, blocks: Iterable[int]) -> set[int]:
        return {self.chunk_of[k] for k in blocks if k in self.chunk_of}

    def bytes_of(self, blocks: Iterable[int]) -> int:
        blocks = list(blocks)
        alone = super().bytes_of(k for k in blocks if k not in self.chunk_of)
        return alone + self.chunk_bytes * len(self._chunks(blocks))

    def room_for(self, blocks: Iterable[int]) -> int:
        return self.bytes_of(k for k in blocks if self.chunk_of.get(k) not in self.there)

    def take(self, k: int) -> None:
        self.used += self.room_for([k])
        self.peak = max(self.peak, self.used)
        self.there |= self._chunks([k])

    def drop(self, k: int) -> None:
        c = self.chunk_of.get(k)
        if c is None or all(self.state[other] != RESIDENT for other in self.chunks[c]):
            self.used -= self.bytes_of([k])
            self.there.discard(-1 if c is None else c)

    def read(self, k: int, begin: float, event: int) -> None:
        super().read(k, begin, event)
        self.dirty[k] = self.dirty[k] or k in self.chunk_of

    def make_room(self, size: int, event: int) -> None:
        while self.used + size > self.budget:
            loose = self.there - self._chunks(self.wanted[event])
            if not loose:
                raise Full
            inside = {c: [k for k in self.chunks[c] if self.state[k] == RESIDENT] for c in loose}
            last = max(loose, key=lambda c: (min(self.next[k] for k in inside[c]), c))
            for k in inside[last]:
                if self.dirty[k]:
                    self.write(k, event)
            for k in inside[last]:
                self.now = max(self.now, self.done_at[k])
                self.leave(k, event)
