"""Results from a stream: state, text, and one clear line for an invalid one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.view import top_text as text
from memmgr.tools.view.run_state import RunState, parse_line, read_log
from watch import lines


def fed(found: list[dict[str, Any]] | None = None, **how: Any) -> RunState:
    watched = RunState(4242, **how)
    for line in found if found is not None else lines.lines():
        watched.feed(line)
    return watched


def test_the_state_is_what_the_lines_say() -> None:
    watched = fed()
    assert watched.budget_bytes == lines.BUDGET and watched.pid == 4242 and len(watched.points) == 60
    assert watched.pass_count == 40 and watched.unlisted == 2
    assert watched.shares(10.0) == pytest.approx((0.1, 0.02))
    modules = dict(watched.by("module"))
    assert next(iter(modules)) == "Net.first.0" and modules["Net.first.0"]["recompute"].seconds == 1.0
    assert modules["(waiting for room)"]["stall"].count == 3
    said = [words for _, words in watched.log]
    assert "no plan: no schedule fits" in said and "3 lines were dropped: this reader was slow" in said
    watched.feed(lines.end(passes=7))
    assert watched.stats["passes"] == 7


def test_history_is_bounded_for_a_screen_and_whole_for_a_report() -> None:
    many = [lines.hello(), *(lines.sample(i) for i in range(2000))]
    assert len(fed(many).points) == 600 and len(fed(many, points=None).points) == 2000


def test_another_version_is_named() -> None:
    with pytest.raises(UsageError, match=r"writes telemetry version 9 \(memmgr 9.0\).*reads version 2"):
        fed([lines.hello(protocol=9, memmgr="9.0")])


@pytest.mark.parametrize(
    "line",
    [
        {"type": "sample"},
        {"type": "sample", **{k: "x" for k in lines.sample(0) if k != "type"}},
        {"type": "events", "items": 3, "seconds": 0},
        {"type": "cells", "cells": {}, "modules": []},
        {"type": "passes", "count": 1, "each": [[]]},
        {"type": "end"},
        {"type": "hello", "protocol": 2},
    ],
)
def test_a_line_of_another_shape_is_one_clear_error(line: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="not of this format"):
        fed([line])


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[1]", b"", b"[" * 100_000])
def test_what_is_no_line(data: bytes) -> None:
    with pytest.raises(UsageError, match="lines of JSON"):
        parse_line(data)


SCREEN = """\
4242  python train.py --name 'a b'                    backward  5 passes  29.5 s
budget 8 MB  now 4.2 MB (52%)  peak 8 MB  floor 3.9 MB  need 12 MB
   12 MB |    :         :
         |    ..        ..        ..        ..        ..        ..
    8 MB |--/####/----/####/----/####/----/####/----/####/----/####/------------
         |/########//########//########//########//########//########
         |===========================================================
          29.5 s ago         +         +         +         +          now
