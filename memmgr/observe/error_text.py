"""The texts of the errors that memmgr raises."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memmgr.common.errors import BudgetError, RankError
from memmgr.config.sizes import round_up, show_size

STATES = ("parameters", "buffers", "gradients", "optimizer state")
# Without a tier: the bytes of a step besides the model's states, over those of the first few ops of its forward.
UNSEEN = 3.0
LEAST_WORK = 8  # one part in so many of the states
SPARE = 1.06  # alignment, and memory that kernels take for themselves
MORE = 2  # where the rest of a run is not known: so many results more like the op's, and so many times more exports

SPENT = "memmgr: the budget of "  # in the text of an allocator's error
_OURS = re.compile(r"\s*memmgr: the budget of .*? is spent.*", re.DOTALL)
_FAILED = re.compile(r"The (\w+) tier failed: (.+?)\.?$", re.MULTILINE)
_FULL = "No space left on device"


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
    """The holders of the memory, and the states that are still to come.

    Attributes:
        kinds: bytes by kind (see `memory_inventory.holders`).
        modules: parameters and buffers by module class, largest first, in bytes.
        missing_bytes: gradients and optimizer state that the first complete step will add.
        step_bytes: bytes that the optimizer takes in addition while it steps; 0 where there is no optimizer yet.
        update_bytes: bytes of its largest op, states included; 0 where there is none.
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
        """Bytes of parameters, buffers, gradients and optimizer state, resident or in the tier below."""
        return self.below_bytes + sum(self.kinds.get(kind, 0) for kind in STATES)


@dataclass(frozen=True)
class FailedOp:
    """The op that found no room.

    Attributes:
        name: as torch has it; empty: the request came from no op.
        need_bytes: all that it reads and makes, and the bytes that can never leave; 0: not known.
        read_bytes: bytes of its arguments.
        result_bytes: bytes of its largest result, or of the request.
    """

    name: str = ""
    need_bytes: int = 0
    read_bytes: int = 0
    result_bytes: int = 0


@dataclass(frozen=True)
class Exports:
    """Tensors whose addresses others have, NumPy for one: they stay, and a loop that makes some makes more of them.

    Attributes:
        count: how many.
        nbytes: the bytes that they hold.
        by: the holder of the last one's address.
        left: how many are still to come; None: not known.
    """

    count: int = 0
    nbytes: int = 0
    by: str = ""
    left: int | None = None

    @property
    def each_bytes(self) -> int:
        """The average bytes of an export."""
        return self.nbytes // max(1, self.count)

    @property
    def coming_bytes(self) -> int:
        """The bytes to add for exports still to come."""
        return MORE * self.nbytes if self.left is None else self.left * self.each_bytes


@dataclass(frozen=True)
class Ahead:
    """The memory that the rest of the step will take, as far as it is known.

    Attributes:
        op_bytes: its largest op, and the bytes that can never leave beside it; 0: no more than so far, or not known.
        states_stay_bytes: as much where no model state can leave; None: not known.
        rehearsed: by a run on tensors without bytes.
        call: the class of the module whose call the figures are for; empty: they are for a training step.
        calls: how many such calls a list is made of; 0: no list is known.
        returns_bytes: bytes of the result of one of them.
    """

    op_bytes: int = 0
    states_stay_bytes: int | None = None
    rehearsed: bool = False
    call: str = ""
    calls: int = 0
    returns_bytes: int = 0

    @property
    def known(self) -> bool:
        """There will be no surprise."""
        return self.states_stay_bytes is not None


def torchs_own_words(text: str) -> str:
    """The first line of an out-of-memory error without the text of memmgr's allocator."""
    return _OURS.sub("", text.splitlines()[0] if text else "")


def failed_tier(text: str) -> tuple[str, str] | None:
    """Which tier failed ("disk", "host") and why, by the text of the allocator's error; None: none did."""
    match = _FAILED.search(text)
    return (match[1].lower(), match[2]) if match else None


def is_full(failed: tuple[str, str]) -> bool:
    """Has a tier failed for want of room?"""
    return failed[1] == _FULL


