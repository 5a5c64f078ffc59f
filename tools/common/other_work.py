"""Processor time that other programs take while something is measured."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

import psutil

NOTABLE = 0.1
"""A smaller share of the cores' time is not reported: a system's own work."""
_AT_WORK = (0, 1, 2, 5, 6, 7)  # of a line of /proc/stat: user, nice, system, irq, softirq, steal


class OtherWork:
    """Measures it from the moment that it is made, on the cores that this process may use.

    Known limitation: the time of a process whose parent, one of ours, has not waited for it counts as another program's.
    """

    def __init__(self) -> None:
        self._begun = perf_counter()
        self._before = _seconds_of_others()

    def share(self) -> float:
        """The share of the cores' time until now, 0 to 1; 0 where the system does not count it."""
        cores = len(os.sched_getaffinity(0))
        took = _seconds_of_others() - self._before
        return min(1.0, max(0.0, took / (cores * max(perf_counter() - self._begun, 1e-9))))

    def line(self, meaning: str) -> list[str]:
        """One sentence if other programs were at work, else none.

        Args:
            meaning: the effect on the measured figures.
        """
        share = self.share()
        return [f"the machine was busy: other programs took {share:.0%} of its cores' time, so {meaning}"] * (
            share >= NOTABLE
        )


def _seconds_of_others() -> float:
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = [[int(word) for word in words[1:]] for words in map(str.split, lines) if words and words[0] in names]
    whole = sum(times[i] for times in ticks for i in _AT_WORK if i < len(times)) / os.sysconf("SC_CLK_TCK")
    return whole - _own_seconds()


def _own_seconds() -> float:
    """This process, its children that have ended, and those that live."""
    seconds = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        try:
            seconds += sum(child.cpu_times()[:4])
        except psutil.Error:
            continue  # it has ended since
    return seconds
