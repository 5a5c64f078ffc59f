"""The screens of `memmgr top`, as lines of styled text: the same for the terminal application, `--once` and plain
terminals.

Every state has a character of its own in addition to its colour, so that no information is in colour alone.
"""

from __future__ import annotations

import math
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from memmgr.config.sizes import UNLIMITED, show_floor, show_seconds
from memmgr.tools.view.columns import RESIDENT, UNMANAGED, Column, columns, ends_of_passes
from memmgr.tools.view.run_state import GONE, RunState, clean, name_of, origin

Segment = tuple[str, str]
"""Text, and its style as rich writes styles."""
Line = list[Segment]


@dataclass(frozen=True)
class Glyphs:
    """The characters that a terminal can show."""

    fixed: str
    evictable: str
    leaving: str
    evicted: str
    offloaded: str
    times: str
    ended: str
    free: str
    budget: str
    axis: str
    rest: str


UNICODE = Glyphs("▓", "█", "▄", "░", "▒", "╱", "┴", "·", "─", "┤", "…")
ASCII = Glyphs("=", "#", "~", ".", ":", "/", "+", "_", "-", "|", ">")
MEMORY = ("fixed", "evictable", "times", "evicted", "offloaded")
SPACE = ("free", "fixed", "evictable", "leaving")
OLD_SECONDS = 5.0
"""Older figures are marked: they may be out of date."""

SOFT = "grey46"
"""The colour of scales and free memory: readable on black and on white, which a terminal's own grey is not."""
STYLES = {
    "fixed": "blue",
    "evictable": "green",
    "leaving": "yellow",
    "evicted": "red",
    "offloaded": "dark_goldenrod",
    "times": "green",
    "free": SOFT,
    "budget": "bold",
}
NO_END = "no end (killed?)"
"""The state of a run whose log has no end."""
RUNS_ON = "running"
"""The state of a run whose process still writes its log."""
SORTS = ("size", "age", "cost", "module", "op", "state")


def plain(lines: Sequence[Line]) -> str:
    """Without the styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def fit(text: str, width: int, glyphs: Glyphs, *, keep_end: bool = False) -> str:
    """The text in at most so many columns; of a module's path the end says more."""
    if len(text) <= width:
        return text
    if width <= 1:
        return text[:width]
    return glyphs.rest + text[-(width - 1) :] if keep_end else text[: width - 1] + glyphs.rest


# -- above ----------------------------------------------------------------------------------------------------------


def title(watched: RunState, width: int, glyphs: Glyphs, place: str = "") -> Line:
    """Name and state of the process, and the time without a line from it."""
    silent = watched.silent_seconds
    if watched.end is not None:
        state = watched.ending
    elif watched.error and not watched.sample:
        state = "lost"
    elif watched.gone:
        state = f"{GONE} {show_seconds(round(silent))} ago"
    elif watched.of_log:
        state = RUNS_ON if watched.runs_on else NO_END
    else:
        state = str(watched.sample.get("phase", "waiting"))
        if watched.by_plan():
            state += " by plan"
    passes = int(watched.stats.get("passes", 0))
    counted = f"{passes:,} pass{'es' if passes > 1 else ''}  " if passes else ""
    right = f"{clean(state)}  {counted}{'after ' if watched.over else ''}{show_seconds(watched.now)}"
    if silent > OLD_SECONDS and not watched.gone:
        right = f"silent for {show_seconds(round(silent))}  {right}"
    rank = watched.hello.get("rank")
    left = f"{watched.pid}" + (f" rank {rank}" if rank is not None else "")
    device = clean(str(watched.hello.get("device", "cpu")))
    left += ("" if device == "cpu" else f" {device}") + (f" {place}" if place else "")
    room = max(0, width - len(left) - len(right) - 4)
    failed = watched.end is not None and watched.end.get("failed")
    bad = watched.gone or failed or state in ("lost", NO_END) or "silent" in right
    return [
        (left + "  ", "bold"),
        (fit(watched.program, room, glyphs).ljust(room), ""),
        ("  " + right, "bold red" if bad else "bold green"),
    ]


