"""Two-valued bytes as bits: exactly the same bytes come back, and bytes with a third value are refused."""

import ctypes

import numpy as np
import pytest
from core_abi import Bits, load
from hypothesis import given, settings
from hypothesis import strategies as st

ITEMS = {np.dtype(np.uint8): 1, np.dtype(np.uint16): 2, np.dtype(np.uint32): 4, np.dtype(np.uint64): 8}


def packed(data: np.ndarray) -> tuple[int, Bits]:
    """(bytes of the bits or 0, the bits)."""
    before = data.tobytes()
    bits = Bits()
    size = load().mm_bits_pack(data.ctypes.data, data.nbytes, ctypes.byref(bits))
    assert data.tobytes() == before
    return size, bits


def there_and_back(data: np.ndarray) -> int:
    """Bytes of the bits or 0; if they could be packed, they came back."""
    size, bits = packed(data)
    if size:
        again = np.full(data.nbytes + 64, 0xA5, dtype=np.uint8)
        load().mm_bits_unpack(ctypes.byref(bits), again.ctypes.data, data.nbytes)
        assert again[: data.nbytes].tobytes() == data.tobytes()
        assert (again[data.nbytes :] == 0xA5).all(), "written past the end"
        load().mm_bits_free(ctypes.byref(bits))
    return int(size)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(list(ITEMS)),
    st.lists(st.booleans(), min_size=1, max_size=300),
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
)
def test_two_values_come_back(dtype: np.dtype, which: list[bool], values: tuple[int, int]) -> None:
    low, high = (np.array([v], dtype=np.uint64).view(dtype)[0] for v in values)
    data = np.where(np.array(which), low, high).astype(dtype)
    size = there_and_back(data)
    # A wider element may do as well, and takes fewer bits.
    assert 0 < size <= (len(which) + 7) // 8


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=0, max_size=200))
def test_any_bytes_come_back_or_are_refused(raw: bytes) -> None:
    data = np.frombuffer(raw, dtype=np.uint8).copy()
    size = there_and_back(data)
    if len(set(raw)) <= 2 and raw:
        assert size


@pytest.mark.parametrize("count", [1, 7, 8, 9, 4096 // 4 - 1, 4096 // 4, 4096 // 4 + 1, 100_003])
def test_a_third_value_anywhere_is_refused(count: int) -> None:
    rng = np.random.default_rng(0)
    data = np.where(rng.random(count) < 0.9, np.float32(1 / 0.9), np.float32(0.0))
    assert there_and_back(data) == (count + 7) // 8
    for at in {0, count // 2, count - 1}:
        other = data.copy()
        other[at] = np.float32(3.14159)
        size = there_and_back(other)
        assert size == 0 or count < 10, "pairs of a few elements may take two values all the same"


def test_signs_of_zero_and_nans_are_values_like_others() -> None:
    zeros = np.array([0.0, -0.0, 0.0] * 33, dtype=np.float32)
    assert there_and_back(zeros) == 13
    nans = np.array([0x7FC00000, 0x7FC00001, 0x7FC00000] * 33, dtype=np.uint32)
    assert there_and_back(nans) == 13
    assert there_and_back(np.concatenate([zeros, np.array([1.0], dtype=np.float32)])) == 0


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_one_value_will_do(value: float) -> None:
    assert there_and_back(np.full(1000, value, dtype=np.float64)) == 1000 // 8


def test_noise_is_refused() -> None:
    assert there_and_back(np.random.default_rng(0).random(10_000)) == 0
