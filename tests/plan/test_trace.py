"""Traces: the reader of operator logs against the judge's own figures, the trace file, disturbed times."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memmgr.policies.trace import HELD, Op, OpKind, Storage, TierLink, Trace, TraceBuilder, TraceError
from memmgr.policies.trace.smooth import LEAST_ALIKE, smoothed
from memmgr.telemetry.trace_file import read_trace, write_trace
from memmgr.tools.common.dtr_log import parse_dtr_log, read_dtr_log

from .operator_logs import NAMES, SHARED, log, needs_logs
from .synthetic import network


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
def test_bad_logs_are_named(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TraceError, match=r"x\.log"):
        read_dtr_log(file)


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


def like_ops(seconds: list[float], size: int = 100) -> Trace:
    """A chain of ops of one kind that take `seconds`, and one that is alone."""
    ops = [Op("constant", 0.0, (), (0,), OpKind.CONSTANT)]
    storages = [Storage("c.x", size, 0)]
    for k, takes in enumerate(seconds):
        ops.append(Op("layer", takes, (k,), (k + 1,)))
        storages.append(Storage(f"{k + 1}.0", size, k + 1))
    ops.append(Op("layer", 9.0, (len(seconds),), (len(seconds) + 1,)))
    storages.append(Storage(f"{len(seconds) + 1}.0", size + 1, len(seconds) + 1))
    ops.append(Op("(between ops)", 5.0, (), (), OpKind.VIEW))
    return Trace(tuple(ops), tuple(storages)).check()


def test_ops_that_look_alike_take_their_median() -> None:
    trace = like_ops([1.0, 1.0, 7.0, 1.1])
    even = smoothed(trace)
    assert [op.seconds for op in even.ops] == [0.0, 1.05, 1.05, 1.05, 1.05, 9.0, 5.0]
    assert [replace(op, seconds=0.0) for op in even.ops] == [replace(op, seconds=0.0) for op in trace.ops]
    assert even.storages == trace.storages
    assert trace.ops[3].seconds == 7.0


def test_few_say_nothing() -> None:
    times = [1.0, 7.0, 2.0][: LEAST_ALIKE - 1]
    assert smoothed(like_ops(times)) == like_ops(times)


def test_forward_and_backward_are_told_apart() -> None:
    trace = like_ops([1.0, 1.0, 1.0, 3.0, 3.0, 3.0])
    even = smoothed(replace(trace, backward_at=4))
    assert [op.seconds for op in even.ops[1:7]] == [1.0] * 3 + [3.0] * 3