def _where_states_stay(held: Holdings, so_far_bytes: int, ahead: Ahead) -> int:
    """The bytes of a step without a tier; `so_far_bytes`: its peak so far."""
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
    ahead: Callable[[], Ahead] = Ahead,
    binary: bool = False,
    states_stay: bool = True,
    compiled: str = "",
    hidden_bytes: int = 0,
    op: FailedOp = FailedOp(),  # frozen
    exports: Exports = Exports(),  # frozen
    trains: bool = True,
    fixed: str = "",
) -> BudgetError:
    """The error of a budget that is too small, in the middle of a run or when it is opened.

    Args:
        first: torch's own words for it.
        held: the holders of the memory.
        budget_bytes: the budget.
        floor_bytes: the most that could not have left so far, in bytes.
        untried_bytes: where an op would have had room for its second run, without which nothing of it can be made again.
        there_bytes: resident bytes before the budget opened; 0 when it is open.
        failed: the tier that failed, "disk" or "host", and why; None: none did.
        below_bytes: the bytes that were in it.
        room_bytes: of the tier below, in all; 0: there is none, or it ends where its file system does.
        ahead: estimates the rest of the step; called when the text is read.
        binary: sizes in powers of two, as the user wrote the budget.
        states_stay: parameters, gradients and optimizer state cannot leave; with False everything can.
        compiled: the compiled model in whose graph it happened, by its name; empty: in none.
        hidden_bytes: of the device's memory that no tensor has: libraries' workspaces. They are held beside all that is named.
        op: the op that found no room.
        exports: tensors whose addresses others have.
        trains: gradients are recorded or made there.
        fixed: the memory that counts and is not torch's, by owner, with sizes; empty: there is little of it.
    """

    def size(count: int) -> str:
        return show_size(count, binary=binary)

    tier, why = failed or ("", "")
    saved = held.kinds.get("saved for backward", 0) if states_stay else sum(held.kinds.values())
    short = failed is not None and is_full(failed) and saved > 0
    floor = max(floor_bytes, there_bytes)
    tight = 0 < room_bytes < held.states_bytes + held.missing_bytes
    if states_stay:
        floor = max(floor, there_bytes + held.missing_bytes, held.states_bytes + held.missing_bytes)
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
    if fixed:
        lines.append(
            f"Tensors over memory that cannot leave: {fixed}. A tensor that `.clone()` makes of one can leave."
        )
    grows = exports.count > 1
    if grows:
        lines.append(
            f"{exports.by} has the addresses of {exports.count} tensors that hold {size(exports.nbytes)}. They stay in "
            f"memory while it has them: each further one takes about {size(exports.each_bytes)} more."
            + ("" if exports.left is None else f" Its loop has {exports.left} more to come.")
        )
    tier_bytes = below_bytes + saved if short else 0
    if short:
        movable = "are saved for backward" if states_stay else "could leave"
        option = "disk=(folder, size), --disk-size" if tier == "disk" else "host=, --host"
        lines.append(
            f"More {tier}, not more budget: {size(saved)} that {movable} had no room below. A {tier} tier of "
            f"{size(tier_bytes)} would have held them ({option}); the rest of the run may need more."
        )

    def rest() -> tuple[int, str]:
        coming = ahead()
        # No op has run yet if the budget opens over resident memory: the op that needs most is known where a forward has begun.
        known = bool(coming.call) or (trains and (coming.known or (held.step_bytes > 0 and not there_bytes)))
        # The exports and kept tensors of a step are free by the next one; without an optimizer there may be no next one.
        trained = trains and known and held.step_bytes > 0
        kept = held.kinds.get("other tensors", 0) + held.kinds.get("saved for backward", 0)
        kept = max(0, kept - op.read_bytes - exports.nbytes) if states_stay and not trained else 0
        if states_stay or tight or short:  # a tier without room for the states is not counted on
            step = _where_states_stay(held, max(floor_bytes, there_bytes), coming)
        else:
            step = int(SPARE * max(floor, coming.op_bytes, held.update_bytes))
        enough = max(floor, step, untried_bytes) if known or there_bytes or held.step_bytes else floor
        if not trained and not there_bytes and not coming.rehearsed:
            enough = max(enough, floor + MORE * op.result_bytes)
        if not trained and op.result_bytes:
            enough += kept + exports.coming_bytes
        calls = 0 if grows else coming.calls
        if calls:  # concatenating reads all results and makes as many bytes
            enough = max(enough, int(SPARE * 2 * calls * coming.returns_bytes))
        enough = round_up(enough + hidden_bytes, binary=binary)
        named = f"budget of {size(enough)} ({enough} bytes)"
        without = "Without that a" if short else "A"
        room = f"{MORE} times as many more" if exports.left is None else "all of them"
        more = f" That leaves room for {room}." if grows and not trained else ""
        if kept:
            more += (
                f" The {size(kept)} that are kept cannot leave without a tier below: there is room for as much again."
            )
        if known and not coming.call:
            return enough, f"{without} {named} should do for a whole step.{more}"
        if known:
            them = f", and to put together what {calls} of them return" if calls > 1 else ""
            after = f"{them}; what comes after it is not known.{more}"
            return enough, f"{without} {named} should do for this call of {coming.call}{after}"
        if op.result_bytes and not there_bytes:
            least = op.need_bytes if op.need_bytes > budget_bytes else floor
            least_words = size(round_up(least + hidden_bytes, binary=binary))
            what = f"This op ({op.name})" if op.name else "This request"
            return enough, (
                f"{what} needs {least_words}. {without} {named} should do for it and for ops on results like its own; "
                f"the rest of the run may need more.{more} `memmgr run` without --budget measures what it needs."
            )
        return enough, (
            f"{without} budget of at least {size(enough)} ({enough} bytes) is needed, and the rest of the run may need more: "
            "what its largest op takes is known where a forward has begun. `memmgr run` without --budget measures what it needs."
        )

    error = BudgetError("\n".join(lines))
    error.floor_bytes, error.budget_bytes, error.tier_bytes = floor, budget_bytes, tier_bytes
    error.told_later(rest)
    return error
