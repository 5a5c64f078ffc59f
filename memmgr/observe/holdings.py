"""The holders of the memory: the large tensors now and at the peak, by name, by module and by source line."""

from __future__ import annotations

import functools
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING

import torch

from memmgr.common.constants import Purpose
from memmgr.config.sizes import show_size

from .keepers import Keepers
from .leaks import Leak
from .memory_inventory import loader_kinds
from .qualified_names import ModulesOfLines, Named, by_storage
from .roles import OWNERS
from .source_lines import SourceLine
from .variable_names import by_variable

KINDS = {
    Purpose.PARAMETERS: "parameter",
    Purpose.GRADIENTS: "gradient",
    Purpose.OPTIMIZER_STATES: "optimizer state",
}
STATES = Purpose.OPTIMIZER_STATES
BACKWARD, RESULT, DATA, RECIPES = "made in backward", "result", "data", "kept for recompute"
BATCH = "batch"
"""Kinds of tensors that no model or optimizer has. `DATA` was made by no op that memmgr saw. A `BATCH` is data, or the result of
an op of `LOADS`, that needs no gradient and has a variable of the program, while a DataLoader is gone over.
"""
LOADS = ("", "aten::stack", "aten::cat", "aten::_to_copy", "aten::copy_", "aten::clone", "aten::pin_memory")
"""Ops by which loaders and programs make a batch and move it to a device."""
IN_BACKWARD, UNKNOWN_MODULE, NO_MODULE = "(backward)", "(not recorded)", "(loaded or older data)"
MOST_COLUMNS = 120
"""The width of a table where there is no terminal."""
LEAST_WIDTH = 12
"""No column of a table is made narrower, so that a table fits the terminal."""
OLDER = "made by no op"
SOUGHT = 2
"""So many of a leak's oldest tensors are looked for among the program's variables."""
UNKNOWN_LINE, NO_LINE = "(line not recorded)", "(made by no op of this budget)"

if TYPE_CHECKING:
    from memmgr.native._pager import LivingCell, Pager


@dataclass(frozen=True)
class Holder:
    """Tensors of one origin.

    Attributes:
        kind: "parameter", "gradient", "optimizer state", "result", "made in backward", "batch", "data" or "kept for
            recompute".
        name: of a parameter, a state or a gradient; of data the program's variable that holds it now (`batch['x']`); of other
            tensors the op that made them.
        module: the module that has the parameter, or that ran the op.
        lines: the lines of the program that made them. Several: each of these lines makes tensors like them, and which of
            them made these was not recorded. Empty: not known.
        bytes: resident and absent.
        absent_bytes: of these, bytes that are evicted or offloaded.
        count: tensors.
        by_op: an op of this budget made them. Others are older, or are data that was loaded.
        kept: of the largest results and of those of backward, the variables that keep them now, as in "in the list `losses` of
            train.py"; empty: not known, or not looked for.
        storages: the addresses of their storages.
    """

    kind: str
    name: str
    module: str
    lines: tuple[SourceLine, ...]
    bytes: int
    absent_bytes: int
    count: int
    by_op: bool = True
    kept: str = ""
    storages: tuple[int, ...] = field(default=(), repr=False, compare=False)

    @property
    def where(self) -> str:
        """The lines in words."""
        if self.lines:
            return " or ".join(str(line) for line in self.lines)
        return UNKNOWN_LINE if self.by_op else NO_LINE


