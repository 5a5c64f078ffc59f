"""`memmgr report`: one page that is complete in itself, from a whole log or the rest of one."""

from __future__ import annotations

import errno
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from memmgr.observe.advice import advice, more_budget
from memmgr.tools import cli
from memmgr.tools.view import top_text
from memmgr.tools.view.charts import LEFT, RIGHT, WIDTH
from memmgr.tools.view.run_state import RunState
from watch import lines

VOID = {"meta", "line", "rect", "polygon", "polyline"}


class Page(HTMLParser):
    """Tags that are opened are closed, and nothing is fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.count: dict[str, int] = {}
        self.feed(text)
        assert set(self.open) <= {"li", "p"}, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object") and not {"src", "href"} & {k for k, _ in attrs}
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def report(tmp_path: Path, *words: str) -> str:
    out = tmp_path / "page.html"
    assert cli.main(["report", *words, "--out", str(out)]) == 0
    return out.read_text()


def test_standard_output_gets_the_page_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = lines.written(tmp_path / "run.jsonl", [*lines.lines(), lines.end()])
    page = report(tmp_path, str(log))
    capsys.readouterr()
    assert cli.main(["report", str(log), "-o", "-"]) == 0
    assert capsys.readouterr().out == page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run.jsonl"]
    assert cli.main(["report", str(log), "-o", "-", "--format", "png"]) == 2
    assert "a picture needs a file" in capsys.readouterr().err


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = lines.written(tmp_path / "run.jsonl", [*lines.lines(), lines.end()])
    assert cli.main(["report", str(log)]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == str(tmp_path / "run.html") and shown.err == ""
    text = (tmp_path / "run.html").read_text()
    page = Page(text)
    said = " ".join(page.words)
    for piece in (
        "python train.py --name 'a b'",
        "smallest budget (floor)",
        "3.9 MB",
        "+4 MB of budget (12 MB, all that it needs) would remove all of the recomputing and waiting",
        "budget 8 MB",
        "Net.first.1",
        "addmm",
        "1.3 s",
        "(waiting for room)",
        "exp_avg of blocks.0.weight",
        "train.py:41",
        "Recomputing 15.0%, waiting 5.0% for reads and 0.0% for room",
        "2 events are in none of these sums",
        "Who holds the memory, at 20 s",
        "300 kB",
    ):
        assert piece in said, piece
    assert page.count["svg"] == 3 and page.count["polygon"] == 5 and page.count["table"] == 3
    assert not re.search(r"https?://|url\(|@import", text)
    assert not [word for word in page.words if "?" in word], "what is unknown is said in words"
    assert not re.search(r"\b0\.\d+ s\b", said), "under a second it is milliseconds"


@pytest.mark.parametrize(("binary", "budget"), [(True, "7.63 MiB"), (False, "8 MB")])
def test_sizes_are_in_the_units_of_the_user(binary: bool, budget: str, tmp_path: Path) -> None:
    """On the page, and in `top`, whose words come from the same lines."""
    error = {
        "type": "event",
        "what": "budget_error",
        "seconds": 2.0,
        "floor_bytes": 5_000_000,
        "enough_bytes": 6_000_000,
    }
    found = [lines.hello(binary=binary), *lines.lines()[1:], error, lines.plan(), lines.end()]
    text = report(tmp_path, str(lines.written(tmp_path / "run.jsonl", found)))
    watched = RunState()
    for line in found:
        watched.feed(line)
    screen = top_text.plain(top_text.once(watched, 100, 40, top_text.UNICODE))
    panels = (top_text.module_rows(watched), top_text.state_rows(watched))
    said = [text, screen, *(" ".join(row) for rows in panels for row in rows), *top_text.log_lines(watched)]
    assert f"budget {budget}" in text and f"budget {budget}" in screen
    units = set(re.findall(r"\d ([kKMG]i?B)\b", "\n".join(said)))
    assert "MiB" in units <= {"KiB", "MiB"} if binary else "MB" in units <= {"kB", "MB"}, units


def test_a_killed_run_is_reported_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = lines.written(tmp_path / "run.jsonl", lines.lines())
    page = report(tmp_path, str(log))
    assert "The log has no end" in page and "Its last sample is of 29.5 s." in page
    err = capsys.readouterr().err
    assert "it has no end: the process was killed" in err and len(err.splitlines()) == 1


def test_a_log_that_ends_before_the_first_pass_says_nothing_of_the_budget(tmp_path: Path) -> None:
    log = lines.written(tmp_path / "run.jsonl", [lines.hello(), *(lines.sample(i) for i in range(5))])
    assert "<li>nothing can be said: the log ends before the first pass does</li>" in report(tmp_path, str(log))


def test_a_run_that_failed_says_what_budget_would_have_worked(tmp_path: Path) -> None:
    failed = {
        "type": "event",
        "what": "budget_error",
        "seconds": 3.0,
        "floor_bytes": 5_000_000,
        "enough_bytes": 6_000_000,
        "resident": {},
        "modules": {},
    }
    log = lines.written(tmp_path / "run.jsonl", [*lines.lines(), failed, {**lines.end(), "failed": True}])
    said = report(tmp_path, str(log))
    assert "It ended by an exception" in said and "a budget of 6 MB (6,000,000 bytes) should do" in said


def test_plans_and_what_failed_behind_the_scenes(tmp_path: Path) -> None:
    events = [
        lines.plan(),
        *(
            {"type": "event", "what": "no_plan", "seconds": 3.0 + i, "ops": 9, "text": "no schedule is found"}
            for i in range(12)
        ),
    ]
    stats = lines.end(planned_passes=15, plan_seconds=0.11)
    said = report(tmp_path, str(lines.written(tmp_path / "run.jsonl", [*lines.lines(), *events, stats])))
    for piece in (
        "15 of 20 passes followed a plan to their end; making plans took 110 ms",
        "2 s: plan: of 40 ops 6 run again, 5 offloads; made in 250 ms",
        "3 s: no plan: no schedule is found (12 times, the last at 14 s)",
    ):
        assert said.count(piece) == 1, piece


def test_several_logs_and_several_budgets_in_one(tmp_path: Path) -> None:
    first = lines.written(tmp_path / "a.jsonl", [*lines.lines(), lines.end()] * 2)
    second = lines.written(tmp_path / "b.jsonl", [lines.hello(rank=1), *lines.lines()[1:], lines.end()])
    said = report(tmp_path, str(first), str(second))
    assert said.count("<h2>") == 3 and "b.jsonl, rank 1" in said
    many = lines.written(tmp_path / "c.jsonl", [lines.hello(), lines.sample(0), lines.end()] * 25)
    assert "5 more budgets were opened" in report(tmp_path, str(many))


def test_names_are_text_not_html(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    event = {"what": "recompute", "op": bad, "module": bad, "count": 1, "bytes": 10**6, "seconds": 5.0}
    found = [lines.hello(command=[bad, "\ud800"]), *(lines.sample(i) for i in range(3))]
    found += [{"type": "events", "seconds": 1.0, "items": [event], "unlisted": 0}, lines.end()]
    text = report(tmp_path, str(lines.written(tmp_path / "run.jsonl", found)))
    Page(text)
    assert bad not in text and "&lt;script&gt;" in text


@pytest.mark.parametrize("samples", [1, 2])
def test_short_runs(tmp_path: Path, samples: int) -> None:
    found = [lines.hello(budget_bytes=2**64 - 1), *(lines.sample(i, budget_bytes=2**64 - 1) for i in range(samples))]
    log = lines.written(tmp_path / "run.jsonl", [*found, lines.end(budget_bytes=2**64 - 1)])
    said = " ".join(Page(report(tmp_path, str(log))).words)
    assert " time 0 " in said
    assert "with a budget of 12 MB or more" in said and "would remove" not in said


@pytest.mark.parametrize("what", ["missing", "folder", "here", "no log", "itself", "nowhere"])
def test_bad_input_is_one_line_and_two(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    good = lines.written(tmp_path / "run.jsonl", [*lines.lines(), lines.end()])
    (tmp_path / "text.jsonl").write_text("step 1 loss 3.2\n")
    words, says = {
        "missing": ([str(tmp_path / "none.jsonl")], "cannot read"),
        "folder": ([str(tmp_path)], "cannot read"),
        "here": (["."], "cannot read .: it is a folder"),
        "no log": ([str(tmp_path / "text.jsonl")], "is this a log of memmgr?"),
        "itself": ([str(good), "--out", str(good)], "is what is read"),
        "nowhere": ([str(good), "--out", str(tmp_path / "no" / "x.html")], "does not exist"),
    }[what]
    assert cli.main(["report", *words]) == 2
    err = capsys.readouterr().err
    assert says in err and len(err.splitlines()) == 1
    assert json.loads(good.read_text().splitlines()[0])["type"] == "hello"


def test_a_full_disk_takes_no_earlier_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, page = lines.written(tmp_path / "run.jsonl", [*lines.lines(), lines.end()]), tmp_path / "run.html"
    page.write_text("the one before")

    def full(path: Path, text: str, **more: Any) -> int:
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert cli.main(["report", str(log)]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert page.read_text() == "the one before" and len(list(tmp_path.iterdir())) == 2


# -- predictions for a larger budget --


def test_more_budget_is_in_proportion_to_what_is_missing() -> None:
    assert more_budget(lines.stats()) == 3_200_000  # 4 MB are missing, 2 s of 10 s are lost
    assert more_budget(lines.stats(), share=0.5) == 2_000_000


def _advised(tmp_path: Path, **changed: float) -> str:
    log = lines.written(tmp_path / "run.jsonl", [*lines.lines(), lines.end(**changed)])
    (found,) = re.findall(r"<h3>What to change</h3><ul>(.*?)</ul>", report(tmp_path, str(log)))
    return str(found)


def test_there_is_a_change_or_it_says_that_there_is_none(tmp_path: Path) -> None:
    assert "; +4 MB of budget" in _advised(tmp_path)
    far = _advised(tmp_path, unmanaged_peak_bytes=20_000_000)
    assert far.startswith("<li>+9.6 MB of budget (17.6 MB) would remove about 80 %")
    assert far.endswith("(an estimate); that is about 16% less time</li>") and far.count("of budget") == 1
    fits = _advised(tmp_path, unmanaged_peak_bytes=7_000_000)
    assert fits == "<li>nothing: everything fitted, and 7 MB would have done</li>"
    cheap = _advised(tmp_path, recompute_seconds=0.1, stall_seconds=0.1)
    assert cheap.startswith("<li>nothing: recomputing and waiting took 2.0% of the time")
    assert "nothing: " not in _advised(tmp_path, unmanaged_peak_bytes=7_000_000, tier_errors=3)


def test_two_budgets_are_one_advice_in_one_place(tmp_path: Path) -> None:
    log = lines.written(tmp_path / "run.jsonl", [*lines.lines(), lines.end()])
    page = report(tmp_path, str(log))
    assert "help most" not in page and page.count("would remove all") == page.count("about 16% less time") == 1
    found = _advised(tmp_path)
    assert found.count("<li>") == 1 and found.startswith(
        "<li>+3.2 MB of budget (11.2 MB), about 16% less time (an estimate)"
    )
    assert found.endswith(
        "; +4 MB of budget (12 MB, all that it needs) would remove all of the recomputing and waiting</li>"
    )


def test_a_narrow_screen_scrolls_tables_and_pictures(tmp_path: Path) -> None:
    """On 420 pixels the first column broke letter by letter, and the words of a picture were five pixels high."""
    page = report(tmp_path, str(lines.written(tmp_path / "run.jsonl", [*lines.lines(), lines.end()])))
    assert page.count("<svg") == page.count("<div class=box><svg") == 3
    assert page.count("<table>") == page.count("<div class=box><table>") == 3
    (first,) = re.findall(r"td:first-child[^{]*{([^}]*)}", page)
    assert "min-width: 9rem" in first and "svg { width: 100%; min-width: 48rem" in page


def test_the_budget_begins_after_the_passes_that_measured(tmp_path: Path) -> None:
    limit = {"type": "event", "what": "limit", "seconds": 14.75, "text": "", "budget_bytes": 8_000_000}
    ended = lines.end(**{"measuring_bytes.peak": 9_500_000})
    pages = [
        report(tmp_path, str(lines.written(tmp_path / "run.jsonl", [*lines.lines(), *more])))
        for more in ([limit, ended], [lines.end()])
    ]
    begins = [float(x) for page in pages for x in re.findall(r'<line class="budget" x1="([\d.]+)"', page)]
    assert begins == [pytest.approx((LEFT + WIDTH - RIGHT) / 2, abs=0.1), LEFT], "half of 29.5 s"
    assert "peak while it measured<b>9.5 MB</b>" in pages[0] and "their peak was 9.5 MB" in pages[0]
    assert "measured" not in pages[1]


def test_a_budget_after_the_last_sample_has_no_line_outside_of_the_picture(tmp_path: Path) -> None:
    limit = {"type": "event", "what": "limit", "seconds": 40.0, "text": "", "budget_bytes": 8_000_000}
    page = report(tmp_path, str(lines.written(tmp_path / "run.jsonl", [*lines.lines(), limit, lines.end()])))
    (begin,) = re.findall(r'<line class="budget" x1="([\d.]+)"', page)
    assert float(begin) == WIDTH - RIGHT


def test_a_pointer_reads_the_figures_of_each_column(tmp_path: Path) -> None:
    page = report(tmp_path, str(lines.written(tmp_path / "run.jsonl", [*lines.lines(), lines.end()])))
    told = re.findall(r'class="value"[^>]*><title>([^<]*)</title>', page)
    assert len(told) == 59 and told[0] == "0: resident 3 MB to 4.2 MB, with absent memory 4.2 MB"


@pytest.mark.parametrize(("held", "share"), [(6_000_000, "6 MB"), (12_040_000, "all")])
def test_a_moment_holds_no_more_than_the_run_needed(held: int, share: str, tmp_path: Path) -> None:
    moment = {**lines.explained(), "bytes": held}
    log = lines.written(tmp_path / "run.jsonl", [*lines.lines(), moment, lines.end()])
    assert f"at 20 s: {share} of the 12 MB that the run needed" in report(tmp_path, str(log))


def test_the_floor_is_rounded_up_in_every_view(tmp_path: Path) -> None:
    """As in the summary of a run: a budget of the size that is shown has to work."""
    total = lines.stats(floor_bytes=19_312_345)
    found = [lines.hello(), *(lines.sample(i, total=total) for i in range(20)), lines.end(floor_bytes=19_312_345)]
    page = report(tmp_path, str(lines.written(tmp_path / "run.jsonl", found)))
    watched = RunState()
    for line in found:
        watched.feed(line)
    error = {"type": "event", "what": "budget_error", "seconds": 2.0, "floor_bytes": 1, "enough_bytes": 19_312_345}
    watched.feed(error)
    assert watched.log[-1][1] == "budget error: a budget of 19.4 MB (19,312,345 bytes) should do"
    assert "19.4 MB" in page and "floor 19.4 MB" in top_text.plain(top_text.once(watched, 80, 24, top_text.ASCII))
    assert "the floor (no smaller budget can work) is about 19.4 MB" in advice(total)[0]


@pytest.mark.parametrize(
    "changed",
    [
        {"unmanaged_peak_bytes": 7_000_000},  # it fits
        {"budget_bytes": 2**64 - 1},
        {"recompute_seconds": 0.1, "stall_seconds": 0.1},  # 2 % of the time is not worth memory
    ],
)
def test_nothing_is_promised_where_nothing_is_to_be_gained(changed: dict[str, float]) -> None:
    assert more_budget(lines.stats(**changed)) is None
