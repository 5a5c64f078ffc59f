"""Records what training asks of the arena, for benchmarks/window_replay.cpp.

The CPU plug-in is in place without a budget and without memmgr's recorder; the core logs every block that it hands out and
gets back. A dispatch mode notes ops with their inputs, outputs and seconds, saved-tensor hooks note what autograd saves
and uses, and at every op the saved storages are looked through: from when to when can the program itself reach them? All
notes carry the length of the core's log at that moment, which puts blocks and ops into one order.
"""

from __future__ import annotations

import ctypes
import random
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from memmgr import _shim

_DEAR = ("convolution", "mm.", "bmm", "addmv", "linear.", "dot_product_attention", "lstm", "gru")  # as recorder.cpp
_CAPACITY = 4_000_000


class _Entry(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("bytes", ctypes.c_uint64)]


class _Holder:
    """What autograd saved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Recorder:
    """The log and the notes of one run."""

    def __init__(self) -> None:
        self.native = _shim.load()
        core = _shim._core
        assert core is not None
        self._core = core
        core.mm_arena_log_length.restype = core.mm_arena_log_read.restype = ctypes.c_uint64
        core.mm_arena_walk.restype = None
        self.notes: list[tuple[int, str, Any]] = []
        self.quiet = False
        self.saved: dict[int, list[int]] = {}  # address of a storage's bytes -> [handles, storage object]
        self.alone: set[int] = set()

    def __enter__(self) -> Recorder:
        self.native.open_arena(2**64 - 1, 0)
        self._arena = ctypes.c_void_p(self.native.arena_address())
        assert self._core.mm_arena_log(self._arena, ctypes.c_uint64(_CAPACITY)) == 0
        probe = torch.empty(4096, dtype=torch.uint8)
        entry = self._read()[-1]
        self.base = probe.data_ptr() - entry[0]
        del probe
        self._mode = _Mode(self)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda holder: self._unpack(holder))
        self._mode.__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__(None, None, None)
        self._mode.__exit__(None, None, None)
        self.entries = self._read()
        assert len(self.entries) < _CAPACITY, "the log is full"
        self._core.mm_arena_log(self._arena, ctypes.c_uint64(0))
        self.native.close_arena()

    def _read(self) -> list[tuple[int, int]]:
        n = self.length()
        entries = (_Entry * n)()
        self._core.mm_arena_log_read(self._arena, entries, ctypes.c_uint64(n))
        return [(entry.offset, entry.bytes) for entry in entries]

    def length(self) -> int:
        return int(self._core.mm_arena_log_length(self._arena))

    def note(self, kind: str, payload: Any) -> None:
        self.notes.append((self.length(), kind, payload))

    # -- saved tensors --

    def _pack(self, tensor: torch.Tensor) -> Any:
        self.look()
        address = address_of(tensor)
        if address is None:
            return tensor
        self.quiet = True
        holder = _Holder(tensor.detach())
        self.quiet = False
        entry = self.saved.setdefault(address, [0, tensor.untyped_storage()._cdata])
        entry[0] += 1
        self.note("s", address)
        weakref.finalize(holder, self._drop, address)
        return holder

    def _drop(self, address: int) -> None:
        entry = self.saved.get(address)
        if entry is None:
            return
        entry[0] -= 1
        self.note("u", address)
        if entry[0] == 0:
            del self.saved[address]
            self.alone.discard(address)

    def _unpack(self, holder: Any) -> torch.Tensor:
        if not isinstance(holder, _Holder):
            return holder
        address = address_of(holder.tensor)
        if address in self.alone:
            self.alone.discard(address)
            self.note("h", address)
        self.quiet = True
        out = holder.tensor.detach()
        self.quiet = False
        return out

    def look(self) -> None:
        """Who can be reached by nobody but autograd now, and who again?"""
        for address, (handles, storage) in self.saved.items():
            # One more than the handles: the Python object that was made for its address counts as well.
            alone = torch._C._storage_Use_Count(storage) == handles + 1
            if alone != (address in self.alone):
                self.note("r" if alone else "h", address)
                (self.alone.add if alone else self.alone.discard)(address)

    # -- the trace --

    def write(self, path: Path) -> None:
        """Blocks and notes in one order; storages by number."""
        lines: list[str] = []
        ids: dict[int, int] = {}
        count = 0
        position = 0

        def number(address: int) -> int | None:
            return ids.get(address - self.base)

        def blocks_until(end: int) -> None:
            nonlocal position, count
            for offset, size in self.entries[position:end]:
                if size:
                    ids[offset] = count
                    lines.append(f"a {count} {size}")
                    count += 1
                elif offset in ids:
                    lines.append(f"f {ids.pop(offset)}")
            position = max(position, end)

        for at, kind, payload in self.notes:
            if kind != "u":
                blocks_until(at)
            if kind == "b":
                dear, seconds, addresses = payload
                inputs = [n for n in map(number, addresses) if n is not None]
                lines.append(f"b {int(dear)} {seconds[0]:.9f} {len(inputs)} {' '.join(map(str, inputs))}".rstrip())
            elif kind == "e":
                made, written = payload
                for n in filter(None.__ne__, map(number, written)):
                    lines.append(f"w {n}")
                outputs = list(dict.fromkeys(n for n in map(number, made + written) if n is not None))
                lines.append(f"e {len(outputs)} {' '.join(map(str, outputs))}".rstrip())
            else:
                n = number(payload)
                if n is not None:
                    lines.append(f"{kind} {n}")
        blocks_until(len(self.entries))
        path.write_text("\n".join(lines) + "\n")


def address_of(tensor: torch.Tensor) -> int | None:
    """Of the bytes of its storage; None where there are none."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return None
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else None


