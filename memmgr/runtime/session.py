"""One open budget over the pager: opening, closing, and the objects in between."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

import torch

from memmgr.common.constants import Order
from memmgr.common.errors import RecomputeError
from memmgr.common.say import say, warn
from memmgr.common.threads import Rationed
from memmgr.config.sizes import UNLIMITED, show_size
from memmgr.distributed.job import Job
from memmgr.native import binding as native
from memmgr.native import cuda
from memmgr.native.device import DRIVER_VARIABLE, host_bytes, host_bytes_in_group, shares_host_memory
from memmgr.observe import slowness
from memmgr.observe.explainer import Explainer
from memmgr.observe.holdings import Explanation, HolderTables
from memmgr.observe.leaks import Leak, Leaks
from memmgr.observe.memory_inventory import Stock, live_tensors, saved_without_hooks
from memmgr.observe.passes import Pass, Passes
from memmgr.observe.roles import OWNERS, Purposes
from memmgr.observe.source_lines import TakenLines
from memmgr.observe.stats import PagerFigures
from memmgr.observe.summary import report as report_end
from memmgr.observe.summary import summary
from memmgr.readers import works
from memmgr.readers.captures import captured_earlier, graph_classes, is_capturing
from memmgr.readers.exported import exported
from memmgr.readers.raw import storages
from memmgr.readers.readers import Readers
from memmgr.telemetry.publisher import Telemetry

from .compiled import CompiledGraphs
from .config import Config
from .dynamo import in_compiled_function, skip_ours
from .left import ModuleNames
from .periods import Periods, TraceFile
from .plans import Plans
from .ranking import Ranker, order_of
from .sizing import Sizing
from .steps import SlicedSteps

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

MOST_LEAKS = 3
"""The leaks of which the summary and the telemetry tell."""

STAGING_BYTES = 256 << 20
"""Page-locked memory on the way to a file, where the accelerator's memory is the machine's."""

_links: dict[tuple[Any, ...], tuple[float, float]] = {}
"""Seconds a byte, one way, to each tier that this process has had, and of the CPU."""


class PagerRuntime:
    """One open budget.

    Known limitations: on an accelerator plans with device times, several streams and graphs have run on test doubles only.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.native: Pager = native.load()
        self._below = self._below_bytes()
        self._tier = (str(config.device), config.folder, config.throttle, config.host_bytes)
        offload = self._below is not None
        self.plans = self._new_plans()
        self._order = order_of(config.policy)
        self._ranker = Ranker(self.native, config.policy, offload=offload)
        self._steps = SlicedSteps(self.native, config.device, config.small_bytes)
        self.passes = Passes(self.native, self._ended_pass, lambda: self._steps.count)
        self._readers = Readers(self.native, config.device, self.passes, lambda error: self._explain.meant_by(error))
        self._purposes = Purposes(self.native, self.passes)
        self.figures = PagerFigures(
            config,
            self.native,
            self.passes,
            self.plans,
            self._purposes,
            self._readers.escaped,
            lambda: self._ranker.rankings,
            lambda: self._steps.count,
            self.leak_texts,
            lambda: self._holders(0),
        )
        self.telemetry = Telemetry(self.native, self.figures, config.log)
        self._file = TraceFile(config.trace, config.trace_pass, self.telemetry) if config.trace is not None else None
        self._sizing = (
            None if config.need is None else Sizing(config.need, config, self.native, self.plans, self._happened)
        )
        self._periods = Periods(self.native, self.plans, self._file, self._sizing)
        self._graphs = CompiledGraphs(lambda text: self._explain.spent(text), self.native.refusal, self._readers.graphs)
        self._explain = Explainer(
            config,
            self.native,
            self.passes,
            self.telemetry.happened,
            lambda: self.telemetry.detail,
            self._graphs.running,
            self._largest_leak,
            lambda: self._lines.lines(),
        )
        self.job = Job(
            self.stats, self.native, silent_seconds=config.silent_seconds, quiet=config.quiet, binary=config.binary
        )
        self._lines = TakenLines(self.native, always=config.lines)
        self._leaks = Leaks(self.native)
        self._look_for_leaks = Rationed(0.002, self._leaks.look)
        self._look_closer = Rationed(0.005, self._name_leaks)  # a search takes up to three seconds
        self._told_leak = config.quiet
        self._holder_tables = HolderTables(
            self.native, self.telemetry.modules.name, self._lines.lines, lambda: self.passes.line
        )
        self._stock: Stock | None = None
        self._open = False
        self._no_plan = ""  # why there is no plan
        self._kept = ""  # sentences about results that are kept
        self._final: dict[str, Any] | None = None
        self.ended_well = False  # at the end of a process: it is closed as after an exception, without one
        self.ended_by = ""  # the class of the exception that ends the budget, where it is known

    def _new_plans(self) -> Plans:
        config = self.config
        return Plans(
            self.native,
            config.limit_bytes,
            policy=config.policy,
            planned=config.plan and config.limit_bytes < UNLIMITED and not config.policy.torture,
            offload=self._below is not None,
            below_bytes=self._below or 0,
            device=config.device.type,
            happened=self._happened,
            modules=ModuleNames(
                lambda number: self.telemetry.modules.name(number), lambda on: self.telemetry.name_modules(on)
            ),
        )

    def start(self) -> None:
        """Opens the budget: existing tensors become pageable, and tensors beyond the limit are evicted.

        Raises `BudgetError`: tensors that cannot be evicted exceed the limit; `OSError`: the log cannot be written, or
        the tier cannot be opened.
        """
        # A new step has an undo in `close`. After a failure `close` runs every undo, also of steps that were not reached, so an
        # undo does nothing without its step. Undos run from the last line of `close` to the first.
        config, pager = self.config, self.native
        if is_capturing(config.device):
            raise RuntimeError("memmgr: a budget cannot be opened while a graph is captured")
        if in_compiled_function():
            raise RuntimeError("memmgr: a budget cannot be opened inside of a compiled function")
        self.job.open()
        pager.set_errors(make=self._explain.spent, wrong=RecomputeError, torchs=torch.OutOfMemoryError)
        try:  # an interrupt may come between its opening and our next line
            self._open_pager()
            self._measure_link()
            self._lines.begin()
            functions = self._take_stock()
            self._collect_garbage()
            skip_ours()
            self._readers.install(functions)
            self._graphs.install()
            self._explain.begin()
            self._steps.install()
            self._evict_beyond_the_limit()
            self.telemetry.start()
            if config.lines:
                self.telemetry.name_modules(True, always=True)
            if self._order is Order.RANKED:
                self._ranker.start()
            self._periods.begin()
            if self._sizing is not None:
                self._sizing.start()
            self._open = True
        except BaseException as error:
            self.job.failed(error)
            self.close(failed=True)
            raise

    def _open_pager(self) -> None:
        config = self.config
        self.native.open(
            limit=min(config.limit_bytes, UNLIMITED),
            folder=config.folder if self._below is not None else None,
            disk_bytes=config.disk_bytes,
            throttle=config.throttle,
            small_bytes=config.small_bytes,
            may_evict=config.policy.recomputes,
            may_offload=config.policy.offloads,
            torture=config.policy.torture,
            verify=config.verify,
            prefetch=config.prefetch,
            order=self._order,
            window=config.placement == "window",
            device=str(config.device),
            driver=os.environ.get(DRIVER_VARIABLE),
            host_bytes=config.host_bytes or 0 if config.device.type == "cpu" else self._below or 0,
        )

    def _collect_garbage(self) -> None:
        """Garbage must neither count against the budget nor be written to the tier. Where there is room enough Python may
        collect it later.
        """
        if self.config.limit_bytes >= UNLIMITED:  # a measuring run must be the same each time
            gc.collect()
        elif self.native.resident() > self.config.limit_bytes // 2 and not _collect():
            gc.collect(1)

    def _evict_beyond_the_limit(self) -> None:
        """Raises BudgetError where tensors that cannot be evicted exceed the limit."""
        beyond = self.native.settle()
        if beyond:  # by garbage that is old, it may be
            gc.collect()
            beyond = self.native.settle()
        if beyond:
            self.native.set_limit(UNLIMITED)  # a rehearsal has numbers of its own, and the budget ends here
            raise self._explain.too_big(self.native.resident())

    def _below_bytes(self) -> int | None:
        """The room of the tier; None: there is none; 0: the file system's."""
        config = self.config
        if not config.policy.offloads:
            return None
        if config.device.type == "cpu":
            return config.disk_bytes if config.folder is not None else None
        if config.host_bytes is None:
            size = host_bytes(config.device, config.limit_bytes)
        else:
            size = host_bytes_in_group(config.host_bytes)
        if size and shares_host_memory(config.device):
            if config.host_bytes and config.folder is None:
                raise ValueError(
                    f"host: the memory of {config.device} is the machine's, and a copy in host memory frees none of it; "
                    "name a folder (disk=)"
                )
            size = 0 if config.folder is None else config.host_bytes or min(size, STAGING_BYTES)
        return size or None

    def _take_stock(self) -> list[Any]:
        """Adopts existing tensors, and counts small ones and memory that is not torch's. Tensors of another thread's
        backward are adopted as ops touch them.

        Returns the functions that the readers look for.
        """
        _thaw()
        config = self.config
        kinds = (torch.Tensor, *OWNERS, *graph_classes(config.device))
        found = self.native.objects_of(kinds, self._readers.libraries())
        if stay := captured_earlier(found, config.device):
            found.clear()
            gc.collect()  # the graph may be garbage
            found = self.native.objects_of(kinds, self._readers.libraries())
            stay = captured_earlier(found, config.device)
        why = "a graph was captured before the budget opened" if stay else ""
        if not stay and works.under_way():
            stay, why = True, "a collective had not ended when the budget opened"
        functions = [thing for thing in found if isinstance(thing, BuiltinFunctionType)]
        if functions:
            found = [thing for thing in found if not isinstance(thing, BuiltinFunctionType)]
        known = [thing for thing in found if issubclass(type(thing), torch.Tensor)]
        saved: list[torch.Tensor] = []
        if self.native.others_wait():
            known += self.native.gradients_of(known)
            saved = saved_without_hooks(known, config.device)
        # In a later budget a graph or a reader of an earlier one may have the addresses.
        if config.device.type == "cuda" and cuda.just_took_over() and not stay:
            self._move_in(known)
        self.native.adopt_all(known, stay)
        if stay and (kept := self.native.stats()["escaped_bytes"]):
            size = show_size(kept, binary=config.binary)
            warn(f"{why}, so all tensors from before it stay in memory ({size})")
        for tensor in saved:
            self.native.adopt(tensor)
        self._stock = Stock(self.native, [*live_tensors(known, config.device), *saved])
        self.native.add_outside(self._stock.bytes)
        self._purposes.know([thing for thing in found if issubclass(type(thing), OWNERS)])
        return functions

    def _move_in(self, known: list[torch.Tensor]) -> None:
        """Tensors move from torch's memory to the arena. `settle` evicts those beyond the limit. A tensor that has been exported
        stays where it is.
        """
        pager, limit = self.native, min(self.config.limit_bytes, UNLIMITED)
        pager.set_limit(UNLIMITED)
        pager.move_in(known, storages([*exported.owners(), *exported.sliced()]))
        pager.set_limit(limit)

    def _ended_pass(self, ended: Pass) -> None:
        self._explain.refused = self._explain.refused and not ended.completed
        self.telemetry.ended_pass(
            ended.resident_peak, ended.unmanaged_peak, ended.forward_seconds, ended.backward_seconds
        )
        self._purposes.ended_pass(self.passes.count)
        self._lines.ended_pass(self.passes.count, watched=self.telemetry.watched)
        if self._look_for_leaks():
            self._found_leaks(ended.unmanaged_peak)
        if self._final is None:  # another thread's, while the budget closes
            self._periods.ended(self.passes.count, ended.completed)
            if self._sizing is not None and self._sizing.ended(ended):
                self.passes.measured()

    def _happened(self, what: str, **fields: Any) -> None:
        if what == "no_plan":
            self._no_plan = str(fields.get("text", ""))
        self.telemetry.happened(what, **fields)

    @property
    def measured_need(self) -> bool:
        """The limit is final: the need is measured, or the limit does not depend on it."""
        return self._sizing is None or self._sizing.done

    @property
    def traced(self) -> TraceFile | None:
        """The pass for which the user asked (`budget(trace=)`), and its file."""
        return self._file

    def close(self, *, report: bool = True, failed: bool) -> None:
        """Closes the budget: all tensors are restored, and all patches removed."""
        if self._final is not None:
            return
        crashed = failed and not self.ended_well
        if crashed and self._explain.refused:  # a framework's callback is not told which exception ends the training
            self.ended_by = self.ended_by or "BudgetError"
        # The callback added last runs first. If one is interrupted the others still run.
        with contextlib.ExitStack() as then:
            if self._stock is not None:  # the next budget of the process counts it again
                stock = self._stock
                then.callback(lambda: self.native.add_outside(-stock.close()))
            then.callback(lambda: self.telemetry.close(self._final or {}, self.summary(), crashed, self.ended_by))
            then.callback(self.job.close, failed=crashed)
            then.callback(self._readers.remove)  # other threads may have read absent tensors in the meantime
            then.callback(self.native.close)
            then.callback(self._lines.end)
            then.callback(self._explain.end)
            then.callback(self._graphs.remove)
            then.callback(self._steps.remove)
            if failed:  # a slice that fails now leaves a step half done
                then.callback(self.native.set_limit, UNLIMITED)
            then.callback(self._ranker.close)
            then.callback(self.plans.close)
            then.callback(self._periods.close)
            if self._file is not None:
                then.callback(self._file.close)
            try:
                if self._open:
                    self._look_at_the_end()
                if self._open and not failed:
                    self._purposes.look_for_new()
            finally:
                self._final = self.figures.freeze()
            if slowness.is_slow(self._final) and (unlike := self.plans.why_unlike(self._final["passes"])):
                self._happened("no_plan", text=unlike)
            if self._sizing is not None:
                self._sizing.close(self._final)
        if report and self._open and not self.config.quiet and self.job.all_figures is not None:
            log, binary = self.telemetry.log_path, self.config.binary
            report_end(self._final, self.job.all_figures, log=log, binary=binary, more=self._more_lines(self._final))
        for text in (
            *self.telemetry.complaints(),
            *self._ranker.complaints(),
        ):  # last: a warning may be an exception here, and everything is closed
            warn(text, RuntimeWarning)

    def _more_lines(self, final: dict[str, Any]) -> list[str]:
        """The lines of the summary about leaks, lost time, plans that passes left, and graphs."""
        binary, leaks = self.config.binary, self.leak_texts()
        left = self.plans.left.lines(final["left_passes"], final["passes"])
        if slowness.is_slow(final):
            why = "; ".join(left) or self._no_plan
            # Addresses that were handed out after the last pass, to save a model for example, have slowed nothing.
            seen = {**final, "escaped_bytes": self.passes.escaped_bytes} if self.passes.count else final
            left = slowness.lines(seen, binary=binary, reason=why, leaks=leaks, ended_by=self.ended_by)
        elif leaks:
            left = [*left, slowness.end_of_leak(leaks)]
        return [*leaks, *filter(None, [self._kept]), *left, *self._graphs.lines(binary=binary)]

    def process_ends(self) -> None:
        """At the end of the process: looks for the exception that has ended the program."""
        last = getattr(sys, "last_value", None)
        self.ended_well = last is None
        self.ended_by = "" if last is None else type(last).__name__

    def finish_steps(self) -> None:
        """Runs the pending slices of optimizers' steps now."""
        self._steps.finish()

    def disable_in_child(self) -> None:
        """In a forked child: tensors that were absent in the parent are restored when they are read; no other tensor is
        managed. The readers stay, since they restore tensors that no op reads.
        """
        self.telemetry.in_child()
        self._final = self._final or {}

    def stats(self) -> dict[str, Any]:
        """The flat dict that `memmgr.stats()` returns."""
        if self._final is not None:
            return dict(self._final)
        self._purposes.ask()
        return self.figures.stats()

    def explain(self, top: int) -> Explanation:
        """The holders of memory, and the leaks (`memmgr.explain`)."""
        self._leaks.look()
        if self._found():
            self._purposes.look()
        return self._holders(top)

    def _holders(self, top: int) -> Explanation:
        now = self.native.stats()
        return self._holder_tables.explain(
            self._found(),
            small_bytes=max(0, now["resident_bytes.current"] - now["resident_cell_bytes"]),
            top=top,
            binary=self.config.binary,
        )

    def leaks(self) -> list[dict[str, Any]]:
        """The leaks that go on, or did at the end, the largest first, each as a row of figures."""
        if self._final is None:
            self._leaks.look()
            if self._nameless():
                self._name_leaks()
        return [leak.row(self.telemetry.modules.name(leak.module)) for leak in self._found()]

    def leak_texts(self) -> list[str]:
        """A sentence about each of the largest leaks."""
        return [self._leak_text(leak) for leak in self._found()[:MOST_LEAKS]]

    def _largest_leak(self) -> str:
        """A sentence about the largest leak; empty: there is none. Takes no search."""
        self._leaks.look()
        return next(iter(self.leak_texts()), "")

    def _leak_text(self, leak: Leak) -> str:
        return leak.text(binary=self.config.binary, module=self.telemetry.modules.name(leak.module))

    def _found(self) -> list[Leak]:
        return self._leaks.found(self._lines.lines)

    def _found_leaks(self, need_bytes: int) -> None:
        """Names the leaks while the functions run whose variables keep them. Prints the largest once it is large: under a budget
        a leak does not fail, it gets slower.
        """
        if self._nameless():
            self._look_closer()
        for leak in () if self._told_leak else self._found()[:1]:
            if leak.kept is not None and leak.is_large(self.plans.limit_bytes, need_bytes):
                self._told_leak = True
                say(*self.leak_texts()[:1])

    def _look_at_the_end(self) -> None:
        """Looks where no leak was found: a function that has returned may have freed its leaks."""
        if not self._found():
            self._leaks.look()
        if self._nameless():
            self._name_leaks()
        now = self.native.stats()
        if not self.config.quiet and (now["evictions"] or now["offloads"]):
            self._kept = self._explain.kept(graphs=True)

    def _nameless(self) -> bool:
        """One of the leaks that are told has no variable."""
        return any(not leak.kept for leak in self._found()[:MOST_LEAKS])

    def _name_leaks(self) -> None:
        """Looks for the variables that keep the tensors of the leaks, and for optimizers: their states are no leak."""
        self._purposes.look()
        found = self._found()
        self._leaks.keep(found, self._holder_tables.with_keepers(found))

    def put_below(self, tensor: torch.Tensor) -> None:
        """Evicts the bytes now; the next use restores them (`memmgr.manage`)."""
        if self.native.adopt(tensor):
            self.native.take_away(tensor)

    def _measure_link(self) -> None:
        """Writes and reads some megabytes to measure the tier's rates. Later budgets of the process reuse them."""
        on_device = self.config.device.type != "cpu"
        for size in (64 << 20 if on_device else 8 << 20, 8 << 20, 1 << 20, 64 << 10):
            if self._tier in _links:
                break
            times = self.native.tier_probe(size)
            if on_device and times is not None:  # the first copy over a link wakes it, from pages that are new
                times = self.native.tier_probe(size)
            if times is not None:
                _links[self._tier] = (times["write"] + times["read"]) / (2 * size), times["cpu"] / (2 * size)
        if self._tier in _links:
            seconds, cpu = _links[self._tier]
            self.native.set_link(seconds, cpu)

    def summary(self) -> str:
        """One line."""
        return summary(self.stats(), binary=self.config.binary)


_collect = Rationed(0.01, gc.collect)
"""A whole collection, a tenth of a second where torch is imported: too much for a loop that opens a budget for each batch."""


def _thaw() -> None:
    """No search finds objects that `gc.freeze` has put aside, and their tensors would not be counted."""
    if gc.get_freeze_count():
        gc.unfreeze()
