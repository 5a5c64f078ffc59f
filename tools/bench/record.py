"""The file that a bench writes after every group and goes on from: settings, machine, versions, rows."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from memmgr.tools.common.outputs import write_whole
from memmgr.tools.common.usage_error import UsageError

from .rows import Row

_PACKAGES = ("memmgr", "torch", "transformers", "trl", "torchtune")


def machine(device: str) -> dict[str, Any]:
    """Hardware and versions."""
    from memmgr.tools.bench.measure import processor

    found = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }
    if device == "cuda":
        import torch

        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found | {"python": platform.python_version(), "system": platform.platform(), **_versions()}


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass
class Record:
    """The measurements so far."""

    path: Path
    settings: dict[str, Any]  # they must be equal for rows to be in one table
    machine: dict[str, Any]
    needs: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each model, by system: peak, states and seconds
    rows: dict[str, Row] = field(default_factory=dict)  # by key
    largest: dict[str, dict[str, Any]] = field(default_factory=dict)  # results of `--max-batch`, by model and system

    def save(self) -> None:
        """Whole or not at all."""
        write_whole(self.path, json.dumps(self.to_json(), indent=1))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = {"rows": [row.to_json() for row in self.rows.values()]}
        return {
            "settings": self.settings,
            "machine": self.machine,
            "needs": self.needs,
            **rows,
            "largest": self.largest,
        }


def opened(path: Path, settings: dict[str, Any], here: dict[str, Any]) -> Record:
    """The record in that file, to go on from, or a new one.

    Raises `UsageError`: the file is none, or is of other settings, another machine or other versions.
    """
    if not path.exists():
        return Record(path, settings, here)
    try:
        data = json.loads(path.read_text())
        found = Record(path, data["settings"], data["machine"], data["needs"], {}, data["largest"])
        found.rows = {row.key: row for row in map(Row.from_json, data["rows"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is no bench of this version; name another folder with --out") from None
    for what, theirs, ours in (("settings", found.settings, settings), ("machine", found.machine, here)):
        differs = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
        if differs:
            key = differs[0]
            raise UsageError(
                f"{path} has another {what}: {key} was {theirs.get(key)}, is {ours.get(key)}; name another folder with --out"
            )
    return found
