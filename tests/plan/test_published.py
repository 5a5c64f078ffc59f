"""Published systems that recompute: the claims of their papers, and that their schedules keep the rules."""

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memmgr.policies.published.chain import Chain
from memmgr.policies.published.checkmate import checkmate, moccasin
from memmgr.policies.published.checkpointing import checkpointed
from memmgr.policies.published.coop import cheapest_window
from memmgr.policies.published.graph import graph_of
from memmgr.policies.published.milp import limited_to
from memmgr.policies.published.runs import completed
from memmgr.policies.published.systems import PUBLISHED, RECOMPUTING, applicable
from memmgr.policies.published.tcontrol import betweenness
from memmgr.policies.rules.registry import parse_policy
from memmgr.policies.simulate.simulator import simulate
from memmgr.policies.trace import Trace
from memmgr.policies.trace.schedule import Do, Step, replay
from memmgr.tools.common.dtr_log import parse_dtr_log

from .exact import exact
from .judge import confirmed, keeps_the_rules, needs_judge
from .passes import LINK, layers
from .synthetic import LogWriter, network, tangle
from .test_simulator import chain, trace_of

PROGRAMS = ("checkmate", "moccasin", "rockmate")  # solved to the end within seconds only where there are few ops


def read(log: LogWriter) -> Trace:
    return parse_dtr_log(json.dumps(line) for line in log.lines)


@needs_judge
# The integer programs are compared with optima of other passes below, so one shape is enough for them here.
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=[pytest.mark.slow] * (name in PROGRAMS and shape == "tangle"))
        for name in (*RECOMPUTING, "superneurons", "tsplit")
        for shape in ("network", "tangle")
    ],
)
def test_the_judge_confirms(name: str, shape: str, tmp_path: Path) -> None:
    made = network(7, depth=2 if name in PROGRAMS else 12) if shape == "network" else tangle(3, ops=7)
    file = made.write(tmp_path / "x.log")
    confirmed(file, lambda trace, budget: PUBLISHED[name](trace, budget, None), (1.0, 0.9, 0.7, 0.5))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", [*RECOMPUTING, "tsplit"])
def test_a_measured_pass_has_a_schedule_too(name: str, gradients: bool) -> None:
    """The program holds tensors itself, ops of backward run once, and an overwritten block is gone."""
    trace = layers(8 if name in PROGRAMS else 16, gradients)
    budget = int(trace.unmanaged_peak[0] * 0.7)
    result = PUBLISHED[name](trace, budget, None)
    assert result.feasible, result.why
    keeps_the_rules(trace, result, budget)


def test_a_system_that_needs_a_tier_is_not_asked_without_one() -> None:
    trace = trace_of(2)
    assert set(RECOMPUTING) <= set(applicable(trace, None)) and not set(RECOMPUTING) & set(applicable(trace, LINK))
    assert "l2l" not in applicable(trace, LINK)


def events(trace: Trace) -> list[Step]:
    return [Step(Do.COMPUTE, k) for k in range(len(trace.ops))]


def test_what_nobody_wants_any_more_goes_at_once() -> None:
    trace = chain(3)
    steps = completed(trace, events(trace))
    assert replay(trace, steps, 33).valid and not replay(trace, steps, 32).valid  # 1 + 3 * 10, and two gradients
    twice = [*events(trace)[:4], Step(Do.RECOMPUTE, 1), *events(trace)[4:]]
    steps = completed(trace, twice)
    assert [s.target for s in steps if s.do is Do.FREE][:1] == [1], "a1 goes before it is made again, not before a2 is"
    assert [s.target for s in steps if s.do is Do.RECOMPUTE] == [1]


def test_what_runs_again_for_nobody_does_not() -> None:
    trace = chain(3)
    last = [*events(trace), Step(Do.RECOMPUTE, 2)]
    assert not [s for s in completed(trace, last) if s.do is Do.RECOMPUTE]


def test_sqrt_n_takes_a_root_of_the_memory_and_less_than_one_more_forward() -> None:
    """Chen 2016, section 4.2: O(sqrt n) for one extra forward. 100 layers of 10 bytes: 10 segments, of which each but the last
    keeps one output and makes nine again."""
    trace = chain(100)
    made = PUBLISHED["sqrt_n"](trace, trace.unmanaged_peak[0], None)
    recomputed = [s for s in made.steps if s.do is Do.RECOMPUTE]
    assert len(recomputed) == 9 * 9 and made.seconds == trace.seconds + 81
    assert made.peak_bytes <= 1 + 10 * (9 + 10 + 1) + 2
    small = PUBLISHED["sqrt_n"](trace, made.peak_bytes - 1, None)
    assert not small.feasible and small.least_bytes == made.peak_bytes


def test_chen_greedy_pays_for_the_memory_that_is_missing() -> None:
    """Algorithm 3: a larger b is a longer segment; with room for all nothing runs again."""
    trace = chain(64)
    found = [PUBLISHED["chen_greedy"](trace, int(trace.unmanaged_peak[0] * r), None) for r in (1.0, 0.6, 0.4)]
    assert found[0].overhead == 1 < found[1].overhead <= found[2].overhead < 1.5
    assert all(run.feasible for run in found)


def test_what_skips_a_segment_crosses_its_cuts() -> None:
    trace = trace_of(5, depth=12)
    whole = Chain(trace)
    cut = whole.at(whole.narrow(4))
    assert len(cut) == 4
    for place in cut.cuts[1:-1]:
        read = {s for k in range(place, cut.turn) for s in trace.ops[k].inputs} - trace.constants
        assert cut.crossing(place) == {s for s in read if trace.storages[s].maker < place}
        assert whole.width[place] == sum(trace.storages[s].size_bytes for s in cut.crossing(place))
    assert replay(trace, completed(trace, checkpointed(cut)), trace.unmanaged_peak[0]).valid


