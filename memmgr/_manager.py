"""One open budget: connects the shim, the recorder, the policies, the tier and the daemon."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memmgr.policies import NO_LINK, Action, Candidates, Link, Policy, plan_writeback, rank, window_costs
from memmgr.policies.rules.types import KEPT_SHARE
from memmgr.policies.rules.writeback import WATERMARKS
from memmgr.policies.trace import TierLink, Trace

from . import _device
from ._captures import Captures, is_capturing
from ._daemon import Daemon
from ._errors import BudgetError, Holdings, RecomputeError, budget_error, failed_tier, torchs_own_words
from ._guards import Guards
from ._measure import Measuring
from ._placement import REMAP, Placement
from ._plans import Plans
from ._recorder import Plain, Recorder, make_mode
from ._replay import Replayer
from ._sizes import UNLIMITED
from ._sleep import Sleeper, adopt_graph, hooks_on_top
from ._stock import Stock, holders, missing_states, step_bytes
from ._telemetry import Telemetry
from .observe.recorder import RecorderFigures
from .observe.summary import fragmentation, summary
from .observe.summary import report as report_end

# What the mode costs in backward, where it only watches writes: about two ops a saved tensor, at what an empty mode costs an
# op (benchmarks/step_cost.py, section ops).
MODE_SECONDS = 5e-6
SAMPLE = 64  # one drop in so many keeps a checksum (rule 7)


@dataclass
class Config:
    """What `budget(...)` was asked for, parsed."""

    limit_bytes: int
    device: torch.device
    host_bytes: int | None
    folder: str | None
    disk_bytes: int
    policy: Policy
    verify: bool
    quiet: bool
    throttle: int = 0
    sleep: bool = True
    placement: Placement = REMAP
    plan: bool = True
    log: str | None = None
    trace: str | None = None
    trace_pass: int = 2
    binary: bool = False  # errors speak in powers of two, as the limit did


@dataclass
class Pass:
    """Times of the pass that is under way and of the last one, for the policies' estimates."""

    begun: float = 0.0
    turned: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    saved_bytes: float = 0.0
    uses: int = 0
    unpacks_before: int = 0
    in_backward: bool = False
    backward_growth: float = 0.0


@dataclass
class _Thread:
    """Mode and hooks of one thread, and whether they are on its stacks."""

    mode: Any
    hooks: Any
    mode_in: bool = True
    hooks_in: bool = True
    popped: bool = False


