"""Published dynamic programs over chains, beside searches that share nothing with them."""

import heapq
import itertools
import random

import pytest

from memmgr.policies.published.checkpointing import sqrt_n
from memmgr.policies.published.pofo import pofo
from memmgr.policies.published.rockmate import Block, rockmate
from memmgr.policies.published.rotor import Costs, Table, Way, blocks, rotor
from memmgr.policies.trace import TierLink, Trace, TraceBuilder
from memmgr.policies.trace.schedule import Do, replay

from .exact import exact
from .operator_logs import log, needs_logs
from .passes import blocks_of_three, with_backward
from .test_simulator import read_dtr_log


def uneven(n: int, seed: int) -> Trace:
    """Layers of different sizes and times: each makes the next one's input, and something for its own backward."""
    r = random.Random(seed)
    builder = TraceBuilder()
    builder.constant("a0", 1)
    for i in range(1, n + 1):
        made = [(f"a{i}", r.randint(2, 20), -1), (f"z{i}", r.randint(2, 20), -1)]
        builder.call("f", float(r.randint(1, 9)), [f"a{i - 1}"], made)
    reads = (((f"z{i}", f"a{i}", f"a{i - 1}"), (f"z{i}", f"a{i}")) for i in range(n, 0, -1))
    return with_backward(builder, f"a{n}", reads)


def shortest(costs: Costs, ways: list[Way], room: int) -> float:
    """The least seconds, by search through all states that rotor's operations lead to (its paper's table 1).

    A state is the progress of backward, and the set of resident inputs and saved blocks. F keeps or drops its input and
    makes that of the next block, F_all saves the block, B consumes the saved tensors.
    """
    inputs = [0, *(costs.bytes_of(crossing) for crossing in costs.crossing[1:])]
    saved = [costs.bytes_of(way.saved | costs.crossing[i + 1]) for i, way in enumerate(ways)]
    behind = [costs.behind[k] for k in costs.chain.starts]
    tick = itertools.count()
    heap = [(0.0, 0, len(ways) - 1, frozenset({("a", 0)}))]
    seen: set[tuple[int, frozenset[tuple[str, int]]]] = set()
    while heap:
        seconds, _, t, items = heapq.heappop(heap)
        if t < 0:
            return seconds
        if (t, items) in seen:
            continue
        seen.add((t, items))
        full = sum(inputs[i] if kind == "a" else saved[i] for kind, i in items)
        after: list[tuple[float, int, frozenset[tuple[str, int]]]] = []
        for i in range(t + 1):
            if ("a", i) not in items and ("s", i - 1) not in items:
                continue
            took, room_ahead = costs.ahead[i]
            if i < t and full + room_ahead + behind[t] <= room:
                after.append((took, t, items | {("a", i + 1)}))
                after += [(took, t, (items | {("a", i + 1)}) - {("a", i)})] if i else []
            if full + ways[i].forward_bytes + behind[t] <= room:
                after.append((ways[i].seconds, t, items | {("s", i)}))
        ready = ("s", t) in items and (("a", t) in items or ("s", t - 1) in items)
        if ready and full - saved[t] + ways[t].backward_bytes <= room:
            after.append((0.0, t - 1, items - {("s", t)} - ({("a", t)} if t else set())))
        for took, then, there in after:
            heapq.heappush(heap, (seconds + took, next(tick), then, there))
    return float("inf")


@pytest.mark.parametrize("seed", range(6))
def test_rotor_is_the_optimum_of_its_operations(seed: int) -> None:
    costs = Costs(blocks(uneven(4, seed), 60))
    ways = [costs.all_of(i) for i in range(4)]
    table = Table(costs, [[way] for way in ways])
    assert table.unit == 1, "sizes are exact"
    found = [float(table.best[0, 3][room]) for room in range(10, 120, 9)]
    assert found == [shortest(costs, ways, room) for room in range(10, 120, 9)]
    assert len(set(found)) > 3


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_what_the_table_says_is_what_it_takes(share: float) -> None:
    trace = uneven(6, 1)
    made = rotor(trace, int(trace.unmanaged_peak[0] * share))
    assert made.feasible and made.seconds > trace.seconds
    again = sum(trace.ops[s.target].seconds for s in made.steps if s.do is Do.RECOMPUTE)
    assert made.seconds == pytest.approx(trace.seconds + again)


@needs_logs
@pytest.mark.parametrize("name", [pytest.param("inceptionv4", marks=pytest.mark.slow), "transformer"])  # near copies
def test_rotor_is_faster_than_equal_segments_in_their_memory(name: str) -> None:
    """Beaumont et al. 2019, section 5: better than PyTorch's equal segments at every memory. (A U-Net is no chain: there it is not.)"""
    trace = read_dtr_log(log(name))
    equal = sqrt_n(trace, trace.unmanaged_peak[0])
    assert rotor(trace, equal.peak_bytes).seconds < equal.seconds


def cheap_and_dear(n: int) -> Trace:
    """Layers of an expensive op and a cheap one as large."""
    return blocks_of_three(n, [("expensive", 9.0, 10), ("cheap", 1.0, 10), ("expensive", 9.0, 2)])


def test_rockmate_makes_the_cheap_half_of_a_block_again() -> None:
    """rotor has to take whole blocks, expensive op and all. Beside the exact optimum of three layers."""
    trace = cheap_and_dear(6)
    budget = int(trace.unmanaged_peak[0] * 0.75)
    made = rockmate(trace, budget)
    again = {trace.ops[s.target].name for s in made.steps if s.do is Do.RECOMPUTE}
    assert made.feasible and again == {"cheap"}
    assert made.seconds < rotor(trace, budget).seconds
    small = cheap_and_dear(3)
    for share in (0.85, 0.7):
        room = int(small.unmanaged_peak[0] * share)
        best = exact(small, room)
        assert best.solved and rockmate(small, room).seconds == pytest.approx(small.seconds + best.extra_seconds)


def test_blocks_that_look_alike_are_solved_once() -> None:
    costs = Costs(blocks(cheap_and_dear(6), 6))
    looks = [Block.of(costs, i).look() for i in range(6)]
    assert len(set(looks[1:-1])) == 1


@pytest.mark.parametrize("seed", range(4))
def test_offloading_takes_a_third_of_what_recomputing_costs(seed: int) -> None:
    """The paper's abstract, for a link that carries a layer's saved tensors while the layer runs; a slow one is of
    little use."""
    trace = uneven(12, seed)
    budget = int(trace.unmanaged_peak[0] * 0.7)
    alone = rotor(trace, budget)
    rates = [sum(s.size_bytes for s in trace.storages) / trace.seconds * factor for factor in (2.0, 1e-3)]
    fast, slow = (pofo(trace, budget, TierLink("host", rate, rate)) for rate in rates)
    assert alone.overhead > 1 and fast.overhead - 1 < 2 / 3 * (alone.overhead - 1)
    assert fast.overhead < slow.overhead
    for made, rate in zip((fast, slow), rates, strict=True):
        cost = replay(trace, made.steps, budget, write_rate=rate, read_rate=rate)
        assert cost.valid and cost.seconds == pytest.approx(made.seconds)
    assert any(s.do is Do.RELOAD for s in fast.steps)
    assert "tier" in pofo(trace, budget).why
