"""The search for a budget: predicted by the simulator, then run, and then predicted with the costs that the run has shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace

from memmgr.config.sizes import round_up, show_size
from memmgr.policies.plan.knee import SHARES, knee
from memmgr.policies.trace import Trace
from memmgr.policies.trace.smooth import smoothed
from memmgr.tools.common.outlook import Outlook, outlook
from memmgr.tools.common.rates import DEVICES
from memmgr.tools.common.sweep import no_worse
from memmgr.tools.tune.runner import Measured

MOST_RUNS = 5
"""Budgets that are run at most. Where predictions stay too low each step up is twice the one before: five reach the need."""
STEP = 5
"""Per cent of the need between two budgets that may be run."""

FIRST = 50
"""The share that is run first, at least. Predictions that no run has corrected are too low, most of all in small budgets."""

_TENTHS = tuple(range(100, 0, -10))


@dataclass(frozen=True)
class At:
    """One budget of the curve."""

    share: int  # of the need, in per cent
    budget_bytes: int  # the budget
    # time of a pass over one without memmgr: simulated, corrected by all runs; None: no plan was found
    predicted: float | None
    lower_bound: float | None  # no schedule is faster; None: not known
    run: Measured | None = None  # None: it was not run
    before: float | None = None  # the prediction from before its run; None: it was not run, or no plan was found

    @property
    def measured(self) -> float | None:
        """The same ratio of its run; None: it was not run, or failed."""
        return None if self.run is None else self.run.factor


@dataclass
class Tuned:
    """The curve and the proposal; the fields of --json."""

    need_bytes: int  # of a pass without a budget
    seconds: float  # of a pass without memmgr, as measured
    most: float  # the largest slowdown that was asked for
    curve: list[At] = field(default_factory=list)  # budgets, the largest first
    proposal: At | None = None  # the budget that is proposed; None: none is
    device_bytes: int | None = None  # free memory of this machine; None: an accelerator's
    in_turns: bool = True  # runs under a budget and runs without memmgr took turns

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class _Correction:
    """The difference between the simulator and a run. Time that the simulator does not see is about the same in all budgets. Time
    that is not lost, as where copies find an idle core, is a share of the simulated one.
    """

    times: float = 1.0
    plus: float = 0.0

    @staticmethod
    def of(simulated: float, measured: float) -> _Correction:
        """Both: extra time of a pass over the time of one without memmgr."""
        if measured >= simulated:
            return _Correction(plus=measured - simulated)
        return _Correction(times=max(0.0, measured) / simulated)


class Curve:
    """The predicted slowdown by budget: the simulator's, corrected by the runs.

    `base`: the slowdown without a limit, as measured. `say`: gets a line before budgets are simulated. `need_bytes`: the peak
    without a limit, as measured; None: the recorded pass's, in which an op's inputs live until its end.
    """

    def __init__(self, trace: Trace, base: float, say: Callable[[str], None], need_bytes: int | None = None) -> None:
        self._trace = smoothed(trace)
        self._say = say
        self._base = base
        self._link = trace.links[0] if trace.links else None
        self._found: dict[int, Outlook] = {}
        self._runs: dict[int, float] = {}  # measured slowdowns by share
        self.need_bytes = need_bytes or trace.unmanaged_peak[0]

    def at(self, share: int) -> Outlook:
        """The simulator's outlook, made once. `share`: of the need, in per cent."""
        if not self._found:
            self._say("simulates budgets")
        if share not in self._found:
            self._found[share] = outlook(self._trace, self._bytes(share), self._link)[0]
        return self._found[share]

    def learn(self, share: int, found: Measured) -> None:
        """Predictions from now on have the link that a run has measured (the recorded pass moved nothing, so it was idle), and
        agree with the run.
        """
        assert found.factor is not None
        self._runs[share] = found.factor
        self._link = found.link or self._link
        self._found.clear()

    def factor(self, share: int) -> float | None:
        """Time of a pass over that of one without memmgr; None: no plan was found.

        `share`: of the need, in per cent.
        """
        extra = self._extra(share)
        if extra is None or share >= 100:
            return None if extra is None else self._base
        made = self._correction(share)
        return self._base + made.times * extra + made.plus

    def _extra(self, share: int) -> float | None:
        overhead = self.at(share).overhead
        return None if overhead is None else overhead - 1

    def _correction(self, share: int) -> _Correction:
        """Between two runs, or a run and the whole need, a straight line; below the smallest run its own."""
        known = {100: _Correction()}
        for run, measured in self._runs.items():
            if (extra := self._extra(run)) is not None:
                known[run] = _Correction.of(extra, measured - self._base)
        low = max((run for run in known if run <= share), default=min(known))
        high = min(run for run in known if run >= share)
        part = (share - low) / (high - low) if high > low else 0.0
        below, above = known[low], known[high]
        return _Correction(
            below.times + part * (above.times - below.times), below.plus + part * (above.plus - below.plus)
        )

    def knee(self, most: float) -> int:
        """The smallest share, in per cent, at which a pass is predicted to take at most `most` times as long."""
        by_bytes = {self._bytes(share): share for share in SHARES}
        found = knee(self.need_bytes, lambda budget_bytes: self.factor(by_bytes[budget_bytes]), most)
        return by_bytes.get(found.budget_bytes, 100)

    def _bytes(self, share: int) -> int:
        return self.need_bytes * share // 100

    def points(self, more: Iterable[int]) -> list[At]:
        """The tenths of the need and `more` shares, the largest first. A plan of a smaller budget is a plan of a larger one."""
        shares = sorted({*_TENTHS, *more}, reverse=True)
        own = [self.factor(share) for share in shares]
        best = no_worse(own)
        return [
            At(share, self._bytes(share), own[k], self.at(share).lower_bound)
            for share, k in zip(shares, best, strict=True)
        ]


