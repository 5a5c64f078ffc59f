"""The command line: verbs, help, exit codes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest

from memmgr.tools import cli


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert all(verb in shown and line in shown for verb, _, line in cli.VERBS)


@pytest.mark.parametrize("verb", [verb for verb, _, _ in cli.VERBS])
def test_a_verb_is_one_file_whose_docstring_is_its_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module({name: path for name, path, _ in cli.VERBS}[verb])
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--help"])
    assert end.value.code == 0
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out


def test_without_a_verb_it_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "demo" in capsys.readouterr().out


def test_an_unknown_verb_is_told_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["dmeo"])
    assert end.value.code == 2
    assert "demo" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"memmgr {version('memmgr')}"


def test_torchs_entry_point_finds_what_cudas_allocator_needs() -> None:
    """Whoever imports our native half first imports torch in its middle, and torch calls us back for CUDA's allocator: with a
    torch for CUDA that found a module half made, and no test could be collected."""
    script = """
import memmgr

def install():  # as where torch is built for CUDA
    import memmgr._cuda

memmgr._install = install
import memmgr.native.build
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_command_and_the_autoload_hook_are_registered() -> None:
    assert [e.value for e in entry_points(group="console_scripts", name="memmgr")] == ["memmgr.tools.cli:main"]
    assert [e.value for e in entry_points(group="torch.backends", name="memmgr")] == ["memmgr._environ:autoload"]


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "memmgr.tools.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("memmgr ")
