"""Reading ahead in passes without a plan: in backward, and by the order of the last pass."""

from typing import Any

import pytest
import torch

import memmgr

WIDTH, LAYERS, STEPS = 256, 12, 6
COUNTS = ("reloads", "reads_ahead", "planned_passes")


def trained(prefetch: bool | None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Batches of another length each time: no pass is as the one before, and none is planned. None: without a budget."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS))
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def steps(first: int, last: int) -> None:
        for i in range(first, last):
            model(torch.randn(512 + 8 * i, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if prefetch is None:
        steps(0, STEPS)
        return list(model.parameters()), {}
    need = 4 * sum(p.nbytes for p in model.parameters()) + 2 * LAYERS * 550 * WIDTH * 4
    with memmgr.budget(need // 2, device="cpu", policy="offload", prefetch=prefetch, quiet=True) as mm:
        steps(0, 2)  # memory is short in the first one, and the second is noted from its beginning
        before = mm.stats()
        steps(2, STEPS)
        after = mm.stats()
    return list(model.parameters()), {name: after[name] - before[name] for name in COUNTS}


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    return trained(None)[0]


def test_most_reads_begin_ahead_of_need_in_passes_without_a_plan(plain):
    got, stats = trained(True)
    assert stats["planned_passes"] == 0
    assert stats["reloads"] > 10 * (STEPS - 2)
    assert stats["reads_ahead"] >= 0.8 * stats["reloads"]
    assert all(map(torch.equal, got, plain))


def test_nothing_is_read_ahead_where_it_is_switched_off(plain):
    got, stats = trained(False)
    assert stats["reloads"] > 10 * (STEPS - 2)
    assert stats["reads_ahead"] == 0
    assert all(map(torch.equal, got, plain))
