"""The command line: verbs, help, exit codes."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points, version

import pytest

from memmgr.policies import DIRECTORS, FILTERS, POLICIES
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


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("dmeo", "demo"),
        ("repot run.jsonl", "report"),
        ("run --buget 3GB train.py", "--budget"),
        ("run --budjet=3GB train.py --lr 1", "--budget"),
        ("trace --ot x.trace train.py", "--out"),
        ("top --intervl 3", "--interval"),
        ("report --format perfeto run.jsonl", "perfetto"),
        ("run --policy evcit train.py", "evict"),
        ("plan --device rtx409 model.py:make_step", "rtx4090"),
        ("completion bsh", "bash"),
    ],
)
def test_what_is_almost_right_is_asked_about(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(words.split())
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    said = capsys.readouterr().err
    assert code == 2 and f"; did you mean {meant!r}?" in said.splitlines()[-1], said


@pytest.mark.parametrize("words", ["xyzzy", "run --xyzzy 3GB train.py", "report --format xyzzy run.jsonl"])
def test_what_is_like_nothing_is_not(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words.split())
    assert end.value.code == 2 and "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["run", "trace"])
def test_the_help_names_the_policies(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    shown = set(re.findall(r"\w+", capsys.readouterr().out))
    assert shown >= {*POLICIES, *FILTERS, *DIRECTORS}


def test_no_help_shows_what_is_private(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, _, _ in cli.VERBS:
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
    assert not re.findall(r"(?<![\w/.])--?_\w+|_throttle|_placement|_plan\b", capsys.readouterr().out)


def test_without_a_temporary_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a container with a read-only disk."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    assert cli.main(["doctor", "--quick"]) == 2
    assert re.fullmatch("memmgr doctor: No usable temporary directory .* TMPDIR\n", capsys.readouterr().err)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"memmgr {version('memmgr')}"


def test_torchs_entry_point_finds_what_cudas_allocator_needs() -> None:
    """A program that imports our native half first imports torch in its middle, and torch calls us back for CUDA's
    allocator. With a torch for CUDA that found a half-initialised module, and no test could be collected.
    """
    script = """
import memmgr

def install():  # as where torch is built for CUDA
    import memmgr.native.cuda

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


INTERRUPTED = """
import sys

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == interrupted:
            raise KeyboardInterrupt

interrupted = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupts())
from memmgr.tools.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["memmgr.tools.common.usage_error", "memmgr.config.variables"])
def test_an_interrupt_while_the_command_is_imported_is_a_line(module: str) -> None:
    """Imports take most of the first 0.3 s of a verb."""
    words = [sys.executable, "-P", "-c", INTERRUPTED, module, "simulate", "--help"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "memmgr simulate: interrupted\n")


def test_the_command_imports_nothing_slow_before_it_can_be_interrupted() -> None:
    """An interrupt before `main` is a traceback of Python's own: there is no time for one."""
    script = """
import importlib.machinery, importlib.util, os, sys  # what the finder of an editable installation imports, and the interpreter itself
before = set(sys.modules)
import memmgr.tools.cli
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["memmgr", "memmgr.tools", "memmgr.tools.cli"]


def test_an_interrupt_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from memmgr.tools.verbs import simulate

    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "run", interrupted)
    assert cli.main(["simulate"]) == 130
    assert capsys.readouterr().err == "memmgr simulate: interrupted\n"
    monkeypatch.setattr(cli, "import_module", interrupted)  # which takes seconds where the verb imports torch
    assert cli.main(["simulate"]) == 130
    assert capsys.readouterr().err == "memmgr simulate: interrupted\n"
