"""Which module a tensor was made in: known while the telemetry has a reader or a log, and only then.

torch's global forward hooks say where a thread is. They cost some microseconds a module call, so they are in place for a
few passes; after them the pager knows an op's module by its place in the pass. When passes go another way, some more are
learned, one in sixteen at most.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from memmgr.observe.memory_inventory import model_states, size_of
from memmgr.observe.qualified_names import LivingPaths

PLACES = (
    "(outside of modules)",
    "(backward)",
    "(parameters)",
    "(gradients)",
    "(optimizer states)",
    "(loaded or older data)",
)
"""Places that are no module, by their numbers from 1 on: `NoModule` in `allocator/pager/base/module_of_op.h`."""
BACKWARD, GRADIENTS = 1 + PLACES.index("(backward)"), 1 + PLACES.index("(gradients)")

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

LEARNED_PASSES = 4  # at a time: programs alternate


class Modules:
    """Numbers for module paths, kept for the life of a budget; number 0 is "unknown"."""

    def __init__(self, native: Pager) -> None:
        self._native = native
        self.names: list[str] = ["?", *PLACES]
        self._paths = LivingPaths(native.objects_of)
        self._numbers: dict[str, int] = {}
        self._known: dict[int, tuple[Any, int]] = {}
        self._roots: dict[int, Any] = {}
        self._optimizers: dict[int, Any] = {}
        self._local = threading.local()
        self._handles: list[Any] = []
        self._steps: Any = None
        self._rest = self._left = 0
        self._due = False

    @property
    def watching(self) -> bool:
        """A reader has connected."""
        return self._steps is not None

    def watch(self) -> None:
        """Begins to learn, with the next pass: in the middle of one a module's path is not known."""
        if self._steps is None:
            self._steps = register_optimizer_step_post_hook(self._stepped)
            self._rest = 0
            self._due = True

    def forget(self) -> None:
        """Removes all hooks."""
        if self._steps is not None:
            self._steps.remove()
            self._steps = None
        self._unhook()

    def begin(self) -> None:
        """Nothing runs yet: the first pass is learned."""
        self.watch()
        self._due = False
        if not self._handles:
            self._learn_passes()

    def _learn_passes(self) -> None:
        self._left = LEARNED_PASSES
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        self._native.set_learning(True)

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._native.set_learning(False)

    def ended_pass(self) -> None:
        """A pass is over: the next one is learned if this one went a way that is not known."""
        if self._handles:
            self._left -= 1
            if self._left <= 0:
                self._unhook()
                self._native.ops_astray()
                self._rest = 16 * LEARNED_PASSES
        elif self._due or (self._rest <= 0 and self._native.ops_astray()):
            self._due = False
            self._learn_passes()
        else:
            self._rest -= 1

    # -- hooks: in the program's threads --

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._local.__dict__.setdefault("stack", [])
        entry = self._known.get(id(module))
        if entry is None or entry[0]() is not module:
            entry = self._learn(module, stack)
        stack.append(entry[1])
        self._native.set_module(entry[1])

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._local.__dict__.get("stack")
        if stack:  # empty: the call began before we were here
            stack.pop()
            self._native.set_module(stack[-1] if stack else 0)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)

    # -- names --

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def _learn(self, module: torch.nn.Module, stack: list[int]) -> tuple[Any, int]:
        """Names the module and its children: by the path from the outermost module that has them."""
        if not stack:
            inside = {id(child) for child in module.modules()}
            self._roots = {key: root for key, root in self._roots.items() if key not in inside}
            self._roots[id(module)] = weakref.ref(module)
        for child in module.modules():
            self._known[id(child)] = (weakref.ref(child), self._number(self._paths.name(child)))
        return self._known[id(module)]

    def name(self, number: int) -> str | None:
        """The path, or one of `PLACES`; None where neither is known."""
        return self.names[number] if 0 < number < len(self.names) else None

    # -- tensors that the program holds: in the telemetry's thread --

    def holdings(self, device_type: str) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of model states: by kind, and by the module that has them.

        Walks the models and optimizers that were seen at work, not the garbage collector's list: that would keep every
        tensor of the program alive for the time of the walk, and such tensors cannot be evicted.
        """
        kinds = {"parameters": 0, "gradients": 0, "buffers": 0, "optimizer states": 0}
        modules: dict[str, int] = {}
        seen: set[int] = set()
        for key, root in list(self._roots.items()):
            model = root()
            if model is None:
                self._roots.pop(key, None)
                continue
            for child in list(model.modules()):
                name = self._paths.name(child)
                total = 0
                for kind, _, tensor in model_states((child,)):
                    if id(tensor) in seen or tensor.device.type != device_type:
                        continue
                    seen.add(id(tensor))
                    kinds[kind] += size_of(tensor)
                    gradient = self._native.gradient_bytes(tensor)
                    kinds["gradients"] += gradient
                    total += size_of(tensor) + gradient
                if total:
                    modules[name] = modules.get(name, 0) + total
        for key, found in list(self._optimizers.items()):
            optimizer = found()
            if optimizer is None:
                self._optimizers.pop(key, None)
                continue
            for kind, _, tensor in model_states((), (optimizer,)):
                if tensor.device.type == device_type:
                    kinds[kind] += size_of(tensor)
        return kinds, modules
