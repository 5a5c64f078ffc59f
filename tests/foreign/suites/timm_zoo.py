"""timm: a step of training, an evaluation and a saved state for one small model of each of its families."""

import io
from typing import Any

import pytest
import torch

# The wheel of torchvision is built for CUDA: without that its library does not load, and its schemas are missing. timm uses
# its transforms of images, which are Python.
_LIBRARY = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm  # noqa: E402

MOST_PARAMETERS = 12e6
SIDE = 64


def _names() -> list[str]:
    """The smallest model of each module of timm, and all of those that are there for tests."""
    found = [name for name in timm.list_models() if name.startswith("test_")]
    for module in timm.list_modules():
        small = [
            n
            for n in timm.list_models(module=module)
            if any(
                word in n
                for word in ("tiny", "nano", "pico", "atto", "xxs", "_s0", "18", "_b0", "050", "small", "mini")
            )
        ]
        if small:
            found.append(min(small, key=len))
    return sorted(set(found))


def _made(name: str, **more: Any) -> torch.nn.Module:
    try:
        model = timm.create_model(name, pretrained=False, num_classes=10, img_size=SIDE, **more)
    except TypeError:
        model = timm.create_model(name, pretrained=False, num_classes=10, **more)
    if sum(t.numel() for t in model.parameters()) > MOST_PARAMETERS:
        pytest.skip("large")
    return model


@pytest.mark.parametrize("name", _names())
def test_trains(name: str, note: Any) -> None:
    model = _made(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(2, 3, SIDE, SIDE)
    for step in range(2):
        out = model(x)
        loss = sum((t.float() ** 2).mean() for t in (out if isinstance(out, tuple | list) else [out]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note(f"step {step}", [loss, out])
    note("end", list(model.state_dict().values()))


@pytest.mark.parametrize("name", [name for name in _names() if name.startswith("test_")])
@pytest.mark.parametrize("way", ["evaluates", "features", "checkpointing", "saved"])
def test_small_model(name: str, way: str, note: Any) -> None:
    x = torch.randn(2, 3, SIDE, SIDE)
    if way == "features":
        model = _made(name, features_only=True).eval()
        note("features", model(x))
        return
    model = _made(name)
    if way == "evaluates":
        with torch.no_grad():
            note("out", model.eval()(x))
    elif way == "checkpointing":
        model.train().set_grad_checkpointing(True)
        model(x).square().mean().backward()
        note("gradients", [t.grad for t in model.parameters()])
    else:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = _made(name)
        other.load_state_dict(torch.load(file))
        note("state", list(other.state_dict().values()))
        note("out", other.eval()(x))
