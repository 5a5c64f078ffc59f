"""The pager's module, compiled once per installed torch, behind a protocol."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import importlib.machinery
import importlib.resources
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict, cast

import torch

from memmgr import _cache, _cuda
from memmgr._torches import unfit

from .build import NotBuiltError, compile_library, include_folder, load_core, package_sources, prebuilt

SMALL_BYTES = 64 << 10
"""Smaller storages are counted and never paged: one that comes and goes costs more than the room that it makes."""


class Escape(enum.IntEnum):
    """Why an address may not change any more (rule 9); the values are those of `allocator/pager/cells/cell.h`."""

    POINTER = 1
    NUMPY = 2
    DLPACK = 3
    SHARED = 4
    SLICE = 5
    FOREIGN_WRITE = 6
    CAPTURED = 7
    SIZES = 8


class Order(enum.IntEnum):
    """The order of victims when malloc chooses; the values are those of `allocator/pager/base/budget.h`."""

    DTR = 0
    LRU = 1
    LARGEST = 2
    DELTA = 3
    RANKED = 4


class CellInfo(TypedDict):
    """One cell, as `describe` returns it.

    `residency` is "resident", "offloaded", "evicted" or "packed". `trusted`: the recipe may run again. `op`: the recipe's op.
    """

    nbytes: int
    residency: str
    pins: int
    escaped: bool
    recipe: bool
    trusted: bool
    op: str
    depth: int
    clean: bool
    needed: int
    holders: int
    small: bool
    orphan: bool


class PeriodInfo(TypedDict):
    """The period that ended, as `next_period` returns it.

    `hash`: the hash of its ops. `before`: the hash of the period before it, 0 if that was not recorded. `short`: its plan
    left malloc to choose victims. `left_plan`: the hash of the plan that it left before its end, 0 for none; `left_at`: the
    first op that differs, from 0; the number of its ops if it ended first.
    """

    hash: int
    before: int
    ops: int
    followed: bool
    short: bool
    left_plan: int
    left_at: int
    trials: int
    overflow: bool


class TimelineColumns(TypedDict):
    """A period in columns, as bytes; `allocator/pager/plan/timeline.h` explains them."""

    names: list[str]
    op: bytes
    first_touch: bytes
    seconds: bytes
    before: bytes
    scratch: bytes
    other: bytes
    module: bytes
    ordinal: bytes
    flags: bytes
    bits: bytes
    deaths: bytes
    sizes: bytes
    fixed: bytes
    prior: bytes
    hashes: bytes
    turn: int


class Pin(Protocol):
    """Keeps bytes in memory, where they are, while it lives."""


Addressed = torch.Tensor | int
"""A tensor, or a storage's `_cdata`."""


