"""Graphs that are captured and replayed inside a budget (see child.py).

memdev's graphs are the driver's. Captured work does not run. A stream that is captured refuses calls that order work with
it or query events (`fake_capture_violations` counts them). A replay writes to the addresses of the capture.
"""

import contextlib
import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from . import managed
from .managed import _digest
from .scenarios import DEVICE

import memmgr  # isort: skip
from memmgr.api import budget as budgets  # isort: skip
from memmgr.native import binding  # isort: skip
from memmgr.readers import captures  # isort: skip
from memmgr.runtime import session  # isort: skip

N = 16384
EVICT, OFFLOAD = 0, 1


def _leave(tensor: Tensor, action: int) -> Callable[[], None]:
    """Returns a function that evicts the tensor, even if only autograd holds it by then. It does nothing without memmgr."""
    if budgets.current() is None:
        return lambda: None
    cell = tensor.untyped_storage()._cdata

    def leave() -> None:
        assert binding.load().take_away(cell, action), "it did not leave: this shows nothing"

    return leave


def _all_leaves() -> None:
    """Evicts all cells that can be evicted; does nothing without memmgr."""
    if budgets.current() is not None:
        for tensor in binding.load().objects_of((Tensor,)):
            if tensor.device.type == DEVICE:
                binding.load().take_away(tensor, OFFLOAD)


@contextlib.contextmanager
def _capture(graph: Any) -> Iterator[None]:
    """As torch.cuda.graph: the capture ends in any case."""
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def _product(x: Tensor, w: Tensor) -> Tensor:
    h = (x * w).sin()
    return (h.cos() * h).sum()


