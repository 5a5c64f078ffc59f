"""The native core is tested through its C ABI: as the pager and the Python side will call it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import core_abi


@pytest.fixture(scope="session")
def core():
    if core_abi.library_path() is None:
        pytest.skip("libmemmgr_core.so is neither installed nor named by MEMMGR_CORE_LIB")
    return core_abi.load()


@pytest.fixture
def make_arena(core):
    """Makes arenas, and checks their invariants at the end of the test."""
    arenas = []

    def make(budget: int = core_abi.UNLIMITED, reserve: int = 0) -> core_abi.Arena:
        arenas.append(core_abi.Arena(core, budget, reserve))
        return arenas[-1]

    yield make
    for arena in arenas:
        assert arena.check() == ""


@pytest.fixture
def make_tier(core, tmp_path):
    tiers = []

    def make(folder=tmp_path, **options) -> core_abi.Tier:
        tiers.append(core_abi.Tier(core, folder, **options))
        return tiers[-1]

    yield make
    for tier in tiers:
        if tier.handle:
            tier.close()
