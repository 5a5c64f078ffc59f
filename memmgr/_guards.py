"""What memmgr changes in the process while a budget is open, and puts back when it closes (rule 10).

Every patch wraps a Python-level attribute of torch or threading; none survives `Guards.remove`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ._captures import METHODS, graph_classes
from ._recorder import Plain

if TYPE_CHECKING:
    from ._manager import Manager

_MISSING = object()


def _names_of(function: Any) -> list[tuple[Any, str]]:
    """(module, name) of every global that is this function."""
    found = []
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", None)
        if isinstance(space, dict):
            found += [(module, name) for name, value in list(space.items()) if value is function]
    return found


class Guards:
    """The set of patches of one manager."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._everywhere: list[tuple[Any, Any]] = []
        self.depth = threading.local()

    # -- bookkeeping --

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        # An inherited attribute is shadowed, and the shadow is deleted at the end.
        before = owner.__dict__.get(name, _MISSING) if hasattr(owner, "__dict__") else original
        wrapper = make(original)
        setattr(owner, name, wrapper)
        self._undo.append((owner, name, before, wrapper))

    def _patch_everywhere(self, original: Any, make: Callable[[Any], Any]) -> None:
        """A function that modules have imported by name, wherever one has it. A copy elsewhere (a closure) is not found."""
        wrapper = make(original)
        for module, name in _names_of(original):
            setattr(module, name, wrapper)
        self._everywhere.append((original, wrapper))

    def remove(self) -> None:
        """Undoes the patches, newest first. What somebody else wrapped meanwhile is left: it calls through ours."""
        for original, wrapper in self._everywhere:
            for module, name in _names_of(wrapper):  # also where it was imported meanwhile
                setattr(module, name, original)
        self._everywhere.clear()
        for owner, name, before, wrapper in reversed(self._undo):
            if getattr(owner, name, None) is not wrapper and owner.__dict__.get(name) is not wrapper:
                continue
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._undo.clear()

    def install(self) -> None:
        """Puts all patches in place."""
        import torch.autograd.graph as graph

        self._patch(graph, "_engine_run_backward", self._backward)
        torch.autograd._engine_run_backward = graph._engine_run_backward  # type: ignore[attr-defined]
        self._undo.append((torch.autograd, "_engine_run_backward", self._undo[-1][2], graph._engine_run_backward))
        self._patch(threading.Thread, "_bootstrap_inner", self._thread)
        self._patch(graph, "disable_saved_tensors_hooks", self._functorch)
        self._patch(torch.UntypedStorage, "resize_", self._resize)
        self._patch(torch.autograd.function.BackwardCFunction, "saved_tensors", self._saved_tensors)
        for name in ("numpy", "data_ptr", "__array__", "__dlpack__"):
            self._patch(torch.Tensor, name, self._expose)
        for name in ("_to_dlpack", "_to_dlpack_versioned"):
            if hasattr(torch._C, name):
                self._patch_everywhere(getattr(torch._C, name), self._expose)
        for name in ("data_ptr", "share_memory_", "_share_filename_cpu_", "_share_fd_cpu_"):
            self._patch(torch.UntypedStorage, name, self._expose_storage)
        triton = sys.modules.get("triton.runtime.jit")
        if triton is not None and hasattr(triton, "JITFunction"):
            self._patch(triton.JITFunction, "run", self._triton)
        for graphs in graph_classes(self._manager.device):
            for name in METHODS:
                self._patch(graphs, name, getattr(self, f"_{name}"))
        self._patch(torch.autograd.grad_mode.enable_grad, "__enter__", self._grad_enter)
        self._patch(torch.autograd.grad_mode.enable_grad, "__exit__", self._grad_exit)

    # -- backward: the one funnel under backward() and grad() --

    def _backward(self, original: Any) -> Any:
        manager, local = self._manager, self.depth

        @functools.wraps(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if not manager.open or manager.captures.under_way:
                return original(*args, **kwargs)
            depth = getattr(local, "backward", 0)
            create_graph = bool(args[3]) if len(args) > 3 else bool(kwargs.get("create_graph", False))
            # A depth that an interrupt left behind would make this thread's next backwards inner ones, that end no pass.
            with manager.native.Finally(functools.partial(setattr, local, "backward", depth)):
                local.backward = depth + 1
                with manager.backward_scope(outermost=depth == 0, create_graph=create_graph):
                    return original(*args, **kwargs)

        return run_backward

    def _grad_enter(self, original: Any) -> Any:
        manager = self._manager

        @functools.wraps(original)
        def enter(context: Any) -> None:
            original(context)
            # Grad mode is the switch, not backward: a checkpoint's recomputation is recorded (design, interposition).
            if manager.mode_is_out():
                manager.push_mode()
                context._memmgr_pushed = True

        return enter

    def _grad_exit(self, original: Any) -> Any:
        manager = self._manager

        @functools.wraps(original)
        def leave(context: Any, *exc: Any) -> Any:
            if context.__dict__.pop("_memmgr_pushed", False):
                manager.pop_mode()
            return original(context, *exc)

        return leave

    # -- threads started inside the context are managed too --

    def _thread(self, original: Any) -> Any:
        manager = self._manager

        @functools.wraps(original)
        def bootstrap(thread: threading.Thread) -> None:
            if not manager.open or getattr(thread, "memmgr_own", False):
                original(thread)
                return
            with manager.thread_scope():
                original(thread)

        return bootstrap

    # -- torch.func refuses to run under saved-tensor hooks, so ours step aside --

    def _functorch(self, original: Any) -> Any:
        manager = self._manager

        @contextmanager
        def disable(message: str, *args: Any, **kwargs: Any) -> Iterator[None]:
            with manager.hooks_aside(), original(message, *args, **kwargs):
                yield

        return disable

    # -- a custom Function is given the leaf that it saved, not a tensor made for it: `w.grad` and `w.main_grad` are the leaf's --

    def _saved_tensors(self, original: Any) -> Any:
        handles = (self._manager.native.Ref, Plain)

        def saved_tensors(context: Any) -> tuple[torch.Tensor | None, ...]:
            tensors: tuple[torch.Tensor | None, ...] = original.__get__(context)
            if not tensors:
                return tensors
            packed: list[Any] = [getattr(raw, "data", None) for raw in context._raw_saved_tensors]
            leaves = [handle.leaf if type(handle) in handles else None for handle in packed]
            return tuple(t if leaf is None else leaf for t, leaf in zip(tensors, leaves, strict=True))

        return property(saved_tensors)

    # -- writes and pointers that the dispatcher does not see --

    def _resize(self, original: Any) -> Any:
        manager = self._manager

        @functools.wraps(original)
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if not manager.open or storage.device.type != manager.device.type:
                return original(storage, size)
            with manager.unseen():
                view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                manager.recorder.before_write([view])
                result = original(storage, size)
                manager.native.overwritten(view, None)
            return result

        return resize

    def _expose(self, original: Any) -> Any:
        manager = self._manager

        @functools.wraps(original)
        def pointer(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if manager.open and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                self._exposed(tensor)
            return original(tensor, *args, **kwargs)

        return pointer

    def _exposed(self, tensor: torch.Tensor) -> None:
        native = self._manager.native
        if native.lookup(tensor) is not None and not (tensor.requires_grad and tensor.is_leaf):
            # What is gone and would be made from these bytes is made now, while they are what they were.
            self._manager.recorder.before_expose(tensor)
            native.expose(tensor)

    def _expose_storage(self, original: Any) -> Any:
        manager = self._manager

        @functools.wraps(original)
        def pointer(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            if not manager.open or storage.device.type != manager.device.type:
                return original(storage, *args, **kwargs)
            with manager.unseen():
                self._exposed(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            result = original(storage, *args, **kwargs)
            # Moving to shared memory copies, so the storage may be another cell's by now.
            with manager.unseen():
                view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                manager.native.lookup(view)
                manager.native.expose(view)
            return result

        return pointer

    # -- graphs --

    def _capture_begin(self, original: Any) -> Any:
        manager = self._manager

        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if not manager.open:
                return original(graph, *args, **kwargs)
            manager.captures.begin(graph)
            try:
                return original(graph, *args, **kwargs)
            except BaseException:
                manager.captures.end(graph)
                raise

        return capture_begin

    def _capture_end(self, original: Any) -> Any:
        manager = self._manager

        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            finally:
                manager.captures.end(graph)

        return capture_end

    def _replay(self, original: Any) -> Any:
        manager = self._manager

        @functools.wraps(original)
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if manager.open:
                manager.captures.before_replay()
            return original(graph, *args, **kwargs)

        return replay

    def _triton(self, original: Any) -> Any:
        manager = self._manager

        @functools.wraps(original)
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if not manager.open:
                return original(kernel, *args, **kwargs)
            from ._ops import tensors_in

            tensors = tensors_in([args, kwargs])
            # Any argument may be written: what was made from the old bytes must not need them any more (rule 6).
            manager.recorder.before_write(tensors)
            for tensor in tensors:
                manager.native.expose(tensor)  # rule 6: trusted by this call site, never by its op
            result = original(kernel, *args, **kwargs)
            for tensor in tensors:
                manager.native.overwritten(tensor, None)
            return result

        return run