def budget_line(watched: RunState, width: int, glyphs: Glyphs) -> Line:
    """The budget and its contents. A run that is over has none now. The peak of the passes that measured is left out where the
    line is too narrow.
    """
    stats = watched.stats
    budget = watched.budget_bytes
    now = int(watched.sample.get("resident_bytes", 0))
    share = f" ({now / budget:.0%})" if 0 < budget < UNLIMITED else ""
    limit = "none" if budget >= UNLIMITED else watched.size(budget)
    measuring = int(stats.get("measuring_bytes.peak", 0))
    head = f"budget {limit}" + ("" if watched.over else f"  now {watched.size(now)}{share}")
    head += f"  peak {watched.size(int(stats.get('resident_bytes.peak', 0)))}"
    more = f"  measuring {watched.size(measuring)}" if measuring else ""
    rest = (
        f"  floor {show_floor(int(stats.get('floor_bytes', 0)), binary=watched.binary)}"
        f"  need {watched.size(int(stats.get('unmanaged_peak_bytes', 0)))}"
    )
    told = _tight(head + more + rest, width)
    return [(fit(told if len(told) <= width else _tight(head + rest, width), width, glyphs), "")]


def activity(watched: RunState, width: int, glyphs: Glyphs) -> Line:
    """Shares of the time in the last seconds (of the whole run until so many were seen, and when it is over), and evictions
    since the beginning.
    """
    stats = watched.stats
    window = math.inf if watched.over else 10.0
    recompute, stall = watched.shares(window)
    of = "all of it" if watched.over else "10 s" if watched.seen_for(window) else "so far"
    text = f"{of}: {show_rate(*watched.rate(window))} recomputing {_share(recompute)} waiting {_share(stall)}"
    more = [
        f"  all: evicted {watched.size(int(stats.get('evicted_bytes', 0)))}",
        f" offloaded {watched.size(int(stats.get('offload_bytes', 0)))}",
        f" planned {int(stats['planned_passes']):,}" if stats.get("planned_passes") else "",
    ]
    for part in more:  # as many as there is room for
        text += part if len(text + part) <= width else ""
    style = "bold yellow" if recompute + stall > 0.25 else ""
    return [(fit(text, width, glyphs), style)]


def _share(share: float) -> str:
    """A percentage in few characters."""
    return f"{share:.1%}" if share < 0.095 else f"{share:.0%}"


def _tight(text: str, width: int) -> str:
    """With less between its parts where it would not fit."""
    return text if len(text) <= width else text.replace("  ", " ")


def show_rate(a_second: float, of: str) -> str:
    """`4.8 steps/s`, or for long ones `14 s a step`; passes where no optimizer is known to have stepped."""
    if a_second <= 0:
        return f"no {of}"
    if a_second < 1:
        return f"{show_seconds(1 / a_second)} a {of}"
    return f"{a_second:.3g} {'steps' if of == 'step' else 'passes'}/s"


def age(watched: RunState, line: dict[str, Any]) -> str:
    """How old a part of the picture is, where that is worth saying; else nothing."""
    if not line or watched.end is not None:
        return ""
    old = watched.now - float(line.get("seconds", 0.0)) + watched.silent_seconds
    return f"{show_seconds(old)} old" if old > OLD_SECONDS else ""


# -- memory over time -----------------------------------------------------------------------------------------------


NOW, END = " now", " end"


