"""Programs on two streams whose bits are wrong if the pager forgets one of its stream rules (docs/develop/streams.md).

Each is right by torch's own rules without memmgr: it puts its streams in order, or autograd holds the tensor. In late mode
nothing runs before it is waited for; the programs wait for the stream that takes the memory before the one that still
reads it. They evict cells themselves (`Pass.lose`), so that no policy decides.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .managed import _digest, _start
from .scenarios import DEVICE

import memmgr  # isort: skip
from memmgr.native import binding  # isort: skip

N = 16384
EVICT, OFFLOAD = 0, 1
USES, FILLED, PREFETCHED, CHECKED, CLOSED, SAMPLED = (1 << i for i in range(6))  # allocator/pager/pools/stream_rules.h
LATE, WHERE = 128, 256
PASSES = 2  # the first one proves the kinds of op, which waits for the device


def take(count: int = 24) -> list[Tensor]:
    """Takes free blocks of the size that all have on the current stream, and writes to them."""
    return [torch.full((N,), float(i), device=DEVICE) for i in range(count)]


@dataclass
class Pass:
    """The arguments of a program.

    Attributes:
        native: the pager, or None without memmgr.
        late: the last pass, in which something leaves.
        factor: another one in each pass, so that bytes of an earlier pass are not right by chance.
    """

    native: Any
    late: bool
    factor: Tensor
    fake: Any
    main: torch.Stream
    side: torch.Stream
    x: Tensor
    leaves: dict[str, Tensor] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None

    def leaf(self, name: str) -> Tensor:
        """A parameter. Each is used on one stream only: autograd orders the streams at a leaf that is used on two."""
        return self.leaves[name]

    def cell(self, tensor: Tensor) -> int:
        """The id of the cell of a tensor, which the caller keeps alive while it uses the id."""
        return tensor.untyped_storage()._cdata

    def lose(self, cell: int, how: int) -> None:
        """Evicts the cell, which tensors may still use. Its memory is overwritten."""
        if self.native is not None and self.late:
            assert self.native.take_away(cell, how), "it did not leave: this shows nothing"
            take()

    def takes_in_backward(self) -> Tensor:
        """A loss whose backward takes free blocks on the first stream."""
        early = self.leaf("main") * 2

        def hook(grad: Tensor) -> None:
            if self.native is not None:
                self.native.drain()  # references that wait to be dropped are
            take(48)

        early.register_hook(hook)
        return early.sum()


def uses(p: Pass) -> list[Tensor]:
    """Saved on the first stream, read on the second, gone: the memory is wanted on the first."""
    h = (p.x * p.factor).sin()
    a = (h * p.leaf("main")).sum()
    p.side.wait_stream(p.main)
    with p.side:
        b = h * 3
    cell = p.cell(h)
    del h
    p.lose(cell, OFFLOAD)
    taken = take()
    p.main.synchronize()
    p.side.synchronize()
    del taken
    a.backward()
    return [a, b]


def filled(p: Pass) -> list[Tensor]:
    """Backward brings it back on the second stream; the first reads it right after."""
    h = (p.x * p.factor).sin()
    a = (h * p.leaf("main")).sum()
    p.side.wait_stream(p.main)
    with p.side:
        b = torch.dot(h, p.leaf("side"))
    p.main.wait_stream(p.side)
    h.record_stream(p.side)
    cell = p.cell(h)
    del h
    p.lose(cell, OFFLOAD)
    (a + b).backward()
    p.main.synchronize()
    return [a, b]


def filled_replay(p: Pass) -> list[Tensor]:
    """Does the same, and the first stream reads it to rematerialize another cell."""
    h = (p.x * p.factor).sin()
    first = (h * p.leaf("other")).sum()  # its backward comes last, so that h stays
    c = h.cos()
    a = (c * p.leaf("main")).sum()
    p.side.wait_stream(p.main)
    with p.side:
        b = torch.dot(h, p.leaf("side"))
    p.main.wait_stream(p.side)
    h.record_stream(p.side)
    cells = p.cell(c), p.cell(h)
    del c
    p.lose(cells[0], EVICT)
    del h
    p.lose(cells[1], OFFLOAD)
    (first + a + b).backward()
    p.main.synchronize()
    return [a, b]


def replayed(p: Pass) -> list[Tensor]:
    """Made again on the second stream from something that only the first one uses, and gives up."""
    h = (p.x * p.factor).sin()
    c = h.cos()
    last = (c * p.leaf("more")).sum()  # its backward comes last: the block of c is not the one that is taken
    early = p.takes_in_backward()
    a = (h * p.leaf("other")).sum()
    del h
    p.side.wait_stream(p.main)
    with p.side:
        b = torch.dot(c, p.leaf("side"))
    p.main.wait_stream(p.side)
    c.record_stream(p.side)
    cell = p.cell(c)
    del c
    p.lose(cell, EVICT)
    (last + early + a + b).backward()
    p.main.synchronize()
    return [a, b]


def prefetched(p: Pass) -> list[Tensor]:
    """On its way back when backward wants it."""
    h = (p.x * p.factor).sin()
    a = (h * p.leaf("main")).sum()
    cell = p.cell(h)
    del h
    p.lose(cell, OFFLOAD)
    if p.native is not None and p.late:
        assert p.native.read_ahead(cell)
    a.backward()
    p.main.synchronize()
    return [a]


def checked(p: Pass) -> list[Tensor]:
    """Made on the second stream; a checksum of it is wanted on the first."""
    p.side.wait_stream(p.main)
    with p.side:
        h = (p.x * p.factor).sin()
        b = (h * p.leaf("side")).sum()
    cell = p.cell(h)
    del h
    p.lose(cell, OFFLOAD)
    p.main.synchronize()  # the checksum is taken now
    try:
        b.backward(retain_graph=True)
    except RuntimeError:
        b.backward()  # asked for again, the wrong bytes are as wrong
    p.side.synchronize()
    return [b]


def closed(p: Pass) -> list[Tensor]:
    """The budget ends, on the first stream, while it is away; the second reads it then."""
    h = (p.x * p.factor).sin()
    c = h.cos()
    p.side.wait_stream(p.main)
    p.lose(p.cell(c), EVICT)
    p.main.synchronize()  # its old bytes are really overwritten
    p.close()
    with p.side:
        b = c * 3
    p.side.synchronize()
    p.main.synchronize()
    return [b]


def _steps(p: Pass) -> tuple[Tensor, Tensor, Tensor, torch.Event]:
    """Two parameters whose last step waits, since the second's momentum is away; room for another; an event at its end."""
    if p.native is not None:
        p.native.set_slice_bytes(N)  # only a step that is cut waits
    w, v = (p.leaf(name).detach().clone() for name in ("main", "other"))
    optimizer = torch.optim.SGD([w, v], lr=0.1, momentum=0.9, foreach=True)
    w.grad, v.grad = p.x * p.factor, p.x.clone()
    optimizer.step()
    w.grad = (p.x * p.factor).cos()
    out = torch.zeros_like(w)  # now: an owner of a block waits for all its earlier uses
    p.lose(p.cell(optimizer.state[v]["momentum_buffer"]), OFFLOAD)
    before = p.native.stats()["pending_slices"] if p.native is not None else 0
    optimizer.step()
    if p.native is not None and p.late:
        assert p.native.stats()["pending_slices"] > before, "the step did not wait: this shows nothing"
    return w, v, out, p.main.record_event()


