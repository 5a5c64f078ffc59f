"""One pass op by op, with its layers: recorded, drawn, and as Perfetto has it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memmgr
from memmgr.policies.trace import HELD, Op, OpKind, Storage, Trace
from memmgr.telemetry.trace_file import read_trace, write_trace
from memmgr.tools import cli
from memmgr.tools.view.period import AFTER, BEFORE, MOST_BANDS, period, section, svg

from . import lines


def _recorded(path: Path, number: int = 2, **options: Any) -> Trace:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(256, 64)
    with memmgr.budget(None, quiet=True, trace=path, trace_pass=number, **options):
        for _ in range(number + 1):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return read_trace(path)


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize("logged", [False, True])
def test_a_recorded_pass_says_which_module_ran_each_op(tmp_path: Path, number: int, logged: bool) -> None:
    """Also where somebody reads the telemetry, which learns modules in some passes only."""
    trace = _recorded(tmp_path / "pass.trace", number, log=tmp_path / "run.jsonl" if logged else None)
    forward = [op for op in trace.ops[: trace.backward_at] if op.name.startswith("aten::addmm")]
    assert [op.module for op in forward] == [f"Sequential.{i}.{k}" for i in range(3) for k in (0, 2)]
    assert {op.module for op in trace.ops[trace.backward_at :]} == {""}
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks, "hooks stay"


def test_the_bands_are_all_memory_and_each_layer_is_one(tmp_path: Path) -> None:
    trace = _recorded(tmp_path / "pass.trace")
    found = period(trace)
    total = [sum(sizes) for sizes in zip(*found.bytes, strict=True)]
    assert max(total) == trace.unmanaged_peak[0] and len(total) == len(found.seconds)
    assert found.names[0] == BEFORE and AFTER in found.names[-2:]
    assert [n for n in found.names if n.startswith("Sequential.")] == [
        f"Sequential.{i}.{k}" for i in range(3) for k in range(3)
    ]
    assert found.backward_at is not None
    activation = 256 * 128 * 4
    assert found.bytes[found.names.index("Sequential.0.0")][found.backward_at] >= activation
    assert all(size >= 0 for band in found.bytes for size in band)


def test_bands_by_hand() -> None:
    """A constant that is written to stays in its band. The gradient of the last layer, from which all others are made, is no
    memory of that layer.
    """
    ops = (
        Op("constant", 0.0, (), (0,), OpKind.CONSTANT),
        Op("a", 1.0, (0,), (1,), module="M.one"),
        Op("b", 1.0, (1,), (2,), module="M.two"),
        Op("back", 1.0, (2,), (3,)),
        Op("update_", 1.0, (0, 3), (4,), writes=((0, 4),)),
        Op("loose", 1.0, (), (5,)),
    )
    ends = {0: 5, 1: 3, 2: 4, 3: 5}
    storages = tuple(
        Storage(f"{i}", 10 ** min(i, 4), next(k for k, op in enumerate(ops) if i in op.outputs), ends.get(i, HELD))
        for i in range(6)
    )
    storages = (*storages[:4], Storage("4", 1, 4), Storage("5", 7, 5))
    found = period(Trace(ops, storages, "cpu", 3, copy_on_write=False))
    assert found.names == [BEFORE, "M.one", "M.two", AFTER] and found.backward_at == 2
    assert found.bytes == [[1, 1, 1, 1, 1], [10, 10, 0, 0, 0], [0, 100, 100, 0, 0], [0, 0, 1000, 1000, 7]]
    assert found.seconds == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_deep_model_has_as_many_bands_as_can_be_told_apart() -> None:
    ops = tuple(Op("op", 1.0, (), (k,), module=f"M.blocks.{k // 10}.part.{k % 10}") for k in range(100))
    storages = tuple(Storage(f"{k}.0", 1, k) for k in range(100))
    names = period(Trace(ops, storages, "cpu")).names
    assert names == [f"M.blocks.{i}" for i in range(10)] and len(names) <= MOST_BANDS


def test_the_axis_counts_the_ops_that_ran() -> None:
    """Times between two ops have a place on it, and no number."""
    names = ("op", "(between ops)") * 20
    ops = tuple(Op(name, 1.0, (), (k,)) for k, name in enumerate(names))
    trace = Trace(ops, tuple(Storage(f"{k}.0", 1, k) for k in range(len(ops))), "cpu")
    said = [int(word) for word in re.findall(r'text-anchor="middle">(\d+)<', svg(period(trace), "a pass"))]
    assert said == [0, 5, 10, 15]


def test_the_op_of_the_peak_has_its_name_of_every_view() -> None:
    trace = Trace((Op("aten::mm.default", 1.0, (), (0,)),), (Storage("0.0", 1, 0),), "cpu")
    assert "at most 1 B, at mm." in section("a pass", trace)


def report(*words: object) -> int:
    return cli.main(["report", *map(str, words)])


def test_the_page_and_the_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    _recorded(tmp_path / "pass.trace.gz", log=tmp_path / "run.jsonl")
    assert report(tmp_path / "run.jsonl", tmp_path / "pass.trace.gz", "--out", tmp_path / "page.html") == 0
    html = (tmp_path / "page.html").read_text()
    assert "Memory over time" in html and "One pass: pass.trace.gz" in html and "Sequential.2.0" in html
    assert html.count("<svg") == html.count("<div class=box><svg"), "a narrow screen cannot scroll it"
    for form in ("svg", "png", "perfetto"):
        assert report("--format", form, tmp_path / "pass.trace.gz", "--out", tmp_path / f"x.{form}") == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    drawn = ET.parse(tmp_path / "x.svg").getroot()
    bands = [path for path in drawn.iter() if path.tag.endswith("path")]
    found = period(read_trace(tmp_path / "pass.trace.gz"))
    assert len(bands) == len(found.names)
    assert not re.search(r"href|url\(", (tmp_path / "x.svg").read_text()), "it needs something beside itself"
    events = json.loads((tmp_path / "x.perfetto").read_text())["traceEvents"]
    counted = [e["args"] for e in events if e["ph"] == "C"]
    assert [list(args.values()) for args in counted] == [list(row) for row in zip(*found.bytes, strict=True)]
    assert any(e["ph"] == "X" and e["args"]["module"] == "Sequential.0.0" for e in events)
    capsys.readouterr()


@pytest.mark.parametrize("form", ["png", "svg"])
def test_a_picture_of_no_single_pass_is_one_line(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "a.trace", Trace((), (), "cpu"))
    (tmp_path / "cut.trace").write_text((tmp_path / "a.trace").read_text().splitlines()[0])
    for words, says in (
        ([tmp_path / "a.trace", tmp_path / "a.trace"], "a picture is of one pass"),
        ([tmp_path / "cut.trace"], "cut short"),
        ([tmp_path / "none.trace"], "none.trace"),
        ([lines.written(tmp_path / "run.jsonl", [*lines.lines(), lines.end()])], "run.jsonl: a log has no picture"),
    ):
        assert report("--format", form, *words) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1, said


@pytest.mark.parametrize(
    ("form", "name"), [("html", "x.png"), ("perfetto", "x.svg"), ("png", "x.svg"), ("svg", "x.html")]
)
def test_a_name_of_another_format(form: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The picture was drawn by its name, and a page was called a picture."""
    assert report("--format", form, tmp_path / "missing.trace", "--out", tmp_path / name) == 2
    assert capsys.readouterr().err == f"memmgr report: --out: {tmp_path / name} is no name for --format {form}\n"