def chart(watched: RunState, width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """The last samples, two and more a column: bytes resident always and at times, above them the absent bytes, and the
    budget. Below are the axis and the meaning of the characters.
    """
    room = max(1, width - 10)
    if watched.error and not watched.points:
        said = textwrap.wrap(clean(watched.error), width)[:rows]
        said += [" "] * (rows - len(said))
        return [*([(line, STYLES["evicted"])] for line in said), legend(MEMORY, glyphs, watched.tier)]
    points = list(watched.points)[0 if watched.end is not None or watched.of_log else -room - 1 :]
    shown = columns(watched, points, room)
    budget = watched.budget_bytes
    top = max([column.most[UNMANAGED] for column in shown] + [budget if budget < UNLIMITED else 0, 1])
    height = rows - 1  # the last one is the axis
    step = top / height
    limit_row = min(height - 1, int((budget - 0.5 * step) / step)) if budget < UNLIMITED else -1
    lines: list[Line] = []
    for row in reversed(range(height)):
        if row == limit_row:
            label = watched.size(budget)
        elif row == height - 1:
            label = watched.size(top)
        else:
            label = ""
        line: Line = [(f"{label:>8} {glyphs.axis}", STYLES["budget"] if row == limit_row else SOFT)]
        for column in shown:
            limited = row == limit_row and column.end > watched.limit_seconds
            line.append(_cell(column, (row + 0.5) * step, limited, glyphs))
        empty = room - len(shown)
        if empty:
            line.append((glyphs.budget * empty, STYLES["budget"]) if row == limit_row else (" " * empty, ""))
        lines.append(_merged(line))
    every, ends = ends_of_passes(points, max(1, len(shown) // 3))
    marks = "" if not every else f"{glyphs.ended} a pass" if every == 1 else f"{glyphs.ended} {every:,} passes"
    meaning = [*legend(MEMORY, glyphs, watched.tier), (marks, SOFT)]
    return [*lines, _axis(ends, shown, room, glyphs, END if watched.over else NOW), meaning]


def _axis(ends: Iterable[tuple[float, int]], shown: Sequence[Column], room: int, glyphs: Glyphs, at_last: str) -> Line:
    """The ends of passes, and the time of the first sample before the last, which `at_last` names."""
    begins = [column.begin for column in shown]
    axis = [" "] * room
    for seconds, _ in ends:
        axis[max(0, bisect_left(begins, seconds) - 1)] = glyphs.ended
    if len(shown) > 1:
        before = "before" if at_last == END else "ago"
        ago, last = f"{show_seconds(shown[-1].end - shown[0].begin)} {before} ", min(len(shown), room - len(at_last))
        axis[max(0, last) : last + len(at_last)] = at_last[: room - max(0, last)]
        if len(ago) <= last:
            axis[: len(ago)] = ago
    return [(" " * 10 + "".join(axis), SOFT)]


def _cell(column: Column, height: float, at_limit: bool, glyphs: Glyphs) -> Segment:
    edges = (*column.least[: RESIDENT + 1], *column.most[RESIDENT:])
    for name, edge in zip(MEMORY, edges, strict=True):
        if height < edge:
            return getattr(glyphs, name), STYLES[name]
    return (glyphs.budget, STYLES["budget"]) if at_limit else (" ", "")


def _merged(line: Line) -> Line:
    """Neighbours of one style as one segment: a terminal gets fewer codes."""
    merged: Line = []
    for text, style in line:
        if merged and merged[-1][1] == style:
            merged[-1] = (merged[-1][0] + text, style)
        else:
            merged.append((text, style))
    return merged


def legend(names: Sequence[str], glyphs: Glyphs, tier: str = "") -> Line:
    """The meaning of the characters; `tier` is the place of offloaded bytes, if known."""
    line: Line = []
    for name in names:
        where = f" ({tier})" if name == "offloaded" and tier else ""
        line += [(getattr(glyphs, name), STYLES[name]), (f" {'at times' if name == 'times' else name}{where}  ", "")]
    return line


def leaks(watched: RunState, width: int, glyphs: Glyphs) -> list[Line]:
    """The largest leak, if there is one, in at most two lines: its line and its variable come last."""
    lines: list[str] = []
    for text in watched.leaks[:1]:
        first, *rest = textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False) or [""]
        lines = [first, *([fit("  " + " ".join(map(str.strip, rest)), width, glyphs)] if rest else ())]
    return [[(line, STYLES["evicted"])] for line in lines]


# -- the address space ----------------------------------------------------------------------------------------------

_MAP_NAMES = ("free", "fixed", "evictable", "leaving", "hole")


def strip(watched: RunState, width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """The allocator's addresses from left to right and row to row; each column has the state that fills most of it. Below is
    the meaning of the characters. A log has no addresses.
    """
    if watched.of_log:
        return []
    names = [str(name) for name in watched.hello.get("map_states", _MAP_NAMES)]
    columns = watched.map.get("columns", [])
    meaning: Line = [*legend(SPACE, glyphs), (age(watched, watched.map), STYLES["leaving"])]
    if not columns or not any(any(column) for column in columns):
        text = "no address space to show" if columns or watched.end is not None else "waiting for the map"
        return [[(text.ljust(width), SOFT)], *([(" " * width, "")] for _ in range(rows - 1)), meaning]
    wanted = width * rows
    cells: Line = []
    for i in range(wanted):
        part = columns[
            i * len(columns) // wanted : max((i + 1) * len(columns) // wanted, i * len(columns) // wanted + 1)
        ]
        sums = [sum(column[state] for column in part) for state in range(len(names))]
        name = names[max(range(len(names)), key=lambda state: sums[state])]
        glyph = getattr(glyphs, name, " ") if name != "hole" else " "
        cells.append((glyph, STYLES.get(name, "")))
    return [*(_merged(cells[row * width : (row + 1) * width]) for row in range(rows)), meaning]


# -- tables ---------------------------------------------------------------------------------------------------------

_ORDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "size": lambda cell: -cell["bytes"],
    "age": lambda cell: -cell["age_seconds"],
    "cost": lambda cell: -cell["op_seconds"],
    "module": lambda cell: str(cell["module"] or "~").replace("(", "~", 1),  # places that are no module come last
    "op": lambda cell: str(cell["op"] or "~"),
    "state": lambda cell: state_of(cell),
}


def state_of(cell: dict[str, Any]) -> str:
    """A cell's state in one word."""
    if cell["state"] != "resident":
        return str(cell["state"])
    return "fixed" if cell["fixed"] else "clean" if cell["copy"] else "resident"


CELL_HEAD = ("size", "state", "what", "module", "age", "cost", "line")
CELL_WIDTHS = (8, 9, 16, 22, 10, 8, 28)
FROM_END = ("what", "module", "line")
"""Columns whose values lose their beginnings where they are too long: the ends of names and paths say more."""


def cell_columns(width: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and widths of the columns of cells; their lines are shown where there is room."""
    shown = len(CELL_HEAD) if width >= sum(CELL_WIDTHS) + len(CELL_WIDTHS) else len(CELL_HEAD) - 1
    return CELL_HEAD[:shown], CELL_WIDTHS[:shown]


def cell_rows(watched: RunState, order: str = "size", wanted: str = "") -> list[tuple[str, ...]]:
    """The largest cells, which may be evicted unless they are fixed; `wanted` is looked for in every column."""
    try:
        cells = sorted(watched.cells.get("cells", []), key=_ORDERS[order])
        rows = [
            (
                watched.size(cell["bytes"]),
                state_of(cell),
                origin(cell["op"], cell["module"], cell.get("name")),
                name_of("module", cell["module"]),
                show_seconds(cell["age_seconds"]),
                show_seconds(cell["op_seconds"]) if cell["recomputable"] else "-",
                clean(str(cell.get("line") or "-")),
            )
            for cell in cells
        ]
    except (KeyError, TypeError):
        return []  # a line of another shape; the next one may be better
    return [row for row in rows if not wanted or any(wanted.lower() in part.lower() for part in row)]


MODULE_HEAD = ("module", "resident", "fixed", "absent", "recomputing", "waiting")
MODULE_WIDTHS = (29, 9, 9, 9, 11, 9)


def module_rows(watched: RunState, wanted: str = "") -> list[tuple[str, ...]]:
    """Resident and absent bytes by the module that made them, and the cost of their absence."""
    shares: dict[str, list[int]] = {}
    for share in watched.cells.get("modules", []):
        shares[name_of("module", share["module"])] = [share[f"{state}_bytes"] for state in MODULE_HEAD[1:4]]
    seconds = dict(watched.by("module"))
    rows = []
    for name in sorted({*shares, *seconds}, key=lambda n: (-sum(shares.get(n, [0])), n)):
        sizes = shares.get(name, [0, 0, 0])
        spent = seconds.get(name, {})
        row = (
            name,
            *(watched.size(size) if name in shares else "-" for size in sizes),
            *(
                show_seconds(sum(spent[w].seconds for w in what if w in spent))
                for what in (("recompute",), ("stall", "reload"))
            ),
        )
        if not wanted or wanted.lower() in name.lower():
            rows.append(row)
    return rows


def seen(watched: RunState) -> str:
    """The window of the modules' seconds: this reader's."""
    return f"of the last {show_seconds(round(watched.now - float(watched.hello.get('seconds', 0.0))))}"


def could_move(watched: RunState, seconds: float) -> str:
    """The name of the bytes that the link could move in the time of a pass."""
    link = {"disk": "the disk", "host": "the host link"}.get(watched.tier, "the link")
    return f"{link} could move in {show_seconds(seconds)}"


STATE_HEAD = ("model states", "bytes", "resident", "offloaded", "moved a pass")
STATE_WIDTHS = (34, 10, 10, 10, 12)


def state_rows(watched: RunState, wanted: str = "") -> list[tuple[str, ...]]:
    """Model states: the bytes of each kind, by place, and the bytes moved per pass; the bytes that the link could
    move in that time; the bytes of each module's states.
    """
    found = watched.flows()
    flows = {flow.kind.replace("_", " "): flow for flow in found.each} if found is not None else {}
    whole = watched.holders.get("kinds", {})  # of all memory; it is told later than the figures
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys((*whole, *flows)):
        flow = flows.get(name)
        places = (flow.resident_bytes, flow.offloaded_bytes, flow.moved_bytes) if flow else (None,) * 3
        there = flow.resident_bytes + flow.offloaded_bytes if flow else None
        sizes = (whole.get(name, there), *places)
        rows.append((clean(name), *("" if size is None else watched.size(size) for size in sizes)))
    if found is not None and found.states_moved_bytes:
        rows.append((could_move(watched, found.pass_seconds), "", "", "", watched.size(found.link_bytes)))
    rows += [
        (f"  {clean(name)}", watched.size(size), "", "", "")
        for name, size in watched.holders.get("modules", {}).items()
    ]
    return [row for row in rows if wanted.lower() in row[0].lower()]


def log_lines(watched: RunState, wanted: str = "") -> list[str]:
    """The event log, oldest first."""
    said = [f"{seconds:9.1f} s  {clean(text)}" for seconds, text in watched.log]
    return [line for line in said if wanted.lower() in line.lower()]


def table(head: Sequence[str], widths: Sequence[int], rows: Sequence[Sequence[str]], glyphs: Glyphs) -> list[Line]:
    """A table of fixed widths; a module's path loses its beginning."""
    lines: list[Line] = [[(" ".join(name.ljust(w) for name, w in zip(head, widths, strict=True)), "bold")]]
    for row in rows:
        parts = [
            fit(part, w, glyphs, keep_end=name in FROM_END).ljust(w)
            for part, w, name in zip(row, widths, head, strict=False)
        ]
        lines.append([(" ".join(parts), "")])
    return lines


def once(watched: RunState, width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """One screen: printed by `--once`, and repeated on a plain terminal."""
    lines = [
        title(watched, width, glyphs),
        budget_line(watched, width, glyphs),
        *chart(watched, width, 6, glyphs),
        activity(watched, width, glyphs),
        *leaks(watched, width, glyphs),
        *strip(watched, width, 2, glyphs),
    ]
    found = watched.flows()
    if found is not None and (found.states_moved_bytes or found.states_offloaded_bytes):
        lines += table(STATE_HEAD, STATE_WIDTHS, state_rows(watched)[: len(found.each) + 2], glyphs)
    if watched.of_log and watched.cells:
        seconds = show_seconds(float(watched.cells.get("seconds", 0.0)))
        lines.append([(f"the largest tensors at {seconds}, the last time that the log has them", SOFT)])
    last: list[Line] = [[(f"process {watched.pid} has gone: no end of its budget came (killed?)", "bold red")]]
    last = last if watched.gone else []
    room = max(3, height - len(lines) - 1 - len(last))
    return [*lines, *table(*cell_columns(width), cell_rows(watched)[: room - 1], glyphs), *last]
