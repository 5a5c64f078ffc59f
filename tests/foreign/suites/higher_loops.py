"""higher: gradients through inner loops, for each optimizer that it can differentiate."""

from typing import Any

import higher
import pytest
import torch
from torch import nn

OPTIMIZERS = {
    cls.__name__: cls
    for cls in higher.optim._opt_mapping  # optimizers of torch.optim that have a differentiable twin
}
SETTINGS: dict[str, dict[str, Any]] = {"default": {}, "weight decay": {"weight_decay": 0.1}}


def _model(kind: str) -> tuple[nn.Module, torch.Tensor]:
    if kind == "mlp":
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(12, 6)
    if kind == "convolution":
        body = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)]
        return nn.Sequential(*body), torch.randn(5, 2, 6, 6)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 4)), torch.randn(12, 6)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["mlp", "convolution", "dropout"])
@pytest.mark.parametrize("higher_order", [True, False], ids=["second order", "first order"])
def test_inner_loop(name: str, settings: str, kind: str, higher_order: bool, note: Any) -> None:
    model, x = _model(kind)
    if name in ("Rprop", "LBFGS", "SparseAdam") and settings != "default":
        pytest.skip("it has no weight decay")
    inner = OPTIMIZERS[name](model.parameters(), lr=0.05, **SETTINGS[settings])
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        outer.zero_grad()
        with higher.innerloop_ctx(model, inner, copy_initial_weights=False, track_higher_grads=higher_order) as (
            f,
            opt,
        ):
            for _ in range(3):
                opt.step((f(x) ** 2).mean())
            loss = (f(x) ** 2).mean()
            note(f"loss {step}", loss)
            loss.backward()
        note(f"gradients {step}", [t.grad for t in model.parameters()])
        outer.step()
    note("end", list(model.state_dict().values()))
