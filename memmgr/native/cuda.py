"""CUDA's allocator: compiled once per installed torch, put in torch's place.

`import memmgr` does this where torch has CUDA and a device is there, so that a budget later finds every block in its own
arena. Without a budget the allocator is unlimited. `MEMMGR_INSTALL=0` prevents it. Where CUDA was used before the import,
the first budget does it, and moves the tensors. With `allocator="native"` torch's own caching allocator stays, and the
budget is kept in that. No code here initialises CUDA, so a later fork stays possible.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from memmgr.common.constants import MEMORY_MAPPED, MEMORY_PLAIN
from memmgr.config import conf

from . import cache
from .build import NotBuiltError, compile_library, include_folder, load_core, package_sources

INSTALL_VARIABLE = "MEMMGR_INSTALL"
# How a device's memory is made: `mapped` (the default; pages as they are needed) or `plain` (one piece, taken at once).
MEMORY_VARIABLE = "MEMMGR_CUDA_MEMORY"
# Bytes of a page of mapped memory, a power of two; the core reads it. Unset: a 65,536th of the device's memory.
PAGE_VARIABLE = "MEMMGR_CUDA_PAGE"
# The library with the driver's entry points; unset: libcuda. Tests name a double here.
DRIVER_VARIABLE = "MEMMGR_DRIVER"
MEMORIES = {"mapped": MEMORY_MAPPED, "plain": MEMORY_PLAIN}

NATIVE = "native"  # torch's own name for its allocator
IN_USE = "CUDA is in use already: the first budget puts memmgr's allocator in place"
CAPTURING = "a graph is being captured"
LEFT = f"{INSTALL_VARIABLE}=0 or allocator:native has left torch's own allocator in place"
NOT_NATIVE = (
    "memmgr's CUDA allocator is there already: MEMMGR_CONF=allocator:native or MEMMGR_INSTALL=0 keep torch's own"
)

_library: ctypes.CDLL | None = None
_took_over = False  # from torch's own allocator, and no budget has opened since
_torchs = 0  # the address of the table of torch's own allocator, once a budget may be kept in it
_why: str | None = "memmgr has not looked yet"


class _Table(ctypes.Structure):
    """`mm_plugin` of memmgr/plugin.h."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("is_torchs", ctypes.c_int),
        ("device", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)),
        ("set_budget", ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint64)),
        ("set_hooks", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        (
            "try_allocate",
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p),
        ),
        ("release", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("owns", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
        ("live", ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int)),
        ("trim", ctypes.CFUNCTYPE(None, ctypes.c_int)),
        ("earlier", ctypes.CFUNCTYPE(ctypes.c_void_p)),
    )


# ---- is there anything to do? ----------------------------------------------------------------------------------------


def _is_worker() -> bool:
    """A process that loads data or compiles: it trains nothing."""
    data = sys.modules.get("torch.utils.data._utils.worker")
    if data is not None and data.get_worker_info() is not None:
        return True
    return any("compile_worker" in argument for argument in sys.orig_argv)


def _has_device() -> bool:
    """Is there a GPU of NVIDIA's that this process may use? By files and NVML, never by CUDA's runtime."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    if not any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")):
        return False
    count = getattr(torch.cuda, "_device_count_nvml", lambda: -1)()
    return bool(count != 0)  # negative: NVML does not say


def _asked_for_torchs() -> bool:
    """Does the environment say that torch's own allocator is to stay?"""
    if os.environ.get(INSTALL_VARIABLE) == "0":
        return True
    try:
        return bool(conf.parse_conf(os.environ.get("MEMMGR_CONF", "")).get("allocator") == NATIVE)
    except ValueError:  # said where the budget opens
        return False


