"""One training pass over a chain of cells, on a made-up clock: enough to compare policies, no forecast of seconds.

Forward makes cell i in `cost[i]`; backward needs cells i and i-1 at step i, in reverse, and takes twice the cost. The
link writes and reads in the background, in order. Copies cost compute `cpu` seconds a byte. Recipes need the cell
before.
"""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from memmgr.policies import Action, Candidates, Link, Policy, Upcoming, parse_policy, rank


@dataclass
class Model:
    size: np.ndarray
    cost: np.ndarray


def gpt(layers: int = 8, scale: float = 1.0) -> Model:
    """12 saved cells a layer: norms and GELU are cheap per byte, matmuls and attention are not."""
    mb, ns = 1e6, 1e-9
    unit = 6 * mb * scale
    # (size in units, ns per byte): norm, q, k, v, attention, proj, add, norm, fc1, gelu, fc2, add
    layer = [
        (1, 0.5),
        (1, 2.5),
        (1, 2.5),
        (1, 2.5),
        (1, 6),
        (1, 2.5),
        (1, 0.4),
        (1, 0.5),
        (4, 2.5),
        (4, 0.8),
        (1, 9),
        (1, 0.4),
    ]
    size = np.array([s * unit for s, _ in layer] * layers)
    return Model(size.astype(np.int64), size * np.array([c for _, c in layer] * layers) * ns)


def convnet(blocks: int = 20) -> Model:
    """conv, norm, relu; sizes halve and the cost per byte of a convolution doubles three times."""
    size, cost = [], []
    for b in range(blocks):
        stage = 4 * b // blocks
        s = 16e6 / 2**stage
        for per_byte in (2.0 * 2**stage, 0.6, 0.3):
            size.append(s)
            cost.append(s * per_byte * 1e-9)
    return Model(np.array(size).astype(np.int64), np.array(cost))


