"""A program that the fork server starts is as `subprocess` would have started it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forkserver
import pytest

LOOK = """
import sys, os, warnings
print(sys.argv, sys.path[0], __name__, os.getcwd(), os.getppid(), os.environ.get("SAID"), sys.stdin.read(), flush=True)
print("torch" in sys.modules, "memmgr" in sys.modules, sys.warnoptions, file=sys.stderr)
"""
ENDS = {
    "at its end": ("import atexit; atexit.register(print, 'late')", 0),
    "with a code": ("raise SystemExit(7)", 7),
    "with an error": ("raise KeyError('gone')", 1),
    "by a signal": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "interrupted": ("raise KeyboardInterrupt", -signal.SIGINT),
}


def _both(words: list[str], **more: Any) -> list[subprocess.CompletedProcess[str]]:
    return [
        start([sys.executable, *words], capture_output=True, text=True, **more)
        for start in (forkserver.run, subprocess.run)
    ]


@pytest.mark.parametrize("words", [["-c", LOOK, "a"], ["-P", "-W", "error", "look.py", "-x"], ["-m", "look", "b"]])
def test_a_program_sees_the_same(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    here, there = _both(words, cwd=tmp_path, env={**os.environ, "SAID": "so"}, input="in")
    assert here.returncode == 0 and here.stdout == there.stdout, here.stderr
    warnings = there.stderr.split(" ", 2)[2]
    assert here.stderr == f"True True {warnings}"  # the entry point has run, and torch was there before


@pytest.mark.parametrize("ending", ENDS)
def test_it_ends_the_same(ending: str) -> None:
    program, code = ENDS[ending]
    here, there = _both(["-c", program], env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert (here.returncode, here.stdout) == (there.returncode, there.stdout) == (code, there.stdout)
    assert here.stderr.splitlines()[-1:] == there.stderr.splitlines()[-1:]


def test_what_is_read_when_torch_loads_takes_an_interpreter_of_its_own() -> None:
    program = "import sys; print('torch' in sys.modules)"
    variables = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", program]
    for more, there in ({}, True), ({"OMP_NUM_THREADS": "3"}, False):
        done = forkserver.run(command, capture_output=True, text=True, env=variables | more)
        assert done.stdout.strip() == str(there), done.stderr


def test_a_program_that_ends_with_its_parent_does_not_end_with_what_forked_it() -> None:
    program = (
        "import ctypes, os, time; ctypes.CDLL(None).prctl(1, 9); time.sleep(0.02); os._exit(0)"  # PR_SET_PDEATHSIG
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # nothing is imported before
    codes = [forkserver.run([sys.executable, "-P", "-c", program], env=environment).returncode for _ in range(20)]
    assert codes == [0] * 20


def test_commands_of_a_shell_see_the_same(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK.replace("os.getppid(), ", ""))
    script = "echo in | SAID=so python look.py 'a b' && python -c 'raise SystemExit(7)'; echo $?; memmgr --version"
    script += "; python -c 'import os; os.kill(os.getpid(), 15)'; echo $?"
    with forkserver.commands(tmp_path) as place:
        outputs = []
        for first in (place, Path(sys.executable).parent):
            env = {**os.environ, "PATH": f"{first}{os.pathsep}{os.environ['PATH']}"}
            env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # nothing is imported before, where nothing was there
            done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
            outputs.append(done.stdout)
            assert done.stderr.startswith(str("False" if outputs[1:] else "True")), done.stderr
    assert outputs[0] == outputs[1] and "\n7\nmemmgr " in outputs[0] and outputs[0].endswith("\n143\n")
