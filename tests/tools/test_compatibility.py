"""The compatibility table: its page has every check, and shows failures."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import forkserver
import pytest
import torch

import memmgr

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "foreign" / "compatibility.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("_compatibility", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("compatibility_checks", None)


def test_the_page_has_every_check(script: ModuleType) -> None:
    page = script.PAGE.read_text().partition(script.NEXT_SECTION)[0]
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [check.title for check in script.CHECKS.values()]
    assert not [row for row in rows if "**" in row], "what is wrong is not published, it is mended"


def test_the_page_has_the_versions_that_are_installed() -> None:
    """It is made again when one changes; a package that is not installed here cannot be compared."""
    usual = re.search(r"\(INSTALL\) torch==([\d.]+)", (ROOT / "Makefile").read_text())
    assert usual is not None
    if version("torch").partition("+")[0] != usual[1]:
        pytest.skip("another torch than `make setup` takes, on purpose")
    stated = re.findall(r"\b(memmgr|torch|Python|[a-z]+) (\d+\.[\w.+]+\w)", script_page())
    assert len(stated) > 8 and {"memmgr", "torch", "transformers", "ipython"} <= dict(stated).keys()
    for package, said in stated:
        if package == "Python":
            assert platform.python_version_tuple()[:2] == tuple(said.split(".")[:2])
            continue
        try:
            assert version(package).partition("+")[0] == said.partition("+")[0], package
        except PackageNotFoundError:
            continue


def test_a_check_runs_in_a_process_of_its_own() -> None:
    command = [sys.executable, str(SCRIPT), "--only", "functional"]
    before = script_page()
    done = forkserver.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    title, _, same, peak, left, _ = (cell.strip() for cell in done.stdout.strip().strip("|").split("|"))
    assert title == "`torch.func`: gradients per sample" and same == "yes" and peak.endswith(" MB") and int(left) > 0
    assert script_page() == before, "it was written"


def script_page() -> str:
    return (ROOT / "docs" / "compatibility.md").read_text()


def test_other_bits_are_found(script: ModuleType) -> None:
    """A check whose result depends on the budget, as a framework's would that memmgr breaks."""

    def wrong(scope: object) -> list[torch.Tensor | float]:
        model = script.CHECKS["workers"].run.__globals__["mlp"]()
        left = script.CHECKS["workers"].run.__globals__["train"](scope, model)
        return [*left, float(memmgr.stats().get("passes", 0)) if scope.limit != "plain" else -1.0]  # type: ignore[attr-defined]

    check = type(script.CHECKS["workers"])("a broken one", wrong)
    outcome = script.work(check)
    assert not outcome.same and not outcome.good and outcome.left > 0 and outcome.peak_bytes <= outcome.limit_bytes
    script.CHECKS["broken"] = check
    assert "| **no** |" in script.row("broken", outcome)


def test_what_cannot_run_says_why(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    check = type(script.CHECKS["workers"])("one that nobody has", lambda scope: [], ("no-such-package-of-memmgr",))
    script.CHECKS["absent"] = check
    outcome = script.run("absent")
    assert not outcome.good and outcome.reason == "no-such-package-of-memmgr is not installed"
    assert script.row("absent", outcome) == f"| one that nobody has |  | not run |  |  | {outcome.reason} |\n"
    monkeypatch.setattr(script, "TIMEOUT_SECONDS", 0.01)
    assert "took more than" in script.run("functional").reason
