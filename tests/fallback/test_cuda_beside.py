"""A budget on CUDA beside torch's own allocator: the parts that are CUDA's, with torch.cuda's functions replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memmgr import _budget, _cuda, _device, _native_py, _py_device, _rng
from memmgr._sizes import UNLIMITED

DEVICE = torch.device("cuda:0")
WHOLE = 80 * 10**9 + 1


class Cuda:
    """What torch.cuda is told, in order, and what it answers."""

    def __init__(self, share: float) -> None:
        self.share, self.calls = share, []

    def put(self, monkeypatch: pytest.MonkeyPatch) -> Cuda:
        def set_share(share: float, device: Any) -> None:
            assert device == DEVICE
            self.share = share
            self.calls.append("share")

        for name, function in {
            "set_per_process_memory_fraction": set_share,
            "get_per_process_memory_fraction": lambda device: self.share,
            "mem_get_info": lambda device: (WHOLE // 2, WHOLE),
            "empty_cache": lambda: self.calls.append("empty"),
            "memory_allocated": lambda device: 12345,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function, raising=False)
        monkeypatch.setattr(_py_device, "Streams", lambda device: None)
        return self


@pytest.mark.parametrize("limit", [12 * 10**9, 12 * 10**9 + 1, 1, WHOLE - 1])
def test_the_budget_is_the_most_that_the_allocator_may_take(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    cuda = Cuda(1.0).put(monkeypatch)
    memory = _py_device.DeviceMemory(DEVICE)
    memory.limit(limit)
    # What it keeps for later goes first: it counts.
    assert cuda.calls == ["empty", "share"]
    # As torch computes it.
    assert limit - 16 <= int(cuda.share * WHOLE) <= limit
    memory.limit(limit // 2 + 1)  # a second one, before the first was taken back
    memory.limit(UNLIMITED)
    assert cuda.share == 1.0
    memory.limit(UNLIMITED)
    assert cuda.calls == ["empty", "share", "empty", "share", "share"]
    assert memory.allocated() == 12345 and memory.words == "CUDA out of memory."


def test_a_lower_limit_of_the_programs_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(0.1).put(monkeypatch)
    memory = _py_device.DeviceMemory(DEVICE)
    memory.limit(12 * 10**9)
    memory.limit(UNLIMITED)
    assert cuda.calls == [] and cuda.share == 0.1


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA was initialised before memmgr was imported."""
    monkeypatch.setattr(_cuda, "_library", None)
    monkeypatch.setattr(_cuda, "_reason", lambda: _cuda.TOO_LATE)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(_native_py, "warned", False)


@pytest.mark.usefixtures("late")
def test_too_late_is_no_refusal_but_said_once() -> None:
    assert _device.resolve("cuda:0") == DEVICE
    with pytest.warns(
        RuntimeWarning, match=r"CUDA was initialised before.*`import memmgr` before.*MEMMGR_BUDGET.*weaker"
    ) as said:
        assert _budget._native(DEVICE) is _native_py.module()
        assert _budget._native(DEVICE) is _native_py.module()
    assert len(said) == 1


@pytest.mark.usefixtures("late")
def test_other_budgets_stay_what_they_are() -> None:
    assert _device.why_accounting(torch.device("cpu")) is None
    assert _device.why_accounting(DEVICE) == _cuda.TOO_LATE


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(_cuda, "_has_device", lambda: False)
    with pytest.raises(NotImplementedError, match=r"cannot be kept.*device='cpu'"):
        _device.resolve("cuda")


@pytest.mark.parametrize("index", [0, 1])
def test_draws_are_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """Not of the current one."""
    generators = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert _rng.default_generator(torch.device("cuda", index)) is generators[index]
    assert _rng.default_generator(torch.device("cuda")) is generators[1]
    assert _rng.default_generator(torch.device("cpu")) is torch.default_generator
