"""Which measured periods get a plan, and which get another one: by the pager's records, without a pager."""

import os
from typing import Any

import numpy as np
import pytest
import torch

from memmgr.policies.rules.registry import parse_policy
from memmgr.runtime import planner_process, planning, plans
from memmgr.runtime.planners import Scheduled
from memmgr.runtime.timeline import Noted

LIMIT = 1_000_000
READS, MAKES, RECIPE = 0, 2 | 4, 4


def columns(scratch: list[int], seconds: float = 0.01, bits: int = 0) -> Any:
    """Three ops that look alike, each of which makes 1000 bytes of the same 500; `scratch`: of each; `bits`: in which each may stay."""
    touched = [ordinal for k in range(3) for ordinal in (0, k + 1)]

    def packed(values: list[Any], kind: str) -> bytes:
        return np.array(values, dtype=kind).tobytes()

    return {
        "names": ["mm"], "op": packed([0] * 3, "i4"), "first_touch": packed([0, 2, 4], "u4"),
        "seconds": packed([seconds] * 3, "f4"), "before": packed([0.0] * 3, "f4"), "scratch": packed(scratch, "u8"),
        "other": packed([0] * 3, "u8"), "module": packed([0] * 3, "u4"), "ordinal": packed(touched, "u4"),
        "flags": bytes([READS, MAKES] * 3), "bits": packed([0, bits] * 3, "u4"), "sizes": packed([500] + [1000] * 3, "u8"),
        "fixed": bytes(4), "prior": packed([0xFFFFFFFF] * 4, "u4"), "deaths": b"", "hashes": b"", "turn": 3,
    }  # fmt: skip


