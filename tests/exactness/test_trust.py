"""Rule 8: a tensor that is not known to reproduce is never made again, whether autograd saved its result or not. Rule 6: an op
that found no room after it had drawn may run again only from where it began to draw."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from budget.there import bytes_already_there
from torch import nn

import memmgr


def narrowing() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(12):  # each layer is of kinds of its own, and the late ones are met when memory is full
        layers += [nn.Linear(700 - 16 * i, 684 - 16 * i), nn.Sigmoid()]
    return nn.Sequential(*layers), torch.randn(3001, 700)


def test_room_is_made_to_prove_what_is_met_when_memory_is_full() -> None:
    """An unproven tensor could not be dropped, so without a tier the first pass ended where every later one would have
    run."""
    model, x = narrowing()
    with memmgr.budget(None, quiet=True) as mm:  # proves nothing
        model(x).sum().backward()
    there = sum(p.nbytes for p in model.parameters()) * 2 + x.nbytes
    limit = there + (mm.stats()["resident_bytes.peak"] - there) * 6 // 10

    def first_pass() -> int:
        with memmgr.budget(limit, policy="evict", quiet=True, _plan=False) as mm:
            model(x).sum().backward()
        return int(mm.stats()["evictions"])

    assert first_pass() > 0


def test_a_trial_before_a_write_takes_nothing_that_the_write_would_strand() -> None:
    """Tensors that need the old bytes are restored before a write; room made for the write's own trial would evict them
    again."""
    steps = 6

    def train(scope: Any, rows: int) -> bytes:
        torch.manual_seed(0)
        weight = torch.randn(1009, requires_grad=True)
        buffers = [torch.zeros(rows, 1009) for _ in range(steps)]
        x = torch.randn(rows * steps + 1009)
        with scope:
            total = weight.sum()
            for i, buffer in enumerate(buffers):
                total = total + torch.sigmoid_(buffer + weight * (i + 1)).sum()
                buffer.copy_(x.as_strided((rows, 1009), (i + 1, 1)))  # a kind of its own
            buffers.clear()
            del buffer  # backward needs less than the last write
            total.backward()
        assert weight.grad is not None
        return weight.grad.numpy().tobytes()

    fitted = 0
    for units in range(23, 28):
        rows = 100 + 8 * units  # kinds are remembered for as long as the process lives
        want = train(contextlib.nullcontext(), rows)
        there = bytes_already_there()
        with contextlib.suppress(memmgr.BudgetError):
            budget = memmgr.budget(there + units * rows * 1009 * 2, policy="evict", quiet=True, _plan=False)
            assert train(budget, rows) == want
            fitted += 1
    assert fitted


ROWS, COLUMNS = 256, 256
SIZE = ROWS * COLUMNS * 4
GARBAGE = 4 * SIZE  # in a cycle: there only until Python collects it
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # Both draw into a small tensor first and then ask for a large one.
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "multinomial": lambda x: torch.multinomial(x, 200).float(),
}


@contextmanager
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _run(op: Callable[[torch.Tensor], torch.Tensor], scope: Any, grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.rand(ROWS, COLUMNS)
    torch.manual_seed(5)
    with _uncollected(), scope, torch.set_grad_enabled(grad):
        cycle: list[Any] = [torch.empty(GARBAGE, dtype=torch.uint8)]
        cycle.append(cycle)
        del cycle
        out = op(x.requires_grad_() if grad else x)
        return out.detach(), torch.get_rng_state()


@pytest.mark.parametrize(
    ("name", "grad"),
    [
        ("native_dropout", True),
        ("native_dropout", False),
        pytest.param("multinomial", True, marks=pytest.mark.slow),  # it has no gradient
        ("multinomial", False),
    ],
)
def test_it_draws_once_or_is_refused(name: str, grad: bool) -> None:
    """With any room: the bits of one run, or an error; never those of a second draw."""
    op = OPS[name]
    want, state = _run(op, nullcontext(), grad)
    finished = refused = 0
    for share in range(2, 66, 4):
        limit = bytes_already_there() + SIZE + GARBAGE + SIZE * share // 16
        try:
            got, after = _run(op, memmgr.budget(limit, policy="evict", disk=False, quiet=True), grad)
        except memmgr.BudgetError:
            refused += 1
            continue
        finished += 1
        assert torch.equal(got, want), f"other numbers at a budget of {limit}"
        assert torch.equal(after, state), f"the generator is elsewhere at a budget of {limit}"
    assert finished and refused, "no budget was too small, or none was large enough"
