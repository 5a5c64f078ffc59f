"""Lower bounds: those of the reference, never above an optimum, and in order among themselves; the bound with a link (a study)."""

import importlib.util
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memmgr.policies.plan.bound import INFEASIBLE, lower_bound_seconds, relaxation, tighter
from memmgr.policies.plan.planner import plan
from memmgr.policies.plan.smallest_budget import smallest_budget_bytes
from memmgr.policies.trace import HELD, Op, OpKind, Storage, TierLink, Trace, TraceBuilder
from memmgr.policies.trace.columns import Problem
from memmgr.policies.trace.least_memory import least_bytes
from memmgr.policies.trace.schedule import replay
from memmgr.tools.common.dtr_log import parse_dtr_log, read_dtr_log

from .exact import exact
from .operator_logs import NAMES, SHARED, log, needs_logs
from .synthetic import LogWriter, network, tangle
from .test_paging import Training, least


def trace_of(writer: LogWriter) -> Trace:
    return parse_dtr_log(json.dumps(line) for line in writer.lines).check()


def several(trace: Trace) -> list[int]:
    """The moment of the peak, and some around it."""
    n, at = len(trace.ops), trace.unmanaged_peak[1]
    return sorted({at, *range(n // 6, n, n // 6)})


@needs_logs
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ratio", ["0.7", "0.2"])
def test_the_bound_is_the_references(name: str, ratio: str) -> None:
    trace = read_dtr_log(log(name))
    told = json.loads((SHARED / "dtr-logs" / "reference.json").read_text())[name]["overhead"]["lower_bound"][ratio]
    extra = lower_bound_seconds(trace, int(trace.unmanaged_peak[0] * float(ratio)))
    assert 1 + extra / trace.seconds == pytest.approx(told, abs=1e-5)


def test_no_bound_is_above_an_optimum() -> None:
    feasible = positive = more = 0
    for seed in range(8):
        trace = trace_of(tangle(seed, ops=8))
        slack = 1e-6 * trace.seconds
        for ratio in (0.9, 0.75, 0.6, 0.45):
            budget = int(trace.unmanaged_peak[0] * ratio)
            optimum = exact(trace, budget, limit_seconds=2.0)
            single, many = (
                lower_bound_seconds(trace, budget),
                lower_bound_seconds(trace, budget, moments=several(trace)),
            )
            assert single <= many + slack
            if not (optimum.solved and optimum.feasible):
                continue
            cost = replay(trace, optimum.steps, budget)
            assert cost.valid, cost.why
            assert cost.seconds == pytest.approx(trace.seconds + optimum.extra_seconds)
            assert many <= optimum.extra_seconds + slack
            found = tighter(Problem.of(trace), budget, single, range(len(trace.ops)))
            assert single <= found <= optimum.extra_seconds + slack
            more += found > single + slack
            feasible += 1
            positive += many > slack
    assert feasible >= 12 and positive >= 6 and more >= 1


def test_where_little_may_leave_another_moment_says_more() -> None:
    """At the unmanaged peak b may be made again for 1 s; at `narrow`, which needs less room, a for 10 s."""
    builder = TraceBuilder()
    builder.constant("w", 8)
    builder.call("a", 10.0, ["w"], [("a", 100, -1)])
    builder.call("narrow", 1.0, ["w"], [("n", 250, -1)])
    builder.release("n")
    builder.call("b", 1.0, ["w"], [("b", 200, -1)])
    builder.call("wide", 1.0, ["a"], [("u", 100, -1)])
    builder.release("u")
    builder.call("use b", 1.0, ["b"], [("v", 8, -1)])
    builder.release("b")
    builder.call("use a", 1.0, ["a"], [("x", 8, -1)])
    builder.release("a")
    trace = builder.build().check()
    at = [op.name for op in trace.ops].index("narrow")
    budget = 330
    assert trace.unmanaged_peak[1] != at
    alone = lower_bound_seconds(trace, budget)
    assert alone < 1.0 and lower_bound_seconds(trace, budget, moments=[at]) > 2.5
    problem = Problem.of(trace)
    found = tighter(problem, budget, alone, [trace.unmanaged_peak[1], at])
    assert found > 2.5
    assert tighter(problem, budget, alone, [trace.unmanaged_peak[1], at], most_work=0) == alone
    made = plan(trace, budget)
    assert made.seconds >= made.bound_seconds > trace.seconds + 2.5


@pytest.mark.parametrize("seed", range(3))
def test_bounds_are_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less room costs more, more moments tell more, a link helps, and one moment needs no solver."""
    trace = trace_of(network(seed, depth=10))
    peak = trace.unmanaged_peak[0]
    budgets = [int(peak * ratio) for ratio in (1.0, 0.8, 0.6, 0.4)]
    single = [lower_bound_seconds(trace, b) for b in budgets]
    slack = 1e-6 * trace.seconds
    assert single[0] == 0.0 < single[-1]
    assert all(less <= more + slack for less, more in zip(single, single[1:], strict=False))
    for b, bound in zip(budgets, single, strict=True):
        assert bound <= lower_bound_seconds(trace, b, moments=several(trace)) + slack
        linked = [lower_bound_seconds(trace, b, link=TierLink("host", rate, rate)) for rate in (1e6, 1e9, 1e15)]
        assert slack + bound >= linked[0] and linked[0] + slack >= linked[1] and linked[1] + slack >= linked[2]
        assert linked[2] == pytest.approx(0.0, abs=slack)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)  # as if scipy were not installed
    assert [lower_bound_seconds(trace, b) for b in budgets] == single
    assert lower_bound_seconds(trace, budgets[-1], link=TierLink("host", 1e9, 1e9)) == 0.0


def gradients(n: int) -> Trace:
    """Backward alone: each op makes a gradient of 100 bytes, held to the end, with 300 bytes beside it for a moment."""
    builder = TraceBuilder()
    builder.constant("w", 8)
    builder.call("loss", 1.0, ["w"], [("g0", 8, -1)])
    for i in range(n):
        builder.call("b", 1.0, [f"g{i}"], [(f"g{i + 1}", 8, -1), (f"dw{i}", 100, -1), (f"work{i}", 300, -1)])
        builder.release(f"work{i}")
        builder.release(f"g{i}")
    return builder.build().check()


def test_what_the_program_holds_at_the_end_counts_once() -> None:
    """In a live trace a gradient is pinned for as long as the program holds it, so past the end of the pass."""
    builder = TraceBuilder()
    builder.constant("w", 8)
    builder.call("loss", 1.0, ["w"], [("g", 8, -1)])
    builder.call("b", 1.0, ["g"], [("dw", 100, -1)])
    trace = builder.build().check()
    assert least_bytes(Problem.of(trace)) == 116
    pinned = replace(
        trace, storages=tuple(replace(s, pinned_until=HELD if s.size_bytes == 100 else 0) for s in trace.storages)
    ).check()
    assert least_bytes(Problem.of(pinned)) == 116 == pinned.unmanaged_peak[0]


def test_nothing_fits_below_the_smallest_budget() -> None:
    tighter = solved = 0
    passes = [trace_of(tangle(seed, ops=5)) for seed in range(4)] + [
        trace_of(network(seed, depth=1)) for seed in range(4)
    ]
    for trace in (*passes, gradients(3)):
        smallest, least = smallest_budget_bytes(trace), least_bytes(Problem.of(trace))
        assert least <= smallest <= trace.unmanaged_peak[0]
        tighter += smallest > least
        below = exact(trace, smallest - 1, limit_seconds=2.0)
        assert not below.feasible
        solved += below.solved
        assert not plan(trace, smallest - 1, effort=1_000).feasible
    assert tighter >= 1 and solved >= 6


def test_what_cannot_fit_has_no_bound() -> None:
    trace = trace_of(network(1, depth=6))
    assert lower_bound_seconds(trace, 10) == INFEASIBLE
    assert lower_bound_seconds(trace, 10, link=TierLink("host", 1e9, 1e9)) == INFEASIBLE
    assert lower_bound_seconds(Trace((), ()), 10) == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_a_cut_is_the_linear_programs_optimum(seed: int) -> None:
    """The program of one moment, solved by HiGHS as that of a moment twice."""
    trace = trace_of(tangle(seed, ops=30) if seed % 2 else network(seed, depth=12))
    problem, at = Problem.of(trace, lets_go=seed > 2), trace.unmanaged_peak[1]
    positive = 0
    for ratio in (0.95, 0.8, 0.65, 0.5, 0.35, 0.2):
        budget = int(ratio * trace.unmanaged_peak[0])
        (cut, kept), (solved, _) = relaxation(problem, budget, [at]), relaxation(problem, budget, [at, at])
        assert cut == pytest.approx(solved, rel=1e-5, abs=1e-9 * trace.seconds)
        if 0 < cut < INFEASIBLE:
            positive += 1
            there = sum(problem.size[s] * share for s, share in kept.items())
            assert there <= budget * (1 + 1e-5) and any(share > 0.0 for share in kept.values())
    assert positive >= 2


def test_of_equals_the_late_ones_are_kept() -> None:
    """Layers that repeat cost the same: that half of each is kept would say nothing."""
    builder, names = TraceBuilder(), [f"a{i}" for i in range(8)]
    builder.constant("w", 8)
    for name in names:
        builder.call(name, 1.0, ["w"], [(name, 100, -1)])
    for name in reversed(names):
        builder.call(f"use {name}", 1.0, [name], [(f"d{name}", 8, -1)])
        builder.release(f"d{name}")
        builder.release(name)
    trace = builder.build().check()
    problem, at = Problem.of(trace), trace.unmanaged_peak[1]
    _, kept = relaxation(problem, 516, [at])
    shares = [kept[s] for k, op in enumerate(trace.ops) if op.name in names[:7] for s in problem.outputs[k]]
    assert shares == pytest.approx([1.0] * 4 + [0.0] * 3, abs=1e-6)


pytest.importorskip("scipy", reason="linear programs need scipy")
STUDY = Path(__file__).parents[2] / "tools" / "bench" / "studies" / "link_bound.py"


@pytest.fixture(scope="module")
def study() -> Any:
    spec = importlib.util.spec_from_file_location("link_bound", STUDY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["link_bound"] = module
    spec.loader.exec_module(module)
    return module


def test_no_plan_is_faster_than_the_bound(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "SMALL", 0)
    trace = Training(8).trace()
    link = TierLink("host", 2e3, 2e3) if not trace.links else trace.links[0]
    need, bounds = trace.unmanaged_peak[0], []
    for share in (0.9, 0.6, 0.4):
        found = plan(trace, int(share * need), link=link)
        delay = study.Program(trace, link, int(share * need)).solve()
        assert delay is not None and found.overhead is not None
        bounds.append(1 + delay / trace.seconds)
        assert bounds[-1] <= found.overhead * (1 + 1e-6)
    assert bounds == sorted(bounds) and bounds[-1] > bounds[0]


@given(
    st.integers(0, 10_000), st.floats(0.0, 1.0), st.sampled_from([50.0, 1000.0, 5000.0]), st.booleans(), st.booleans()
)  # fmt: skip
@example(864, 0.98, 50.0, False, True)  # a constant that counted twice, in its own op and in its gap
@settings(max_examples=12, deadline=None)
def test_no_plan_of_a_cycle_is_faster_than_the_bound(
    study: Any, seed: int, share: float, rate: float, shared: bool, recompute: bool
) -> None:
    layers = random.Random(seed).randrange(1, 12)
    trace = Training(layers, seed).trace()
    low, high = least(trace), trace.unmanaged_peak[0]
    budget, link = int(low + share * (high - low)), TierLink("host", rate, rate, shared=shared)
    found = plan(trace, budget, link=link, recompute=recompute, effort=2_000)
    once = (replace(op, kind=OpKind.ONCE) if op.kind == OpKind.COMPUTE and not recompute else op for op in trace.ops)
    with mock.patch.object(study, "SMALL", 0):
        delay = study.Program(replace(trace, ops=tuple(once)), link, budget).solve()
    assert delay is not None
    assert trace.seconds + delay <= found.seconds * (1 + 1e-6)


def test_bytes_that_make_room_for_an_op_are_not_copied_back_beside_it(
    study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is there leaves for one op and comes back for the next: the link's two directions do not overlap."""
    monkeypatch.setattr(study, "SMALL", 0)
    storages = [Storage("state", 8, 0), Storage("large", 10, 1, released=3), Storage("state again", 8, 2)]
    ops = [
        Op("constant", 0.0, (), (0,), OpKind.CONSTANT),
        Op("large", 0.1, (), (1,), OpKind.ONCE),
        Op("in place", 0.1, (0,), (2,), OpKind.ONCE, ((0, 2),)),
    ]
    trace = Trace(tuple(ops), tuple(storages), copy_on_write=False, cycle=((2, 0),)).check()
    delay = study.Program(trace, TierLink("host", 1.0, 1.0), 18 - 8).solve()
    assert 15.5 < delay <= 16.0  # 8 where they overlap
