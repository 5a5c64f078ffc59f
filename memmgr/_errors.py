"""The errors that memmgr raises, and what they say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import OutOfMemoryError

from ._sizes import round_up, show_size

STATES = ("parameters", "buffers", "gradients", "optimizer state")
UNSEEN = (
    3.0  # without a tier: what a step takes besides the model's states, over what it took in the first ops of a forward
)
LEAST_WORK = 8  # one part in so many of the states
SPARE = 1.06  # alignment, and what kernels take for themselves

SPENT = "memmgr: the budget of "  # in the text of an allocator's error
_OURS = re.compile(r"\s*memmgr: the budget of .*? is spent.*", re.DOTALL)
_FAILED = re.compile(r"The (\w+) tier failed: (.+?)\.?$", re.MULTILINE)
_FULL = "No space left on device"


class BudgetError(OutOfMemoryError):
    """The budget is spent and nothing more can be let go.

    A subclass of `torch.OutOfMemoryError`, so that whatever handles torch's own error handles this one. Its text begins
    as torch's does, then says what holds the rest, and what to change.

    Attributes:
        floor_bytes: the smallest budget that would have worked up to here, in bytes; a later part of the run may need more.
        enough_bytes: the budget that the text names, in bytes: it should do for a whole training step, with what is still to come
            of backward and the optimizer. An estimate, at least `floor_bytes`; that is all it is while the model is being made.
        budget_bytes: the budget that was passed, in bytes.
        tier_bytes: how large the tier below (`disk=`, or `host=` on an accelerator) would have to be, in bytes, where that was
            full and not the budget too small; else 0.

    Known limitation: where C++ code allocates outside of an op, the plain `torch.OutOfMemoryError` arrives instead.
    """

    floor_bytes: int = 0
    enough_bytes: int = 0
    budget_bytes: int = 0
    tier_bytes: int = 0


class RecomputeError(RuntimeError):
    """Bytes came back other than they left, made again or read back: raised instead of a wrong gradient."""


class RankError(RuntimeError):
    """Another rank of this distributed job is in trouble, and this one would have waited for it.

    Raised where an error of the backend ("connection closed by peer") leaves the budget; that one is its `__cause__`.

    Attributes:
        rank: the rank in trouble.
        budget_bytes: its budget, in bytes, where a `BudgetError` is its trouble; else 0, as the next two.
        floor_bytes: the smallest budget that would have worked there so far, in bytes; known of one that has fallen silent, too.
        enough_bytes: the budget that its error names, in bytes.
    """

    rank: int = -1
    budget_bytes: int = 0
    floor_bytes: int = 0
    enough_bytes: int = 0


_GONE = {
    "": "its process ended inside its budget and left no error (killed, perhaps for want of memory).",
    "silent": "nothing is heard of it any more, and it left no error (its host is lost, or its process is).",
    "store": "the process group's store, which it had, cannot be reached any more.",
}


def rank_error(trouble: dict[str, Any], here: int, *, binary: bool = False) -> RankError:
    """The error of the ranks that are well.

    Args:
        trouble: `rank`; of its exception `error` (the type; empty: its process is gone), `text`, the sizes of a BudgetError;
            `how` it is known that it is gone.
        here: the rank that raises it.
        binary: sizes in powers of two, as the user wrote the budget.
    """
    rank, kind = int(trouble["rank"]), trouble["error"]
    floor, enough = int(trouble.get("floor_bytes", 0)), int(trouble.get("enough_bytes", 0))
    limit = int(trouble.get("budget_bytes", 0))
    if kind and floor:
        spent, least, named = (show_size(size, binary=binary) for size in (limit, floor, enough))
        what = (
            f"has ended with {kind}: its budget of {spent} is spent. Its floor is {least}, and a budget of {named} ({enough} "
            "bytes) should do there."
        )
    elif kind:
        what = f"has ended with {kind}: {trouble['text']}" if trouble["text"] else f"has ended with {kind}."
    else:
        what = "is gone: " + _GONE[trouble.get("how", "")]
        what += f" Its floor was {show_size(floor, binary=binary)}." if floor else ""
    error = RankError(f"memmgr: rank {rank} {what}\nRank {here} would have waited for it.")
    error.rank, error.floor_bytes, error.enough_bytes, error.budget_bytes = rank, floor, enough, limit
    return error


@dataclass(frozen=True)
class Holdings:
    """Who holds the memory, and what is still to come.

    Attributes:
        kinds: bytes by kind (see `_stock.holders`).
        modules: parameters and buffers by module class, largest first, in bytes.
        missing_bytes: gradients and optimizer state that the first complete step will add.
        step_bytes: what the optimizer takes besides while it steps; 0 where there is no optimizer yet.
        update_bytes: what its largest op takes, states included; 0 where there is none.
        below_bytes: model states that are in the tier below, in bytes.
    """

    kinds: dict[str, int]
    modules: list[tuple[str, int]]
    missing_bytes: int
    step_bytes: int = 0
    update_bytes: int = 0
    below_bytes: int = 0

    @property
    def states_bytes(self) -> int:
        """Parameters, buffers, gradients, optimizer state: what is there of them, or below."""
        return self.below_bytes + sum(self.kinds.get(kind, 0) for kind in STATES)


@dataclass(frozen=True)
class Ahead:
    """What the rest of the step will take, as far as it is known.

    Attributes:
        op_bytes: its largest op, and what can never leave beside it; 0: no more than so far, or not known.
        states_stay_bytes: as much where no model state can leave; None: not known.
    """

    op_bytes: int = 0
    states_stay_bytes: int | None = None

    @property
    def known(self) -> bool:
        """There will be no surprise."""
        return self.states_stay_bytes is not None


def torchs_own_words(text: str) -> str:
    """The first line of an out-of-memory error without what memmgr's allocator has added to it."""
    return _OURS.sub("", text.splitlines()[0] if text else "")