PIECES = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 8.0, math.inf])), max_size=9)


@given(pieces=PIECES, need=st.integers(1, 30))
def test_the_window_is_the_cheapest_of_all(pieces: list[tuple[int, float]], need: int) -> None:
    windows = [
        (sum(h for _, h in pieces[a:b]), a, b)
        for a, b in itertools.combinations(range(len(pieces) + 1), 2)
        if sum(size for size, _ in pieces[a:b]) >= need
    ]
    least = min((h for h, _, _ in windows), default=math.inf)
    found = cheapest_window(pieces, need)
    assert (found is None) == (least == math.inf)
    assert found is None or (least, *found) in windows


def test_coop_lets_neighbours_go_where_the_cheapest_are_apart() -> None:
    """The paper's point: of four pieces of 10 bytes the two cheapest are no room for 20 where an expensive one lies between."""
    assert cheapest_window([(10, 1.0), (10, 9.0), (10, 2.0), (10, 3.0)], 20) == (2, 4)
    assert cheapest_window([(10, 1.0), (10, 9.0), (10, 2.0), (10, math.inf)], 20) == (0, 2)


def test_betweenness_of_a_path_and_of_a_bridge() -> None:
    path = betweenness([[], [0], [1], [2], [3]], [1.0] * 5)
    assert path == [0, 1 * 3, 2 * 2, 3 * 1, 0]
    # 0 and 1 each lead to 3 and 4 through 2 alone; 5 has a short way past 3
    bridge = betweenness([[], [], [0, 1], [2], [2], [3, 2]], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert bridge == [0, 0, 6, 0, 0, 0]
    two_ways = betweenness([[], [0], [0], [1, 2]], [1.0] * 4)
    assert two_ways == [0, 0.5, 0.5, 0]


def test_what_is_locked_stays_while_the_rest_is_enough() -> None:
    """A path's middle has the largest betweenness. DTR lets it go, T-Control does not."""
    trace = chain(30)
    budget = trace.unmanaged_peak[0] // 2
    gone = {}
    for name in ("tcontrol", "dtr"):
        made = (
            PUBLISHED[name](trace, budget, None) if name in PUBLISHED else simulate(trace, budget, parse_policy(name))
        )
        assert made.feasible
        gone[name] = {s.target for s in made.steps[: made.steps.index(Step(Do.COMPUTE, 31))] if s.do is Do.FREE}
    assert not gone["tcontrol"] & {15, 16} and gone["dtr"] & {15, 16}


# Other seeds are near copies.
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))])
def test_checkmate_is_the_optimum_of_its_space(seed: int) -> None:
    """Passes of 11 to 13 ops, beside a program that was written on its own, one residency a storage and event."""
    trace = read(tangle(seed, ops=5))
    for share in (0.9, 0.75, 0.6):
        budget = int(trace.unmanaged_peak[0] * share)
        best = exact(trace, budget)
        assert best.solved
        found, fewer = checkmate(trace, budget), moccasin(trace, budget)
        assert found.feasible == best.feasible
        if best.feasible:
            assert found.seconds - trace.seconds == pytest.approx(best.extra_seconds, rel=1e-6)
        if fewer.feasible:
            assert fewer.seconds >= found.seconds * (1 - 1e-9)


def test_two_retention_intervals_are_two_runs_at_most() -> None:
    """Here the optimum runs an op three times, and nothing else fits."""
    trace = read(tangle(4, ops=5))
    budget = int(trace.unmanaged_peak[0] * 0.75)
    again = [s.target for s in checkmate(trace, budget).steps if s.do is Do.RECOMPUTE]
    assert max(again.count(k) for k in again) == 2
    assert not moccasin(trace, budget).feasible
    for run in (moccasin(read(tangle(seed, ops=5)), 10**9) for seed in range(3)):
        assert run.feasible and run.seconds == run.unmanaged_seconds


def test_without_time_the_relaxation_is_rounded() -> None:
    trace = chain(12)
    budget = int(trace.unmanaged_peak[0] * 0.7)
    best = checkmate(trace, budget)
    with limited_to(0.0):
        rounded = checkmate(trace, budget)
    assert best.feasible and rounded.feasible and rounded.seconds >= best.seconds > trace.seconds
    assert replay(trace, rounded.steps, budget).valid


def test_two_retention_intervals_stay_two_where_the_relaxation_is_rounded() -> None:
    """Rounding ignores rows: its result may run an op more often, and is no answer then."""
    with limited_to(0.0):
        runs = [moccasin(trace := read(tangle(seed, ops=5)), int(trace.unmanaged_peak[0] * 0.75)) for seed in range(12)]
    assert any(run.feasible for run in runs)
    for run in runs:
        again = [s.target for s in run.steps if s.do is Do.RECOMPUTE]
        assert len(again) == len(set(again))


def test_many_ops_are_few_nodes() -> None:
    trace = trace_of(3, depth=30)
    graph = graph_of(trace, 16)
    assert len(graph.nodes) <= 18 and [k for ops in graph.nodes for k in ops] == list(range(len(trace.ops)))
    crossing = {
        s
        for i, op in enumerate(trace.ops)
        for s in op.inputs
        if not any({i, trace.storages[s].maker} <= set(ops) for ops in graph.nodes)
    }
    held = set(trace.held_at_end)
    assert sum(v.size for v in graph.values) == sum(
        trace.storages[s].size_bytes for s in (crossing | held) - trace.constants
    )