@dataclass(frozen=True)
class _Part:
    """A table of holders with its title, their keepers, and the sums below: a heading and rows each."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    kept: Sequence[str]
    sums: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]]


@dataclass(frozen=True, repr=False)
class Explanation:
    """The holders of memory. `print`, a prompt and a notebook show it as tables.

    Attributes:
        now: the holders now, the largest first.
        peak: the holders at the highest moment of the last pass whose births were recorded, the largest first; `absent_bytes` are
            not known for them. Empty before the first backward has ended.
        leaks: tensors that grow from step to step, the largest first.
        small_bytes: bytes of tensors under 64 KiB and of workspaces now: they are in no row.
    """

    now: tuple[Holder, ...]
    peak: tuple[Holder, ...]
    leaks: tuple[Leak, ...]
    small_bytes: int
    top: int = 10
    binary: bool = False
    leak_texts: tuple[str, ...] = ()

    def by_module(self, *, peak: bool = False) -> dict[str, int]:
        """Bytes by module, the largest first."""
        return _sums(self.peak if peak else self.now, lambda holder: holder.module)

    def by_line(self, *, peak: bool = False) -> dict[str, int]:
        """Bytes by source line, the largest first."""
        return _sums(self.peak if peak else self.now, lambda holder: holder.where)

    def __str__(self) -> str:
        columns = shutil.get_terminal_size((MOST_COLUMNS, 0)).columns
        lines = [f"memmgr: {text}" for text in self.leak_texts]
        for part in self._parts():
            lines.append(part.title)
            lines += _table(part.head, part.rows, columns)
            lines += [f"  {text}" for text in part.kept]
            for head, rows in part.sums:
                lines += _table(head, rows, columns)
        return "\n".join([*lines, self._small])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Representation for notebooks."""
        texts = [f"memmgr: {text}" for text in self.leak_texts]
        out = [f"<p>{escape(text)}</p>" for text in texts]
        for part in self._parts():
            out.append(_html(part.head, part.rows, part.title))
            out += [f"<p>{escape(text)}</p>" for text in part.kept]
            out += [_html(head, rows) for head, rows in part.sums]
        return "".join([*out, f"<p>{escape(self._small)}</p>"])

    @property
    def _small(self) -> str:
        return f"small tensors and workspaces: {show_size(self.small_bytes, binary=self.binary)}"

    def _parts(self) -> Iterator[_Part]:
        size = functools.partial(show_size, binary=self.binary)
        for title, holders, peak in (("now", self.now, False), ("at the peak of a pass", self.peak, True)):
            if not holders:
                continue
            whole, absent = sum(h.bytes for h in holders), sum(h.absent_bytes for h in holders)
            beside = ", resident and absent" if peak else f", {size(absent)} of it absent" if absent else ""
            rows = [
                (size(h.bytes), f"{h.bytes / max(whole, 1):.0%}", f"{h.count}", h.kind, h.name, h.module, h.where)
                for h in holders[: self.top]
            ]
            told = ((h.name + (f" of {h.where}" if h.lines else ""), h.kept) for h in holders[: self.top] if h.kept)
            sums = [
                (
                    ("bytes", "", f"by {name}"),
                    [
                        (size(count), f"{count / max(whole, 1):.0%}", text)
                        for text, count in list(of.items())[: self.top]
                    ],
                )
                for name, of in (("module", self.by_module(peak=peak)), ("line", self.by_line(peak=peak)))
            ]
            yield _Part(
                f"{title}: {size(whole)} in large tensors{beside}",
                ("bytes", "", "tensors", "kind", "name", "module", "line"),
                rows,
                [f"{tensors}: kept {kept}" for tensors, kept in told],
                sums,
            )