def failed_tier(text: str) -> tuple[str, str] | None:
    """Which tier failed ("disk", "host") and why, by the text of the allocator's error; None: none did."""
    match = _FAILED.search(text)
    return (match[1].lower(), match[2]) if match else None


def is_full(failed: tuple[str, str]) -> bool:
    """Has a tier failed for want of room?"""
    return failed[1] == _FULL


def _where_states_stay(held: Holdings, so_far_bytes: int, ahead: Ahead) -> int:
    """What a step takes without a tier; `so_far_bytes`: what it took at most."""
    states = held.states_bytes + held.missing_bytes
    least = states + max(held.step_bytes, states // LEAST_WORK)
    if ahead.states_stay_bytes is not None:
        return max(least, int(SPARE * ahead.states_stay_bytes))
    extra = max(0, so_far_bytes - held.states_bytes)
    kept = min(held.kinds.get("other tensors", 0), extra)  # batches, most likely: a step has no more of them
    return max(least, states + kept + int(UNSEEN * (extra - kept)))


def budget_error(
    first: str,
    held: Holdings,
    *,
    budget_bytes: int,
    floor_bytes: int = 0,
    untried_bytes: int = 0,
    there_bytes: int = 0,
    failed: tuple[str, str] | None = None,
    below_bytes: int = 0,
    room_bytes: int = 0,
    ahead: Ahead = Ahead(),  # frozen
    binary: bool = False,
    states_stay: bool = True,
    compiled: str = "",
    hidden_bytes: int = 0,
) -> BudgetError:
    """The error of a budget that is too small, in the middle of a run or when it is opened.

    Args:
        first: torch's own words for it.
        held: who holds what.
        budget_bytes: the budget.
        floor_bytes: the most that could not have left so far, in bytes.
        untried_bytes: where an op would have had room for its second run, without which nothing of it can be made again.
        there_bytes: what was there before the budget opened, in bytes; 0 when it is open.
        failed: the tier that failed, "disk" or "host", and why; None: none did.
        below_bytes: what was in it.
        room_bytes: of the tier below, in all; 0: there is none, or it ends where its file system does.
        ahead: what is still to come.
        binary: sizes in powers of two, as the user wrote the budget.
        states_stay: parameters, gradients and optimizer state cannot leave; with False everything can.
        compiled: the compiled model in whose graph it happened, by its name; empty: in none.
        hidden_bytes: of the device's memory that no tensor has: libraries' workspaces. They are held beside all that is named.
    """

    def size(count: int) -> str:
        return show_size(count, binary=binary)

    tier, why = failed or ("", "")
    saved = held.kinds.get("saved for backward", 0) if states_stay else sum(held.kinds.values())
    short = failed is not None and is_full(failed) and saved > 0
    floor = max(floor_bytes, there_bytes)
    # Over what is there already nothing has run yet: the op that needs most is known where a forward has begun.
    known = ahead.known or (held.step_bytes > 0 and not there_bytes)
    tight = 0 < room_bytes < held.states_bytes + held.missing_bytes
    if states_stay:
        floor = max(floor, there_bytes + held.missing_bytes, held.states_bytes + held.missing_bytes)
    if states_stay or tight or short:  # what a tier would take that has no room for the states, is not counted on
        step = _where_states_stay(held, max(floor_bytes, there_bytes), ahead)
    else:
        step = int(SPARE * max(floor, ahead.op_bytes, held.update_bytes))
    enough = max(floor, step, untried_bytes) if known or there_bytes else floor
    enough = round_up(enough + hidden_bytes, binary=binary)
    kinds = held.kinds | ({"workspaces of libraries": hidden_bytes} if hidden_bytes else {})
    split = ", ".join(f"{name} {size(part)}" for name, part in sorted(kinds.items(), key=lambda item: -item[1]))
    modules = ", ".join(f"{name} {size(part)}" for name, part in held.modules)
    out = f"the {tier} tier below it is full: no space left" if short else "nothing more can leave"
    what = f"memmgr: the budget of {size(budget_bytes)} is spent, and {out}."
    if there_bytes:
        what += f" {size(there_bytes)} are on the device already."
    if failed is not None and not short:
        what += f" The {tier} tier failed: {why}."
    lines = [
        f"{first} {what}".strip(),
        f"Held now: {split or 'nothing that Python can see'}."
        + (f" Parameters and buffers by module: {modules}." if modules else "")
        + (
            f" Still to come: {size(held.missing_bytes)} of gradients and optimizer state."
            if held.missing_bytes
            else ""
        ),
    ]
    if compiled:
        lines.append(
            f"This is inside a compiled {compiled}: what its graph is given and makes stays until it returns. Without "
            "torch.compile, or with smaller parts compiled one by one, less is needed."
        )
    tier_bytes = below_bytes + saved if short else 0
    if short:
        movable = "are saved for backward" if states_stay else "could leave"
        option = "disk=(folder, size), --disk-size" if tier == "disk" else "host=, --host"
        lines.append(
            f"More {tier}, not more budget: {size(saved)} that {movable} had no room below. A {tier} tier of "
            f"{size(tier_bytes)} would have held them ({option}); the rest of the run may need more."
        )
    without = "Without that a" if short else "A"
    if known:
        lines.append(f"{without} budget of {size(enough)} ({enough} bytes) should do for a whole step.")
    else:
        lines.append(
            f"{without} budget of at least {size(enough)} ({enough} bytes) is needed, and the rest of the run may need more: "
            "what its largest op takes is known where a forward has begun. `memmgr run` without --budget measures what it needs."
        )
    error = BudgetError("\n".join(lines))
    error.floor_bytes, error.enough_bytes = floor, enough
    error.budget_bytes, error.tier_bytes = budget_bytes, tier_bytes
    return error
