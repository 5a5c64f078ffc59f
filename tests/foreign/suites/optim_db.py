"""PyTorch's database of optimizers: each with every setting that it lists, in every implementation.

A test trains a few parameters of several shapes, loads the state into a second optimizer in the middle, and goes on with that.
Every parameter and every state after each step is compared. Settings that an optimizer refuses are refused alike.
"""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.testing._internal.common_optimizers import (
    _get_optim_inputs_including_global_cliquey_kwargs as with_implementations,
)
from torch.testing._internal.common_optimizers import optim_db

SHAPES = ((7, 5), (300,), (4, 3, 3), (1,), ())
STEPS = 5
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


def _name(info: Any) -> str:
    return str(info.optim_cls.__name__)


def _settings(differentiable: bool) -> list[Any]:
    found = []
    for info in optim_db:
        for dtype in DTYPES:
            if dtype.is_complex and not info.supports_complex:
                continue
            for given in with_implementations("cpu", dtype, info):
                if bool(given.kwargs.get("differentiable")) != differentiable:
                    continue
                if dtype.is_complex and given.kwargs.get("fused"):
                    continue  # no kernel has it
                key = f"{_name(info)}-{given.desc.replace(' ', '_') or 'default'}-{str(dtype).removeprefix('torch.')}"
                found.append(pytest.param(info, given.kwargs, dtype, id=key))
    return found


def _parameters(info: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = SHAPES[:1] * 3 if _name(info) == "Muon" else SHAPES  # it takes matrices only
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def _state(optimizer: Any) -> list[Any]:
    return [list(state.values()) for state in optimizer.state.values()]


def _step(info: Any, optimizer: Any, closure: Any) -> None:
    optimizer.step(closure) if info.step_requires_closure else optimizer.step()


@pytest.mark.parametrize(("info", "kwargs", "dtype"), _settings(differentiable=False))
def test_settings(info: Any, kwargs: dict[str, Any], dtype: torch.dtype, note: Any) -> None:
    parameters = _parameters(info, dtype)
    if info.step_requires_closure:
        kwargs = {"max_iter": 3, **kwargs}  # a step of LBFGS is twenty otherwise
    optimizer = info.optim_cls(parameters, **deepcopy(kwargs))
    inputs = [torch.randn_like(t) for t in parameters]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = sum(((t * x).abs() ** 2 + (t * x).abs()).sum() for t, x in zip(parameters, inputs, strict=True))
        for t, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            t.grad = grad.to_sparse() if info.only_supports_sparse_grads else grad
        return loss

    for step in range(STEPS):
        if step == STEPS // 2:
            saved = deepcopy(optimizer.state_dict())
            optimizer = info.optim_cls(parameters, **deepcopy(kwargs))
            optimizer.load_state_dict(saved)
        loss = closure()
        _step(info, optimizer, closure)
        note(f"step {step}", [loss, parameters, _state(optimizer)])


@pytest.mark.parametrize(("info", "kwargs", "dtype"), _settings(differentiable=True))
def test_gradients_through_a_step(info: Any, kwargs: dict[str, Any], dtype: torch.dtype, note: Any) -> None:
    leaves = _parameters(info, dtype)
    optimizer = info.optim_cls([t.clone() for t in leaves], **deepcopy(kwargs))
    stepped = optimizer.param_groups[0]["params"]
    for t in stepped:
        t.grad = torch.randn_like(t)
    _step(info, optimizer, lambda: torch.tensor(1.0))
    through = torch.autograd.grad(sum(t.abs().sum() for t in stepped), leaves)
    note("step", [stepped, _state(optimizer), through])


@pytest.mark.parametrize("info", optim_db, ids=_name)
@pytest.mark.parametrize("schedule", range(3))
def test_scheduler(info: Any, schedule: int, note: Any) -> None:
    if schedule >= len(info.scheduler_inputs):
        pytest.skip("it has fewer schedulers")
    parameters = _parameters(info, torch.float32)
    optimizer = info.optim_cls(parameters, lr=0.01)
    schedulers = [make(optimizer) for make in info.scheduler_inputs[schedule]]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = sum((t**2).sum() for t in parameters)
        loss.backward()
        if info.only_supports_sparse_grads:
            for t in parameters:
                t.grad = t.grad.to_sparse()
        return loss

    for step in range(STEPS):
        loss = closure()
        _step(info, optimizer, closure)
        for scheduler in schedulers:
            by_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(loss) if by_loss else scheduler.step()
        note(f"step {step}", [parameters, [group["lr"] for group in optimizer.param_groups]])


@pytest.mark.parametrize("info", optim_db, ids=_name)
def test_refused_settings(info: Any, note: Any) -> None:
    for given in info.optim_error_inputs_func("cpu", torch.float32):
        wrong = given.optimizer_error_input
        try:
            optimizer = info.optim_cls(wrong.params, **wrong.kwargs)
            _step(info, optimizer, lambda: torch.tensor(0.0))
            note("no error", given.error_regex)
        except Exception as error:
            note("error", [type(error).__name__, str(error)])
