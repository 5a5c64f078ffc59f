"""Advice from the figures of a finished run: lines of text, from `memmgr.stats()` alone.

The figures themselves are in the budget's own line (`observe.summary`) or in a page's tiles; they are not repeated here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from memmgr.config.sizes import UNLIMITED, show_floor, show_seconds, show_size

from .states import flows

WORTH_SAYING = 0.03
"""A share of the time: a smaller loss is not worth more memory."""


def fixed_memory(stats: dict[str, Any], budget_bytes: int, *, binary: bool = False) -> str:
    """Fixed memory that counts though it is not torch's, by owner; empty if it is less than a tenth of the budget.

    Args:
        stats: `memmgr.stats()`, or the pager's part of it.
        budget_bytes: the budget.
        binary: sizes in powers of two.
    """
    owners = (
        ("fixed_bytes.library", "of NumPy's or another library's"),
        ("fixed_bytes.shared", "shared with other processes"),
    )
    found = [(int(stats.get(name, 0)), text) for name, text in owners if stats.get(name, 0)]
    if budget_bytes >= UNLIMITED or sum(size for size, _ in found) < budget_bytes / 10:
        return ""
    return ", ".join(f"{show_size(size, binary=binary)} {text}" for size, text in found)


def own_checkpointing(stats: dict[str, Any], *, binary: bool = False) -> list[str]:
    """A line where the program's activation checkpointing recomputes although the budget has room, else none."""
    size = functools.partial(show_size, binary=binary)
    budget, unmanaged = int(stats["budget_bytes"]), int(stats["unmanaged_peak_bytes"])
    checkpoint = float(stats.get("checkpoint_seconds", 0.0))
    watched = max(float(stats.get("watched_seconds", 0.0)), 1e-9)
    if budget >= UNLIMITED or unmanaged >= 0.9 * budget or checkpoint <= 0.02 * watched:
        return []
    return [
        f"the script's own checkpointing recomputes for {100 * checkpoint / watched:.0f} % of the time while "
        f"{size(budget - unmanaged)} of the budget are never used; without it memmgr would recompute only what "
        "does not fit"
    ]


def advice(stats: dict[str, Any], *, binary: bool = False) -> list[str]:
    """Lines about a finished run: its floor, then `changes`.

    Args:
        stats: `memmgr.stats()`.
        binary: sizes in powers of two, as the user wrote the budget; below, too.
    """
    if _unlimited(stats):
        return changes(stats, binary=binary)
    if _fitted(stats):
        return [f"everything fitted; {_floor(stats, binary=binary)}"]
    return [_floor(stats, binary=binary), *changes(stats, binary=binary)]


def changes(stats: dict[str, Any], *, binary: bool = False) -> list[str]:
    """The changes that would help, most useful first; empty where there is nothing (`no_change` says why).

    Args:
        stats: `memmgr.stats()`.
    """
    size = functools.partial(show_size, binary=binary)
    wall = max(float(stats.get("wall_seconds", 0.0)), 1e-9)
    budget, unmanaged = int(stats["budget_bytes"]), int(stats["unmanaged_peak_bytes"])
    if _unlimited(stats):
        return [f"with a budget of {size(unmanaged)} or more nothing would be evicted; {_floor(stats, binary=binary)}"]
    if _fitted(stats):
        return []
    recompute, stall = float(stats["recompute_seconds"]) / wall, float(stats["stall_seconds"]) / wall
    lines = states_knob(stats, binary=binary)
    more = None if lines else more_budget(stats)
    if not lines and stall > 2 * recompute and stall > 0.1:
        lines.append("mostly waiting for the tier: try a faster --disk, memory to spare as --host, or --policy evict")
    if more is not None and budget + more > 0.9 * unmanaged:
        lines.append(
            f"+{size(unmanaged - budget)} of budget ({size(unmanaged)}, all that it needs) would remove all of the recomputing "
            "and waiting"
        )
    elif more is not None:
        added, then = size(more), size(budget + more)
        lines.append(
            f"+{added} of budget ({then}) would remove about 80 % of the recomputing and waiting (an estimate)"
        )
    exported = handed_out(stats, binary=binary) if recompute + stall >= WORTH_SAYING else []
    fixed = int(stats["fixed_bytes.peak"])
    lines += exported
    if fixed > 0.7 * budget and not exported:
        lines.append(
            f"{size(fixed)} of the budget are fixed (small tensors, for the most part), so they cannot be evicted"
        )
    return lines


def handed_out(stats: Mapping[str, Any], *, binary: bool = False) -> list[str]:
    """A line where tensors whose address was handed out hold a tenth of the budget: the program's line that did it most."""
    held = int(stats.get("escaped_bytes", 0))
    sites = {name.removeprefix("escapes."): int(n) for name, n in stats.items() if name.startswith("escapes.")}
    if not sites or held < int(stats["budget_bytes"]) / 10:
        return []
    most = max(sites, key=lambda site: sites[site])
    return [
        f"tensors of {show_size(held, binary=binary)} cannot be evicted, because the program has handed out their addresses, "
        f"{sites[most]:,} times at {most}. After a copy (`.numpy().copy()`) they can"
    ]


