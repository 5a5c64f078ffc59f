"""`make demo`: an environment in build/demo with the packages that the demo needs, then `memmgr demo` in it.

A line of progress appears every few seconds. Torch is a build for the CPU where its index can be reached: the demo
uses no GPU, and a build for CUDA brings gigabytes. A second call repeats only the parts that have changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "demo"
PYTHON = PLACE / "venv" / "bin" / "python"
TORCH = os.environ.get("TORCH") or "torch==2.13.0"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
ESTIMATES = {"installing": 0.2, "compiling": 1.5, "training": 3.0}
"""Minutes of the processor, measured on two cores of an AMD EPYC, with the packages on the local disk."""
SAY_SECONDS = 5.0

_began = time.monotonic()
_used: dict[str, float] = {}


def say(text: str) -> None:
    """One line, with the seconds since the start."""
    print(f"make demo [{time.monotonic() - _began:4.0f} s] {text}", flush=True)


def done(stage: str, command: Sequence[str | Path], read: Callable[[str], str | None], **options: str) -> None:
    """Runs a command to its end. Every few seconds its state is printed; if it fails, its last lines are.

    `stage`: the key of ESTIMATES that its processor time is counted under. `read`: maps a line of its output to a new
    state, or to None. `options`: environment variables.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines, state = [""], [stage]
    process = subprocess.Popen(
        [str(word) for word in command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", env={**os.environ, **options},
    )  # fmt: skip

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            state[0] = read(lines[-1]) or state[0]

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    with process:
        while reader.is_alive():
            reader.join(SAY_SECONDS)
            if reader.is_alive():
                say(state[0])
    if process.returncode:
        print("\n".join(lines[-25:]), file=sys.stderr)
        sys.exit(f"make demo: {stage} failed; the lines above are the end of: {' '.join(map(str, command))}")
    count(stage, before)


def count(stage: str, before: resource.struct_rusage) -> None:
    """Adds the processor time of the children that have ended since."""
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    _used[stage] = _used.get(stage, 0.0) + seconds / 60


def changed(stamp: str, text: str) -> bool:
    """The text is another than at the last `keep`."""
    path = PLACE / stamp
    return not path.is_file() or path.read_text() != text


def packages() -> list[str]:
    """Those of memmgr itself, of the extra `demo`, and those that build it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        pyproject = tomllib.load(file)
    project, build = pyproject["project"], pyproject["build-system"]["requires"]
    return [TORCH, *project["dependencies"], *project["optional-dependencies"]["demo"], *build, "cmake>=3.18", "ninja"]


def install(wanted: Sequence[str]) -> None:
    """Makes the environment, unless the last one has the same packages."""
    text = "\n".join([sys.version, *wanted])
    if not changed("packages", text) and PYTHON.is_file():
        return
    say("installing: a new environment in build/demo")
    done("installing", [sys.executable, "-m", "venv", "--clear", PYTHON.parents[1]], lambda _: None)
    total = [0]

    def read(line: str) -> str | None:
        if found := re.match(r"Collecting (\S+)|\s*(?:Downloading|Using cached) (\S+)", line.strip()):
            return f"installing: fetching {found[1] or found[2]}"
        if found := re.match(r"Installing collected packages: (.*)", line):
            total[0] = found[1].count(",") + 1
            return f"installing: unpacking {total[0]} packages"
        return None

    index = ["--extra-index-url", CPU_WHEELS] if reachable(CPU_WHEELS) else []
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "--progress-bar", "off"]
    done("installing", [*pip, *index, *wanted], read)
    (PLACE / "packages").write_text(text)
    say(f"installed {total[0]} packages")


def reachable(address: str) -> bool:
    """An answer comes within five seconds."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address + "/", method="HEAD"), timeout=5):
            return True
    except OSError:
        return False


def file_of(line: str) -> str | None:
    """The state that a line of ninja's tells."""
    found = re.search(r"\[(\d+)/(\d+)\] (?:Building|Linking) .*?([^/ ]+)$", line)
    return f"compiling the core: file {found[1]} of {found[2]}, {found[3].removesuffix('.o')}" if found else None


def build() -> None:
    """The package, whose C++ files are compiled one by one, and the pager, which is one file."""
    digest = hashlib.sha256((PLACE / "packages").read_bytes())
    for folder in ("allocator", "memmgr", "policies", "tools"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    digest.update((ROOT / "pyproject.toml").read_bytes())
    if changed("sources", digest.hexdigest()):
        say("compiling the core")
        pip = [PYTHON, "-m", "pip", "install", "-v", "--disable-pip-version-check", "--no-compile", "--no-deps"]
        settings = ["--no-build-isolation", "--force-reinstall", "--config-settings", "build-dir=build/demo/cmake"]
        done("compiling", [*pip, *settings, "."], file_of)
        (PLACE / "sources").write_text(digest.hexdigest())
    code = "from memmgr.native import binding; binding.load()"
    state = "compiling the pager for this torch: file 1 of 1, kept for all later runs"
    done("compiling", [PYTHON, "-P", "-c", code], lambda line: state if "compiling" in line else None)


def main() -> int:
    """Installs, compiles and trains; the demo's own exit code."""
    PLACE.mkdir(parents=True, exist_ok=True)
    parts = ", ".join(f"{stage} {minutes:g}" for stage, minutes in ESTIMATES.items())
    say(f"about {sum(ESTIMATES.values()):g} minutes of processor time ({parts}), 3 GB of memory, 1 GB of disk")
    install(packages())
    build()
    say("training")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = subprocess.run([PYTHON, "-P", "-m", "memmgr.tools.cli", "demo", *sys.argv[1:]]).returncode
    count("training", before)
    say("processor time in minutes: " + ", ".join(f"{stage} {minutes:.1f}" for stage, minutes in _used.items()))
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nmake demo: interrupted; the same command goes on")