class HolderTables:
    """Makes the tables of holders (`Explanation`) of one budget.

    Args:
        native: the pager.
        module: the name of a module by its number; None: not known.
        lines: source lines by their numbers.
        backward_line: the line that called the last backward.
    """

    def __init__(
        self,
        native: Pager,
        module: Callable[[int], str | None],
        lines: Callable[[], Sequence[SourceLine | None]],
        backward_line: Callable[[], SourceLine | None],
    ) -> None:
        self._native = native
        self._module = module
        self._lines = lines
        self._backward_line = backward_line
        self._first = native.passes_ended()  # older data is a data set, most likely

    def explain(self, leaks: Sequence[Leak], *, small_bytes: int, top: int, binary: bool) -> Explanation:
        """The holders now and at the peak.

        Args:
            leaks: those that were found.
            small_bytes: bytes that no large tensor has.
            top: rows of each table that `print` shows.
            binary: sizes in powers of two.
        """
        found = self._native.objects_of((*OWNERS, *loader_kinds()))
        owners = [thing for thing in found if issubclass(type(thing), OWNERS)]
        named = by_storage(self._native, owners)
        variables, loading = by_variable(self._native), len(found) > len(owners)
        now, peak = self._native.living(), self._native.living_at_peak()
        names = {row["serial"]: named[row["storage"]] for row in now if row["storage"] in named}
        data = {
            row["serial"]: (
                BATCH if loading and (row["op"] or row["birth"] > self._first) else DATA,
                variables[row["storage"]],
            )
            for row in now
            if row["op"].partition(".")[0] in (LOADS if loading else ("",)) and row["storage"] in variables
        }
        modules = ModulesOfLines(each for each in owners if isinstance(each, torch.nn.Module))
        lines = self._lines()
        made = _lines_of_like(lines, [*now, *peak])
        holders = self._holders(now, names, data, modules, lines, made, ended=True)
        if top:
            leaks, holders = self._with_keepers(leaks, holders, now, lines, top)
        texts = tuple(leak.text(binary=binary, module=self._module(leak.module)) for leak in leaks)
        return Explanation(
            holders,
            self._holders(peak, names, data, modules, lines, made, ended=False),
            tuple(leaks),
            small_bytes,
            top,
            binary,
            texts,
        )

    def with_keepers(self, leaks: Sequence[Leak]) -> Sequence[Leak]:
        """The leaks with the variables that keep them. Leaves states of optimizers out (LBFGS keeps a history), and deques
        with a length. Takes a fraction of a second, three at most.
        """
        return self._with_keepers(leaks, (), self._native.living(), self._lines(), 0)[0] if leaks else leaks

    def _with_keepers(
        self,
        leaks: Sequence[Leak],
        holders: tuple[Holder, ...],
        rows: Sequence[LivingCell],
        lines: Sequence[SourceLine | None],
        top: int,
    ) -> tuple[Sequence[Leak], tuple[Holder, ...]]:
        """Both with the variables that keep them: of each leak the oldest tensors are looked for, of a holder some."""
        oldest = [(leak, self._oldest(leak, rows, lines)) for leak in leaks]
        no_states = [(leak, first) for leak, first in oldest if not any(row["purpose"] == STATES for row in first)]
        # Model states have names, and so has data that a variable of this thread holds.
        wanted = {
            i for i, h in enumerate(holders[:top]) if h.kind in (RESULT, BACKWARD) or (h.kind == DATA and not h.by_op)
        }
        of_holders = {
            i: _some(holders[i].storages) for i in wanted if holders[i].kind != DATA or holders[i].name == OLDER
        }
        of_leaks = {row["storage"] for _, first in no_states for row in first}
        keepers = Keepers(self._native, of_leaks.union(*of_holders.values()))
        told = [
            replace(
                leak,
                kept=_together(keepers, [row["storage"] for row in first]),
                backward=self._backward_of(leak, first),
            )
            for leak, first in no_states
            if not (first and all(keepers.is_bounded(row["storage"]) for row in first))
        ]
        kept = {i: _together(keepers, each) for i, each in of_holders.items()}
        return told, tuple(replace(h, kept=kept.get(i, "")) for i, h in enumerate(holders))

    def _backward_of(self, leak: Leak, rows: Sequence[LivingCell]) -> SourceLine | None:
        """The line that called the backward which made these tensors."""
        in_backward = leak.line is None and rows and all(row["backward"] for row in rows)
        return self._backward_line() if in_backward else None

    def _oldest(self, leak: Leak, rows: Iterable[LivingCell], lines: Sequence[SourceLine | None]) -> list[LivingCell]:
        """A leak's first tensors: the last ones may have other variables, which the next step frees."""
        since = self._first + leak.since_pass - 1
        like = [
            row
            for row in rows
            if row["op"] in leak.ops
            and row["birth"] >= since
            and row["storage"]
            and (not row["line"] or leak.line is None or lines[row["line"]] == leak.line)
        ]
        return sorted(like, key=lambda row: row["birth"])[:SOUGHT]

    def _holders(
        self,
        rows: Iterable[LivingCell],
        names: Mapping[int, Named],
        data: Mapping[int, tuple[str, str]],
        modules: ModulesOfLines,
        lines: Sequence[SourceLine | None],
        made: Mapping[tuple[str, int], tuple[SourceLine, ...]],
        *,
        ended: bool,
    ) -> tuple[Holder, ...]:
        found: dict[tuple[str, str, str, tuple[SourceLine, ...]], Holder] = {}
        for row in rows:
            size, op, line, backward = row["bytes"], row["op"], row["line"], row["backward"]
            name = names.get(row["serial"])
            known = lines[line] if line < len(lines) else None
            at: tuple[SourceLine, ...] = (known,) if known is not None else ()
            if not at and backward:
                at = tuple(filter(None, (self._backward_line(),)))
            elif not at and name is None:
                at = made.get((op, size), ())
            if name is not None:
                kind, text, where = KINDS.get(name.purpose, "buffer"), name.name, name.module
            else:
                kind = KINDS.get(Purpose(row["purpose"])) or (BACKWARD if backward else RESULT if op else DATA)
                kind = RECIPES if ended and not row["storage"] else kind
                text = op.removeprefix("aten::") or OLDER
                kind, text = data.get(row["serial"], (kind, text)) if kind in (DATA, RESULT) else (kind, text)
                where = IN_BACKWARD if backward else self._module(row["module"]) or _place(modules, at)
                where = where if op else NO_MODULE
            absent = size if row["absent"] else 0
            one = Holder(kind, text, where, at, size, absent, 1, bool(op), storages=(row["storage"],))
            key = kind, text, where, at
            sum_ = found.get(key)
            found[key] = one if sum_ is None else _added(sum_, one)
        return tuple(sorted(found.values(), key=lambda holder: -holder.bytes))


