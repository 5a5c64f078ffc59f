"""Traces, and the reader of operator logs, against the judge's own figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memmgr.policies.trace import HELD, OpKind, TraceBuilder, TraceError
from memmgr.tools.common.dtr_log import parse_dtr_log, read_dtr_log

from .operator_logs import NAMES, SHARED, log, needs_logs


def lines(*records: dict[str, object]) -> list[str]:
    return [json.dumps(r) for r in ({"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}, *records)]


def memory(size: int) -> dict[str, object]:
    return {"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": str(size)}


def alias(argument: int) -> dict[str, object]:
    return {"INSTRUCTION": "ALIAS", "NAME": "x", "ALIAS": str(argument)}


CONSTANT = {"INSTRUCTION": "CONSTANT", "NAME": "w"}
CALL = {"INSTRUCTION": "CALL", "NAME": "mm", "ARGS": ["w", "w"], "RESULT": ["a", "v"], "TIME": "5000"}
MUTATE = {"INSTRUCTION": "MUTATE", "NAME": "relu_", "ARGS": ["a"], "MUTATE": [0], "TIME": "7"}


@needs_logs
@pytest.mark.parametrize("name", NAMES)
def test_the_unmanaged_run_is_the_judges(name: str) -> None:
    trace = read_dtr_log(log(name)).check()
    reference = json.loads((SHARED / "dtr-logs" / "reference.json").read_text())[name]
    assert trace.unmanaged_peak[0] == reference["unmanaged_peak_bytes"]
    assert trace.seconds * 1e9 == pytest.approx(reference["unmanaged_time_ns"], rel=1e-12)
    assert trace.complete and trace.backward_at is not None


def test_views_share_and_writes_make_versions() -> None:
    release = {"INSTRUCTION": "RELEASE", "NAME": "v"}
    trace = parse_dtr_log(
        lines(CONSTANT, memory(8), CALL, memory(100), alias(-1), memory(100), alias(0), MUTATE, release)
    )
    w, a, b = trace.storages
    assert [s.name for s in trace.storages] == ["c.w", "1.0", "2.0"]
    assert trace.ops[1].inputs == (0,) and trace.ops[1].outputs == (1,)
    assert trace.ops[2].writes == ((1, 2),)
    assert (w.released, a.released, b.released) == (HELD, 3, HELD)
    assert b.size_bytes == 100
    assert trace.ops[0].kind == OpKind.CONSTANT
    assert trace.unmanaged_peak == (208, 2)
    assert trace.held_at_end == (0, 2)
    assert trace.released_before[3] == (1,)


def test_copies_hold() -> None:
    builder = TraceBuilder()
    builder.constant("w", 4)
    builder.call("f", 1.0, ["w"], [("a", 10, -1)])
    builder.copy("a", "b")
    builder.release("a")
    builder.call("g", 1.0, ["b"], [("view", 0, 0)])
    builder.release("b")
    builder.call("g", 1.0, ["view"], [("c", 10, -1)])
    builder.copy_from("w", "view")
    trace = builder.build().check()
    assert trace.storages[1].released == 4
    assert trace.ops[2].kind == OpKind.VIEW
    assert trace.held_at_end == (0, 2)


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_log_may_be_cut_after_any_line(cut: int) -> None:
    whole = lines(CONSTANT, memory(8), CALL, memory(100), alias(-1), memory(100), alias(0), MUTATE)
    trace = parse_dtr_log(whole[:cut])
    assert trace.ops == parse_dtr_log(whole).ops[: len(trace.ops)]
    assert trace.complete == (cut in (1, 3, 8))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([], "empty"),
        (['{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "END"}'], "START"),
        (["garbage"], "line 1 is not a JSON object"),
        (["[1]"], "line 1 has no INSTRUCTION"),
        ([*lines(CONSTANT, memory(1)), '{"INSTRUC'], "line 4 is not a JSON object"),
        (lines(MUTATE), "line 2: a is not the name"),
        (lines(CONSTANT, CALL), "line 3: CALL where MEMORY was due"),
        (lines(CONSTANT, memory(-3)), "line 2: c.w has -3 bytes"),
        (lines({"INSTRUCTION": "CALL", "NAME": "f"}), "line 2: no RESULT"),
        (lines({"INSTRUCTION": "JUMP"}), "line 2: unknown instruction 'JUMP'"),
        (lines(CONSTANT, memory(1), CALL, memory(1), alias(-1), memory(1), alias(9)), "argument 9 of 2"),
    ],
)
def test_bad_lines_are_named(bad: list[str], says: str) -> None:
    with pytest.raises(TraceError, match=says):
        parse_dtr_log(bad)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", None])
def test_bad_files_are_named(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TraceError, match=r"x\.log"):
        read_dtr_log(file)
