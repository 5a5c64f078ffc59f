"""Every example runs as its own text says, and managed models train to the same losses."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import forkserver
import pytest
from job.ranks import one_launcher

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
NEEDS = {"with_lightning": "lightning"}
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def commands_of(path: Path) -> list[str]:
    """Those that its docstring shows, without the installing ones."""
    shown = path.read_text().split('"""')[1]
    found = re.findall(r"^    ((?:python|memmgr|torchrun|accelerate) .*?)(?:  #.*)?$", shown, re.MULTILINE)
    assert found, f"{path.name} does not say how it is run"
    return found


@functools.cache
def _run(command: str | tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMMGR_")}
    environment |= {"PATH": f"{BIN}{os.pathsep}{environment['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = shlex.split(command) if isinstance(command, str) else list(command)
    started = {"python": [sys.executable], "memmgr": [sys.executable, "-P", "-m", "memmgr"]}
    if words[0] in started:
        words[:1] = started[words[0]]
        return forkserver.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    with one_launcher():
        return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def _marks(command: str, name: str) -> list[pytest.MarkDecorator]:
    if not command.startswith(("python", "memmgr")):
        return [pytest.mark.slow]  # two ranks; tests/job/test_launch.py starts a script by torchrun, too
    if command.startswith("memmgr run") and name == "plain":
        return [pytest.mark.slow]  # by python the same script runs; test_run_script.py runs scripts by the command
    if name == "with_lightning":
        return [pytest.mark.slow]  # five seconds of imports; tests/watch/test_lightning.py trains with the callback
    if name == "lora":
        return [pytest.mark.slow]  # 8 s; tests/watch/test_trainer.py trains an adapter to the same losses
    if name == "compiled":
        return [pytest.mark.slow]  # a minute of compiling; tests/compiled_programs has such models
    needed = NEEDS.get(name)
    missing = needed is not None and importlib.util.find_spec(needed) is None
    return [pytest.mark.skip(reason=f"the package {needed} is not installed")] if missing else []


CASES = [
    pytest.param(command, marks=_marks(command, path.stem), id=command)
    for path in EXAMPLES
    for command in commands_of(path)
]


@pytest.mark.parametrize("command", CASES)
def test_it_runs_as_it_says(command: str) -> None:
    done = _run(command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"memmgr: peak [\d.]+ MB of \d+ MB", done.stderr), "it ran without a budget"


def test_the_same_losses() -> None:
    managed, plain = (_run(f"python examples/plain.py --budget {size}") for size in ("40MB", "none"))
    assert managed.stdout == plain.stdout and "step 9: loss" in plain.stdout
    assert int(re.search(r"offloaded (\d+)", managed.stderr)[1]) > 0, "nothing had to leave"  # type: ignore[index]


def test_the_notebook_runs_and_holds_no_outputs() -> None:
    """Its cells one after the other, as Jupyter would: that need not be installed."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    done = _run(("python", "-P", "-c", "\n\n".join("".join(cell["source"]) for cell in cells)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"memmgr: peak [\d.]+ MB of [\d.]+ MB", done.stderr) and "the floor is" in done.stdout


def test_all_that_are_promised_are_there() -> None:
    promised = {"plain", "lora", "with_accelerate", "with_lightning", "inference", "ddp"}
    assert {path.stem for path in EXAMPLES} >= promised
