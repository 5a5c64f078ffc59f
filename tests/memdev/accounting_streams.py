"""Programs that are right by torch's own rules, and wrong if the accounting path forgets one of its own (docs/streams.md).

As in `streams`, whose programs are used again, the first pass proves the kinds of op, and what leaves in the last one the
programs say themselves. In late mode nothing runs before it is waited for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import streams
from .accounting import begin
from .scenarios import DEVICE
from .streams import EVICT, OFFLOAD, Pass, take

import memmgr  # isort: skip
from memmgr import _budget  # isort: skip


def _saved(p: Pass, leaf: str = "main") -> tuple[Any, Tensor]:
    """The cell of something that nobody but autograd has, and the loss."""
    h = (p.x * p.factor).sin()
    loss = torch.dot(h, p.leaf(leaf))
    return p.cell(h), loss


def uses(p: Pass) -> list[Tensor]:
    """As `uses` of `streams`, but dropped: a copy would be behind the second stream."""
    return streams.uses(p, EVICT)


class _Beside(torch.autograd.Function):
    """A product whose backward computes on the second stream, which has waited for what is saved in forward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, leaf: Tensor, p: Pass) -> Tensor:
        ctx.save_for_backward(h)
        ctx.p = p
        p.side.wait_stream(p.main)
        return torch.dot(h, leaf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        p = ctx.p
        (h,) = ctx.saved_tensors
        with p.side if p.late else p.main:
            out = h * 3
        p.side.synchronize()
        p.main.wait_stream(p.side)
        return None, out, None


def joined(p: Pass) -> list[Tensor]:
    """The second stream is seen for the first time when it reads what has come back on the first."""
    h = (p.x * p.factor).sin()
    a = _Beside.apply(h, p.leaf("main"), p)
    cell = p.cell(h)
    del h
    if p.native is not None:
        assert not p.native.several_streams()
    p.lose(cell, OFFLOAD)
    held = take(1)  # the block in which it was, so that it comes back to another one
    a.backward()
    return [a, *held]


def behind(p: Pass) -> list[Tensor]:
    """Nothing has run when it leaves, and the copy is waited for first."""
    cell, a = _saved(p)
    p.lose(cell, OFFLOAD)
    if p.native is not None and p.late:
        p.native._tier.wait(cell.slot)
    a.backward()
    p.main.synchronize()
    return [a]


def source(p: Pass) -> list[Tensor]:
    """Its memory is somebody else's before the copy runs."""
    cell, a = _saved(p)
    p.lose(cell, OFFLOAD)
    taken = take()
    p.main.synchronize()
    a.backward()
    return [a, *taken]


def read_first(p: Pass) -> list[Tensor]:
    """Made on the second stream; brought back before anybody needs it, and the copy is waited for first."""
    p.side.wait_stream(p.main)
    with p.side:
        cell, b = _saved(p, "side")
    p.lose(cell, OFFLOAD)
    if p.native is not None and p.late:
        assert p.native.prefetch(cell, 0) == 1
        p.native._tier._read_stream.synchronize()
    b.backward()
    p.side.synchronize()
    return [b]


def filling(p: Pass) -> list[Tensor]:
    """On its way back when nobody wants it any more."""
    cell, a = _saved(p)
    p.lose(cell, OFFLOAD)
    if p.native is not None and p.late:
        assert p.native.prefetch(cell, 0) == 1
    del a, cell
    taken = take()
    p.main.synchronize()
    return taken


# What is left out -> the programs that notice.
PROGRAMS: dict[str, dict[str, Callable[[Pass], list[Tensor]]]] = {
    "uses": {"uses": uses},
    "remade": {"unpacked": streams.unpacked},
    "filled": {"filled": streams.filled, "filled_replay": streams.filled_replay},
    "joined": {"joined": joined},
    "checked": {"checked": streams.checked},
    "offload.behind": {"behind": behind},
    "offload.source": {"source": source},
    "reload.written": {"read_first": read_first},
    "reload.target": {"read_first": read_first},
    "reload.filling": {"filling": filling},
    "reload.use": {"source": source, "prefetched": streams.prefetched},
}


@contextlib.contextmanager
def _opened(program: Callable[[Pass], list[Tensor]], leave_out: str) -> Iterator[tuple[Any, memmgr.budget]]:
    verify = program is streams.checked
    with memmgr.budget(1 << 26, device=DEVICE, quiet=True, verify=verify, host="8MB") as budget:
        native = _budget.current().native  # type: ignore[union-attr]
        native.set_options(True, True, verify, 0)  # no sample of checksums: each waits for the device
        native.leave_out(leave_out)
        try:
            yield native, budget
        finally:
            native.leave_out("")


def _run(program: Callable[[Pass], list[Tensor]], fake: Any, leave_out: str | None) -> dict[str, Any]:
    opened = None if leave_out is None else functools.partial(_opened, program, leave_out)
    return streams.run(program, fake, opened)


def all_rules(mode: str, seed: int, only: list[str] | None = None) -> dict[str, Any]:
    """Each program without memmgr, under it, and under it with its rule left out."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    fake = begin(mode, seed).fake
    seen = {
        f"{rule} {name}": streams.three_ways(functools.partial(_run, program, fake), rule)
        for rule in only or list(PROGRAMS)
        for name, program in PROGRAMS[rule].items()
    }
    return {"rules": sorted(memmgr._native_py.module().stream_rules()), "seen": seen}