def _place(modules: ModulesOfLines, at: tuple[SourceLine, ...]) -> str:
    """The module of a line, or its function, where no module was recorded."""
    if len(at) != 1:
        return UNKNOWN_MODULE
    return modules.name(at[0]) or at[0].place


def _some(storages: Sequence[int]) -> list[int]:
    """The first, one of the middle and the last."""
    there = [storage for storage in storages if storage]
    return list(dict.fromkeys(there[place] for place in (0, len(there) // 2, -1))) if there else []


def _together(keepers: Keepers, storages: Iterable[int]) -> str:
    """The keepers of all of them that are known."""
    return " and ".join(dict.fromkeys(filter(None, map(keepers.of, storages))))


def _added(one: Holder, other: Holder) -> Holder:
    return replace(
        one,
        bytes=one.bytes + other.bytes,
        absent_bytes=one.absent_bytes + other.absent_bytes,
        count=one.count + other.count,
        storages=one.storages + other.storages,
    )


def _lines_of_like(
    lines: Sequence[SourceLine | None], rows: Iterable[LivingCell]
) -> dict[tuple[str, int], tuple[SourceLine, ...]]:
    """The lines of recorded tensors, by op and size, for others like them."""
    found: dict[tuple[str, int], dict[SourceLine, None]] = defaultdict(dict)
    for row in rows:
        line = lines[row["line"]] if row["line"] < len(lines) else None
        if line is not None and not row["backward"]:
            found[row["op"], row["bytes"]][line] = None
    return {key: tuple(each) for key, each in found.items()}


def _sums(holders: Iterable[Holder], key: Callable[[Holder], str]) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for holder in holders:
        sums[key(holder)] += holder.bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> list[str]:
    """A table of at most so many columns of text (0: of any width): the longest texts lose their beginnings."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    while columns and 2 * len(widths) + sum(widths) > columns and max(widths) > LEAST_WIDTH:
        widths[widths.index(max(widths))] -= 1
    return [
        "  " + "  ".join(_end(text, w).ljust(w) for text, w in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def _html(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    lines = [
        "".join(f"<{tag}>{escape(text)}</{tag}>" for text in row)
        for tag, row in (("th", head), *(("td", row) for row in rows))
    ]
    return f"<table>{caption}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _end(text: str, width: int) -> str:
    """The end of a name or of a path says more than its beginning."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]
