"""The ranks of a job side by side: `memmgr top --job`, and the report's first table."""

from __future__ import annotations

from pathlib import Path

import pytest

from memmgr.observe.ranks import where_in_job
from memmgr.tools import cli
from memmgr.tools.view.job import WAITED_FOR, jobs, table
from memmgr.tools.view.run_state import RunState
from watch import lines


def rank(number: int, *, lost: float, world: int = 3, job: str = "a", **changed: float) -> list[dict[str, object]]:
    """Its lines; `lost`: seconds of 20 passes."""
    found = lines.stats(recompute_seconds=lost, stall_seconds=0.0, **changed)
    place = {"dp": number // 2, "tp": number % 2}
    hello = lines.hello(pid=100 + number, rank=number, world_size=world, job=job, mesh=place)
    return [hello, lines.sample(9, total=found)]


def watched(*all_lines: list[dict[str, object]]) -> list[RunState]:
    found = []
    for each in all_lines:
        found.append(RunState())
        for line in each:
            found[-1].feed(line)
    return found


def test_rows_extremes_and_who_is_waited_for() -> None:
    peaks = {"resident_bytes.peak": 5_000_000}
    ((*ranks,),) = jobs(watched(rank(2, lost=2.0), rank(0, lost=1.0, **peaks), rank(1, lost=8.0)))
    head, first, second, third, least, most = table(ranks)
    assert [row[0] for row in (first, second, third)] == ["0 (dp 0 tp 0)", "1 (dp 0 tp 1)", "2 (dp 1 tp 0)"]
    assert [row[-1] for row in (first, second, third)] == ["", WAITED_FOR, ""]
    peak, lost, factor = (head.index(name) for name in ("peak", "lost a pass", "slowdown, at least"))
    assert (least[peak], most[peak]) == ("5 MB", "8 MB")
    assert (least[lost], most[lost]) == ("50 ms", "400 ms")
    assert (least[factor], most[factor]) == ("1.11x", "5.00x")


def test_ranks_that_lose_as_much_wait_for_nobody() -> None:
    ((*ranks,),) = jobs(watched(rank(0, lost=2.0), rank(1, lost=2.2)))
    assert not any(row[-1] for row in table(ranks))


def test_jobs_are_apart_and_of_a_rank_the_last_session_counts() -> None:
    alone = [lines.hello(), lines.sample(3)]
    found = jobs(watched(rank(0, lost=1.0), rank(0, lost=2.0, job="b"), rank(0, lost=3.0), alone))
    assert [[one.stats["recompute_seconds"] for one in ranks] for ranks in found] == [[3.0], [2.0]]


def test_top(capsys: pytest.CaptureFixture[str]) -> None:
    with lines.served(100, rank(0, lost=1.0)), lines.served(101, rank(1, lost=8.0)):
        assert cli.main(["top", "--job", "--once"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "2 of 3 ranks" and said[1].split()[:2] == ["rank", "budget"]
    assert said[3].startswith("1 (dp 0 tp 1)") and said[3].endswith(WAITED_FOR)
    assert [line.split()[0] for line in said[-2:]] == ["min", "max"]


def test_top_without_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    with lines.served(4242, lines.lines()):
        assert cli.main(["top", "--job", "--once"]) == 2
    assert "no process here is a rank" in capsys.readouterr().err
    assert cli.main(["top", "--job", "--json"]) == 2
    assert "it goes with --once and --interval only" in capsys.readouterr().err


def test_the_report_begins_with_all_ranks(tmp_path: Path) -> None:
    logs = [lines.written(tmp_path / f"run.rank{i}.jsonl", rank(i, lost=1.0 + 7 * i)) for i in range(2)]
    out = tmp_path / "page.html"
    assert cli.main(["report", *map(str, logs), "--out", str(out)]) == 0
    page = out.read_text()
    assert page.index("<h2>2 of 3 ranks</h2>") < page.index("<h2>run.rank0.jsonl, rank 0</h2>")
    assert f"<td class=text>{WAITED_FOR}</td>" in page
    assert cli.main(["report", str(logs[0]), "--out", str(out)]) == 0
    assert "of 3 ranks" not in out.read_text()  # one alone is not beside anybody


def test_where_a_process_is_in_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert where_in_job(lambda types: []) == {"rank": None, "world_size": None, "job": None, "mesh": {}}
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert where_in_job(lambda types: []) == {"rank": 3, "world_size": 4, "job": "29500", "mesh": {}}
