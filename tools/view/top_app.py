"""The full-screen `memmgr top`: the text of `top_text.py` above, a table below."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from memmgr.telemetry import stream
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.view import top_text as text
from memmgr.tools.view.attach import Attached
from memmgr.tools.view.run_state import RunState

PANELS = ("modules", "tensors", "states", "events")
SOURCES = {"tensors": "cells", "modules": "cells", "states": "holders"}
"""Whose line of the stream a panel shows: it may be older than the rest."""
FOLLOW_SECONDS = 2.0
HELP = """\
[b]memmgr top[/b]   (by plan: passes follow a plan made of a measured one)

1 to 4      modules, tensors, model states, events
tab         the next panel
s           sort the tensors by size, age, cost, module, op, state in turn
/           show only what contains a text; escape shows all again
p           pause: the picture stands still, the training does not
left right  the previous, the next process
q           quit; the training goes on

[b]Memory over time[/b]: the line is the budget, marks below are ends of passes.
fixed = cannot be evicted: small tensors, workspaces, those whose address
is out, and in tables and the address space those of the op that runs;
evictable = the other resident bytes; at times = between the least and
the most of a column, which is some samples; evicted = dropped, to be
recomputed, and offloaded = copied to the tier: at their most; absent =
both; clean = resident, with a copy in the tier; measuring = the peak of
passes before the budget.

[b]Address space[/b]: leaving = chosen to be evicted, or copied already.

