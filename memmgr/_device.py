"""Which memory a budget is about, and how its allocator and the tier below it are opened.

The CPU device has an arena in host memory and a file below it. An accelerator has an arena in its own memory, in stream
order, and page-locked host memory below it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import psutil
import torch

from . import _cuda
from ._sizes import UNLIMITED

if TYPE_CHECKING:
    from ._manager import Config

DRIVER_VARIABLE = _cuda.DRIVER_VARIABLE
MAPPED = 0  # MM_MEMORY_MAPPED: pages are mapped as the range grows
# What is page-locked is taken from the machine at once, so by default no more than a run of three times its budget needs.
HOST_TIER_BUDGETS = 2


def resolve(device: torch.device | str | None) -> torch.device:
    """The device that `budget(device=...)` means; default the accelerator if there is one, else the CPU. CUDA's has no
    number yet (see `settle`).

    Raises:
        NotImplementedError: a device that memmgr has no allocator for.
        RuntimeError: CUDA's allocator is not in place.
    """
    if device is not None:
        chosen = torch.device(device)
    elif _cuda.in_place():
        # Without asking CUDA's runtime: in an armed script this runs inside `import torch`.
        chosen = torch.device("cuda")
    else:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        chosen = accelerator if accelerator is not None else torch.device("cpu")
    if chosen.type == "cpu":
        return torch.device("cpu")
    # A budget that is not kept would be worse than none.
    if chosen.type == "cuda" and torch.version.hip is None:
        why = _cuda.install()
        if why is not None:
            raise RuntimeError(f"memmgr: a budget on 'cuda' cannot be kept: {why}")
        return chosen
    if not os.environ.get(DRIVER_VARIABLE):  # a device that tests bring along
        raise NotImplementedError(
            f"memmgr: a budget on {chosen.type!r} cannot be kept: memmgr has an allocator for CUDA only; "
            "device='cpu' manages host memory"
        )
    if _has_number(chosen):
        return chosen
    return torch.device(chosen.type, torch.accelerator.current_device_index())


def _has_number(device: torch.device) -> bool:
    return ":" in str(device)  # torch's annotations say that `index` is never None


def settle(device: torch.device) -> torch.device:
    """With its number: of the current device if none was named. Only now is CUDA asked, so that a script that is armed at its
    beginning can still choose its device, and fork."""
    if device.type == "cuda" and not _has_number(device):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def total_bytes(device: torch.device) -> int | None:
    """The device's memory, for budgets in percent; None: not known."""
    info = getattr(torch.get_device_module(device.type), "mem_get_info", None)
    return None if info is None else int(info(device.index)[1])


def live_bytes(device: torch.device) -> int:
    """What our allocator holds on the device before a budget opens; the CPU's arena is empty then, or counts by itself."""
    return _cuda.live_bytes(device.index) if device.type == "cuda" else 0


def open_memory(native: Any, config: Config, outside_bytes: int) -> None:
    """Puts the allocator in place. `outside_bytes` is what torch held there before.

    Raises:
        RuntimeError: no address range, no driver, no such device.
    """
    device = config.device
    if device.type == "cpu":
        native.open_arena(config.limit_bytes, outside_bytes)
        return
    driver = os.environ.get(DRIVER_VARIABLE)
    native.open_device(device.type, device.index, driver, MAPPED, config.limit_bytes, outside_bytes)


def open_tier(native: Any, config: Config) -> bool:
    """Opens the tier below the device; False when there is to be none.

    Raises:
        OSError: the file cannot be made, or the memory cannot be page-locked.
    """
    if config.device.type == "cpu":
        if config.folder is None:
            return False
        native.open_tier(config.folder, config.disk_bytes, config.throttle, 0)
        return True
    native.open_host_tier(config.host_bytes or _host_bytes(config))
    return True


def _host_bytes(config: Config) -> int:
    """Of host memory, for who did not say."""
    free = int(psutil.virtual_memory().available) // 2
    if config.limit_bytes < UNLIMITED:
        return min(free, HOST_TIER_BUDGETS * config.limit_bytes)
    return min(free, total_bytes(config.device) or free)


def probe(native: Any) -> tuple[int, float, float] | None:
    """(bytes, seconds to write them to the tier below, seconds to read them back); None when there is no room to try."""
    for size in (8 << 20, 1 << 20, 64 << 10):
        with contextlib.suppress(torch.OutOfMemoryError):
            times = native.tier_probe(size)
            native.reset_peak()  # on a device the block that went to and fro was the budget's, but not the run's
            if times is not None:
                return size, *times
    return None


def out_of_memory_words(device: torch.device) -> str:
    """How torch's own error begins there; tools match on it."""
    if device.type == "cpu":
        return "DefaultCPUAllocator: can't allocate memory:"
    return "CUDA out of memory." if device.type == "cuda" else "Device out of memory."
