"""Checks which parts work on this machine, and gives a remedy for the others.

    memmgr doctor                  versions, compiler, devices, disk, memory,
                                   and a small training under a budget
    memmgr doctor --disk /nvme     with the folder that training would use
    memmgr doctor --json           for a bug report, or a health check
    memmgr doctor --explain LOG    the last BudgetError of a run with --log:
                                   why it needs so much
    memmgr doctor --measure here.json --step model.py:make_step
                                   rates and op times, for memmgr plan; on a
                                   GPU also for gpu-check --simulated

Marks: "ok"; "weaker" works, with less speed or comfort; "NO" does not work. The last two have a line of advice.

Exit code: 0; 1 when a line is marked NO; 2 for a path that is not a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memmgr.config import variables
from memmgr.config.extras import pip_line
from memmgr.config.sizes import show_size
from memmgr.config.torch_versions import unfit
from memmgr.tools.bench.disk_speed import copy_speed, disk_speed
from memmgr.tools.common.rates import Rates
from memmgr.tools.common.step_file import step_function
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.view.last_error import explain

OK, WEAKER, NO = "ok", "weaker", "NO"
SLOW_DISK = 400e6
"""In bytes a second. An op that makes a gigabyte takes tens of milliseconds: below this, reading back costs far more."""

EXTRAS = (
    ("textual", "memmgr top on the full screen", pip_line("top")),
    ("textual_serve", "memmgr top in a browser", pip_line("serve")),
    ("rich", "tables in colour", pip_line("top")),
    ("matplotlib", "pictures of memmgr demo, tune and plan", pip_line("demo")),
    ("scipy", "lower bounds of memmgr simulate", pip_line("plan")),
)


@dataclass(frozen=True)
class Finding:
    """One line of the answer."""

    name: str  # the subject of the check
    mark: str  # `OK`, `WEAKER` or `NO`
    text: str  # the result
    advice: str = ""  # the remedy, if there is one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--disk", metavar="FOLDER", help="the tier (default: that of memmgr.budget)")
    parser.add_argument("--quick", action="store_true", help="measure the disk with 64 MB instead of 512 MB")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--explain", type=Path, metavar="LOG", help="the last BudgetError of a run; nothing else")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="write this machine's rates there; nothing else")
    parser.add_argument("--step", metavar="FILE.py:FUNCTION", help="with --measure: its ops are measured, too (CPU)")


def run(args: argparse.Namespace) -> int:
    """Looks and says; see the module's text for the exit code."""
    import tempfile

    if args.explain:
        print(explain(args.explain))
        return 0
    folder = args.disk if args.disk is not None else os.environ.get("MEMMGR_DISK") or tempfile.gettempdir()
    if not os.path.isdir(folder):
        raise UsageError(f"{folder!r} is not a folder; name one with --disk")
    size = (64 if args.quick else 512) << 20
    if args.step and not args.measure:
        raise UsageError("--step is measured with --measure FILE")
    if args.step:
        step_function(args.step)
    if args.measure and args.json:
        raise UsageError("--json prints the findings; the table of --measure is JSON already")
    if args.measure:
        from memmgr.tools.bench.measure import write

        return write(args.measure, folder, args.step, size, _simulation)
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _budget,
        _versions,
        _native,
        _devices,
        lambda: _memory(128 << 20),
        lambda: _disk(folder, size),
        _environment,
        _extras,
        lambda: _training(folder),
    )
    found = []
    for check in checks:
        for finding in _guarded(check):
            found.append(finding)
            if not args.json:
                _print(finding)
    good = all(finding.mark != NO for finding in found)
    if args.json:
        print(json.dumps({"good": good, "findings": [asdict(finding) for finding in found]}, indent=1))
    return 0 if good else 1


