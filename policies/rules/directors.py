"""Directors: the action for each victim. They compare seconds with seconds."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from .types import Action, Actions, Candidates, Director, Floats, Ints, Link


def keep(c: Candidates, order: Ints, link: Link, urgent_bytes: int) -> Actions:
    """Nothing ever leaves. "Nothing" is a policy, not a None."""
    return np.full(len(order), Action.KEEP, dtype=np.int8)


def evict(c: Candidates, order: Ints, link: Link, urgent_bytes: int) -> Actions:
    """Recompute only (DTR): EVICT where there is a recipe, else KEEP."""
    return np.where(c.recomputable[order], np.int8(Action.EVICT), np.int8(Action.KEEP))


def offload(c: Candidates, order: Ints, link: Link, urgent_bytes: int) -> Actions:
    """Swap only (vDNN): OFFLOAD where the tier has room or a copy, else KEEP."""
    return np.where(c.can_offload[order], np.int8(Action.OFFLOAD), np.int8(Action.KEEP))


def delta(c: Candidates, order: Ints, link: Link, urgent_bytes: int) -> Actions:
    """OFFLOAD where writing and reading back take less time than recomputing, else EVICT.

    Source: DELTA (Tang et al., arXiv 2203.15980), Director: `2 (bytes / bandwidth) / c > 1` means recompute. Mended:
    seconds on both sides, evicted ancestors count, each direction has its own bandwidth, a clean cell is not written.
    Where only one method is possible it is taken.

    Known limitations: assumes an idle link and no overlap, so it recomputes cells that a hidden copy would restore
    without cost (`auto` mends that too).
    """
    pick = c.take(order)
    size = pick.size_bytes.astype(np.float64)
    can_write = link.write_bytes_per_second > 0
    one_write = size * link.write_seconds_per_byte + link.latency_seconds if can_write else np.full(len(pick), np.inf)
    read = size * link.read_seconds_per_byte + link.latency_seconds if link.read_bytes_per_second > 0 else np.inf
    transfer = np.where(pick.clean, 0.0, one_write) + read
    return _cheaper(pick, transfer, pick.recompute_seconds)


@dataclass(frozen=True, slots=True)
class Auto:
    """The cheaper of recomputing and of the *exposed* part of the transfer, decision after decision.

    Entry k of the ranking is needed at T_k = slack + (bytes before it, less the urgent ones) / demand. Offloading it
    adds to the time that compute loses:

    - the copies' CPU: bytes x `cpu_seconds_per_byte`, twice if dirty, hidden or not;
    - the write: writes are first in, first out, so they delay compute by S = max over k of (written by then / bandwidth
      - T_k), at least 0; the growth of S counts. A clean cell writes no byte;
    - the read: reads come in the order of use (earliest deadline first), so they delay compute by L = max over uses of
      (bytes due by then / bandwidth - time until use), at least 0, over the reads in flight, those promised
      (`Link.due_*`) and those decided so far; the growth of L counts.

    Recomputing is never hidden: own op and evicted ancestors count in full. The cheaper is taken, EVICT if equal. So
    each decision to offload adds to the queues that the next one sees, and the mix settles where the link is just full.

    Sources: DELTA's comparison with Capuchin's exposed time (ASPLOS 2020, section 4: swap while hidden, then compare);
    the delay of a queue with deadlines is Jackson's rule (maximum lateness under earliest deadline first, 1955).

    Attributes:
        bias: the transfer's seconds count this many times: 1 believes the model; more leans to recomputing, inf only
            ever recomputes (where there is a recipe), 0 only ever offloads.

    Known limitations: acts in the simulator, and live only for a filter that malloc has not built in (`runtime/ranking.py`);
    with a built-in one malloc takes the cheaper way, without queues. An eviction moves later uses back and raises its
    children's chains, neither is seen before the next ranking; reads and writes do not slow each other down; a read can use
    all room from `seconds_until_reads` on.
    """

    bias: float = 1.0

    def __post_init__(self) -> None:
        if not self.bias >= 0:
            raise ValueError(f"Auto.bias must be >= 0, is {self.bias!r}")

    def __call__(self, c: Candidates, order: Ints, link: Link, urgent_bytes: int) -> Actions:
        pick = c.take(order)
        size = pick.size_bytes.astype(np.float64)
        recompute = pick.recompute_seconds
        dirty = ~pick.clean
        cpu = size * link.cpu_seconds_per_byte * (1.0 + dirty)
        able = pick.can_offload & (link.read_bytes_per_second > 0)
        if link.write_bytes_per_second <= 0:
            able &= pick.clean
        able |= pick.can_offload & ~pick.recomputable  # if only one method is possible it is taken at any cost

        # The copies' CPU alone is too much: no queue will change that.
        action = np.where(pick.recomputable, np.int8(Action.EVICT), np.int8(Action.KEEP))
        action[able & ~pick.recomputable] = Action.OFFLOAD
        open_ = able & (~pick.recomputable | (_biased(self.bias, cpu) < recompute))
        at = np.flatnonzero(open_)
        if len(at) == 0 or self.bias == np.inf or link.read_bytes_per_second <= 0:
            return action  # nothing to weigh

        needed = _needed_seconds(pick, link, urgent_bytes)
        deadline = _deadlines(pick.seconds_until_use, link)
        if _all_hidden(size, dirty, needed, deadline, at, link):
            action[at] = Action.OFFLOAD
            return action
        writes = _Writes(link)
        reads = _Reads(link, deadline[at])
        columns = (a[at].tolist() for a in (size, dirty, needed, deadline, cpu, recompute))
        chosen = np.zeros(len(at), dtype=np.bool_)
        for i, (size_i, dirty_i, needed_i, deadline_i, cpu_i, recompute_i) in enumerate(zip(*columns, strict=True)):
            write_i = writes.growth(size_i, needed_i) if dirty_i else 0.0
            seconds = cpu_i + write_i
            forced = recompute_i == np.inf
            if not forced and self.bias * (seconds + reads.least(i, size_i)) >= recompute_i:
                continue  # already too expensive without the rest of the read's delay
            read_i = reads.growth(i, size_i, deadline_i)
            # "not less", rather than "at least": 0 x inf is NaN
            if not forced and not self.bias * (seconds + read_i) < recompute_i:
                continue
            chosen[i] = True
            reads.add(i, size_i, read_i)
            if dirty_i:
                writes.add(size_i, write_i)
        action[at] = np.where(chosen, np.int8(Action.OFFLOAD), np.int8(Action.EVICT))
        return action


auto = Auto()


@dataclass(frozen=True, slots=True)
class Alternate:
    """EVICT and OFFLOAD by turns, at any cost; the other method where one is not possible. For tests ("torture").

    Attributes:
        first: parity. A cell's turn is its row in the candidates plus `first`, so a caller that releases cells one at a time
            passes a counter of its own.
    """

    first: int = 0

    def __call__(self, c: Candidates, order: Ints, link: Link, urgent_bytes: int) -> Actions:
        wants_offload = (order + self.first) % 2 == 1
        can_offload, can_evict = c.can_offload[order], c.recomputable[order]
        action = np.full(len(order), Action.KEEP, dtype=np.int8)
        action[can_evict] = Action.EVICT
        action[can_offload & (wants_offload | ~can_evict)] = Action.OFFLOAD
        return action


DIRECTORS: MappingProxyType[str, Director] = MappingProxyType(
    {"auto": auto, "evict": evict, "offload": offload, "delta": delta}
)


def _cheaper(pick: Candidates, transfer: Floats, recompute: Floats) -> Actions:
    """OFFLOAD where it is possible and cheaper, or the only way; else EVICT where possible; else KEEP."""
    action = np.where(pick.recomputable, np.int8(Action.EVICT), np.int8(Action.KEEP))
    action[pick.can_offload & ((transfer < recompute) | ~pick.recomputable)] = Action.OFFLOAD
    return action


def _biased(bias: float, seconds: Floats) -> Floats:
    return np.full_like(seconds, np.inf) if bias == np.inf else bias * seconds


def _needed_seconds(pick: Candidates, link: Link, urgent_bytes: int) -> Floats:
    """When compute needs the bytes of each entry. A kept cell frees no bytes, so later entries are needed no later."""
    frees = np.where(pick.releasable, pick.size_bytes, 0).astype(np.float64)
    before = frees.cumsum() - frees
    return np.asarray(
        link.slack_seconds + np.maximum(before - urgent_bytes, 0.0) / link.demand_bytes_per_second, dtype=np.float64
    )


def _deadlines(seconds_until_use: Floats, link: Link) -> Floats:
    """Time from the moment that reading can begin until the use; unknown: 0."""
    known = np.where(np.isnan(seconds_until_use), 0.0, seconds_until_use)
    return np.maximum(known - link.seconds_until_reads, 0.0)


def _all_hidden(
    size: Floats, dirty: Floats | np.ndarray, needed: Floats, deadline: Floats, at: Ints, link: Link
) -> bool:
    """True if offloading every one of `at` delays nothing, so that each choice is the CPU's price alone."""
    written = np.where(dirty[at], size[at], 0.0)
    if written.any():
        if link.write_bytes_per_second <= 0:
            return False
        write_late = (link.queued_write_bytes + written.cumsum()) * link.write_seconds_per_byte - needed[at]
        if not (write_late[written > 0] + link.latency_seconds <= 0.0).all():
            return False
    due_bytes = np.concatenate([np.asarray(link.due_bytes, dtype=np.float64), size[at]])
    due = np.concatenate([_deadlines(np.asarray(link.due_seconds, dtype=np.float64), link), deadline[at]])
    by_use = np.argsort(due, kind="stable")
    read_late = (link.queued_read_bytes + due_bytes[by_use].cumsum()) * link.read_seconds_per_byte - due[by_use]
    return bool((read_late + link.latency_seconds <= 0.0).all())


