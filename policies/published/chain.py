"""A pass as a chain of blocks, as systems for chains of layers see it.

A cut is a place between two ops of forward. A tensor made before it and read by forward after it crosses the cut. With
the crossing tensors all later ones can be made again. In a chain of layers one tensor crosses each cut; where skip
connections run alongside they cross as well, so any pass is a chain of some blocks. The work of backward is divided at
the same cuts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from memmgr.policies.trace import OpKind, Trace

from .runs import can_run_again


class Chain:
    """Forward between cuts.

    `turn`: the op with which backward begins; where that is unknown, the one after the peak. `cuts`: ops before which
    forward is cut, ascending, its beginning and its end among them.
    """

    def __init__(self, trace: Trace, cuts: Sequence[int] | None = None) -> None:
        """With the whole of forward as one block, until it is cut."""
        self.trace = trace
        self.turn = trace.unmanaged_peak[1] + 1 if trace.backward_at is None else trace.backward_at
        self.cuts = [0, self.turn] if cuts is None else list(cuts)
        self.again = can_run_again(trace)

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def at(self, cuts: Sequence[int]) -> Chain:
        """The same pass with these cuts between beginning and end."""
        other = Chain.__new__(Chain)
        other.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("starts", "interior")})
        other.cuts = [0, *cuts, self.turn]
        return other

    @cached_property
    def reach(self) -> list[int]:
        """Per storage, the last op of forward that reads it; -1: none, or a constant."""
        last = [-1] * len(self.trace.storages)
        for k, op in enumerate(self.trace.ops[: self.turn]):
            for s in op.inputs:
                last[s] = k
        for s in self.trace.constants:
            last[s] = -1
        return last

    @cached_property
    def width(self) -> list[int]:
        """Per place before an op of forward, the bytes that cross it; where a block is overwritten across it, too many."""
        change = [0] * (self.turn + 2)
        for s, storage in enumerate(self.trace.storages):
            if self.reach[s] > storage.maker:
                change[storage.maker + 1] += storage.size_bytes
                change[self.reach[s] + 1] -= storage.size_bytes
        if not self.trace.copy_on_write:  # its bytes are overwritten when the part after the cut is made again
            for k, op in enumerate(self.trace.ops[: self.turn]):
                for old, _ in op.writes:
                    if old not in self.trace.constants:
                        change[self.trace.storages[old].maker + 1] += 1 << 50
                        change[k + 1] -= 1 << 50
        width, level = [], 0
        for step in change[: self.turn]:
            level += step
            width.append(level)
        return width

    def narrow(self, parts: int) -> list[int]:
        """Cuts of forward into about so many parts with equally many ops, each where fewest bytes cross nearby."""
        ops = [
            k for k in range(1, self.turn) if self.trace.ops[k].outputs and self.trace.ops[k].kind != OpKind.CONSTANT
        ]
        found = []
        for i in range(1, parts):
            middle = i * len(ops) // parts
            near = ops[max(middle - len(ops) // (2 * parts), 1) : middle + (len(ops) + 2 * parts - 1) // (2 * parts)]
            if near:
                found.append(min(near, key=lambda k: (self.width[k], abs(k - ops[middle]))))
        return sorted({k for k in found if self.width[k] < 1 << 50})

    def crossing(self, cut: int) -> set[int]:
        """The tensors made before op `cut` that forward reads from `cut` on."""
        return {
            s
            for s, storage in enumerate(self.trace.storages)
            if storage.maker < cut <= self.reach[s] and cut < self.turn
        }

    @cached_property
    def interior(self) -> list[set[int]]:
        """Per block, the tensors that it makes for backward alone, or for itself and backward."""
        block = {k: i for i, (a, b) in enumerate(zip(self.cuts, self.cuts[1:], strict=False)) for k in range(a, b)}
        found: list[set[int]] = [set() for _ in range(len(self))]
        for op in self.trace.ops[self.turn :]:
            for s in op.inputs:
                maker = self.trace.storages[s].maker
                if maker < self.turn and s not in self.trace.constants and self.reach[s] < self.cuts[block[maker] + 1]:
                    found[block[maker]].add(s)
        return found

    @cached_property
    def starts(self) -> list[int]:
        """Per block, the first op of backward that reads a tensor which it, or an earlier block, has made for backward.

        The work of block i goes from `starts[i]` to `starts[i - 1]`, that of the first block to the end. A block that
        makes only the input of the next one begins at the last read of that input.
        """
        n = len(self.trace.ops)
        owner = {s: i for i, saved in enumerate(self.interior) for s in saved}
        bare = {i for i, saved in enumerate(self.interior) if not saved}
        handed = {
            s: i for i, cut in enumerate(self.cuts[1:]) for s in (self.crossing(cut) if i in bare else ())
            if self.cuts[i] <= self.trace.storages[s].maker
        }  # fmt: skip
        first = [n] * len(self)
        for k in range(n - 1, self.turn - 1, -1):
            for s in self.trace.ops[k].inputs:
                if s in owner:
                    first[owner[s]] = k
                elif s in handed and first[handed[s]] == n:
                    first[handed[s]] = k
        for i in range(1, len(self)):
            first[i] = min(first[i], first[i - 1])
        return [*first[:-1], self.turn]

    def rematerialize(self, targets: Collection[int], low: int, high: int, there: Collection[int] = ()) -> list[int]:
        """The ops among low..high - 1 that make `targets` from earlier tensors and those in `there`."""
        storages, ops = self.trace.storages, self.trace.ops
        found: set[int] = set()
        todo = [s for s in targets if s not in there]
        while todo:
            k = storages[todo.pop()].maker
            if low <= k < high and k not in found and self.again[k]:
                found.add(k)
                todo += [s for s in ops[k].inputs if s not in there]
        return sorted(found)
