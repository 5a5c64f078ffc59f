"""`memmgr completion`: the scripts parse, and a shell that has one completes typed words."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import forkserver
import pytest

from memmgr.policies import FILTERS, POLICIES
from memmgr.tools import cli
from memmgr.tools.verbs import completion


def _installed(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell} here")
    return found


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell, as `memmgr completion SHELL > FILE` leaves it."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in completion.SHELLS:
        with (folder / shell).open("w") as out:
            command = [sys.executable, "-P", "-m", "memmgr.tools.cli", "completion", shell]
            forkserver.run(command, stdout=out, check=True, timeout=120)
    return folder


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_script_parses(shell: str, scripts: Path) -> None:
    done = subprocess.run([_installed(shell), "-n", scripts / shell], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def _in_bash(scripts: Path, typed: list[str], folder: Path) -> set[str]:
    """The words that bash would offer for the last one."""
    script = f"""
source {scripts / "bash"}
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_memmgr
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    command = [_installed("bash"), "--norc", "-c", script, "bash", *typed]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)
    return set(done.stdout.split())


def test_what_bash_completes(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "traces").mkdir()

    def offered(*typed: str) -> set[str]:
        return _in_bash(scripts, ["memmgr", *typed], tmp_path)

    assert offered("") == {verb for verb, _, _ in cli.VERBS}
    assert offered("re") == {"report"} and offered("nothing-like-it") == set()
    assert offered("run", "--bud") == {"--budget"}
    assert offered("run", "--policy", "") == {*POLICIES, *FILTERS, "help"}
    assert offered("run", "--policy", "ev") == {"evict"}
    assert offered("run", "--budget", "1GB", "tra") == {"train.py", "traces"}
    assert offered("run", "--disk", "tra") == {"traces"}, "a file is no folder"
    assert offered("report", "tra") == {"train.py", "traces"}
    assert offered("simulate", "--policy", "lr") >= {"lru"}


def _typed(command: list[str], first: str, then: str, wanted: str) -> str:
    """A shell on a pseudo-terminal: its output after `then`, until `wanted` is there or a minute is over."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": "ready ", "PROMPT": "ready "}
    shown = ""

    def read_until(text: str) -> None:
        nonlocal shown
        deadline = time.monotonic() + 60
        while text not in shown and time.monotonic() < deadline:
            if select.select([ours], [], [], 1.0)[0]:
                shown += os.read(ours, 65536).decode(errors="replace")

    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.write(ours, f"{first}; echo is''there\n".encode())
        read_until("isthere")
        shown = ""
        os.write(ours, then.encode())
        read_until(wanted)
        process.kill()
    os.close(ours)
    os.close(theirs)
    return shown


def test_a_tab_in_bash(scripts: Path) -> None:
    shown = _typed(
        [_installed("bash"), "--norc", "--noprofile", "-i"], f"source {scripts / 'bash'}", "memmgr re\t", "port"
    )
    assert "memmgr report" in shown, shown


def test_a_tab_in_zsh(scripts: Path) -> None:
    (scripts / "functions").mkdir()
    shutil.copy(scripts / "zsh", scripts / "functions" / "_memmgr")
    first = f"fpath=({scripts / 'functions'} $fpath); autoload -U compinit; compinit -D"
    shown = _typed([_installed("zsh"), "-f", "-i"], first, "memmgr re\t", "port")
    assert "port" in shown, shown


def test_what_fish_completes(scripts: Path) -> None:
    def offered(line: str) -> set[str]:
        command = [_installed("fish"), "--no-config", "-c", f"source {scripts / 'fish'}; complete -C '{line}'"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return {found.partition("\t")[0] for found in done.stdout.splitlines()}

    assert offered("memmgr re") == {"report"}
    assert offered("memmgr run --policy to") == {"torture"}


def test_without_the_package_it_says_which(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert "pip install 'shtab>=1.13'" in capsys.readouterr().err