def _captured(x: Tensor, w: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Forward and backward as one graph, after a warm-up as torch's documentation has it."""
    module: Any = torch.get_device_module(DEVICE)
    stream = torch.Stream(DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    graph = module.Graph()
    with stream:
        for _ in range(2):
            torch.autograd.grad(_product(x, w), w)
        with _capture(graph):
            loss = _product(x.tanh(), w)  # of a kind that is new: its proof would wait for the device
            (grad,) = torch.autograd.grad(loss, w)
    torch.accelerator.current_stream().wait_stream(stream)
    return graph, loss.detach(), grad


def whole_step() -> list[Tensor]:
    """A step as a graph, replayed between eager passes whose saved tensors are evicted and restored."""
    torch.manual_seed(0)
    # Autograd orders the streams at a leaf that is used on two, which no capture can have.
    w, v = (torch.randn(N).to(DEVICE).requires_grad_() for _ in range(2))
    x = torch.zeros(N).to(DEVICE)
    before = (v * 3).sin()  # saved before the capture, needed after it
    kept, leave = torch.dot(before, v), _leave(before, OFFLOAD)
    del before
    leave()
    graph, loss, grad = _captured(x, w)
    found = []
    for i in range(3):
        x.copy_(torch.full((N,), 0.5 + i))
        _all_leaves()
        graph.replay()
        found += [loss.cpu(), grad.cpu()]
        h = (v * (i + 1)).sin()
        eager, leave = torch.dot(h.cos(), v), _leave(h, OFFLOAD if i % 2 else EVICT)
        del h
        leave()
        found += [each.cpu() for each in torch.autograd.grad(eager, v)]
    found += [each.cpu() for each in torch.autograd.grad(kept, v)]
    return found


def two_graphs() -> list[Tensor]:
    """As `torch.cuda.make_graphed_callables`: forward is one graph, backward another, and between the two there is pressure."""
    torch.manual_seed(2)
    w = torch.randn(N).to(DEVICE).requires_grad_()
    x = torch.zeros(N).to(DEVICE)
    module: Any = torch.get_device_module(DEVICE)
    stream = torch.Stream(DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    forward, backward = module.Graph(), module.Graph()
    with stream:
        torch.autograd.grad(_product(x, w), w)
        with _capture(forward):
            loss = _product(x, w)
        _all_leaves()
        with _capture(backward):
            (grad,) = torch.autograd.grad(loss, w)
    torch.accelerator.current_stream().wait_stream(stream)
    found = []
    for i in range(3):
        x.copy_(torch.full((N,), 0.5 + i))
        forward.replay()
        backward.replay()
        found += [loss.detach().cpu(), grad.cpu()]
    return found


def overwritten() -> list[Tensor]:
    """A replay writes to the output of a recorded op, which another op has read. The evicted result of that op is not made
    again from the new bytes."""
    torch.manual_seed(1)
    given = torch.randn(N).to(DEVICE).requires_grad_()
    x = torch.ones(N).to(DEVICE)
    state = (given * 2).detach()
    stream = torch.Stream(DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    graph: Any = torch.get_device_module(DEVICE).Graph()
    with stream, _capture(graph), torch.no_grad():
        state.add_(x)
    found = []
    for late in (False, True):  # the first pass proves the kinds of op
        leaf = torch.ones(N).to(DEVICE).requires_grad_()
        y = state + leaf * 0
        z = torch.dot(y.sin(), leaf)
        leave = _leave(y, EVICT)
        del y
        if late:
            leave()
        graph.replay()
        found += [each.cpu() for each in torch.autograd.grad(z, leaf)]
    return [*found, state.cpu()]


def no_room() -> list[Tensor]:
    """A request beyond the budget is an error while a graph is captured, and no cell is evicted for it."""
    w = torch.ones(N).to(DEVICE).requires_grad_()
    module: Any = torch.get_device_module(DEVICE)
    h = (w * 3).sin()
    loss = torch.dot(h.cos(), w)
    del h
    stream = torch.Stream(DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    graph = module.Graph()
    stats = memmgr.stats() if budgets.current() is not None else {}
    raised = 0.0
    with stream, _capture(graph):
        try:
            torch.empty(1 << 26, device=DEVICE)
        except torch.OutOfMemoryError:
            raised = 1.0
    if stats:
        after = memmgr.stats()
        assert [after[k] for k in ("evictions", "offloads")] == [stats[k] for k in ("evictions", "offloads")]
    return [torch.tensor(raised), torch.autograd.grad(loss, w)[0].cpu()]


def captured_earlier(mode: str, seed: int) -> dict[str, Any]:
    """A graph is captured, then a budget opens, its tensors are told to leave, and it is replayed. An earlier budget has made
    the tensors, so that they are the pool's. The graph is captured while no budget is open, in that one, or in both."""
    managed._start(mode, seed, memory_bytes=1 << 27)
    module: Any = torch.get_device_module(DEVICE)
    found: dict[str, Any] = {}

    def capture(graph: Any, x: Tensor, w: Tensor) -> Tensor:
        stream = torch.Stream(DEVICE)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream, _capture(graph), torch.no_grad():
            y = (x * w).sin()
        torch.accelerator.current_stream().wait_stream(stream)
        return y

    for captures_in in ("none", "earlier", "both"):
        graph = module.Graph()
        with memmgr.budget("16MB", device=DEVICE, quiet=True, host="16MB"):
            x, w, other = (torch.full((N,), value).to(DEVICE) for value in (1.0, 2.0, 3.0))
            y = capture(graph, x, w) if captures_in != "none" else x
        if captures_in != "earlier":
            y = capture(graph, x, w)
        with (
            warnings.catch_warnings(record=True, action="always") as warned,
            memmgr.budget("16MB", device=DEVICE, quiet=True, host="16MB") as mm,
        ):
            _all_leaves()
            offloads = mm.stats()["offloads"]
            taken = [torch.full((N,), 7.0).to(DEVICE) for _ in range(8)]
            x.copy_(torch.full((N,), 5.0))
            graph.replay()
            right = torch.equal(y.cpu(), (torch.full((N,), 5.0) * 2.0).sin())
        found[captures_in] = {"right": right, "offloads": offloads, "warned": [str(w.message) for w in warned]}
        del taken, graph, x, y, w, other
    return found


def captured_beside(mode: str, seed: int) -> dict[str, Any]:
    """A graph is older than the budget, and an op of another thread touches its tensors before the opening looks for them."""
    managed._start(mode, seed, memory_bytes=1 << 27)
    options: dict[str, Any] = {"device": DEVICE, "quiet": True, "host": "16MB"}
    with memmgr.budget("16MB", **options):
        x = torch.ones(N).to(DEVICE)
    module: Any = torch.get_device_module(DEVICE)
    graph = module.Graph()
    with torch.Stream(DEVICE), _capture(graph), torch.no_grad():
        y = x.sin()
    torch.accelerator.synchronize()
    take_stock = session.PagerRuntime._take_stock

    def touch_first(runtime: Any) -> list[Any]:
        thread = threading.Thread(target=x.neg)
        thread.start()
        thread.join()
        return take_stock(runtime)

    with mock.patch.object(session.PagerRuntime, "_take_stock", touch_first), warnings.catch_warnings(action="ignore"):
        opened = memmgr.budget("16MB", **options).__enter__()
    _all_leaves()
    taken = [torch.full((N,), 7.0).to(DEVICE) for _ in range(8)]
    x.copy_(torch.full((N,), 5.0))
    graph.replay()
    torch.accelerator.synchronize()
    right = torch.equal(y.cpu(), torch.full((N,), 5.0).sin())
    del taken
    opened.__exit__(None, None, None)
    return {"right": right}


def captured_elsewhere(mode: str, seed: int) -> dict[str, Any]:
    """A graph is captured on one device in a budget of another one. Then a budget opens on its own."""
    managed._start(mode, seed, memory_bytes=1 << 27, devices=2)
    module: Any = torch.get_device_module(DEVICE)
    where, options = f"{DEVICE}:1", {"quiet": True, "host": "16MB"}
    graph = module.Graph()
    with torch.accelerator.device_index(1):
        with memmgr.budget("16MB", device=where, **options):
            x, w = (torch.full((N,), value).to(where) for value in (1.0, 2.0))
        with memmgr.budget("16MB", device=f"{DEVICE}:0", **options), torch.accelerator.device_index(1):
            stream = torch.Stream(where)
            stream.wait_stream(torch.accelerator.current_stream())
            with stream, _capture(graph), torch.no_grad():
                y = (x * w).sin()
            torch.accelerator.current_stream().wait_stream(stream)
        with (
            warnings.catch_warnings(record=True, action="always") as warned,
            memmgr.budget("16MB", device=where, **options),
        ):
            _all_leaves()
            x.copy_(torch.full((N,), 5.0))
            for at in (0, 1):
                torch.accelerator.synchronize(at)
            graph.replay()
            for at in (0, 1):
                torch.accelerator.synchronize(at)
            right = torch.equal(y.cpu(), (torch.full((N,), 5.0) * 2.0).sin())
    return {"right": right, "warned": len(warned)}


def opened_amid_a_capture(mode: str, seed: int) -> dict[str, Any]:
    """A budget opens while another thread captures a graph, and again when that has ended."""
    managed._start(mode, seed, memory_bytes=1 << 27)
    options: dict[str, Any] = {"device": DEVICE, "quiet": True, "host": "16MB"}
    with memmgr.budget("16MB", **options):
        x = torch.full((N,), 2.0).to(DEVICE)
    module: Any = torch.get_device_module(DEVICE)
    graph = module.Graph()
    begun, tried = threading.Event(), threading.Event()
    captured: list[Tensor] = []

    def capture() -> None:
        with torch.Stream(DEVICE), _capture(graph), torch.no_grad():
            begun.set()
            tried.wait(30)
            captured.append(x * x)

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(30)
    error = ""
    try:
        memmgr.budget("16MB", **options).__enter__()
    except RuntimeError as e:
        error = str(e)
    tried.set()
    thread.join()
    with warnings.catch_warnings(action="ignore"), memmgr.budget("16MB", **options):
        graph.replay()
        torch.accelerator.synchronize()
        right = torch.equal(captured[0].cpu(), torch.full((N,), 4.0))
    return {"error": error, "right": right}


PROGRAMS: dict[str, Callable[[], list[Tensor]]] = {
    "whole_step": whole_step,
    "two_graphs": two_graphs,
    "overwritten": overwritten,
    "no_room": no_room,
}


def _violations(fake: Any) -> int:
    fake.fake_capture_violations.restype = ctypes.c_uint64
    return int(fake.fake_capture_violations())


def _run(program: Callable[[], list[Tensor]], fake: Any, budget: Any) -> dict[str, Any]:
    before = _violations(fake)
    stats: dict[str, Any] = {}
    try:
        with budget as mm:
            digest = _digest(program())
            if mm is not None:
                stats = mm.stats()
    except (RuntimeError, RuntimeWarning) as error:
        if isinstance(budget, contextlib.nullcontext):
            raise
        digest = f"raised: {error}"
    left = {k: stats.get(k, 0) for k in ("evictions", "offloads")}
    return {"digest": digest, "violations": _violations(fake) - before, **left}


def all_programs(mode: str, seed: int) -> dict[str, Any]:
    """Each without memmgr, in a budget, and in one that knows nothing of graphs."""
    fake = managed._start(mode, seed, memory_bytes=1 << 27).fake
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    out: dict[str, Any] = {}
    for name, program in PROGRAMS.items():
        plain = _run(program, fake, contextlib.nullcontext())
        with_it = _run(program, fake, memmgr.budget("32MB", device=DEVICE, quiet=True, host="16MB"))
        with mock.patch.object(captures, "graph_classes", lambda device: []):
            without = _run(program, fake, memmgr.budget("32MB", device=DEVICE, quiet=True, host="16MB"))
        out[name] = {"plain": plain, "managed": with_it, "unaware": without}
        torch.accelerator.synchronize()
    opened = torch.Stream(DEVICE)
    graph: Any = torch.get_device_module(DEVICE).Graph()
    with opened, _capture(graph):
        try:
            with memmgr.budget("32MB", device=DEVICE, quiet=True):
                out["refused"] = "no"
        except RuntimeError as error:
            out["refused"] = str(error)
    return out
