"""The tier in plain Python, and the core's through ctypes: one suite."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memmgr import _shim
from memmgr._py_tier import CoreTier, FileTier

KIB = 1024


@pytest.fixture(params=[FileTier, CoreTier], ids=["python", "core"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param is CoreTier:
        try:
            _shim.core_library()
        except _shim.NoShim as why:
            pytest.skip(str(why))
    opened = []

    def make(capacity: int = 0, rate: int = 0) -> Any:
        opened.append(request.param(str(tmp_path), capacity, rate, 1))
        assert list(tmp_path.iterdir()) == []
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


def _memory(text: bytes) -> tuple[Any, int]:
    # Memory as the tiers get it: aligned as storages are, which direct transfers profit from.
    buffer = ctypes.create_string_buffer(text, len(text))
    return buffer, ctypes.addressof(buffer)


@pytest.mark.parametrize("now", [True, False])
@pytest.mark.parametrize("size", [1, 4096, 100_000])
def test_what_goes_comes_back(make: Any, size: int, now: bool) -> None:
    tier = make()
    text = os.urandom(size)
    source, address = _memory(text)
    target, into = _memory(bytes(size))
    slot = tier.write_now(address, size) if now else tier.write(address, size)
    assert slot >= 0 and tier.wait(slot) == 0 and tier.poll(slot) == 1
    assert (tier.read_now(slot, into) if now else tier.read(slot, into)) == 0
    assert tier.wait(slot) == 0 and target.raw == text
    stats = tier.stats()
    assert stats["written_bytes"] == stats["read_bytes"] == size and stats["queued_write_bytes"] == 0
    assert stats["used_bytes"] >= size
    tier.free(slot)
    assert tier.stats()["used_bytes"] == 0
    del source


def test_a_read_waits_for_its_write(make: Any) -> None:
    tier = make(rate=4 << 20)
    text = os.urandom(256 * KIB)
    source, address = _memory(text)
    target, into = _memory(bytes(len(text)))
    slot = tier.write(address, len(text))
    assert tier.read_now(slot, into) == 0 and target.raw == text
    del source


def test_room_is_used_again_and_runs_out(make: Any) -> None:
    tier = make(capacity=64 * KIB)
    source, address = _memory(os.urandom(32 * KIB))
    first = tier.write_now(address, 32 * KIB)
    second = tier.write_now(address, 32 * KIB)
    assert first >= 0 and second >= 0
    assert tier.write_now(address, 32 * KIB) == tier.write(address, 32 * KIB) == -errno.ENOSPC
    tier.free(first)
    third = tier.write(address, 32 * KIB)
    assert third >= 0 and tier.wait(third) == 0
    assert tier.stats()["used_peak_bytes"] <= 64 * KIB
    tier.free(second)
    tier.free(third)
    del source


def test_faults_are_errors_once(make: Any) -> None:
    tier = make()
    source, address = _memory(b"x" * KIB)
    tier.inject(errno.EIO, 0, 0, 0)
    assert tier.write_now(address, KIB) == -errno.EIO
    tier.inject(errno.ENOSPC, 0, errno.EIO, 0)
    slot = tier.write(address, KIB)
    assert slot >= 0 and tier.wait(slot) == -errno.ENOSPC and tier.poll(slot) == -errno.ENOSPC
    tier.free(slot)
    slot = tier.write_now(address, KIB)
    assert tier.read_now(slot, address) == -errno.EIO
    assert tier.read_now(slot, address) == 0 and source.raw == b"x" * KIB


def test_no_folder_is_an_error() -> None:
    for kind in (FileTier, CoreTier):
        with pytest.raises(OSError, match="cannot open a tier file"):
            kind("/nonexistent", 0, 0, 1)
