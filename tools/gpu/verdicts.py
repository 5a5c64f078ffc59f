"""Reads the figures of a check: a line for each run, a verdict on each risk, and the next steps.

The F-numbers are of a reading of the device path before its first GPU: F1 copies and compute one after the other, F2 page
traffic, F3 checksums through pageable memory, F4 plans from launch times, F5 page-locking at opening, F6 acts that are cut,
F7 polling, F8 trials that wait, F9 a late import, F10 state that cuDNN writes unseen, F12 a cold probe of the link, F13
steps beside the planner, F16 mapping beside kernels, F21 page ends above the budget. LINK is of none: a link that rests in steps
whose copies take longer than their kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

Line = dict[str, Any]
MIB = 1 << 20
NVML_SHARE, NVML_BYTES = 1.05, 64 * MIB
"""Memory that NVML may see above the budget: pages of the driver's own, and of libraries that load late."""

LINK_SHARE = 0.9


@dataclass(frozen=True)
class Verdict:
    """The verdict on one risk."""

    name: str
    real: bool | None  # the risk is real; None: the figures do not say
    expected: str
    seen: str

    def __str__(self) -> str:
        truth = "unknown" if self.real is None else str(self.real).upper()
        return f"{self.name} {truth} expected {self.expected}; seen {self.seen}"


