"""Memory as a band: a column is never one sample, and its highest moment is never left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from memmgr.tools.view.columns import RESIDENT, UNMANAGED, columns, ends_of_passes, nice
from memmgr.tools.view.run_state import RunState
from watch import lines
from watch.test_report import report


def watched(samples: int, passes_each: float = 0.1) -> RunState:
    found = RunState(points=None)
    found.feed(lines.hello())
    for i in range(samples):
        found.feed(lines.sample(i, total=lines.stats(passes=int(passes_each * i))))
    return found


@pytest.mark.parametrize(("samples", "most"), [(5000, 480), (481, 480), (60, 480), (2, 70)])
def test_every_sample_lies_in_the_column_of_its_time(samples: int, most: int) -> None:
    points = list(watched(samples).points)
    found = columns(watched(samples), points, most)
    assert len(found) == min(most, samples - 1)
    assert found[0].begin == points[0].seconds and found[-1].end == points[-1].seconds
    assert all(a.end == b.begin for a, b in zip(found, found[1:], strict=False)), "they touch"
    for point in points:
        for column in found:
            if column.begin <= point.seconds <= column.end:
                assert column.least[RESIDENT] <= point.resident_bytes <= column.most[RESIDENT]
                assert column.least[UNMANAGED] <= point.unmanaged_bytes <= column.most[UNMANAGED]


def test_edges_rise_from_layer_to_layer() -> None:
    one = watched(60)
    for end in (7.0, 12.0):
        one.feed(passes(end, 1.0, 20_000_000))
    for column in columns(one, list(one.points), 100):
        assert list(column.least) == sorted(column.least) and list(column.most) == sorted(column.most)


def passes(end: float, seconds: float, peak: int) -> dict[str, object]:
    line = {
        "type": "passes",
        "seconds": end,
        "count": 1,
        "resident_peak_bytes": 8_000_000,
        "unmanaged_peak_bytes": peak,
    }
    each = [end, seconds / 2, seconds / 2, 8_000_000, peak]
    return {**line, "forward_seconds": seconds / 2, "backward_seconds": seconds / 2, "each": [each]}


def test_a_pass_that_no_sample_met_shows_its_peak_and_only_where_it_was() -> None:
    one = watched(60)
    before = columns(one, list(one.points), 100)
    one.feed(passes(10.4, 0.3, 20_000_000))
    after = columns(one, list(one.points), 100)
    changed = [column for column, was in zip(after, before, strict=True) if column.most != was.most]
    assert [column.most[UNMANAGED] for column in changed] == [20_000_000]
    assert changed[0].begin <= 10.1 and changed[0].end >= 10.4
    assert changed[0].most[RESIDENT] == 8_000_000


def test_passes_that_are_faster_than_samples_make_a_band_not_a_saw() -> None:
    """Ten samples a cycle, but three passes a sample: a single sample says nothing about the pass, the band around it
    does.
    """
    fast = watched(60, passes_each=3.0)
    found = columns(fast, list(fast.points), 100)
    assert {(column.least[RESIDENT], column.most[RESIDENT]) for column in found[1:-1]} == {(3_000_000, 8_000_000)}


def test_only_where_samples_are_few_is_there_a_band(tmp_path: Path) -> None:
    """A log begins with many samples a pass. With its first second as the measure, the rest was drawn as blocks."""
    found = [lines.hello(), *(lines.sample(i, total=lines.stats(passes=i // 10)) for i in range(100))]
    found += [lines.sample(i, total=lines.stats(passes=10 + 3 * (i - 100))) for i in range(100, 160)]
    one = RunState(points=None)
    for line in found:
        one.feed(line)
    shown = columns(one, list(one.points), 480)
    assert not any(column.sparse for column in shown[:80]) and all(column.sparse for column in shown[110:])
    assert len({(column.least, column.most) for column in shown[115:-1]}) == 1
    end = lines.end(passes=190)
    page = report(tmp_path, str(lines.written(tmp_path / "run.jsonl", [*found, end])))
    assert page.count("few samples a pass: the least and the most, no curve") == 1
    few = report(tmp_path, str(lines.written(tmp_path / "run.jsonl", [*found[:100], end])))
    assert "few samples" not in few


def test_columns_are_equal_parts_of_the_time() -> None:
    one = watched(1)
    one.feed({"type": "levels", "seconds": 1.0, "each": [[0.01 * i, 5, 5, 0, 0, 0] for i in range(1, 101)]})
    one.feed({"type": "levels", "seconds": 9.0, "each": [[1.0 + 0.1 * i, 5, 5, 0, 0, 0] for i in range(1, 91)]})
    found = columns(one, list(one.points), 20)
    assert [column.begin for column in found] == pytest.approx([0.5 * i for i in range(20)])
    assert found[-1].end == pytest.approx(10.0)


def test_levels_are_points_between_the_samples() -> None:
    one = watched(3)
    one.feed({"type": "levels", "seconds": 1.6, "each": [[1.3, 500, 400, 30, 2, 1], [1.6, 600, 400, 0, 0, 2]]})
    last = one.points[-1]
    assert len(one.points) == 5 and (last.seconds, last.passes, last.layers) == (1.6, 2, (200, 400, 0, 0))
    assert one.points[-2].absent_bytes == 32 and one.points[-2].budget_bytes == lines.BUDGET
    assert last.figure("recompute_seconds") == one.points[2].figure("recompute_seconds")


def test_one_sample_and_none() -> None:
    one = watched(1)
    (only,) = columns(one, list(one.points), 10)
    assert only.begin == only.end == 0.0 and only.least == only.most
    assert columns(one, [], 10) == []


def test_passes_are_marked_where_they_ended_and_not_too_many() -> None:
    points = list(watched(60).points)
    every, ends = ends_of_passes(points, 200)
    assert every == 1 and list(ends) == [(5.0 * n, n) for n in range(1, 6)]
    every, ends = ends_of_passes(points, 3)
    assert every == 2 and [number for _, number in ends] == [2, 4]
    every, ends = ends_of_passes(list(watched(60, 3.0).points), 10)
    found = list(ends)
    assert every == 20 and [number for _, number in found] == [20, 40, 60, 80, 100, 120, 140, 160]
    assert found[0][0] == pytest.approx(20 / 6)
    assert ends_of_passes(points[:3], 10)[0] == 0 and ends_of_passes([], 10)[0] == 0


@pytest.mark.parametrize(("least", "found"), [(0.0, 1), (1.0, 1), (1.1, 2), (3, 5), (7, 10), (2001, 5000)])
def test_round_numbers(least: float, found: int) -> None:
    assert nice(least) == found
