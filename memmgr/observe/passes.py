"""Passes: where one ends, and how long its halves took."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memmgr.readers.patches import Leave, Patches

from .rehearsal import is_rehearsal
from .source_lines import SourceLine, of_caller

if TYPE_CHECKING:
    from memmgr.native._pager import Pager


@dataclass(frozen=True)
class Pass:
    """One pass: from the end of an outermost backward to the end of the next.

    Attributes:
        resident_peak: the most that was on the device, in bytes.
        unmanaged_peak: the most that would have been, in bytes.
        completed: backward came to its end.
    """

    resident_peak: int
    unmanaged_peak: int
    forward_seconds: float
    backward_seconds: float
    completed: bool


class Passes:
    """Counts the passes of one budget.

    `checkpoint_seconds` are those in which the program ran ops again inside backward by itself: where grad mode is
    switched on there, as activation checkpointing does. `forward_floor_bytes` and `backward_floor_bytes` are the
    floor where the last backward began, and where it ended; `steps_before`: how often an optimizer had stepped by then.
    `escaped_bytes`: those whose addresses had been handed out for good where the last backward ended.
    `exports_grow`: tensors whose addresses others have were more where it ended than where the one before did.
    `in_several_threads`: more than one has begun a backward. `measuring_peak`: the most that was on the device in the
    passes before the limit was set, in bytes; 0: there were none.
    """

    def __init__(self, native: Pager, ended: Callable[[Pass], None], steps: Callable[[], int]) -> None:
        self._native = native
        self._ended = ended
        self._steps = steps
        self._here = threading.local()  # how deep a thread is in backward, and since when it recomputes
        self._lock = threading.Lock()
        self._begun = time.perf_counter()
        self._under_way = 0
        self._thread = 0  # whose was the first
        self.in_several_threads = False
        self.count = 0
        self.line: SourceLine | None = None  # that called the last backward
        self.seconds = 0.0
        self.checkpoint_seconds = 0.0
        self.resident_peak = self.measuring_peak = 0
        self.unmanaged_peak = 0
        self.forward_floor_bytes = self.backward_floor_bytes = self.steps_before = 0
        self._exports = self.escaped_bytes = 0
        self.exports_grow = False

    def measured(self) -> None:
        """The passes so far had no limit: they have a peak of their own."""
        self.measuring_peak, self.resident_peak = self.resident_peak, 0

    @property
    def in_backward(self) -> bool:
        """A backward is under way in some thread."""
        return self._under_way > 0

    def install(self, patches: Patches) -> None:
        """Patches the functions that begin and end a pass."""
        import torch.autograd.graph as graph

        patches.wrap(graph, "_engine_run_backward", self._backward)
        patches.wrap(torch.autograd, "_engine_run_backward", lambda _: graph._engine_run_backward)
        patches.wrap(torch.enable_grad, "__enter__", self._grad_mode_on)
        patches.wrap(torch.enable_grad, "__exit__", self._grad_mode_as_it_was)

    def _backward(self, original: Any) -> Any:
        def enter(*_args: Any, **_kwargs: Any) -> Leave | None:
            here = self._here.__dict__
            if here.get("depth", 0) or torch._C._current_graph_task_id() != -1 or is_rehearsal():
                return None  # inside another one, or none of the program's
            here["depth"] = 1
            self.line = of_caller()
            with self._lock:
                self._under_way += 1
                self._thread = self._thread or threading.get_ident()
                self.in_several_threads |= self._thread != threading.get_ident()
            self._native.turn_period()
            self.forward_floor_bytes = self._native.stats()["floor_bytes"]
            begun = time.perf_counter()

            def leave(_result: Any, error: BaseException | None) -> None:
                here["depth"] = 0
                self._end(begun, error is None)

            return leave

        return self._native.around(original, enter)

    def _end(self, turned: float, completed: bool) -> None:
        ended_at = time.perf_counter()
        with self._lock:
            self._under_way -= 1
            peaks = self._native.end_pass()
            now = self._native.stats()
            self.backward_floor_bytes, self.escaped_bytes = now["floor_bytes"], now["escaped_bytes"]
            self.exports_grow, self._exports = now["exported_cells"] > self._exports, now["exported_cells"]
            self.steps_before = self._steps()
            self.resident_peak = max(self.resident_peak, peaks["resident"])
            self.unmanaged_peak = max(self.unmanaged_peak, peaks["unmanaged"])
            forward = max(0.0, turned - self._begun)
            ended = Pass(peaks["resident"], peaks["unmanaged"], forward, ended_at - turned, completed)
            self._begun = ended_at
            self.count += 1
            self.seconds += ended.forward_seconds + ended.backward_seconds
        self._ended(ended)

    def _grad_mode_on(self, original: Any) -> Any:
        @functools.wraps(original)
        def enter(mode: Any) -> Any:
            result = original(mode)
            here = self._here.__dict__
            if "mode" not in here and torch._C._current_graph_task_id() != -1:
                here["mode"], here["since"] = mode, time.perf_counter()
            return result

        return enter

    def _grad_mode_as_it_was(self, original: Any) -> Any:
        @functools.wraps(original)
        def leave(mode: Any, *exception: Any) -> Any:
            here = self._here.__dict__
            if here.get("mode") is mode:
                del here["mode"]
                with self._lock:
                    self.checkpoint_seconds += time.perf_counter() - here["since"]
            return original(mode, *exception)

        return leave
