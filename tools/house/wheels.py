"""`make wheels`: one wheel with the pager for each release of torch and each Python, and a smoke test of each pair.

    python tools/house/wheels.py                            # all of TORCHES, all of PYTHONS
    python tools/house/wheels.py --torch 2.13.0 --python python3.11
    python tools/house/wheels.py --check dist/WHEEL         # the smoke tests alone

A pair that cannot be had on this machine is skipped, and a line at the end names the missing part. The pager is compiled
against torch's headers, so no GPU is needed. The builds of torch for the CPU and for CUDA have names of their own, and
each needs its own library: `2.13.0+cpu` is the former, `2.13.0` the one that the package index gives.

A smoke test trains a small model in half of its memory: in a new environment, with the wheel from dist/, and with no
compiler on the PATH. It fails if anything is compiled, or if a bit differs.

Exit code: 0; 1 when a wheel or a smoke test failed; 3 when pairs were skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "wheels"
_RELEASES = runpy.run_path(str(ROOT / "memmgr" / "config" / "torch_versions.py"))
(_MAJOR, _LOW), (_, _HIGH) = _RELEASES["OLDEST"], _RELEASES["NEWEST"]
TORCHES = tuple(f"{_MAJOR}.{minor}.0{build}" for minor in range(_LOW, _HIGH + 1) for build in ("+cpu", ""))
PYTHONS = ("python3.11", "python3.12", "python3.13")
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
LEAST_DISK = 6e9
"""Bytes: an environment with a torch for CUDA, its wheel, and the next one's."""

SMOKE = """
import sys, torch, memmgr
from memmgr.native import binding

def trained(budget):
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    x = torch.randn(2048, 64)
    with memmgr.budget(budget, device="cpu", quiet=True) as mm:
        for _ in range(4):
            model(x).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()
        stats = mm.stats()
    return [p.detach().clone() for p in model.parameters()], stats

plain, free = trained(None)
managed, stats = trained(free["resident_bytes.peak"] // 2)
assert "_prebuilt" in binding.load().__file__, binding.load().__file__
assert stats["evictions"] + stats["offloads"] > 0, "nothing was evicted"
assert all(map(torch.equal, plain, managed)), "other bits"
print(torch.__version__, sys.version.split()[0], stats["evictions"], "evicted,", stats["offloads"], "offloaded")
"""


def run(words: Sequence[str | Path], **options: str) -> subprocess.CompletedProcess[str]:
    """Runs a command; its output is kept."""
    env = {**os.environ, **options}
    return subprocess.run([str(word) for word in words], cwd=PLACE, env=env, capture_output=True, text=True)


def environment(python: str, torch: str, name: str, *more: str | Path) -> tuple[Path | None, str]:
    """A new environment's Python with that torch, or the reason why there is none."""
    if shutil.which(python) is None:
        return None, f"{python} is not on the PATH"
    if shutil.disk_usage(PLACE).free < LEAST_DISK:
        return None, f"less than {LEAST_DISK / 1e9:g} GB of disk are free"
    place = PLACE / f"{name}-{Path(python).name}-torch-{torch}"
    made = run([python, "-m", "venv", "--clear", place])
    if made.returncode:
        return None, made.stderr.strip().splitlines()[-1]
    index = ["--extra-index-url", CPU_WHEELS] if torch.endswith("+cpu") else []
    pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *index]
    made = run([*pip, f"torch=={torch}", "psutil", "numpy", *more])
    if made.returncode:
        shutil.rmtree(place)
        errors = [line for line in made.stderr.splitlines() if line.startswith("ERROR")]
        return None, (errors or ["pip failed"])[0].removeprefix("ERROR: ")
    return place / "bin" / "python", ""


def smoke(wheel: Path, python: str, torch: str) -> str:
    """The error of the smoke test, or an empty text."""
    there, why = environment(python, torch, "smoke", wheel)
    if there is None:
        return why
    with tempfile.TemporaryDirectory() as empty:
        (Path(empty) / "bin").mkdir()
        cache = Path(empty) / "cache"
        hidden = {"PATH": f"{empty}/bin", "CXX": "", "MEMMGR_CACHE": str(cache), "PYTHONPATH": ""}
        done = run([there, "-P", "-c", SMOKE], **hidden)
        compiled = list(cache.rglob("*.so"))
    shutil.rmtree(there.parents[1])
    if done.returncode or compiled:
        return f"{done.stderr.strip()[-600:]}{' something was compiled' if compiled else ''}"
    print(f"smoke test: torch {done.stdout.strip()}", flush=True)
    return ""


def main() -> int:
    """Makes the environments, the wheel and the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="RELEASE")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="PYTHON")
    parser.add_argument("--check", type=Path, metavar="WHEEL", help="the smoke tests of a wheel that there is")
    args = parser.parse_args()
    PLACE.mkdir(parents=True, exist_ok=True)
    pairs = [(python, torch) for torch in args.torch for python in args.python]
    wheel: Path | None = args.check and args.check.resolve()
    missing: list[str] = []
    if wheel is None:
        found = {}
        for python, torch in pairs:
            print(f"torch {torch}, {python}", flush=True)
            there, why = environment(python, torch, "build")
            if there is None:
                missing.append(f"torch {torch}, {python}: {why}")
            else:
                found[python, torch] = there
        if not found:
            print("no wheel: " + "; ".join(missing), file=sys.stderr)
            return 1
        done = subprocess.run(["make", "-C", ROOT, "wheel", f"WITH={' '.join(map(str, found.values()))}"])
        if done.returncode:
            return 1
        wheel = max((ROOT / "dist").glob("*manylinux*.whl"), key=lambda path: path.stat().st_mtime)
        for there in found.values():
            shutil.rmtree(there.parents[1])
        pairs = list(found)
    failed = [f"torch {torch}, {python}: {why}" for python, torch in pairs if (why := smoke(wheel, python, torch))]
    print(f"{wheel}: {len(pairs) - len(failed)} of {len(pairs)} smoke tests passed")
    for word, lines in (("failed", failed), ("skipped, and needed for a release", missing)):
        print("".join(f"{word}: {re.sub(r'[ ]+', ' ', line)}\n" for line in lines), end="", file=sys.stderr)
    return 1 if failed else 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
