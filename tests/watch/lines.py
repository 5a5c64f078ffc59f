"""A stream with every kind of line, the same at each call, and a server that sends one as a training would."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memmgr.telemetry import stream

BUDGET = 8_000_000
STATES = ["free", "fixed", "evictable", "leaving", "hole"]


def stats(**changed: float) -> dict[str, Any]:
    """As `memmgr.stats()` has them."""
    found = {
        "budget_bytes": BUDGET,
        "resident_bytes.current": 7_000_000,
        "resident_bytes.peak": BUDGET,
        "fixed_bytes.peak": 1_000_000,
        "floor_bytes": 3_900_000,
        "unmanaged_peak_bytes": 12_000_000,
        "evictions": 60,
        "evicted_bytes": 60_000_000,
        "offload_bytes": 9_000_000,
        "recompute_seconds": 1.5,
        "stall_seconds": 0.5,
        "wall_seconds": 10.0,
        "checkpoint_seconds": 0.0,
        "watched_seconds": 5.0,
        "passes": 20,
        "tier_errors": 0,
    }
    return {**found, **changed}


def hello(pid: int = 4242, **changed: Any) -> dict[str, Any]:
    found = {
        "type": "hello",
        "protocol": stream.PROTOCOL,
        "memmgr": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.9",
        "pid": pid,
        "rank": None,
        "command": ["python", "train.py", "--name", "a b"],
        "time": 1_790_000_000.0,
        "seconds": 0.0,
        "device": "cpu",
        "budget_bytes": BUDGET,
        "policy": "auto",
        "disk_folder": "/tmp",
        "map_states": STATES,
    }
    return {**found, **changed}


def sample(i: int, **changed: Any) -> dict[str, Any]:
    """The i-th, every half second: a forward fills the budget and a backward empties it, ten samples a pass."""
    at = i % 10
    grown = at if at < 6 else 10 - at
    saved = min(5_000_000, 1_200_000 * grown)
    gone = max(0, 1_200_000 * grown - 5_000_000)
    found = {
        "type": "sample",
        "seconds": 0.5 * i,
        "phase": "forward" if at < 6 else "backward",
        "budget_bytes": BUDGET,
        "resident_bytes": 3_000_000 + saved,
        "evictable_bytes": saved,
        "evicted_bytes": gone,
        "offloaded_bytes": 300_000 if gone else 0,
        "unmanaged_bytes": 3_000_000 + saved + gone,
        "tier_bytes": 400_000,
        "largest_request_bytes": 1_048_576,
        "total": stats(recompute_seconds=0.05 * i, stall_seconds=0.01 * i, passes=i // 10),
    }
    return {**found, **changed}


def cell(size: int, **changed: Any) -> dict[str, Any]:
    found = {
        "bytes": size,
        "state": "resident",
        "copy": False,
        "fixed": False,
        "handles": 1,
        "op_seconds": size * 1e-9,
        "age_seconds": 1e-3 * size / 1e6,
        "recomputable": True,
        "op": "aten.gelu.default",
        "module": "Net.first.1",
    }
    return {**found, **changed}


def cells() -> dict[str, Any]:
    return {
        "type": "cells",
        "seconds": 20.0,
        "cells": [
            cell(1_048_576),
            cell(1_048_570, state="evicted", module="Net.second.1", op_seconds=0.004),
            cell(900_000, state="offloaded", op="aten.addmm.default", module="Net.first.0", recomputable=False),
            cell(
                800_000,
                fixed=True,
                op=None,
                module="(optimizer states)",
                name="exp_avg of blocks.0.weight",
                line="train.py:41",
            ),
            cell(700_000, copy=True, op="aten.native_dropout.default", module="Net." + "deep." * 12 + "end"),
            cell(600_000, state="evicted", age_seconds=70.0),
        ],
        "modules": [
            {"module": "Net.first.1", "resident_bytes": 2_000_000, "fixed_bytes": 0, "absent_bytes": 1_000_000},
            {"module": "?", "resident_bytes": 800_000, "fixed_bytes": 800_000, "absent_bytes": 0},
        ],
    }


def explained() -> dict[str, Any]:
    """The holders; a log has them after each line of cells."""
    holder = {"kind": "optimizer state", "name": "exp_avg of blocks.0.weight", "module": "Net.blocks.0"}
    holder |= {"line": "train.py:41", "bytes": 800_000, "absent_bytes": 300_000, "count": 1}
    return {"type": "explained", "seconds": 20.0, "holders": [holder], "lines": {"train.py:41": 800_000}}


def event_lines() -> list[dict[str, Any]]:
    def item(what: str, op: str | None, module: str | None, count: int, size: int, seconds: float) -> dict[str, Any]:
        return {"what": what, "op": op, "module": module, "count": count, "bytes": size, "seconds": seconds}

    gelu, addmm = "aten.gelu.default", "aten.addmm.default"
    return [
        {
            "type": "events",
            "seconds": 5.0,
            "items": [
                item("evict", gelu, "Net.first.1", 40, 40_000_000, 0.0),
                item("evict", addmm, "Net.first.0", 20, 20_000_000, 0.0),
                item("recompute", gelu, "Net.first.1", 40, 40_000_000, 0.5),
                item("recompute", addmm, "Net.first.0", 20, 20_000_000, 1.0),
                item("reload", addmm, "Net.second.0", 9, 9_000_000, 0.3),
                item("stall", None, None, 3, 500_000, 0.2),
            ],
            "unlisted": 2,
        },
        {"type": "event", "what": "no_plan", "seconds": 6.0, "ops": 9, "text": "no schedule fits"},
        {"type": "dropped", "lines": 3},
        {"type": "news", "of": "a type that is not known yet"},
    ]


def lines(samples: int = 60, pid: int = 4242) -> list[dict[str, Any]]:
    """All of it, without an end."""
    columns = [[0] * len(STATES) for _ in range(160)]
    for i, column in enumerate(columns):
        column[STATES.index(("fixed", "evictable", "free", "leaving", "hole")[i // 8 % 5])] = 50_000
    passes = {"type": "passes", "count": 20, "resident_peak_bytes": BUDGET, "unmanaged_peak_bytes": 12_000_000}
    return [
        hello(pid),
        *(sample(i) for i in range(samples)),
        *({**passes, "seconds": 5.0 * i, "forward_seconds": 3.0, "backward_seconds": 4.0} for i in (1, 2)),
        *event_lines(),
        cells(),
        explained(),
        {"type": "map", "seconds": 20.0, "span_bytes": 8_000_000, "columns": columns},
        {
            "type": "holders",
            "seconds": 20.0,
            "kinds": {"parameters": 530_000, "gradients": 0, "buffers": 0, "optimizer states": 1_060_000},
            "modules": {"Net.first.0": 131_000, "Net.first.2": 130_000},
        },
    ]


def plan(**changed: Any) -> dict[str, Any]:
    """A plan that was made."""
    made = {"type": "event", "what": "plan", "seconds": 2.0, "took_seconds": 0.25, "ops": 40}
    return {**made, "rematerialize": 6, "offload": 5, **changed}


def end(**changed: Any) -> dict[str, Any]:
    return {"type": "end", "seconds": 30.0, "stats": stats(**changed), "summary": "memmgr: done", "failed": False}


def written(path: Path, found: list[dict[str, Any]]) -> Path:
    """As a log."""
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    return path


@contextmanager
def served(pid: int, found: list[dict[str, Any]], *, hang_up: bool = False) -> Iterator[None]:
    """A socket at that process's address that sends these lines to everybody."""
    path = stream.private_folder() / f"{pid}.sock"
    kept: list[socket.socket] = []
    data = "".join(json.dumps(line) + "\n" for line in found).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(8)

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                try:
                    connection.sendall(data)
                except OSError:  # only looked whether somebody is there
                    connection.close()
                    continue
                if hang_up:
                    connection.close()
                else:
                    kept.append(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for connection in kept:
                connection.close()
            path.unlink(missing_ok=True)
