"""Which memory a budget is about, and how its allocator and the tier below it are opened.

The CPU device has an arena in host memory and a file below it. An accelerator has an arena in its own memory, in stream
order, and page-locked host memory below it.
"""

from __future__ import annotations

import os

import psutil
import torch

from memmgr.common.say import warn
from memmgr.config.conf import ALLOCATORS, local_ranks, no_device
from memmgr.config.machine import free_bytes as machine_free_bytes
from memmgr.config.machine import group_free_bytes, memory_bytes
from memmgr.config.sizes import UNLIMITED, show_size

from . import cuda

DRIVER_VARIABLE = cuda.DRIVER_VARIABLE
# Page-locked memory is taken from the machine and no other process can use it: by default no more than a run of three
# times its budget needs.
HOST_TIER_BUDGETS = 2
LEFT_BYTES = 512 << 20
"""The least memory of a device that the budget `"device"` leaves free."""


def resolve(device: torch.device | str | None, allocator: str = "auto") -> torch.device:
    """The device that `budget(device=...)` means; default the accelerator if there is one, else the CPU. CUDA's has no
    number yet (see `settle`).

    Raises `ValueError`: it is none, or no such allocator; `NotImplementedError`: a device that memmgr has no allocator
    for; `RuntimeError`: neither CUDA allocator can be had.
    """
    if allocator not in ALLOCATORS:
        raise ValueError(f"allocator: {allocator!r} is none of {', '.join(ALLOCATORS)}")
    if device is not None:
        chosen = _named(device)
    elif cuda.in_place():
        # Without asking CUDA's runtime: in a script with MEMMGR_BUDGET this runs inside `import torch`.
        chosen = torch.device("cuda")
    else:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        chosen = accelerator if accelerator is not None else torch.device("cpu")
    if chosen.type == "cpu":
        return torch.device("cpu")
    # A budget that is not kept would be worse than none.
    if chosen.type == "cuda" and torch.version.hip is None:
        why = cuda.manage(allocator)
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


def _named(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise no_device(str(device), "device") from None


def _has_number(device: torch.device) -> bool:
    return ":" in str(device)  # torch's annotations say that `index` is never None


def settle(device: torch.device) -> torch.device:
    """With its number: of the current device if none was named. Only now is CUDA asked, so that a script with MEMMGR_BUDGET can
    still choose its device, and fork."""
    if device.type == "cuda" and not _has_number(device):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def total_bytes(device: torch.device) -> int | None:
    """The device's memory, for budgets in percent; None: not known."""
    info = getattr(torch.get_device_module(device.type), "mem_get_info", None)
    return None if info is None else int(info(device.index)[1])


def machine_bytes() -> int:
    """This rank's part of the machine's memory: that is the device of a budget on the CPU."""
    return memory_bytes() // local_ranks()


def room_bytes(device: torch.device) -> int:
    """Bytes that a run may have on the device without a limit of its own."""
    if device.type != "cpu":
        return total_bytes(device) or UNLIMITED
    # Memory that this process has already belongs to the budget, too.
    free = machine_free_bytes() // local_ranks()
    return min(machine_bytes(), free + int(psutil.Process().memory_info().rss))


def free_bytes(device: torch.device) -> int:
    """This rank's part of the memory that new tensors may take there, for the budget `"device"`; at least 0. An accelerator's
    memory is not divided: several processes on one each get all that is free.

    A twentieth of the whole memory, and at least `LEFT_BYTES`, is left free, because a budget counts tensors alone. Other
    memory grows after the budget has opened: scratch of oneDNN and BLAS, the process that makes plans, Python's objects,
    and other programs; on a GPU kernels that CUDA loads at their first use, workspaces of its libraries, and pages that
    are partly used.
    """
    if device.type == "cpu":
        free, whole = machine_free_bytes(), memory_bytes()
    else:
        info = getattr(torch.get_device_module(device.type), "mem_get_info", None)
        if info is None:
            raise RuntimeError(f"memmgr: {device} does not tell how much memory is free: name a budget in bytes")
        free, whole = map(int, info(device.index))
    ranks = local_ranks() if device.type == "cpu" else 1
    return max(0, free - max(LEFT_BYTES, whole // 20)) // ranks


def shares_host_memory(device: torch.device) -> bool:
    """Is the accelerator's memory the machine's, so that a copy in host memory frees nothing (Jetson, GB10)?"""
    properties = getattr(torch.get_device_module(device.type), "get_device_properties", None)
    return properties is not None and bool(getattr(properties(device), "is_integrated", False))


def host_bytes(device: torch.device, limit_bytes: int) -> int:
    """The default size of host memory for tensors offloaded from an accelerator."""
    free = machine_free_bytes() // (2 * local_ranks())
    if limit_bytes < UNLIMITED:
        return min(free, HOST_TIER_BUDGETS * limit_bytes)
    return min(free, total_bytes(device) or free)


def host_bytes_in_group(asked: int) -> int:
    """The size of host memory that was asked for, less where a container or a job has less left: its control group would
    end the process, and no call would fail.
    """
    free = group_free_bytes()
    if free is None or asked <= free // local_ranks():
        return asked
    left = free // local_ranks()
    warn(
        f"host: {show_size(asked)} is more than the {show_size(left)} that this container or job has left for it, and its "
        f"control group would end the process: {show_size(left)} are used"
    )
    return left


def out_of_memory_words(device: torch.device) -> str:
    """How torch's own error begins there; tools match on it."""
    if device.type == "cpu":
        return "DefaultCPUAllocator: can't allocate memory:"
    return "CUDA out of memory." if device.type == "cuda" else "Device out of memory."
