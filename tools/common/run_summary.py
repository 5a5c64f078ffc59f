"""The summary of `memmgr run --json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from memmgr.config.sizes import UNLIMITED, is_binary
from memmgr.observe.advice import advice
from memmgr.observe.figures import FIGURES
from memmgr.observe.slowness import losses, why_slow
from memmgr.observe.summary import slowdown


def run_as_json(
    stats: dict[str, Any],
    budget: str | None,
    command: list[str],
    error: BaseException | None,
    leaks: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """The summary of `--json`. Its keys are the same for each run: a figure that is not known is None.

    `stats`: `memmgr.stats()`; empty where no budget was opened. `budget`: as it was asked for; None: none. `command`:
    the words of it. `error`: the exception that ended the script. `leaks`: of the budget (`PagerRuntime.leaks`).
    """
    found = {figure.name: stats.get(figure.name) for figure in FIGURES}
    if found["budget_bytes"] is not None and found["budget_bytes"] >= UNLIMITED:
        found["budget_bytes"] = None
    return {
        "command": command,
        "budget": budget,
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "floor_bytes": getattr(error, "floor_bytes", None) or found["floor_bytes"],
        "slowdown_at_least": slowdown(stats) if stats else None,
        "lost": asdict(losses(stats)) if stats else None,
        "why_slow": why_slow(stats) if stats else None,
        "leaks": list(leaks),
        "advice": advice(stats, binary=is_binary(budget)) if stats else [],
        "stats": found,
        "escapes": {name.partition(".")[2]: n for name, n in stats.items() if name.startswith("escapes.")},
    }