def propose(curve: Curve, most: float, run: Callable[[int, str], Measured]) -> tuple[list[At], At | None]:
    """Runs half of the need, or the knee where that is more: the smallest budget that is predicted to hold. With the corrected
    predictions the knee is looked for again, between the smallest budget that held and the largest that did not, until it stays
    within 5 % of the need. Where no run held and no knee is left, the budget grows by 5 % of the need, by 10, 20 and so on.

    Returns the curve with the runs in it, and the proposal. The proposal is None where no run holds, and where nothing
    below the whole need is predicted to hold. `most`: the largest slowdown. `run`: runs the script under so many bytes;
    its second argument names the budget for a reader.
    """
    tried: dict[int, At] = {}
    good, bad = 100, 0  # the smallest share that held, the largest that did not
    share = max(curve.knee(most), FIRST)
    while bad < share < good and len(tried) < MOST_RUNS:
        budget_bytes = round_up(curve.need_bytes * share // 100)
        name = f"{share} % of the need, {show_size(budget_bytes)} (budget {len(tried) + 1} of at most {MOST_RUNS})"
        before = curve.factor(share)
        found = run(budget_bytes, name)
        tried[share] = At(share, budget_bytes, None, None, found, before)
        if found.factor is not None:
            curve.learn(share, found)
        if found.factor is not None and found.factor <= most:
            good = share
        else:
            bad = share
        share = curve.knee(most)
        if good == 100 and not bad < share < 100:
            share = min(bad + STEP * 2 ** (len(tried) - 1), 100 - STEP)  # the largest is not all of the need
        elif good < 100:
            share = max(share, bad + STEP) if share < good - STEP else good
    points = [_with_run(at, tried.get(at.share)) for at in curve.points(tried)]
    return points, next((at for at in points if at.share == good and at.share < 100), None)


def _with_run(at: At, run: At | None) -> At:
    return at if run is None else replace(run, predicted=at.predicted, lower_bound=at.lower_bound)


def device_sizes(need_bytes: int) -> list[tuple[int, str]]:
    """Memory of the devices that have at least a twentieth of the need and at most all of it, with their names."""
    named: dict[int, list[str]] = {}
    for rates in DEVICES.values():
        named.setdefault(rates.memory_bytes, []).append(rates.name)
    return [
        (size, f"{show_size(size, binary=size % 2**30 == 0)}: {', '.join(names)}")
        for size, names in sorted(named.items())
        if need_bytes // 20 <= size <= need_bytes
    ]