= fixed  # evictable  / at times  . evicted  : offloaded  + a pass
10 s: 5 s a pass recomputing 10% waiting 2.0%  all: evicted 60 MB offloaded 9 MB
========########________~~~~~~~~        ========########________~~~~~~~~
========########________~~~~~~~~        ========########________~~~~~~~~
_ free  = fixed  # evictable  ~ leaving  9.5 s old
size     state     what             module                 age        cost
1.05 MB  resident  gelu             Net.first.1            1.05 ms    1.05 ms
1.05 MB  evicted   gelu             Net.second.1           1.05 ms    4 ms
900 kB   offloaded addmm            Net.first.0            900 us     -
800 kB   fixed     >blocks.0.weight (optimizer states)     800 us     800 us
700 kB   clean     native_dropout   >ep.deep.deep.deep.end 700 us     700 us
600 kB   evicted   gelu             Net.first.1            1 min 10 s 600 us"""


def test_one_screen_at_80_by_24() -> None:
    shown = text.plain(text.once(fed(), 80, 24, text.ASCII))
    assert shown == SCREEN
    assert len(shown.splitlines()) <= 23 and max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("binary", [False, True])
def test_long_figures_fit_into_80_columns(binary: bool) -> None:
    watched, budget = fed(), 1023 << 20
    watched.hello["binary"] = binary
    watched.sample |= {"budget_bytes": budget, "resident_bytes": budget}
    watched.sample["total"] |= {"evicted_bytes": budget, "offload_bytes": budget, "unmanaged_peak_bytes": budget}
    watched.sample["total"] |= {"resident_bytes.peak": budget, "floor_bytes": budget}
    for line in (text.budget_line(watched, 80, text.UNICODE), text.activity(watched, 80, text.UNICODE)):
        assert "…" not in text.plain([line]), line


@pytest.mark.parametrize("glyphs", [text.UNICODE, text.ASCII])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_line_fits_and_every_state_has_a_character(glyphs: text.Glyphs, width: int) -> None:
    shown = text.once(fed(), width, 24, glyphs)
    for line in shown[:13]:
        assert sum(len(part) for part, _ in line) <= max(width, 70), line
    assert len({getattr(glyphs, name) for name in (*text.MEMORY, "budget")}) == 6
    assert len({getattr(glyphs, name) for name in text.SPACE}) == 4
    axis, meaning = text.plain(shown[7:9]).splitlines()
    assert axis.index(" s ago ") < axis.index(f" {glyphs.ended} ") < axis.index(" now"), axis
    assert meaning.endswith(f"  {glyphs.ended} a pass") and "pass" not in axis, (
        "no word of it reads as a part of the axis"
    )
    if glyphs is text.ASCII:
        assert text.plain(shown).isascii()


def test_plans_device_and_tier_are_shown() -> None:
    plan = lines.plan(overhead=1.026)
    none = {"type": "event", "what": "no_plan", "seconds": 3.0, "ops": 9, "text": "no schedule fits"}
    found = [lines.hello(device="cuda:1", tier="host")]
    for i in range(10):
        total = lines.stats(passes=2 * i, planned_passes=max(0, 2 * i - 6))
        found.append(lines.sample(i, total=total))
    found += [{**plan, "lower_bound": 1.0, "later": "unknown"}, none]
    watched = fed(found)
    shown = text.plain(text.once(watched, 100, 24, text.ASCII)).splitlines()
    assert shown[0].startswith("4242 cuda:1  python") and "backward by plan  18 passes  4.5 s" in shown[0]
    assert (
        ": offloaded (host)" in shown[8]
        and shown[9].startswith("so far: 4 passes/s recomputing")
        and shown[9].endswith("planned 12")
    )
    assert "planned" not in text.plain([text.activity(watched, 75, text.ASCII)])  # no room, and no half a word
    said = [words for _, words in watched.plans]
    assert "of 40 ops 6 run again, 5 offloads" in said[0] and "predicted 1.026x, bound 1.000x" in said[0]
    assert said[1] == "no plan: no schedule fits" and len(text.log_lines(watched, "no schedule fits")) == 1
    watched.feed(lines.sample(29, total=lines.stats(passes=99, planned_passes=12)))  # later ones go another way
    assert "by plan" not in text.plain([text.title(watched, 100, text.ASCII)])


def test_before_anything_has_come() -> None:
    shown = text.plain(text.once(RunState(7), 80, 24, text.ASCII))
    assert shown.startswith("7 ") and "waiting" in shown.splitlines()[0] and "waiting for the map" in shown


def test_without_a_budget_and_without_an_address_space() -> None:
    found = [lines.hello(budget_bytes=2**64 - 1), lines.sample(3, budget_bytes=2**64 - 1)]
    found.append({"type": "map", "seconds": 1.0, "span_bytes": 0, "columns": [[0] * 7] * 10})
    shown = text.plain(text.once(fed(found), 80, 24, text.ASCII))
    assert "budget none" in shown and "no address space to show" in shown and "----" not in shown


def test_names_of_programs_do_not_reach_the_terminal_raw() -> None:
    found = [lines.hello(command=["python", "\x1b[2J\x07bad\ud800", "日本.py"]), lines.sample(0)]
    shown = text.plain(text.once(fed(found), 80, 24, text.ASCII))
    assert "\x1b" not in shown and "\x07" not in shown and "日本" in shown
    shown.encode("utf-8")


@pytest.mark.parametrize("order", text.SORTS)
def test_cells_are_sorted_and_filtered(order: str) -> None:
    watched = fed()
    rows = text.cell_rows(watched, order)
    assert len(rows) == 6
    first = {
        "size": "1.05 MB",
        "age": "1 min 10 s",
        "cost": "4 ms",
        "module": "Net.deep.",
        "op": "addmm",
        "state": "clean",
    }[order]
    assert any(part.startswith(first) for part in rows[0]), rows[0]
    assert [row[3] for row in text.cell_rows(watched, order, "FIRST.0")] == ["Net.first.0"]
    assert [row[0] for row in text.module_rows(watched, "first")] == ["Net.first.1", "Net.first.0"]
    assert [row[0] for row in text.state_rows(watched, "optim")] == ["optimizer states"]
    assert len(text.log_lines(watched, "no schedule")) == 1


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0"),
        (2e-6, "2 us"),
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),
        (4.25, "4.25 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_times_as_people_write_them(seconds: float, shown: str) -> None:
    assert text.show_seconds(seconds) == shown


# -- logs --


def test_a_log_is_read_whole(tmp_path: Path) -> None:
    log = lines.written(
        tmp_path / "run.jsonl", [*lines.lines(), lines.end(), lines.hello(1), lines.sample(0), lines.end()]
    )
    sessions, missing = read_log(log)
    assert [s.pid for s in sessions] == [4242, 1] and missing == ""
    assert len(sessions[0].points) == 60 and len(sessions[0].passes) == 2


def test_a_log_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    log = lines.written(tmp_path / "run.jsonl", lines.lines())
    assert "no end" in read_log(log)[1]
    with log.open("a") as file:
        file.write(json.dumps(lines.sample(61))[:-20])
    sessions, missing = read_log(log)
    assert "is cut off" in missing and len(sessions[0].points) == 60


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "is this a log of memmgr"),
        (b'{"a": 1}\n', "does not begin as a log"),
        (b'{\n "budget": 1\n}\n', r"a summary \(run --json\); name the file of --log"),
        (json.dumps(lines.hello()).encode() + b"\n", "before the first sample"),
        (json.dumps(lines.hello()).encode() + b'\n{"type": "sa', "before the first sample"),
        (
            json.dumps(lines.hello()).encode() + b"\nnonsense\n" + json.dumps(lines.sample(0)).encode(),
            "line 2 is no JSON",
        ),
        (json.dumps(lines.hello(protocol=7)).encode() + b"\n", "version 7"),
        (json.dumps(lines.hello()).encode() + b'\n{"type": "sample"}\n', "line 2: a line of type 'sample'"),
    ],
)
def test_what_is_no_log(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "run.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=says):
        read_log(tmp_path / "run.jsonl")


def test_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UsageError, match="cannot read"):
            read_log(path)


# -- age of old tensors, and rate of change --


def test_what_is_old_says_so_and_what_is_new_does_not() -> None:
    watched = fed()
    assert text.age(watched, watched.cells) == "9.5 s old" and text.age(watched, watched.sample) == ""
    watched.feed({**lines.cells(), "seconds": 28.0})
    assert text.age(watched, watched.cells) == "" and text.age(watched, {}) == ""
    watched.feed(lines.end())
    assert text.age(watched, watched.map) == "", "after the end all of it is as old"


def test_a_process_that_says_nothing_is_silent() -> None:
    watched = fed()
    watched.silent_seconds = 2.0
    assert "silent" not in text.plain([text.title(watched, 100, text.ASCII)])
    watched.silent_seconds = 12.0
    (_, _, right) = text.title(watched, 100, text.ASCII)
    assert "silent for 12 s" in right[0] and right[1] == "bold red"
    assert text.age(watched, watched.cells) == "21.5 s old", "what it sent before grows old"


def test_a_stream_without_its_end_is_of_a_process_that_is_gone() -> None:
    watched = fed()
    watched.feed({"type": "gone", "seconds": watched.now})
    watched.silent_seconds = 12.3
    (_, _, right) = text.title(watched, 80, text.ASCII)
    assert right[0].startswith("  gone (killed?) 12 s ago  5 passes") and right[1] == "bold red"
    assert text.log_lines(watched)[-1].startswith("     29.5 s  gone: ")
    shown = text.once(watched, 80, 24, text.ASCII)
    assert text.plain(shown[-1:]) == "process 4242 has gone: no end of its budget came (killed?)" and len(shown) <= 23


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    ("last", "state"),
    [
        ([], "no end (killed?)  5 passes  after 29.5 s"),
        ([lines.end()], "ended  20 passes  after 29.5 s"),
        ([{**lines.end(), "failed": True, "error": "ValueError"}], "ended by ValueError  20 passes  after 29.5 s"),
    ],
)
def test_a_log_shows_nothing_live_and_all_of_its_time(last: list[dict[str, Any]], state: str, width: int) -> None:
    first, second, *rest = text.plain(
        text.once(fed([*lines.lines(), *last], points=None), width, 24, text.ASCII)
    ).splitlines()
    assert first.endswith(state) and second.startswith("budget 8 MB  peak 8 MB  floor 3.9 MB")
    axis = next(line for line in rest if line.endswith(" end"))
    assert axis.split()[:3] == ["29.5", "s", "before"], "the whole log is drawn"
    assert any(line.startswith("all of it: ") for line in rest)
    assert "the largest tensors at 20 s, the last time that the log has them" in rest
    assert not re.search(r"\b(now|phase|by plan|ago|so far|waiting for|address|old)\b", "\n".join([first, *rest]))


def test_a_log_of_more_samples_than_columns_is_drawn_from_its_beginning() -> None:
    found = [lines.hello(), *(lines.sample(i) for i in range(500))]
    shown = text.plain(text.chart(fed(found, points=None), 80, 6, text.ASCII))
    assert "4 min 9 s before " in shown and "4 min 9 s ago" not in text.plain(text.chart(fed(found), 80, 6, text.ASCII))


def test_the_peak_of_measuring_passes_is_left_out_where_it_does_not_fit() -> None:
    watched = fed()
    watched.sample["total"]["measuring_bytes.peak"] = 9_500_000
    wide, narrow = (text.plain([text.budget_line(watched, width, text.ASCII)]) for width in (100, 70))
    assert wide == "budget 8 MB  now 4.2 MB (52%)  peak 8 MB  measuring 9.5 MB  floor 3.9 MB  need 12 MB"
    assert narrow == "budget 8 MB  now 4.2 MB (52%)  peak 8 MB  floor 3.9 MB  need 12 MB"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (["/home/me/train.py", "--name", "a b"], "train.py --name 'a b'"),
        (["/site/pkg/__main__.py"], "pkg"),
        (["-c"], "python3 memmgr run --budget 120MB --log long.jsonl long.py"),
        (None, "python3 memmgr run --budget 120MB --log long.jsonl long.py"),
    ],
)
def test_the_first_line_names_the_script_and_not_its_launcher(script: list[str] | None, said: str) -> None:
    command = ["/v/bin/python3", "../v/bin/memmgr", "run", "--budget", "120MB", "--log", "long.jsonl", "long.py"]
    watched = fed([lines.hello(command=command, script=script), lines.sample(0)])
    assert watched.program == said
    if script and len(script) > 1:
        assert said in text.plain([text.title(watched, 80, text.ASCII)])


@pytest.mark.parametrize(
    ("rate", "said"), [(0.0, "no pass"), (0.07, "14.3 s a pass"), (1.0, "1 passes/s"), (4.83, "4.83 passes/s")]
)
def test_how_fast_it_goes(rate: float, said: str) -> None:
    assert text.show_rate(rate, "pass") == said
    assert text.show_rate(rate, "step") == said.replace("passes", "steps").replace("pass", "step")


def test_the_rate_is_of_the_last_seconds() -> None:
    assert fed([lines.hello()]).rate() == (0.0, "pass")
    slow = [lines.sample(i, total=lines.stats(passes=0)) for i in range(30)]
    fast = [lines.sample(30 + i, total=lines.stats(passes=2 * i)) for i in range(30)]
    assert fed([lines.hello(), *slow, *fast]).rate() == (pytest.approx(4.0), "pass")
    # Four passes a step, where gradients accumulate.
    stepped = [lines.sample(30 + i, total=lines.stats(passes=4 * i, steps=i)) for i in range(30)]
    assert fed([lines.hello(), *slow, *stepped]).rate() == (pytest.approx(2.0), "step")
    assert fed([lines.hello(), lines.sample(8, total=lines.stats(passes=40, steps=10))]).rate()[1] == "step"


def test_what_has_no_name_is_said_in_words() -> None:
    for glyphs in (text.UNICODE, text.ASCII):
        assert "?" not in text.plain(text.once(fed(), 80, 24, glyphs))
    watched = fed()
    assert all("?" not in part for row in text.module_rows(watched) for part in row)
    assert [name for name, _ in watched.by("op")] == ["addmm", "gelu", "(waiting for room)"]


def test_no_style_is_the_colour_of_a_ground() -> None:
    """There are dark and light screens: white or black letters vanish on one of them."""
    used = {word for style in text.STYLES.values() for word in style.split()}
    assert not used & {"white", "black", "bright_white"}, used
