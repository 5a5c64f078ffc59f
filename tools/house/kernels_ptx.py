"""Writes the PTX text of the device's kernels, allocator/core/device_kernels.ptx.h.

    python tools/house/kernels_ptx.py

Needs nvcc in PATH. Comments and line breaks of nvcc's text are removed: the driver reads the rest.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

CORE = Path(__file__).resolve().parents[2] / "allocator" / "core"
SOURCE, HEADER = CORE / "device_kernels.cu", CORE / "device_kernels.ptx.h"
HEAD = """\
// The PTX text of device_kernels.cu, by tools/house/kernels_ptx.py with nvcc {release}. It asks for PTX 6.4,
// which has all that it uses: nvcc's text asks for PTX 9.0, which drivers older than CUDA 13 refuse.
// tests/driver/test_kernels.py makes it again, and assembles it for the devices of today.
#pragma once

namespace memmgr {{

inline constexpr char kDeviceKernels[] = R"PTX(
{text}
)PTX";

}}  // namespace memmgr
"""


def release() -> str:
    """nvcc's release and build, such as "13.0, V13.0.88"; "" without one."""
    try:
        said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    found = re.search(r"release ([\d.]+, V[\d.]+)", said)
    return found[1] if found else ""


def header() -> str:
    """The header's text, compiled now."""
    command = ["nvcc", "-ptx", "-arch=compute_75", str(SOURCE), "-o", "-"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = " ".join(re.sub(r"//.*", "", text).split())
    text = re.sub(r"^\.version \S+", ".version 6.4", text)
    return HEAD.format(release=release(), text=textwrap.fill(text, 120, break_on_hyphens=False))


if __name__ == "__main__":
    HEADER.write_text(header())
