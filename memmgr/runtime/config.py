"""The parsed arguments of a budget."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

import torch

from memmgr.config.placement import Placement
from memmgr.config.sizes import SMALL_BYTES, Need
from memmgr.policies import Policy

SILENT_SECONDS = 12.0
"""A rank without a heartbeat for so long is lost. With the time to tell the others that is 15 seconds."""


@dataclass
class Config:
    """The arguments of `memmgr.budget`, as the runtime takes them."""

    limit_bytes: int  # the current budget; with `need`, the device's memory until the run has been measured
    device: torch.device
    # the folder of the tier below the CPU, or below an accelerator's host memory; None: there is none
    folder: str | None
    disk_bytes: int
    policy: Policy
    verify: bool
    quiet: bool
    host_bytes: int | None = None  # host memory for offloaded tensors; None: the default
    throttle: int = 0
    small_bytes: int = SMALL_BYTES
    placement: Placement = "remap"
    plan: bool = True
    prefetch: bool = True
    lines: bool = False
    log: str | None = None
    trace: str | None = None
    trace_pass: int = 2
    silent_seconds: float = SILENT_SECONDS
    binary: bool = False  # errors speak in powers of two, as the limit did
    need: Need | None = None  # the share of the run's need that the limit becomes; None: it stays


def default_folder() -> str:
    """The system's folder for temporary files."""
    return os.environ.get("MEMMGR_DISK") or tempfile.gettempdir()
