"""The errors that memmgr raises, and what they say."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import OutOfMemoryError

from ._sizes import show_size

STATES = ("parameters", "buffers", "gradients", "optimizer state")
# What a step takes besides the model's states and what the program keeps, by the most that it took so far: in the first forward
# most ops are still to come, and the backward of one holds gradients beside values. Found with the models of tests/budget.
UNSEEN, SEEN = 3.0, 1.5
MARGIN = 8  # where no op has been seen: one part in so many of the states

_OURS = re.compile(r"\s*memmgr: the budget of .*? is spent.*", re.DOTALL)
_FAILED = re.compile(r"The (\w+) tier failed: (.+?)\.?$", re.MULTILINE)
_FULL = "No space left on device"


class BudgetError(OutOfMemoryError):
    """The budget is spent and nothing more can be let go.

    A subclass of `torch.OutOfMemoryError`, so that whatever handles torch's own error handles this one. Its text begins
    as torch's does, then says what holds the rest, and what to change.

    Attributes:
        floor_bytes: the smallest budget that would have worked up to here, in bytes; a later part of the run may need more.
        enough_bytes: a budget that should do for a whole training step, in bytes: the model's states, those that are still to
            come included, and room for the largest op in backward, by the largest so far. An estimate, at least `floor_bytes`,
            which it is where there is no optimizer yet: a model may still be growing.
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


@dataclass(frozen=True)
class Holdings:
    """Who holds the memory, and what is still to come.

    Attributes:
        kinds: bytes by kind (see `_stock.holders`).
        modules: parameters and buffers by module class, largest first, in bytes.
        missing_bytes: gradients and optimizer state that the first complete step will add.
        step_bytes: what the optimizer takes besides while it steps; 0 where there is no optimizer yet, so that nothing can be
            said about a whole step.
    """

    kinds: dict[str, int]
    modules: list[tuple[str, int]]
    missing_bytes: int
    step_bytes: int = 0

    @property
    def states_bytes(self) -> int:
        """Parameters, buffers, gradients, optimizer state: what is there of them."""
        return sum(self.kinds.get(kind, 0) for kind in STATES)


def torchs_own_words(text: str) -> str:
    """The first line of an out-of-memory error without what memmgr's allocator has added to it."""
    return _OURS.sub("", text.splitlines()[0] if text else "")


def failed_tier(text: str) -> tuple[str, str] | None:
    """Which tier failed ("disk", "host") and why, by the text of the allocator's error; None: none did."""
    match = _FAILED.search(text)
    return (match[1].lower(), match[2]) if match else None


def budget_error(
    first: str,
    held: Holdings,
    *,
    budget_bytes: int,
    floor_bytes: int = 0,
    there_bytes: int = 0,
    failed: tuple[str, str] | None = None,
    below_bytes: int = 0,
    seen: bool = False,
    binary: bool = False,
    states_stay: bool = True,
) -> BudgetError:
    """The error of a budget that is too small, in the middle of a run or when it is opened.

    Args:
        first: torch's own words for it.
        held: who holds what.
        budget_bytes: the budget.
        floor_bytes: the most that could not have left so far, in bytes.
        there_bytes: what was there before the budget opened, in bytes; 0 when it is open.
        failed: the tier that failed, "disk" or "host", and why; None: none did.
        below_bytes: what was in it.
        seen: most of a step has been seen: it ended in a backward, or later.
        binary: sizes in powers of two, as the user wrote the budget.
        states_stay: parameters, gradients and optimizer state cannot leave; with False everything can.
    """

    def size(count: int) -> str:
        return show_size(count, binary=binary)

    states = held.states_bytes + held.missing_bytes if states_stay else 0
    floor = max(floor_bytes, there_bytes + (held.missing_bytes if states_stay else 0), states)
    extra = max(floor_bytes, there_bytes) - (held.states_bytes if states_stay else 0)
    # Batches, most likely: a step has no more of them. Where everything can leave they are part of an op's working set.
    kept = min(held.kinds.get("other tensors", 0), max(0, extra)) if states_stay else 0
    work = max(held.step_bytes, kept + int((SEEN if seen else UNSEEN) * (extra - kept)), states // MARGIN)
    saved = held.kinds.get("saved for backward", 0) if states_stay else sum(held.kinds.values())
    tier, why = failed or ("", "")
    short = why == _FULL and saved > 0
    # With room below, what is saved would not be here: then nothing is known of a step that has it all in memory.
    enough = max(floor, states + work) if held.step_bytes and not short else floor
    split = ", ".join(f"{name} {size(part)}" for name, part in sorted(held.kinds.items(), key=lambda item: -item[1]))
    modules = ", ".join(f"{name} {size(part)}" for name, part in held.modules)
    if there_bytes:
        what = f"memmgr: {size(there_bytes)} are on the device already, more than the budget of {size(budget_bytes)}."
    elif short:
        what = (
            f"memmgr: the budget of {size(budget_bytes)} is spent, and the {tier} tier below it is full: no space left."
        )
    else:
        what = f"memmgr: the budget of {size(budget_bytes)} is spent, and nothing more can leave."
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
    tier_bytes = below_bytes + saved if short else 0
    so_far = f"mallest budget that would have worked so far: {size(floor)} ({floor} bytes)"
    if short:
        movable = "are saved for backward" if states_stay else "could leave"
        option = "disk=(folder, size), --disk-size" if tier == "disk" else "host=, --host"
        lines.append(
            f"More {tier}, not more budget: {size(saved)} that {movable} had no room below. A {tier} tier of "
            f"{size(tier_bytes)} would have held them ({option}); the rest of the run may need more."
        )
        lines.append(f"Without that the s{so_far}.")
    elif held.step_bytes:
        lines.append(f"A budget of {size(enough)} should do for a whole step. S{so_far}.")
    else:
        lines.append(f"S{so_far}; the rest of the run may need more.")
    error = BudgetError("\n".join(lines))
    error.floor_bytes, error.enough_bytes = floor, enough
    error.budget_bytes, error.tier_bytes = budget_bytes, tier_bytes
    return error
