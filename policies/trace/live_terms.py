"""A plan's decisions in the terms of a live pass, which knows cells by the order in which it saves them and moments by their use.

A plan names storages and ops of the pass that was measured. What a live run can see of ops in backward is which save they ask
for, so that is how moments are told (memmgr/_plans.py, on devices).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from memmgr.policies.rules.types import Action

from .plan import Plan, carried
from .trace import Trace

EFFORT = 100_000
"""Steps of the planner's search for a pass that follows the plan: about a third of a second."""

MARGIN = 0.01
"""Of the budget, what a plan leaves free: bytes that no trace shows (alignment, what kernels take for themselves)."""


def budgets(limit_bytes: int, tries: int = 0) -> list[int]:
    """The budgets to plan for, in bytes, the best first.

    Args:
        limit_bytes: the run's.
        tries: how many plans ran short so far; each time a plan leaves twice as much free.
    """
    found = [int(limit_bytes * (1.0 - MARGIN * 2**tries))]
    if not tries:
        found.append(limit_bytes)  # so near the floor a plan without a margin is better than none
    return found


@dataclass
class Made:
    """What a planner decided.

    Attributes:
        away: (storage, action, op before which it has to be asked for again), in the order of going: what may go as soon as the
            program lets go of it.
        plan: with bound and prediction, where the planner has them.
        carried: (bytes of a storage that nobody saved, the op before which it is made again, a later op before which it is read
            to make others).
        again: (storage, action, op after which it goes, op before which it has to be asked for again), in the order of going, for
            each absence that begins in backward: malloc takes what it may, so what it may not take yet has to be kept from it.
    """

    away: list[tuple[int, Action, int]]
    plan: Plan | None = None
    carried: list[tuple[int, int, int]] = field(default_factory=list)
    again: list[tuple[int, Action, int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, trace: Trace, plan: Plan) -> Made:
        """A plan for this pass; its schedule, which is as long as the pass, is not kept.

        Raises:
            ValueError: the plan is not feasible.
        """
        if not plan.feasible:
            raise ValueError("a plan that is not feasible decides nothing")
        away, again = [], []
        gone: set[int] = set()
        asks = next((k for k, op in enumerate(trace.ops) if op.uses), len(trace.ops))
        for a in plan.absences:
            action = Action.OFFLOAD if a.offloaded else Action.EVICT
            if a.storage in gone or a.after >= asks:
                again.append((a.storage, action, a.after, a.back))
            else:
                away.append((a.storage, action, a.back))
            gone.add(a.storage)
        kept = [(trace.storages[c.storage].size_bytes, c.made, c.read) for c in carried(trace, plan.steps)]
        return cls(away, replace(plan, steps=(), absences=()), kept, again)


def decisions(made: Made, save_index: Mapping[int, int], saves: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What happens to each cell that a pass saves, in the order of saving: `Action` as uint8, shape (saves,).

    A storage's first absence decides; those that begin in backward are in `bursts`.

    Args:
        made: the decisions.
        save_index: of each storage that autograd saved, its place among what the pass saved.
        saves: how many that is.
    """
    actions = np.full(saves, int(Action.KEEP), dtype=np.uint8)
    decided: set[int] = set()
    for storage, action, _ in made.away:
        if storage in decided:
            continue
        decided.add(storage)
        index = save_index.get(storage)
        if index is not None and index < saves:
            actions[index] = int(action)
    return actions


@dataclass
class _Uses:
    """The uses of saves in backward.

    Attributes:
        ops: before which op each was, ascending.
        saves: which save it was; only the first use of each counts.
        position: of a save: which of these.
    """

    ops: list[int]
    saves: list[int]
    position: dict[int, int]

    @classmethod
    def of(cls, trace: Trace, save_index: Mapping[int, int]) -> _Uses:
        """Of a pass."""
        uses = cls([], [], {})
        for k, op in enumerate(trace.ops):
            for storage in op.uses:
                save = save_index.get(storage)
                if save is not None and save not in uses.position:
                    uses.position[save] = len(uses.saves)
                    uses.ops.append(k)
                    uses.saves.append(save)
        return uses

    def before(self, after: int) -> int:
        """Which use lets go what goes after op `after`: the first for that op, since what the op needs is made with it and may
        leave meanwhile; else the last before. -1: there is none."""
        at = bisect_left(self.ops, after)
        return at if at < len(self.ops) and self.ops[at] == after else at - 1


def bursts(
    made: Made, trace: Trace, save_index: Mapping[int, int], actions: np.ndarray[Any, np.dtype[np.uint8]]
) -> tuple[
    np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int32]]
]:
    """Which saves are made again in one go, what is kept from one go to a later one, and what goes in backward.

    Between two ops of backward a plan often makes several again that share what nobody saved (the output of one projection
    whose three parts attention saves). Made when each is asked for, what they share would be made for each. Near the floor it
    makes some to make others, and drops them until backward itself asks for them; or keeps some until others are made.

    Args:
        made: the decisions.
        trace: the pass they are for.
        save_index: of each storage that autograd saved in it, its place among what the pass saved.
        actions: of each save, from `decisions`.

    Returns:
        int32, shape (saves,): the number of the burst, -1 for what is not made again; int64, shape (n, 3): (burst, later
        burst, bytes that nobody saved and the one makes for both); int32, shape (m, 4): (used, save, `Action`, burst or -1):
        from the use of save `used` on, save `save` may go as soon as it is there, and returns with that burst.
    """
    numbers = np.full(len(actions), -1, dtype=np.int32)
    burst: dict[int, int] = {}  # by the op before which it runs
    seen: set[int] = set()
    for storage, _, back in made.away:
        save = save_index.get(storage)
        if save is None or save in seen or save >= len(actions):
            continue
        seen.add(save)
        if actions[save] == Action.EVICT:
            numbers[save] = burst.setdefault(back, len(burst))
    uses = _Uses.of(trace, save_index)
    again: list[tuple[int, int, int, int]] = []
    for storage, action, after, back in made.again:
        save = save_index.get(storage)
        at = uses.before(after)
        if save is None or save >= len(actions) or at < 0:
            continue
        number = burst.setdefault(back, len(burst)) if action == Action.EVICT else -1
        again.append((uses.saves[at], save, int(action), number))
    kept: dict[tuple[int, int], int] = {}
    for size, first, later in made.carried:
        if first in burst and later in burst:
            pair = burst[first], burst[later]
            kept[pair] = kept.get(pair, 0) + size
    rows = [(*pair, size) for pair, size in kept.items()]
    return (
        numbers,
        np.array(rows, dtype=np.int64).reshape(-1, 3),
        np.array(again, dtype=np.int32).reshape(-1, 4),
    )


def in_triggers(
    made: Made,
    trace: Trace,
    save_index: Mapping[int, int],
    actions: np.ndarray[Any, np.dtype[np.uint8]],
    earlier: Mapping[int, int],
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """With the use of which save each save that is offloaded begins to come back: int32, shape (n, 2), (used, save).

    A plan names the op before which the read starts. What a live run can see of ops in backward is which save they ask for:
    the last such use before that op, or as many uses earlier as the feedback of late ones says (Capuchin, section 4.4, moves
    a trigger by 5 % of the swap time).

    Args:
        made: the decisions.
        trace: the pass they are for.
        save_index: of each storage that autograd saved in it, its place among what the pass saved.
        actions: of each save, from `decisions`.
        earlier: of a save: by how many uses its trigger has moved.
    """
    uses = _Uses.of(trace, save_index)
    pairs: list[tuple[int, int]] = []
    seen: set[int] = set()
    for storage, _, back in sorted(made.away, key=lambda a: a[2]):
        save = save_index.get(storage)
        if save is None or save in seen or save not in uses.position or save >= len(actions):
            continue
        seen.add(save)
        if actions[save] != Action.OFFLOAD:
            continue
        at = min(bisect_left(uses.ops, back), uses.position[save]) - 1 - earlier.get(save, 0)
        if uses.position[save] > 0:
            pairs.append((uses.saves[max(0, at)], save))
    for storage, action, after, back in made.again:
        save = save_index.get(storage)
        if action == Action.OFFLOAD and save is not None and save < len(actions):
            gone = uses.before(after)  # it has to leave first
            at = max(bisect_left(uses.ops, back) - 1 - earlier.get(save, 0), gone + 1)
            if gone >= 0 and at < len(uses.saves):
                pairs.append((uses.saves[at], save))
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)
