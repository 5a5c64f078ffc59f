"""The search for a budget: predicted by the simulator, and then run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace

from memmgr.config.sizes import round_up, show_size
from memmgr.policies.plan.knee import SHARES, knee
from memmgr.policies.trace import TierLink, Trace
from memmgr.tools.common.outlook import Outlook, outlook
from memmgr.tools.common.rates import DEVICES
from memmgr.tools.common.sweep import no_worse
from memmgr.tools.tune.runner import Measured

MOST_RUNS = 5
"""Budgets that are run at most. Where predictions stay too low each step up is twice the one before: five reach the need."""
STEP = 5
"""Per cent of the need between two budgets that may be run."""

_TENTHS = tuple(range(100, 0, -10))


@dataclass(frozen=True)
class At:
    """One budget of the curve."""

    share: int  # of the need, in per cent
    budget_bytes: int  # the budget
    # time of a pass over one without a budget, by the simulator with the link and the cost of an op that the runs have
    # measured; None: no plan was found
    simulated: float | None
    lower_bound: float | None  # no schedule is faster; None: not known
    measured: float | None = None  # the same ratio of a run; None: it was not run, or failed
    passes: int = 0  # that were measured
    why: str = ""  # a run without a figure
    processor: float | None = None  # as `measured`, of the processor's time, without waiting; None: not known
    predicted: float | None = None  # `simulated` as it was before this budget was run; None: it was not run


REFUTED = 1.1


@dataclass
class Tuned:
    """The curve and the proposal; the fields of --json."""

    need_bytes: int  # of a pass without a budget
    seconds: float  # of a pass without memmgr, as measured
    most: float  # the largest slowdown that was asked for
    curve: list[At] = field(default_factory=list)  # budgets, the largest first
    proposal: At | None = None  # the budget that is proposed; None: none is
    knee_share: int = 100  # the share that the simulator proposes after the runs, in per cent
    device_bytes: int | None = None  # free memory of this machine; None: an accelerator's
    noise: float = 1.0  # the slowest of the runs without memmgr over the fastest; 1 on a machine that does nothing else

    @property
    def refuted_share(self) -> int:
        """The largest share at which a run took over `REFUTED` times as long as predicted: predictions of smaller budgets are too
        low as well. 0: there is none.
        """
        runs = ((at.share, at.measured, at.simulated) for at in self.curve)
        return max((share for share, took, said in runs if took and said and took > REFUTED * said), default=0)

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


class Curve:
    """The simulated slowdown by budget. `say`: gets a line before each budget."""

    def __init__(self, trace: Trace, say: Callable[[str], None]) -> None:
        self._trace = trace
        self._say = say
        self._link = trace.links[0] if trace.links else None
        self._own = 0.0  # of a pass, for the pager's own work, over the time of a pass
        self._found: dict[int, Outlook] = {}
        self.need_bytes = trace.unmanaged_peak[0]

    def at(self, budget_bytes: int) -> Outlook:
        """The prediction of one budget, made once."""
        if not self._found:
            self._say("simulates budgets")
        if budget_bytes not in self._found:
            self._found[budget_bytes] = outlook(self._trace, budget_bytes, self._link)[0]
        return self._found[budget_bytes]

    def learn(self, link: TierLink | None, own_seconds: float) -> None:
        """Predictions from now on have the costs that a run has measured: the recorded pass moved nothing, so the link was idle.

        `link`: as measured beside the passes; None: the recorded one stays. `own_seconds`: of a pass, for the pager's
        own work.
        """
        self._link = link or self._link
        self._own = own_seconds / self._trace.seconds
        self._found.clear()

    def factor(self, share: int) -> float | None:
        """Time of a pass over that of one without a budget; None: no plan was found.

        `share`: of the need, in per cent.
        """
        return self._factor(self._bytes(share))

    def _factor(self, budget_bytes: int) -> float | None:
        overhead = self.at(budget_bytes).overhead
        return None if overhead is None else overhead + (self._own if budget_bytes < self.need_bytes else 0.0)

    def knee(self, most: float) -> int:
        """The smallest share, in per cent, at which a pass is predicted to take at most `most` times as long."""
        found = knee(self.need_bytes, self._factor, most)
        return next((share for share in SHARES if self._bytes(share) == found.budget_bytes), 100)

    def _bytes(self, share: int) -> int:
        return self.need_bytes * share // 100

    def points(self, more: Iterable[int]) -> list[At]:
        """The tenths of the need and `more` shares, the largest first. A plan of a smaller budget is a plan of a larger one."""
        shares = sorted({*_TENTHS, *more}, reverse=True)
        own = [self.factor(share) for share in shares]
        best = no_worse(own)
        return [
            At(share, self._bytes(share), own[k], self.at(self._bytes(share)).lower_bound)
            for share, k in zip(shares, best, strict=True)
        ]


def propose(curve: Curve, most: float, run: Callable[[int, str], Measured]) -> tuple[list[At], At | None, int]:
    """Runs the knee. Where that is slower than asked for, the knee is looked for again with the costs that the run has measured;
    where the new one is not larger, the budget grows by 5 % of the need, by 10, 20 and so on.

    Returns the curve with the runs in it, the proposal, and the last knee in per cent of the need. The proposal is None
    where no run holds, and where nothing below the whole need is predicted to hold. `most`: the largest slowdown.
    `run`: runs the script under so many bytes; its second argument names the budget for a reader.
    """
    tried: dict[int, At] = {}
    proposal: At | None = None
    share = curve.knee(most)
    for step in range(MOST_RUNS):
        if share >= 100:
            break
        budget_bytes = round_up(curve.need_bytes * share // 100)
        predicted = curve.factor(share)
        name = f"{share} % of the need, {show_size(budget_bytes)} (budget {step + 1} of at most {MOST_RUNS})"
        found = run(budget_bytes, name)
        made = tried[share] = At(
            share,
            budget_bytes,
            simulated=predicted,
            lower_bound=None,
            measured=found.slowdown,
            passes=found.passes,
            why=found.why,
            processor=found.processor,
            predicted=predicted,
        )
        if found.slowdown is not None:
            curve.learn(found.link, found.own_seconds)
        if found.slowdown is not None and found.slowdown <= most:
            proposal = made
            break
        above = share + STEP * 2**step
        if share < 100 - STEP < above:
            above = 100 - STEP  # the largest budget that is not all of the need
        knee_share = curve.knee(most)
        share = knee_share if knee_share > share else above
    last_knee = curve.knee(most)
    points = [_with_run(at, tried.get(at.share)) for at in curve.points({*tried, last_knee})]
    if proposal is not None:
        proposal = next(at for at in points if at.share == proposal.share)
    return points, proposal, last_knee


def _with_run(at: At, run: At | None) -> At:
    return at if run is None else replace(run, simulated=at.simulated, lower_bound=at.lower_bound)


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