class FakePager:
    """Hands out a period, and takes plans."""

    def __init__(self) -> None:
        self.noted = columns([0, 0, 0])
        self.copied_bytes = 0

    def timeline(self) -> Any:
        return self.noted

    def link(self) -> dict[str, float]:
        return {"write_seconds_per_byte": 1e-9, "read_seconds_per_byte": 1e-9, "cpu_seconds_per_byte": 1e-10}

    def tier_stats(self) -> dict[str, int]:
        return {"written_bytes": self.copied_bytes // 2, "read_bytes": self.copied_bytes // 2}

    def add_plan(self, **_: bytes) -> None:
        pass


@pytest.mark.parametrize(
    ("copied_bytes", "lost", "want"),
    [(1 << 30, 0.5, 0.5 / (1 << 30)), (1 << 30, 5.0, plans.MOST_LOST), (1 << 20, 0.5, 0.0)],
)
def test_time_that_processors_lose_is_the_copies(
    monkeypatch: pytest.MonkeyPatch, copied_bytes: int, lost: float, want: float
) -> None:
    """A virtual machine's disk takes time from the processors and from no thread."""
    run = Run(monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: len(os.sched_getaffinity(0)))
    run.pager.copied_bytes = copied_bytes
    monkeypatch.setattr(plans, "lost_seconds", lambda: run.plans._lost_at_opening + lost)
    (link,) = run.plans.links()
    assert link.cpu_seconds_per_byte == pytest.approx(1e-10 + want)
    assert run.plans.lost_seconds() == pytest.approx(min(lost, plans.MOST_LOST * copied_bytes))
    run.plans._device = "cuda"
    assert run.plans.links()[0].cpu_seconds_per_byte == run.plans.lost_seconds() == 0.0


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_copies_take_the_time_of_ops_that_have_all_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    run = Run(monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    (link,) = run.plans.links()
    assert link.cpu_seconds_per_byte == 1e-10 * (plans.BESIDE if cores == 3 else 1)
    run.plans._device = "cuda"  # its ops run on none of them
    assert run.plans.links()[0].cpu_seconds_per_byte == 0.0


class Run:
    """A run of which period after period ends; says which of them get a plan, and for how many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: str = "auto", *, offload: bool = True) -> None:
        self.asked: list[int] = []
        self.of: list[Any] = []

        def planner(trace: Any, budget_bytes: int, link: Any, recompute: bool) -> Scheduled | None:
            self.asked.append(budget_bytes)
            self.of.append(trace)
            return Scheduled((), self.overhead) if self.fits else None

        self.fits, self.overhead = True, 1.0

        self.pager: Any = FakePager()
        monkeypatch.setattr(planner_process, "executor", planner_process.InThread)
        monkeypatch.setattr(planning, "PLANNERS", {"plan": planner})
        self.plans = plans.Plans(self.pager, LIMIT, policy=parse_policy(policy), planned=True, offload=offload)
        self.before = 0

    def ends(self, key: int, *, followed: bool = False, short: bool = False, lacked: int = 0, trials: int = 0) -> bool:
        """A period ends; whether it gets a plan."""
        made = len(self.asked)
        info: Any = {
            "hash": key, "before": self.before, "ops": 3, "followed": followed, "ran_short": short, "trials": trials,
            "left_plan": 0, "left_at": 0, "lacked_bytes": lacked,
        }  # fmt: skip
        self.before = key
        self.plans.period_ended(info)
        self.plans.wait()
        return len(self.asked) > made


def planned(monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run(monkeypatch)
    assert [run.ends(key) for key in (1, 2, 2)][-1]
    return run


def test_a_program_that_repeats_has_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first period makes the optimizer's states; the second is the first of those that come again."""
    run = Run(monkeypatch)
    assert [run.ends(key) for key in (1, 2, 2)] == [False, False, True]
    assert not any(run.ends(2, followed=True) for _ in range(9))


def test_passes_that_all_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    for key in range(40):
        run.ends(key)
    assert run.plans.why_unlike(40) == "40 were unlike all earlier ones (pad changing shapes to a few sizes)"
    run = Run(monkeypatch)
    for _ in range(40):
        run.ends(7)
    assert run.plans.why_unlike(40) == ""


def test_without_a_tier_the_second_period_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "evict", offload=False)
    assert [run.ends(key) for key in (1, 2, 2, 2)] == [False, True, False, False]


def test_a_long_period_is_planned_at_once_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.pager.noted = columns([0, 0, 0], seconds=60.0)
    assert [run.ends(key) for key in (1, 2, 2)] == [False, True, True], "the last one as a cycle"


def test_sequences_in_turn_have_a_plan_each(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    assert not any(run.ends(key) for key in (9, 1, 2, 3, 4, 5))
    assert all(run.ends(key) for key in (1, 2, 3, 4, 5))
    assert not any(run.ends(key, followed=True) for key in (1, 2, 3, 4, 5))


def test_the_first_period_under_a_plan_may_run_short(monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned(monkeypatch)
    assert not run.ends(2, followed=True, short=True)
    assert not run.ends(2, followed=True)
    assert not run.ends(2, followed=True, short=True), "not in a row"
    assert run.ends(2, followed=True, short=True)


def test_what_did_not_fit_once_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """After more and more periods: where nothing ever fits, planning would take a processor."""
    run = Run(monkeypatch)
    run.fits = False
    assert [run.ends(key) for key in (1, 2, 2)] == [False, False, True]
    assert [run.ends(2) for _ in range(9)] == [True, True, False, True, False, False, False, True, False]
    run.fits = True
    assert sum(run.ends(2) for _ in range(8)) == 1
    assert not any(run.ends(2, followed=True) for _ in range(20))
    assert [run.ends(2, followed=True, short=True) for _ in range(2)] == [False, True], "it is mended like any other"


def test_what_ops_needed_when_it_ran_short_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned(monkeypatch)
    run.pager.noted = columns([0, 0, 700])
    assert not run.ends(2, followed=True, short=True) and run.ends(2, followed=True, short=True)
    assert run.asked[-1] == run.asked[-2], "the margin is as it was"
    assert run.of[-1].unmanaged_peak[0] > run.of[-2].unmanaged_peak[0]
    run.pager.noted = columns([0, 0, 600])  # less than is known
    assert not run.ends(2, followed=True, short=True) and run.ends(2, followed=True, short=True)
    assert run.asked[-1] == int(LIMIT * (1 - 2 * plans.MARGIN)), "nothing is seen, so it is the margin"
    assert run.of[-1].unmanaged_peak == run.of[-2].unmanaged_peak
    tried = sum(run.ends(2, followed=True, short=True) for _ in range(20))
    assert tried == plans.MOST_TRIES - 2


def test_memory_that_was_missing_for_places_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned(monkeypatch)
    most, least = 3 * int(plans.MARGIN * LIMIT), int(plans.LACKED * LIMIT)
    for lacked, more in ((most, most), (1, least)):
        before = run.asked[-1]
        assert [run.ends(2, followed=True, short=True, lacked=lacked) for _ in range(2)] == [False, True]
        assert before - run.asked[-1] in (more, more - 1, int(more * (1 - plans.MARGIN))), "the margin is as it was"


def test_a_plan_on_a_device_runs_short_until_the_places_of_its_blocks_are_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = planned(monkeypatch)
    run.plans._device = "cuda"
    assert not any(run.ends(2, followed=True, short=True) for _ in range(3))
    assert run.ends(2, followed=True, short=True, lacked=10)
    assert [run.ends(2, followed=True, short=True) for _ in range(4)] == [False, False, False, True], (
        "nothing is missing"
    )


@pytest.mark.parametrize(
    ("change", "message"), [({"overhead": 1.3}, "slower by too much"), ({"fits": False}, "no schedule")]
)
def test_a_plan_that_lacks_memory_for_places_stays_if_the_next_one_is_no_better(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    run = planned(monkeypatch)
    first = run.plans.latest()
    vars(run).update(change)
    assert [run.ends(2, followed=True, short=True, lacked=10) for _ in range(2)] == [False, True]
    assert run.plans.latest() is first and run.plans.errors() == [], message
    assert not any(run.ends(2, followed=True, short=True, lacked=10) for _ in range(9)), "it is not tried again"


def test_what_has_more_than_two_values_after_all_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.pager.noted = columns([0, 0, 0], bits=32)
    for key in (1, 2, 2):
        run.ends(key)
    run.pager.noted = columns([0, 0, 0])
    assert not run.ends(2, followed=True, short=True) and run.ends(2, followed=True, short=True)
    assert run.asked[-1] == run.asked[-2], "the margin is as it was"
    assert len(run.of[-1].ops) == len(run.of[-2].ops) - 3


def test_planning_takes_its_share_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first ones."""
    run = Run(monkeypatch)
    run.plans._cpu_seconds = 1e9
    for key in range(1, 40):
        run.ends(key)
    made = sum(run.ends(key) for key in range(1, 40))
    assert made == plans.FREE_PLANS
    run.plans._cpu_seconds = 0.0
    assert run.ends(39), "none is lost: it comes again"


def test_an_op_needs_the_most_that_it_has_ever_needed() -> None:
    before, now = Noted(columns([0, 0, 50]), ()), Noted(columns([0, 40, 7]), ())
    assert now.with_scratch_of(before).measured().scratch == [0, 40, 50]
    assert now.with_scratch_of(before).scratch_bytes == 90
    assert now.measured().scratch == [0, 40, 7]


@pytest.mark.parametrize(("bits", "flags"), [(0, MAKES), (32, MAKES), (32, MAKES & ~RECIPE), (32, READS)])
def test_what_can_leave_as_bits_is_counted_without_a_trace(bits: int, flags: int) -> None:
    noted = columns([0, 0, 0], bits=bits)
    noted["flags"] = bytes([READS, MAKES, READS, MAKES, MAKES, flags])  # the last op has both of its cells written
    noted["ordinal"] = np.array([0, 1, 0, 2, 3, 3], dtype="u4").tobytes()
    period = Noted(noted, ())
    assert period.two_valued == period.measured().two_valued
