"""`floor_bytes` is the smallest budget that works: a twentieth more runs, a twentieth less raises and says so."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from budget import models
from threads import one_thread  # noqa: F401  a fixture

import memmgr
from memmgr.native import binding as native

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 2
MODELS = {**models.MODELS, "gpt": functools.partial(models.gpt, layers=2)}


def train(name: str, limit: int | None) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    gc.collect()
    with memmgr.budget(limit, quiet=True) as mm:
        training = MODELS[name]()
        losses = [training.step() for _ in range(STEPS)]
    return losses, mm.stats()


@pytest.mark.parametrize("name", MODELS)
def test_a_twentieth_decides(name: str) -> None:
    losses, measured = train(name, None)
    floor = measured["floor_bytes"]
    assert floor < 0.8 * measured["unmanaged_peak_bytes"], "nothing could leave: this tests nothing"
    limit = int(1.05 * floor)
    again, stats = train(name, limit)
    assert again == losses and stats["resident_bytes.peak"] <= limit
    assert stats["floor_bytes"] <= limit, "names a floor above a budget that worked"
    with pytest.raises(memmgr.BudgetError) as caught:
        train(name, int(0.95 * floor))
    assert 0.95 * floor < caught.value.floor_bytes <= 1.05 * floor


def test_what_nobody_has_written_to_is_part_of_the_floor() -> None:
    """It stays until an op touches it (rule 3), as a pipeline's receive buffers once did."""
    mb = 1 << 20
    with memmgr.budget(None, quiet=True) as mm:
        held = [torch.empty(mb // 4) for _ in range(8)]
        torch.ones(mb // 4).add_(1)
        assert 9 * mb <= mm.stats()["floor_bytes"] < 11 * mb
        for each in held:
            each.zero_()  # now it may leave
    with memmgr.budget(None, quiet=True) as mm:
        held = [torch.empty(mb // 4).zero_() for _ in range(8)]
        torch.ones(mb // 4).add_(1)
        assert mm.stats()["floor_bytes"] < 3 * mb  # an op, and its second run


def test_what_has_to_be_there_at_once_is_named_at_once(beyond: Callable[[str], int]) -> None:
    """A compiled graph's arguments are pinned one by one; each error named one more of them."""
    with memmgr.budget(beyond("2MB"), quiet=True):
        inputs = [torch.randn(1 << 16) for _ in range(16)]
        with pytest.raises(memmgr.BudgetError) as error:
            native.load().pin([*inputs, *inputs], region=True)
    need = 16 * (4 << 16)
    assert need <= error.value.floor_bytes < beyond("2MB") + need
