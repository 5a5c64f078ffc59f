"""Programs on two streams whose bits are wrong if the shim forgets one of its stream rules (docs/internals/streams.md).

Each is right by torch's own rules without memmgr: it puts its streams in order, or autograd holds the tensor. In late mode
nothing runs before it is waited for; the programs wait for the stream that takes the memory before the one that still
reads it. What leaves, and when, they say themselves (`Pass.lose`): no policy is to be guessed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .managed import _digest, _start
from .scenarios import DEVICE

import memmgr  # isort: skip
from memmgr import _shim  # isort: skip

N = 16384
EVICT, OFFLOAD = 1, 2
PASSES = 2  # the first one proves the kinds of op, which waits for the device


def take(count: int = 24) -> list[Tensor]:
    """Takes free blocks of the size that all have on the current stream, and writes to them."""
    return [torch.full((N,), float(i), device=DEVICE) for i in range(count)]


@dataclass
class Pass:
    """What a program is given.

    Attributes:
        native: the shim, or None without memmgr.
        late: the last pass, in which something leaves.
        factor: another one in each pass, so that what an earlier pass left behind is not right by chance.
    """

    native: Any
    late: bool
    factor: Tensor
    fake: Any
    main: torch.Stream
    side: torch.Stream
    x: Tensor
    leaves: dict[str, Tensor] = field(default_factory=dict)

    def leaf(self, name: str) -> Tensor:
        """A parameter. Each is used on one stream only: autograd orders the streams at a leaf that is used on two."""
        return self.leaves[name]

    def cell(self, tensor: Tensor) -> Any:
        return None if self.native is None else self.native.find(tensor)

    def copy(self, to: Tensor, of: Tensor) -> None:
        """On the current stream, past the dispatcher and `Tensor.data_ptr`."""
        address = getattr(Tensor.data_ptr, "__wrapped__", Tensor.data_ptr)
        stream = torch.accelerator.current_stream().stream_id
        addresses = ctypes.c_uint64(address(to)), ctypes.c_uint64(address(of))
        assert self.fake.cuMemcpyDtoDAsync_v2(*addresses, ctypes.c_size_t(4 * N), ctypes.c_void_p(stream)) == 0

    def lose(self, cell: Any, action: int) -> None:
        """What autograd saved leaves the device; the program must have let go of it. What was there is overwritten."""
        if self.native is not None and self.late:
            assert self.native.release(cell, action), "it did not leave: this shows nothing"
            take()

    def takes_in_backward(self) -> Tensor:
        """A loss whose backward takes free blocks on the first stream."""
        early = self.leaf("main") * 2
        early.register_hook(lambda grad: take() and None)
        return early.sum()


def _read_beside(p: Pass, lets_go: Callable[[Any], list[Tensor]]) -> list[Tensor]:
    """Saved on the first stream, read on the second, gone: the memory is wanted on the first."""
    h = (p.x * p.factor).sin()
    a = (h * p.leaf("main")).sum()
    p.side.wait_stream(p.main)
    with p.side:
        b = h * 3
    cell = p.cell(h)
    del h
    taken = lets_go(cell)
    p.main.synchronize()
    p.side.synchronize()
    del taken
    a.backward()
    return [a, b]


def uses(p: Pass) -> list[Tensor]:
    """It leaves because the program says so."""

    def lets_go(cell: Any) -> list[Tensor]:
        p.lose(cell, OFFLOAD)
        return take()

    return _read_beside(p, lets_go)


class _Foreign(torch.autograd.Function):
    """A product whose backward is another library's kernel (here a copy), which no dispatcher sees."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, leaf: Tensor, copy: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.save_for_backward(h)
        ctx.copy = copy
        return torch.dot(h, leaf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (h,) = ctx.saved_tensors
        out = torch.empty(N, device=DEVICE)
        ctx.copy(out, h)
        return None, out, None


def unpacked(p: Pass) -> list[Tensor]:
    """Backward brings it back on the first stream, reads it on the second as well, and is done with it there first."""
    early = p.takes_in_backward()
    h = (p.x * p.factor).sin()
    p.side.wait_stream(p.main)
    with p.side:
        b = _Foreign.apply(h, p.leaf("side"), p.copy)
    p.main.wait_stream(p.side)
    a = (h * p.leaf("other")).sum()
    h.record_stream(p.side)
    cell = p.cell(h)
    del h
    p.lose(cell, OFFLOAD)
    (early + b + a).backward()
    p.main.synchronize()
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
    """The same, and what the first stream reads it for is to make something else again."""
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


def exposed(p: Pass) -> list[Tensor]:
    """A kernel that no dispatcher sees reads it on the second stream."""
    h = (p.x * p.factor).sin()
    a = (h * p.leaf("main")).sum()
    p.side.wait_stream(p.main)
    with p.side:
        b = torch.empty(N, device=DEVICE)
        h.data_ptr()  # handed out: this is how such kernels get at it
        p.copy(b, h)
    cell = p.cell(h)
    del h
    p.lose(cell, OFFLOAD)
    taken = take()
    p.main.synchronize()
    p.side.synchronize()
    del taken
    a.backward()
    return [a, b]


def prefetched(p: Pass) -> list[Tensor]:
    """On its way back when backward wants it."""
    h = (p.x * p.factor).sin()
    a = (h * p.leaf("main")).sum()
    cell = p.cell(h)
    del h
    p.lose(cell, OFFLOAD)
    if p.native is not None and p.late:
        assert p.native.prefetch(cell, 0) == 1
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
    try:
        b.backward(retain_graph=True)
    except RuntimeError:
        b.backward()  # asked for again, the wrong bytes are as wrong
    p.side.synchronize()
    return [b]


def asleep(p: Pass) -> list[Tensor]:
    """Nobody has looked: passes fitted, and the one that does not (what autograd saved has to leave) finds the recorder asleep."""
    return _read_beside(p, lambda cell: take(34 if p.late else 1))


class _Aside(torch.autograd.Function):
    """A product whose backward computes on a stream of its own, and is behind it again before it returns."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, leaf: Tensor, p: Pass) -> Tensor:
        ctx.save_for_backward(h)
        ctx.p = p
        return torch.dot(h, leaf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        p = ctx.p
        (h,) = ctx.saved_tensors
        p.side.wait_stream(p.main)
        with p.side:
            out = h * 3
        cell = p.cell(h)
        del h
        p.lose(cell, OFFLOAD)
        p.main.wait_stream(p.side)
        return None, out, None


def watched(p: Pass) -> list[Tensor]:
    """Room enough, so that the mode would leave the stack for backward: which streams are used there has to be seen."""
    h = (p.x * p.factor).sin()
    a = _Aside.apply(h, p.leaf("main"), p)
    del h
    a.backward()
    return [a]


# What is left out: a rule of the shim, but for the last one.
RULES: dict[str, Callable[[Pass], list[Tensor]]] = {
    "uses": uses,
    "unpacked": unpacked,
    "filled": filled,
    "filled.replay": filled_replay,
    "replayed": replayed,
    "exposed": exposed,
    "prefetched": prefetched,
    "checked": checked,
    "asleep": asleep,
    "watched": watched,
}


def run(
    program: Callable[[Pass], list[Tensor]],
    fake: Any,
    opened: Callable[[], contextlib.AbstractContextManager[tuple[Any, memmgr.budget]]] | None,
    passes: int = PASSES,
    walls: int = 0,
) -> dict[str, Any]:
    """The program's passes, without memmgr when `opened` is None: the digest of what they made, or what was raised.

    Args:
        program: one pass.
        fake: the driver.
        opened: opens a budget and closes it; gives the native and the budget.
        passes: how many; in the last one something leaves.
        walls: blocks that are taken before each pass, and every other one given back: holes of one size. Who takes one
            leaves no rest beside it that counts as used by its stream, which the next one would have to wait for.
    """
    torch.manual_seed(0)
    x = torch.randn(N).to(DEVICE)
    leaves = {leaf: torch.randn(N).to(DEVICE).requires_grad_() for leaf in ("main", "other", "more", "side")}
    main, side = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    found: list[Tensor] = []
    result: dict[str, Any] = {}
    with opened() if opened else contextlib.nullcontext((None, None)) as (native, budget):
        try:
            for i in range(passes):
                torch.accelerator.synchronize()
                p = Pass(native, i == passes - 1, torch.tensor(2.0 + i).to(DEVICE), fake, main, side, x, leaves)
                kept = take(walls)[::2]
                results = program(p)
                del kept
                main.synchronize()  # who takes the memory is first
                torch.accelerator.synchronize()
                gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
                found += [t.detach().cpu() for t in [*results, *gradients]]
                del results, p, gradients
                for leaf in leaves.values():
                    leaf.grad = None
            result["digest"] = _digest(found)
        except RuntimeError as error:
            if opened is None:
                raise
            result["digest"] = f"raised: {error}"
    if budget is not None:
        result["stats"] = budget.stats()
    return result


def three_ways(run: Callable[[str | None], dict[str, Any]], rule: str) -> dict[str, dict[str, Any]]:
    """Without memmgr, under it, and under it with the rule left out."""
    return {how or "plain": run(out) for how, out in (("plain", None), ("kept", ""), ("left out", rule))}


@contextlib.contextmanager
def _budget(name: str, leave_out: str) -> Iterator[tuple[Any, memmgr.budget]]:
    native = _shim.load()
    several = native.several_streams
    verify, sleeps = name == "checked", name == "asleep"
    limit = 40 * 4 * N + 2 * N if sleeps else 1 << 26
    with memmgr.budget(
        limit, device=DEVICE, quiet=True, verify=verify, host="8MB", _sleep=sleeps, _plan=False
    ) as budget:
        native.set_options(True, True, verify, 0)  # no sample of checksums: each waits for the device
        if leave_out == "watched":
            native.several_streams = lambda: False
        else:
            native.leave_out(leave_out)
        try:
            yield native, budget
        finally:
            native.leave_out("")
            native.several_streams = several


def _run(name: str, fake: Any, leave_out: str | None) -> dict[str, Any]:
    sleeps = name == "asleep"
    opened = None if leave_out is None else functools.partial(_budget, name, leave_out)
    return run(RULES[name], fake, opened, passes=4 if sleeps else PASSES, walls=0 if sleeps else 48)


def all_rules(mode: str, seed: int, only: list[str] | None = None) -> dict[str, Any]:
    """Each program without memmgr, under it, and under it with its rule left out."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    fake = _start(mode, seed).fake
    return {
        "rules": sorted(_shim.load().stream_rules()),
        "seen": {name: three_ways(functools.partial(_run, name, fake), name) for name in only or list(RULES)},
    }