def _behind(p: Pass, w: Tensor, out: Tensor, event: torch.Event) -> Tensor:
    """On the second stream, behind the event. Only in the last pass: where there are two, no step waits."""
    if not p.late:
        return w * 3
    p.side.wait_event(event)
    with p.side:
        torch.mul(w, 3, out=out)
    p.side.synchronize()
    return out


def late(p: Pass) -> list[Tensor]:
    """A slice runs when the first stream needs the parameter; the second is behind the step's event only."""
    w, _, out, event = _steps(p)
    a = w * 2
    return [a, _behind(p, w, out, event)]


def late_elsewhere(p: Pass) -> list[Tensor]:
    """A slice runs because the second stream needs the parameter."""
    w, _, out, event = _steps(p)
    return [_behind(p, w, out, event)]


def late_unasked(p: Pass) -> list[Tensor]:
    """A slice runs because there is a second stream, which is behind nothing."""
    w, v, out, _ = _steps(p)
    a = v * 2  # its slice brings something back, into a block that others have used
    if p.late:
        with p.side:
            out.fill_(1.0)
        p.side.synchronize()
    return [w, a]


def late_address(p: Pass) -> list[Tensor]:
    """The program reads the parameter by its address after it has waited for the step's end."""
    w, _, _, event = _steps(p)
    a = w * 2
    event.synchronize()
    read = ctypes.string_at(w.data_ptr(), w.nbytes)
    return [a, torch.frombuffer(bytearray(read), dtype=w.dtype)]


PROGRAMS: dict[str, tuple[Callable[[Pass], list[Tensor]], int, int]] = {
    "uses": (uses, USES, 0),
    "replayed": (replayed, USES, 0),
    "filled": (filled, FILLED, 0),
    "filled.replay": (filled_replay, FILLED, 0),
    "prefetched": (prefetched, PREFETCHED, 0),
    "checked": (checked, CHECKED, 0),
    "closed": (closed, CLOSED, 0),
    "late": (late, LATE, 0),
    "late.elsewhere": (late_elsewhere, LATE, 0),
    "late.address": (late_address, LATE, 0),
    "late.unasked": (late_unasked, WHERE, LATE),
}
"""Each with the rule that it shows, and those that are never kept in it: they would hide it."""


