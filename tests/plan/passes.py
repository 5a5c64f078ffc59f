"""Measured passes made by hand, and runs of them that the rules of a schedule confirm."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from memmgr.policies.rules.registry import parse_policy
from memmgr.policies.simulate.simulator import Run, simulate
from memmgr.policies.trace import HELD, Op, OpKind, Storage, TierLink, Trace
from memmgr.policies.trace.schedule import replay

LINK = TierLink("host", 20.0, 20.0, 0.01)  # bytes a second


@dataclass
class Pass:
    """A measured pass under construction: forward by `op`, then `backward`, which uses what was saved in reverse."""

    ops: list[Op] = field(default_factory=list)
    # Of each storage: bytes, maker, last reader in forward, released.
    made: list[list[int]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    turn: int = 0

    def storage(self, size_bytes: int) -> int:
        self.made.append([size_bytes, len(self.ops), len(self.ops), HELD])
        return len(self.made) - 1

    def op(
        self,
        size_bytes: int,
        reads: list[int],
        *,
        saves: bool = True,
        seconds: float = 1.0,
        kind: OpKind = OpKind.COMPUTE,
    ) -> int:
        s = self.storage(size_bytes)
        for r in reads:
            self.made[r][2] = len(self.ops)
        self.ops.append(Op(f"op{s}", seconds, tuple(reads), (s,), kind, saves=(s,) if saves else ()))
        self.saved += [s] if saves else []
        return s

    def constant(self, size_bytes: int) -> int:
        s = self.storage(size_bytes)
        self.ops.append(Op("constant", 0.0, (), (s,), OpKind.CONSTANT))
        return s

    def backward(self, budget_seconds: float = 1.0) -> Trace:
        self.turn = len(self.ops)
        for s in reversed(self.saved):
            self.made[s][3] = len(self.ops) + 1
            self.ops.append(Op("back", budget_seconds, (), (self.storage(1),), OpKind.ONCE, uses=(s,)))
            self.made[-1][3] = len(self.ops)
        constants = {op.outputs[0] for op in self.ops if op.kind == OpKind.CONSTANT}
        rows = []
        for s, (size, maker, last, released) in enumerate(self.made):
            if s in constants:
                rows.append(Storage(f"c.{s}", size, maker, HELD, 0))
                continue
            let_go = last + 1 if maker < self.turn else released
            gone = released if s in self.saved or maker >= self.turn else let_go
            rows.append(Storage(f"{maker}.0", size, maker, gone, let_go if s in self.saved else gone))
        return Trace(tuple(self.ops), tuple(rows), "cpu", self.turn, (), copy_on_write=False).check()


def layers(n: int, size_bytes: int = 10) -> Trace:
    """Each saved output is made of the one before."""
    p = Pass()
    h = p.constant(1)
    for _ in range(n):
        h = p.op(size_bytes, [h])
    return p.backward()


def run(trace: Trace, budget: int, policy: str, link: TierLink | None = None) -> Run:
    """Simulated, and confirmed."""
    return confirmed(trace, budget, simulate(trace, budget, parse_policy(policy), link), link)


def confirmed(trace: Trace, budget: int, found: Run, link: TierLink | None) -> Run:
    """The run, if what it did is a schedule that costs what it says."""
    if found.feasible:
        rates = (
            (link.write_bytes_per_second, link.read_bytes_per_second, link.latency_seconds) if link else (0.0, 0.0, 0.0)
        )
        cost = replay(
            trace,
            found.steps,
            budget,
            write_rate=rates[0],
            read_rate=rates[1],
            latency_seconds=rates[2],
        )
        assert cost.valid, cost.why
        assert (cost.peak_bytes, cost.seconds) == (found.peak_bytes, pytest.approx(found.seconds))
        assert found.peak_bytes <= budget
    return found
