"""Why a run is slow, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import memmgr
from memmgr.config.sizes import UNLIMITED
from memmgr.integrations._callback_budget import CallbackBudget
from memmgr.observe.advice import advice
from memmgr.observe.error_text import rank_error
from memmgr.observe.slowness import best_change, is_slow, losses, unplanned, why_slow
from memmgr.observe.source_lines import show
from memmgr.observe.summary import main_figures, slowdown, summary

from . import lines


def _stats(**changed: Any) -> dict[str, Any]:
    found = {"room_seconds": 0.1, "copy_seconds": 0.8, "own_seconds": 0.25, "cores": 4, "planned_passes": 20}
    return lines.stats(**{**found, **changed})


def test_shares_of_the_time_and_of_the_cores() -> None:
    found = losses(_stats())
    assert (found.recompute, found.reads, found.room) == pytest.approx((0.15, 0.04, 0.01))
    assert (found.copies, found.per_op) == pytest.approx((0.02, 0.025))
    assert found.text == (
        "recomputing 15.0%, waiting 4.0% for reads and 1.0% for room, copies 2.0% of the cores, per-op cost 2.5%"
    )


def test_the_slowdown_has_the_cost_of_ops_where_nothing_hides_it() -> None:
    assert slowdown(_stats()) == pytest.approx(1 / 0.8), "a log of an older version does not say"
    assert slowdown(_stats(host_ahead=1)) == pytest.approx(1 / 0.8)
    assert slowdown(_stats(host_ahead=0)) == pytest.approx(1 / 0.775)
    assert "at least 1.29x of an unlimited run" in summary(_stats(host_ahead=0, offloads=9))


@pytest.mark.parametrize(("passes", "planned", "told"), [(11, 5, False), (11, 6, True), (12, 0, True)])
def test_passes_that_are_mostly_measured_tell_no_slowdown(passes: int, planned: int, told: bool) -> None:
    stats = _stats(host_ahead=0, passes=passes, planned_passes=planned, offloads=9)
    assert ("at least 1.29x" in summary(stats)) is told
    assert ("too few to tell a slowdown" in summary(stats)) is not told
    assert any(name == "slowdown" for name, _ in main_figures(stats)) is told


def test_before_a_pass_has_ended_no_slowdown_is_named() -> None:
    stats = _stats(host_ahead=0, passes=0, offloads=9)
    assert slowdown(stats) is None and "at least" not in summary(stats)
    assert not [name for name, _ in main_figures(stats) if name == "slowdown"]


def test_exported_addresses_are_named_with_their_line() -> None:
    sites = {"escapes.train.py:9": 2, "escapes.train.py:16": 30}
    said = why_slow(_stats(escaped_bytes=3_000_000, **sites), leaks=["one"])
    assert "; tensors of 3 MB cannot be evicted" in said and "30 times at train.py:16. After a copy" in said
    assert "cannot be evicted" not in why_slow(_stats(escaped_bytes=100_000, **sites))


def test_lost_time_is_the_copies() -> None:
    assert losses(_stats(lost_seconds=0.4)).copies == pytest.approx(0.03)
    text, saved = best_change(_stats(lost_seconds=12.0)) or ("", 0.0)
    assert text.startswith("memory to spare as --host")
    assert saved == pytest.approx(0.3)


def test_the_change_that_helps_most_has_an_estimate() -> None:
    text, saved = best_change(_stats()) or ("", 0.0)
    assert text == "+3.2 MB of budget (11.2 MB)"
    assert saved == pytest.approx(0.8 * 0.2)
    text, saved = best_change(_stats(own_seconds=6.0)) or ("", 0.0)
    assert text.startswith("twice the batch")
    assert saved == pytest.approx(0.3)
    assert best_change(_stats(budget_bytes=UNLIMITED)) is None


@pytest.mark.parametrize(
    ("changed", "reason", "words"),
    [
        ({"planned_passes": 5}, "no schedule fits", "15 of 20 passes followed no plan to its end: no schedule fits"),
        (
            {"planned_passes": 5, "left_passes": 9},
            "",
            "15 of 20 passes followed no plan to its end: 9 did other ops than the plan",
        ),
        ({"planned_passes": 0}, "", "20 of 20 passes followed no plan to its end: no plan was made"),
        (
            {"planned_passes": 0, "passes": 9},
            "",
            "9 of 9 passes followed no plan to its end: no plan was made (a run of so few",
        ),
        (
            {"planned_passes": 5, "plans": 1},
            "",
            "15 of 20 passes followed no plan to its end: they ended before the plan",
        ),
        ({"planned_passes": 19}, "", ""),
        ({"planned_passes": 0, "passes": 3}, "", ""),
        ({"planned_passes": 0, "unmanaged_peak_bytes": 1}, "", ""),
    ],
)
def test_passes_without_a_plan_and_why(changed: dict[str, Any], reason: str, words: str) -> None:
    said = unplanned(_stats(**changed), reason)
    assert said.startswith(words) if words else not said


def test_one_sentence_has_all_of_it() -> None:
    said = why_slow(_stats(planned_passes=5), reason="no schedule fits")
    assert said.startswith("where the time went: recomputing 15.0%")
    assert said.endswith(
        "; 15 of 20 passes followed no plan to its end: no schedule fits; what would help most: +3.2 MB of budget (11.2 MB), about 16% "
        "less time (an estimate)"
    )
    assert is_slow(_stats())
    assert not is_slow(_stats(recompute_seconds=0.0, stall_seconds=0.1, own_seconds=0.1))
    assert not is_slow(_stats(budget_bytes=UNLIMITED))
    assert not is_slow(_stats(unmanaged_peak_bytes=1)), "all of it fitted"


def test_more_budget_is_advised_neither_beside_a_leak_nor_after_a_budget_error() -> None:
    assert "of budget" in why_slow(_stats())
    leaking = why_slow(_stats(), leaks=["a leak: +3 MB a step"])
    assert "of budget" not in leaking and "loss.item()" in leaking
    assert "what would help most" not in why_slow(_stats(), ended_by="BudgetError")


def _fail(run: Callable[[Callable[[], None]], None]) -> None:
    """One pass fits, after much recomputing; the next has a batch that does not."""
    model = torch.nn.Sequential(*(part for _ in range(6) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())))

    def step() -> None:
        for rows in (512, 8192):
            model(torch.randn(rows, 256)).square().mean().backward()

    with pytest.raises(memmgr.BudgetError) as caught:
        run(step)
    assert "should do" in str(caught.value)


@pytest.mark.parametrize("how", ["with", "decorator", "callback"])
def test_after_a_budget_error_the_error_alone_advises(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its text runs the module again, on tensors without bytes: that is no pass."""
    budget = memmgr.budget("4MB", device="cpu")
    callback = CallbackBudget("4MB", {"device": "cpu"})

    def run(step: Callable[[], None]) -> None:
        if how == "callback":
            callback.open()
            step()
        elif how == "with":
            with budget:
                step()
        else:
            budget(step)()

    _fail(run)
    callback.close(failed=True)
    said = capsys.readouterr().err
    assert "memmgr: peak " in said and "; 1 pass " in said, said
    assert "what would help most" not in said and "of budget" not in said, said


