"""The memory that this process may use: the machine's, or less in a container or a job."""

from __future__ import annotations

from pathlib import Path

import psutil

_GROUPS, _MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""The file with the limit, by the controller that `_MINE` names: the second version, which names none, and the first.
"""


def group_bytes() -> int | None:
    """The least limit of the control groups that this process is in; None: there is none."""
    found: list[int] = []
    try:
        lines = _MINE.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in _FILES.keys() & set(controllers.split(",")):
            top = _GROUPS / controller
            group = top / path.strip("/")
            # Seen from inside a container the path may not be there: its own group is then the top.
            for folder in [group, *group.parents] if group.is_relative_to(top) else [top]:
                if folder.is_relative_to(top):
                    found += _limit(folder / _FILES[controller])
    return min(found, default=None)


def _limit(file: Path) -> list[int]:
    try:
        return [int(file.read_text())]
    except (OSError, ValueError):  # "max"
        return []


def memory_bytes() -> int:
    """The memory that a percentage on the CPU device refers to."""
    whole = int(psutil.virtual_memory().total)
    return min(whole, group_bytes() or whole)