def _simulation(rates: Rates) -> dict[str, Any]:
    """The figures of this GPU and its driver, for `memmgr gpu-check --simulated`; {}: they cannot be measured here."""
    from memmgr.tools.gpu import figures, measured

    try:
        table = measured.driver_figures()
    except (RuntimeError, OSError, subprocess.SubprocessError) as why:
        print(f"memmgr doctor: no table of a simulation: {why}", file=sys.stderr)
        return {}
    return figures.with_rates(table, rates.flops, rates.bytes_per_second, rates.source, time.strftime("%Y-%m-%d"))


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Turns an exception of a check into a finding: never a traceback."""
    try:
        yield from check()
    except Exception as error:
        yield Finding(getattr(check, "__name__", "check").strip("_<>"), NO, f"{type(error).__name__}: {error}")


def _print(finding: Finding) -> None:
    line = f"{finding.mark:<7}{finding.name:<14}{' '.join(finding.text.split())}"
    if finding.advice:
        line += f"\n{'':<21}-> {finding.advice}"
    encoding = sys.stdout.encoding or "ascii"
    print(line.encode(encoding, "replace").decode(encoding), flush=True)


# -- the checks -----------------------------------------------------------------------------------------------------


def _budget() -> Iterator[Finding]:
    """The variables of a budget, before torch is imported and reads them."""
    from memmgr.config import conf
    from memmgr.policies import parse_policy

    limit, text = os.environ.pop("MEMMGR_BUDGET", None), os.environ.pop("MEMMGR_CONF", "")
    try:
        if limit is not None:
            conf.check_limit(limit)
            yield Finding("MEMMGR_BUDGET", OK, limit)
        parse_policy(conf.parse_conf(text).get("policy", "auto"))
    except ValueError as error:
        name, colon, why = str(error).partition(": ")
        name, why = (name, why) if colon and name.startswith("MEMMGR_") else ("MEMMGR_CONF", str(error))
        what = "scripts end at their import of torch" if conf.is_strict(text) else "scripts run without a budget"
        yield Finding(name, NO, f"{why}; {what}", "mend it, or unset it")


def _versions() -> Iterator[Finding]:
    try:
        own = version("memmgr")
    except PackageNotFoundError:
        own = "not installed as a package"
    yield Finding("memmgr", OK, f"{own}, Python {platform.python_version()}, {platform.platform()}")
    if sys.platform != "linux":
        yield Finding("system", NO, f"{sys.platform} is not supported", "use Linux")
    if find_spec("torch") is None:
        yield Finding("torch", NO, "not installed", "pip install torch")
        return
    import torch

    why = unfit(torch.__version__)
    yield Finding("torch", NO if why else OK, why or str(torch.__version__))
    hook = [e for e in entry_points(group="torch.backends") if e.name == "memmgr"]
    if not hook or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield Finding(
            "MEMMGR_BUDGET",
            WEAKER,
            "has no effect: " + ("TORCH_DEVICE_BACKEND_AUTOLOAD=0" if hook else "the package's entry point is missing"),
            "memmgr run, or memmgr.budget in the script",
        )


def _compiler() -> Finding:
    """The compiler that would compile the native half for the next torch."""
    name = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), "")
    how = "install one (Debian: apt install g++ python3-dev)"
    if not name:
        return Finding("compiler", WEAKER, "no C++ compiler: a torch that the package was not made for needs one", how)
    try:
        said = subprocess.run(
            [*name.split(), "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("compiler", WEAKER, f"{name} does not work: {error}", how)
    return Finding("compiler", OK, (said.splitlines() or [name])[0])


def _native() -> Iterator[Finding]:

    from memmgr.native import binding, build, cache

    yield _compiler()
    begun = time.perf_counter()
    try:
        library = Path(getattr(binding.load(), "__file__", ""))
    except build.NotBuiltError as why:
        yield Finding(
            "allocator",
            NO,
            f"no budget can be opened: {why}",
            "mend what it names: until then every budget is this error",
        )
        return
    if library.parent == build.prebuilt("").parent:
        yield Finding("allocator", OK, "in the package, made for this torch and this Python")
        return
    seconds = time.perf_counter() - begun
    how = f"compiled in {seconds:.0f} s" if seconds > 2 else "compiled before"
    folder, fallen_back = cache.folder()
    yield Finding("allocator", OK, f"{how}, kept in {folder} ({cache.VARIABLE} names another folder)")
    if fallen_back is not None:
        lasting = f"set {cache.VARIABLE} to a folder that lasts and can be written"
        yield Finding(
            "cache", WEAKER, f"{fallen_back}, so {folder} is used: compiled anew when that is emptied", lasting
        )


def _devices() -> Iterator[Finding]:
    import torch

    if not torch.accelerator.is_available():
        if torch.version.cuda is not None:
            text = f"this torch is made for CUDA {torch.version.cuda}, and no such device can be used"
            yield Finding(
                "CUDA", WEAKER, text, "nvidia-smi says whether the driver works; the CPU is managed meanwhile"
            )
        yield Finding(
            "device", OK, f"cpu, {os.cpu_count()} logical cores, {torch.get_num_threads()} threads (no accelerator)"
        )
        return
    device = torch.accelerator.current_accelerator()
    if device is None or device.type != "cuda":
        yield Finding("device", WEAKER, f"{device} is not supported", 'memmgr.budget(..., device="cpu")')
        return
    yield from _cuda(torch.cuda.device_count())


def _cuda(count: int) -> Iterator[Finding]:
    """The GPUs that this process may use, whether memmgr has their memory, and the link."""
    import torch

    from memmgr.native import cuda as allocator

    why = allocator.install()  # before anything below initialises CUDA
    for ordinal in range(count):
        properties = torch.cuda.get_device_properties(ordinal)
        name = f"cuda:{ordinal} {properties.name}, {show_size(properties.total_memory)}, CUDA {torch.version.cuda}"
        advice = "CUDA has been tested far less than the CPU, and steps are slow: memmgr gpu-check compares the bits"
        yield Finding("device", WEAKER, name, advice)
    if why is None:
        yield Finding("CUDA memory", OK, "memmgr's allocator is in place")
    else:
        yield Finding(
            "CUDA memory",
            NO,
            f"no budget can be kept on it: {why}",
            "mend what it names, or device='cpu' for host memory",
        )
    size = 256 << 20
    try:
        with torch.cuda.device(0):
            host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            there = torch.empty(size, dtype=torch.uint8, device="cuda")
            speeds = [_cuda_speed(there, host, size), _cuda_speed(host, there, size)]
    except (RuntimeError, torch.OutOfMemoryError) as error:  # a GPU that another process fills
        text = f"could not be measured: {(str(error).splitlines() or ['?'])[0]}"
        yield Finding("link", WEAKER, text, "try again when the GPU has 256 MB free")
        return
    yield Finding("link", OK, f"to the device {speeds[0] / 1e9:.1f} GB/s, back {speeds[1] / 1e9:.1f} GB/s")


def _cuda_speed(target: object, source: object, size: int) -> float:
    import torch

    assert isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor)
    target.copy_(source)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(4):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 4 * size / (time.perf_counter() - begun)


def _memory(size: int) -> Iterator[Finding]:
    import psutil

    from memmgr.config.machine import group_bytes

    memory = psutil.virtual_memory()
    text = (
        f"{show_size(memory.available)} free of {show_size(memory.total)}, copied at {copy_speed(size) / 1e9:.1f} GB/s"
    )
    limit = group_bytes()
    if limit is not None and limit < memory.total:
        text += f"; this process may use {show_size(limit)}, of which a budget in percent is a share"
    yield Finding("memory", OK, text)


def _disk(folder: str, size: int) -> Iterator[Finding]:
    import psutil

    free = psutil.disk_usage(folder).free
    kind = _file_system(folder)
    if free < 2 * size:
        yield Finding("disk", WEAKER, f"{folder}: only {show_size(free)} free", "another --disk FOLDER, or MEMMGR_DISK")
        return
    if kind in ("tmpfs", "ramfs"):
        yield Finding(
            "disk",
            WEAKER,
            f"{folder} is memory ({kind}): on the CPU, offloading there frees nothing",
            "--disk FOLDER on a real disk, or MEMMGR_DISK; or policy evict",
        )
        return
    try:
        write, read = disk_speed(folder, size)
    except OSError as error:
        yield Finding("disk", WEAKER, f"{folder}: {error.strerror}", "another --disk FOLDER, or MEMMGR_DISK")
        return
    text = f"{folder} ({kind or 'unknown'}): write {write / 1e6:.0f} MB/s, read {read / 1e6:.0f} MB/s, {show_size(free)} free"
    if min(write, read) < SLOW_DISK:
        yield Finding("disk", WEAKER, text, "plans recompute more instead; on a local NVMe disk they would read back")
    else:
        yield Finding("disk", OK, text)


def _file_system(folder: str) -> str:
    import psutil

    path = os.path.realpath(folder)
    mounted = [p for p in psutil.disk_partitions(all=True) if os.path.commonpath([path, p.mountpoint]) == p.mountpoint]
    return max(mounted, key=lambda p: len(p.mountpoint)).fstype if mounted else ""


def _environment() -> Iterator[Finding]:
    for line in variables.unknown():
        yield Finding("variables", NO, line, "a training ends there; mend the name, or unset it")
    if os.environ.get("MEMMGR_TELEMETRY") == "0":
        yield Finding("telemetry", WEAKER, "MEMMGR_TELEMETRY=0: memmgr top sees nothing", "unset it")
        return
    from memmgr.telemetry import stream

    try:
        folder = stream.private_folder()
    except OSError as error:
        yield Finding(
            "telemetry",
            WEAKER,
            f"{error.filename}: {error.strerror}",
            "remove it, or set XDG_RUNTIME_DIR to a folder of yours",
        )
        return
    yield Finding("telemetry", OK, f"sockets in {folder}")
    with contextlib.suppress(OSError):
        folder.rmdir()  # as it was; it stays where a training uses it


def _extras() -> Iterator[Finding]:
    for name, what, how in EXTRAS:
        if find_spec(name) is None:
            yield Finding(name, WEAKER, f"not installed: needed for {what}", how)
        else:
            yield Finding(name, OK, f"{version(name)}: {what}")


# A process of its own, so that a crash or a hang of a broken set-up is found and survived.
_TRAINING = """
import hashlib, sys, torch, memmgr
torch.set_num_threads(1)
def train(limit, folder):
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64))
              for _ in range(4)]
    model = torch.nn.Sequential(*blocks)
    x = torch.randn(1024, 64)
    with memmgr.budget(limit, device="cpu", disk=folder, quiet=True) as mm:
        for _ in range(3):
            model(x).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()
    bits = b"".join(p.detach().contiguous().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(bits).hexdigest(), mm.stats()
plain, stats = train(None, sys.argv[1])
need = stats["unmanaged_peak_bytes"]
managed, stats = train(need * 6 // 10, sys.argv[1])
print(plain == managed, need, stats["resident_bytes.peak"], stats["evictions"] + stats["offloads"])
"""


def _training(folder: str) -> Iterator[Finding]:
    # misspelt variables were reported
    kept = (variables.VARIABLES | variables.OF_TESTS) - {"MEMMGR_BUDGET", "MEMMGR_CONF"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MEMMGR_") or key in kept}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", _TRAINING, folder],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            env={**environment, "MEMMGR_TELEMETRY": "0"},
        )
    except subprocess.TimeoutExpired:
        yield Finding("training", NO, "a small training did not end within two minutes", "please report this")
        return
    words = done.stdout.split()
    if done.returncode != 0 or len(words) != 4:
        last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        if "NotBuiltError" in last:
            yield Finding(
                "training", NO, "a small training failed: no budget can be opened", "the allocator's line says why"
            )
        else:
            yield Finding("training", NO, f"a small training failed: {last}", "please report this")
        return
    same, need, peak, left = words[0] == "True", int(words[1]), int(words[2]), int(words[3])
    text = f"a training that needs {show_size(need)} ran in {show_size(peak)}"
    if not same:
        yield Finding("training", NO, f"{text}, with other bits", "please report this")
    elif left == 0:
        yield Finding("training", NO, f"{text}, and nothing left", "please report this")
    else:
        yield Finding("training", OK, f"{text}, with the same bits")