def _addresses(values: Any) -> list[int]:
    found = (address_of(value) for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor))
    return list(dict.fromkeys(address for address in found if address is not None))


class _Mode(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, kwargs = self._recorder, kwargs or {}
        if recorder.quiet:
            return func(*args, **kwargs)
        recorder.look()
        written = []
        if func._schema.is_mutable:
            for index, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[index] if index < len(args) else kwargs.get(argument.name)
                    written += _addresses(value)
        inputs = _addresses((args, kwargs))
        seconds = [0.0]
        name = func.__name__
        dear = any(part in name for part in _DEAR)
        recorder.note("b", (dear, seconds, inputs))
        begun = time.perf_counter()
        out = func(*args, **kwargs)
        seconds[0] = time.perf_counter() - begun
        made = [address for address in _addresses(out) if address not in inputs]
        recorder.note("e", (made, written))
        return out


def record(training: Callable[[], Callable[[], object]], steps: int, path: Path) -> None:
    """Builds a training under the plug-in, takes its steps, and writes the trace of all of it."""
    torch.manual_seed(0)
    with Recorder() as recorder:
        step = training()
        for _ in range(steps):
            step()
        recorder.quiet = True
    recorder.write(path)


# ---- made up -----------------------------------------------------------------------------------------------------


def _chain(cells: list[tuple[int, bool]], rounds: int, seed: int, requests: Callable[[int], list[int]]) -> str:
    """Ops in a chain: (bytes, saved) each; what is not saved the program holds to the end of its round."""
    lines: list[str] = []
    count = 1
    dice = random.Random(seed)
    lines += ["a 0 65536"]
    for _ in range(rounds):
        previous, kept, held = 0, [], []
        for index, (size, saved) in enumerate(cells):
            here, count = count, count + 1
            lines += [f"b 0 {1e-6 * dice.uniform(1, 100):.9f} 1 {previous}", f"a {here} {size}", f"e 1 {here}"]
            if saved:
                lines += [f"s {here}", f"r {here}"]
                kept.append(here)
                previous = here
            else:
                held.append(here)
            for request in requests(index):
                lines += [f"a {count} {request}", f"f {count}"]
                count += 1
        for cell in reversed(kept):
            lines += [f"h {cell}", f"b 0 0.000010000 1 {cell}", f"a {count} {65536}", f"e 1 {count}", f"f {count}"]
            lines += [f"f {cell}", f"u {cell}"]
            count += 1
        lines += [f"f {cell}" for cell in held]
    return "\n".join(lines) + "\n"


def adversarial() -> dict[str, str]:
    """Traces made to hurt: nothing of a model in them.

    checkerboard: every evictable block of 256 KiB has a pinned one of 16 KiB beside it; then requests of four blocks.
    growing: each request is a little longer than any hole that was left, best fit's worst case.
    any size: evictable blocks of log-uniform sizes, every tenth pinned, requests of all sizes in between.
    """
    kib = 1024
    dice = random.Random(5)
    board = [(size * kib, saved) for _ in range(60) for size, saved in ((256, True), (16, False))]
    growing = [(64 * kib + 4096 * index, True) for index in range(100)]
    sizes = [(int(2 ** dice.uniform(14, 21)) // 512 * 512, index % 10 != 0) for index in range(160)]
    return {
        "checkerboard": _chain(board, 3, 1, lambda index: [1024 * kib] if index % 8 == 7 else []),
        "growing": _chain(growing, 3, 2, lambda index: [(96 * kib + 4096 * index) * 2] if index % 3 == 2 else []),
        "any size": _chain(sizes, 3, 3, lambda index: [int(2 ** dice.uniform(14, 22))] if index % 4 == 3 else []),
    }
