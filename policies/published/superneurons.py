"""SuperNeurons (Wang et al., PPoPP 2018): liveness, convolutions to the host, cost-aware recomputation of the ops
between them.

- Liveness analysis: each tensor is freed at its last use.
- Unified tensor pool: outputs of convolutions are offloaded, in the order of making, as far as room is short, and read back
  ahead of their use. Without a tier they stay.
- Cost-aware recomputation: tensors made between two convolutions are cheap and are dropped, except those that backward
  begins with. If the tensors that such a segment makes for backward are no larger than the largest op of the pass, the
  segment runs again once for all of its backward (*speed-centric*). Else each op of backward makes its inputs again,
  and no more stays (*memory-centric*).

Each step is taken only where the ones before are not enough. *Known limitation*: its convolution workspaces are not in a trace.
"""

from __future__ import annotations

from memmgr.policies.simulate.decided import Accesses
from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import OpKind, TierLink, Trace
from memmgr.policies.trace.schedule import Step

from .chain import Chain
from .copies import Swap, around_shortage, with_copies
from .runs import judged, largest_that_fits, runs_of

_CHECKPOINTS = (
    "conv",
    "mm",
)  # parts of the names of ops whose outputs stay or are offloaded: convolutions, dense layers


def superneurons(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """With a tier or without one."""
    whole = Chain(trace)
    kept = [k for k in range(whole.turn) if any(part in trace.ops[k].name for part in _CHECKPOINTS)]
    chain = whole.at(sorted({k + 1 for k in kept if 0 < k + 1 < whole.turn and whole.width[k + 1] < 1 << 50}))
    accesses = Accesses.of(trace)
    plain = runs_of(range(len(trace.ops)), again=False)
    outputs = [s for k in kept for s in trace.ops[k].outputs if trace.storages[s].size_bytes] if tier else []

    def offloaded(events: list[Step], count: int) -> list[Step]:
        swaps = []
        for s in outputs[:count]:
            touches = [i for i, e in enumerate(events) if s in trace.ops[e.target].inputs]
            back = next((i for i in touches if i >= chain.turn), None)
            if back is not None:
                out = max([trace.storages[s].maker, *(i for i in touches if i < chain.turn)])
                swaps.append(Swap(s, out, back))
        used = accesses.used_bytes if events is plain else []
        swaps = around_shortage(swaps, used, budget_bytes) if used else swaps
        return with_copies(trace, events, swaps, tier) if tier else events

    again = recomputed(chain)
    ways = [(again, n) for n in range(len(outputs), -1, -1)] + [(plain, n) for n in range(len(outputs), -1, -1)]

    def run(i: int) -> Run:
        events, count = ways[i]
        return judged("superneurons", trace, budget_bytes, tier, offloaded(events, count))

    return largest_that_fits(len(ways), run)


def recomputed(chain: Chain) -> list[Step]:
    """The pass in which nothing between two cuts stays."""
    trace = chain.trace
    sizes = [
        sum(trace.storages[s].size_bytes for s in {*op.inputs, *op.outputs} - trace.constants)
        for op in trace.ops if op.kind != OpKind.CONSTANT
    ]  # fmt: skip
    largest = max(sizes, default=0)
    events = runs_of(range(chain.turn), again=False)
    at = chain.turn
    for i in range(len(chain) - 2, -1, -1):
        low, high = chain.cuts[i], chain.cuts[i + 1]
        begin, end = chain.starts[i], chain.starts[i - 1] if i else len(trace.ops)
        events += runs_of(range(at, begin), again=False)
        there, inside = chain.crossing(high), chain.interior[i]
        if sum(trace.storages[s].size_bytes for s in inside) <= largest:
            events += runs_of(chain.rematerialize(inside, low, high, there), again=True)
            events += runs_of(range(begin, end), again=False)
        else:
            for k in range(begin, end):
                events += runs_of(
                    chain.rematerialize(inside.intersection(trace.ops[k].inputs), low, high, there), again=True
                )
                events += runs_of([k], again=False)
        at = end
    return events + runs_of(range(at, len(trace.ops)), again=False)
