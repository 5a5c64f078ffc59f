"""A trace in columns, as the planner, its bounds and the simulator read it."""

from __future__ import annotations

from dataclasses import dataclass

from .trace import OpKind, Trace


@dataclass(frozen=True, eq=False)
class Problem:
    """A trace in columns. Storages and ops keep their numbers."""

    n_ops: int  # number of ops; the *end* is stage n_ops, whose op (the same number) reads the storages held at the end
    size: list[int]  # bytes per storage
    cost: list[float]  # seconds per op
    inputs: list[tuple[int, ...]]  # per op, storages that must be resident when it runs
    outputs: list[tuple[int, ...]]  # per op
    maker: list[int]  # per storage
    # per storage, the stage up to which dropping it frees nothing (constants: until their release); -1: none
    pinned: list[int]
    again: list[bool]  # per storage, if its op may run a second time
    # per storage whose op may not, the last op while which the program holds it: until then its bytes are resident or
    # in the tier, read or not; -1: none
    kept: list[int]
    written: list[int]  # per storage, the op that overwrites its block and ends its bytes; -1: none
    # per storage, the op after which the program releases it and its bytes are freed; -1: they may stay
    let_go: list[int]
    handed: list[int]  # per op, bytes of the inputs whose block an output takes over, not to be counted twice
    held: list[int]  # held at the end, constants left out

    @classmethod
    def of(cls, trace: Trace, *, lets_go: bool = False) -> Problem:
        """The columns of `trace`. `lets_go`: a storage that the program releases is freed until it is made again."""
        n = len(trace.ops)
        size = [s.size_bytes for s in trace.storages]
        pinned = [min(s.pinned_until, n + 1) - 1 for s in trace.storages]
        written = [-1] * len(size)
        handed = [0] * n
        again = [trace.ops[s.maker].kind == OpKind.COMPUTE for s in trace.storages]
        kept = [min(s.released - 1, n) if trace.ops[s.maker].kind == OpKind.ONCE else -1 for s in trace.storages]
        for s in trace.constants:
            pinned[s] = max(pinned[s], min(trace.storages[s].released, n + 1) - 1)
        if not trace.copy_on_write:
            for k, op in enumerate(trace.ops):
                for old, _ in op.writes:  # a storage that holds the old version holds the block, and so the new version
                    pinned[old] = min(pinned[old], k)
                    written[old] = k
                    handed[k] += size[old]
        return cls(
            n,
            size,
            [op.seconds for op in trace.ops],
            [op.inputs for op in trace.ops],
            [op.outputs for op in trace.ops],
            [s.maker for s in trace.storages],
            pinned,
            again,
            kept,
            written,
            [s.released - 1 if lets_go and s.released <= n else -1 for s in trace.storages],
            handed,
            [s for s in trace.held_at_end if s not in trace.constants],
        )
