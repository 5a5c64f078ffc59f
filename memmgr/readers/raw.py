"""Functions that read a tensor's bytes without an op, and the guard of each (rule 9).

Three guards, by the caller:
  escaped  the address was handed out for good: the bytes stay where they are while the storage lives
  scoped   the bytes are in memory, where they are, while a call runs
  named    the address is only compared, and no byte is read: names.py
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from memmgr.common.constants import Escape

from .exported import DLPACK, exported
from .inductor import PagedGraphs
from .names import addressed_of, only_compares, pointers
from .patches import Leave, Patches

if TYPE_CHECKING:
    from memmgr.native._pager import Addressed, Pager, Pin

# Methods of untyped storages that read or write bytes themselves; True: they write.
STORAGE_METHODS = {
    "copy_": True,
    "fill_": True,
    "__setitem__": True,
    "byteswap": True,
    "_set_from_file": True,
    "resize_": True,
    "_write_file": False,
    "tolist": False,
    "__iter__": False,
}
NUMBERS = ("__float__", "__int__", "__index__", "__bool__", "__complex__")
# Modules and functions in TorchScript (traced modules have copies of the methods), and methods that write or copy all their
# tensors. Known limitation: a deep copy compares the address of each tensor right after it has made it, which
# `policy="torture"` does not allow.
SCRIPTS = (torch.jit._script.RecursiveScriptModule, torch.jit.ScriptModule, torch.jit.ScriptFunction)
SCRIPT_METHODS = (
    "save",
    "save_to_buffer",
    "_save_for_lite_interpreter",
    "_save_to_buffer_for_lite_interpreter",
    "__copy__",
    "__deepcopy__",
)
# Where torch's profilers begin and end: they note addresses from callbacks, outside of the ops.
PROFILERS = (
    (torch.autograd.profiler, "_enable_profiler", "_disable_profiler"),
    (torch.autograd.profiler_legacy, "_enable_profiler_legacy", "_disable_profiler_legacy"),
    (torch.profiler.profiler, "_enable_execution_trace_observer", "_disable_execution_trace_observer"),
)
SHARING = ("share_memory_", "_share_memory_", "_share_filename_cpu_", "_share_fd_cpu_")


def storages(values: Iterable[Any]) -> list[Addressed]:
    found: list[Addressed] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, torch.UntypedStorage):
            found.append(value._cdata)
        elif isinstance(value, torch.storage.TypedStorage):
            found.append(value._untyped_storage._cdata)
        elif isinstance(value, list | tuple):
            found += storages(value)
        elif isinstance(value, dict):
            found += storages(value.values())
    return found


def script_values(script: Any) -> Iterator[Any]:
    """The attributes of a module in TorchScript and of its children, and the constants of their graphs; those of a function."""
    functions = [script]
    if isinstance(script, torch._C.ScriptModule):
        kind = torch._C.ConcreteModuleType.from_jit_type(script._type())
        for name in kind.get_attributes():  # type: ignore[attr-defined]
            yield script.getattr(name)  # type: ignore[attr-defined]
        for _, child in torch._C.ModuleDict(script).items():
            yield from script_values(child)
        functions = [script._get_method(name) for name in script._method_names()]
    for function in functions:
        graph = function.inlined_graph  # its nodes end with it
        for node in graph.findAllNodes("prim::Constant"):
            if node.hasAttribute("value"):  # the name of a function is none
                yield node.output().toIValue()


class RawReaders:
    """The patches of one budget on torch and on other libraries that read raw bytes."""

    def __init__(self, pager: Pager, patches: Patches, graphs: PagedGraphs) -> None:
        self._pager = pager
        self._graphs = graphs
        self._patches = patches
        self._scope = threading.local()
        self.sites: Counter[tuple[str, int]] = Counter()  # the file and the line where addresses escaped

    def install(self) -> None:
        wrap = self._patches.wrap
        pointers.begin(self._pager, self._pointer)
        for exporting in exported.owners():
            for addressed in storages([exporting]):
                self._pager.escape(addressed, Escape.NUMPY)
        for storage in exported.sliced():
            self._pager.escape(storage._cdata, Escape.SLICE)
        wrap(torch.Tensor, "numpy", functools.partial(self._escaping, Escape.NUMPY))
        for owner, name in DLPACK:
            wrap(owner, name, functools.partial(self._escaping, Escape.DLPACK))
        # A table of C functions that no patch can intercept; a caller that does not find it calls __dlpack__.
        self._patches.hide(torch.Tensor, "__dlpack_c_exchange_api__")
        for name in SHARING:
            wrap(torch.UntypedStorage, name, functools.partial(self._escaping, Escape.SHARED))
        wrap(torch.UntypedStorage, "__getitem__", self._item)
        for name, writes in STORAGE_METHODS.items():
            wrap(torch.UntypedStorage, name, functools.partial(self.scoped, writes=writes))
        # `torch.tensor([p[0], p[1]])` makes numbers of them with the pager's key switched off.
        for name in NUMBERS:
            wrap(torch.Tensor, name, self._number)
        wrap(torch.Tensor, "tolist", self.scoped)
        for name in ("apply_", "map_", "map2_"):
            wrap(torch.Tensor, name, functools.partial(self.scoped, writes=True))
        for script in SCRIPTS:
            for name in SCRIPT_METHODS:
                wrap(script, name, self._of_script)
        self._profilers()
        for module in (torch, torch.random):
            wrap(module, "set_rng_state", self.scoped)
        wrap(torch._C.PyTorchFileWriter, "write_record", self.scoped)
        wrap(torch._C, "_is_alias_of", self.scoped)
        wrap(
            torch.serialization._open_zipfile_writer_file, "__init__", functools.partial(self._overwriting, argument=1)
        )
        self._patches.when_imported("safetensors.torch", self._safetensors)
        self._patches.when_imported("triton.runtime.jit", self._triton)
        self._patches.when_imported("torch._inductor.output_code", self._inductor)

    # -- scoped --

    def scoped(self, original: Callable[..., Any], *, writes: bool = False) -> Callable[..., Any]:
        """`original` with the bytes of all its tensors and storages in memory while it runs."""

        def enter(*args: Any, **kwargs: Any) -> Pin:
            return self._pager.pin(storages([*args, *kwargs.values()]), written=writes)

        return self._pager.around(original, enter)

    def _number(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """As `scoped`, for conversions to a number: they are frequent, and hardly any of their tensors is paged."""
        return self._pager.around(original, self._pager.pin_number)

    def _of_script(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same for all tensors of a module or a function in TorchScript."""

        def enter(script: Any, *_args: Any, **_kwargs: Any) -> Pin:
            return self._pager.pin(storages(script_values(getattr(script, "_c", script))))

        return self._pager.around(original, enter)

    def _profilers(self) -> None:
        """While one runs, absent tensors show no trap: its callbacks ask for addresses, and read nothing."""
        running = int(torch._C._autograd._profiler_enabled())
        self._pager.note_profiler(running > 0)

        def begins(*_args: Any, **_kwargs: Any) -> None:
            nonlocal running
            running += 1
            self._pager.note_profiler(True)

        def ended(_result: Any, _error: BaseException | None) -> None:
            nonlocal running
            running = max(0, running - 1)
            self._pager.note_profiler(running > 0)

        for module, begin, end in PROFILERS:
            self._patches.wrap(module, begin, lambda original: self._pager.around(original, begins))
            self._patches.wrap(module, end, lambda original: self._pager.around(original, lambda *_, **__: ended))

    def _pointer_in_scope(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same, for a function that asks for addresses inside: they are its own until it returns."""

        def enter(*_args: Any, **_kwargs: Any) -> Leave:
            outer = getattr(self._scope, "pins", None)
            self._scope.pins = []

            def leave(_result: Any, _error: BaseException | None) -> None:
                self._scope.pins = outer

            return leave

        return self._pager.around(original, enter)

    def _safetensors(self, module: Any) -> None:
        self._patches.wrap(module, "_tobytes", self._pointer_in_scope)
        self._patches.wrap(module, "serialize_file", functools.partial(self._overwriting, argument=1))

        def copied(original: Callable[..., Any]) -> Callable[..., Any]:
            """The result points at the tensors until the last of them is written, and they may not all fit."""
            scoped = self._pointer_in_scope(original)

            @functools.wraps(original)
            def call(tensor: torch.Tensor) -> Any:
                pin = self._pager.pin([tensor])
                try:
                    data, kept = scoped(tensor)
                    return data.copy(), kept
                finally:
                    del pin

            return call

        self._patches.wrap(module, "_to_ndarray", copied)

    def _triton(self, module: Any) -> None:
        function = getattr(module, "JITFunction", None)
        if function is not None:
            self._patches.wrap(function, "run", functools.partial(self._triton_launch))

    def _triton_launch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # Nothing says which arguments a Triton kernel writes, so it may write to any of them.
        return self._pointer_in_scope(self.scoped(original, writes=True))

    def _inductor(self, module: Any) -> None:
        self._patches.wrap(module.CompiledFxGraph, "__call__", self._unpaged_graph)

    def _unpaged_graph(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled graph that is not paged reads its inputs, its constants and its own buffers by address."""
        pager, paged = self._pager, self._graphs.paged

        def enter(graph: Any, inputs: Any) -> tuple[Pin, Pin] | None:
            if paged(graph):
                return None
            # Torch names the inputs that the graph writes.
            written = [inputs[i] for i in getattr(graph, "mutated_input_idxs", None) or () if i < len(inputs)]
            constants = getattr(graph, "constants", None) or {}
            writes = pager.pin(storages(written), written=True)
            return writes, pager.pin(storages([*inputs, *constants.values()]), region=True)

        return pager.around(original, enter)

    def _overwriting(self, original: Callable[..., Any], *, argument: int) -> Callable[..., Any]:
        """`original` overwrites the file that this argument names. Tensors that are mapped from it are read into memory first."""

        def enter(*args: Any, **kwargs: Any) -> None:
            name = args[argument] if len(args) > argument else kwargs.get("filename", kwargs.get("name"))
            if isinstance(name, str | os.PathLike):
                self._pager.forsake_file(name)

        return self._pager.around(original, enter)

    # -- escaped or named --

    def _pointer(self, original: Callable[[Any], int], owner: Any, caller: FrameType | None) -> int:
        """`data_ptr` in the budget."""
        pins = getattr(self._scope, "pins", None)
        if pins is not None:
            pins.append(self._pager.pin([addressed_of(owner)]))
        elif self._pager.in_launch(addressed_of(owner)):
            pass  # Triton's launcher hands the address on to the device
        elif only_compares(caller):
            return pointers.name(original, owner)
        elif self._pager.escape(addressed_of(owner), Escape.POINTER):
            self._note(caller)
        return original(owner)

    def _escaping(self, why: Escape, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(owner: Any, *_args: Any, **_kwargs: Any) -> None:
            self._escape(owner, why, sys._getframe(1))

        return self._pager.around(original, enter)

    def _escape(self, owner: Any, why: Escape, caller: FrameType) -> None:
        for addressed in storages([owner]):
            if self._pager.escape(addressed, why):
                self._note(caller)

    def _item(self, original: Callable[..., Any]) -> Callable[..., Any]:
        pin_item = self._pager.pin_item

        def enter(storage: Any, index: Any) -> Pin | None:
            if not isinstance(index, slice):
                return pin_item(storage._cdata)
            self._escape(storage, Escape.SLICE, sys._getframe(1))
            return None

        return self._pager.around(original, enter)

    def _note(self, frame: FrameType | None) -> None:
        if frame is not None:
            self.sites[frame.f_code.co_filename, frame.f_lineno] += 1
