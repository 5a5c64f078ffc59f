"""`memmgr report --format perfetto`: a run in the format of a trace viewer, from a log."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import forkserver
import pytest

from memmgr.tools import cli
from memmgr.tools.view.run_state import LAYERS
from watch import lines

Event = dict[str, Any]


def traced(tmp_path: Path, *logs: Path) -> list[Event]:
    out = tmp_path / "out.json"
    assert cli.main(["report", "--format", "perfetto", *map(str, logs), "-o", str(out)]) == 0
    found = json.loads(out.read_text())
    events: list[Event] = found["traceEvents"]
    for event in events:
        assert event["ph"] in "MCiX" and isinstance(event["pid"], int) and event["name"]
        assert event["ph"] == "M" or (isinstance(event["ts"], int) and event["ts"] >= 0)
        assert event["ph"] not in "iX" or event["tid"] > 0
    nested(events)
    return events


def nested(events: list[Event]) -> None:
    """Slices of a thread lie in or beside each other: a viewer drops slices that overlap."""
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    for thread in threads:
        open_until: list[int] = []
        slices = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == thread]
        for one in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= one["ts"]:
                open_until.pop()
            assert not open_until or one["ts"] + one["dur"] <= open_until[-1], one
            open_until.append(one["ts"] + one["dur"])


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["name"] == name]


def passes(*each: list[float], count: int | None = None) -> dict[str, Any]:
    """A line of them: end, forward, backward, resident and unmanaged peak."""
    return {
        "type": "passes",
        "seconds": each[-1][0] + 0.1,
        "count": len(each) if count is None else count,
        "resident_peak_bytes": max(p[3] for p in each),
        "unmanaged_peak_bytes": max(p[4] for p in each),
        "forward_seconds": sum(p[1] for p in each) + 0.3,
        "backward_seconds": sum(p[2] for p in each) + 0.2,
        "each": list(each),
    }


def test_counters_slices_and_marks(tmp_path: Path) -> None:
    told = passes([2.0, 0.6, 0.4, 100, 200], [3.0000004, 0.6, 0.4000006, 110, 210], count=4)
    found = [*lines.lines(), lines.plan(seconds=4.0, took_seconds=0.25), told, lines.end()]
    events = traced(tmp_path, lines.written(tmp_path / "run.jsonl", found))
    resident, absent = named(events, "resident"), named(events, "absent")
    assert len(resident) == len(absent) == len(named(events, "budget")) == 60
    assert [e["ts"] for e in resident[:3]] == [0, 500_000, 1_000_000] and resident[0]["args"] == {"bytes": 3_000_000}
    assert max(e["args"]["bytes"] for e in absent) == 1_300_000
    layers = named(events, "memory by layer")[5]["args"]
    assert list(layers) == list(LAYERS) and sum(layers.values()) == 3_000_000 + 6_300_000
    third, fourth = named(events, "pass 43")[0], named(events, "pass 44")[0]  # 40 are in lines without `each`
    assert (third["ts"], third["dur"]) == (1_000_000, 1_000_000) and third["args"]["unmanaged peak bytes"] == 200
    assert fourth["ts"] == 2_000_000 and len(named(events, "passes 41 to 42")) == 1
    assert [e["dur"] for e in named(events, "backward")] == [400_000, 400_000]
    (evict,) = named(events, "evict")
    assert evict["ph"] == "i" and evict["args"]["count"] == 60 and evict["args"]["bytes"] == 60_000_000
    (shares, _) = named(events, "percent of the time")
    assert shares["args"] == pytest.approx({"recompute": 30.0, "reload": 6.0, "stall": 4.0})
    (plan,) = named(events, "making a plan")
    assert (plan["ts"], plan["dur"]) == (3_750_000, 250_000)
    assert named(events, "no plan")[0]["args"]["text"] == "no schedule fits" and named(events, "end")


def test_ranks_are_processes_on_one_clock(tmp_path: Path) -> None:
    first = lines.written(tmp_path / "a.jsonl", [*lines.lines(3), lines.end()])
    later = [lines.hello(rank=1, time=1_790_000_002.0), *lines.lines(3)[1:], lines.end()]
    events = traced(tmp_path, first, lines.written(tmp_path / "b.jsonl", later))
    names = [e["args"]["name"] for e in named(events, "process_name")]
    assert names[0].startswith("a.jsonl, process 4242: python train.py") and "b.jsonl, process 4242, rank 1" in names[1]
    threads = {(e["tid"], e["pid"]) for e in events if "tid" in e}
    assert len({tid for tid, _ in threads}) == len(threads) == 6, "a thread's number is its own"
    begins = {e["pid"]: e["ts"] for e in reversed(named(events, "resident"))}
    assert begins == {1: 0, 2: 2_000_000}


def test_how_the_file_is_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = lines.written(tmp_path / "run.jsonl", [*lines.lines(), lines.end()])
    assert cli.main(["report", "--format", "perfetto", str(log)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run.perfetto.json")
    with pytest.raises(SystemExit):
        cli.main(["report", "--format", "pdf", str(log)])


def test_a_log_of_a_run(tmp_path: Path) -> None:
    """The log of a real training: every pass is there, one after the other."""
    script = """
import torch, memmgr
w = torch.randn(64, 64, requires_grad=True)
with memmgr.budget("1GB", device="cpu", quiet=True, log="run.jsonl"):
    for _ in range(5):
        w.mm(w).tanh().sum().backward()
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    forkserver.run([sys.executable, "-P", "-c", script], cwd=tmp_path, check=True, timeout=300, env=environment)
    events = traced(tmp_path, tmp_path / "run.jsonl")
    found = [e for e in events if e["ph"] == "X" and e["name"].startswith("pass ")]
    assert [e["name"] for e in found] == [f"pass {i}" for i in range(1, 6)]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in zip(found, found[1:], strict=False))
    assert all(e["dur"] > 0 and e["args"]["resident peak bytes"] > 0 for e in found)