@dataclass
class Run:
    model: Model
    policy: Policy
    link: Link
    budget: int
    belief: float = 1.0  # the bandwidth that the policies assume, over the real one
    now: float = 0.0
    recompute_seconds: float = 0.0
    stall_seconds: float = 0.0
    evictions: int = 0
    offloads: int = 0
    peak: int = 0
    resident: set[int] = field(default_factory=set)
    below: set[int] = field(default_factory=set)
    access: dict[int, float] = field(default_factory=dict)

    def run(self) -> float:
        m, n = self.model, len(self.model.size)
        self.bytes = 0
        self.writes: deque[tuple[int, float]] = deque()  # cell, end
        self.reads: dict[int, float] = {}
        self.write_free = self.read_free = 0.0
        self.dead: set[int] = set()
        self.backward = False
        self.virtual = 0.0
        forward = float(m.cost.sum())
        self.left = forward
        self.step = n
        for i in range(n):
            self.compute(i, pin={i, i - 1})
            self.left -= float(m.cost[i])
            self.write_early({i, i - 1})
        self.backward = True
        for i in reversed(range(n)):
            self.step = i
            pin = {i, i - 1} - {-1}
            self.prefetch()
            for j in sorted(pin):
                self.want(j, pin)
            self.spend(2 * float(m.cost[i]))
            self.drop(i)
            self.dead.add(i)
        return self.now

    # compute
    def spend(self, seconds: float) -> None:
        self.now += seconds
        self.virtual += seconds

    def stall(self, until: float) -> None:
        if until > self.now:
            self.stall_seconds += until - self.now
            self.now = until

    def compute(self, i: int, pin: set[int]) -> None:
        self.room(int(self.model.size[i]), pin)
        self.spend(float(self.model.cost[i]))
        self.hold(i)

    def want(self, i: int, pin: set[int]) -> None:
        if i in self.reads:
            self.stall(self.reads.pop(i))
        elif i not in self.resident and i in self.below:
            self.room(int(self.model.size[i]), pin)
            self.hold(i)
            self.stall(self.read(i))
        elif i not in self.resident:
            chain = [i]
            while chain[0] > 0 and chain[0] - 1 not in self.resident | self.below:
                chain.insert(0, chain[0] - 1)
            for j in chain:
                if j > 0:
                    self.want(j - 1, pin | {j, j - 1})
                self.recompute_seconds += float(self.model.cost[j])
                self.compute(j, pin | {j, j - 1})
        self.access[i] = self.virtual

    # memory
    def hold(self, i: int) -> None:
        self.resident.add(i)
        self.bytes += int(self.model.size[i])
        self.peak = max(self.peak, self.bytes)
        self.access[i] = self.virtual

    def drop(self, i: int) -> None:
        if i in self.resident:
            self.resident.remove(i)
            self.bytes -= int(self.model.size[i])

    def settle(self) -> None:
        while self.writes and self.writes[0][1] <= self.now:
            self.below.add(self.writes.popleft()[0])

    def columns(self, pin: set[int]) -> tuple[list[int], Candidates]:
        self.settle()
        going = {c for c, _ in self.writes}
        ids = sorted(self.resident - pin - going - set(self.reads))
        m = self.model
        cost = m.cost[ids] if ids else np.zeros(0)
        chain = []
        for i in ids:
            total, j = 0.0, i - 1
            while j >= 0 and j not in self.resident and j not in self.below:
                total += float(m.cost[j])
                j -= 1
            chain.append(total)
        if ids:
            until = (0.0 if self.backward else self.left) + self.after_turn()[ids]
        else:
            until = np.zeros(0)
        return ids, Candidates.build(
            m.size[ids] if ids else np.zeros(0, np.int64),
            staleness_seconds=[self.virtual - self.access[i] for i in ids],
            cost_seconds=cost,
            chain_seconds=chain,
            clean=[i in self.below for i in ids],
            seconds_until_use=until,
        )

    def after_turn(self) -> np.ndarray:
        """Seconds of backward, at twice forward's pace, before each cell so far is used: the cell saved last comes
        first."""
        cost = self.model.cost[: self.step]
        return 2.0 * (cost[::-1].cumsum()[::-1] - cost)

    def state(self, urgent: bool) -> Link:
        m = self.model
        due = sorted((self.below - self.resident - self.dead) - set(self.reads))
        since = self.after_turn() + (0.0 if self.backward else self.left)
        write_left = max(0.0, self.write_free - self.now) * self.link.write_bytes_per_second
        read_left = max(0.0, self.read_free - self.now) * self.link.read_bytes_per_second
        pace = float(m.size.sum() / m.cost.sum())
        return replace(
            self.link,
            write_bytes_per_second=self.link.write_bytes_per_second * self.belief,
            read_bytes_per_second=self.link.read_bytes_per_second * self.belief,
            queued_write_bytes=int(write_left),
            queued_read_bytes=int(read_left),
            demand_bytes_per_second=1e15 if self.backward else pace,
            slack_seconds=0.0 if urgent else max(0, self.budget - self.bytes) / pace,
            seconds_until_reads=0.0 if self.backward else self.left,
            due_bytes=m.size[due] if due else (),
            due_seconds=since[due] if due else (),
        )

    def room(self, need: int, pin: set[int]) -> None:
        while self.bytes + need > self.budget:
            ids, c = self.columns(pin)
            ranking = rank(
                c, self.policy.filter, self.policy.director, self.state(True), self.bytes + need - self.budget
            )
            if len(ranking) == 0:
                if self.writes:  # bytes that are being written are freed when that ends
                    _, end = self.writes[0]
                    self.stall(end)
                    self.settle()
                    continue
                raise MemoryError(f"{self.bytes + need} > {self.budget}")
            for k, action in zip(ranking.order, ranking.action, strict=True):
                i = ids[int(k)]
                if action == Action.OFFLOAD:
                    self.offloads += 1
                    if i not in self.below:
                        self.stall(self.write(i))
                        self.settle()
                else:
                    self.evictions += 1
                self.drop(i)

    # link
    def write(self, i: int) -> float:
        size = float(self.model.size[i])
        self.now += size * self.link.cpu_seconds_per_byte
        self.write_free = max(self.write_free, self.now) + size / self.link.write_bytes_per_second
        self.writes.append((i, self.write_free))
        return self.write_free

    def read(self, i: int) -> float:
        size = float(self.model.size[i])
        self.now += size * self.link.cpu_seconds_per_byte
        self.read_free = max(self.read_free, self.now) + size / self.link.read_bytes_per_second
        return self.read_free

    def write_early(self, pin: set[int]) -> None:
        ids, c = self.columns(pin)
        link = self.state(False)
        if len(c) == 0:
            return
        # the rest of forward decides how much has to be evicted
        ranking = rank(c, self.policy.filter, self.policy.director, link, None)
        queued = before = link.queued_write_bytes
        for k, action in zip(ranking.order.tolist(), ranking.action.tolist(), strict=True):
            size = int(c.size_bytes[k])
            if before < self.bytes - LOW * self.budget and action == Action.OFFLOAD and not c.clean[k]:
                trickle = self.bytes < HIGH * self.budget and queued
                if trickle and queued + size > QUEUE_SECONDS * link.write_bytes_per_second:
                    break
                self.write(ids[k])
                queued += size
            before += size

    def prefetch(self) -> None:
        for i in [i for i, end in self.reads.items() if end <= self.now]:
            del self.reads[i]
        ids = [i for i in range(self.step, -1, -1) if i in self.below and i not in self.resident and i not in self.dead]
        if not ids:
            return
        pace = 2 * float(self.model.cost[: self.step + 1].mean())
        link = self.state(False)
        head = self.budget - self.bytes - 2 * int(self.model.size.max())
        up = Upcoming.build(self.model.size[ids], self.step - np.array(ids))
        for k in self.policy.prefetcher(up, link, head, pace, link.queued_read_bytes):
            i = ids[int(k)]
            self.hold(i)
            self.reads[i] = self.read(i)


