"""Rule 5 by itself: each numeric switch is part of a recipe's circumstances, is put back for a replay, and is left as it was.

Whether a switch changes bits depends on the CPU (tests/exactness/test_hostile.py); that it is restored does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import memmgr
from memmgr import _budget, _replay
from memmgr._circumstances import circumstances

C: Any = torch._C

SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda on: torch.use_deterministic_algorithms(on),
        True,
    ),
    "matmul precision": (
        lambda: torch.backends.mkldnn.matmul.fp32_precision,
        lambda v: C._set_fp32_precision_setter("mkldnn", "matmul", v),
        "bf16",
    ),
    "convolution precision": (
        lambda: torch.backends.cudnn.conv.fp32_precision,
        lambda v: C._set_fp32_precision_setter("cuda", "conv", v),
        "ieee",
    ),
    "mkldnn": (lambda: torch.backends.mkldnn.enabled, C._set_mkldnn_enabled, False),
    "cudnn": (lambda: torch.backends.cudnn.enabled, C._set_cudnn_enabled, False),
    "cudnn benchmark": (lambda: torch.backends.cudnn.benchmark, C._set_cudnn_benchmark, True),
    "cudnn deterministic": (lambda: torch.backends.cudnn.deterministic, C._set_cudnn_deterministic, True),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "math attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "denormals": (lambda: bool((torch.tensor([1e-40]) * 1.0).eq(0).item()), torch.set_flush_denormal, True),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_put_back_for_a_replay_and_left_as_it_was(name: str) -> None:
    get, put, other = SWITCHES[name]
    native = _budget._native()
    before, present = get(), native.environment()
    assert before != other
    put(other)
    try:
        wanted = native.environment()
    finally:
        put(before)
    assert wanted != present and native.environment() == present, f"{name} is no part of the circumstances"
    with circumstances(native, wanted):
        assert get() == other
    assert get() == before and native.environment() == present
    with pytest.raises(KeyboardInterrupt), circumstances(native, wanted):
        raise KeyboardInterrupt
    assert get() == before and native.environment() == present


def test_the_older_way_to_ask_for_a_precision_still_answers() -> None:
    """It refuses to answer in a state that it did not make itself."""
    native = _budget._native()
    before, present = torch.get_float32_matmul_precision(), native.environment()
    torch.set_float32_matmul_precision("medium")
    wanted = native.environment()
    torch.set_float32_matmul_precision(before)
    plain = native.environment()
    with circumstances(native, wanted):
        assert native.environment() == wanted != present
    assert native.environment() == plain and torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("name", SWITCHES)
def test_a_recomputation_runs_under_what_it_was_recorded_under(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward under the switch, backward without; what runs again runs under it."""
    get, put, other = SWITCHES[name]
    before = get()
    seen: list[Any] = []
    present = _budget._native().environment()
    in_backward = False

    @contextmanager
    def spied(native: Any, wanted: int) -> Iterator[None]:
        with circumstances(native, wanted):
            if in_backward and wanted != present:  # a kind that backward uses first is proven under what is now
                seen.append(get())
            yield

    monkeypatch.setattr(_replay, "circumstances", spied)
    with memmgr.budget("1GB", policy="torture", quiet=True):
        w = torch.randn(64, 64, requires_grad=True)
        for _ in range(4):  # by turns dropped and offloaded
            put(other)
            try:
                loss = (w.float() * 2.0).sin().sum()
            finally:
                put(before)
            in_backward = True
            loss.backward()
            in_backward = False
    assert seen and all(value == other for value in seen), f"recomputed under {seen}, recorded under {other}"
    assert get() == before
