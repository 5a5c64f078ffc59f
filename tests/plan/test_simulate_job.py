"""`memmgr simulate --job`: the budgets of ranks that wait for each other, inputs that are no job, and splits of a total."""

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memmgr.policies.plan.split import Curve, Limit, Split, equal, fits, split, spread
from memmgr.policies.trace import Op, OpKind, Trace
from memmgr.telemetry.trace_file import read_about, write_trace
from memmgr.tools import cli
from memmgr.tools.verbs import simulate as verb
from memmgr.tools.view import simulate_job

from .test_paging import Training


def rank(folder: Path, number: int, layers: int, world: int = 2, **about: Any) -> Trace:
    trace = Training(layers).trace()
    said = {"rank": number, "world_size": world, "job": "run 7", "host": "here", **about}
    write_trace(folder / f"run.rank{number}.trace", trace, said)
    return trace


def job(*words: object) -> int:
    return cli.main(["simulate", "--job", *(str(word) for word in words)])


@pytest.fixture(scope="module", autouse=True)
def simulated_once() -> Iterator[None]:
    """The jobs here have the same ranks: a pass is planned once for each budget."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verb, "_simulate", functools.cache(verb._simulate))
        yield


@pytest.fixture
def unequal(tmp_path: Path) -> Path:
    """A heavy rank and a light one."""
    rank(tmp_path, 0, 3)
    rank(tmp_path, 1, 1)
    return tmp_path


def test_the_heavy_rank_gets_more(unequal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs = [simulate_job.Rank(0, p, simulate_job.read_trace(p)).need_bytes for p in sorted(unequal.iterdir())]
    total = int(sum(needs) * 0.75)
    assert job(unequal, "--total", f"{total}B", "--json") == 0
    shown, said = capsys.readouterr()
    found = json.loads(shown)
    assert "rank 0 in" in said and "rank 1 in" in said, "progress"
    heavy, light = found["ranks"]
    assert (heavy["rank"], light["rank"]) == (0, 1) and [heavy["need_bytes"], light["need_bytes"]] == needs
    assert heavy["budget_bytes"] > heavy["equal_bytes"] and heavy["budget_bytes"] + light["budget_bytes"] <= total
    assert found["unmanaged_step_seconds"] <= found["step_seconds"] < found["equal_step_seconds"]
    assert found["step_seconds"] == max(heavy["seconds"], light["seconds"])
    for one in (heavy, light):  # the curve is the simulator's own
        budget, seconds = one["curve"][len(one["curve"]) // 2]
        assert cli.main(["simulate", one["trace"], "--budget", f"{budget}B", "--json"]) == 0
        alone = json.loads(capsys.readouterr().out)
        assert alone["overhead"] * alone["unmanaged_seconds"] == pytest.approx(seconds)
    # No device has more than so much, and both are on one host.
    limit = heavy["budget_bytes"] - 1
    words = ("--host-total", f"{total}B", "--limit", f"{limit}B", "--json")
    assert job(*sorted(unequal.iterdir()), *words) == 0
    bounded = json.loads(capsys.readouterr().out)
    assert bounded["ranks"][0]["budget_bytes"] <= limit and bounded["step_seconds"] >= found["step_seconds"]


def test_a_table_and_a_picture(unequal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert job(unequal, "--limit", "60B", "--picture", unequal / "job.svg") == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[2:5]] == ["0", "1", "step"]
    assert "case $RANK in 0) export MEMMGR_BUDGET=" in shown and "<svg" in (unequal / "job.svg").read_text()


def test_waiting_is_nobodys_own_time() -> None:
    trace = Training(2).trace()
    wait = (Op("c10d::allreduce_", 5.0, (), (), OpKind.VIEW), Op("(between ops)", 2.0, (), (), OpKind.VIEW))
    ran = replace(trace, ops=(*trace.ops, *wait, Op("(between ops)", 1.0, (), (), OpKind.VIEW)))
    assert simulate_job.waiting_seconds(trace) == 0.0 and simulate_job.waiting_seconds(ran) == 7.0
    assert simulate_job.Rank(0, Path(), ran, waits=7.0).own_seconds == pytest.approx(trace.seconds + 1.0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--format", "dtr"), "--sweep and --format are of one pass"),
        (("--solver-seconds", "-3"), "--solver-seconds must not be negative"),
    ],
)
def test_what_says_nothing_of_a_job(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(tmp_path, "--total", "1GB", *words) == 2
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1


def test_what_is_no_job(unequal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: object) -> str:
        assert job(*words) == 2
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith("memmgr simulate: ")
        return str(last)

    zero, one = sorted(unequal.iterdir())
    assert "of 2 ranks 1 missing" in refused(zero, "--total", "99B")
    assert "rank 0 twice" in refused(zero, zero, "--total", "99B")
    assert "how much is there?" in refused(unequal)
    assert "FILE, --ratio" in refused(unequal, "--total", "99B", "--ratio", "0.5")
    assert "not all" in refused(unequal, "--total", "99B", "--policy", "all")
    assert "how much is there?" in refused(unequal, "--total", "none")
    small = refused(unequal, "--total", "3B")
    assert "3 B are less than what fits" in small and "rank 0" in small and "rank 1" in small
    rank(unequal, 1, 1, job="run 8")
    assert "not one job" in refused(unequal, "--total", "99B") and "run 8" in refused(unequal, "--total", "99B")
    rank(unequal, 1, 1, world=4)
    assert "number of ranks" in refused(unequal, "--total", "99B")
    plain = tmp_path / "plain.trace"
    write_trace(plain, Training(2).trace())
    assert read_about(plain) == {} and "of which rank" in refused(plain, "--total", "99B")
    (tmp_path / "empty").mkdir()
    assert "no traces in this folder" in refused(tmp_path / "empty", "--total", "99B")
    assert cli.main(["simulate", str(plain), "--sweep", "--total", "9B"]) == 2
    assert "are of a --job" in capsys.readouterr().err
    assert cli.main(["simulate", "--total", "9B"]) == 2
    assert "a file is needed" in capsys.readouterr().err


points = st.lists(
    st.tuples(st.integers(1, 12), st.one_of(st.none(), st.integers(1, 6).map(float))), min_size=1, max_size=5
)
curve = points.map(Curve.of).filter(lambda c: bool(c.points))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Curve], list[Limit]]:
    curves = draw(st.lists(curve, min_size=1, max_size=3))
    ranks = tuple(range(len(curves)))
    limits = [Limit(ranks, draw(st.integers(1, 30)))]
    if draw(st.booleans()):  # hosts, or devices
        limits += [Limit((rank,), draw(st.integers(1, 12))) for rank in ranks]
    if draw(st.booleans()):
        limits.append(Limit(ranks[:2], draw(st.integers(1, 20))))
    return curves, limits


def by_trying_all(curves: list[Curve], limits: list[Limit]) -> float | None:
    found = [
        max(seconds for _, seconds in chosen)
        for chosen in itertools.product(*(c.points for c in curves))
        if fits([budget for budget, _ in chosen], limits)
    ]
    return min(found, default=None)


@given(jobs())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_none_is_better(job: tuple[list[Curve], list[Limit]]) -> None:
    curves, limits = job
    best, found = by_trying_all(curves, limits), split(curves, limits)
    assert (found.seconds if found is not None else None) == best
    if found is None:
        return
    reached = [c.seconds(b) for c, b in zip(curves, found.budgets, strict=True)]
    assert max(s for s in reached if s is not None) == found.seconds and None not in reached
    most = [c.points[-1][0] for c in curves]
    for budgets in (found.budgets, spread(found.budgets, most, limits)):
        assert fits(budgets, limits)
        assert all(b <= max(m, own) for b, m, own in zip(budgets, most, found.budgets, strict=True))
        assert all(c.least_bytes(found.seconds) <= b for c, b in zip(curves, budgets, strict=True))  # type: ignore[operator]
    beside = [c.seconds(b) for c, b in zip(curves, equal(len(curves), limits), strict=True)]
    # The equal split may use budgets that are no point of the curve, which is worth no more than the point below.
    assert None in beside or found.seconds <= max(s for s in beside if s is not None)


def test_the_slowest_rank_gets_what_the_other_does_not_need() -> None:
    heavy = Curve.of([(4, 9.0), (8, 3.0), (10, 1.0), (6, None)])
    light = Curve.of([(1, 1.5), (2, 1.0), (5, 1.0)])
    assert heavy.points == ((4, 9.0), (8, 3.0), (10, 1.0)) and light.points == ((1, 1.5), (2, 1.0))
    limits = [Limit((0, 1), 11)]
    assert split([heavy, light], limits) == Split((10, 1), 1.5)
    assert equal(2, limits) == (5, 5) and heavy.seconds(5) == 9.0
    assert split([heavy, light], [Limit((0, 1), 4)]) is None


def test_what_is_left_over_goes_to_who_can_use_it() -> None:
    assert spread((10, 2, 3), (10, 4, 30), [Limit((0, 1, 2), 25)]) == (10, 4, 11)
    assert spread((1, 1), (9, 9), [Limit((0, 1), 9)]) == (4, 5)
    assert spread((1, 1), (9, 9), [Limit((0, 1), 20), Limit((0,), 3), Limit((1,), 8)]) == (3, 8)