class Manager:
    """The state of one open budget."""

    def __init__(self, config: Config, native: Any) -> None:
        self.config = config
        self.native = native
        self.device = config.device
        self.policy = config.policy
        self.open = False
        self.ended_well = False  # at the end of a process: it is closed as after an exception, without one
        self.proving = config.limit_bytes < UNLIMITED
        self.replayer = Replayer(native, self)
        self.recorder = Recorder(native, self)
        self.measuring = Measuring(native, self)
        self.guards = Guards(self)
        self.captures = Captures(self)
        self.daemon: Daemon | None = None
        self.telemetry = Telemetry(native, RecorderFigures(self), config.log)
        self.passes = 0
        self.last = Pass()
        self._mode_class = make_mode(native)
        self._tls = threading.local()
        self._stock: Stock | None = None
        self.has_tier = False
        self._probe = (1e9, 1e9, 0.0)
        self._begun = 0.0
        self._wall = 0.0
        self._final: dict[str, Any] | None = None
        self._torture_turn = 0
        self._searches = False
        self._under: tuple[int, Any] = (0, None)
        self._at_turn = 0
        self.pressed = False  # the last pass would not have fitted without us
        self.rankings = 0
        self._recomputed = [0.0, 0.0]  # seconds by the program itself, and of the passes that were recorded
        self._peaks = [0, 0]  # resident, unmanaged: over the passes that ended
        self._recorded_peak = 0  # unmanaged, over those of them that were recorded
        self.may_evict = self.policy.recomputes
        self.plans = Plans(self, config.plan and bool(config.policy.planner))
        self.sleeper = Sleeper(self, config.sleep and not config.policy.torture and config.limit_bytes < UNLIMITED)

    @property
    def traced(self) -> Trace | None:
        """The pass for which the user asked (`budget(trace=)`), once it has ended."""
        measured = self.measuring.last if self.config.trace is not None else None
        return measured.trace if measured is not None else None

    # -- opening and closing --

    def start(self) -> None:
        """Installs everything; on an error nothing stays behind."""
        native, config = self.native, self.config
        if is_capturing(self.device):
            raise RuntimeError("memmgr: a budget cannot be opened while a graph is captured")
        self._begun = time.perf_counter()
        native.reset_counters()
        gc.collect()  # what is garbage already shall not count against the budget
        if native.place() != str(self.device):
            self._settle_doomed_tier()  # into the memory that it is about, while that is the one at hand
        stock = self._stock = Stock(native, self.device)
        there = stock.bytes + _device.live_bytes(self.device)
        if there > config.limit_bytes:
            stock.close()
            raise self._states_too_big(there)
        try:
            native.configure(
                on_slow=self.recorder.slow,
                on_new_kind=self.recorder.first_use if self.proving else None,
                on_classify=self.recorder.classify,
                on_missing=self.captures.missing,
                on_rank=self._rank,
                on_kept=self._kept,
                on_empty=self._empty,
                on_oom=self.explain,
                on_retry=self._retry,
                on_progress=self._progress,
                mode_class=self._mode_class,
                on_pack_other=Plain,
                on_unpack_other=Plain.get,
                out_of_memory_type=torch.OutOfMemoryError,
            )
            _device.open_memory(native, config, stock.bytes)
            self._searches = config.placement.search >= 0 and config.limit_bytes < UNLIMITED
            if config.limit_bytes < UNLIMITED:
                native.set_placement(config.placement.search, config.placement.remap, config.placement.apart)
            self._settle_doomed_tier()
            self.has_tier = self.policy.offloads and _device.open_tier(native, config)
            self.restore_options()
            self._fit_what_is_there()
            native.set_always_rank(self.policy.torture)
            native.set_watching(True)
            self.guards.install()
            self.open = True
            native.begin_pass()
            native.set_active(True)
            if self.has_tier:
                self._measure_link()
                self.daemon = Daemon(self)
                self.daemon.start()
            self.telemetry.start()
            self._enter_thread()
            self.last.begun = time.perf_counter()
            self.measuring.begin()
        except BaseException:
            self.close(report=False)
            raise

    def _fit_what_is_there(self) -> None:
        """What a graph of an earlier budget holds is in our own memory, and may be more than the limit: it goes to the tier.

        Raises:
            BudgetError: that is not enough.
        """
        native, limit = self.native, self.config.limit_bytes
        if native.resident() <= limit:
            return
        for cell in native.handled() if self.has_tier else ():
            native.release(cell, Action.OFFLOAD)
            if native.resident() <= limit:
                native.reset_peak()  # what was there before counts from here on
                return
        self._bring_all_back(within_budget=False)  # the tier goes when this budget does not open
        raise self._states_too_big(native.resident())

    def close(self, report: bool = True, failed: bool = False) -> None:
        """Leaves ordinary tensors, no files, no threads, no changed global (rule 10)."""
        native = self.native
        was_open, self.open = self.open, False
        self.measuring.abort()
        self._leave_thread()
        complaints = []
        if self.daemon is not None:
            self.daemon.stop()
            complaints = [
                f"bringing tensors back early failed ({text}); please report this" for text in self.daemon.errors
            ]
            self.daemon = None
        self.guards.remove()
        self.captures.close()
        self._wall = time.perf_counter() - self._begun
        lazily = False
        self.plans.close()
        self.replayer.forget()
        try:
            if was_open:
                native.set_always_rank(False)
                native.disarm_all()
                native.end_pass()
                self._final = self._collect()
                lazily = not self._bring_all_back(within_budget=failed)
        except BaseException:
            lazily = True
            raise
        finally:
            native.set_active(False)
            if self._final is None:
                self._final = self._collect()
            self.telemetry.close(self._final, self.summary(), failed and not self.ended_well)
            complaints += self.telemetry.complaints()
            native.configure(
                on_rank=None,
                on_kept=None,
                on_empty=None,
                on_progress=None,
                mode_class=None,
                on_new_kind=None,
                on_oom=None,
                on_retry=None,
            )
            native.forget_all()
            native.forget_ops()
            native.close_arena()
            # After an exception the traceback keeps the graph; what it needs comes back when, and if, it is asked for.
            if lazily:
                native.doom_tier()
            else:
                native.close_tier()
            if self._stock is not None:
                self._stock.close()
        if report and was_open and not self.config.quiet:
            report_end(self.stats())
        for text in complaints:  # last: a warning may be an exception here, and everything is closed
            warnings.warn(f"memmgr: {text}", RuntimeWarning, stacklevel=3)

    def _bring_all_back(self, *, within_budget: bool) -> bool:
        """What the graph still needs becomes ordinary memory.

        After an exception the graph lives on in the traceback, most likely for nobody: then only what fits into the budget
        comes back, and the rest when, and if, it is asked for. Returns whether everything is back.
        """
        native, limit = self.native, self.config.limit_bytes
        if not within_budget:
            native.set_budget(UNLIMITED)
        for cell in native.handled():
            if cell.stale or not cell.gone:
                continue
            if within_budget and native.resident() + cell.nbytes > limit:
                return False
            try:
                self.replayer.materialize(cell)
            except torch.OutOfMemoryError:
                return False
            except RecomputeError:
                continue  # its own unpack will say so, if anybody asks
        return True

    def _settle_doomed_tier(self) -> None:
        """An earlier budget ended by an exception and its graph still lives: bring it back before its tier goes."""
        if self.native.tier_stats():
            for cell in self.native.handled():
                if cell.gone and not cell.stale:
                    with contextlib.suppress(OSError, RuntimeError):  # garbage, most likely; its own unpack will say so
                        self.native.bring_back(cell)
            self.native.close_tier()

    def disable_in_child(self) -> None:
        """In a forked child: hooks and mode stay on the thread's stacks but do nothing."""
        self.open = False
        self.telemetry.in_child()
        self.native.set_active(False)

    def tier_name(self) -> str | None:
        """What is below the device: `disk`, `host`, or nothing."""
        if not self.has_tier:
            return None
        return "disk" if self.device.type == "cpu" else "host"

    def restore_options(self) -> None:
        """What malloc may do by itself with cells that nobody ranked."""
        self.native.set_options(self.may_evict, self.has_tier, self.config.verify, SAMPLE)

    # -- the mode and the hooks of a thread --

    def _enter_thread(self) -> None:
        mode = self._mode_class()
        hooks = torch.autograd.graph.saved_tensors_hooks(self.native.pack, self.native.unpack)
        mode.__enter__()
        hooks.__enter__()
        self._tls.state = _Thread(mode, hooks)

    def _leave_thread(self) -> None:
        state = getattr(self._tls, "state", None)
        if state is None:
            return
        self._tls.state = None
        if state.hooks_in:
            state.hooks.__exit__(None, None, None)
        if state.mode_in:
            state.mode.__exit__(None, None, None)

    def ours_on_top(self) -> bool:
        """Are the innermost mode and hooks of this thread ours, so that they can be taken off and put back?"""
        state = getattr(self._tls, "state", None)
        if state is None or not state.mode_in or not state.hooks_in:
            return False
        return self._mode_on_top(state) and self._hooks_on_top()

    def _mode_on_top(self, state: _Thread) -> bool:
        depth = torch._C._len_torch_dispatch_stack()
        return depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is state.mode

    def _hooks_on_top(self) -> bool:
        top = hooks_on_top()
        return top is not None and top[0] is self.native.pack

    def step_out(self) -> None:
        """Takes mode and hooks off this thread's stacks, where they are on top; again if an interrupt left it half done."""
        state = self._tls.state
        if self._hooks_on_top():
            state.hooks.__exit__(None, None, None)
        state.hooks_in = False
        if self._mode_on_top(state):
            state.mode.__exit__(None, None, None)
        state.mode_in = False
        self._under = (torch._C._len_torch_dispatch_stack(), hooks_on_top())

    def can_step_in(self) -> bool:
        """Are the stacks as they were when we stepped out?"""
        state = getattr(self._tls, "state", None)
        if state is None or state.mode_in or state.hooks_in:
            return False
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            return False  # inside a transform of torch.func, say
        depth, top = self._under
        now = hooks_on_top()
        same = now is None if top is None else now is not None and now[0] is top[0]
        return bool(torch._C._len_torch_dispatch_stack() == depth and same)

    def step_in(self) -> None:
        """Puts them back; again if an interrupt left it half done."""
        state = self._tls.state
        if not self._hooks_on_top():
            state.hooks.__enter__()  # may be refused
        state.hooks_in = True
        if not self._mode_on_top(state):
            state.mode.__enter__()
        state.mode_in = True

    @contextmanager
    def thread_scope(self) -> Iterator[None]:
        """A thread that was started inside the context is managed too."""
        self._enter_thread()
        try:
            yield
        finally:
            self._leave_thread()

    @contextmanager
    def hooks_aside(self) -> Iterator[None]:
        """For torch.func, which refuses to run under saved-tensor hooks."""
        state = getattr(self._tls, "state", None)
        top = hooks_on_top()
        if state is None or not state.hooks_in or top is None or top[0] is not self.native.pack:
            yield
            return
        state.hooks.__exit__(None, None, None)
        try:
            yield
        finally:
            state.hooks.__enter__()

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """Ops of our own, below everything."""
        below: contextlib.AbstractContextManager[None] = self.native.Below()
        return below

    def mode_is_out(self) -> bool:
        """Is the mode off this thread's stack for the time of a backward?"""
        state = getattr(self._tls, "state", None)
        return self.open and state is not None and state.popped and not state.mode_in

    def push_mode(self) -> None:
        """Records again: grad mode was switched on inside backward."""
        state = self._tls.state
        state.mode.__enter__()
        state.mode_in = True

    def pop_mode(self) -> None:
        """Undoes `push_mode`."""
        state = getattr(self._tls, "state", None)
        if state is not None and state.mode_in:
            state.mode.__exit__(None, None, None)
            state.mode_in = False

    # -- passes --

    @contextmanager
    def backward_scope(self, *, outermost: bool, create_graph: bool) -> Iterator[None]:
        """Around every backward; the outermost one ends a pass."""
        if not outermost:
            yield
            return
        native, last = self.native, self.last
        now = time.perf_counter()
        last.turned = now
        last.in_backward = True
        uses = native.unpack_count()
        self._at_turn = native.resident()
        clock = native.clock()
        measured = self.measuring.here
        if measured:
            self.measuring.turn()
        completed = False
        try:
            with native.Finally(self._push_after_backward):
                self._pop_for_backward(create_graph)
                yield
            completed = True
        except torch.OutOfMemoryError as error:
            if isinstance(error, BudgetError):
                raise
            self.explain(error)
        finally:
            end = time.perf_counter()
            last.in_backward = False
            try:
                if measured:
                    self.measuring.end(completed)  # takes a while, in which Ctrl-C may come
            finally:
                if self.open:
                    self.passes += 1
                    last.forward_seconds, last.backward_seconds = now - last.begun, end - now
                    last.uses = max(1, native.unpack_count() - uses)
                    last.begun = time.perf_counter() if measured else end
                    if not create_graph and not self.sleeper.asleep:
                        # Ops that are recorded inside backward: the program recomputes by itself (checkpointing).
                        self._recomputed[0] += native.clock() - clock
                        self._recomputed[1] += last.forward_seconds + last.backward_seconds
                    if not create_graph and not self.sleeper.asleep:
                        native.end_pass()
                    self._end_of_pass()

    def _pop_for_backward(self, create_graph: bool) -> None:
        """Takes the mode off for a backward in which nothing is gone and little or nothing will have to go.

        Then no recipe is needed, so nobody's writes need watching; should room run out all the same, cells are
        offloaded, never dropped: worth it as long as that takes less time than the mode. Grad mode switched on inside
        puts the mode back (see Guards).
        """
        native = self.native
        resident, budget, saved, gone, *_ = native.pressure()
        if create_graph or gone or self.policy.torture or not self.has_tier or not self.ours_on_top():
            return
        if native.several_streams() or self.measuring.here:
            return  # the mode notes on which stream backward uses what may leave, and what a pass does
        last = self.last
        beyond = resident + last.backward_growth - budget  # as in the last pass
        if self.config.disk_bytes or native.counters()["tier_errors"]:
            beyond += last.backward_growth * 0.1 + budget // 50  # a tier that may be full is no net to fall into
        if not self.passes or (beyond > 0 and self._offload_seconds(beyond, saved) > last.uses * MODE_SECONDS):
            return
        self._tls.state.popped = True  # first: whatever an interrupt leaves half done is put back
        native.set_options(False, True, self.config.verify, 0)
        self.pop_mode()

    def _offload_seconds(self, nbytes: float, saved_bytes: int) -> float:
        """To write so many of the saved bytes and to read them back, in cells of the size that they have in this pass."""
        link = self.link()
        if not link.write_bytes_per_second or not link.read_bytes_per_second:
            return math.inf
        cells = nbytes * max(1, self.last.uses) / max(1, saved_bytes)
        return (
            nbytes / link.write_bytes_per_second
            + nbytes / link.read_bytes_per_second
            + 2 * cells * link.latency_seconds
        )

    def _push_after_backward(self) -> None:
        state = getattr(self._tls, "state", None)
        if state is None or not state.popped:
            return
        stack = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
        if any(mode is state.mode for mode in stack):
            state.mode_in = True
        else:
            self.push_mode()
        # Whatever was written unseen: recipes that still name it must not run.
        self.native.forget_recipes()
        self.restore_options()
        state.popped = False

    def _end_of_pass(self) -> None:
        resident, unmanaged = self.native.peak()
        self.last.backward_growth = max(0.0, float(resident - self._at_turn))
        self._peaks = [max(self._peaks[0], resident), max(self._peaks[1], unmanaged)]
        if not self.sleeper.asleep:
            self._recorded_peak = max(self._recorded_peak, unmanaged)
        self.native.reset_peak()
        self.telemetry.ended_pass(resident, unmanaged, self.last.forward_seconds, self.last.backward_seconds)
        self.pressed = unmanaged > self.config.limit_bytes
        self.sleeper.end_of_pass(unmanaged)
        ended = self.native.begin_pass()
        self.replayer.forget()
        if self.plans.allowed:
            self.plans.end_of_pass(ended, self.measuring.take())
        self.measuring.begin()

    def can_trace(self) -> bool:
        """Are mode and hooks on this thread's stacks, so that the pass that begins can be measured? Wakes the recorder."""
        if self.sleeper.asleep:
            self.sleeper.wake()
        state = getattr(self._tls, "state", None)
        return state is not None and state.mode_in and state.hooks_in

    # -- what the policies see --

    def seconds_per_use(self) -> float:
        last = self.last
        return last.backward_seconds / last.uses if last.uses else 0.0

    def stall_seconds(self) -> float:
        """Time that compute has waited for us so far."""
        return float(self.native.stalled())

    def _measure_link(self) -> None:
        """Writes and reads some megabytes: bandwidth, and the processor time that a byte costs (design §5)."""
        native = self.native
        c0 = time.process_time()
        probed = _device.probe(native)
        if probed is None:
            return
        size, wrote, read = probed
        cpu = max(0.0, time.process_time() - c0)
        self._probe = (size / max(wrote, 1e-9), size / max(read, 1e-9), cpu / (2 * size))
        link = self.link()
        native.set_link(link.write_seconds_per_byte + link.read_seconds_per_byte + cpu / size)

    def link(self) -> Link:
        """The way to the tier as it is now."""
        if not self.has_tier:
            return NO_LINK
        stats = self.native.tier_stats()
        write, read, cpu = self._probe
        if self.config.throttle:
            write = min(write, float(self.config.throttle))
            read = min(read, float(self.config.throttle))
        last = self.last
        until_turn = 0.0
        demand = float("inf")
        if not last.in_backward and last.forward_seconds:
            until_turn = max(0.0, last.forward_seconds - (time.perf_counter() - last.begun))
            saved = self.native.pressure()[2] + self.native.pressure()[3]
            demand = max(1.0, saved / max(1e-6, time.perf_counter() - last.begun))
        return Link(
            write_bytes_per_second=write,
            read_bytes_per_second=read,
            queued_write_bytes=stats["queued_write_bytes"],
            queued_read_bytes=stats["queued_read_bytes"],
            latency_seconds=1e-4,
            cpu_seconds_per_byte=cpu,
            demand_bytes_per_second=demand,
            seconds_until_reads=until_turn,
        )

    def tier(self) -> TierLink | None:
        """The way to the tier as plans and traces describe it; None: there is none, or it was not measured."""
        link = self.link()
        if not link.write_bytes_per_second or not link.read_bytes_per_second:
            return None
        return TierLink(
            self.tier_name() or "",
            link.write_bytes_per_second,
            link.read_bytes_per_second,
            link.latency_seconds,
            cpu_seconds_per_byte=link.cpu_seconds_per_byte,
        )

    def candidates(self) -> tuple[list[Any], Candidates]:
        """The cells that could leave now, as columns."""
        cells, size, stale, cost, chain, component, recomputable, clean, seq = self.native.columns()
        n = len(cells)
        sequence = np.frombuffer(seq, dtype=np.int64)
        staleness = np.frombuffer(stale, dtype=np.float64)
        last = self.last
        if last.in_backward:
            distance = np.maximum(0, self.native.position() - sequence)
            until = distance * self.seconds_per_use()
        else:
            until_turn = (
                max(0.0, last.forward_seconds - (time.perf_counter() - last.begun)) if last.forward_seconds else 0.0
            )
            distance = (sequence.max() - sequence) if n else sequence
            until = until_turn + 2.0 * (until_turn + staleness)
        room = np.full(n, self.has_tier)
        return cells, Candidates(
            size_bytes=np.frombuffer(size, dtype=np.int64),
            staleness_seconds=staleness,
            cost_seconds=np.frombuffer(cost, dtype=np.float64),
            chain_seconds=np.frombuffer(chain, dtype=np.float64),
            component_seconds=np.frombuffer(component, dtype=np.float64),
            recomputable=np.frombuffer(recomputable, dtype=np.bool_),
            clean=np.frombuffer(clean, dtype=np.bool_),
            offloadable=room,
            next_use=distance.astype(np.int64),
            seconds_until_use=until,
        )

    # -- callbacks of the shim --

    def _rank(self, reserve: int) -> int:
        self.rankings += 1
        if self._searches:
            self.native.disarm_all()  # a search chooses among all cells, so all are ranked anew
        cells, candidates = self.candidates()
        if not cells:
            return 0
        native = self.native
        if self.policy.torture:
            for cell in cells:
                self._torture_turn ^= 1
                native.release(cell, 1 + self._torture_turn)
            return 0
        link = self.link()
        need = 2 * reserve
        ranking = rank(
            candidates,
            self.policy.filter,
            self.policy.director,
            link,
            None if self._searches else need,
            urgent_bytes=need,
        )
        if self._searches:
            costs, exponent = window_costs(candidates, self.policy.filter, link)
            wishes = np.zeros(len(cells), dtype=np.int8)
            wishes[ranking.order] = ranking.action
            native.price(cells, costs, wishes, exponent)
            ranking = ranking.until(candidates, need)
        native.arm([(cells[i], int(a)) for i, a in zip(ranking.order.tolist(), ranking.action.tolist(), strict=True)])
        if self.has_tier:
            resident, budget, *_ = native.pressure()
            early = plan_writeback(
                candidates, ranking, link, resident_bytes=resident, budget_bytes=budget, watermarks=WATERMARKS
            )
            for i in early.order.tolist():
                native.write_back(cells[i])
        return ranking.released_bytes(candidates)

    def surprise(self, want: int) -> int:
        """A malloc without the GIL found the vault empty, or the recorder is asleep: hand over what there is."""
        if self.sleeper.asleep:
            self.sleeper.surprises += 1
            with self.unseen():
                return adopt_graph(self)
        return self.replayer.forget() or self._lose_roots(0)

    def settle_managed(self, cell: Any) -> None:
        """A managed tensor was used: its bytes go back to the tier."""
        if self.has_tier and self.daemon is not None:
            self.native.write_back(cell)
            self.daemon.park(cell)

    def _progress(self, seq: int) -> None:
        if self.daemon is not None:
            self.daemon.wake()

    def _kept(self) -> None:
        """Roots that only recipes hold: more than a share of what is resident, and the largest are given up."""
        self._lose_roots(int(self.native.resident() * KEPT_SHARE))

    def _lose_roots(self, cap: int) -> int:
        native = self.native
        roots = native.kept_roots()
        total = sum(cell.nbytes for cell in roots)
        lost = 0
        for cell in sorted(roots, key=lambda c: -c.nbytes):
            if total <= cap:
                break
            if native.would_strand(cell):
                continue  # something that is gone can only be made again with it
            size = cell.nbytes
            native.lose(cell)
            total -= size
            lost += size
        return lost

    def _empty(self, want: int) -> int:
        """The vault is empty and the thread has the GIL."""
        return self.surprise(want)

    def _retry(self) -> bool:
        """Between two ops, out of memory: garbage cycles may hold tensors."""
        before = self.native.resident()
        self.replayer.forget()
        gc.collect()
        self._lose_roots(0)
        return bool(self.native.resident() < before)

    # -- errors --

    def explain(self, error: BaseException) -> None:
        """Turns torch's out-of-memory error into ours, with the split and the floor.

        Raises:
            BudgetError: always.
        """
        if isinstance(error, BudgetError):
            raise error
        stats = self.native.arena_stats()
        floor = int(self.native.counters()["floor_bytes"])
        held = self._holdings()
        raised = budget_error(
            torchs_own_words(str(error)),
            held,
            budget_bytes=int(stats.get("budget_bytes", 0)),
            floor_bytes=floor,
            failed=failed_tier(str(error)),
            below_bytes=int(self.native.tier_stats().get("used_peak_bytes", 0)),
            seen=self.last.in_backward or self.passes > 0,
            binary=self.config.binary,
        )
        self.telemetry.happened(
            "budget_error",
            floor_bytes=raised.floor_bytes,
            held=held.kinds,
            modules=dict(held.modules),
            text=str(error).splitlines()[0],
        )
        raise raised from None

    def _holdings(self, *, graphs: bool = False) -> Holdings:
        with self.unseen():
            kinds, modules = holders(self.native, self.device, graphs=graphs)
            # Model states that are still to come: so that it fails now, and not again at the next try (design §4).
            return Holdings(
                kinds, modules, missing_states(self.native, self.device), step_bytes(self.native, self.device)
            )

    def _states_too_big(self, there: int) -> BudgetError:
        return budget_error(
            _device.out_of_memory_words(self.device),
            self._holdings(graphs=True),
            budget_bytes=self.config.limit_bytes,
            there_bytes=there,
            binary=self.config.binary,
        )

    # -- reports --

    def _collect(self) -> dict[str, Any]:
        native = self.native
        n, a, t = native.counters(), native.arena_stats(), native.tier_stats()
        wall = self._wall or time.perf_counter() - self._begun
        return {
            "budget_bytes": self.config.limit_bytes,
            "resident_bytes.current": native.resident(),
            "resident_bytes.peak": max(a.get("resident_peak_bytes", 0), self._peaks[0]),
            "held_bytes.peak": n["held_peak_bytes"],
            "floor_bytes": max(n["floor_bytes"], n["held_peak_bytes"]),
            "unmanaged_peak_bytes": max(a.get("unmanaged_peak_bytes", 0), self._peaks[1]),
            "recorded_peak_bytes": self._recorded_peak,
            "outside_bytes": a.get("outside_bytes", 0),
            "evictions": n["evictions"],
            "evicted_bytes": n["evicted_bytes"],
            "binarized": n["binarized"],
            "binarized_bytes": n["binarized_bytes"],
            "recomputes": self.replayer.recomputes,
            "recompute_seconds": self.replayer.seconds + n["expand_ns"] * 1e-9,
            "offloads": n["offloads"],
            "offload_bytes": n["offload_bytes"],
            "reloads": n["reloads"],
            "reload_bytes": n["reload_bytes"],
            "write_backs": n["write_backs"],
            "clean_drops": n["clean_drops"],
            "prefetch_hits": n["prefetch_hits"],
            "prefetch_misses": n["prefetch_misses"],
            "stall_seconds": n["stall_ns"] * 1e-9,
            "wall_seconds": wall,
            "checkpoint_seconds": self._recomputed[0],
            "watched_seconds": self._recomputed[1],
            "passes": self.passes,
            "planned_passes": self.plans.counts.followed,
            "plans": self.plans.counts.made,
            "plan_seconds": self.plans.counts.seconds,
            "rankings": self.rankings,
            "recorded_ops": n["recorded_ops"],
            "saved_tensors": n["packs"],
            "reclaims": a.get("reclaims", 0),
            "search_seconds": a.get("search_nanoseconds", 0) * 1e-9,
            "fragmentation": fragmentation(a),
            "committed_bytes.peak": a.get("committed_peak_bytes", 0),
            "tier_bytes.peak": t.get("used_peak_bytes", 0),
            # A read that failed for a prefetch which nobody waited for is known to the tier alone.
            "tier_errors": max(n["tier_errors"], t.get("errors", 0)),
            "unranked_releases": n["unranked"],
        }

    def stats(self) -> dict[str, Any]:
        """The flat dict that `memmgr.stats()` returns."""
        return dict(self._final) if self._final is not None else self._collect()

    def summary(self) -> str:
        """One line."""
        return summary(self.stats())


def default_folder() -> str:
    """The system's folder for temporary files."""
    return os.environ.get("MEMMGR_DISK") or tempfile.gettempdir()