def states_knob(stats: dict[str, Any], *, binary: bool = False) -> list[str]:
    """The one knob that would help most a run that waits for model states, as a line; else none (`states_change`)."""
    size = functools.partial(show_size, binary=binary)
    best, found = states_change(stats, binary=binary), flows(stats)
    if best is None or found is None:
        return []
    lost = (float(stats["stall_seconds"]) + float(stats["recompute_seconds"])) / float(stats["wall_seconds"])
    ops, link = max(0.0, 1.0 - lost) * found.pass_seconds, found.moved_bytes / found.link_bytes * found.pass_seconds
    return [
        f"{best[1]}, about {best[0]:.0%} less time for the same data (an estimate). Model states are "
        f"{size(found.states_moved_bytes)} of the {size(found.moved_bytes)} that a pass moves; moving all takes the link "
        f"{show_seconds(link)}, and the ops take {show_seconds(ops)}"
    ]


def states_change(stats: dict[str, Any], *, binary: bool = False) -> tuple[float, str] | None:
    """The one knob that would help most a run that waits for model states, after the share of the time that it saves.

    Compared are a step that is easily taken with each: no gradients kept, twice the tokens a step (where the link takes longer
    than the ops, and so could hide behind more of them), a quarter more budget, a link twice as fast.

    Known limitation: estimates. Waiting is taken as proportional to the bytes that move. On a small MLP on a CPU a quarter more
    budget took away twice that, tokens as predicted, and gradients that were kept moved 1.2 times their bytes more a pass.
    """
    size = functools.partial(show_size, binary=binary)
    found = flows(stats)
    wall = float(stats.get("wall_seconds", 0.0))
    stall, recompute = float(stats["stall_seconds"]), float(stats["recompute_seconds"])
    missing = int(stats["unmanaged_peak_bytes"]) - int(stats["budget_bytes"])
    if found is None or not found.link_bytes or missing <= 0 or stall + recompute < WORTH_SAYING * wall:
        return None
    moved, states = found.moved_bytes, found.states_moved_bytes
    if 2 * states <= moved:
        return None
    lost = (stall + recompute) / wall
    ops = max(0.0, 1.0 - lost) * found.pass_seconds
    link = moved / found.link_bytes * found.pass_seconds
    waiting = stall / wall
    kept = int(stats.get("kept_gradient_bytes", 0))
    more = min(missing, int(stats["budget_bytes"]) // 4)
    knobs = [  # the cheapest first: (share of the time saved, text)
        (
            waiting * min(1.0, kept / moved),
            f"zero_grad(set_to_none=True): {size(kept)} of gradients outlive a step",
        ),
        (
            waiting * states / moved / 2 if link > ops else 0.0,
            "twice the tokens a step (a larger batch; accumulating gradients saves the optimizer states' part of it)",
        ),
        (lost * more / missing, f"+{size(more)} of budget ({size(int(stats['budget_bytes']) + more)})"),
        (
            waiting / 2,
            "a tier that is twice as fast (--disk on a faster disk; --host where the machine has memory to spare)",
        ),
    ]
    most = max(saved for saved, _ in knobs)
    return next(one for one in knobs if one[0] >= 0.8 * most)  # nearly the best, and cheaper


def no_change(stats: dict[str, Any], *, binary: bool = False) -> str:
    """Why there is nothing to change, where `changes` has nothing."""
    size = functools.partial(show_size, binary=binary)
    if _fitted(stats):
        return f"nothing: everything fitted, and {size(int(stats['unmanaged_peak_bytes']))} would have done"
    lost = float(stats["recompute_seconds"]) + float(stats["stall_seconds"])
    share = lost / max(float(stats.get("wall_seconds", 0.0)), 1e-9)
    return f"nothing: recomputing and waiting took {share:.1%} of the time, which is not worth more memory"


def _unlimited(stats: dict[str, Any]) -> bool:
    return int(stats["budget_bytes"]) >= UNLIMITED


def _fitted(stats: dict[str, Any]) -> bool:
    return int(stats["unmanaged_peak_bytes"]) <= int(stats["budget_bytes"])


def _floor(stats: dict[str, Any], *, binary: bool = False) -> str:
    floor = show_floor(int(stats["floor_bytes"]), binary=binary)
    return f"the floor (no smaller budget can work) is about {floor}"


def more_budget(stats: dict[str, Any], share: float = 0.8) -> int | None:
    """The bytes of additional budget that would remove that share of the time lost for want of memory.

    The estimate is proportional to the bytes missing to the unmanaged peak. Cheap tensors leave first, so the last bytes that
    leave are the dearest, and chains of recomputation grow faster than evicted bytes: more budget removes more than its share.

    Args:
        stats: `memmgr.stats()` at the end.
        share: of the seconds of recomputing and waiting, to be removed.

    Returns:
        Bytes, or None where everything fitted or nothing worth saying is to be gained.

    Known limitation: a rule of thumb. Measured on a small GPT on a CPU, nine runs in 40 to 70 % of the memory: four
    fifths of the missing bytes removed 88 to 97 % of the time under `evict` and `auto`, but 62 to 77 % under `offload`,
    where the run waits for the link.
    """
    missing = int(stats["unmanaged_peak_bytes"]) - int(stats["budget_bytes"])
    lost = float(stats["recompute_seconds"]) + float(stats["stall_seconds"])
    if missing <= 0 or lost < WORTH_SAYING * float(stats["wall_seconds"]):
        return None
    return int(share * missing)
