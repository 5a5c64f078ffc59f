"""The recorder sleeps while passes fit with room to spare, and wakes where it may."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from ways import recorder_only

import memmgr
from memmgr import _budget
from memmgr._sleep import CALM_PASSES, TIGHT_PASSES, hooks_on_top

pytestmark = recorder_only

SMALL, LARGE = 64, 1024


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)))


def _pass(model: nn.Module, rows: int) -> None:
    model(torch.randn(rows, 256)).square().mean().backward()
    model.zero_grad()


def _peak(rows: int) -> int:
    gc.collect()
    with memmgr.budget(None, quiet=True) as mm:
        _pass(_model(), rows)
    return int(mm.stats()["unmanaged_peak_bytes"])


def _asleep() -> bool:
    manager = _budget.current()
    assert manager is not None
    return bool(manager.sleeper.asleep)


def _stacks() -> tuple[int, object]:
    return torch._C._len_torch_dispatch_stack(), hooks_on_top()


def test_sleeps_when_passes_fit_and_wakes_when_one_does_not() -> None:
    limit = _peak(LARGE)
    before = _stacks()
    with memmgr.budget(limit, quiet=True) as mm:
        model = _model()
        awake = _stacks()
        for _ in range(CALM_PASSES + 1):
            _pass(model, SMALL)
        assert _asleep() and _stacks() == before
        _pass(model, LARGE)
        assert not _asleep() and _stacks()[0] == awake[0] == before[0] + 1
    assert mm.stats()["resident_bytes.peak"] <= limit
    assert _stacks() == before


def test_what_only_fits_is_enough_in_the_long_run() -> None:
    """No room to spare, but nothing ever had to leave. After a surprise it takes twice as long."""
    limit = _peak(LARGE)
    with memmgr.budget(limit, quiet=True) as mm:
        model = _model()
        for _ in range(TIGHT_PASSES - 1):
            _pass(model, LARGE)
            assert not _asleep()
        _pass(model, LARGE)
        assert _asleep()
        _pass(model, LARGE)
        assert _asleep() and mm.stats()["offloads"] == 0
        _pass(model, LARGE + LARGE // 2)
        assert not _asleep() and mm.stats()["offloads"] > 0
        for _ in range(2 * TIGHT_PASSES - 1):
            _pass(model, LARGE)
            assert not _asleep()
        _pass(model, LARGE)
        assert _asleep()
    assert mm.stats()["resident_bytes.peak"] <= limit


@pytest.mark.parametrize("how", ["no tier", "a small one"])
def test_what_can_only_be_made_again_is_always_recorded(how: str, tmp_path: Path) -> None:
    """Without a tier a surprise could not be met: the pass that needs more would fail although it fits."""
    limit = _peak(LARGE)
    options = {"policy": "evict"} if how == "no tier" else {"disk": (str(tmp_path), "1MB")}
    with memmgr.budget(limit, quiet=True, **options) as mm:  # type: ignore[arg-type]
        model = _model()
        for _ in range(CALM_PASSES + TIGHT_PASSES):
            _pass(model, SMALL)
        _pass(model, 2 * LARGE)
    assert mm.stats()["evictions"] > 0
    assert mm.stats()["resident_bytes.peak"] <= limit


def test_does_not_wake_where_hooks_are_refused() -> None:
    """Inside a transform of torch.func a pass may end that fits no longer; waking waits until hooks are allowed again."""
    limit = _peak(LARGE)
    before = _stacks()
    with memmgr.budget(limit, quiet=True):
        model = _model()
        for _ in range(CALM_PASSES + 1):
            _pass(model, SMALL)
        assert _asleep()
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            _pass(model, LARGE)
            assert _asleep() and _stacks() == before
        _pass(model, LARGE)
        assert not _asleep()
    assert _stacks() == before