class Figures:
    """The lines of a check, by act and run."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = list(lines)
        results = [line for line in self.lines if line.get("event") == "result" and "run" in line]
        self.runs: dict[tuple[str, str], Line] = {(line["act"], line["run"]): line for line in results}
        over = [line for line in self.lines if line.get("event") in ("ended", "skipped")]
        self.ends: dict[str, Line] = {line["act"]: line for line in over if "run" not in line}
        self.left_out = [where(line) for line in over if "run" in line]

    def timings(self, *names: str) -> Iterator[Line]:
        """Runs of the timing acts whose names begin with one of these."""
        for (act, name), line in self.runs.items():
            if act.startswith("timing ") and name.startswith(names):
                yield line

    def call(self, name: str) -> Line:
        """The line of that name in the table of driver calls; empty: there is none."""
        return next((line for line in self.lines if line["act"] == "driver calls" and line.get("name") == name), {})

    def plain_step(self, line: Line) -> float:
        """Seconds of a step of the same act without a budget; 0: not measured."""
        return float(self.runs.get((line["act"], "none"), {}).get("step", 0))

    def bits(self, line: Line) -> str:
        """ "same", "OTHER BITS", or nothing where there is no digest to compare with."""
        mine, theirs = line.get("digest"), self.runs.get((line["act"], "none"), {}).get("digest")
        return "" if not mine or not theirs else "same" if mine == theirs else "OTHER BITS"

    def nvml_over(self, line: Line) -> int:
        """Bytes by which NVML's peak passes the budget by more than it may; 0: it holds, or cannot be compared.

        Both peaks are over the start of the act, where no run was yet; the memory of the plain run outside its allocator
        (libraries, code) is subtracted. NVML sees the whole GPU: acts that run at once are not compared.
        """
        plain, budget = self.runs.get((line["act"], "none"), {}), line.get("budget") or 0
        if not line["act"].startswith("timing ") or not 0 < budget < 1 << 50 or not line.get("nvml_peak"):
            return 0
        held = plain.get("reserved_peak") or plain.get("torch_peak")
        if not held:
            return 0
        start = plain["nvml_before"]
        outside = max(0, plain["nvml_peak"] - start - held)
        over = int(line["nvml_peak"] - start - outside - budget)
        return over if over > (NVML_SHARE - 1) * budget + NVML_BYTES else 0


def where(line: Line) -> str:
    """Act and run."""
    return f"{line['act']}, {line['run']}"


def worst(name: str, expected: str, of: Iterable[tuple[float, str, str]], most: float) -> Verdict:
    """From (figure, as words, where): real if the highest is above `most`."""
    found = max(of, default=None)
    if found is None:
        return Verdict(name, None, expected, "no such run")
    return Verdict(name, found[0] > most, expected, f"{found[1]} ({found[2]})")


# ---- one risk each ---------------------------------------------------------------------------------------------------


def overlap(f: Figures) -> Verdict:
    """F1: of the shorter of copies and kernels, the share that lies under the other."""
    found = []
    for line in f.timings("half"):
        kernels = line.get("kernel_seconds", 0)
        ways = [line[way] for way in ("DtoH", "HtoD") if line.get(way, {}).get("seconds", 0) > 1e-3]
        if kernels and ways:
            share = sum(way["under_kernels"] for way in ways) / sum(min(way["seconds"], kernels) for way in ways)
            found.append((1 - share, f"{share:.0%} of the copies under kernels", where(line)))
    return worst("F1", ">= 90 % under kernels", found, 0.1)


def link(f: Figures) -> Verdict:
    """LINK: where the longer way of the copies takes longer than the kernels, its share of the step."""
    found, profiles = [], 0
    for line in f.timings("half", "quarter"):
        ways = [line[way]["seconds"] for way in ("DtoH", "HtoD") if way in line]
        kernels = line.get("kernel_seconds", 0)
        profiles += bool(kernels and ways)
        if kernels and ways and max(ways) > kernels and line["step"] > 0:
            share = max(ways) / line["step"]
            found.append((1 - share, f"{share:.0%} of the step", where(line)))
    verdict = worst("LINK", "a link that is the limit copies in >= 90 % of a step", found, 1 - LINK_SHARE)
    return verdict if found or not profiles else replace(verdict, seen=f"it is not the limit in any of {profiles} runs")


def pages(f: Figures) -> Verdict:
    """F2."""
    found = []
    for line in f.timings("half auto", "quarter auto"):
        per = line.get("per_step", {})
        spent = (per.get("device.map_nanoseconds", 0) + per.get("device.unmap_nanoseconds", 0)) / 1e9
        untimed = bool(per.get("device.maps")) and not spent
        if line["run"] != "half auto, remap" and line["step"] > 0 and not untimed:
            words = f"{spent / line['step']:.1%} of the step, {per.get('device.maps', 0):.0f} maps"
            found.append((spent / line["step"], words, where(line)))
    return worst("F2", "maps and unmaps <= 1 % of a step", found, 0.01)


def checksums(f: Figures) -> Verdict:
    """F3: by kernels where the driver takes their text."""
    line = f.call("begin.kernels")
    if not line:
        return Verdict("F3", None, "kernels load from PTX", "no table of driver calls")
    return Verdict("F3", "error" in line, "kernels load from PTX", str(line.get("error", "they load")))


def predictions(f: Figures) -> Verdict:
    """F4."""
    found = []
    for line in f.timings("half", "quarter"):
        predicted, plain = line.get("planned", {}).get("overhead"), f.plain_step(line)
        if predicted and plain and "profiled" not in line["run"]:
            measured = line["step"] / plain
            words = f"planned {predicted:.2f}x, measured {measured:.2f}x"
            found.append((abs(measured / predicted - 1), words, where(line)))
    return worst("F4", "planned within 30 % of measured", found, 0.3)


def opening(f: Figures) -> Verdict:
    """F5: the first budget of a process also loads the pager, and is left out."""
    met: set[str] = set()
    found = []
    for line in f.lines:
        if line.get("event") == "opened":
            if line["act"] in met and line.get("budget"):
                found.append((float(line["seconds"]), f"{line['seconds']:.2f} s", where(line)))
            met.add(line["act"])
    return worst("F5", "a budget opens in <= 0.5 s", found, 0.5)


def cut(f: Figures) -> Verdict:
    """F6."""
    ends = f.ends.items()
    lost = [act for act, line in ends if line.get("why") == "no time left" or "killed" in str(line.get("code"))]
    lost += f.left_out
    return Verdict("F6", bool(lost) if f.ends else None, "no act is cut", ", ".join(lost) or "none is")


def polling(f: Figures) -> Verdict:
    """F7: only a cost that shows without transfers is seen here."""
    found = []
    for line in f.lines:
        if line.get("event") == "op cost":
            costs = line["microseconds"]
            more = costs["8 GB"] - costs["no budget"]
            found.append((more, f"{more:+.1f} us", line["name"]))
    verdict = worst("F7", "an op in a budget costs <= 3 us more", found, 3)
    return (
        verdict if verdict.real or not found else Verdict("F7", None, verdict.expected, f"{verdict.seen}, no transfers")
    )


def trials(f: Figures) -> Verdict:
    """F8: the time of the first steps above a later one, for each trial."""
    found = []
    for line in f.timings("unlimited"):
        warm = [second for second in line.get("warm", []) if isinstance(second, int | float)]
        if line.get("trials") and len(warm) == line.get("warm_steps"):
            each = (sum(warm) - len(warm) * line["step"]) / line["trials"]
            found.append((each, f"{1e3 * each:.1f} ms", where(line)))
    return worst("F8", "<= 20 ms for each trial", found, 0.02)


def late_import(f: Figures) -> Verdict:
    """F9: they ran beside others, so only a large ratio counts. The pool of torch's own allocator, which is kept on request,
    is told beside it.
    """
    late, native, mapped = (
        float(f.runs.get((f"smoke {pool}", "75 %"), {}).get("step", 0)) for pool in ("late", "native", "mapped")
    )
    expected = "with a late import <= 2x of an early one"
    if not late or not mapped:
        return Verdict("F9", None, expected, "one of the two did not run")
    return Verdict("F9", late > 2 * mapped, expected, f"{late / mapped:.2f}x; torch's own pool {native / mapped:.2f}x")


def unseen(f: Figures) -> Verdict:
    """F10."""
    marks = [
        f.bits(line) for (act, name), line in f.runs.items() if act == "bits lstm" and name not in ("none", "measure")
    ]
    real = "OTHER BITS" in marks if any(marks) else None
    return Verdict("F10", real, "a dropout LSTM has the same bits", f"{marks.count('same')} of {len(marks)} same")


def probe(f: Figures) -> Verdict:
    """F12."""
    link = f.call("link.host_alloc_dtoh_64MiB").get("value")
    expected = "the first figure of the link is within 30 %"
    said = next((line["link"] for line in f.timings("") if line.get("link")), None)
    if not link or not said:
        return Verdict("F12", None, expected, "one of the two is missing")
    return Verdict("F12", not 0.7 < said / 1e9 / link < 1.3, expected, f"{said / 1e9:.1f} of {link:.1f} GB/s")


def planner(f: Figures) -> Verdict:
    """F13."""
    found = []
    for line in f.timings("half", "quarter"):
        beside = line.get("beside_planner")
        if beside and line["step"] > 0:
            ratio = beside["seconds"] / line["step"]
            found.append((ratio, f"{ratio:.2f}x in {beside['steps']} steps", where(line)))
    return worst("F13", "a step beside the planner <= 1.5x of a later one", found, 1.5)


def faults(f: Figures) -> Verdict:
    """F16."""
    wrong = [line["detail"].get("kernel_wrong_words") for line in f.lines if isinstance(line.get("detail"), dict)]
    counts = [count for count in wrong if count is not None]
    expected = "kernels are right while pages are mapped"
    return Verdict(
        "F16", any(counts) if counts else None, expected, f"{sum(counts):.0f} wrong words in {len(counts)} probes"
    )


def committed(f: Figures) -> Verdict:
    """F21."""
    found = []
    for line in f.runs.values():
        if 0 < (line.get("budget") or 0) < 1 << 50 and "committed_peak" in line:
            over = line["committed_peak"] - line["budget"]
            found.append((float(over), f"{over / MIB:+.1f} MiB", where(line)))
    return worst("F21", "committed <= the budget + 8 MiB (a page of 141 GB)", found, 8 * MIB)


RISKS: tuple[Callable[[Figures], Verdict], ...] = (
    overlap, pages, checksums, predictions, opening, cut, polling, trials, late_import, unseen, probe, planner, faults, committed,
    link,
)  # fmt: skip


# ---- next steps ------------------------------------------------------------------------------------------------------


def next_steps(f: Figures, verdicts: Iterable[Verdict]) -> Iterator[str]:
    """The rows of the decision table that apply."""
    real = {verdict.name for verdict in verdicts if verdict.real}
    crashed = {act for act, end in f.ends.items() if end.get("event") == "ended" and end.get("code") != 0}
    other = sorted(
        {act for (act, _), line in f.runs.items() if f.bits(line) == "OTHER BITS" and act.startswith("bits")}
    )
    windows = [line for line in f.timings("half auto") if line["run"] == "half auto"]
    remaps = {line["act"]: line["step"] for line in f.timings("half auto, remap")}
    if not crashed and not other and not real & {"F1", "F2"}:
        yield "all bits are the same and copies overlap: make the second call as it is, with long runs"
    for line in windows:
        if remaps.get(line["act"], 1e9) < 0.95 * line["step"]:
            yield f"{line['act']}: remap is faster than the window: look at its page traffic in both before choosing"
    if "F2" in real:
        yield "F2: look for plans in the steps that map; a step that follows a plan with sites maps nothing"
    if "F1" in real:
        yield "F1: open the trace, find the copy that compute waits for, and mend that wait before more timings"
    if "F4" in real:
        yield "F4: do not tune policies: mend the times that plans are made from first"
    if "smoke mapped" in crashed and "smoke native" not in crashed and "smoke native" in f.ends:
        yield "memmgr's allocator crashes, torch's works: MEMMGR_CONF=allocator:native throughout; read the stacks first"
    if "smoke native" in crashed and "smoke mapped" not in crashed and "smoke mapped" in f.ends:
        yield "only the native pool crashes: leave it out"
    for act in other:
        yield f"{act} has other bits: bisect with policy evict, then offload, in one step under the sanitizer"
    if f.ends.get("smoke mapped") and crashed >= {"smoke mapped", "smoke native", "smoke native expandable"}:
        yield "nothing loads: compile on the spot (remove carry/), and look at errors.txt"


# ---- all of it -------------------------------------------------------------------------------------------------------


def run_text(f: Figures, line: Line) -> str:
    """One run in one line."""
    per, gigabyte = line.get("per_step", {}), 1e9
    budget, peak = line.get("budget") or 0, float(line.get("peak") or line.get("torch_peak") or 0)
    limit = f"of {budget / gigabyte:.2f} GB" if 0 < budget < 1 << 50 else "GB, no limit"
    parts = [
        where(line),
        f"{1e3 * line['step']:.1f} ms (host {1e3 * line['host_step']:.1f})",
        f"peak {peak / gigabyte:.2f} {limit}",
        f"nvml {(line.get('nvml_peak', 0) - line.get('nvml_before', 0)) / gigabyte:.2f}",
    ]
    if mark := f.bits(line):
        parts.insert(1, mark)
    if line.get("peak", 0) > (line.get("budget") or 1 << 62):
        parts.append("OVER BUDGET")
    if over := f.nvml_over(line):
        parts.append(f"OVER by NVML: {over / MIB:.0f} MiB")
    if per:
        map_ms, unmap_ms = (per.get(f"device.{name}_nanoseconds", 0) / 1e6 for name in ("map", "unmap"))
        parts += [
            f"out {per.get('offload_bytes', 0) / gigabyte:.2f} in {per.get('reload_bytes', 0) / gigabyte:.2f} GB",
            f"evicted {per.get('evictions', 0):.0f} recomputed {per.get('recomputes', 0):.0f}",
            f"maps {per.get('device.maps', 0):.0f} ({map_ms:.1f} + {unmap_ms:.1f} ms)",
            f"syncs {per.get('device.synchronizations', 0):.0f} waits {per.get('device.waits', 0):.0f}",
            f"plans {line.get('plans')} ({line.get('plan_seconds')} s) followed {per.get('planned_passes', 0):.2f}",
        ]
    if planned := line.get("planned"):
        parts.append(f"planned {planned.get('overhead')}x")
    if seen := line.get("simulated"):
        idle = ", ".join(f"{why} {1e3 * seconds:.1f}" for why, seconds in seen["idle"].items()) or "never"
        if per:
            parts.append(f"own {1e3 * per['own_seconds']:.1f} ms, not in the step")
        parts += [
            f"ideal {1e3 * seen['ideal']:.1f} ms (kernels {1e3 * seen['kernels']:.1f})",
            f"overlap {seen['overlap'] or 0:.0%} link {seen['link_use']:.0%} lead {1e3 * seen['lead']:.1f} ms",
            f"idle ms: {idle}",
            f"drains {seen['drains']:.0f} queries {seen['queries']:.0f} for {seen['ops']:.0f} kernels "
            f"pageable {seen['pageable bytes']:.0f} B",
        ]
    return " | ".join(parts)


def summary(lines: Iterable[Line]) -> bool:
    """Prints the summary that a reader needs first; True: all that was checked held."""
    f = Figures(lines)
    good = True
    for line in f.lines:
        act, event = line["act"], line.get("event")
        if act == "facts":
            print(f"{line['name']}: {line['text'][:200]!r}")
        elif event == "result" and "run" in line:
            print(run_text(f, line))
            # Only deterministic runs promise the same bits.
            other = f.bits(line) == "OTHER BITS" and act.startswith(("bits", "smoke"))
            over = line.get("peak", 0) > (line.get("budget") or 1 << 62) or bool(f.nvml_over(line))
            good = good and not other and not over
        elif event == "failed":
            print(f"{act}, {line.get('run')} | FAILED {' '.join(line['error'].split())[:400]}")
        elif event == "check":
            mark = {True: "ok", False: "DOES NOT HOLD", None: "skipped"}[line.get("ok")]
            print(f"{act} | {line.get('name')} | {mark} {line.get('text', '')}")
            good = good and line.get("ok") is not False
        elif event == "op cost":
            print(f"{act} | {line['name']} | {line['microseconds']}")
        elif event in ("ended", "skipped"):
            name = where(line) if "run" in line else act
            print(f"{name} | {event} {line.get('code', line.get('why'))} ({line.get('seconds', 0)} s)")
            good = good and (event == "skipped" or line.get("code") == 0)
    verdicts = [risk(f) for risk in RISKS]
    print("", *verdicts, sep="\n")
    print("", *(f"NEXT {step}" for step in next_steps(f, verdicts)), sep="\n", flush=True)
    return good
