"""The double of libcuda and the core, as in tests/driver."""

import pytest
from driver import build, device_abi
from driver.conftest import driver, fake_driver_path, loaded_driver

__all__ = ["core", "driver", "fake_driver_path", "loaded_driver"]


@pytest.fixture(scope="session")
def core(fake_driver_path):
    """The core, with the functions of a device typed."""
    return device_abi.load(build.core_with_mutations())
