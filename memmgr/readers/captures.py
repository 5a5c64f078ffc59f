"""Captured graphs: `torch.cuda.graph`, and its equivalents on other devices.

Between `capture_begin` and `capture_end` ops are recorded and do not run: no thread can compare, copy or query bytes
then. The graph contains the addresses of the tensors that its ops touch, so these stay where they are from then on. If a
graph was captured while no budget was open these tensors are not known, so all that exist at an opening stay.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .patches import Patches

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

METHODS = ("capture_begin", "capture_end")


def graph_classes(device: torch.device) -> list[type]:
    """Those whose captures may concern a budget on this device."""
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


_seen: weakref.WeakSet[Any] = weakref.WeakSet()
"""Graphs whose last capture was in a budget of the same device: the pager knows the tensors."""


def captured_earlier(found: Iterable[Any], device: torch.device) -> bool:
    """Is one of these objects a graph whose tensors are not known? A graph that was never captured has none."""
    classes = tuple(graph_classes(device))
    graphs = (thing for thing in found if issubclass(type(thing), classes))
    return any(graph not in _seen and _has_ended_a_capture(graph) for graph in graphs)


def _has_ended_a_capture(graph: Any) -> bool:
    try:
        graph.pool()
    except RuntimeError:
        return False
    except AttributeError:  # another device's graphs: it is not told
        return True
    return True


def _forget_at_begin(graphs: Any) -> None:
    """A capture while no budget is open ends the pager's knowledge of the graph. This patch is never undone."""
    original = graphs.capture_begin
    if hasattr(original, "_memmgr"):
        return

    @functools.wraps(original)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        _seen.discard(graph)
        return original(graph, *args, **kwargs)

    capture_begin._memmgr = True  # type: ignore[attr-defined]
    graphs.capture_begin = capture_begin


class Captures:
    """Reports running captures to the pager while one budget is open.

    Known limitations: a storage that a graph has touched is not evicted again while it lives. A capture that never ends
    keeps all tensors in memory until the budget closes.
    """

    def __init__(self, pager: Pager, device: torch.device, patches: Patches) -> None:
        self._pager = pager
        self._device = device
        self._patches = patches
        self._under_way: set[int] = set()

    def install(self) -> None:
        """Patches the functions that begin and end a capture."""
        for graphs in graph_classes(self._device):
            _forget_at_begin(graphs)
            self._patches.wrap(graphs, "capture_begin", self._begin)
            self._patches.wrap(graphs, "capture_end", self._end)

    def _begin(self, original: Any) -> Any:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._under_way.add(id(graph))  # first: Ctrl-C may come in between
            try:
                self._pager.begin_capture()
                result = original(graph, *args, **kwargs)
                if self._device.type != "cpu" and torch.accelerator.current_device_index() == self._device.index:
                    _seen.add(graph)
                return result
            except BaseException:
                self._ended(graph)
                raise

        return capture_begin

    def _end(self, original: Any) -> Any:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            finally:
                self._ended(graph)

        return capture_end

    def _ended(self, graph: Any) -> None:
        if id(graph) in self._under_way:
            self._under_way.discard(id(graph))
            self._pager.end_capture()
