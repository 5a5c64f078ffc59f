"""An op that found no room after it had drawn may run again only from where it began to draw (rule 6)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from budget.there import bytes_already_there

import memmgr

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
