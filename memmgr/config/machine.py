"""The machine as this process has it: memory, which is less in a container or a job, and the time that its processors lose."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_TIMES = Path("/proc/stat")
_GROUPS, _MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""The files with the limit and with the use, by the controller that `_MINE` names: the second version, which names none,
and the first.
"""


def group_bytes() -> int | None:
    """The least limit of the control groups that this process is in; None: there is none."""
    return min((limit for limit, _ in _groups()), default=None)


def group_free_bytes() -> int | None:
    """The least free memory of the control groups that this process is in; None: none has a limit."""
    return min((free for _, free in _groups()), default=None)


def _groups() -> list[tuple[int, int]]:
    """Limit and free memory of the control groups that this process is in, without those that have no limit. Page cache
    that the kernel would take back counts as free.
    """
    found: list[tuple[int, int]] = []
    try:
        lines = _MINE.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in _FILES.keys() & set(controllers.split(",")):
            top = _GROUPS / controller
            group = top / path.strip("/")
            # Seen from inside a container the path may not be there: its own group is then the top.
            for folder in [group, *group.parents] if group.is_relative_to(top) else [top]:
                if folder.is_relative_to(top):
                    limit, use = (_number(folder / name) for name in _FILES[controller])
                    if limit is not None:
                        found.append((limit, max(0, limit - max(0, (use or 0) - _cache_bytes(folder)))))
    return found


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max"
        return None


def _cache_bytes(folder: Path) -> int:
    """Page cache of the group that has not been used lately."""
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    except (OSError, ValueError):
        return 0


def memory_bytes() -> int:
    """The memory that a percentage on the CPU device refers to."""
    whole = int(psutil.virtual_memory().total)
    return min(whole, group_bytes() or whole)


def free_bytes() -> int:
    """The memory that this process could take in addition to its own without swapping."""
    free, left = int(psutil.virtual_memory().available), group_free_bytes()
    return free if left is None else min(free, left)


def lost_seconds() -> float:
    """Returns the time since the machine started that the processors of this process gave to no thread, all together: to
    interrupts, and in a virtual machine to its host. A virtual disk is a program of the host. Its copies take that time, and
    none of the threads that ask for them. 0 where the kernel does not count it.

    Known limitation: other programs' interrupts and a busy host are in it.
    """
    # Without psutil: it reads nothing once the interpreter ends, and a budget may end then.
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = _TIMES.read_text().splitlines()
    except OSError:
        return 0.0
    # The fields of each processor: user, nice, system, idle, iowait, irq, softirq, steal (proc_stat(5)).
    each = [words[6:9] for words in map(str.split, lines) if words and words[0] in allowed]
    return sum(int(ticks) for words in each for ticks in words) / os.sysconf("SC_CLK_TCK")
