"""Four rooms at the top level, one package when installed."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _project() -> dict[str, dict[str, object]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def test_the_library_and_the_shim_sources_are_inside_the_package() -> None:
    package = importlib.resources.files("memmgr")
    assert package.joinpath("libmemmgr_core.so").is_file()
    assert package.joinpath("_shim_src", "memmgr", "core.h").is_file()
    assert package.joinpath("_shim_src", "shim.cpp").is_file()
    assert package.joinpath("_shim_src", "memmgr", "plugin.h").is_file()
    assert package.joinpath("_cuda_src", "plugin.cpp").is_file()
    assert package.joinpath("_cuda_src", "meter.cpp").is_file()


def test_the_rooms_are_one_package() -> None:
    import memmgr.policies
    import memmgr.tools

    assert Path(memmgr.tools.__path__[0]).samefile(ROOT / "tools")
    assert Path(memmgr.policies.__path__[0]).samefile(ROOT / "policies")


def test_the_version_is_said_once() -> None:
    import memmgr

    assert memmgr.__version__ == _project()["project"]["version"]


@pytest.mark.parametrize("statement", ["import policies", "from tools import cli", "from policies.filters import x"])
def test_the_linter_refuses_a_second_copy_of_a_module(statement: str) -> None:
    pytest.importorskip("ruff")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--stdin-filename", "tests/x.py", "-"],
        input=statement + "\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "TID251" in done.stdout


def test_no_test_module_is_the_second_copy() -> None:
    """What the linter is there to prevent; it would show here, wherever it came from."""
    for name in ("policies", "tools"):
        module = sys.modules.get(name)
        assert module is None or not (getattr(module, "__file__", None) or "").startswith(str(ROOT / name))
