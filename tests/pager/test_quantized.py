"""Packed weights: torch's quantized modules hold them in objects of C++, which no argument of an op shows."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.ao import quantization

import memmgr
from memmgr.native import binding as native

pytestmark = [
    pytest.mark.skipif(not torch.backends.quantized.supported_engines, reason="no quantized kernels in this torch"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, that all this moves to another package
]


def linear() -> nn.Module:
    """A bias of 80 kB, read by address."""
    return quantization.quantize_dynamic(nn.Sequential(nn.Linear(16, 20_000)), {nn.Linear})


def embeddings() -> nn.Module:
    """The scales of its rows are the quantizer's, and its weights the object's."""
    bag = nn.EmbeddingBag(2_000, 64, mode="sum")
    bag.qconfig = quantization.float_qparams_weight_only_qconfig
    return torch.ao.nn.quantized.EmbeddingBag.from_float(bag)


def convolution() -> nn.Module:
    """Trained as if it were quantized, and then quantized."""
    net = nn.Sequential(quantization.QuantStub(), nn.Conv2d(8, 512, 1), nn.ReLU(), quantization.DeQuantStub())
    net.qconfig = quantization.get_default_qat_qconfig()
    quantization.prepare_qat(net.train(), inplace=True)
    net(torch.randn(2, 8, 6, 6)).square().mean().backward()
    return quantization.convert(net.eval())


def outputs(make: Callable[[], nn.Module]) -> list[float]:
    torch.manual_seed(0)
    net, found = make(), []
    with torch.no_grad():
        for _ in range(4):
            if make is embeddings:
                y = net(torch.randint(0, 2_000, (256,)), torch.arange(0, 256, 8))
            else:
                y = net(torch.randn(4, 16) if make is linear else torch.randn(2, 8, 6, 6))
            found.append(y.sum().item())
            net = copy.deepcopy(net)  # by a special method of the object in C++
            held = [torch.randn(200, 200) * k for k in range(6)]  # lets the others leave
            found.append(sum(t.sum().item() for t in held))
    return found


@pytest.mark.parametrize("policy", ["auto", "torture"])
@pytest.mark.parametrize("make", [linear, embeddings, convolution])
def test_packed_weights_come_back(make: Callable[[], nn.Module], policy: str, beyond: Callable[[str], int]) -> None:
    """An op of torch's own met the trap, and said that no op of torch's had read it."""
    want = outputs(make)
    limit = {linear: "3MB", embeddings: "1500kB", convolution: "1300kB"}[make]
    with memmgr.budget(beyond(limit) if policy == "auto" else None, policy=policy, quiet=True) as mm:
        assert outputs(make) == want
    stats = mm.stats()
    assert stats["offloads"] + stats["evictions"] > 0
    if policy == "torture" and make is not embeddings:  # whose scales the op touches
        assert native.load().stats()["trap_retries"] > 0


def test_a_write_reads_the_scales_of_channels() -> None:
    """No argument shows the tensors of a quantizer, and an op that has begun to write is not run once more."""
    x = torch.randn(300, 16)
    scales, points = torch.rand(300, dtype=torch.double) / 10 + 0.01, torch.randint(0, 9, (300,))

    def written() -> list[torch.Tensor]:
        q = torch.quantize_per_channel(x, scales, points, 0, torch.quint8)
        empty = torch._empty_per_channel_affine_quantized(
            (300, 16), scales=scales, zero_points=points, axis=0, dtype=torch.quint8
        )
        return [q.copy_(x * 2).dequantize(), empty.copy_(x).dequantize()]

    want = written()
    with memmgr.budget("1GB", policy="torture", quiet=True):
        found = written()
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.skipif("onednn" not in torch.backends.quantized.supported_engines, reason="oneDNN's kernels alone do it")
def test_a_sum_that_onednn_adds_in_place_is_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema declares no write to the accumulated tensor, which is the result where it is channels_last."""
    monkeypatch.setattr(torch.backends.quantized, "engine", "onednn")
    torch.manual_seed(0)
    x, accumulated = (torch.quantize_per_tensor(torch.rand(1, 64, 16, 16), 0.1, 0, torch.quint8) for _ in range(2))
    weight = torch.quantize_per_tensor(torch.randn(64, 64, 3, 3), 0.05, 0, torch.qint8)
    packed = torch.ops.quantized.conv2d_prepack(weight, torch.zeros(64), [1, 1], [1, 1], [1, 1], 1)

    def added(pager: native.Pager | None) -> tuple[torch.Tensor, torch.Tensor]:
        sum_ = accumulated.clone(memory_format=torch.channels_last)
        for turn in (1, 1):
            if pager is not None:
                assert pager.take_away(sum_, turn) > 0
            result = torch.ops.quantized.conv2d_add(x, sum_, packed, 0.2, 3)
        if pager is not None:
            pager.take_away(sum_, 1)
        return sum_.int_repr(), result.int_repr()

    want = added(None)
    assert not torch.equal(want[0], accumulated.int_repr())
    with memmgr.budget("1GB", quiet=True):
        found = [t.clone() for t in added(native.load())]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
