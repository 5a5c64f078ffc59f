"""The page of `memmgr report`."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from html import escape

from memmgr.config.sizes import show_seconds
from memmgr.observe.advice import changes, no_change, own_checkpointing
from memmgr.observe.slowness import HELPS, WHERE, wants_budget
from memmgr.observe.slowness import lines as why_slow
from memmgr.observe.summary import main_figures
from memmgr.policies.trace import Trace
from memmgr.tools.view.charts import bars, over_time, wide
from memmgr.tools.view.job import jobs, table
from memmgr.tools.view.period import section
from memmgr.tools.view.run_state import LAYERS, RunState, clean
from memmgr.tools.view.top_text import could_move

MOST_SESSIONS, MOST_ROWS = 20, 15
_LINK = (
    "resident: on the device; offloaded: in the tier alone; moved: written to the tier and read back; could move: as many bytes "
    "as the tier, at its measured speed and one way at a time, takes in the time of a pass"
)
_ABSENT = "evicted: dropped; offloaded: dropped, with a copy in the tier; recomputed, read back: restored in these ways"
_HOLDERS = "tensors of one origin are one row; absent: evicted or offloaded"
_CSS = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #68707a; --line: #d9dde2; --page: #fff; --tile: #f4f6f8;
  --fixed: #7d93b8; --evictable: #3f9b6b; --evicted: #e2a3a0; --offloaded: #ecd08a; --recompute: #c8504b; --stall: #d8a12a;
  --parameters: #4a86c5; --gradients: #c98a3a; --optimizer_states: #8a6bb5; --other: #8b929b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #9aa2ab; --line: #363c43; --page: #16191c;
  --tile: #20252a; --fixed: #5b719a; --evictable: #3b8c61; --evicted: #8a4a48; --offloaded: #8d7638; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
code { overflow-wrap: anywhere; } .soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tile { background: var(--tile); border-radius: .4rem; padding: .5rem .8rem; } .tile b { display: block; font-size: 1.2rem; }
svg { width: 100%; min-width: 48rem; height: auto; font-size: 12px; } .grid { stroke: var(--line); } .tick { fill: var(--soft); }
.label { fill: var(--ink); } .budget { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 6 4; }
.value { fill: transparent; } .value:hover { fill: var(--ink); fill-opacity: .15; }
.pass { stroke: var(--soft); } .pale { fill-opacity: .45; } i.pale { background: var(--evictable); opacity: .45; }
.fixed { fill: var(--fixed); } .evictable { fill: var(--evictable); } .evicted { fill: var(--evicted); }
.offloaded { fill: var(--offloaded); } .recompute { fill: var(--recompute); } .stall { fill: var(--stall); }
.reload { fill: var(--offloaded); } .parameters { fill: var(--parameters); } .gradients { fill: var(--gradients); }
.optimizer_states { fill: var(--optimizer_states); } .other { fill: var(--other); } .link { fill: var(--line); }
.key span { display: inline-block; margin-right: 1.2rem; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; } .box { overflow-x: auto; } td.text, th.text { text-align: left; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 6rem; }
td:first-child, th:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
"""
_COSTS = ("recompute", "reload", "stall")
_WORDS = ("name", "kind", "module", "line")


