"""`memmgr doctor`: its findings on this machine, and its text where something is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memmgr.config import machine, torch_versions
from memmgr.tools import cli
from memmgr.tools.bench import disk_speed
from memmgr.tools.verbs import doctor


def _only(check: Callable[[], Iterator[doctor.Finding]]) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in check()}


def test_this_machine_can_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--quick", "--json", "--disk", str(tmp_path)])
    shown = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in shown["findings"]}
    assert code == 0 and shown["good"], shown
    assert "with the same bits" in found["training"]["text"] and found["training"]["mark"] == "ok"
    assert {"memmgr", "torch", "compiler", "allocator", "device", "memory", "disk", "telemetry", "textual"} <= set(
        found
    )
    assert list(tmp_path.iterdir()) == []
    assert all(finding["advice"] for finding in shown["findings"] if finding["mark"] != "ok")


def test_the_same_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        doctor, "_training", lambda folder: iter([doctor.Finding("training", "NO", "no", "report this")])
    )
    monkeypatch.setattr(doctor, "_disk", lambda folder, size: iter([doctor.Finding("disk", "weaker", "slow é", "x")]))
    assert cli.main(["doctor", "--quick", "--disk", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "\nNO     training      no\n" in shown and "-> report this" in shown
    assert shown.startswith("ok     memmgr        ")


def test_a_folder_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--disk", "/no/such"]) == 2
    assert capsys.readouterr().err == "memmgr doctor: '/no/such' is not a folder; name one with --disk\n"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from memmgr.native import binding, build

    def load() -> None:
        raise build.NotBuiltError("no C++ compiler was found")

    monkeypatch.setattr(binding, "load", load)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    found = _only(doctor._native)
    assert found["allocator"].mark == "NO"
    assert found["allocator"].text == "no budget can be opened: no C++ compiler was found"
    assert found["compiler"].mark == "weaker" and "no C++ compiler" in found["compiler"].text
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "does not work" in doctor._compiler().text
    monkeypatch.setenv("CXX", f"{sys.executable} -P")
    assert doctor._compiler() == doctor.Finding("compiler", "ok", f"Python {sys.version.split()[0]}")


def test_a_torch_for_cuda_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    found = _only(doctor._devices)
    assert found["CUDA"].mark == "weaker" and found["device"].mark == "ok"


@pytest.mark.parametrize("why", [None, "CUDA was initialised before memmgr"])
@pytest.mark.parametrize("full", [False, True])
def test_gpus_by_a_double(monkeypatch: pytest.MonkeyPatch, why: str | None, full: bool) -> None:
    """The text about them; no GPU has confirmed it."""
    import contextlib

    import torch

    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    gpu = SimpleNamespace(name="GPU X", total_memory=80 * 10**9)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda ordinal: gpu)
    monkeypatch.setattr("torch.cuda.device", lambda ordinal: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("memmgr.native.cuda.install", lambda: why)
    real = torch.empty

    def empty(size: int, **how: Any) -> torch.Tensor:
        if full and how.get("device") == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256 MB.\nMore lines.")
        return real(min(size, 1 << 20), dtype=how["dtype"])

    monkeypatch.setattr("torch.empty", empty)
    found = list(doctor._devices())
    assert [f.text for f in found[:2]] == [f"cuda:{i} GPU X, 80 GB, CUDA {torch.version.cuda}" for i in range(2)]
    assert all("tested far less" in f.advice for f in found[:2])
    assert (found[2].mark, found[2].name) == ("ok" if why is None else "NO", "CUDA memory")
    assert (why or "in place") in found[2].text
    link = "CUDA out of memory. Tried to allocate 256 MB." if full else "GB/s, back"
    assert len(found) == 4 and link in found[3].text and found[3].mark == ("weaker" if full else "ok")
    assert all(len(f.text.splitlines()) == 1 and (f.advice or f.mark == "ok") for f in found)


@pytest.mark.parametrize(
    ("limit", "conf", "name", "says"),
    [
        ("12XB", "", "MEMMGR_BUDGET", "unknown unit 'XB'.*end at their import of torch"),
        ("12XB", "strict:off", "MEMMGR_BUDGET", "run without a budget"),
        ("12GB", "polcy:dtr", "MEMMGR_CONF", "did you mean 'policy'"),
        ("12GB", "policy:best", "MEMMGR_CONF", "unknown policy"),
        ("12GB", "policy:dtr", "MEMMGR_BUDGET", "^12GB$"),
    ],
)
def test_variables_of_a_budget(limit: str, conf: str, name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMMGR_BUDGET", limit)
    monkeypatch.setenv("MEMMGR_CONF", conf)
    found = _only(doctor._budget)
    assert re.search(says, found[name].text) and found[name].mark == ("ok" if says == "^12GB$" else "NO")
    assert "MEMMGR_BUDGET" not in os.environ, "torch would end the doctor"


def test_a_torch_that_is_newer_than_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "3.0.0a0+git")
    found = _only(doctor._versions)["torch"]
    assert (
        found.mark == "NO"
        and torch_versions.unfit("3.0.0a0+git") in found.text
        and "not for 3.0.0a0+git: pip install" in found.text
    )
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "AUTOLOAD=0" in _only(doctor._versions)["MEMMGR_BUDGET"].text


def test_a_container_smaller_than_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "group_bytes", lambda: 10**6)
    assert "this process may use 1 MB" in _only(lambda: doctor._memory(1 << 20))["memory"].text


@pytest.mark.parametrize(
    ("kind", "free", "speed", "says"),
    [
        ("tmpfs", 10**12, 1e9, "is memory (tmpfs)"),
        ("ext4", 10**6, 1e9, "only 1 MB free"),
        ("ext4", 10**12, 1e8, "read 100 MB/s"),
        ("ext4", 10**12, 0.0, "No space left"),
    ],
)
def test_disks_that_are_no_help(
    monkeypatch: pytest.MonkeyPatch, kind: str, free: int, speed: float, says: str, tmp_path: Path
) -> None:
    def measured(folder: str, size: int) -> tuple[float, float]:
        if not speed:
            raise OSError(28, "No space left on device")
        return 1e9, speed

    monkeypatch.setattr("psutil.disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(doctor, "_file_system", lambda folder: kind)
    monkeypatch.setattr(doctor, "disk_speed", measured)
    finding = _only(lambda: doctor._disk(str(tmp_path), 64 << 20))["disk"]
    assert finding.mark == "weaker" and says in finding.text and finding.advice


def test_the_file_system_of_a_folder(tmp_path: Path) -> None:
    assert doctor._file_system("/proc") == "proc" and doctor._file_system(str(tmp_path)) not in ("", "proc")


def test_speeds_are_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = disk_speed.disk_speed(str(tmp_path), 16 << 20)
    assert write > 0 and read > 0 and list(tmp_path.iterdir()) == [] and disk_speed.copy_speed(1 << 20) > 0
    full = len(os.listdir("/proc/self/fd"))

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        disk_speed.disk_speed(str(tmp_path), 16 << 20)
    assert list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == full


def test_a_misspelt_variable_and_telemetry(monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
    monkeypatch.setenv("MEMMGR_BUGDET", "12GB")
    found = _only(doctor._environment)
    assert (
        "MEMMGR_BUGDET is not a variable of memmgr: did you mean MEMMGR_BUDGET?" in found["variables"].text
        and found["telemetry"].mark == "ok"
    )
    monkeypatch.setenv("MEMMGR_ZEBRA", "1")
    assert "MEMMGR_DRIVER" not in _only(doctor._environment)["variables"].text, "nobody but our tests sets it"
    assert list(runtime.iterdir()) == []
    (runtime / "memmgr").touch()
    assert "not a folder of this user" in _only(doctor._environment)["telemetry"].text
    monkeypatch.setenv("MEMMGR_TELEMETRY", "0")
    assert "MEMMGR_TELEMETRY=0" in _only(doctor._environment)["telemetry"].text


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    found = _only(doctor._extras)
    assert found["textual"].mark == "weaker" and "pip install 'rich>=13' 'textual>=8'" in found["textual"].advice


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: broken\n"), "RuntimeError: broken"),
        (SimpleNamespace(returncode=-11, stdout="", stderr=""), "code -11"),
        (SimpleNamespace(returncode=1, stdout="", stderr="memmgr.NotBuiltError: no g++\n"), "no budget can be opened"),
        (SimpleNamespace(returncode=0, stdout="False 10 6 4", stderr=""), "with other bits"),
        (SimpleNamespace(returncode=0, stdout="True 10 10 0", stderr=""), "nothing left"),
        (subprocess.TimeoutExpired("python", 120), "did not end"),
    ],
)
def test_a_training_that_does_not_work(monkeypatch: pytest.MonkeyPatch, outcome: Any, says: str) -> None:
    def run(*args: Any, **how: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    finding = _only(lambda: doctor._training("/tmp"))["training"]
    assert finding.mark == "NO" and says in finding.text


def test_a_check_that_fails_is_a_finding() -> None:
    def check() -> Iterator[doctor.Finding]:
        yield doctor.Finding("a", "ok", "b")
        raise KeyError("c")

    found = list(doctor._guarded(check))
    assert [finding.mark for finding in found] == ["ok", "NO"] and "KeyError" in found[1].text


def test_it_starts_without_torch() -> None:
    """The tools that only look are quick to start."""
    names = "from memmgr.tools.verbs import doctor, report, run, top; from memmgr.tools.view import attach, report_page, run_state, top_text"
    code = f"import sys; {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0
