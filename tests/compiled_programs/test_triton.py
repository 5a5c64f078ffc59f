"""The reader of Triton kernels: the arguments that are only read, and the kernels that repeat."""

import types
from typing import Any

import pytest

from memmgr.readers import inductor

STORE = "tl.store(out_ptr0 + (x0), tmp3, xmask)"


def kernel(signature: dict[str, Any], mutated: list[str] | None = None, custom: bool = False) -> Any:
    """As torch's CachingAutotuner describes its kernel."""
    return types.SimpleNamespace(
        triton_meta={"signature": signature}, mutated_arg_names=mutated or [], custom_kernel=custom
    )


def test_inputs_are_read_and_other_pointers_are_written() -> None:
    seen = inductor.read_triton(
        kernel(
            {
                "in_out_ptr0": "*fp32",
                "in_ptr0": "*bf16",
                "in_ptr1": "*i64",
                "out_ptr0": "*fp32",
                "ws_ptr": "*u8",
                "load_seed_offset": "i32",
                "xnumel": "constexpr",
                "r0_numel": "i32",
                "XBLOCK": "constexpr",
            },
            ["in_out_ptr0", "in_ptr1"],
        ),
        STORE,
    )
    assert seen.args == "wrwww---"


def test_any_tensor_of_the_programs_own_kernel_may_be_written() -> None:
    """Also one that is named like an input of Inductor's."""
    signature = {"in_ptr0": "*fp32", "BLOCK": "constexpr", "out_ptr0": "*fp32"}
    assert inductor.read_triton(kernel(signature, custom=True), STORE) == ("", False)
    unknown = kernel(signature)
    del unknown.custom_kernel
    assert inductor.read_triton(unknown, STORE) == ("", False)


@pytest.mark.parametrize(
    ("source", "repeats"),
    [
        (STORE + "  # 'atomic_add_found': False", True),
        ("tl.store(out_ptr0 + (tmp4 + 8*x0), tmp3, xmask)", False),
        ("tl.atomic_add(out_ptr0 + (x0), tmp3, xmask)", False),
    ],
)
def test_a_kernel_that_writes_in_an_order_of_its_own_does_not_repeat(source: str, repeats: bool) -> None:
    seen = inductor.read_triton(kernel({"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32"}), source)
    assert seen == ("rw-", repeats)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (kernel({"in_ptr0": "*fp32", "XBLOCK": "constexpr", "x_desc": "tensordesc<fp32[16]>"}), "of type tensordesc"),
        (types.SimpleNamespace(run=None), "whose arguments are not known"),
        (types.SimpleNamespace(triton_meta={}, mutated_arg_names=[]), "whose arguments are not known"),
    ],
)
def test_a_kernel_whose_arguments_are_not_known_is_not_paged(made: Any, why: str) -> None:
    with pytest.raises(inductor._NotPagedError, match=why):
        inductor.read_triton(made, STORE)


def test_a_module_with_other_code_is_not_paged() -> None:
    text = "k = async_compile.triton('k', '''source''', device_str='cuda')\ncpu = async_compile.cpp_pybinding(['int'], '')\n"
    assert inductor.triton_kernels_in(text) == {"k": "source"}
    with pytest.raises(inductor._NotPagedError, match=r"made by multi_kernel\(\)"):
        inductor.triton_kernels_in(text + "m = async_compile.multi_kernel('m', [k, k])\n")
    with pytest.raises(inductor._NotPagedError, match=r"made by triton\(\)"):
        inductor.kernels_in(text)
