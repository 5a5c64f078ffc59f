"""Results of a compiled forward are made again by the kernel's function in C (rules 5 and 8). The reader of Triton kernels: the
arguments that are only read, and the kernels that repeat.
"""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from threads import (
    in_threads,
    one_thread,  # noqa: F401  a fixture
)

import memmgr
from memmgr.native import binding
from memmgr.readers import inductor
from memmgr.tools.bench.models import make

from .programs import Training, bits
from .test_launches import budget, measured, pytestmark  # noqa: F401  marks of this module, too

ROWS, WIDTH = 512, 64  # 128 KiB: above the size from which a storage leaves


class Mixed(torch.nn.Module):
    """Its forward writes a part of an input, writes two parts of one new buffer, and moves running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.norm = torch.nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.norm(x * self.weight)
        kept[: ROWS // 4].copy_(y[: ROWS // 4].detach())
        joined = torch.cat([y.sin(), (y + 1).cumsum(0)], 1)
        return y, joined, joined * kept.sum()


@pytest.fixture(scope="module")
def mixed() -> Callable[..., Any]:
    torch.manual_seed(0)
    model = Mixed()
    return torch.compile(model, dynamic=False)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def state(model: Any) -> list[torch.Tensor]:
    return [t.clone() for t in model.state_dict().values()]


@pytest.mark.rule(5)
def test_each_evicted_result_has_its_bytes_again(mixed: Callable[..., Any]) -> None:
    """Statistics and parts that a program may read afterwards are not changed by that."""
    begin = state(mixed)

    def run(check: Callable[..., None]) -> list[str]:
        mixed.load_state_dict(dict(zip(mixed.state_dict(), begin, strict=True)))
        x, seed = inputs()
        for _ in range(2):  # the first one is a trial
            kept = seed.sin()  # made by an op, so that its old bytes can be made again
            results = mixed(x, kept)
        check(*results, kept)
        return [bits([t]) for t in (*results, kept, *mixed.state_dict().values())]

    want = run(lambda *results: None)
    native = binding.load()

    def evicts(*results: torch.Tensor) -> None:
        found = [native.describe(t) for t in results]
        assert all(info["recipe"] for info in found), [info["op"] for info in found]
        for t in results:
            assert native.take_away(t, 0) > 0 and native.describe(t)["residency"] == "evicted"

    with memmgr.budget("100MB", policy="evict", disk=False, quiet=True, verify=True) as mm:
        assert run(evicts) == want
        assert mm.stats()["rematerializations"] >= 2  # a kernel makes several of them at once


@pytest.mark.rule(5)
def test_an_input_that_is_written_in_part_keeps_its_other_bytes(mixed: Callable[..., Any]) -> None:
    """Its old bytes have the check's pattern: a second run over new memory would hide that they are missing."""
    native = binding.load()
    x, _ = inputs()
    with memmgr.budget("100MB", policy="evict", disk=False, quiet=True):
        kept = torch.full((ROWS, WIDTH), -1, dtype=torch.int32).view(torch.float32)
        for _ in range(2):
            mixed(x, kept)
        before = kept.clone()
        native.take_away(kept, 0)
        assert torch.equal(kept.view(torch.int32), before.view(torch.int32))
        assert kept[ROWS // 4 :].view(torch.int32).eq(-1).all()


def test_inference_and_backward_have_no_recipes(mixed: Callable[..., Any]) -> None:
    native = binding.load()
    x, kept = inputs()
    with memmgr.budget("100MB", policy="evict", disk=False, quiet=True), torch.no_grad():
        for _ in range(2):
            _, joined, _ = mixed(x, kept)
        assert not native.describe(joined)["recipe"]


@pytest.mark.parametrize("name", [pytest.param("attention", marks=pytest.mark.slow), "convolutions"])
def test_a_training_without_a_tier_runs_below_its_need(name: str) -> None:
    training = Training(name)
    want = training.run()
    need = measured(training.run)["unmanaged_peak_bytes"]
    mm = budget(int(0.9 * need), "evict", disk=False)()
    assert training.run(lambda: mm) == want
    assert mm.stats()["rematerializations"] > 0


def test_buffers_are_not_pinned_after_their_first_use(mixed: Callable[..., Any]) -> None:
    x, kept = inputs()
    with memmgr.budget("100MB", quiet=True):
        results = mixed(x, kept)
        assert [binding.load().describe(t)["pins"] for t in results] == [0, 0, 0]


def test_threads_in_compiled_graphs_wait_for_one_another(mixed: Callable[..., Any]) -> None:
    """A buffer that finds no room waits for buffers of the other thread."""
    x, kept = inputs()
    with torch.no_grad():
        want = [t.clone() for t in mixed.eval()(x, kept)]
    try:

        def run(opened: Callable[[], Any]) -> None:
            with torch.no_grad(), opened():
                mixed(x, kept)

        floor = measured(run)["floor_bytes"]
        wrong: list[object] = []

        def repeat() -> None:
            try:
                with torch.no_grad():
                    for _ in range(20):
                        got = mixed(x, kept)
                        wrong.extend(a for a, b in zip(got[:2], want[:2], strict=True) if not torch.equal(a, b))
            except Exception as error:
                wrong.append(error)

        with memmgr.budget(f"{int(1.3 * floor)}B", quiet=True):
            in_threads(lambda _: repeat(), range(2))
        assert wrong == []
    finally:
        mixed.train()


@pytest.mark.parametrize("training", [True, False])
def test_buffers_of_a_launch_leave_while_its_input_is_made_again(training: bool) -> None:
    """The input, the tensor from which it is made and the result do not fit together. The launch alone needs two of them."""
    weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=training)
    compiled = torch.compile(lambda x: (x * weight).sin(), dynamic=False)
    torch.manual_seed(1)
    x, by = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
    want = compiled(x @ by).detach()
    with memmgr.budget(f"{int(2.5 * x.nbytes)}B", quiet=True) as mm:
        x = x.clone()
        for _ in range(2):  # the first one is a trial
            y = x @ by
        native = binding.load()
        assert native.describe(y)["recipe"] and native.take_away(y, 0) > 0
        assert torch.equal(compiled(y).detach(), want)
        assert mm.stats()["rematerializations"] > 0


