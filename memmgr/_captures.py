"""Graphs that are captured and replayed while a budget is open: `torch.cuda.graph`, and what other devices have like it.

Between `capture_begin` and `capture_end` ops are written down and do not run: nothing can be compared, copied or asked for
then, in no thread, and what is handed out lies in the graph as an address for good. So memmgr stands aside: nothing is
recorded, autograd keeps what it saves itself, nothing leaves and nothing comes back. The allocator goes on keeping the
budget: what it has not is an out-of-memory error. A replay writes where no version counter tells, so what recipes need is
brought back before it, and no recipe from before runs after it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ._manager import Manager

METHODS = ("capture_begin", "capture_end", "replay")


def graph_classes(device: torch.device) -> list[type]:
    """Those whose captures and replays may concern a budget on this device."""
    found: list[Any] = [torch.cuda.CUDAGraph, getattr(torch.accelerator, "Graph", None)]
    if device.type not in ("cpu", "cuda"):
        module = torch.get_device_module(device.type)
        found += [thing for name, thing in vars(module).items() if name.endswith("Graph")]
    return [each for each in dict.fromkeys(found) if isinstance(each, type) and all(hasattr(each, m) for m in METHODS)]


def is_capturing(device: torch.device) -> bool:
    """Is the calling thread's current stream captured? Of the CPU there is none, of CUDA there may be one all the same."""
    if device.type in ("cpu", "cuda"):
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    ask = getattr(torch.get_device_module(device.type), "is_current_stream_capturing", None)
    return bool(ask is not None and ask())


class Captures:
    """The captures that are under way while one budget is open.

    Known limitation: a capture that is begun and never ended leaves memmgr aside until the budget closes.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._graphs: set[int] = set()
        self.lock = threading.Lock()  # the daemon holds it for a round, so that none is under way when a capture begins

    @property
    def under_way(self) -> bool:
        """Does memmgr stand aside?"""
        return bool(self._graphs)

    def begin(self, graph: object) -> None:
        """A capture is about to begin.

        Raises:
            torch.OutOfMemoryError: what was dropped before cannot be brought back.
        """
        with self.lock:
            first = not self._graphs
            self._graphs.add(id(graph))
        if not first:
            return
        try:
            self._bring_back_evicted()
        except BaseException:
            self._graphs.clear()
            raise
        manager, native = self._manager, self._manager.native
        # Other threads may allocate meanwhile: from them things may leave by a copy, since nobody watches writes, and no
        # checksum is taken, for which the CPU would wait.
        native.set_options(False, manager.has_tier, False, 0)
        native.set_active(False)

    def end(self, graph: object) -> None:
        """It has ended, or did not begin."""
        if id(graph) not in self._graphs:
            return
        self._graphs.discard(id(graph))
        if self._graphs:
            return
        manager, native = self._manager, self._manager.native
        if not manager.open:
            return
        native.forget_recipes()  # writes went unseen
        native.set_active(True)
        if not manager.sleeper.asleep and not manager.mode_is_out():
            manager.restore_options()

    def before_replay(self) -> None:
        """A graph is about to write to memory, nobody knows which.

        Raises:
            torch.OutOfMemoryError: what was dropped before cannot be brought back.
        """
        if not self._graphs:
            self._bring_back_evicted()
            self._manager.native.forget_recipes()

    def _bring_back_evicted(self) -> None:
        replayer = self._manager.replayer
        for cell in replayer.dropped():
            if not cell.stale:
                replayer.materialize(cell)
        replayer.forget()

    def missing(self, cell: Any) -> None:
        """Brings back what backward asks for.

        Raises:
            RuntimeError: from inside a capture, where it cannot be done.
        """
        if self._graphs and is_capturing(self._manager.device):
            raise RuntimeError(
                "memmgr: a graph is captured that needs a saved tensor which has left the device; run this backward "
                "before the capture begins, or capture its forward, too"
            )
        self._manager.replayer.materialize(cell)

    def close(self) -> None:
        """The budget closes."""
        self._graphs.clear()
