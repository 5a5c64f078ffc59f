"""One run of `memmgr bench`: measures the missing cells, keeps them, shows all."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memmgr.config.extras import pip_line
from memmgr.tools.common.console import ProgressBar, table
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.view import plot

from .largest import largest
from .models import MODELS
from .picture import draw
from .record import Record, machine, opened
from .rows import Row, rows_of
from .systems import COMPILED, SYSTEMS, UNMANAGED
from .table import HEAD, LARGEST_HEAD, cells, heading, largest_cells, markdown
from .turns import Nursery, Say, Spec, once, together

Wanted = tuple[str, float | None, str]
"""(budget, share of the need, system) of a cell."""


class Bench:
    """One call of the verb, whose words are right."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.models: list[str] = args.models
        self.systems: list[str] = args.systems
        self.budgets: list[tuple[str, float | None]] = args.budgets
        self.memory: int | None = args.memory
        self.began = time.monotonic()
        args.out.mkdir(parents=True, exist_ok=True)
        keys = ("device", "turns", "threads", "batch", "tiny", "slowest", "memory")
        settings = {key: getattr(args, key) for key in keys}
        self.record: Record = opened(args.out / "bench.json", settings, machine(args.device))
        self.late = False

    def spec(self, model: str, system: str, what: str, budget: str = "", budget_bytes: int | None = None) -> Spec:
        args = self.args
        return {
            "key": f"{model}|{budget}|{system}", "model": model, "system": system, "what": what, "group": budget or "own",
            "budget": budget, "budget_bytes": budget_bytes, "batch": args.batch, "tiny": args.tiny, "device": args.device,
            "threads": args.threads, "turns": args.turns, "reference": system in (UNMANAGED, COMPILED),
        }  # fmt: skip

    def over(self) -> bool:
        """No further group may begin."""
        minutes = self.args.minutes
        self.late = self.late or (minutes is not None and time.monotonic() - self.began > 60 * minutes)
        return self.late

    # ---- steps under budgets

    def groups(self, model: str) -> list[list[Wanted]]:
        """(budget, share, system), for each reference: systems without a budget together with those at another system's
        peak; then each share.
        """
        return [*self.groups_of(model, UNMANAGED), *self.groups_of(model, COMPILED)]

    def groups_of(self, model: str, reference: str) -> list[list[Wanted]]:
        """The groups of the systems that are compared with this one."""
        names = [name for name in self.systems if SYSTEMS[name].reference == reference and name != UNMANAGED]
        plain = [name for name in names if not SYSTEMS[name].policy]
        managed = [name for name in names if SYSTEMS[name].policy]
        own: list[Wanted] = [("", None, name) for name in ((UNMANAGED, *plain) if reference == UNMANAGED else plain)]
        peaks = [label for label, share in self.budgets if share is None and SYSTEMS[label].reference == reference]
        own += [(label, None, name) for label in peaks for name in managed]
        shares: list[list[Wanted]] = [
            [(label, share, name) for name in managed] for label, share in self.budgets if share is not None
        ]
        wanted = [
            [cell for cell in group if f"{model}|{cell[0]}|{cell[2]}" not in self.record.rows]
            for group in [own, *shares]
        ]
        return [group for group in wanted if group]

    def needs(self, children: Nursery, model: str, system: str, say: Say) -> dict[str, Any]:
        """The need of a system without memmgr, measured once."""
        known = self.record.needs.setdefault(model, {})
        if system not in known:
            say(f"{model}, {system}: what it needs")
            cell = once(children, self.spec(model, system, "needs"))
            known[system] = {"error": cell.error} if cell.error else cell.told
        found: dict[str, Any] = known[system]
        return found

    def measure(self) -> None:
        todo = {model: self.groups(model) for model in self.models}
        total = sum(len(group) for groups in todo.values() for group in groups)
        with ProgressBar(total) as bar, Nursery(self.args.device) as children:
            for model, group in ((model, group) for model, groups in todo.items() for group in groups):
                if self.over():
                    break
                self.measure_group(children, model, group, bar)

    def measure_group(self, children: Nursery, model: str, group: Sequence[Wanted], bar: ProgressBar) -> None:
        system = SYSTEMS[group[0][2]].reference
        need = self.needs(children, model, system, bar.say)
        specs: list[Spec] = []
        failed: list[Row] = []
        reference = group[0][0] if group[0][1] is not None else ""
        if (reference, group[0][1], system) not in group:
            specs.append(self.spec(model, system, "turns", reference))
        for label, share, name in group:
            peak = need if share is not None or not label else self.needs(children, model, label, bar.say)
            error = need.get("error") or peak.get("error", "")
            limit = int((share or 1.0) * peak["peak_bytes"]) if label and not error else None
            if error:
                failed.append(Row(model, label, name, error=error))
            else:
                specs.append(self.spec(model, name, "turns", label, limit))
        rows = rows_of(together(children, specs, self.args.turns, bar.say), need.get("peak_bytes", 0)) if specs else []
        # Plain torch's compiled model has a row among the systems that are compared with plain torch.
        rows = [row for row in rows if row.system == UNMANAGED or row.system != system]
        self.record.rows |= {row.key: row for row in [*rows, *failed]}
        self.record.save()
        bar.say(f"{model}, {reference or 'own'}: done", advance=len(group))

    # ---- the largest batch

    def measure_largest(self) -> None:
        systems = [UNMANAGED, *(name for name in self.systems if name != UNMANAGED)]
        with ProgressBar(len(self.models) * len(systems)) as bar, Nursery(self.args.device) as children:
            for model, system in ((model, system) for model in self.models for system in systems):
                if not self.over():
                    self.one_largest(children, model, system, bar)

    def one_largest(self, children: Nursery, model: str, system: str, bar: ProgressBar) -> None:
        need = self.needs(children, model, UNMANAGED, bar.say)
        if "error" in need:
            raise UsageError(f"{model}: {need['error']}")
        found = self.record.largest.setdefault(
            model, {"memory_bytes": self.memory or 3 * need["state_bytes"], "systems": {}}
        )
        if system not in found["systems"]:
            plain = found["systems"].get(UNMANAGED)
            slowest = None
            if plain is not None and plain["batch"]:
                slowest = self.args.slowest * plain["seconds"] / plain["batch"]
            first = plain["batch"] if plain is not None and plain["batch"] else max(1, MODELS[model][1] // 2)
            spec = self.spec(model, system, "attempt") | {"turns": min(3, self.args.turns)}
            found["systems"][system] = largest(children, spec, found["memory_bytes"], slowest, first, bar.say)
            self.record.save()
        bar.say(f"{model}, {system}: a batch of {found['systems'][system]['batch']}", advance=1)

    # ---- output

    def rows(self) -> list[Row]:
        """By model and budget, as they are asked for."""
        order = {name: i for i, name in enumerate(("", *(label for label, _ in self.budgets)))}
        systems = list(SYSTEMS)
        found = [r for r in self.record.rows.values() if r.model in self.models and r.budget in order]
        found = [r for r in found if r.system in (*self.systems, UNMANAGED)]
        return sorted(found, key=lambda r: (self.models.index(r.model), order[r.budget], systems.index(r.system)))

    def show(self) -> int:
        """Tables and files; the exit code."""
        rows, out = self.rows(), self.args.out
        told = list(cells(rows))
        text = heading(self.record) + "\n\n"
        text += markdown(HEAD, told) if told else ""
        largest_told = list(largest_cells(self.record))
        text += "\n" + markdown(LARGEST_HEAD, largest_told) if largest_told else ""
        (out / "bench.md").write_text(text)
        picture: Path | None = None
        if plot.available() and told:
            picture = out / "bench.png"
            draw(rows, picture, heading(self.record))
        if self.args.json:
            print(json.dumps(self.record.to_json(), indent=1))
        else:
            print(heading(self.record))
            if self.args.max_batch:
                table(LARGEST_HEAD, largest_told)
            elif told:
                table(HEAD, list(cells(rows, longest=60)))
            print(f"{out / 'bench.json'}, {out / 'bench.md'}" + (f", {picture}" if picture else ""))
            if told and not plot.available():
                print(f"no picture without matplotlib: {pip_line('demo')}")
        if self.late:
            print(f"ended after {self.args.minutes:g} minutes; the same command goes on", file=sys.stderr)
            return 3
        return 1 if any(r.bits == "no" and SYSTEMS[r.system].policy for r in rows) else 0