def _reason() -> str | None:
    """The reason why no budget can be kept on a GPU here with either allocator, or None."""
    if torch.version.cuda is None or not hasattr(torch._C, "_cuda_getAllocatorBackend"):
        return "this torch has no CUDA; device='cpu' manages host memory"
    if _is_worker():
        return "this is a worker process"
    if torch.cuda._is_in_bad_fork():
        return "a forked child cannot use CUDA"
    if os.environ.get(DRIVER_VARIABLE) is None and not _has_device():
        return "there is no GPU; device='cpu' manages host memory"
    backend = torch._C._cuda_getAllocatorBackend()
    if backend != NATIVE:
        return f"torch's CUDA allocator is {backend!r} already; unset PYTORCH_CUDA_ALLOC_CONF's backend"
    return None


# ---- compiling -------------------------------------------------------------------------------------------------------


def header_folders() -> list[Path]:
    """Where CUDA's runtime headers could be: beside torch as packages, then a toolkit."""
    site = Path(torch.__file__).parent.parent
    major = (torch.version.cuda or "13").split(".")[0]
    found = [site / "nvidia" / f"cu{major}" / "include", site / "nvidia" / "cuda_runtime" / "include"]
    found += [site / "triton" / "backends" / "nvidia" / "include"]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            found.append(Path(os.environ[variable]) / "include")
    return [*found, Path(f"/usr/local/cuda-{torch.version.cuda}/include"), Path("/usr/local/cuda/include")]


