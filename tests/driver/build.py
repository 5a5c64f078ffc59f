"""Builds the double of libcuda, and variants of the core, into ``build/tests``: once per content of their sources."""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "allocator" / "core"
FAKE_DRIVER = Path(__file__).parent / "fake_driver.cpp"
KERNELS = CORE / "device_kernels.cu"  # the double runs their source
VIRTUAL_TIME = Path(__file__).parent / "virtual_time.h"
FOLDER = ROOT / "build" / "tests"
TWICE = ("kMiB", "RoundUp")  # names that more than one file of the core defines for itself
FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-Wshadow", "-Wno-unused-parameter", "-pthread"]


def compiler() -> str | None:
    """The C++ compiler, or None: tests that need it skip then."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def core_sources() -> list[Path]:
    """The sources of the library, as its CMakeLists names them."""
    text = (ROOT / "allocator" / "CMakeLists.txt").read_text()
    names = text.split("set(core_sources", 1)[1].split(")", 1)[0].split()
    return [ROOT / "allocator" / name for name in names]


def core(name: str, flags: Sequence[str]) -> Path:
    """The library with these flags: all of its files as one, which takes a third of the time."""
    files = []
    for number, source in enumerate(core_sources()):
        files += [f"#define {word} {word}{number}" for word in TWICE]
        files += [f'#include "{source}"', *(f"#undef {word}" for word in TWICE)]
    together = FOLDER / f"{name}.cpp"
    FOLDER.mkdir(parents=True, exist_ok=True)
    own = FOLDER / f"{name}.{os.getpid()}.cpp"  # another test process may read the one that is there
    own.write_text("\n".join(files))
    own.rename(together)
    return build(name, [together], flags, more=core_sources())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Test processes side by side build one after the other."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(
    name: str, sources: Sequence[Path], flags: Sequence[str] = (), shared: bool = True, more: Sequence[Path] = ()
) -> Path:
    """Compiles ``sources`` into ``build/tests/<name>-<hash>`` and returns that path.

    The hash is of the sources, all headers of the core and the flags. Older builds of the name are removed. A source
    that is a shared library is linked. ``more``: files that the sources include, besides headers.
    """
    command = [compiler(), *FLAGS, *flags, "-I", str(ROOT / "allocator" / "include"), "-I", str(CORE)]
    assert command[0] is not None, "no C++ compiler"
    digest = hashlib.sha256(repr(command).encode())
    for path in [*sources, *more, *sorted(CORE.glob("*.h")), *sorted((ROOT / "allocator" / "include").rglob("*.h"))]:
        digest.update(path.read_bytes())
    target = FOLDER / f"{name}-{digest.hexdigest()[:16]}{'.so' if shared else ''}"
    if target.exists():
        return target
    FOLDER.mkdir(parents=True, exist_ok=True)
    with _locked(FOLDER / f"{name}.lock"):
        if target.exists():
            return target
        for old in FOLDER.glob(f"{name}-*"):
            old.unlink(missing_ok=True)
        libraries = [source for source in sources if source.suffix == ".so"]
        sources = [source for source in sources if source.suffix != ".so"]
        objects = [FOLDER / f"{name}.{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(lambda to, source: _run([*command, "-c", str(source), "-o", str(to)]), objects, sources))
        scratch = FOLDER / f"{name}.part"
        _run([*command, *["-shared"] * shared, *map(str, objects + libraries), "-ldl", "-o", str(scratch)])
        for made in objects:
            made.unlink()
        scratch.rename(target)
    return target


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


@functools.cache
def fake_driver(sanitize: str = "") -> Path:
    """The double of libcuda. ``sanitize``: address, thread or undefined."""
    flags = [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"] if sanitize else []
    return build(f"fake_driver_{sanitize or 'plain'}", [FAKE_DRIVER], flags, more=[KERNELS, VIRTUAL_TIME])


@functools.cache
def core_with_mutations() -> Path:
    """The core with MEMMGR_MUTATIONS: its waits can be left out by name."""
    return core("core_mutations", ["-DMEMMGR_MUTATIONS"])
