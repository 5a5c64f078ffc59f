"""Why passes leave the plan that they followed: the first op that differs, in words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memmgr.common.constants import TOUCH_MAKES
from memmgr.config.sizes import show_size

from .timeline import Noted

if TYPE_CHECKING:
    from memmgr.native._pager import Pager, PeriodInfo, TimelineColumns

MOST_PLACES = 32
"""Places at which passes leave plans that are told apart; a program with more has no passes that repeat."""

MODULE_TRIES = 3
"""Further passes that leave at a place whose module is not known, for which modules are named."""

WORTH_SAYING = 0.1
"""The share of the passes that leave a plan from which the summary says why."""


@dataclass(frozen=True)
class ModuleNames:
    """The names of the modules in which ops run.

    `name`: of a module by its number; None: it is not known. `learn`: the modules of the ops from here on are told
    apart, or no more: that costs some microseconds a call.
    """

    name: Callable[[int], str | None] = lambda number: None
    learn: Callable[[bool], None] = lambda on: None


UNNAMED = ModuleNames()
"""No module has a name."""


@dataclass
class _Place:
    text: str
    named: bool
    passes: int = 0


class LeftPlans:
    """The places at which passes leave plans. One thread at a time.

    `pager`: has the period that ended last. `happened`: called once for each place (`Telemetry.happened`).
    """

    def __init__(self, pager: Pager, modules: ModuleNames, happened: Callable[..., None]) -> None:
        self._pager = pager
        self._modules = modules
        self._happened = happened
        self._places: dict[tuple[int, int], _Place] = {}
        self._tries = 0  # passes for which modules were named
        self._learning = self._closed = False

    def note(self, ended: PeriodInfo, plan: Noted) -> None:
        """A period left a plan. `ended`: the period; its timeline is at hand."""
        key = ended["left_plan"], ended["left_at"]
        place = self._places.get(key)
        if place is None and len(self._places) >= MOST_PLACES:
            return
        if place is None or (self._learning and not place.named):
            text, named = difference(plan.columns, self._pager.timeline(), key[1], self._modules.name)
            if place is None:
                place = self._places[key] = _Place(text, named)
                self._happened("left_plan", ops=ended["ops"], text=text)
            else:
                place.text, place.named = text, named
        place.passes += 1
        self._learn(all(p.named for p in self._places.values()))

    def _learn(self, done: bool) -> None:
        may = not self._closed and self._tries < MODULE_TRIES * len(self._places) and not _has_compiled()
        wanted = may and not done
        self._tries += wanted
        if wanted != self._learning:
            self._learning = wanted
            self._modules.learn(wanted)

    def close(self) -> None:
        """Modules are named no more."""
        self._closed = True
        if self._learning:
            self._learning = False
            self._modules.learn(False)

    def lines(self, left_passes: int, passes: int) -> list[str]:
        """A line for the summary; none where few passes leave a plan."""
        if not self._places or left_passes < WORTH_SAYING * passes:
            return []
        most = max(self._places.values(), key=lambda place: place.passes)
        return [f"{left_passes:,} of {passes:,} passes left a plan, {most.passes:,} of them at {most.text}"]


def _has_compiled() -> bool:
    """Dynamo compiles once more where modules have global hooks, which naming them takes."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))


class _Ops:
    """The ops of a period, by position."""

    def __init__(self, columns: TimelineColumns) -> None:
        self._names = columns["names"]
        self._op = np.frombuffer(columns["op"], dtype=np.int32)
        self._first = np.frombuffer(columns["first_touch"], dtype=np.uint32)
        self._ordinal = np.frombuffer(columns["ordinal"], dtype=np.uint32)
        self._flags = columns["flags"]
        self._sizes = np.frombuffer(columns["sizes"], dtype=np.uint64)
        self._module = np.frombuffer(columns["module"], dtype=np.uint32)

    def __len__(self) -> int:
        return len(self._op)

    def name(self, at: int) -> str:
        return f"`{self._names[self._op[at]]}`"

    def module(self, at: int) -> int:
        """The number of its module; 0: it is not known."""
        return int(self._module[at])

    def cells(self, at: int, *, made: bool) -> list[tuple[int, int]]:
        """Pairs of ordinal and bytes of the cells that the op made, or of those that it was given."""
        end = int(self._first[at + 1]) if at + 1 < len(self) else len(self._flags)
        touched = (i for i in range(int(self._first[at]), end) if bool(self._flags[i] & TOUCH_MAKES) == made)
        return [(int(self._ordinal[i]), int(self._sizes[self._ordinal[i]])) for i in touched]


def difference(
    plan: TimelineColumns, now: TimelineColumns, at: int, module: Callable[[int], str | None]
) -> tuple[str, bool]:
    """The first difference of a period from the one that was planned.

    Returns words such as "op 412 of 705, `aten::mul` in `GPT.blocks.3`: a new size, 4.2 MB for 4 MB", and whether the
    module is in them. `now`: the other one. `at`: the first position at which they differ: in the op there, or in the
    results of the op before. `module`: the name of a module by its number.
    """
    planned, ran = _Ops(plan), _Ops(now)
    words = ""
    if 0 < at <= min(len(planned), len(ran)):
        words = _cells(planned.cells(at - 1, made=True), ran.cells(at - 1, made=True), "results")
    if words or at >= max(len(planned), len(ran)):
        at -= 1
        words = words or "other results"
    elif at >= len(ran):
        return f"op {at:,} of {len(planned):,}, the last one of these passes", True
    elif at >= len(planned):
        words = f"the plan has {len(planned):,} ops"
    elif ran.name(at) == planned.name(at):
        words = _cells(planned.cells(at, made=False), ran.cells(at, made=False), "arguments") or "other arguments"
    else:
        words = f"in the place of {planned.name(at)}"
    name = module(ran.module(at))
    place = f" in `{name}`" if name else ""
    of = f" of {len(planned):,}" if at < len(planned) else ""
    return f"op {at + 1:,}{of}, {ran.name(at)}{place}: {words}", name is not None


def _cells(planned: list[tuple[int, int]], ran: list[tuple[int, int]], what: str) -> str:
    if len(planned) != len(ran):
        return f"{len(ran)} large {what} for {len(planned)}"
    for (ordinal, size), (now_ordinal, now_size) in zip(planned, ran, strict=True):
        if size != now_size:
            return f"a new size, {show_size(now_size)} for {show_size(size)}"
        if ordinal != now_ordinal:
            return f"another tensor among its {what}"
    return ""