def page(sessions: Sequence[tuple[str, RunState]], passes: Sequence[tuple[str, Trace]] = ()) -> str:
    """The whole page, of one or several sessions with the names of their logs, and of recorded passes."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        "<title>memmgr report</title>",
        f"<style>{_CSS}</style></head><body><h1>memmgr report</h1>",
    ]
    for ranks in jobs(session for _, session in sessions):
        if len(ranks) > 1:
            parts += _job(ranks)
    for name, session in sessions[:MOST_SESSIONS]:
        parts += _session(name, session)
    if len(sessions) > MOST_SESSIONS:
        parts.append(
            f"<p>{len(sessions) - MOST_SESSIONS} more budgets were opened in this log; they are not shown.</p>"
        )
    binary = bool(sessions) and sessions[0][1].binary  # a recorded pass has no budget
    parts += [section(name, trace, binary=binary) for name, trace in passes]
    return "\n".join([*parts, "</body></html>\n"])


def _job(ranks: Sequence[RunState]) -> Iterator[str]:
    head, *rows = table(ranks)
    yield f"<h2>{len(ranks)} of {int(ranks[0].hello['world_size'])} ranks</h2><div class=box><table>"
    for row, cell in ((head, "th"), *((row, "td") for row in rows)):
        yield "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in row[:-1])
        yield f"<{cell} class=text>{escape(row[-1])}</{cell}></tr>"
    yield "</table></div>"


def _session(name: str, watched: RunState) -> Iterator[str]:
    hello, stats = watched.hello, watched.stats
    begun = datetime.datetime.fromtimestamp(float(hello.get("time", 0.0)), datetime.UTC)
    rank = "" if hello.get("rank") is None else f", rank {hello['rank']}"
    yield f"<h2>{escape(clean(name))}{rank}</h2><p><code>{escape(watched.command)}</code></p>"
    yield (
        f"<p class=soft>{begun:%Y-%m-%d %H:%M:%S} UTC, process {watched.pid}, {escape(str(hello.get('device')))}, policy "
        f"{escape(str(hello.get('policy')))}, memmgr {escape(str(hello.get('memmgr')))}, torch "
        f"{escape(str(hello.get('torch')))}, Python {escape(str(hello.get('python')))}.{_ending(watched)}</p>"
    )
    binary = watched.binary
    why, most = _why(watched)
    yield f"<p><b>Why it took its time.</b> {escape(why)}</p>"
    yield _tiles(watched)
    more = changes(stats, binary=binary) if wants_budget(watched.leaks, _ended_by(watched)) else []
    lines = [
        *watched.leaks,
        *own_checkpointing(stats, binary=binary),
        *_advice(most, more),
        *_faults(watched),
    ]
    if watched.end is None and not stats["passes"]:
        lines = ["nothing can be said: the log ends before the first pass does"]
    lines = lines or [no_change(stats, binary=binary)]
    yield "<h3>What to change</h3><ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
    yield f"<h3>Memory over time</h3>{wide(over_time(watched))}{_key(watched)}"
    yield from _states(watched)
    yield from _time(watched)
    yield from _gone(watched)
    yield from _holders(watched)
    yield from _plans(watched)


def _ended_by(watched: RunState) -> str:
    return str((watched.end or {}).get("error") or "")


def _why(watched: RunState) -> tuple[str, str]:
    """The shares of the time in sentences, for the first paragraph; and the change that would help most, for the list."""
    reasons = [text.partition(": ")[2] for _, text in watched.plans if text.startswith(("no plan", "left plan"))]
    reason = reasons[-1] if reasons else ""
    told = why_slow(
        watched.stats, binary=watched.binary, reason=reason, leaks=watched.leaks, ended_by=_ended_by(watched)
    )
    told = [clean(text) for text in told]
    most = "".join(text.removeprefix(HELPS) for text in told if text.startswith(HELPS))
    parts = [part for text in told if not text.startswith(HELPS) for part in text.removeprefix(WHERE).split("; ")]
    return ". ".join(part[0].upper() + part[1:] for part in parts if part) + ".", most


def _advice(most: str, more: Sequence[str]) -> list[str]:
    """The changes, with the one that would help most in the first sentence: two sizes of one budget are one advice."""
    head, _, saved = most.rpartition(", about ")
    same = next((text for text in more if head and head in text), "")
    if same:
        first = same if "less time" in same else f"{same}; that is about {saved.removesuffix(' (an estimate)')}"
    else:
        same = next((text for text in more if most.startswith("+") and text.startswith("+")), "")
        first = "; ".join(filter(None, (most, same)))
    return [*([first] if first else ()), *(text for text in more if text != same)]


def _ending(watched: RunState) -> str:
    if watched.end is None:
        last = show_seconds(watched.now)
        why = "the process still runs" if watched.runs_on else "the process was killed, or runs on another machine"
        return f" <b>The log has no end:</b> {why}. Its last sample is of {last}."
    return f" <b>It {watched.ending}.</b>" if watched.end["failed"] else ""


def _tiles(watched: RunState) -> str:
    return (
        "<div class=tiles>"
        + "".join(f"<div class=tile>{n}<b>{v}</b></div>" for n, v in main_figures(watched.stats, binary=watched.binary))
        + "</div>"
    )


def _faults(watched: RunState) -> list[str]:
    lines = [
        f"at {show_seconds(seconds)}: {text}"
        for seconds, text in watched.log
        if text.startswith(("budget error", "daemon error"))
    ]
    failed = int(watched.stats.get("tier_errors", 0))
    return lines + ([f"the tier failed {failed} times: look at the disk"] if failed else [])


def _key(watched: RunState) -> str:
    items = "".join(f'<span><i style="background: var(--{name})"></i>{name}</span>' for name in LAYERS)
    peak = int(watched.stats.get("measuring_bytes.peak", 0))
    measured = (
        f" The budget begins after the passes that measured: their peak was {watched.size(peak)}." if peak else ""
    )
    return (
        f'<p class="key soft">{items}<span><i class=pale></i>resident at times: between the least and the most</span>'
        f"<span>Absent memory is drawn at its most. Marks below: ends of passes.{measured}</span></p>"
    )


def _states(watched: RunState) -> Iterator[str]:
    """Model states, where any have been offloaded."""
    found = watched.flows()
    if found is None or not found.states_moved_bytes:
        return
    moved = [(flow.kind, flow.moved_bytes) for flow in found.each]
    could = could_move(watched, found.pass_seconds)
    yield "<h3>Model states, and bytes moved a pass</h3>"
    yield wide(bars([("moved a pass", moved), (could, [("link", found.link_bytes)])], watched.size))
    yield "<div class=box><table><tr><th>kind</th><th>resident in the end</th><th>offloaded</th><th>moved a pass</th></tr>"
    for flow in found.each:
        name = f'<i style="background: var(--{flow.kind})"></i>{flow.kind.replace("_", " ")}'
        sizes = (flow.resident_bytes, flow.offloaded_bytes, flow.moved_bytes)
        yield f"<tr><td class=key>{name}</td>{''.join(f'<td>{watched.size(size)}</td>' for size in sizes)}</tr>"
    yield f"</table></div><p class=soft>{_LINK}</p>"


def _time(watched: RunState) -> Iterator[str]:
    wall = max(float(watched.stats.get("wall_seconds", 0.0)), 1e-9)

    def share(seconds: float) -> str:
        return f"{show_seconds(seconds)}, {seconds / wall:.1%}"

    for key, title in (("module", "Where recomputing and waiting went, by module"), ("op", "By op")):
        rows = [
            (name, [(what, sums[what].seconds if what in sums else 0.0) for what in _COSTS])
            for name, sums in watched.by(key)[:MOST_ROWS]
        ]
        drawn = bars([row for row in rows if sum(seconds for _, seconds in row[1]) > 0], share)
        if drawn:
            yield f"<h3>{title}</h3>{wide(drawn)}"
            if key == "module":
                names = (
                    ("recompute", "recomputing"),
                    ("offloaded", "waiting for reads"),
                    ("stall", "waiting for room"),
                )
                items = "".join(f'<span><i style="background: var(--{c})"></i>{label}</span>' for c, label in names)
                yield f'<p class="key soft">{items}</p><p class=soft>Seconds, and their share of the time.</p>'


def _gone(watched: RunState) -> Iterator[str]:
    found = []
    for name, sums in watched.by("module"):
        sizes = [sums[what].bytes if what in sums else 0 for what in ("evict", "offload", "recompute", "reload")]
        if any(sizes):
            found.append((name, sizes))
    if not found:
        return
    found.sort(key=lambda row: -sum(row[1][:2]))
    passes = max(int(watched.stats["passes"]), 1)
    yield "<h3>Evicted and offloaded, by the module that made it (bytes a pass)</h3><div class=box><table><tr><th>module</th>"
    yield "<th>evicted</th><th>offloaded</th><th>recomputed</th><th>read back</th></tr>"
    for name, sizes in found[:MOST_ROWS]:
        cells = "".join(f"<td>{watched.size(size / passes)}</td>" for size in sizes)
        yield f"<tr><td>{escape(name)}</td>{cells}</tr>"
    yield f"</table></div><p class=soft>{_ABSENT}</p>"
    if watched.unlisted:
        yield f"<p class=soft>{watched.unlisted:,} events are in none of these sums: too many ops and modules.</p>"


def _holders(watched: RunState) -> Iterator[str]:
    """The holders of large tensors, and their source lines, at the highest moment that the log has."""
    found = watched.explained
    if not found:
        return
    yield f"<h3>Who holds the memory, {_moment(watched)}</h3><div class=box><table>"
    yield (
        "<tr><th>name</th><th class=text>kind</th><th class=text>module</th><th class=text>line</th><th>tensors</th>"
        "<th>size</th><th>of it absent</th></tr>"
    )
    for row in found["holders"][:MOST_ROWS]:
        shown = {**row, "kind": f"{row['kind']}, a leak" if row.get("leak") else row["kind"]}
        words = "".join(f"<td class=text>{escape(clean(str(shown[key])))}</td>" for key in _WORDS)
        words += f"<td>{int(row['count']):,}</td>"
        sizes = "".join(
            f"<td>{'-' if row[key] is None else watched.size(int(row[key]))}</td>" for key in ("bytes", "absent_bytes")
        )
        yield f"<tr>{words}{sizes}</tr>"
    yield f"</table></div><p class=soft>{_HOLDERS}</p>"
    yield "<h3>By the line that made it</h3><div class=box><table><tr><th>line</th><th>size</th></tr>"
    for line, size in list(found["lines"].items())[:MOST_ROWS]:
        yield f"<tr><td>{escape(clean(line))}</td><td>{watched.size(int(size))}</td></tr>"
    yield "</table></div>"


def _moment(watched: RunState) -> str:
    """The moment of the table of holders, and its share of the memory that the run needed."""
    found = watched.explained
    at = show_seconds(float(found.get("seconds", 0.0)))
    if "bytes" not in found:
        return f"at {at} (the highest moment that was looked at)"
    moment = f"at the peak of a pass before {at}" if found.get("at_peak") else f"at {at}"
    held, needed = int(found["bytes"]), int(watched.stats.get("unmanaged_peak_bytes", 0))
    share = watched.size(held) if held < needed else "all"
    return f"{moment}: {share} of the {watched.size(needed or held)} that the run needed"


def _plans(watched: RunState) -> Iterator[str]:
    if not watched.plans:
        return
    stats = watched.stats
    yield (
        f"<h3>Plans</h3><p>{stats.get('planned_passes', 0):,} of {stats['passes']:,} passes followed a plan to their end; making "
        f"plans took {show_seconds(float(stats.get('plan_seconds', 0.0)))} beside the training.</p><ul>"
    )
    found: dict[str, list[float]] = {}
    for seconds, text in watched.plans:
        found.setdefault(clean(text), []).append(seconds)
    for text, times in list(found.items())[:MOST_ROWS]:
        more = f" ({len(times)} times, the last at {show_seconds(times[-1])})" if len(times) > 1 else ""
        yield f"<li>{show_seconds(times[0])}: {escape(text)}{more}</li>"
    yield "</ul>"