class _Writes:
    """First in, first out; `stall` is how long compute has waited for it in all."""

    __slots__ = ("latency", "per_byte", "queued", "stall")

    def __init__(self, link: Link) -> None:
        self.queued = float(link.queued_write_bytes)
        self.per_byte = link.write_seconds_per_byte
        self.latency = link.latency_seconds
        self.stall = 0.0

    def growth(self, size: float, needed: float) -> float:
        late = self.latency + (self.queued + size) * self.per_byte - needed
        return late - self.stall if late > self.stall else 0.0

    def add(self, size: float, growth: float) -> None:
        self.stall += growth
        self.queued += size


class _Reads:
    """Earliest deadline first. `late[j]` is the lateness at deadline j of the bytes due by then, and `stall` the
    largest one, at `worst`. Additions stay pending until a decision needs the sums: most do not.
    """

    __slots__ = ("_late", "_pending", "_seen", "_slot", "_worst", "per_byte", "stall", "start", "total")

    def __init__(self, link: Link, deadline: Floats) -> None:
        self.per_byte = link.read_seconds_per_byte
        self.start = link.latency_seconds + (link.queued_read_bytes * self.per_byte if link.queued_read_bytes else 0.0)
        due_bytes = np.asarray(link.due_bytes, dtype=np.float64)
        due = _deadlines(np.asarray(link.due_seconds, dtype=np.float64), link)
        points, slot = np.unique(np.concatenate([deadline, due]), return_inverse=True)
        mine, promised = slot[: len(deadline)], slot[len(deadline) :]
        self._slot: list[int] = mine.tolist()
        committed = np.bincount(promised, weights=due_bytes, minlength=len(points)).cumsum()
        with np.errstate(invalid="ignore"):  # 0 bytes on a link that cannot read
            self._late = self.start + np.where(committed > 0, committed * self.per_byte, 0.0) - points
        self.total = float(due_bytes.sum())
        self.stall = 0.0
        self._worst = self._seen = -1
        if len(promised):
            worst = int(promised[np.argmax(self._late[promised])])
            if self._late[worst] > 0:
                self.stall, self._worst = float(self._late[worst]), worst
        self._pending: list[tuple[int, float]] = []

    def least(self, i: int, size: float) -> float:
        """A lower bound of `growth` without its cost: bytes due before the worst moment make it worse."""
        return size * self.per_byte if self._slot[i] <= self._worst else 0.0

    def growth(self, i: int, size: float, deadline: float) -> float:
        if self.start + (self.total + size) * self.per_byte <= deadline:
            return 0.0  # everything that is promised fits before this use, so before all later ones too
        if self._pending:
            self._apply()
        slot = self._slot[i]
        self._seen = slot + int(self._late[slot:].argmax())
        late = float(self._late[self._seen]) + size * self.per_byte
        return late - self.stall if late > self.stall else 0.0

    def add(self, i: int, size: float, growth: float) -> None:
        """Adds an entry with the growth that `growth` has just returned for it."""
        if growth > 0.0:
            self.stall += growth
            self._worst = self._seen
        self.total += size
        self._pending.append((self._slot[i], size * self.per_byte))

    def _apply(self) -> None:
        if len(self._pending) < 8:
            for slot, seconds in self._pending:
                self._late[slot:] += seconds
        else:
            slots, seconds_ = zip(*self._pending, strict=True)
            self._late += np.bincount(slots, weights=seconds_, minlength=len(self._late)).cumsum()
        self._pending.clear()
