"""Model states in the views: the panel, the page, the trace, and the one knob of the advice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from memmgr.observe.advice import changes
from memmgr.observe.states import flows
from memmgr.tools.view import top_text as text
from memmgr.tools.view.perfetto import trace
from memmgr.tools.view.run_state import RunState
from watch import lines
from watch.test_report import Page, report

MB = 1_000_000
MOVED = {"parameters": 20 * MB, "gradients": 20 * MB, "optimizer_states": 50 * MB, "other": 10 * MB}


def stats(moved: float = 1.0, **changed: Any) -> dict[str, Any]:
    """20 passes of a quarter of a second that moved 5 MB each, over a link that moves 20 MB/s."""
    found: dict[str, Any] = {
        "room_seconds": 0.2,
        "link_bytes_per_second": 20.0 * MB,
        "kept_gradient_bytes": 0,
        "offloads": 90,
        "planned_passes": 17,
        **{f"moved_bytes.{kind}": int(moved * size) for kind, size in MOVED.items()},
        **{f"resident_bytes.{kind}": MB for kind in MOVED},
        **{f"offloaded_bytes.{kind}": 2 * MB for kind in MOVED},
    }
    return lines.stats(**{**found, **changed})


def samples(count: int = 60) -> list[dict[str, Any]]:
    """A pass every five seconds, each of which takes four and moves 5 MB."""
    found = []
    for i in range(count):
        total = stats(i / 200, passes=i // 10, watched_seconds=4.0 * (i // 10), wall_seconds=0.5 * i)
        found.append(lines.sample(i, total=total))
    return found


def watched(found: list[dict[str, Any]]) -> RunState:
    one = RunState()
    for each in found:
        one.feed(each)
    return one


def test_flows_are_of_a_pass() -> None:
    found = flows(stats())
    assert found is not None and [f.moved_bytes for f in found.each] == [MB, MB, 2.5 * MB, 0.5 * MB]
    assert (found.moved_bytes, found.states_moved_bytes, found.pass_seconds, found.link_bytes) == (
        5 * MB,
        4.5 * MB,
        0.25,
        5 * MB,
    )
    between = flows(stats(3.0, passes=40, watched_seconds=15.0), stats())
    assert between is not None and between.moved_bytes == 10 * MB and between.pass_seconds == 0.5
    assert flows(lines.stats()) is None, "a log of a memmgr that did not tell"


def test_without_a_pass_the_run_is_one() -> None:
    found = flows(stats(passes=0, watched_seconds=0.0))
    assert found is not None and found.moved_bytes == 100 * MB and found.pass_seconds == 10.0


def test_turns_of_a_loop_share_all_the_time() -> None:
    found = flows(stats(watched_seconds=0.0))
    assert found is not None and (found.pass_seconds, found.link_bytes) == (0.5, 10 * MB), "20 turns in 10 s"


# -- top --


def test_the_screen_shows_the_last_seconds() -> None:
    rows = text.state_rows(watched([lines.hello(), *samples()]))
    assert [row[0] for row in rows[:4]] == ["parameters", "gradients", "optimizer states", "other"]
    # From the pass that was under way ten seconds ago: 2 more passes, 20 samples of half a percent.
    assert rows[2] == ("optimizer states", "3 MB", "1 MB", "2 MB", "2.5 MB")  # the places, until all bytes are told
    assert rows[4] == ("the link could move in 4 s", "", "", "", "80 MB")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_one_screen_has_them_and_still_the_cells(width: int, height: int) -> None:
    shown = text.plain(text.once(watched([lines.hello(), *samples(), lines.cells()]), width, height, text.ASCII))
    assert max(map(len, shown.splitlines())) <= width and len(shown.splitlines()) <= height
    assert "model states" in shown and "moved a pass" in shown and "optimizer states" in shown
    assert "gelu" in shown, "the largest cells are still there"


def test_where_no_state_left_the_screen_is_as_it_was() -> None:
    calm = {f"{what}.{kind}": 0 for what in ("moved_bytes", "offloaded_bytes") for kind in MOVED}
    one = watched([lines.hello(), *(lines.sample(i, total=stats(**calm)) for i in range(20))])
    assert "model states" not in text.plain(text.once(one, 80, 24, text.ASCII))


# -- report, perfetto --


def test_the_page_has_a_picture_and_a_table_of_the_whole_run(tmp_path: Path) -> None:
    log = lines.written(
        tmp_path / "run.jsonl", [lines.hello(), *samples(), {**lines.end(), "stats": stats(), "failed": False}]
    )
    shown = report(tmp_path, str(log))
    words = " ".join(Page(shown).words)
    assert "Model states, and bytes moved a pass" in words and "the link could move in 250 ms" in words
    assert "takes in the time of a pass" in words, "it says what could move is"
    assert 'class="optimizer_states"' in shown and "<td>2.5 MB</td>" in shown
    assert "slowdown at least 1.25x" in words


def test_every_colour_of_the_page_is_defined(tmp_path: Path) -> None:
    """A shape without a rule is black: it is wrong on white, and invisible in the dark."""
    log = lines.written(
        tmp_path / "run.jsonl",
        [lines.hello(), *samples(), *lines.lines()[1:], {**lines.end(), "stats": stats(), "failed": False}],
    )
    page = report(tmp_path, str(log))
    style = page[page.index("<style>") : page.index("</style>")]
    defined = set(re.findall(r"(--[\w-]+):", style))
    assert {"--other", "--parameters"} <= set(re.findall(r"var\((--[\w-]+)\)", page)) <= defined
    filled = set(re.findall(r"\.([\w-]+) {[^}]*(?:fill|stroke|background):", style))
    drawn = re.findall(r'<(?:rect|polygon|line|text)[^>]* class="([^"]+)"', page)
    assert {"other", "optimizer_states", "link"} <= {word for words in drawn for word in words.split()}
    assert not [words for words in drawn if not filled & set(words.split())]
    assert '<i style="background: var(--other)"></i>other' in page, "it has a swatch in the table"


def test_the_trace_has_a_counter_of_what_moved() -> None:
    events = trace([("run", watched([lines.hello(), *samples(20)]))])["traceEvents"]
    (last,) = [e for e in events if e["name"] == "moved since the beginning"][-1:]
    assert last["args"] == {kind: int(19 / 200 * size) for kind, size in MOVED.items()}
    events = trace([("run", watched(lines.lines(20)))])["traceEvents"]
    assert not [e for e in events if e["name"] == "moved since the beginning"]


# -- the advice --


def advised(**changed: Any) -> str:
    """The line about the one knob: by default 4 of 10 s are waits."""
    found = changes(
        stats(**{"stall_seconds": 4.0, "recompute_seconds": 0.0, "unmanaged_peak_bytes": 40 * MB, **changed})
    )
    return found[0]


def test_a_link_that_takes_longer_than_the_ops_hides_behind_more_tokens() -> None:
    said = advised()
    # 0.4 of the time is waiting, nine tenths of the moved bytes are states, half of it for each token.
    assert said.startswith("twice the tokens a step") and "about 18% less time for the same data" in said
    moved = "Model states are 4.5 MB of the 5 MB that a pass moves; moving all takes the link 250 ms, and the ops take 150 ms"
    assert moved in said


def test_where_the_ops_take_longer_a_faster_link_is_named() -> None:
    said = advised(link_bytes_per_second=80.0 * MB)
    assert "a tier that is twice as fast (--disk" in said and "), about 20%" in said


def test_where_little_is_missing_a_larger_budget_is_named() -> None:
    said = advised(unmanaged_peak_bytes=lines.BUDGET + MB)
    assert "+1 MB of budget (9 MB), about 40% less time" in said


def test_gradients_that_are_kept_are_named_where_they_are_most_of_it() -> None:
    said = advised(kept_gradient_bytes=4 * MB, link_bytes_per_second=80.0 * MB)
    assert said.startswith("zero_grad(set_to_none=True): 4 MB of gradients outlive a step, about 32%")


def test_one_knob_and_no_other_estimate_beside_it() -> None:
    found = changes(stats(stall_seconds=4.0, recompute_seconds=0.0, unmanaged_peak_bytes=40 * MB))
    assert len(found) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {f"moved_bytes.{kind}": 0 for kind in ("parameters", "gradients", "optimizer_states")},
        {"link_bytes_per_second": 0.0},
    ],
)
def test_a_run_that_does_not_wait_for_states_is_advised_as_ever(changed: dict[str, Any]) -> None:
    assert "would remove about 80 %" in "".join(
        changes(stats(stall_seconds=4.0, unmanaged_peak_bytes=40 * MB, **changed))
    )


def test_what_costs_little_is_not_worth_a_knob() -> None:
    assert changes(stats(stall_seconds=0.1, recompute_seconds=0.0, unmanaged_peak_bytes=40 * MB)) == []
