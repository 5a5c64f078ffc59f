"""The trace file: reading gives the trace that was written, and a bad file is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memmgr.policies.trace import HELD, TierLink, Trace, TraceError
from memmgr.telemetry.trace_file import read_trace, write_trace
from memmgr.tools.common.dtr_log import parse_dtr_log

from .synthetic import network


def sample() -> Trace:
    trace = parse_dtr_log(json.dumps(line) for line in network(4, depth=4).lines)
    storages = list(trace.storages)
    storages[3] = replace(storages[3], pinned_until=12)
    storages[4] = replace(storages[4], pinned_until=HELD)
    links = (TierLink("host", 1e9, 2e9, 1e-4), TierLink("disk", 1e8, 1e8, capacity_bytes=10**12))
    return replace(trace, storages=tuple(storages), device="cpu", links=links, copy_on_write=False)


@pytest.mark.parametrize("name", ["pass.trace", "pass.trace.gz"])
def test_there_and_back(name: str, tmp_path: Path) -> None:
    trace = sample()
    write_trace(tmp_path / name, trace)
    again = read_trace(tmp_path / name)
    assert again == trace
    assert (again.unmanaged_peak, again.seconds) == (trace.unmanaged_peak, trace.seconds)


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    write_trace(tmp_path / "x", sample())
    lines = (tmp_path / "x").read_text().splitlines(keepends=True)
    for keep in range(len(lines)):
        (tmp_path / "cut").write_text("".join(lines[:keep]))
        with pytest.raises(TraceError, match="empty" if keep == 0 else f"cut short: no end after line {keep}"):
            read_trace(tmp_path / "cut")
    (tmp_path / "cut").write_text("".join(lines)[:-5])
    with pytest.raises(TraceError, match=f"line {len(lines)} is not a JSON object"):
        read_trace(tmp_path / "cut")


def test_a_compressed_file_that_is_cut_is_noticed(tmp_path: Path) -> None:
    write_trace(tmp_path / "x.gz", sample())
    whole = (tmp_path / "x.gz").read_bytes()
    for part in (whole[: len(whole) // 2], whole[:-3], b"not gzip"):
        (tmp_path / "cut.gz").write_bytes(part)
        with pytest.raises(TraceError, match=r"cut\.gz"):
            read_trace(tmp_path / "cut.gz")


HEAD = '{"memmgr_trace":2,"device":"","links":[],"copy_on_write":true}'


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"something":1}'], "not a trace file"),
        (['{"memmgr_trace":99}'], "version 99; this memmgr reads version 2"),
        (
            [HEAD.replace(":2", ":1"), '{"op":"f","s":1,"uses":[0]}', '{"end":1}'],
            "version 1; this memmgr reads version 2",
        ),
        ([HEAD, "[]"], "line 2 is not a JSON object"),
        ([HEAD, "[" * 100_000], "line 2 is not a JSON object"),
        ([HEAD, '{"op":"f"}'], "line 2: no 's'"),
        ([HEAD, '{"op":"f","s":1,"out":[["a",-1]]}'], "line 2: a has -1 bytes"),
        ([HEAD, '{"op":"f","s":1,"kind":77}'], "line 2: 77"),
        ([HEAD, '{"free":[5]}'], "line 2"),
        ([HEAD, '{"op":"f","s":1,"in":[0]}', '{"end":1}'], "reads storage 0, which nothing has made"),
        ([HEAD, '{"end":3}'], "3 ops announced, 0 found"),
        ([HEAD, '{"end":0}', "{}"], "more after the end"),
    ],
)
def test_bad_files_are_named(lines: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError, match=f"bad: .*{says}"):
        read_trace(tmp_path / "bad")


def test_missing_and_binary_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\x00\xfe")
    for name in ("binary", "missing"):
        with pytest.raises(TraceError, match=name):
            read_trace(tmp_path / name)