MODELS = {"gpt": gpt(), "convnet": convnet()}
BANDWIDTHS = (50e6, 200e6, 500e6, 1e9, 2e9, 8e9)
CPU = 1 / 3e9  # a core's copy to the page cache
LOW, HIGH = 0.7, 0.9  # of the budget: written early from here on, without limit from there on
QUEUE_SECONDS = 0.1


def go(model: str, policy: str, bandwidth: float, cpu: float, *, share: float = 0.5, belief: float = 1.0) -> Run:
    m = MODELS[model]
    link = Link(bandwidth, bandwidth, cpu_seconds_per_byte=cpu)
    run = Run(m, parse_policy(policy), link, int(share * m.size.sum()), belief)
    run.run()
    assert run.peak <= run.budget
    return run


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.slow), 0.35])  # less memory, more choices
@pytest.mark.parametrize("cpu", [0.0, CPU])
def test_auto_is_within_3_percent_of_the_better_of_evict_and_offload(model: str, share: float, cpu: float) -> None:
    for bandwidth in BANDWIDTHS:
        better = min(go(model, p, bandwidth, cpu, share=share).now for p in ("evict", "offload"))
        assert go(model, "auto", bandwidth, cpu, share=share).now <= 1.03 * better, f"{bandwidth / 1e6} MB/s"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("belief", [0.5, 2.0])
def test_a_bandwidth_wrong_by_two_costs_little(model: str, belief: float) -> None:
    for bandwidth in BANDWIDTHS:
        better = min(go(model, p, bandwidth, CPU).now for p in ("evict", "offload"))
        assert go(model, "auto", bandwidth, CPU, belief=belief).now <= 1.06 * better, f"{bandwidth / 1e6} MB/s"


@pytest.mark.parametrize("model", MODELS)
def test_auto_chooses_differently_on_a_slow_and_a_fast_tier(model: str) -> None:
    slow, fast = go(model, "auto", 50e6, CPU), go(model, "auto", 2e9, CPU)
    assert slow.evictions > 4 * slow.offloads
    assert fast.offloads > 2 * slow.offloads
    assert fast.recompute_seconds < slow.recompute_seconds


@pytest.mark.parametrize("model", MODELS)
def test_each_alone_stays_alone(model: str) -> None:
    assert go(model, "evict", 1e9, CPU).offloads == 0
    assert go(model, "offload", 1e9, CPU).recompute_seconds == 0.0
    assert go(model, "evict", 1e9, CPU).recompute_seconds > 0


def test_prefetching_is_worth_a_fifth_of_the_stall_and_more() -> None:
    ahead = go("gpt", "lru+offload", 1e9, 0.0)
    behind = go("gpt", "lru+offload+off", 1e9, 0.0)
    assert ahead.stall_seconds < 0.8 * behind.stall_seconds
    assert ahead.now < behind.now
