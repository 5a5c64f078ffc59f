"""The texts of BudgetError and RankError. The facts for a BudgetError are collected in explainer.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memmgr.common.errors import BudgetError, RankError
from memmgr.config.sizes import round_up, show_floor, show_size

STATE_KINDS = ("parameters", "buffers", "gradients", "optimizer states")
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
        spent, named = (show_size(size, binary=binary) for size in (limit, enough))
        least = show_floor(floor, binary=binary)
        what = (
            f"has ended with {kind}: its budget of {spent} is spent. Its floor is {least}, and a budget of {named} ({enough} "
            "bytes) should do there."
        )
    elif kind:
        what = f"has ended with {kind}: {trouble['text']}" if trouble["text"] else f"has ended with {kind}."
    else:
        what = "is gone: " + _GONE[trouble.get("how", "")]
        what += f" Its floor was {show_floor(floor, binary=binary)}." if floor else ""
    error = RankError(f"memmgr: rank {rank} {what}\nRank {here} would have waited for it.")
    error.rank, error.floor_bytes, error.enough_bytes, error.budget_bytes = rank, floor, enough, limit
    return error


@dataclass(frozen=True)
class HeldBytes:
    """Bytes by holder, and the states that are still to come.

    Attributes:
        kinds: bytes by kind (see `memory_inventory.holders`).
        modules: parameters and buffers by module class, largest first, in bytes.
        missing_bytes: gradients and optimizer state that the first complete step will add.
        step_bytes: bytes that the optimizer takes in addition while it steps; 0 where there is no optimizer yet.
        update_bytes: bytes of its largest op, states included; 0 where there is none.
        below_bytes: model states that are in the tier below, in bytes.
        history_bytes: of the missing ones, those that come with later iterations of LBFGS.
    """

    kinds: dict[str, int]
    modules: list[tuple[str, int]]
    missing_bytes: int
    step_bytes: int = 0
    update_bytes: int = 0
    below_bytes: int = 0
    history_bytes: int = 0

    @property
    def states_bytes(self) -> int:
        """Bytes of parameters, buffers, gradients and optimizer state, resident or in the tier below."""
        return self.below_bytes + sum(self.kinds.get(kind, 0) for kind in STATE_KINDS)


@dataclass(frozen=True)
class FailedOp:
    """The op that found no room.

    Attributes:
        name: as torch has it; empty: the request came from no op.
        need_bytes: all that it reads and makes, or its request alone, and the bytes that can never leave.
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
        grow: they outlive the turn of the loop that made them, as far as it is known.
    """

    count: int = 0
    nbytes: int = 0
    by: str = ""
    left: int | None = None
    grow: bool = False

    @property
    def each_bytes(self) -> int:
        """The average bytes of an export."""
        return self.nbytes // max(1, self.count)

    @property
    def coming(self) -> int:
        """The further exports for which the named budget has room."""
        return MORE * self.count if self.left is None else self.left

    @property
    def coming_bytes(self) -> int:
        """The bytes of those."""
        return self.coming * self.each_bytes


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


NAMED_KINDS = 4
"""So many kinds of holders are named."""

NAMED_MODULES = 2
"""So many classes of modules are named."""


@dataclass(frozen=True)
class Spent:
    """A budget that is too small, in the middle of a run or when it is opened: all that its error is written from.

    Attributes:
        first: torch's own words for it.
        held: the holders of the memory.
        budget_bytes: the budget.
        so_far_bytes: the most that could not have left so far, in bytes.
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
        leak: a sentence about the largest leak, without its full stop; empty: there is none.
        kept: sentences about the results that a loop keeps; empty: there are few.
    """

    first: str
    held: HeldBytes
    budget_bytes: int
    so_far_bytes: int = 0
    untried_bytes: int = 0
    there_bytes: int = 0
    failed: tuple[str, str] | None = None
    below_bytes: int = 0
    room_bytes: int = 0
    ahead: Callable[[], Ahead] = Ahead
    binary: bool = False
    states_stay: bool = True
    compiled: str = ""
    hidden_bytes: int = 0
    op: FailedOp = FailedOp()  # frozen
    exports: Exports = Exports()  # frozen
    trains: bool = True
    fixed: str = ""
    leak: str = ""
    kept: str = ""

    def error(self) -> BudgetError:
        """The error: the request, the largest holders with the floor, and, written when it is read, a budget that should do."""
        error = BudgetError(f"{self._request()}\n{self._holders()}")
        error.floor_bytes, error.budget_bytes, error.tier_bytes = self.floor_bytes, self.budget_bytes, self.tier_bytes
        error.told_later(self._advice)
        return error

    def size(self, count: int) -> str:
        return show_size(count, binary=self.binary)

    @property
    def _saved_bytes(self) -> int:
        """Those that could leave if there were room below."""
        kinds = self.held.kinds
        return kinds.get("saved for backward", 0) if self.states_stay else sum(kinds.values())

    @property
    def short(self) -> bool:
        """The tier below is full: it is too small, and not the budget."""
        return self.failed is not None and is_full(self.failed) and self._saved_bytes > 0

    @property
    def tier_bytes(self) -> int:
        """A tier that would have done, in bytes, where it is too small; else 0."""
        return self.below_bytes + self._saved_bytes if self.short else 0

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that would have worked so far."""
        floor = max(self.so_far_bytes, self.there_bytes)
        if self.states_stay:
            missing = self.held.missing_bytes - self.held.history_bytes
            floor = max(floor, self.there_bytes + missing, self.held.states_bytes + missing)
        return floor

    def _request(self) -> str:
        tier, why = self.failed or ("", "")
        out = f"the {tier} tier is full: no space left" if self.short else "nothing more can be evicted"
        said = f"{self.first} memmgr: the budget of {self.size(self.budget_bytes)} is spent, and {out}."
        if self.there_bytes:
            said += f" {self.size(self.there_bytes)} are on the device already."
        if self.failed is not None and not self.short:
            said += f" The {tier} tier failed: {why}."
        return said.strip()

    def _holders(self) -> str:
        hidden = {"workspaces of libraries": self.hidden_bytes} if self.hidden_bytes else {}
        kinds = sorted((self.held.kinds | hidden).items(), key=lambda item: -item[1])
        top = [f"{name} {self.size(part)}" for name, part in kinds[:NAMED_KINDS]]
        if kinds[NAMED_KINDS:]:
            rest = sum(part for _, part in kinds[NAMED_KINDS:])
            count = len(kinds) - NAMED_KINDS
            top.append(f"{count} other kind{'s' * (count > 1)} {self.size(rest)}")
        said = f"Resident now: {', '.join(top) or 'nothing that Python can see'}"
        modules = ", ".join(f"{name} {self.size(part)}" for name, part in self.held.modules[:NAMED_MODULES])
        if modules:
            said += f" (largest modules: {modules})"
        said = f"{said}. Floor so far: {show_floor(self.floor_bytes, binary=self.binary)}."
        if self.leak:
            said += f"\n{self.leak[0].upper()}{self.leak[1:]}. More budget only delays this error."
        elif self.kept:
            said += f"\n{self.kept}"
        exports, more = self.exports, ""
        if not exports.grow:
            return said
        what = (
            f"addresses of {exports.count} tensors that hold" if exports.count > 1 else "address of a tensor that holds"
        )
        if exports.left is not None:
            more = f" Its loop has {exports.left} more to come."
        copy = ", and a copy (`.numpy().copy()`) takes none" if exports.by == "NumPy" else ""
        return (
            f"{said}\n{exports.by} has the {what} {self.size(exports.nbytes)}. Such tensors stay in memory: each further one "
            f"takes about {self.size(exports.each_bytes)} more{copy}.{more}"
        )

    def _details(self) -> list[str]:
        """Why so much is needed: `memmgr doctor --explain` prints it."""
        said = []
        if self.held.missing_bytes:
            said.append(f"Still to come: {self.size(self.held.missing_bytes)} of gradients and optimizer states.")
        if self.compiled:
            said.append(
                f"This is inside a compiled {self.compiled}: what its graph is given and makes stays until it returns. Without "
                "torch.compile, or with smaller parts compiled one by one, less is needed."
            )
        if self.fixed:
            said.append(f"Fixed tensors: {self.fixed}. A tensor that `.clone()` makes of one can be evicted.")
        if self.short:
            movable = "are saved for backward" if self.states_stay else "could be offloaded"
            said.append(f"{self.size(self._saved_bytes)} that {movable} had no room in the tier.")
        return said

    def _where_states_stay(self, coming: Ahead) -> int:
        """The bytes of a step without a tier."""
        held = self.held
        states = held.states_bytes + held.missing_bytes
        least = states + max(held.step_bytes, states // LEAST_WORK)
        if coming.states_stay_bytes is not None:
            return max(least, int(SPARE * coming.states_stay_bytes))
        extra = max(0, max(self.so_far_bytes, self.there_bytes) - held.states_bytes)
        kept = min(held.kinds.get("other tensors", 0), extra)  # batches, most likely: a step has no more of them
        return max(least, states + kept + int(UNSEEN * (extra - kept)))

    def _known(self, coming: Ahead) -> bool:
        """The largest op is known where a forward has begun; no op has run yet if the budget opens over resident memory."""
        begun = coming.known or (self.held.step_bytes > 0 and not self.there_bytes)
        return bool(coming.call) or (self.trains and begun)

    def _enough(self, coming: Ahead) -> tuple[int, list[str]]:
        """The budget to name, in bytes, and sentences about its room beside the op or the step."""
        held, op, exports, floor = self.held, self.op, self.exports, self.floor_bytes
        known = self._known(coming)
        # The exports and kept tensors of a step are free by the next one; without an optimizer there may be no next one.
        trained = self.trains and known and held.step_bytes > 0
        kept = held.kinds.get("other tensors", 0) + held.kinds.get("saved for backward", 0)
        kept = max(0, kept - op.read_bytes - exports.nbytes) if self.states_stay and not trained else 0
        tight = 0 < self.room_bytes < held.states_bytes + held.missing_bytes
        if self.states_stay or tight or self.short:  # a tier without room for the states is not counted on
            step = self._where_states_stay(coming)
        else:
            step = int(SPARE * max(floor, coming.op_bytes, held.update_bytes))
        enough = max(floor, step, self.untried_bytes) if known or self.there_bytes or held.step_bytes else floor
        if not trained and not self.there_bytes and not coming.rehearsed:
            enough = max(enough, floor + MORE * op.result_bytes)
        if op.result_bytes and (exports.grow or not trained):
            enough += kept + exports.coming_bytes
        calls = 0 if exports.count > 1 else coming.calls
        if calls:  # concatenating reads all results and makes as many bytes
            enough = max(enough, int(SPARE * 2 * calls * coming.returns_bytes))
        kept_too = (
            f"The {self.size(kept)} that are kept cannot be offloaded without a tier: there is room for as much again."
        )
        return round_up(enough + self.hidden_bytes, binary=self.binary), [kept_too] * (kept > 0)

    def _advice(self) -> tuple[int, str, tuple[str, ...]]:
        """The budget that is named, in bytes, the line that names it, and the sentences of `memmgr doctor --explain`."""
        coming = self.ahead()
        enough, more = self._enough(coming)
        details = (*self._details(), *more)
        named, without, before = f"budget of {self.size(enough)} ({enough} bytes)", "A", ""
        if self.short and self.failed is not None:
            tier = self.failed[0]
            option = "disk=(folder, size), --disk-size" if tier == "disk" else "host=, --host"
            before = f"More {tier}, not more budget: a {tier} tier of {self.size(self.tier_bytes)} ({option}). "
            without = "Without that a"
        if self._known(coming):
            return enough, f"{before}{without} {named} should do for {self._use(coming)}", details
        op, floor = self.op, self.floor_bytes
        measure = "`memmgr run` without --budget measures what it needs."
        if op.result_bytes and not self.there_bytes:
            least = op.need_bytes if op.need_bytes > self.budget_bytes else floor
            needs = self.size(round_up(least + self.hidden_bytes, binary=self.binary))
            what = f"This op ({op.name})" if op.name else "This request"
            said = (
                f"{what} needs {needs}. {before}{without} {named} should do for it{self._such} and for ops on results "
            )
            return enough, f"{said}like its own; the rest of the run may need more. {measure}", details
        least = round_up(floor + self.hidden_bytes, binary=self.binary)
        named = f"budget of at least {self.size(least)} ({least} bytes)"
        said = f"{before}{without} {named} is needed, and the rest of the run may need more: "
        return least, f"{said}what its largest op takes is known where a forward has begun. {measure}", details

    @property
    def _such(self) -> str:
        """The exports for which the named budget has room."""
        return f" and for {self.exports.coming} more such tensors" if self.exports.grow else ""

    def _use(self, coming: Ahead) -> str:
        """The use of the named budget, where the largest op is known or estimated."""
        exports = self.exports
        calls = 0 if exports.count > 1 else coming.calls
        them = self._such or (f", and to put together what {calls} of them return" if calls > 1 else "")
        rest = "what comes after it is not known" if coming.call else ""
        if exports.grow and exports.left is None:
            rest = "a loop that makes still more needs more"
        if self.leak:
            rest = rest or "later ones need more"
        what = f"this call of {coming.call}" if coming.call else "this step" if self.leak else "a whole step"
        use = what + them + (f"; {rest}." if rest else ".")
        if not coming.call and not coming.rehearsed and coming.op_bytes > self.floor_bytes:
            use += " Part of it is a margin for the ops of the backward that have not run."
        if not coming.call and self.held.history_bytes:
            use += f" {self.size(self.held.history_bytes)} of it are for the rest of LBFGS's history."
        return use
