"""Finds leaks: tensors of an op that outlive their pass, in one pass after the other, and one tensor that grows in each.

A budget hides a leak: it does not end in an error, each step only moves more bytes than the step before. The measure is
the number of passes from which tensors of the op still live. Parameters and optimizer states come from one pass or two,
a buffer of the last n results from n; a leak's number grows without an end.

`history = torch.cat([history, x])` frees the last pass's tensor. There the measure is the number of passes in which the op
has made a larger tensor from its own result of an earlier pass. Batches that grow are not made from each other.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memmgr.config.sizes import show_size

from .source_lines import SourceLine

if TYPE_CHECKING:
    from memmgr.native._pager import GrownCell, Pager, SurvivingPlace

PASSES = 5
"""The growths in a row, without a fall, after which it is called a leak."""
TOLD_OF_LIMIT = 0.1
"""A leak that holds this share of the budget is told while the run goes on."""
TOLD_OF_NEED, TOLD_PASSES = 0.05, 8
"""So is one that holds this share of all that the run needs, after so many passes: by then a short cache is full."""
MARKED = 2
"""The passes of birth from which on the op's tensors are recorded with their source lines."""


@dataclass(frozen=True)
class Leak:
    """Bytes that grow from pass to pass.

    Attributes:
        bytes_per_pass: the mean growth.
        bytes: bytes that the tensors of these passes have, resident or not.
        absent_bytes: of these, bytes that are evicted or offloaded.
        since_pass: the first pass whose tensors still live, counted from 1.
        line: the line that made most of them; None: it is not known.
        ops: the ops that made them.
        module: the number of the module that made most of them; 0: it is not known.
        kept: the variable that keeps them, as in "in the list `losses` of train.py"; empty: it is not known; None: it was not
            looked for.
        is_one: they are one tensor, which each pass makes anew and larger, as `torch.cat` does.
        backward: the line that called the backward which made them; None: no backward did, or it was not looked for.
    """

    bytes_per_pass: float
    bytes: int
    absent_bytes: int
    since_pass: int
    line: SourceLine | None
    ops: tuple[str, ...]
    module: int = 0
    kept: str | None = None
    is_one: bool = False
    backward: SourceLine | None = None

    @property
    def origin(self) -> SourceLine | str:
        """The line, or the op where the line is not known."""
        return self.line or self.ops[0]

    @property
    def passes(self) -> float:
        """The passes for which it has gone on."""
        return self.bytes / self.bytes_per_pass

    def is_large(self, limit_bytes: int, need_bytes: int) -> bool:
        """It is worth a line while the run goes on.

        Args:
            limit_bytes: the budget.
            need_bytes: the most that the last pass would have held without memmgr.
        """
        lasts = self.passes >= TOLD_PASSES and self.bytes >= TOLD_OF_NEED * need_bytes
        return lasts or self.bytes >= TOLD_OF_LIMIT * limit_bytes

    def text(self, *, binary: bool = False, module: str | None = None) -> str:
        """One sentence, without its full stop. It calls a pass a step, as users do."""
        size = functools.partial(show_size, binary=binary)
        where = f"made at {self.line}" if self.line else "made at a line that is not known"
        where = f"made in the backward of {self.backward}" if self.backward else where
        made = ", ".join(op.removeprefix("aten::") or "no op" for op in self.ops)
        if module:  # a place that is none is in parentheses
            made += f", {module[1:-1]}" if module.startswith("(") else f" in {module}"
        away = f", {size(self.absent_bytes)} of them evicted or offloaded" if self.absent_bytes else ""
        kept = "" if self.kept is None else f", kept {self.kept or 'by a variable that is not known'}"
        one = "one tensor grows, " * self.is_one
        return (
            f"a leak: {one}+{size(self.bytes_per_pass)} a step since step {self.since_pass}, {where} ({made}){kept}; "
            f"{size(self.bytes)} so far{away}"
        )

    def row(self, module: str | None = None) -> dict[str, Any]:
        """The leak in plain types, for a file: a figure that is not known is None.

        Args:
            module: the name of the module that made most of them.
        """
        return {
            "file": self.line.file if self.line else None,
            "line": self.line.line if self.line else None,
            "caller": str(self.line.caller) if self.line and self.line.caller else None,
            "bytes_per_step": round(self.bytes_per_pass),
            "since_step": self.since_pass,
            "bytes": self.bytes,
            "absent_bytes": self.absent_bytes,
            "ops": list(self.ops),
            "module": module,
            "kept": self.kept or None,
        }


@dataclass
class _Growth:
    """The history of one op."""

    generations: int = 0
    growths: int = 0
    first: int = 0  # pass of the birth of the first one that counts, and of the last one
    newest: int = 0
    before: int = 0  # bytes before the growth
    last: int = 0  # passes that had ended at the last growth
    bytes: int = 0
    away: int = 0
    places: list[SurvivingPlace] = field(default_factory=list)

    def take(self, ended: int, births: list[int], held: int) -> None:
        grown = len(births) - self.generations
        if grown < 0:
            self.growths, self.before = 0, held
        elif grown > 0:
            if self.growths == 0:
                self.first, self.before = births[-grown], self.bytes
            self.growths += grown
            self.last, self.newest = ended, births[-1]
        self.generations, self.bytes = len(births), held

    def is_leak(self, ended: int) -> bool:
        if self.growths < PASSES:
            return False
        every = (self.newest + 1 - self.first) / self.growths
        return ended - self.last <= 2 * max(1.0, every)

    @property
    def rate(self) -> float:
        return (self.bytes - self.before) / (self.newest + 1 - self.first)


