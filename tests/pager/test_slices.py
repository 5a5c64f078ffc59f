"""Optimizers' steps and list ops in slices of their lists: the same bits, with the working set of a slice."""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import forkserver
import pytest
import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
)

import memmgr
from memmgr.native import binding as native

LIST_OPS = [
    *foreach_unary_op_db,
    *foreach_binary_op_db,
    *foreach_pointwise_op_db,
    *foreach_reduce_op_db,
    *foreach_other_op_db,
]


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every storage is a cell, and so small a share of the budget cuts every list."""
    monkeypatch.setenv("MEMMGR_PAGER_SMALL", "1")
    yield


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def _called(op: Any, sample: Any, in_place: bool) -> list[torch.Tensor]:
    lists = [[t.clone() for t in sample.input]]
    lists += [
        [t.clone() if isinstance(t, torch.Tensor) else t for t in a] if isinstance(a, list) else a for a in sample.args
    ]
    made = (op.inplace_variant if in_place else op.method_variant)(*lists, **sample.kwargs)
    return [t.clone() for t in _tensors([lists[0], made])]


# Every fourth op of one list: they have the same schema and are cut by the same code.
_SLOW = {op.name for nth, op in enumerate(foreach_unary_op_db) if nth % 4}


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=[pytest.mark.slow] * (op.name in _SLOW)) for op in LIST_OPS], ids=lambda op: op.name
)
def test_list_ops(op: Any, one_by_one: None, beyond: Callable[[str], int]) -> None:
    """PyTorch's own samples of its list ops."""
    ways = [way for way in (False, True) if (op.inplace_variant if way else op.method_variant) is not None]
    samples = list(itertools.islice(op.sample_inputs("cpu", torch.float32, noncontiguous=False), 6))
    plain: list[list[torch.Tensor] | None] = []
    for sample, in_place in itertools.product(samples, ways):
        try:
            plain.append(_called(op, sample, in_place))
        except (RuntimeError, IndexError, TypeError):
            plain.append(None)  # samples for errors, and for dtypes that in-place ops refuse
    cut = 0
    with memmgr.budget(beyond("200kB"), quiet=True):
        pager = native.load()
        pager.set_slice_bytes(64)
        for (sample, in_place), want in zip(itertools.product(samples, ways), plain, strict=True):
            if want is None:
                continue
            before = pager.stats()["slices"]
            got = _called(op, sample, in_place)
            cut += pager.stats()["slices"] > before
            assert len(got) == len(want)
            for a, b in zip(got, want, strict=True):
                assert a.dtype == b.dtype and torch.equal(a.nan_to_num(3.25), b.nan_to_num(3.25))
    assert cut > 0, "nothing was cut, so nothing was tested"


def same_with_slices(run: Callable[[], list[torch.Tensor]], limit: int) -> dict[str, Any]:
    """The figures of a run under the budget, which has the same bits as without."""
    want = run()
    with memmgr.budget(limit, quiet=True) as mm:
        got = run()
        assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    return mm.stats()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, **k),
    "AdamW, amsgrad": lambda p, **k: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, maximize=True, **k),
    "Adam": lambda p, **k: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, **k),
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=1e-2, **k),
    "SGD, momentum": lambda p, **k: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=1e-2, **k),
    "RMSprop": lambda p, **k: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True, **k),
    "NAdam": lambda p, **k: torch.optim.NAdam(p, lr=1e-2, **k),
    "RAdam": lambda p, **k: torch.optim.RAdam(p, lr=1e-2, **k),
    "Adamax": lambda p, **k: torch.optim.Adamax(p, lr=1e-2, **k),
    "Adadelta": lambda p, **k: torch.optim.Adadelta(p, lr=1e-2, **k),
    "ASGD": lambda p, **k: torch.optim.ASGD(p, lr=1e-2, **k),
    "Rprop": lambda p, **k: torch.optim.Rprop(p, lr=1e-2, **k),
    "Adafactor": lambda p, **k: torch.optim.Adafactor(p, lr=1e-2, **k),
}
FUSED = ("AdamW", "AdamW, amsgrad", "Adam", "SGD", "SGD, momentum", "Adagrad")
WIDTH, DEPTH = 96, 8


