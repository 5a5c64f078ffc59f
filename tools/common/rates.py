"""Peak rates of a device: arithmetic, memory and link. They predict the time of an op before it runs.

An op takes as long as the slower of its arithmetic and its bytes would at those rates (the roofline: Williams, Waterman,
Patterson, CACM 2009, doi 10.1145/1498765.1498785). If a table of measured calls has the op, its measured time counts.

*Known limitations*: the named devices have their makers' figures, which no kernel reaches: real steps take longer, by half and
more where tensors are small. Copies are as optimistic as ops, so a plan's overhead is closer to the truth than the
step's length. Kernel launches count as nothing on a named device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from memmgr.policies.trace import TierLink
from memmgr.tools.common.outputs import write_whole
from memmgr.tools.common.usage_error import UsageError, cannot_read

VERSION = 1
SIMULATION = ("version", "figures")
"""Keys of a simulation's table, which may be in the same file: `memmgr gpu-check --simulated` reads them."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a call of torch, from which its time on a device is predicted."""

    signature: str  # equal for calls that take equal time: name, shapes, strides, types, other arguments
    flops: int  # by torch's formulas; 0 where there is none
    moved_bytes: int  # read and written, each tensor once
    dtype: str  # of the computation, as "float32"; "tf32" if torch may round to that


@dataclass(frozen=True)
class Rates:
    """A device."""

    name: str
    flops: Mapping[str, float]  # of matrix products, a second, by dtype; a missing dtype runs at the rate of "float32"
    bytes_per_second: float  # to and from its memory
    memory_bytes: int
    link: TierLink | None  # to the tier below
    source: str  # where the figures are from
    accelerator: bool = True  # a step's kernels are an accelerator's
    call_seconds: float = 0.0  # overhead of each call of torch
    # measurements by signature: seconds, and bytes beyond the outputs at the worst moment
    calls: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def seconds(self, work: Work) -> float:
        """Seconds of a call."""
        if work.signature in self.calls:
            return self.calls[work.signature][0]
        rate = self.flops.get(work.dtype, self.flops["float32"])
        return max(work.flops / rate, work.moved_bytes / self.bytes_per_second)

    def scratch_bytes(self, work: Work) -> int:
        """Bytes that a call needs beyond its outputs while it runs; 0 if that was not measured."""
        return self.calls[work.signature][1] if work.signature in self.calls else 0


def _card(
    name: str, float32: float, tf32: float, half: float, gigabytes: float, memory: int, bus: float, source: str,
    bfloat16: float | None = None,
) -> Rates:  # fmt: skip
    flops = {"float32": float32, "tf32": tf32, "float16": half, "bfloat16": half if bfloat16 is None else bfloat16}
    link = TierLink("host", bus * 1e9, bus * 1e9)
    return Rates(name, {k: v * 1e12 for k, v in flops.items()}, gigabytes * 1e9, memory, link, source)


_PCIE3, _PCIE4, _PCIE5 = 15.75, 31.5, 63.0
"""GB/s each way of 16 lanes: 8, 16 and 32 GT/s, 128 bits in 130 (PCI-SIG, PCI Express Base Specification 3.0, 4.0, 5.0)."""

_HALVES = "half of its figures, which are for sparse matrices"

DEVICES: dict[str, Rates] = {
    one.name: one
    for one in (
        # TFLOP/s without sparsity: fp32, TF32, fp16 with fp32 sums; GB/s of memory; bytes of memory; GB/s of the bus.
        _card("rtx3090", 35.6, 35.6, 71.2, 936, 24 * GIB, _PCIE4, "NVIDIA Ampere GA102 whitepaper, appendix A"),
        _card(
            "rtx4090", 82.6, 82.6, 165.2, 1008, 24 * GIB, _PCIE4, "NVIDIA Ada GPU architecture whitepaper, appendix A"
        ),
        _card("a100-40", 19.5, 156, 312, 1555, 40 * GIB, _PCIE4, "NVIDIA A100 datasheet, 40 GB"),
        _card("a100-80", 19.5, 156, 312, 2039, 80 * GIB, _PCIE4, "NVIDIA A100 datasheet, 80 GB SXM"),
        _card(
            "h100",
            67,
            494.5,
            989.5,
            3350,
            80 * GIB,
            _PCIE5,
            f"NVIDIA H100 datasheet, SXM, {_HALVES}",
        ),
        _card("h200", 67, 494.5, 989.5, 4800, 141 * 10**9, _PCIE5, f"NVIDIA H200 datasheet, SXM, {_HALVES}"),
        _card("l4", 30.3, 60, 121, 300, 24 * GIB, _PCIE4, f"NVIDIA L4 datasheet, {_HALVES}"),
        _card("t4", 8.1, 8.1, 65, 320, 16 * GIB, _PCIE3, "NVIDIA T4 datasheet; it has no bf16 units", bfloat16=8.1),
    )
}


def read_rates(path: Path) -> Rates:
    """A table that `memmgr doctor --measure` wrote. Raises `UsageError`: it cannot be read, or is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("memmgr_rates") != VERSION:
            raise UsageError(f"{path}: a table of another version of memmgr; measure again")
        link = TierLink(**found.pop("link")) if found.get("link") else found.pop("link")
        for key in SIMULATION:
            found.pop(key, None)
        calls = {signature: (float(s), int(size)) for signature, (s, size) in found.pop("calls").items()}
        for key, of in (("bytes_per_second", float), ("call_seconds", float), ("memory_bytes", int)):
            found[key] = of(found[key])
        found["flops"] = {str(dtype): float(rate) for dtype, rate in found["flops"].items()}
        if min(found["bytes_per_second"], found["memory_bytes"], *found["flops"].values()) <= 0:
            raise ValueError("a rate or a size that is not above 0")
        return Rates(**found, link=link, calls=calls)
    except OSError as error:
        raise cannot_read(path, error) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no table of memmgr doctor --measure ({type(error).__name__}: {error})") from None


def write_rates(path: Path, rates: Rates, simulation: Mapping[str, Any] | None = None) -> None:
    """Writes a table; with that of a simulation, the file is either. Raises `OSError`: it cannot be written."""
    write_whole(path, json.dumps({"memmgr_rates": VERSION, **(simulation or {}), **asdict(rates)}, indent=1) + "\n")


def with_tier(rates: Rates, tier: str, capacity_bytes: int | None) -> Rates:
    """The same device with another tier below, on its own link."""
    if rates.link is None:
        raise UsageError(f"{rates.name} has no link to a tier; measure one with memmgr doctor --measure --disk FOLDER")
    return replace(rates, link=replace(rates.link, tier=tier, capacity_bytes=capacity_bytes))