def run(
    program: Callable[[Pass], list[Tensor]],
    fake: Any,
    opened: Callable[[], contextlib.AbstractContextManager[tuple[Any, memmgr.budget]]] | None,
    passes: int = PASSES,
    walls: int = 0,
) -> dict[str, Any]:
    """Runs the program's passes, without memmgr when `opened` is None. Returns the digest of their results, or the error.

    Args:
        program: one pass.
        fake: the driver.
        opened: opens a budget and closes it; gives the native and the budget.
        passes: how many; in the last one cells are evicted.
        walls: blocks that are taken before each pass, of which every other one is freed: holes of one size. A block in a
            hole fills it, so that no rest counts as used by its stream, for which the next one would have to wait.
    """
    torch.manual_seed(0)
    x = torch.randn(N).to(DEVICE)
    leaves = {leaf: torch.randn(N).to(DEVICE).requires_grad_() for leaf in ("main", "other", "more", "side")}
    main, side = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    found: list[Tensor] = []
    result: dict[str, Any] = {}
    budget: Any = None
    try:
        with opened() if opened else contextlib.nullcontext((None, None)) as (native, budget):
            for i in range(passes):
                torch.accelerator.synchronize()
                p = Pass(native, i == passes - 1, torch.tensor(2.0 + i).to(DEVICE), fake, main, side, x, leaves)
                if p.late and budget is not None:
                    p.close = functools.partial(budget.__exit__, None, None, None)
                kept = take(walls)[::2]
                results = program(p)
                del kept
                main.synchronize()  # the stream that takes the memory is first
                torch.accelerator.synchronize()
                gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
                found += [t.detach().cpu() for t in [*results, *gradients]]
                del results, p, gradients
                for leaf in leaves.values():
                    leaf.grad = None
            result["digest"] = _digest(found)
    except RuntimeError as error:  # the budget's end checks, too
        if opened is None:
            raise
        result["digest"] = f"raised: {error}"
    if budget is not None:
        result["stats"] = budget.stats()
    return result


@contextlib.contextmanager
def _budget(name: str, leave_out: int) -> Iterator[tuple[Any, memmgr.budget]]:
    native = binding.load()
    options = {"verify": name == "checked", "policy": "offload" if name.startswith("late") else "auto"}
    with memmgr.budget(1 << 26, device=DEVICE, quiet=True, host="8MB", _plan=False, **options) as budget:
        native.leave_out(leave_out | SAMPLED)  # each of the sample waits for the device
        try:
            yield native, budget
        finally:
            budget.__exit__(None, None, None)
            native.leave_out(0)


def _run(name: str, fake: Any, leave_out: int | None) -> dict[str, Any]:
    opened = None if leave_out is None else functools.partial(_budget, name, leave_out)
    return run(PROGRAMS[name][0], fake, opened, walls=48)


def all_rules(mode: str, seed: int, only: list[str] | None = None) -> dict[str, Any]:
    """Each program without memmgr, under it, and under it with its rule left out."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    fake = _start(mode, seed).fake
    return {
        name: {
            "plain": _run(name, fake, None),
            "kept": _run(name, fake, never),
            "left out": _run(name, fake, rule | never),
        }
        for name, (_, rule, never) in PROGRAMS.items()
        if not only or name in only
    }


def an_op_from_before(mode: str, seed: int) -> bool:
    """A thread's op that began before a budget queues its write once the budget is open. Returns whether the tensor has the
    bytes of that write after it has left and come back.

    A call of C's stands for the op: it asks a pipe whether it may go on, again and again, and queues a copy.
    """
    copy = _start(mode, seed).fake.cuMemcpyDtoDAsync_v2
    copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    opened = functools.partial(memmgr.budget, 1 << 26, device=DEVICE, quiet=True, host="8MB", _plan=False)
    with opened():  # tensors of an earlier budget are adopted by a later one
        written, x, stream = torch.arange(float(N)).to(DEVICE), torch.zeros(N, device=DEVICE), torch.Stream(DEVICE)
    (begun, begins), (waits, goes_on) = os.pipe(), os.pipe()
    pipe = select.poll()
    pipe.register(waits, select.POLLIN)
    looks = iter(functools.partial(pipe.poll, 0), [(waits, select.POLLIN)])
    queues = map(copy, [x.data_ptr()], [written.data_ptr()], [x.nbytes], [stream.stream_id])
    last: deque[Any] = deque(maxlen=1)

    def op() -> None:
        with stream:
            torch.ones(1, device=DEVICE)  # the driver's context, in this thread
        last.extend(itertools.chain(map(os.write, [begins], [b"."]), looks, queues))

    thread = threading.Thread(target=op)
    thread.start()
    os.read(begun, 1)
    with opened():
        os.write(goes_on, b".")
        thread.join()
        assert [*last] == [0], "the copy was not queued"
        assert binding.load().take_away(x, OFFLOAD), "it did not leave: this shows nothing"
        taken = take()
        torch.accelerator.current_stream().synchronize()
        stream.synchronize()
        del taken
        return torch.equal(x.cpu(), written.cpu())