def _trained(
    make: Callable[..., torch.optim.Optimizer], way: str, dtypes: tuple[torch.dtype, ...]
) -> list[torch.Tensor]:
    """Parameters and states after four steps; the second has no gradients for half of them, and all are clipped."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=dtypes[i % len(dtypes)]) for i in range(DEPTH)]
    params = [p for layer in layers for p in layer.parameters()]
    optimizer = make(params, **{way: True})
    for step in range(4):
        for i, p in enumerate(params):
            p.grad = None if step == 1 and i % 2 else torch.randn_like(p)
        nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
    states = [t for p in params for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone() for t in (*params, *states)]


STEPS = [*((name, "foreach", 1) for name in OPTIMIZERS), *((name, "fused", 1) for name in FUSED)]
STEPS += [
    ("Adafactor", "foreach", 2),
    ("AdamW", "fused", 2),
    ("SGD, momentum", "foreach", 2),
    ("SGD, momentum", "fused", 2),
]


@pytest.mark.parametrize(("name", "way", "types"), STEPS)
def test_steps(name: str, way: str, types: int, beyond: Callable[[str], int]) -> None:
    dtypes = (torch.float32, torch.float64)[:types]
    stats = same_with_slices(lambda: _trained(OPTIMIZERS[name], way, dtypes), beyond("700kB"))
    assert stats["offloads"] + stats["evictions"] + stats["clean_drops"] > 0, "everything fitted, so nothing was tested"


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_parameters_that_share_memory(way: str, beyond: Callable[[str], int]) -> None:
    """Each op of a step does both before the next op does one; so does a step that waits."""

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(DEPTH)]
        params.insert(0, nn.Parameter(params[4].data[3]))  # small
        params.append(nn.Parameter(params[2].data[: WIDTH // 2]))
        optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, **{way: True})
        for _ in range(4):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        return [t.detach().clone() for p in params for t in (p, *optimizer.state[p].values())]

    same_with_slices(run, beyond("700kB"))


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_the_working_set_is_a_slice(way: str, beyond: Callable[[str], int]) -> None:
    """AdamW's lists are 16 bytes a parameter: 1.2 MB here, and a third of it is enough."""
    with memmgr.budget(beyond("400kB"), quiet=True) as mm:
        params = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(DEPTH)]
        optimizer = torch.optim.AdamW(params, **{way: True})
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
    assert mm.stats()["slices"] > 0


def test_what_a_scaler_unscales(beyond: Callable[[str], int]) -> None:
    """One inf anywhere is an inf everywhere, in whichever slice it is."""

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        grads = [torch.randn(WIDTH, WIDTH) for _ in range(DEPTH)]
        grads[2][3, 4] = float("inf")
        found, scale = torch.zeros(1), torch.full((1,), 0.25)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
        return [found, *grads]

    assert same_with_slices(run, beyond("280kB"))["slices"] > 0


MOVED = """
import sys, torch, memmgr
from memmgr.runtime.steps import SlicedSteps

if sys.argv[1] == "whole":
    SlicedSteps.install = lambda self: None
with memmgr.budget("400kB", policy="offload", quiet=True) as mm:
    params = [torch.nn.Parameter(torch.randn(96, 96)) for _ in range(24)]
    optimizer = torch.optim.AdamW(params, foreach=True)
    for p in params:
        p.grad = torch.randn_like(p)
    for _ in range(4):
        optimizer.step()
print(mm.stats()["reload_bytes"])
"""


def test_what_a_slice_needs_comes_once() -> None:
    """Cut op by op, each of a step's dozen list ops would move all parameters and states. In processes of their own:
    tensors left behind by other tests could be evicted instead."""

    def moved(way: str) -> int:
        done = forkserver.run([sys.executable, "-c", MOVED, way], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return int(done.stdout)

    whole = moved("whole")
    assert whole > 0
    assert moved("sliced") < 0.5 * whole


def test_torchs_functions_are_as_they_were() -> None:
    adam = sys.modules["torch.optim.adam"]
    before = adam._multi_tensor_adam
    with memmgr.budget("1GB", quiet=True):
        assert adam._multi_tensor_adam is not before
    assert adam._multi_tensor_adam is before
