"""Rule 5 by itself: each numeric switch is part of a recipe's circumstances, is put back for a replay, and is left as it was.

Whether a switch changes bits depends on the CPU (tests/exactness/test_hostile.py); that it is restored does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from memmgr import _circumstances as circumstances
from memmgr import _shim

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
    native = _shim.load()
    before, present = get(), native.environment()
    assert before != other
    put(other)
    try:
        wanted = native.environment()
    finally:
        put(before)
    assert wanted != present and native.environment() == present, f"{name} is no part of the circumstances"
    with native.Finally(partial(circumstances.put_back, native, present)):
        circumstances.put(native, wanted)
        assert get() == other
    assert get() == before and native.environment() == present
    with pytest.raises(KeyboardInterrupt), native.Finally(partial(circumstances.put_back, native, present)):
        circumstances.put(native, wanted)
        raise KeyboardInterrupt
    assert get() == before and native.environment() == present


def test_the_older_way_to_ask_for_a_precision_still_answers() -> None:
    """It refuses to answer in a state that it did not make itself."""
    native = _shim.load()
    before, present = torch.get_float32_matmul_precision(), native.environment()
    torch.set_float32_matmul_precision("medium")
    wanted = native.environment()
    torch.set_float32_matmul_precision(before)
    plain = native.environment()
    with native.Finally(partial(circumstances.put_back, native, plain)):
        circumstances.put(native, wanted)
        assert native.environment() == wanted != present
    assert native.environment() == plain and torch.get_float32_matmul_precision() == before


def test_what_is_put_back_is_put_back_again_if_an_interrupt_came() -> None:
    section = _shim.load().Finally
    came: list[int] = []

    def once_more() -> None:
        came.append(len(came))
        if len(came) < 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), section(once_more):
        pass
    assert came == [0, 1, 2]
    with pytest.raises(ZeroDivisionError), section(once_more):
        _ = 1 // len([])
    assert len(came) == 4
    with pytest.raises(ValueError, match="own"), section(lambda: int("own")):
        pass


def test_below_switches_everything_back() -> None:
    native = _shim.load()
    x = torch.ones(4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(KeyboardInterrupt), native.Below(recomputing=True):
            assert not torch.is_grad_enabled()
            assert (x @ x).dtype is torch.float32 and not (x * 2).requires_grad
            with native.Below():
                assert not (x * 2).requires_grad
            assert not (x * 2).requires_grad and native.set_recomputing(True)
            raise KeyboardInterrupt
        assert torch.is_grad_enabled() and (x * 2).requires_grad and (x @ x).dtype is torch.bfloat16
    assert not native.set_recomputing(False)
