"""Temporary folders of verbs: they go with their process, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memmgr.tools import cli
from memmgr.tools.common import scratch

HOLD = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run below nohup
from memmgr.tools.common.scratch import scratch_folder
with scratch_folder("tune") as folder:
    (folder / "run.trace").write_bytes(b"x" * 1500)
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("MEMMGR_CACHE", str(tmp_path / "none"))


def _holder() -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder, and the folder."""
    words = [sys.executable, "-P", "-c", HOLD]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def _end(process: subprocess.Popen[str], number: int) -> int:
    process.send_signal(number)
    process.communicate()
    return process.returncode


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_signal_removes_the_folder(number: int, code: int) -> None:
    process, folder = _holder()
    assert folder.is_dir()
    assert _end(process, number) == code
    assert not folder.exists()


def test_the_next_start_removes_the_folder_of_a_killed_process_and_no_other(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("memmgr-1000", "memmgr-cache-1000", "memmgr-tune", "other")]
    for other in others:
        other.mkdir()
    living, kept = _holder()
    killed, left = _holder()
    _end(killed, signal.SIGKILL)
    assert left.is_dir()
    with scratch.scratch_folder("bench") as own:
        assert own.is_dir() and kept.is_dir() and not left.exists()
        assert list(scratch.abandoned()) == []
    _end(living, signal.SIGTERM)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_clean_removes_the_folder_of_a_killed_process(capsys: pytest.CaptureFixture[str]) -> None:
    living, kept = _holder()
    killed, left = _holder()
    _end(killed, signal.SIGKILL)
    assert cli.main(["clean", "--dry-run"]) == 0 and left.is_dir()
    assert cli.main(["clean"]) == 0 and not left.exists() and kept.is_dir()
    assert capsys.readouterr().out.splitlines()[-2:] == [f"  1.5 kB  {left}", "removed 1 folder, 1.5 kB"]
    _end(living, signal.SIGTERM)


def test_a_folder_of_another_user_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memmgr-tune-abc").mkdir()
    assert list(scratch.abandoned()) == [tmp_path / "memmgr-tune-abc"]
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert list(scratch.abandoned()) == []
