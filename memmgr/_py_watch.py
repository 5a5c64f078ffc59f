"""What the telemetry reads, on the accounting path: the same functions as in `allocator/shim/watch.cpp`, in Python."""

from __future__ import annotations

import threading
from typing import Any

from ._py_types import OFFLOADED, PRESENT, Cell, Recipe, can_evict

HAPPENED_EVICT, HAPPENED_OFFLOAD, HAPPENED_RELOAD, HAPPENED_RECOMPUTE, HAPPENED_STALL = range(5)
MOST_KEYS = 4096
MOST_COURSES = 8
LOOK_AHEAD = 16

CellRow = tuple[int, int, bool, bool, int, float, float, bool, str | None, int, bool]


class Watch:
    """Sums of what happened by op and module, and a look at the cells that takes no reference to a storage."""

    _lock: Any
    _clock: float
    _handled: Any

    def __init__(self) -> None:
        self._detail = False
        self._happened: dict[tuple[int, str | None, int], list[float]] = {}
        self._unlisted = 0
        self._where = threading.local()
        self._learning = False
        self._astray = 0

    # -- noting --

    def _module(self) -> int:
        return int(getattr(self._where, "module", 0))

    def _add(self, what: int, op: str | None, module: int, nbytes: int, seconds: float) -> None:
        key = (what, op, module)
        found = self._happened.get(key)
        if found is None:
            if len(self._happened) >= MOST_KEYS:
                self._unlisted += 1
                return
            found = self._happened[key] = [0, 0, 0.0]
        found[0] += 1
        found[1] += nbytes
        found[2] += seconds

    def _event(self, what: int, cell: Cell, spent_ns: int = 0) -> None:
        if self._detail:
            with self._lock:
                self._add(what, cell.maker, cell.module, cell.nbytes, spent_ns * 1e-9)

    def _note_stall(self, nbytes: int, spent_ns: int) -> None:
        if self._detail:
            op, module = getattr(self._where, "op", None), getattr(self._where, "op_module", 0)
            with self._lock:
                self._add(HAPPENED_STALL, op, module if op else self._module(), nbytes, spent_ns * 1e-9)

    def _runs(self, op: str | None, module: int) -> None:
        """What is waited for from here on is waited for by this op."""
        self._where.op, self._where.op_module = op, module

    def _place(self, func: Any) -> None:
        """An op is about to be recorded: its module is the one that was learned for its place in the pass."""
        where = self._where
        at = where.__dict__.get("at", 0)
        course = where.__dict__.get("course") or []
        if self._learning:
            where.__dict__.setdefault("learned", []).append((func, self._module()))
            return
        if not (at < len(course) and course[at][0] is func):
            before = [step[0] for step in course[:at]]
            for other in where.__dict__.get("known", ()):
                if at < len(other) and other[at][0] is func and [step[0] for step in other[:at]] == before:
                    course = where.course = other
                    break
        # An op more or less than was learned: the rest may still be as it was.
        found = next((i for i in range(at, min(at + LOOK_AHEAD, len(course))) if course[i][0] is func), None)
        if found != at:
            self._astray += 1
        where.module = 0 if found is None else course[found][1]
        where.at = at if found is None else found + 1

    def _end_of_pass(self) -> None:
        where = self._where
        self._runs(None, 0)
        where.at = 0
        learned = where.__dict__.pop("learned", None)
        if learned:
            known = where.__dict__.setdefault("known", [])
            ops = [step[0] for step in learned]
            known[:] = [learned, *(c for c in known if [step[0] for step in c] != ops)][:MOST_COURSES]
            where.course = learned

    # -- the interface --

    def set_learning(self, value: bool) -> None:
        """Whether `set_module` is called for every module."""
        self._learning = bool(value)

    def ops_astray(self) -> int:
        """Ops since the last call whose module is not known."""
        astray, self._astray = self._astray, 0
        return astray

    def set_detail(self, value: bool) -> None:
        """Whether what happens is noted by op and module."""
        self._detail = bool(value)
        self._happened, self._unlisted = {}, 0

    def set_module(self, number: int) -> None:
        """Number of the module whose forward runs in this thread."""
        self._where.module = number

    def note_recompute(self, recipe: Recipe, seconds: float) -> None:
        """A recipe's op ran again."""
        if self._detail:
            cells = [cell for cell in recipe.outputs if cell is not None]
            with self._lock:
                self._add(HAPPENED_RECOMPUTE, str(recipe._func), recipe.module, sum(c.nbytes for c in cells), seconds)

    def drain_events(self) -> tuple[list[tuple[int, str | None, int, int, int, float]], int]:
        """What happened since the last call: ([(what, op, module, count, bytes, seconds)], events without an entry)."""
        with self._lock:
            taken, self._happened = self._happened, {}
            rest, self._unlisted = self._unlisted, 0
        return [(*key, int(n), int(nbytes), seconds) for key, (n, nbytes, seconds) in taken.items()], rest

    def watch_cells(self, limit: int) -> tuple[list[CellRow], dict[int, tuple[int, int, int]]]:
        """The largest cells, and by module: (present bytes, of these held by the program, gone bytes)."""
        rows: list[CellRow] = []
        modules: dict[int, list[int]] = {}
        if limit < 0:
            raise ValueError("a negative limit")
        with self._lock:
            for cell in list(self._handled):
                present = cell.gone == PRESENT
                held = present and not cell.alone
                share = modules.setdefault(cell.module, [0, 0, 0])
                share[0 if present else 2] += cell.nbytes
                share[1] += cell.nbytes if held else 0
                rows.append(
                    (
                        cell.nbytes,
                        cell.gone,
                        cell.slot >= 0,
                        held,
                        cell.handles,
                        cell.cost,
                        self._clock - cell.last_access,
                        can_evict(cell),
                        cell.maker,
                        cell.module,
                        cell.arriving,
                    )
                )
        rows.sort(key=lambda row: -row[0])
        return rows[:limit], {module: (a, b, c) for module, (a, b, c) in modules.items()}

    def memory_map(self, columns: int) -> tuple[int, list[tuple[int, ...]]]:
        """No arena, so no address space to show."""
        if not 1 <= columns <= 4096:
            raise ValueError("1 to 4096 columns")
        return 0, [(0,) * 7] * columns

    def _gone_bytes_now(self) -> tuple[int, int]:
        """Bytes that are gone, and of these the offloaded ones."""
        with self._lock:
            gone = [cell for cell in list(self._handled) if cell.gone != PRESENT]
        return sum(c.nbytes for c in gone), sum(c.nbytes for c in gone if c.gone == OFFLOADED)
