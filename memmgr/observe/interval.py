"""Figures for a log line of a training: three, over the steps since the line before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PEAK, RECOMPUTE, STALL = "peak_gb", "recompute_percent", "stall_percent"
_SECONDS = ("wall_seconds", "recompute_seconds", "stall_seconds")


class Interval:
    """Sums up stretches of time, usually steps, and returns memmgr's share of them.

    Time between two stretches (evaluation, a checkpoint) is in no share. Every `stats` here is a reading of
    `memmgr.stats()`, or an empty dict while no budget is open yet.

    Known limitation: threads that recompute at the same time add up, so a share may pass 100 %.
    """

    def __init__(self) -> None:
        self._since: list[float] | None = None
        self._sums = [0.0] * len(_SECONDS)

    def begin(self, stats: Mapping[str, Any]) -> None:
        """A stretch begins here."""
        self._since = _seconds(stats)

    def end(self, stats: Mapping[str, Any]) -> None:
        """It ends here; without a beginning there was none."""
        if self._since is not None:
            parts = zip(self._sums, _seconds(stats), self._since, strict=True)
            self._sums = [total + now - then for total, now, then in parts]
            self._since = None

    def take(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """The figures of the stretches that have ended. The sums begin anew.

        Returns:
            `peak_gb`: the most that was on the device since the budget opened, in 10^9 bytes; `recompute_percent` and
            `stall_percent`: the share of the time in which ops ran again, and in which training waited for reads and
            for room.
        """
        (wall, recompute, stall), self._sums = self._sums, [0.0] * len(_SECONDS)
        percent = 100 / wall if wall > 0 else 0.0
        return {
            PEAK: round(stats["resident_bytes.peak"] * 1e-9, 6),
            RECOMPUTE: round(percent * recompute, 2),
            STALL: round(percent * stall, 2),
        }

    def take_until(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """The same where one stretch follows the other: this one ends here, and the next begins."""
        self.end(stats)
        self.begin(stats)
        return self.take(stats)


def _seconds(stats: Mapping[str, Any]) -> list[float]:
    return [float(stats.get(name, 0.0)) for name in _SECONDS]
