"""`memmgr doctor --explain LOG`: the last BudgetError of a run, with the reasons that its text leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memmgr.config.sizes import show_floor
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.view.run_state import RunState, read_log


def explain(log: Path) -> str:
    """The text to print.

    Raises:
        UsageError: the log cannot be read, is no log, or has no such error.
    """
    sessions, _ = read_log(log)
    found = [(run, event) for run in sessions for event in run.rare if event["what"] == "budget_error"]
    if not found:
        raise UsageError(f"{log}: this run had no BudgetError")
    run, event = found[-1]
    lines = [str(event.get("error", event.get("text", ""))), "", *map(str, event.get("details", ()))]
    lines += _table(run, "Resident, by kind", event.get("resident", {}))
    lines += _table(run, "Parameters and buffers, by module", event.get("modules", {}))
    floor, enough = int(event["floor_bytes"]), int(event.get("enough_bytes", event["floor_bytes"]))
    lines += [
        "",
        f"The smallest budget that would have worked so far is {show_floor(floor, binary=run.binary)} ({floor:,} bytes).",
    ]
    lines.append(f"The budget that is named is {show_floor(enough, binary=run.binary)} ({enough:,} bytes).")
    return "\n".join(lines).strip()


def _table(run: RunState, title: str, sizes: dict[str, Any]) -> list[str]:
    rows = sorted(((int(size), name) for name, size in sizes.items()), reverse=True)
    return ["", f"{title}:", *(f"  {run.size(size):>10}  {name}" for size, name in rows)] if rows else []