def _major(folder: Path) -> str | None:
    """The major CUDA release of the headers in `folder`."""
    for name in ("cuda.h", "cuda_runtime_api.h"):
        file = folder / name
        if file.is_file():
            said = re.search(r"#define\s+(?:CUDA_VERSION|CUDART_VERSION)\s+(\d+)", file.read_text(errors="replace"))
            if said:
                return str(int(said[1]) // 1000)
    return None


def find_headers() -> list[Path]:
    """The folders to compile with: one with all headers, or the runtime's and another one with the headers that it
    lacks.

    Raises `NotBuiltError`: CUDA's headers are missing, or are of another release than torch.
    """
    wanted = (torch.version.cuda or "").split(".")[0]
    folders = [folder for folder in header_folders() if (folder / "cuda_runtime_api.h").is_file()]
    fitting = [folder for folder in folders if not wanted or _major(folder) == wanted]
    for folder in fitting:
        if (folder / "crt" / "host_config.h").is_file():
            return [folder]
    # CUDA's own packages have crt/ apart, and torch does not depend on that one. Triton has it, of some release. Its
    # headers only tell compilers apart, and the folder comes last, so that no other header is taken from it.
    lent = [folder for folder in header_folders() if (folder / "crt" / "host_config.h").is_file()]
    if fitting and lent:
        return [fitting[0], lent[0]]
    hint = f"pip install nvidia-cuda-runtime nvidia-cuda-crt (of CUDA {torch.version.cuda}), or set CUDA_HOME"
    if folders and not fitting:
        raise NotBuiltError(f"CUDA's headers in {folders[0]} are of another release than torch ({wanted}): {hint}")
    raise NotBuiltError(f"CUDA's headers (cuda_runtime_api.h, crt/host_config.h) were not found: {hint}")


def build() -> Path:
    """The compiled allocator for this torch; says so on stderr when it has to be made.

    Raises `NotBuiltError`: no compiler, no headers, or an error.
    """
    folder = package_sources("cuda", "plugin.cpp")
    include = include_folder(folder)
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.cpp"), *folder.glob("*.h"), *(include / "memmgr").glob("*.h")]):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(f"{torch.__version__} {torch.version.cuda} {sysconfig.get_platform()}".encode())
    target = cache.place(f"cuda-{digest.hexdigest()[:20]}", "memmgr_cuda.so")
    if not target.is_file():
        headers = find_headers()
        compile_library(
            folder / "plugin.cpp", target, [include, folder, *headers], ["c10_cuda", "c10"], "CUDA allocator"
        )
    return target


# ---- installing ------------------------------------------------------------------------------------------------------


def _load(path: Path) -> ctypes.CDLL:
    load_core()
    library = ctypes.CDLL(str(path))
    library.mm_cuda_install.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    library.mm_cuda_install.restype = library.mm_cuda_in_place.restype = ctypes.c_int
    library.mm_cuda_plugin.restype = library.mm_cuda_native.restype = ctypes.c_void_p
    library.mm_cuda_native.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    return library


def _put_in_place(take_over: bool) -> str | None:
    global _library, _took_over
    if _asked_for_torchs() or _torchs:
        return LEFT
    if torch.cuda.is_initialized():
        if not take_over:
            return IN_USE
        if torch.cuda.is_current_stream_capturing():
            return CAPTURING
    memory = os.environ.get(MEMORY_VARIABLE, "mapped").lower()
    if memory not in MEMORIES:
        return f"{MEMORY_VARIABLE}={memory!r} is none of {', '.join(MEMORIES)}"
    page = os.environ.get(PAGE_VARIABLE)
    if page is not None and not page.strip().isdecimal():
        return f"{PAGE_VARIABLE}={page!r} is not a number of bytes"
    try:
        library = _load(build())
    except (NotBuiltError, OSError) as error:
        return str(error)
    driver = os.environ.get(DRIVER_VARIABLE)
    error_text = ctypes.create_string_buffer(256)
    named = driver.encode() if driver else None
    if library.mm_cuda_install(named, MEMORIES[memory], error_text, len(error_text)) != 0:
        return error_text.value.decode()
    _library, _took_over = library, torch.cuda.is_initialized()
    return None


def install(*, take_over: bool = False) -> str | None:
    """Puts the allocator in place if it is not: None when it is there, else why not. Never raises. `take_over`: also where
    torch's own is in use.
    """
    global _why
    if in_place():
        return None
    if _library is not None:
        return "another allocator was put in the place of memmgr's"
    try:
        _why = _reason() or _put_in_place(take_over)
    except Exception as error:  # an import that fails would be our fault
        _why = f"{type(error).__name__}: {error}"
    return _why


def just_took_over() -> bool:
    """Has the allocator taken over from torch's own since the last call? A budget on CUDA asks when it opens."""
    global _took_over
    result, _took_over = _took_over, False
    return result


def in_place() -> bool:
    """Do new CUDA tensors come from memmgr's allocator?"""
    return _library is not None and bool(_library.mm_cuda_in_place())


def manage(allocator: str = "auto") -> str | None:
    """Prepares for a budget: installs memmgr's allocator if possible, else (or for `native`) uses torch's own,
    unchanged. Returns None, or the reason why no budget can be kept. Never raises."""
    if allocator == NATIVE:
        return NOT_NATIVE if in_place() else _use_torchs()
    why = install(take_over=True)
    return _use_torchs() if why == LEFT else why


def _use_torchs() -> str | None:
    global _torchs, _why
    if _torchs:
        return None
    _why = _reason()
    if _why is not None:
        return _why
    try:
        error_text = ctypes.create_string_buffer(256)
        driver = os.environ.get(DRIVER_VARIABLE)
        named = driver.encode() if driver else None
        _torchs = _load(build()).mm_cuda_native(named, error_text, len(error_text)) or 0
        _why = None if _torchs else error_text.value.decode()
    except Exception as error:
        _why = str(error)
    return _why


# ---- the seam to the pager -------------------------------------------------------------------------------------------


def address() -> int:
    """Address of the `mm_plugin` that keeps a budget on CUDA; 0: none yet."""
    return int(_library.mm_cuda_plugin()) if _library is not None else _torchs


def table() -> Any:
    """`mm_plugin`. Raises `RuntimeError`: the allocator is not in place."""
    if _library is None:
        raise RuntimeError(f"memmgr's CUDA allocator is not in place: {_why}")
    return _Table.from_address(address())
