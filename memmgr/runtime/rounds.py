"""After how many backwards a program repeats itself: gradients that accumulate, micro-batches of a pipeline, networks in turn.

A plan is for a period that recurs. Tensors that several backwards make together are held from one to the next, and the
next backward is a different one. A plan for each alone has to begin and end with all of them in memory. If that does
not fit, a period spans the round.

Where single backwards with most of the ops follow plans of their own, no period spans them. An epoch is an example: a loader that
reads ahead gets two batches in its first step, none in its last one, and one in each step between.
"""

from __future__ import annotations

from collections import deque

TIMES = 4  # that a round has been met, so that its periods may have plans of their own
MOST_BACKWARDS = 64  # of a round
MOST_OPS = 5000  # of a round; a plan for more is seldom there in time
MOST_DONE = 2 / 3  # of the ops of a round, in periods that follow plans of their own
MOST_MISSES = 3  # rounds in a row that are like none before: the program does something else
MOST_KNOWN = 256  # rounds that are known again


class Rounds:
    """Which backward ends a period. Not for several threads at once."""

    def __init__(self) -> None:
        self._times = TIMES  # more once one was none
        self._met: deque[int] = deque(maxlen=MOST_BACKWARDS)  # hashes
        self._alike: list[int] = []  # by n, how many in a row came n before, too
        self._about: dict[int, tuple[int, bool]] = {}  # by hash: ops, and whether it was done when it came last
        self._found = 1
        self._known: set[int] = set()
        self._repeated = False
        self.forget()

    def forget(self) -> None:
        """Back to one period for each backward, until a round is found again."""
        self.backwards = 1
        self._since = 0
        self._wait: int | None = None
        self._missed = 0
        self._alike = [0] * (MOST_BACKWARDS + 1)
        self._met.clear()
        self._about.clear()

    def refuse(self) -> None:
        """No plan fits the round: its periods do better alone."""
        self._times *= 2
        self.forget()

    def ends(self) -> bool:
        """A backward has ended: whether the period does."""
        self._since += 1
        return self._since >= self.backwards

    def ended(self, ops_hash: int, ops: int, done: bool = False) -> None:
        """The period that did. `ops_hash`: of all that it did. `done`: as a plan has it, to the end."""
        self._since = 0
        if self.backwards > 1:
            self._judge(ops_hash)
            return
        for n, met in enumerate(reversed(self._met), 1):
            self._alike[n] = self._alike[n] + 1 if met == ops_hash else 0
        self._met.append(ops_hash)
        if ops_hash not in self._about and len(self._about) >= MOST_KNOWN:  # hardly any comes again
            still = set(self._met)
            self._about = {met: about for met, about in self._about.items() if met in still}
        self._about[ops_hash] = ops, done
        if self._wait is None:
            self._find()
        else:
            self._wait -= 1
        if self._wait == 0:
            self.backwards = self._found
            self._known.clear()
            self._repeated = False

    def _judge(self, ops_hash: int) -> None:
        if ops_hash in self._known:
            self._missed, self._repeated = 0, True
            return
        if len(self._known) < MOST_KNOWN:
            self._known.add(ops_hash)
        self._missed += 1
        if self._missed == MOST_MISSES:
            self.forget() if self._repeated else self.refuse()

    def _find(self) -> None:
        # A round has two that differ.
        for n in range(self._alike[1] + 2, MOST_BACKWARDS + 1):
            if self._alike[n] < n * (self._times - 1):
                continue
            last = list(self._met)[-n:]
            about = [self._about[ops_hash] for ops_hash in last]
            ops = [ops for ops, _ in about]
            if sum(ops) <= MOST_OPS and sum(ops for ops, done in about if done) < MOST_DONE * sum(ops):
                self._found = n
                self._wait = ops.index(max(ops))  # the longest begins: the one with the step, or with all forwards
            return
