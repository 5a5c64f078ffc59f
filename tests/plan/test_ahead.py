"""Steps on fake tensors: the trace is the one of a live run, and a step that cannot be traced is an error."""

import copy
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memmgr
from memmgr.policies.plan import planner
from memmgr.policies.trace import OpKind, TierLink, Trace
from memmgr.policies.trace.plan import Plan
from memmgr.tools.bench import measure
from memmgr.tools.bench.models import make
from memmgr.tools.common import outlook as outlooks
from memmgr.tools.common.fake_step import StepError, record
from memmgr.tools.common.outlook import KINDS, half_overhead, kind_of, least_bytes, levels, outlook
from memmgr.tools.common.rates import DEVICES, Rates, Work


@pytest.fixture(scope="module", autouse=True)
def quick_plans() -> Iterator[None]:
    """The planner's search has tests of its own: here it is a tenth as long."""

    def planned(trace: Trace, budget: int, *, link: TierLink | None, effort: int, solve: bool) -> Plan:
        return planner.plan(trace, budget, link=link, effort=effort // 10, solve=solve)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outlooks, "plan", planned)
        yield


BARE = Rates("bare", {"float32": 1e12}, 1e11, 2**34, DEVICES["rtx4090"].link, "made up", accelerator=False)


def mlp(
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, width: int = 512, layers: int = 6
) -> Callable[[], object]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
    update = optimizer(model.parameters())
    x = torch.randn(1024, width)

    def step() -> None:
        model(x).square().mean().backward()
        update.step()
        update.zero_grad()

    return step


def step_of(name: str) -> Callable[[], Callable[[], object]]:
    return lambda: make(name).step


def live_peak(made: Callable[[], Callable[[], object]]) -> int:
    with memmgr.budget(None, device="cpu", quiet=True) as mm:
        step = made()
        for _ in range(3):
            step()
    return int(mm.stats()["unmanaged_peak_bytes"])


@pytest.mark.parametrize(
    # Attention has a test of its own, below.
    "name",
    ["U-Net", *(pytest.param(name, marks=pytest.mark.slow) for name in ("GPT", "Llama", "BERT"))],
)
def test_the_peak_is_the_live_one(name: str) -> None:
    predicted = record(step_of(name), accelerator=False).trace(BARE).unmanaged_peak[0]
    assert predicted == pytest.approx(live_peak(step_of(name)), rel=0.002)


@pytest.mark.parametrize("name", ["ResNet", "LSTM"])
def test_the_peak_is_the_live_one_where_kernels_need_room(name: str) -> None:
    """Convolutions and recurrent layers: their workspaces are in a measured table."""
    step = record(step_of(name), accelerator=False)
    with torch.no_grad():
        scratch = {s: (0.0, measure.scratch_bytes(call)) for s, call in step.samples.items()}
    predicted = step.trace(replace(BARE, calls=scratch)).unmanaged_peak[0]
    assert step.trace(BARE).unmanaged_peak[0] < predicted == pytest.approx(live_peak(step_of(name)), rel=0.01)


def test_what_lives_on_is_told_by_kind() -> None:
    trace = record(mlp, accelerator=False).trace(BARE)
    kind, held = kind_of(trace), Counter[str]()
    for _, start in trace.cycle:
        held[kind[start]] += trace.storages[start].size_bytes
    weights = 6 * 512 * 512 * 4  # biases are too small to leave
    assert held == {"parameter": weights + 1024 * 512 * 4, "gradient": weights, "optimizer state": 2 * weights}


def test_backward_and_the_optimizer_do_not_run_again_and_forward_does() -> None:
    trace = record(mlp, accelerator=False).trace(BARE)
    assert trace.backward_at is not None
    before = {op.name for op in trace.ops[: trace.backward_at] if op.kind == OpKind.COMPUTE}
    assert {"aten::addmm", "aten::gelu"} <= before and "aten::addcdiv_" not in before
    assert not any(op.kind == OpKind.COMPUTE for op in trace.ops[trace.backward_at :])


def test_accumulated_gradients_are_one_period() -> None:
    def make() -> Callable[[], object]:
        model = nn.Linear(512, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            for _ in range(4):
                model(torch.ones(8, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    trace = record(make, accelerator=False).trace(BARE)
    assert sum(op.name == "aten::mm" for op in trace.ops) == 4
    assert Counter(kind_of(trace)[start] for _, start in trace.cycle) == {"parameter": 1, "gradient": 1}


def test_a_batch_that_numpy_makes_counts_from_its_first_use() -> None:
    def make() -> Callable[[], object]:
        model = nn.Linear(512, 512)

        def step() -> None:
            model(torch.from_numpy(np.ones((4096, 512), dtype=np.float32))).sum().backward()
            model.zero_grad()

        return step

    trace = record(make, accelerator=False).trace(BARE)
    batch = 4096 * 512 * 4
    assert trace.unmanaged_peak[0] == pytest.approx(2 * batch + 512 * 512 * 4, rel=0.01)


def test_result_that_outlives_its_backward_is_not_in_the_next_period() -> None:
    """It is freed among the optimizer's ops, which are too small to be in the trace."""

    def make() -> Callable[[], object]:
        model, x = nn.Linear(8, 8), torch.randn(8192, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            y = model(x)
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    trace = record(make, accelerator=False).trace(BARE)
    assert kind_of(trace)
    assert trace.unmanaged_peak[0] == pytest.approx(live_peak(make), rel=0.01)


def test_deepcopy_of_a_fake_layer_warns_of_nothing(
    recwarn: pytest.WarningsRecorder, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: torch.set_warn_always(False))
    torch.set_warn_always(True)  # else once a process

    def make() -> Callable[[], object]:
        layer = copy.deepcopy(nn.Linear(256, 256))
        x = torch.randn(256, 256)
        return lambda: layer(x).sum().backward()

    record(make, accelerator=False)
    assert not list(recwarn)


def test_no_bytes_are_needed() -> None:
    def make() -> Callable[[], object]:
        return mlp(width=100_000, layers=12)  # 0.5 TB of weights

    assert record(make, accelerator=False).trace(BARE).unmanaged_peak[0] > 4 * 12 * 100_000**2 * 4


def test_an_accelerators_optimizer_takes_its_lists_and_leaves_index_by_index() -> None:
    trace = record(mlp, accelerator=True).trace(DEVICES["t4"])
    roots = [op for op in trace.ops if op.name == "aten::_foreach_sqrt"]
    assert len(roots) == 6 and all(len(op.inputs) == len(op.outputs) == 1 for op in roots)
    assert not any("_foreach" in op.name for op in record(mlp, accelerator=False).trace(BARE).ops)


def test_a_script_for_cuda_is_traced_without_it() -> None:
    def make() -> Callable[[], object]:
        model = nn.Linear(512, 512, device="cuda").bfloat16().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.ones(1024, 512, dtype=torch.bfloat16).to(torch.device("cuda"))

        def step() -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.dropout(model(x), 0.5).float().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    trace = record(make, accelerator=True).trace(DEVICES["t4"])
    names = Counter(op.name for op in trace.ops)
    assert names["aten::native_dropout"] == 1 and names["aten::_fused_adamw_"] == 1
    masks = [trace.storages[s].size_bytes for op in trace.ops if op.name == "aten::native_dropout" for s in op.outputs]
    assert masks == [1024 * 512 * 2, 1024 * 512]  # a mask of bytes
    types = importlib.import_module("torch.optim.optimizer")._foreach_supported_types
    assert FakeTensor not in types  # all is as it was


def test_attention_keeps_no_mask_of_its_dropout() -> None:
    def make() -> Callable[[], object]:
        q = torch.randn(4, 8, 512, 64, requires_grad=True)

        def step() -> None:
            nn.functional.scaled_dot_product_attention(q, q, q, None, 0.1, True).sum().backward()
            q.grad = None

        return step

    on_cpu, there = (record(make, accelerator=a).trace(BARE).unmanaged_peak[0] for a in (False, True))
    assert there < on_cpu / 4
    assert on_cpu > 4 * 8 * 512 * 512 * 4


def test_a_value_that_is_asked_for_is_named_by_its_line() -> None:
    def make() -> Callable[[], object]:
        model = nn.Linear(4, 4)

        def step() -> None:
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            assert loss.item() == 1.0  # a number that is printed, most likely
            print(loss.long().item())

        return step

    line = make.__code__.co_firstlineno + 7
    with pytest.raises(
        StepError, match=rf"{re.escape(__file__)}:{line}: .*_local_scalar_dense gives depends on values"
    ):
        record(make, accelerator=False)


def test_a_size_that_depends_on_values_is_named_by_its_line() -> None:
    def make() -> Callable[[], object]:
        return lambda: torch.ones(4).nonzero()

    with pytest.raises(StepError, match=rf"{re.escape(__file__)}:{make.__code__.co_firstlineno + 1}: .*nonzero"):
        record(make, accelerator=False)


def test_a_step_that_differs_each_time_is_refused() -> None:
    sizes = iter((8, 16, 32))

    def make() -> Callable[[], object]:
        return lambda: torch.ones(next(sizes)).exp()

    with pytest.raises(StepError, match="something else each time"):
        record(make, accelerator=False)


def test_what_makes_no_step_is_refused() -> None:
    with pytest.raises(StepError, match="returned int"):
        record(lambda: 3, accelerator=False)  # type: ignore[arg-type, return-value]
    with pytest.raises(StepError, match="no op"):
        record(lambda: lambda: None, accelerator=False)


def test_an_op_takes_the_slower_of_arithmetic_and_bytes_unless_it_was_measured() -> None:
    rates = Rates("x", {"float32": 1e12, "bfloat16": 4e12}, 1e9, 0, None, "", calls={"known": (7.0, 3)})
    assert rates.seconds(Work("", 2 * 10**12, 10**9, "float32")) == 2
    assert rates.seconds(Work("", 2 * 10**12, 10**9, "bfloat16")) == 1
    assert rates.seconds(Work("", 2 * 10**12, 0, "tf32")) == 2  # not in the table: as float32
    assert (rates.seconds(Work("known", 1, 1, "float32")), rates.scratch_bytes(Work("known", 1, 1, ""))) == (7.0, 3)


def test_a_product_is_told_by_its_arithmetic() -> None:
    def make() -> Callable[[], object]:
        a = torch.ones(512, 512)
        return lambda: a @ a

    works = [w for w in record(make, accelerator=False).works if w.flops]
    assert [(w.flops, w.moved_bytes, w.dtype) for w in works] == [(2 * 512**3, 3 * 512 * 512 * 4, "float32")]


def test_memory_over_the_step_is_the_traces_and_the_plan_keeps_the_budget() -> None:
    link = DEVICES["t4"].link
    step = record(lambda: mlp(layers=4), accelerator=True)
    trace = replace(step.trace(DEVICES["t4"]), links=(link,) if link else ())
    peak = trace.unmanaged_peak[0]
    assert max(sum(level.resident) for level in levels(trace)) == peak
    found, made = outlook(trace, peak // 2, link)
    assert found.fits and found.overhead is not None and found.overhead >= (found.lower_bound or 0) >= 1
    seen = levels(trace, made.steps, made)
    assert max(sum(level.resident) for level in seen) <= peak // 2
    assert set(found.written_bytes) <= set(KINDS) and sum(found.written_bytes.values()) > 0
    least = least_bytes(trace)
    assert not outlook(trace, least - 1, link)[0].fits
    half = half_overhead(trace, found, link)
    if half is not None:
        again = outlook(trace, half, link)[0]
        assert again.overhead is not None and again.overhead - 1 <= (found.overhead - 1) / 2


def test_a_tier_that_is_too_small_does_not_fit() -> None:
    link = DEVICES["t4"].link
    assert link is not None
    trace = record(lambda: mlp(layers=4), accelerator=True).trace(DEVICES["t4"])
    budget = trace.unmanaged_peak[0] // 2
    need = outlook(trace, budget, link)[0].tier_bytes
    assert need > 0
    assert outlook(trace, budget, replace(link, capacity_bytes=need))[0].fits
    assert not outlook(trace, budget, replace(link, capacity_bytes=need // 8))[0].fits
