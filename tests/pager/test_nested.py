"""Strided nested tensors: their sizes, strides and offsets are tensors that torch reads by address (rule 9)."""

import gc
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import memmgr
from memmgr.native import binding as native

PARTS = 9000  # their sizes take 144 kB


@pytest.fixture(autouse=True)
def _a_prototype() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _parts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1 + i % 3, 4, generator=generator) for i in range(PARTS)]


def _nested(*, requires_grad: bool = False) -> torch.Tensor:
    return torch.nested.nested_tensor(_parts(), requires_grad=requires_grad)


def _padded(nested: torch.Tensor) -> torch.Tensor:
    return torch.nested.to_padded_tensor(nested, 0.0)


def _linear() -> torch.Tensor:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    _padded(layer(_nested() * 2.0)).square().sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad


def _gradient(forward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    nested = _nested(requires_grad=True)
    _padded(forward(nested)).square().sum().backward()
    assert nested.grad is not None
    return _padded(nested.grad)


def _attention() -> torch.Tensor:
    heads = torch.nested.nested_tensor([part.view(-1, 2, 2) for part in _parts()]).transpose(1, 2).contiguous()
    mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return _padded(mixed.transpose(1, 2).contiguous())


def _mask() -> torch.Tensor:
    return torch.arange(3)[None] < (1 + torch.arange(PARTS) % 3)[:, None]


def _from_mask() -> torch.Tensor:
    dense = torch.randn(PARTS, 3, 4, generator=torch.Generator().manual_seed(1))
    return _padded(torch._nested_tensor_from_mask(dense, _mask()) + 1)


def _encoder() -> torch.Tensor:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    with torch.no_grad():
        found: torch.Tensor = encoder(torch.randn(PARTS, 3, 4), src_key_padding_mask=~_mask())
    return found


def _from_buffer() -> torch.Tensor:
    """The program's own tensors become the sizes."""
    nested = _nested()
    geometry = [
        part * 1
        for part in (
            nested._nested_tensor_size(),
            nested._nested_tensor_strides(),
            nested._nested_tensor_storage_offsets(),
        )
    ]
    return _padded(torch._nested_view_from_buffer(torch.cat([part.flatten() for part in _parts()]), *geometry).clone())


PROGRAMS: dict[str, Callable[[], torch.Tensor]] = {
    "linear": _linear,
    "transposed": lambda: _padded(_nested().transpose(1, 2).contiguous()),
    "unbind": lambda: torch.cat([part.flatten() for part in _nested().unbind()[:50]]),
    "softmax": lambda: _gradient(lambda nested: torch.softmax(nested, -1)),
    "matmul": lambda: _gradient(lambda nested: torch.matmul(nested, nested.transpose(1, 2))),
    "layer norm": lambda: _gradient(lambda nested: nn.functional.gelu(nn.LayerNorm(4)(nested))),
    "attention": _attention,
    "from a mask": _from_mask,
    "encoder": _encoder,
    "from a buffer": _from_buffer,
    "whole numbers": lambda: _padded(torch.nested.nested_tensor([part.mul(10).long() for part in _parts()]) * 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_sizes_of_many_parts_give_the_same_bits(name: str) -> None:
    plain = PROGRAMS[name]()
    with memmgr.budget("1GB", policy="torture", device="cpu", quiet=True):
        assert torch.equal(PROGRAMS[name](), plain)
        stats = memmgr.stats()
        assert stats["offloads"] + stats["evictions"] > 0 and stats["escapes"] > 0
        gc.collect()
        native.load().drain()
        assert not [cell for cell in native.load().cells() if cell["pins"] and not cell["small"]]


def test_sizes_stay_and_the_bytes_leave() -> None:
    """The tensors that they describe are paged as always."""
    with memmgr.budget("1GB", device="cpu", quiet=True):
        nested = torch.nested.nested_tensor([part.repeat(1, 8) for part in _parts()]) * 2.0
        plain = _padded(nested).clone()
        pager = native.load()
        assert pager.take_away(nested._nested_tensor_size(), 1) == 0
        escaped = memmgr.stats()["escaped_bytes"]
        assert 0 < escaped <= PARTS * 8 * 8 < nested.numel() * 4
        assert pager.take_away(nested, 1) > 0
        assert torch.equal(_padded(nested), plain)


def test_sizes_from_before_the_budget() -> None:
    nested = _nested()
    plain = _padded(nested * 2.0)
    with memmgr.budget("1GB", policy="torture", device="cpu", quiet=True):
        nested._nested_tensor_size() + 1  # an op that reads them as any tensor
        assert torch.equal(_padded(nested * 2.0), plain)
    with memmgr.budget("1GB", policy="torture", device="cpu", quiet=True):
        assert torch.equal(_padded(nested * 2.0), plain)