What is older than 5 s says so: the process tells what it can afford to.
Any key closes this."""


class Help(ModalScreen[None]):
    """The keys and the colours."""

    CSS = "Help { align: center middle; } Help > Static { width: 80; max-height: 100%; padding: 0 1; background: $surface; }"

    def compose(self) -> ComposeResult:
        yield Static(HELP)

    def on_key(self, event: Key) -> None:
        event.stop()  # else "?" opens it again
        self.dismiss()


class TopApp(App[None]):
    """Shows one of the processes at a time.

    Args:
        attached: the processes that are watched from the beginning.
        interval: seconds between two samples.
        follow: processes that begin later are added.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #above { height: auto; }
    #bar { height: 1; background: $panel; }
    DataTable { height: 1fr; scrollbar-size-vertical: 1; }
    #filter { display: none; dock: bottom; height: 3; margin-bottom: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("p", "pause", "pause"),
        Binding("s", "sort", "sort"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("tab", "panel('')", "panel", priority=True),
        Binding("right", "process(1)", "next", priority=True),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("left", "process(-1)", "previous", priority=True, show=False),
        Binding("escape", "all", "all", show=False),
        *(Binding(str(i + 1), f"panel('{name}')", name, show=False) for i, name in enumerate(PANELS)),
    ]

    def __init__(self, attached: Sequence[Attached], *, interval: float, follow: bool) -> None:
        super().__init__()
        self._attached = list(attached)
        self._interval = interval
        self._follow = follow
        self._at = 0
        self._panel = PANELS[0]
        self._order = text.SORTS[0]
        self._wanted = ""
        self._paused = False
        self._silent = 0
        self._columns: tuple[Any, ...] = ()
        self._rows: list[tuple[str, ...]] = []
        self._above = self._beside = Text()

    def compose(self) -> ComposeResult:
        yield Vertical(
            Static(id="above"), Static(id="bar"), DataTable[str](cursor_type="row", zebra_stripes=True, cell_padding=0)
        )
        yield Input(placeholder="show only what contains ...", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        self.set_interval(min(0.1, self._interval), self._poll)
        if self._follow:
            self.set_interval(FOLLOW_SECONDS, self._look_for_more)
        self._poll()

    # -- the streams --

    def _poll(self) -> None:
        if self._paused and not any(one.hung_up for one in self._attached):
            return  # lines that arrive in the meantime wait in the socket, and then in the process's bounded queue
        news = False
        for one in self._attached:
            try:
                news = bool(one.receive()) or news
            except UsageError as error:
                one.watched.error = str(error)
                one.close()
                news = True
        shown = self._attached[self._at].watched
        silent = int(shown.silent_seconds)
        if news or not self._columns or (silent != self._silent and (shown.gone or silent > text.OLD_SECONDS)):
            self._silent = silent
            self.draw()

    def _look_for_more(self) -> None:
        known = {one.watched.pid for one in self._attached if not one.over}
        for pid in stream.processes():
            if pid not in known:
                request = {"interval_seconds": self._interval, "want": ["cells", "map", "holders"], "cells": 200}
                try:
                    self._attached.append(Attached(pid, {**request, "columns": 400}))
                except UsageError:
                    continue

    # -- the picture --

    def on_resize(self) -> None:
        if self.is_running:
            self.draw()

    def draw(self) -> None:
        """Writes everything anew."""
        if not self.query("#above"):
            return  # another screen is in front
        watched = self._attached[self._at].watched
        if self._paused and not watched.gone:
            watched.silent_seconds = 0.0  # its lines wait in the socket
        width = max(20, self.size.width)
        glyphs = text.UNICODE
        place = f"({self._at + 1} of {len(self._attached)})" if len(self._attached) > 1 else ""
        lines = [
            text.title(watched, width, glyphs, place),
            text.budget_line(watched, width, glyphs),
            *text.chart(watched, width, 6 + self._more_rows(), glyphs),
            text.activity(watched, width, glyphs),
            *text.leaks(watched, width, glyphs),
            *text.strip(watched, width, 2, glyphs),
        ]
        shown = Text("\n", no_wrap=True, end="").join(Text.assemble(*line) for line in lines)
        bar = self._bar(watched)
        if shown != self._above:
            self.query_one("#above", Static).update(shown)
        if bar != self._beside:
            self.query_one("#bar", Static).update(bar)
        self._above, self._beside = shown, bar
        self._fill(watched)

    def _more_rows(self) -> int:
        """For the chart, where the screen is higher than 24 lines."""
        return max(0, (self.size.height - 24) // 3)

    def _bar(self, watched: RunState) -> Text:
        bar = Text()
        for i, name in enumerate(PANELS):
            bar.append(f" {i + 1} {name} ", "reverse" if name == self._panel else "")
        if self._panel == "tensors":
            bar.append(f"  by {self._order}")
        if self._panel in SOURCES:
            line = getattr(watched, SOURCES[self._panel])
            first = "modules" if self._panel == "states" and watched.flows() else "figures"
            missing = f"waiting for {first}"
            bar.append(f"  {text.age(watched, line) if line else missing}", "bold yellow")
        if self._panel == "modules":
            bar.append(f"  times: {text.seen(watched)}")
        if self._wanted:
            bar.append(f"  with {self._wanted!r}", "bold")
        if self._paused:
            bar.append("  paused", "bold yellow")
        return bar

    def _fill(self, watched: RunState) -> None:
        head: tuple[str, ...]
        widths: tuple[int, ...]
        rows: list[tuple[str, ...]]
        if self._panel == "tensors":
            head, widths = text.cell_columns(self.size.width)
            rows = text.cell_rows(watched, self._order, self._wanted)
        elif self._panel == "modules":
            head, widths, rows = text.MODULE_HEAD, text.MODULE_WIDTHS, text.module_rows(watched, self._wanted)
        elif self._panel == "states":
            head, widths, rows = text.STATE_HEAD, text.STATE_WIDTHS, text.state_rows(watched, self._wanted)
        else:
            head, widths = ("when and what",), (78,)
            rows = [(line,) for line in reversed(text.log_lines(watched, self._wanted))]
        table: DataTable[str] = self.query_one(DataTable)
        spare = self.size.width - sum(w + 1 for w in widths) - 1
        wide = "what" if "what" in head else "module" if "module" in head else head[0]
        widths = tuple(max(8, w + spare) if name == wide else w for name, w in zip(head, widths, strict=True))
        columns = (head, widths)
        if columns == self._columns and rows == self._rows:
            return  # a table that is filled again is drawn again
        self._rows = rows
        cursor, scroll = table.cursor_row, table.scroll_y
        if columns != self._columns:
            table.clear(columns=True)
            for name, width in zip(head, widths, strict=True):
                table.add_column(name, width=width + 1)
            self._columns, cursor, scroll = columns, 0, 0
        else:
            table.clear()
        for row in rows:
            table.add_row(
                *(
                    text.fit(part, w, text.UNICODE, keep_end=name in text.FROM_END)
                    for part, w, name in zip(row, widths, head, strict=False)
                )
            )
        if rows:
            table.move_cursor(row=min(cursor, len(rows) - 1), animate=False, scroll=False)
            table.scroll_to(y=scroll, animate=False)

    # -- keys --

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._poll()
        self.draw()

    def action_sort(self) -> None:
        self._order = text.SORTS[(text.SORTS.index(self._order) + 1) % len(text.SORTS)]
        self._panel = "tensors"
        self.draw()

    def action_panel(self, name: str) -> None:
        self._panel = name or PANELS[(PANELS.index(self._panel) + 1) % len(PANELS)]
        self.draw()

    def action_process(self, step: int) -> None:
        self._at = (self._at + step) % len(self._attached)
        self.draw()

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_all(self) -> None:
        self._wanted = self.query_one("#filter", Input).value = ""
        self._leave_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self.draw()

    def on_input_submitted(self) -> None:
        self._leave_filter()

    def _leave_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self.query_one(DataTable).focus()
        self.draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        # While a filter is typed, left and right move in it.
        return not (action == "process" and isinstance(self.focused, Input))

    async def on_unmount(self) -> None:
        for one in self._attached:
            one.close()


def draw(app: TopApp, path: Path, size: tuple[int, int] = (100, 30)) -> None:
    """One screen of it as an SVG file, without a terminal."""

    async def shot() -> str:
        async with app.run_test(size=size) as pilot:
            await pilot.pause(0.3)
            return app.export_screenshot(title="memmgr top")

    # Textual has the fonts fetched from a server; the text has its widths, and any monospace font will do.
    path.write_text(re.sub(r"@font-face\s*\{[^}]*\}", "", asyncio.run(shot())), encoding="utf-8")
