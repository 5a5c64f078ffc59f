"""Shared by the driver and the plug-in: settings, in a file that `FOREIGN` in the environment names, and lines of results."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Settings:
    """For one pass over a suite.

    Attributes:
        results: the file that lines are added to.
        leaving: tests run in a budget.
        limit: at most so many tests, the same ones in each pass; 0: all.
        only: these tests; None: all.
        not_run: patterns of tests that do not begin.
    """

    results: str
    leaving: bool
    limit: int = 0
    only: list[str] | None = None
    not_run: list[str] = field(default_factory=list)


def from_environment() -> Settings:
    return Settings(**json.loads(Path(os.environ["FOREIGN"]).read_text()))


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines that a pass wrote. A line may be cut off where the process was ended."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def ended(path: Path) -> dict[str, dict[str, Any]]:
    """Test -> how it ended."""
    return {line["id"]: line for line in lines(path) if "outcome" in line}