@pytest.mark.parametrize("other", ["convolutions", pytest.param("broken", marks=pytest.mark.slow)])
def test_trainings_in_two_threads_have_their_own_bits(other: str) -> None:
    """Results of each are evicted and made again while the other one launches. Neither draws in its graphs."""
    trainings = [Training("convolutions"), Training(other)]
    want = [training.run() for training in trainings]
    needs = [measured(training.run) for training in trainings]
    floor = sum(need["floor_bytes"] for need in needs)
    with budget(int(1.05 * floor))() as mm:
        found: list[list[str]] = [[], []]
        for _ in range(5):  # until both run at the same time, which a busy machine may prevent
            in_threads(lambda i: found[i].extend(trainings[i].run() for _ in range(8)), range(2))
            if mm.stats()["rematerializations"] and mm.stats()["reloads"]:
                break
        assert found == [[bits] * len(found[0]) for bits in want]
        assert mm.stats()["rematerializations"] > 0 and mm.stats()["reloads"] > 0


SOURCE = """
extern "C"  void  kernel(float* in_out_ptr0,
                       const int64_t* in_ptr0,
                       float* out_ptr0{argument})
{{
    auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];
    {statement}
}}
"""


@pytest.mark.parametrize(
    ("argument", "types", "statement", "repeats"),
    [
        ("", [], "out_ptr0[static_cast<int64_t>(x0)] = tmp0;", True),
        ("", [], "tmp0.store(out_ptr0 + static_cast<int64_t>(x0), static_cast<int64_t>(tmp_count));", True),
        (", const int64_t ks0", ["const int64_t"], "out_ptr0[x0*ks0] = tmp0;", True),
        ("", [], "out_ptr0[static_cast<int64_t>(x0 + 4L*tmp0)] = 1;", False),
        ("", [], "tmp1.store(in_out_ptr0 + static_cast<int64_t>(x0 + tmp0));", False),
        ("", [], "atomic_add(&out_ptr0[static_cast<int64_t>(x0)], 1);", False),
        (", const double scale", ["const double"], "out_ptr0[x0] = scale;", False),
        (", float* Y", ["float*"], "micro_gemm(Y);", False),
    ],
)  # fmt: skip
def test_a_kernel_repeats_only_where_that_is_known(
    argument: str, types: list[str], statement: str, repeats: bool
) -> None:
    source = SOURCE.format(argument=argument, statement=statement)
    module = f"k = async_compile.cpp_pybinding({['float*', 'const int64_t*', 'float*', *types]!r}, r'''{source}''')\n"
    assert inductor.kernels_in(module)["k"].repeats is repeats


@pytest.mark.slow  # compiling the model takes 15 s of a processor
def test_a_model_of_the_bench_is_compiled_in_a_budget() -> None:
    """Dynamo is kept away from memmgr's own functions, but not from the models of its tools."""
    training = make("GPT", tiny=True)
    training.model.compile(dynamic=False)
    torch._dynamo.utils.counters.clear()
    with memmgr.budget("1GB", quiet=True) as mm:
        training.step()
        assert mm.stats()["recorded_ops"] > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


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
