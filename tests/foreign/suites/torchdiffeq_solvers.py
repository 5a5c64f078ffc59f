"""torchdiffeq: every solver, forward and backward through its steps, by the adjoint, and with events."""

from typing import Any

import pytest
import torch
from torch import nn
from torchdiffeq import odeint, odeint_adjoint, odeint_event
from torchdiffeq._impl.odeint import SOLVERS

METHODS = sorted(name for name in SOLVERS if not name.startswith("scipy"))


class Field(nn.Module):
    """A small network of the state and the time."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 3)).to(dtype)

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([y, t.expand(*y.shape[:-1], 1)], dim=-1))


def _train(solve: Any, method: str, dtype: torch.dtype, note: Any, **options: Any) -> None:
    field = Field(dtype)
    optimizer = torch.optim.Adam(field.parameters(), lr=0.01)
    times = torch.linspace(0, 1, 4, dtype=dtype)
    for step in range(2):
        start = torch.randn(8, 3, dtype=dtype, requires_grad=True)
        path = solve(field, start, times, method=method, rtol=1e-3, atol=1e-3, **options)
        loss = (path**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note(f"step {step}", [path, start.grad, list(field.parameters())])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_through_the_steps(method: str, dtype: torch.dtype, note: Any) -> None:
    _train(odeint, method, dtype, note)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_adjoint(method: str, dtype: torch.dtype, note: Any) -> None:
    _train(odeint_adjoint, method, dtype, note)


@pytest.mark.parametrize("method", METHODS)
def test_adjoint_of_a_seminorm(method: str, note: Any) -> None:
    _train(odeint_adjoint, method, torch.float64, note, adjoint_options={"norm": "seminorm"})


@pytest.mark.parametrize("method", ["euler", "midpoint", "rk4"])
@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
def test_grids(method: str, interpolation: str, note: Any) -> None:
    options = {"step_size": 0.07, "interp": interpolation}
    _train(odeint, method, torch.float64, note, options=options)


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("method", ["dopri5", "rk4", "bosh3"])
def test_event(method: str, adjoint: bool, note: Any) -> None:
    speed = torch.tensor([1.0, -0.5], dtype=torch.float64, requires_grad=True)

    class Fall(nn.Module):
        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.stack([y[1], -torch.ones_like(y[0])])

    time, path = odeint_event(
        Fall(), speed, torch.tensor(0.0, dtype=torch.float64), event_fn=lambda t, y: y[0] + 1, method=method,
        odeint_interface=odeint_adjoint if adjoint else odeint,
        **({"options": {"step_size": 0.05}} if method == "rk4" else {}),
    )  # fmt: skip
    note("event", [time, path, torch.autograd.grad(time + path.sum(), speed)])
