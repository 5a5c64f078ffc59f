"""The figures of a GPU and its driver, as a table: `h100.json` beside this file, or one that a check on a GPU has written.

Each figure has a value, a unit, a source and a date. `tests/driver/virtual_time.h` explains the names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

H100 = Path(__file__).resolve().parent / "h100.json"
VERSION = 1
UNITS = {"us": 1e-6, "s/GiB": 1 / 2**30, "GB/s": 1e9, "TFLOP/s": 1e12, "factor": 1.0}


def read(path: Path) -> dict[str, float]:
    """The figures of a table in seconds, bytes and operations, and per second of these.

    Raises `ValueError`: no such table, or one of another version.
    """
    table = json.loads(path.read_text())
    if table.get("version") != VERSION:
        raise ValueError(f"{path}: version {table.get('version')}, not {VERSION}")
    return {name: figure["value"] * UNITS[figure["unit"]] for name, figure in table["figures"].items()}


_CALLS = {
    "cuEventQuery": "event_query_done",
    "cuEventRecord": "event_record",
    "cuStreamWaitEvent": "stream_wait_event_done",
    "cuStreamQuery": "stream_query_idle",
    "cuStreamIsCapturing": "stream_is_capturing",
    "cuThreadExchangeStreamCaptureMode": "exchange_capture_mode",
    "cuCtxGetCurrent": "ctx_get_current",
    "cuCtxSetCurrent": "ctx_set_current_same",
    "cuMemGetInfo": "mem_get_info",
    "cuEventElapsedTime": "event_elapsed_time",
    "cuStreamSynchronize": "stream_synchronize_idle",
    "cuCtxSynchronize": "ctx_synchronize_idle",
    "launch": "launch_empty",
    "cuMemcpyDtoHAsync": "enqueue_dtoh_16MiB",
    "cuMemcpyHtoDAsync": "enqueue_htod_16MiB",
}
_LINK = {
    "out": "host_alloc_dtoh_64MiB",
    "in": "host_alloc_htod_64MiB",
    "pageable_out": "pageable_dtoh_64MiB",
    "pageable_in": "pageable_htod_64MiB",
    "memory": "compute_alone",
}
_LOCKING = {"host_alloc": "host_alloc_1GiB_again", "host_register": "touch_8_register_1GiB"}
_PAGES = {"cuMemCreate": "create", "cuMemMap": "map", "cuMemUnmap": "unmap_freeing_each", "cuMemRelease": "release"}
"""The names of figures in driver_calls.cpp, behind host., link., locking. and in the details of pages.idle_20MiB."""


def of_check(lines: Iterable[Mapping[str, Any]], date: str, base: Path = H100) -> dict[str, Any]:
    """The table `base` with the figures of a check in their places; a figure that it has not measured keeps its value and source.

    `date`: of the check, as 2026-11-28.
    """
    seen = {line["name"]: line for line in lines if "value" in line and "name" in line}
    table: dict[str, Any] = json.loads(base.read_text())
    device = seen.get("begin.driver", {}).get("detail", {}).get("device")
    table["name"] = device or table["name"]

    def put(name: str, value: float | None, unit: str) -> None:
        if value is not None:
            table["figures"][name] = {
                "value": round(value, 4),
                "unit": unit,
                "source": f"driver_calls on {device}",
                "date": date,
            }

    def value(name: str) -> float | None:
        return float(seen[name]["value"]) if name in seen else None

    for name, call in _CALLS.items():
        nanoseconds = value(f"host.{call}")
        put(name, None if nanoseconds is None else nanoseconds / 1e3, "us")
    timing, plain = value("host.event_record_timing"), value("host.event_record")
    put("timed_record", None if timing is None or plain is None else (timing - plain) / 1e3, "us")
    for name, way in _LINK.items():
        put(name, value(f"link.{way}"), "GB/s")
    for name, way in _LOCKING.items():
        put(name, value(f"locking.{way}"), "s/GiB")
    pages = seen.get("pages.idle_20MiB", {}).get("detail", {})
    for name, phase in _PAGES.items():
        put(name, pages.get(f"{phase}_us"), "us")
    put("cuMemSetAccess", pages.get("access_each_us"), "us")
    alone, beside = value("pages.idle_20MiB"), value("pages.beside_kernel_20MiB")
    put("page_busy", None if not alone or beside is None else max(1.0, beside / alone), "factor")
    small = value("link.host_alloc_dtoh_64KiB")
    if small is not None:
        put("copy_latency", 1e6 * max(0.0, 65536 / 1e9 * (1 / small - 1 / table["figures"]["out"]["value"])), "us")
    return table


def with_rates(
    table: dict[str, Any], flops: Mapping[str, float], bytes_per_second: float, source: str, date: str
) -> dict[str, Any]:
    """The table with measured rates of its kernels in their places.

    `table`: as `of_check` gives it. `flops`: arithmetic a second, by dtype. `bytes_per_second`: to and from the
    device's memory. `source`: of both. `date`: as 2026-11-28.
    """
    rates = {f"flops.{dtype}": (rate / 1e12, "TFLOP/s") for dtype, rate in flops.items()}
    rates["memory"] = (bytes_per_second / 1e9, "GB/s")
    for name, (value, unit) in rates.items():
        table["figures"][name] = {"value": round(value, 4), "unit": unit, "source": source, "date": date}
    return table


def written(table: Mapping[str, Any]) -> str:
    """The table as a file: a line for each figure."""
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(figure)}" for name, figure in table["figures"].items())
    return f'{{\n "version": {VERSION},\n "name": {json.dumps(table["name"])},\n "figures": {{\n{rows}\n }}\n}}\n'