class Pager(Protocol):
    """The functions of the module; `allocator/pager/python/module.cpp` defines them."""

    def open(
        self,
        limit: int,
        folder: str | None,
        disk_bytes: int,
        throttle: int,
        small_bytes: int,
        may_evict: bool,
        may_offload: bool,
        torture: bool,
        verify: bool,
        prefetch: bool,
        order: int,
        search: int,
        remap: int,
        apart: bool,
        device: str,
        driver: str | None,
        host_bytes: int,
    ) -> None: ...
    def close(self) -> None: ...
    def see_this_thread(self, on: bool) -> bool: ...
    def adopt(self, tensor: Addressed) -> int: ...
    def adopt_all(self, tensors: list[torch.Tensor]) -> int: ...
    def settle(self) -> int: ...
    def set_limit(self, limit_bytes: int) -> None: ...
    def escape(self, tensor: Addressed, why: int) -> bool: ...

    def forsake_file(self, path: str | os.PathLike[str]) -> None: ...
    def name(self, tensor: Addressed) -> int | None: ...
    def names_differ(self) -> bool: ...
    def pin(
        self, tensors: Sequence[Addressed], written: bool = False, region: bool = False, held: bool = False
    ) -> Pin: ...
    def call_foreign(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def note_profiler(self, on: bool) -> None: ...
    def guard(self, functions: list[Any], libraries: list[str]) -> int: ...
    def unguard_all(self) -> None: ...
    def page_kernel(self, function: Any, key: str, name: str, args: str) -> bool: ...
    def unpage_kernels(self) -> None: ...
    def libraries_that_use_torch(self) -> list[str]: ...
    def watch_foreign_calls(self) -> None: ...
    def pin_number(self, tensor: torch.Tensor) -> Pin | None: ...
    def pin_item(self, storage: int) -> Pin: ...
    def beat(self, store: Any = None, key: str = "", seconds: float = 0.0) -> bool: ...
    def beats(self) -> int: ...
    def pin_reducer(self, reducer: Any, gradients: bool) -> Pin | None: ...
    def reducer_storages(self, reducer: Any) -> list[int]: ...
    def moves_gradients(self, reducer: Any) -> bool: ...
    def reducers_listen(self, begin: bool) -> None: ...
    def making_states(self, on: bool) -> None: ...
    def add_pending(self, run: Callable[[], object], tensors: list[torch.Tensor]) -> bool: ...
    def let_slices_wait(self, on: bool) -> None: ...
    def any_away(self, tensors: list[torch.Tensor]) -> bool: ...
    def finish_pending(self, quietly: bool = False) -> None: ...
    def take_away(self, tensor: Addressed, turn: int = -1) -> int: ...
    def read_ahead(self, tensor: Addressed) -> bool: ...
    def describe(self, tensor: Addressed) -> CellInfo | None: ...
    def cells(self) -> list[CellInfo]: ...
    def set_purpose(self, tensors: list[torch.Tensor], purpose: int) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def drain(self) -> None: ...
    def note_refused(self) -> None: ...
    def refusal(self) -> str: ...
    def failed_op(self) -> tuple[str, int, int, int]: ...
    def set_errors(
        self, make: Callable[[str], BaseException], wrong: type[BaseException], torchs: type[BaseException]
    ) -> None: ...
    def cuts(self, lists: list[list[Any]]) -> list[int]: ...
    def set_slice_bytes(self, most: int) -> None: ...
    def count_ticks(self, step: int) -> None: ...
    def read_clock(self, address: int) -> None: ...
    def set_link(self, seconds_per_byte: float, cpu_seconds_per_byte: float = ...) -> None: ...
    def check(self) -> None: ...
    def begin_capture(self) -> None: ...
    def end_capture(self) -> None: ...
    def use_plugin(self, table: int) -> None: ...
    def leave_out(self, rules: int) -> None: ...
    def device_stats(self) -> dict[str, int]: ...
    def next_period(self, noted: bool) -> PeriodInfo: ...
    def seek_loops(self, on: bool) -> None: ...
    def wait_for_loop(self) -> bool: ...
    def end_wait_for_loop(self) -> None: ...
    def take_loop(self) -> PeriodInfo | None: ...
    def turn_period(self) -> None: ...
    def timeline(self) -> TimelineColumns: ...
    def candidates(self) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]: ...
    def set_ranking(self, serials: bytes, ways: bytes) -> None: ...
    def wait_for_pressure(self) -> None: ...
    def end_wait_for_pressure(self) -> None: ...
    def link(self) -> tuple[float, float, float]: ...
    def add_plan(
        self, hashes: bytes, departures: bytes, writes: bytes, reads: bytes, groups: bytes, kept: bytes
    ) -> None: ...

    # -- other threads' gradients (gradients.cpp) --
    def others_wait(self) -> bool: ...
    def raise_in(self, thread: int, exception: type[BaseException], package: str) -> bool: ...
    def gradients_of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]: ...
    def gradient_info(self, tensor: torch.Tensor) -> tuple[int, int, int, bool] | None: ...
    def gradient_bytes(self, tensor: torch.Tensor) -> int: ...

    # -- introspection (observe.cpp) --
    def set_detail(self, on: bool) -> None: ...
    def set_learning(self, on: bool) -> None: ...
    def set_module(self, number: int) -> None: ...
    def ops_astray(self) -> int: ...
    def end_pass(self) -> tuple[int, int]: ...
    def drain_events(self) -> tuple[list[tuple[int, str | None, int, int, int, float]], int]: ...
    def watch_cells(self, limit: int) -> tuple[list[tuple[Any, ...]], dict[int, tuple[int, int, int]]]: ...
    def memory_map(self, columns: int) -> tuple[int, list[tuple[int, ...]]]: ...
    def objects_of(self, types: tuple[type, ...], libraries: list[str] = ...) -> list[Any]: ...
    def storage_info(self, tensor: torch.Tensor) -> tuple[int, int, int, bool] | None: ...
    def resident_cells(self) -> list[tuple[int, int]]: ...
    def add_outside(self, delta: int) -> None: ...
    def resident(self) -> int: ...
    def arena_stats(self) -> dict[str, int]: ...
    def tier_stats(self) -> dict[str, int]: ...
    def tier_probe(self, size: int) -> tuple[float, float, float] | None: ...
    def tier_inject(self, write: int, after_writes: int, read: int, after_reads: int) -> None: ...


_loaded: Pager | None = None


def load() -> Pager:
    """The module: from the wheel, or compiled if this torch has not been seen before.

    Raises:
        NotBuiltError: no compiler, no headers, or a torch that the pager does not know.
    """
    global _loaded
    if _loaded is not None:
        _loaded.use_plugin(_cuda.address())
        return _loaded
    sources = package_sources("pager", "pager.cpp")
    include = include_folder(sources)
    digest = hashlib.sha256(f"{torch.__version__} {sys.version_info[:2]} {sysconfig.get_platform()}".encode())
    files = [file for file in sources.rglob("*") if file.suffix in (".cpp", ".h")]
    for file in sorted([*files, *(include / "memmgr").glob("*.h")]):
        digest.update(file.name.encode() + file.read_bytes())
    name = f"pager-{digest.hexdigest()[:20]}"
    target = _cache.place(name, "_pager.so")
    load_core()
    with contextlib.suppress(ImportError):  # made on a machine that is too unlike this one
        _loaded = _open(prebuilt(name))
    if _loaded is None and target.is_file():
        try:
            _loaded = _open(target)
        except ImportError:  # a library built while a source was being edited
            target.unlink()
    if _loaded is None:
        if why := unfit(torch.__version__):
            raise NotBuiltError(why)
        python = Path(sysconfig.get_paths()["include"])
        if not (python / "Python.h").is_file():
            raise NotBuiltError("Python.h was not found: install Python's headers (Debian: apt install python3-dev)")
        api = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "api" / "include"  # c10d's headers want it
        compile_library(
            sources / "pager.cpp", target, [sources, include, python, api], ["c10", "torch_cpu", "torch_python"], what="pager"
        )
        try:
            _loaded = _open(target)
        except ImportError as error:
            raise NotBuiltError(str(error)) from error
    _loaded.use_plugin(_cuda.address())
    return _loaded


def _open(library: Path) -> Pager:
    loader = importlib.machinery.ExtensionFileLoader("memmgr._pager", str(library))
    spec = importlib.util.spec_from_file_location("memmgr._pager", library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return cast(Pager, module)
