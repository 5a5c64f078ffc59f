"""Check memmgr on this machine's GPU and write a report: exactness, peak as the driver sees it, overlap, timings.

Made for a machine that is lent for minutes and has no network (`make gpu-check` also installs from bundled wheels). The
most valuable section comes first. Each is a process with a time limit of its own and writes straight into the report,
so that neither a crash nor the machine's end loses what is already known.

With `--device cpu --quick` the same code runs anywhere, with tiny models: a rehearsal, not a measurement.

Exit code 1: a section failed, a peak passed its budget, or some bits differ.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from memmgr.tools.bench.gpu_sections import DID_NOT_HOLD
from memmgr.tools.common.usage_error import UsageError

SECTIONS = (
    ("driver", "The driver, and what is compiled", 80),
    ("exactness", "Exactness", 85),
    ("allocator", "CUDA's allocator", 75),
    ("verified", "Without deterministic algorithms: what comes back is what went", 75),
    ("peak", "Peak, seen from outside", 45),
    ("overlap", "Copies under compute", 45),
    ("timings", "Timings", 55),
    ("tests", "The tests marked gpu", 40),
)
"""Name, title, seconds that it may take at most: 500 in all, which leaves the rest of 9 minutes for the installation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models, few steps")
    parser.add_argument("--sections", default=",".join(name for name, _, _ in SECTIONS), help="default: %(default)s")
    parser.add_argument(
        "--out",
        type=Path,
        help="the report (default: docs/reports/gpu-check-DATE.md, or here where there is no such folder)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the sections; 0 when all held."""
    wanted = [name.strip() for name in args.sections.split(",")]
    unknown = [name for name in wanted if name not in {known for known, _, _ in SECTIONS}]
    if unknown:
        print(
            f"no section {', '.join(unknown)}; there are {', '.join(name for name, _, _ in SECTIONS)}", file=sys.stderr
        )
        return 2
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UsageError("there is no GPU that torch can use; --device cpu rehearses the same sections")
    report = args.out or _default_path(args.device)
    report.parent.mkdir(parents=True, exist_ok=True)
    copies = [Path(os.environ["OUT"])] if os.environ.get("OUT") else []  # a second folder that outlives the machine
    good = True
    with report.open("w") as file:
        print(*_header(args.device, args.quick), sep="\n", file=file)
        for name, title, limit_seconds in SECTIONS:
            if name not in wanted:
                continue
            print(f"\n## {title}\n", file=file, flush=True)
            began = time.perf_counter()
            failure = _section(name, args, file.fileno(), limit_seconds)
            good = good and failure == ""
            seconds = time.perf_counter() - began
            print(f"\n{failure or 'Held.'} ({seconds:.0f} s)", file=file, flush=True)
            print(f"{name}: {failure.splitlines()[0] if failure else 'held'} ({seconds:.0f} s)", flush=True)
            for folder in copies:
                shutil.copy(report, folder / report.name)
    print(f"report: {report}")
    return 0 if good else 1


def _default_path(device: str) -> Path:
    name = f"gpu-check-{datetime.date.today().isoformat()}.md"
    reports = Path("docs/reports")
    return reports / name if reports.is_dir() and device == "cuda" else Path(name)


def _section(name: str, args: argparse.Namespace, report: int, limit_seconds: float) -> str:
    """Runs one section with its output going into the report; what went wrong, or nothing."""
    seconds = str(limit_seconds)
    command = [sys.executable, "-P", "-m", "memmgr.tools.bench.gpu_sections", name, args.device, seconds]
    if args.quick:
        command.append("--quick")
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        # A session of its own: what a section started must end with it, or it keeps the GPU's memory.
        process = subprocess.Popen(command, stdout=report, stderr=errors, start_new_session=True)
        try:
            code = process.wait(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            return f"**Stopped after {limit_seconds:.0f} s.**" + _block(errors)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code == 0:
            return ""
        if code == DID_NOT_HOLD:
            return "**Did not hold.**"
        return f"**Ended with code {code}.**" + _block(errors)


def _block(errors: IO[str]) -> str:
    """The end of what a section said on stderr, for the report."""
    errors.seek(0)
    tail = errors.read().splitlines()[-40:]
    return "\n\n```\n" + "\n".join(tail) + "\n```\n" if tail else ""


def _header(device: str, quick: bool) -> Iterator[str]:
    """What was checked, on what."""
    yield f"# GPU check, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    if device == "cpu" or quick:
        yield "\n**A rehearsal** (" + ", ".join(["CPU device"] * (device == "cpu") + ["tiny models"] * quick) + ")."
    yield ""
    yield "| | |"
    yield "| --- | --- |"
    for key, value in _machine(device):
        yield f"| {key} | {value} |"


def _machine(device: str) -> Iterator[tuple[str, str]]:
    import torch

    if device == "cuda" and torch.cuda.is_available():
        # By NVML: torch would initialise CUDA in this process and keep some of the device's memory.
        yield "GPU", _nvidia("name,memory.total,memory.free,compute_mode,mig.mode.current,pcie.link.gen.max") or "?"
        yield "driver", _nvidia("driver_version") or "?"
    yield "CPU", f"{_cpu_name()}, {os.cpu_count()} logical cores"
    yield "kernel", f"{platform.system()} {platform.release()}"
    yield "Python", platform.python_version()
    yield "torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    for name in ("memmgr", "numpy"):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _nvidia(query: str) -> str:
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
