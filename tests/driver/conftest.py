"""The double of libcuda, built once, reset before each test."""

from collections.abc import Iterator

import pytest

from . import build, tier_abi
from .fake import PROMPT, FakeDriver


@pytest.fixture(scope="session")
def fake_driver_path():
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    return build.fake_driver()


@pytest.fixture(scope="session")
def loaded_driver(fake_driver_path) -> FakeDriver:
    return FakeDriver(fake_driver_path)


@pytest.fixture
def driver(loaded_driver) -> Iterator[FakeDriver]:
    """A fresh double of two devices in prompt mode; the calling thread's context is device 0's."""
    loaded_driver.reset(0, PROMPT)
    loaded_driver.set_memory(1 << 30)
    loaded_driver.set_granularity(2 << 20)
    loaded_driver.set_devices(2)
    loaded_driver.cuInit(0)
    loaded_driver.use_device(0)
    yield loaded_driver
    loaded_driver.reset(0, PROMPT)


@pytest.fixture(scope="session")
def core(fake_driver_path):
    """The core, built so that its waits can be left out by name."""
    return tier_abi.load(build.core_with_mutations())