@dataclass
class _Chain:
    """The history of an op whose result grows from its own last one."""

    growths: int = 0  # so far, and of the longest that has ended: a cache is reset at the end of its sequence
    longest: int = 0
    now: GrownCell | None = None

    def take(self, now: GrownCell | None) -> None:
        growths = now["growths"] if now else 0
        if growths < self.growths:
            self.longest = max(self.longest, self.growths)
        self.growths, self.now = growths, now

    def is_leak(self, ended: int) -> bool:
        if self.now is None or self.growths < max(PASSES, 2 * self.longest):
            return False
        every = (self.now["last"] - self.now["since"]) / self.growths
        return ended - self.now["last"] <= 2 * max(1.0, every)


class Leaks:
    """The leaks of one budget.

    Known limitations: tensors under 64 KiB, and loops without a backward, are not looked at. A history that is kept on
    purpose is told like a leak until it has reached its length, unless it is a deque that has one. A tensor that is
    copied into a larger one with `new[:n] = old` is not seen to grow.
    """

    def __init__(self, native: Pager) -> None:
        self._native = native
        self._before = native.passes_ended()
        self._ended = self._before
        self._ops: dict[str, _Growth] = {}
        self._chains: dict[str, _Chain] = {}
        self._kept: dict[SourceLine | str, str] = {}
        self._backward: dict[SourceLine | str, SourceLine] = {}
        self._no_leaks: set[SourceLine | str] = set()
        self._lock = threading.Lock()  # the telemetry's thread reads

    def look(self) -> None:
        """A pass has ended."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        self._ended = self._native.passes_ended()
        found = self._native.survivors(MARKED)
        seen = {row["op"] for row in found}
        for op in list(self._ops):
            if op not in seen:
                del self._ops[op]
        for row in found:
            growth = self._ops.setdefault(row["op"], _Growth())
            growth.take(self._ended, row["births"], row["bytes"])
            growth.away, growth.places = row["absent_bytes"], row["places"]
        grown: dict[str, GrownCell] = {}
        for cell in self._native.grown(MARKED):  # of an op's several, the one that has grown in most passes
            if cell["growths"] < MARKED:
                continue
            if cell["op"] not in grown or cell["growths"] > grown[cell["op"]]["growths"]:
                grown[cell["op"]] = cell
        for op in grown.keys() | self._chains.keys():
            self._chains.setdefault(op, _Chain()).take(grown.get(op))

    def keep(self, found: Sequence[Leak], named: Sequence[Leak]) -> None:
        """Notes the variables that keep leaks, for later texts. A known variable stays where none is found now: a function that
        has returned has none.

        Args:
            found: the leaks that were looked at.
            named: those that are leaks, with their variables. Tensors of the others' lines are never one.
        """
        with self._lock:
            self._no_leaks |= {leak.origin for leak in found} - {leak.origin for leak in named}
            for leak in named:
                self._kept[leak.origin] = leak.kept or self._kept.get(leak.origin, "")
                if leak.backward is not None:
                    self._backward[leak.origin] = leak.backward

    def found(self, known: Callable[[], Sequence[SourceLine | None]]) -> list[Leak]:
        """The leaks that go on, largest first. The ops of one line are one leak.

        Args:
            known: the lines by number.
        """
        with self._lock:
            leaking = [(op, growth) for op, growth in self._ops.items() if growth.is_leak(self._ended)]
            chains = [chain.now for chain in self._chains.values() if chain.now and chain.is_leak(self._ended)]
            if not leaking and not chains:
                return []
            lines = known()
            leaks = [*self._by_line(leaking, lines), *(self._of_one(cell, lines) for cell in chains)]
            growing = [leak for leak in leaks if leak.bytes_per_pass > 0 and leak.origin not in self._no_leaks]
            return sorted(growing, key=lambda leak: -leak.bytes_per_pass)

    def _of_one(self, cell: GrownCell, lines: Sequence[SourceLine | None]) -> Leak:
        """The leak of a tensor that grows."""
        line = lines[cell["line"]]
        return Leak(
            bytes_per_pass=cell["bytes"] / (cell["last"] - cell["since"]),
            bytes=cell["bytes"],
            absent_bytes=cell["bytes"] if cell["absent"] else 0,
            since_pass=max(1, cell["since"] - self._before + 1),
            line=line,
            ops=(cell["op"],),
            module=cell["module"],
            kept=self._kept.get(line or cell["op"]),
            is_one=True,
        )

    def _by_line(self, leaking: list[tuple[str, _Growth]], lines: Sequence[SourceLine | None]) -> list[Leak]:
        by_line: dict[tuple[SourceLine | None, str], list[tuple[str, _Growth, int]]] = {}
        for op, growth in leaking:
            places = [(place["bytes"], place["line"], place["module"]) for place in growth.places]
            known = [place for place in places if place[1] and lines[place[1]]]
            modules = [place for place in places if place[2]]
            line = lines[max(known)[1]] if known else None
            module = max(known or modules, default=(0, 0, 0))[2] or max(modules, default=(0, 0, 0))[2]
            by_line.setdefault((line, "" if line else op), []).append((op, growth, module))
        leaks = []
        for (line, _), each in by_line.items():
            ops = tuple(op for op, _, _ in each)
            leaks.append(
                Leak(
                    bytes_per_pass=sum(g.rate for _, g, _ in each),
                    bytes=sum(g.bytes - g.before for _, g, _ in each),
                    absent_bytes=sum(min(g.away, g.bytes - g.before) for _, g, _ in each),
                    since_pass=min(g.first for _, g, _ in each) - self._before + 1,
                    line=line,
                    ops=ops,
                    module=next((module for _, _, module in each if module), 0),
                    kept=self._kept.get(line or ops[0]),
                    backward=self._backward.get(line or ops[0]),
                )
            )
        return leaks
