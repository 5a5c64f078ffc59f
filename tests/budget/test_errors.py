"""When nothing more can be let go: what is raised, when, and what it says."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memmgr
from memmgr import _budget

from .there import bytes_already_there

MB = 1_000_000


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    gc.collect()
    torch.manual_seed(0)
    yield
    gc.collect()


def wide(width: int = 512, depth: int = 8) -> nn.Module:
    """8.4 MB of parameters, next to no activations."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 512) -> None:
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bytes_of(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def check_error(error: memmgr.BudgetError, limit: int) -> None:
    """What holds for each of them."""
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, RuntimeError)
    text = str(error)
    assert text.startswith("DefaultCPUAllocator: can't allocate memory"), f"does not begin as torch's own: {text}"
    assert error.budget_bytes == limit
    assert error.floor_bytes > limit, f"names {error.floor_bytes:,}, but {limit:,} did not work"
    assert str(error.floor_bytes) in text, "the smallest budget is not in the text"
    for word in ("budget", "Held"):
        assert word in text


def test_torch_says_it_like_this() -> None:
    """The words that ours begins with are really torch's."""
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_what_is_there_already_does_not_fit() -> None:
    model = wide()
    limit = bytes_of(model) // 2
    with pytest.raises(memmgr.BudgetError) as caught:
        memmgr.budget(limit, quiet=True).__enter__()
    check_error(caught.value, limit)
    assert "parameters" in str(caught.value) and "Linear" in str(caught.value)
    assert caught.value.floor_bytes >= bytes_of(model)
    with memmgr.budget("8GB", quiet=True):  # nothing of the failed one is left open
        pass


@pytest.mark.parametrize("inside", [True, False], ids=["model inside", "model outside"])
@pytest.mark.parametrize("share", [1.5, 2.5, 3.5])
def test_model_states_alone_do_not_fit(share: float, inside: bool) -> None:
    """Parameters, gradients and two moments are 4x the parameters: any less fails at the first optimizer step."""
    model = None if inside else wide()
    there = bytes_already_there() - (0 if model is None else bytes_of(model))
    limit = int(bytes_of(wide()) * share) + there
    gc.collect()
    done: list[str] = []

    def train(steps: int) -> None:
        nonlocal model
        model = model or wide()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            done.append("begun")
            step(model, optimizer)
            done.append("stepped")

    with pytest.raises(memmgr.BudgetError) as caught, memmgr.budget(limit, quiet=True):
        train(50)
    assert done == ["begun"], f"failed after {done.count('stepped')} optimizer steps"
    error = caught.value
    check_error(error, limit)
    text = str(error)
    for kind in ("parameters", "gradients"):
        assert kind in text, f"no split by kind: {text}"
    if share > 2.1:
        assert "optimizer state" in text
    assert "Linear" in text, "no split by module"
    floor = error.floor_bytes
    del caught, error
    model = None
    gc.collect()
    model = None if inside else wide()
    # The smallest budget that it names works, with a tenth to spare.
    with memmgr.budget(int(1.10 * floor), quiet=True) as mm:
        train(2)
    assert mm.stats()["resident_bytes.peak"] <= 1.10 * floor


@pytest.mark.parametrize("policy", ["auto", "evict", "offload"])
def test_an_op_that_can_never_fit(policy: str) -> None:
    with memmgr.budget(20 * MB, policy=policy, quiet=True):
        a = torch.ones(2_000_000, requires_grad=True)
        with pytest.raises(memmgr.BudgetError) as caught:
            torch.cat([a, a, a])
        check_error(caught.value, 20 * MB)
        # The program may go on: the budget is open and nothing was lost.
        assert (a * 2).sum().item() == 4_000_000


def test_an_error_in_backward_is_ours_too() -> None:
    """A backward that needs more than forward did."""

    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad + torch.ones(50_000_000)[0]

    with memmgr.budget(20 * MB, quiet=True):
        x = torch.ones(1000, requires_grad=True)
        y = Greedy.apply(x).sum()
        with pytest.raises(memmgr.BudgetError) as caught:
            y.backward()
        check_error(caught.value, 20 * MB)


def test_without_grad_mode_too() -> None:
    with memmgr.budget(20 * MB, quiet=True), torch.no_grad(), pytest.raises(memmgr.BudgetError) as caught:
        torch.ones(10_000_000)
    check_error(caught.value, 20 * MB)


def test_held_tensors_are_named() -> None:
    """What the program keeps in a list cannot leave, and the error says that it is there."""
    kept = []
    with pytest.raises(memmgr.BudgetError) as caught, memmgr.budget(20 * MB, quiet=True):
        x = torch.ones(500_000, requires_grad=True)
        for _ in range(100):
            x = x.sin()
            kept.append(x)
    check_error(caught.value, 20 * MB)
    assert "saved for backward" in str(caught.value) or "other tensors" in str(caught.value)
    assert 6 <= len(kept) <= 10


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("meta")])
def test_a_device_that_cannot_be_managed_is_refused(device: Any) -> None:
    """Rather than a budget that nobody keeps."""
    with pytest.raises(NotImplementedError, match=r"cannot be kept.*device='cpu'"):
        memmgr.budget("1GB", device=device)


def test_states_that_are_half_made_do_not_hide_the_rest() -> None:
    """The optimizer ran out of memory in the middle of making them; the error says what all of them will take."""
    from memmgr._stock import missing_states

    native = _budget._native()
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    first, second, *_ = parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p)
    before = missing_states(native, "cpu")
    optimizer = torch.optim.AdamW(parameters)
    assert missing_states(native, "cpu") - before == 8 * bytes_of(model) // 4
    moments = {"exp_avg": torch.zeros_like(first), "exp_avg_sq": torch.zeros_like(first)}
    optimizer.state[first] = {"step": torch.zeros(()), **moments}
    optimizer.state[second] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(second)}
    assert missing_states(native, "cpu") - before == 8 * bytes_of(model) // 4 - 3 * first.nbytes


def test_a_tensor_that_another_thread_has_half_made_does_not_spoil_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the soak: on an undefined tensor `is_leaf` raises, and the out-of-memory error became that."""
    half = torch.ones(3)
    asked: list[int] = []
    whole = torch._C.TensorBase.is_leaf

    def is_leaf(tensor: torch.Tensor) -> bool:
        if tensor is half:
            asked.append(1)
            raise RuntimeError("cannot call get_autograd_meta() on undefined tensor")
        return bool(whole.__get__(tensor))

    limit = bytes_already_there() + 4 * MB
    with memmgr.budget(limit, quiet=True), monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_leaf", property(is_leaf), raising=False)
        with pytest.raises(memmgr.BudgetError, match="Held now"):
            held = [torch.randn(MB // 4) for _ in range(8)]
            held.clear()
    assert asked