def test_the_floor_is_the_same_size_everywhere() -> None:
    stats = _stats(floor_bytes=19_310_001)
    assert "about 19.4 MB" in advice(stats)[0]
    assert dict(main_figures(stats))["smallest budget (floor)"] == "19.4 MB"
    trouble = {"rank": 1, "error": "BudgetError", "text": "", "floor_bytes": 19_310_001, "enough_bytes": 20_000_000}
    assert "floor is 19.4 MB" in str(rank_error(trouble | {"budget_bytes": 1_000_000}, 0))


@pytest.mark.parametrize("after", [False, True])
def test_addresses_handed_out_after_training_are_not_blamed(after: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is saved or hashed at the end has slowed nothing."""
    model = torch.nn.Sequential(*(part for _ in range(6) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())))
    with memmgr.budget("4MB", device="cpu"):
        arrays = [] if after else [p.detach().numpy() for p in model.parameters()]
        for _ in range(6):
            model(torch.randn(512, 256)).square().mean().backward()
        arrays += [p.detach().numpy() for p in model.parameters()]
    said = capsys.readouterr().err
    assert arrays and "where the time went" in said
    place = f"times at {show(__file__)}:"
    assert (place not in said) if after else (place in said), said


def test_a_fast_run_says_nothing_of_addresses() -> None:
    sites = {"escapes.train.py:9": 2, "escaped_bytes": 3_000_000, "fixed_bytes.peak": 0}
    assert not [
        line for line in advice(_stats(**sites, recompute_seconds=0.0, stall_seconds=0.0)) if "addresses" in line
    ]
