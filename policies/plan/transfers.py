"""When transfers happen: the clock of a timeline with a link, and the moves that hide transfers behind compute.

A storage that is read back anywhere is written once, right after it was first made: its bytes never change (a cell is
one version), so one copy serves every read. Writes and reads are two queues, each in the order of the events. Freeing a
storage whose copy is still being written waits; an op waits for the reads of its inputs. A `Timeline` alone (reads at the
last moment, frees at the first) keeps the budget but waits a lot; `hide` spends the room that is left on waiting less.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from memmgr.policies.trace import TierLink

from .timeline import Timeline


@dataclass(frozen=True)
class Clock:
    """The times of a timeline with a link.

    Attributes:
        seconds: its whole time, with waits and with the time that copies take from the CPU that ops run on.
        begins: per key, when its event begins (reads back: when the read is asked for).
        written: per storage with a copy, when the copy is complete.
    """

    seconds: float
    begins: dict[int, float]
    written: dict[int, float]


def clock(t: Timeline, link: TierLink, *, waiting: bool = True) -> Clock:
    """Plays the timeline. Time goes on at ops, at reads that an op waits for and at writes that a free waits for.

    Without `waiting` only at ops: when things would happen if transfers hid completely.
    """
    p = t.problem
    reads = [q % t.stride for q in t.keys if q % t.stride < t.first]
    back = set(reads)
    ends: dict[int, list[int]] = {}
    for s, _, end in t.intervals():
        if s in back:
            ends.setdefault(end, []).append(s)
    now = write_free = read_free = 0.0
    begins: dict[int, float] = {}
    written: dict[int, float] = {}
    ready: dict[int, float] = {}
    for q in t.keys:
        op = t.op(q)
        if op < 0:
            s = q % t.stride
            begins[q] = now
            read_free = max(now, read_free, written[s]) + link.latency_seconds + p.size[s] / link.read_bytes_per_second
            ready[s] = read_free
        else:
            own = op == t.stage(q)
            wanted = p.held if op == p.n_ops else p.inputs[op]
            for s in wanted:
                if s in ready:
                    now = max(now, ready.pop(s)) if waiting else now
                if own and op < p.n_ops and p.written[s] == op and waiting:  # its block cannot be handed on before
                    now = max(now, written.get(s, 0.0))
            begins[q] = now
            if op < p.n_ops:
                now += p.cost[op]
                for s in p.outputs[op]:
                    ready.pop(s, None)
                    if own and s in back:
                        write_free = max(now, write_free) + link.latency_seconds
                        write_free += p.size[s] / link.write_bytes_per_second
                        written[s] = write_free
        for s in ends.get(q, ()) if waiting else ():
            now = max(now, written[s])
    copied = sum(p.size[s] for s in reads) + sum(p.size[s] for s in back)
    return Clock(now + copied * link.cpu_seconds_per_byte, begins, written)


def hide(t: Timeline, link: TierLink, budget_bytes: int, rounds: int = 2) -> Clock:
    """Frees later and reads earlier where there is room, until transfers hide or room ends; returns the clock after it."""
    for _ in range(rounds):
        # A wait moves all later events. A copy that aims at the event's time without waits removes the wait.
        _free_later(t, clock(t, link, waiting=False), budget_bytes)
        _read_earlier(t, clock(t, link, waiting=False), link, budget_bytes)
    return clock(t, link)


def _free_later(t: Timeline, timing: Clock, budget_bytes: int) -> None:
    own = t.own
    starts = [timing.begins[q] for q in own]
    for s, done in sorted(timing.written.items(), key=lambda item: item[1]):
        made = t.made[s]
        if len(made) < 2:
            continue
        end = t.reach(s, made[1])
        stage = min(bisect_left(starts, done), len(own) - 1)
        stop = min(own[stage], t.own[max(t.stage(made[1]) - 1, 0)])
        if stop <= end:
            continue
        low, high = bisect_right(t.keys, end), bisect_right(t.keys, stop)
        full = np.nonzero(t.profile[low:high] + t.problem.size[s] > budget_bytes)[0]
        if full.size:
            high = low + int(full[0])
        if high > low:
            last = t.keys[high - 1]
            whole = t.own[t.stage(last)]
            last = whole if whole <= last else t.own[t.stage(last) - 1] if t.stage(last) else -1
            if last > end:
                t.hold(s, last)


def _read_earlier(t: Timeline, timing: Clock, link: TierLink, budget_bytes: int) -> None:
    p, own = t.problem, t.own
    starts = [timing.begins[q] for q in own]
    reads = []
    for q in t.keys:
        if q % t.stride < t.first:
            s = q % t.stride
            uses = t.uses[s]
            a = bisect_left(uses, q)
            if a < len(uses):
                reads.append((uses[a], q))
    due = float("inf")
    for use, q in sorted(reads, reverse=True):
        s = q % t.stride
        due = min(due, timing.begins[use])
        due -= link.latency_seconds + p.size[s] / link.read_bytes_per_second
        begin = max(due, timing.written[s])
        stage = max(bisect_right(starts, begin) - 1, 0)
        made = t.made[s]
        end = t.reach(s, q)
        stage = max(stage, t.stage(end) + 1)
        goal = (stage * t.rows + t.rows - 1) * t.stride + s
        if goal >= q or made[bisect_left(made, q) - 1] >= goal:
            continue
        low, high = bisect_left(t.keys, goal), bisect_left(t.keys, q)
        full = np.nonzero(t.profile[low:high] + p.size[s] > budget_bytes)[0]
        if full.size:
            after = t.keys[low + int(full[-1])]
            goal = ((t.stage(after) + 1) * t.rows + t.rows - 1) * t.stride + s
            if goal >= q:
                continue
        t.remove(q)
        t.add(goal)
        if t.peak > budget_bytes:
            t.remove(goal)
            t.add(q)
