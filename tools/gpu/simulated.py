"""A simulation of a GPU: its figures go in, and its trace records a training in virtual time.

It is the tests' double of the CUDA driver; `tests/driver/virtual_time.h` describes it and its limits.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

KERNELS, OUT, IN, HOST, WAITS = range(1, 6)
BY_HOST, BY_WAIT = 0, 1
_BYTES, _PER_BYTE = ("memory", "out", "in", "pageable_out", "pageable_in"), ("host_alloc", "host_register")
"""Figures that are bytes a second, and seconds a byte."""
COUNTED = {
    "maps": ("cuMemMap",),
    "unmaps": ("cuMemUnmap",),
    "drains": ("cuStreamSynchronize", "cuCtxSynchronize"),
    "event waits": ("cuEventSynchronize",),
    "queries": ("cuEventQuery", "cuStreamQuery"),
    "copies": ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"),
    "pageable bytes": ("pageable bytes",),
}
"""Events that a step may have only so often, by the double's own counters."""


class Simulation:
    """The double, with virtual time.

    `double`: the loaded library, in the mode `timed`. `figures`: as `figures.read` gives them. `scale`: each tensor
    stands for one of so many times the bytes, twice as wide for 4: a small model then has the proportions of a large
    one. Arithmetic grows with the power of 3/2.
    """

    def __init__(self, double: ctypes.CDLL, figures: Mapping[str, float], scale: float = 1.0) -> None:
        self._double = double
        double.fake_now.restype = ctypes.c_double
        double.fake_trace_rows.restype = double.fake_call_count.restype = ctypes.c_uint64
        double.fake_trace_label.restype = ctypes.c_char_p
        double.fake_set_figure.argtypes = [ctypes.c_char_p, ctypes.c_double]
        for name, value in figures.items():
            power = 1.5 if name.startswith("flops.") else -1 if name in _PER_BYTE else 1 if name in _BYTES else 0
            double.fake_set_figure(name.encode(), value / scale**power)

    def now(self) -> float:
        """Virtual seconds."""
        return float(self._double.fake_now())

    def counts(self) -> Counter[str]:
        """`COUNTED`, since the process began."""
        count = self._double.fake_call_count
        return Counter({name: sum(count(call.encode()) for call in calls) for name, calls in COUNTED.items()})

    def begin(self) -> None:
        """Begins a measurement."""
        self._double.fake_trace(1)
        self._begun, self._counts = self.now(), self.counts()

    def end(self, steps: int) -> dict[str, Any]:
        """The figures of a step, on average since `begin`; the program has waited for the device."""
        ended, counts = self.now(), self.counts()
        counts.subtract(self._counts)
        rows = np.empty((self._double.fake_trace_rows(), 8))
        if len(rows):
            self._double.fake_trace_read(rows.ctypes.data_as(ctypes.POINTER(ctypes.c_double)))
        self._double.fake_trace(0)
        labels = {int(i): self._double.fake_trace_label(int(i)).decode() for i in np.unique(rows[:, [1, 6]])}
        out = summary(rows, labels, ended - self._begun, steps)
        out |= {name: round(value / steps, 2) for name, value in counts.items()}
        return out


Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time, as spans in order that do not overlap."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def length(spans: list[Span]) -> float:
    """Seconds in spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def both(a: list[Span], b: list[Span]) -> float:
    """Seconds that lie in both, each of which has spans in order that do not overlap."""
    seconds, at = 0.0, 0
    for begin, end in a:
        while at < len(b) and b[at][1] <= begin:
            at += 1
        index = at
        while index < len(b) and b[index][0] < end:
            seconds += min(end, b[index][1]) - max(begin, b[index][0])
            index += 1
    return seconds


def strips(rows: dict[str, list[Span]], columns: int = 96) -> list[str]:
    """One line of text per row: how busy it was over time, each character a slice (blank, then . : # for thirds)."""
    spans = [span for row in rows.values() for span in row]
    if not spans:
        return []
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    slice_seconds = (last - first) / columns or 1.0
    lines = []
    for name, row in rows.items():
        shares = [both([(first + i * slice_seconds, first + (i + 1) * slice_seconds)], row) for i in range(columns)]
        marks = (" .:#"[min(3, math.ceil(3 * share / slice_seconds - 1e-6))] for share in shares)
        lines.append(f"{name:<8}|{''.join(marks)}|")
    lines.append(f"{'':<8} {1e3 * (last - first):.1f} ms")
    return lines


def summary(rows: np.ndarray[Any, Any], labels: Mapping[int, str], seconds: float, steps: int) -> dict[str, Any]:
    """The figures of a step in a trace.

    Returns, of a step on average: `ops`, its kernels; `out_bytes` and `in_bytes`. Seconds: `step`, `kernels`, copies
    `out` and `in`, `host` (at work), `host_waits`, `ideal` (the longest of kernels and both copies),
    `out_under_kernels`, `in_under_kernels`, calls that `map` and `unmap` pages, `idle` of the kernels' engine by
    reason. The largest by kind: `host_by_call`, `waits_by_call`, `kernels_by_op`. `lead`: how long a kernel waits
    between its launch and its begin. `overlap`: of the shorter of copies and kernels, the share that lies under the
    other. `link_use`: the busier way's share of the step. `rows`: engine, label, begin, end, issued, bound, label of
    the work that was waited for, bytes. `seconds`: of all steps.
    """
    engine = rows[:, 0].astype(int)
    kernels = rows[engine == KERNELS]
    spans = {which: union(map(tuple, rows[engine == which, 2:4].tolist())) for which in (KERNELS, OUT, IN)}
    busy = {which: length(spans[which]) for which in spans}
    shorter = sum(min(busy[way], busy[KERNELS]) for way in (OUT, IN))
    under = {way: both(spans[way], spans[KERNELS]) for way in (OUT, IN)}
    hidden = sum(under.values())
    idle: Counter[str] = Counter()
    order = kernels[np.argsort(kernels[:, 2])] if len(kernels) else kernels
    for before, after in zip(order, order[1:], strict=False):
        gap = after[2] - before[3]
        if gap > 0:
            why = (
                "host"
                if after[5] == BY_HOST
                else f"waits for {labels[int(after[6])]}"
                if after[5] == BY_WAIT
                else "order"
            )
            idle[why] += gap

    def by_call(which: int) -> dict[str, float]:
        found: Counter[str] = Counter()
        for row in rows[engine == which]:
            found[labels[int(row[1])]] += row[3] - row[2]
        return {name: round(float(value) / steps, 6) for name, value in found.most_common(8)}

    each = {"step": seconds, "kernels": busy[KERNELS], "out": busy[OUT], "in": busy[IN]}
    each["host"] = float((rows[engine == HOST, 3] - rows[engine == HOST, 2]).sum())
    each["host_waits"] = float((rows[engine == WAITS, 3] - rows[engine == WAITS, 2]).sum())
    each["ideal"] = max(busy.values())
    each["out_under_kernels"], each["in_under_kernels"] = under[OUT], under[IN]
    taking, giving = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemRelease"), ("cuMemUnmap",)
    for name, calls in (("map", taking), ("unmap", giving)):
        these = rows[(engine == HOST) & np.isin(rows[:, 1], [i for i, label in labels.items() if label in calls])]
        each[name] = float((these[:, 3] - these[:, 2]).sum())
    out: dict[str, Any] = {name: round(value / steps, 6) for name, value in each.items()}
    out["overlap"] = round(hidden / shorter, 3) if shorter > 0 else None
    out["link_use"] = round(max(busy[OUT], busy[IN]) / seconds, 3) if seconds > 0 else None
    out["lead"] = round(float((kernels[:, 2] - kernels[:, 4]).mean()), 6) if len(kernels) else None
    out["idle"] = {why: round(float(value) / steps, 6) for why, value in idle.most_common(6)}
    out["host_by_call"], out["waits_by_call"], out["kernels_by_op"] = by_call(HOST), by_call(WAITS), by_call(KERNELS)
    out["ops"] = round(len(kernels) / steps, 2)
    out |= {f"{name}_bytes": int(rows[engine == way, 7].sum() / steps) for name, way in (("out", OUT), ("in", IN))}
    return out


def text(figure: Mapping[str, Any]) -> str:
    """A line."""
    ms = {
        name: f"{1e3 * figure[name]:.2f}"
        for name in ("step", "kernels", "out", "in", "host", "host_waits", "ideal", "lead")
    }
    idle = ", ".join(f"{why} {1e3 * seconds:.2f}" for why, seconds in figure["idle"].items())
    return (
        f"step {ms['step']} ms, ideal {ms['ideal']} (kernels {ms['kernels']}, out {ms['out']}, in {ms['in']}), "
        f"host {ms['host']} + waits {ms['host_waits']}, lead {ms['lead']}, overlap {figure['overlap']}, "
        f"link {figure['link_use']}; idle: {idle or 'none'}; maps {figure['maps']:.0f} drains {figure['drains']:.1f} "
        f"queries {figure['queries']:.0f} for {figure['ops']:.0f} kernels, pageable {figure['pageable bytes']:.0f} B"
    )
