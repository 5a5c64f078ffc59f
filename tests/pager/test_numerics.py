"""Rule 7: an op runs again under the numeric switches of its recipe, and they are left as the program has them.

Whether a switch changes bits depends on the CPU (tests/exactness/test_hostile.py); the default dtype changes them on all.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memmgr
from memmgr.native import binding

C: Any = torch._C
N = 20_000

SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
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
    "nnpack": (C._get_nnpack_enabled, C._set_nnpack_enabled, False),
    "mkldnn": (lambda: torch.backends.mkldnn.enabled, C._set_mkldnn_enabled, False),
    "cudnn": (lambda: torch.backends.cudnn.enabled, C._set_cudnn_enabled, False),
    "cudnn benchmark": (lambda: torch.backends.cudnn.benchmark, C._set_cudnn_benchmark, True),
    "cudnn deterministic": (lambda: torch.backends.cudnn.deterministic, C._set_cudnn_deterministic, True),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
        False,
    ),
    "cuDNN attention": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
    "mkldnn deterministic": (lambda: torch.backends.mkldnn.deterministic, C._set_mkldnn_deterministic, True),
    "memory that is not filled": (
        C._get_deterministic_fill_uninitialized_memory,
        C._set_deterministic_fill_uninitialized_memory,
        False,
    ),
    "math attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "half precision sums": (
        C._get_cublas_allow_fp16_reduced_precision_reduction,
        lambda v: C._set_cublas_allow_fp16_reduced_precision_reduction(*v),
        (False, True),
    ),
    "bfloat sums": (
        C._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda v: C._set_cublas_allow_bf16_reduced_precision_reduction(*v),
        (False, False),
    ),
    "half precision accumulation": (C._get_cublas_allow_fp16_accumulation, C._set_cublas_allow_fp16_accumulation, True),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled, False),
    "denormals": (lambda: bool((torch.tensor([1e-40]) * 1.0).eq(0).item()), torch.set_flush_denormal, True),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_recipe_runs_under_its_switches_and_leaves_them_as_they_were(name: str) -> None:
    get, put, other = SWITCHES[name]
    before = get()
    native = binding.load()
    with memmgr.budget("1GB", quiet=True, disk=False):
        whole = torch.arange(N)
        for _ in range(2):  # its kind is known from the first on
            third = whole / 3
        want = third.clone()
        try:
            put(other)
            assert native.take_away(third, 0) == third.nbytes
            again = third + 0  # made again here
            assert get() == other
        finally:
            put(before)
        assert again.dtype == torch.float32 and torch.equal(again, want)
        assert native.stats()["rematerialized_ops"] > 0


@pytest.mark.parametrize("name", [name for name in SWITCHES if name != "gradients"])
def test_an_op_under_other_switches_is_another_kind(name: str) -> None:
    """Otherwise trust earned under some switches would count under others."""
    get, put, other = SWITCHES[name]
    before = get()
    native = binding.load()
    with memmgr.budget("1GB", quiet=True, disk=False):
        whole = torch.arange(N + 1 + list(SWITCHES).index(name))  # a kind of its own
        trials = [native.stats()["trials"]]
        try:
            for value in (before, before, other, other, before):
                put(value)
                _ = whole / 3
                trials.append(native.stats()["trials"])
        finally:
            put(before)
    assert [b - a for a, b in itertools.pairwise(trials)] == [1, 0, 1, 0, 0]


@pytest.mark.rule(7)
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
def test_a_kernel_that_is_refused_memory_leaves_onednn_on() -> None:
    """Torch's products on oneDNN take any exception for a failure of oneDNN, switch it off and compute by BLAS."""

    def product(x: torch.Tensor) -> torch.Tensor:
        try:
            torch.empty(64 << 20)
        except torch.OutOfMemoryError:
            C._set_mkldnn_enabled(False)
        return x + x

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("erfinv", product, "CPU")
        library.impl("mm", lambda x, _: product(x), "CPU")
        small, large = torch.randn(8, 8), torch.randn(300, 300)
        assert C._get_mkldnn_enabled()
        try:
            with memmgr.budget("64MB", device="cpu", quiet=True):
                for run in (small.erfinv, large.erfinv, lambda: small.mm(small), lambda: large.mm(large)):
                    with pytest.raises(torch.OutOfMemoryError):
                        run()
                    assert C._get_mkldnn_enabled()
        finally:
            C._set_mkldnn_enabled(True)
