"""The GPU check's frame, and a rehearsal of it on the CPU device."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch
from driver import build

from memmgr.tools import cli
from memmgr.tools.bench import driver_probe, gpu_sections, runs
from memmgr.tools.verbs import gpu_check


def test_each_section_exists_and_together_they_leave_time_to_install() -> None:
    assert [name for name, _, _ in gpu_check.SECTIONS] == list(gpu_sections.SECTIONS)
    assert sum(limit for _, _, limit in gpu_check.SECTIONS) <= 500


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gpu-check", "--sections", "exactnes"]) == 2
    assert "exactness" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert cli.main(["gpu-check", "--quick"]) == 2
    assert "no GPU that torch can use" in capsys.readouterr().err


def test_a_crash_and_a_hang_cost_their_own_section_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = (("crashes", "One", 60), ("timings", "Two", 0.05), ("crashes", "Three", 60), ("tests", "Four", 60))
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    keep = tmp_path / "kept"
    keep.mkdir()
    monkeypatch.setenv("OUT", str(keep))
    report = tmp_path / "report.md"
    words = ["--device", "cpu", "--quick", "--sections", "crashes,timings,tests", "--out", str(report)]
    assert cli.main(["gpu-check", *words]) == 1
    text = report.read_text()
    assert text.count("KeyError") == 2
    assert "**Stopped after 0 s.**" in text
    assert text.index("## One") < text.index("## Two") < text.index("## Three") < text.index("## Four")
    assert text.count("Held.") == 1 and "A rehearsal" in text
    assert "| torch |" in text and "| CPU |" in text
    assert (keep / "report.md").read_text() == text


def test_what_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the double all answers are right. Then one is not."""
    compiler = build.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = str(build.fake_driver())
    monkeypatch.setenv("MEMMGR_DRIVER", path)
    told = {call: answer for call, answer, _ in driver_probe.rows()}
    assert len(told) == 12
    assert told["the driver and the device"].startswith("CUDA 13.0; ")
    assert told["a stream is captured: what is allowed meanwhile"] == "ok"
    assert not [answer for answer in told.values() if answer.startswith("**")], told
    double = driver_probe.Driver(path)
    double.code("fake_fail_next", ctypes.c_char_p(b"cuMemSetAccess"), ctypes.c_int(0), ctypes.c_int(801))
    wrong = [answer for _, answer, _ in driver_probe.rows() if "cuMemSetAccess: 801" in answer]
    assert len(wrong) == 1 and wrong[0].startswith("**")
    double.code("fake_reset", 0, ctypes.c_int(0))


def test_what_failed_is_told_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_sections, "_failed", [])
    monkeypatch.setattr(gpu_sections, "_ends_at", 0.0)
    monkeypatch.setattr(gpu_sections, "SECTIONS", {"one": lambda device, quick: gpu_sections._run(spec).failure == ""})
    monkeypatch.setenv("PYTHONFAULTHANDLER", "")
    spec = runs.RunSpec("nonsense", steps=1, sizes={"what": 1})
    assert gpu_sections.main(["one", "cpu", "60"]) == gpu_sections.DID_NOT_HOLD
    text = capsys.readouterr().out
    assert "nonsense unmanaged" in text
    assert "Traceback" in text and "unexpected keyword argument 'what'" in text


@pytest.fixture
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are forked, and what a model needs is measured once."""
    monkeypatch.setattr(runs, "subprocess", forkserver)
    measure, known = gpu_sections._unmanaged, dict[str, runs.RunResult]()

    def unmanaged(spec: runs.RunSpec, **changes: Any) -> runs.RunResult:
        key = repr(replace(spec, **changes))
        return known.get(key) or known.setdefault(key, measure(spec, **changes))

    monkeypatch.setattr(gpu_sections, "_unmanaged", unmanaged)


@pytest.mark.usefixtures("quick_starts")
def test_rehearsal_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    held = {name: section("cpu", True) for name, section in gpu_sections.SECTIONS.items()}
    text = capsys.readouterr().out
    assert all(held.values()), (held, text)
    assert "NO" not in text and "failed" not in text and "An op: " in text


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA here")
    report = tmp_path / "report.md"
    code = cli.main(["gpu-check", "--quick", "--out", str(report)])
    assert code == 0, report.read_text()
