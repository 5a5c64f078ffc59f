"""Optimizers' steps in slices of their lists, each run when it is needed; and states without bytes until they are
touched.

A `foreach` step is a dozen list ops, and each of them touches every parameter or state: paged one by one they would move all
states a dozen times. The functions that torch's optimizers call with their lists run on slices instead, so that the
tensors of a slice are restored once and evicted once. The result for one index depends on no other index, unless two
share memory: then a step stays whole.

A slice waits until an op needs the tensors that it writes: usually in the next forward. That touches the parameters one
after the other and computes during the transfers, while a step on its own has little to compute while all states move.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from memmgr.readers.captures import is_capturing
from memmgr.readers.patches import Patches

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

_PREFIXES = ("_multi_tensor_", "_fused_")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class SlicedSteps:
    """The patches on `torch.optim` of one budget; none survives `remove`.

    Known limitations: LBFGS works on flat vectors of all parameters, which are its floor. Optimizers of other packages run
    as they are; their list ops are cut one by one in the pager's kernel, and their states take memory when they are made.
    On an accelerator no slice waits once the program has used a second stream.
    """

    def __init__(self, pager: Pager, device: torch.device, small_bytes: int) -> None:
        self._pager = pager
        self._device = device
        self._small_bytes = small_bytes
        self._patches = Patches()
        self._counts: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._counting: RemovableHandle | None = None
        self._waits = False  # slices

    @property
    def count(self) -> int:
        """Steps of the optimizer that has taken most: of a training, not of a network of two."""
        return max(list(self._counts.values()), default=0)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1

    def install(self) -> None:
        """Puts the patches in place."""
        self._counting = register_optimizer_step_post_hook(self._stepped)
        for module in [module for name, module in list(sys.modules.items()) if name.startswith("torch.optim.")]:
            for name in [name for name in vars(module) if name.startswith(_PREFIXES)]:
                if getattr(vars(module)[name], "__module__", "") == module.__name__:  # AdamW's are Adam's
                    self._patches.wrap(module, name, self._sliced)
            for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
                if kind.__module__ == module.__name__ and "_init_group" in vars(kind):
                    self._patches.wrap(kind, "_init_group", self._without_bytes)
        self._pager.let_slices_wait(True)

    def remove(self) -> None:
        """Undoes the patches. Pending slices run, and no later slice waits, also in threads that are in the middle of a
        step.
        """
        self._patches.undo()
        if self._counting is not None:
            self._counting.remove()
        self._pager.let_slices_wait(False)
        self._pager.finish_pending()

    def finish(self) -> None:
        """Runs the pending slices. An error reaches the op that needs the result."""
        self._pager.finish_pending(True)

    def _without_bytes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _init_group(*args: Any, **kwargs: Any) -> Any:
            self._pager.making_states(True)
            try:
                return original(*args, **kwargs)
            finally:
                self._pager.making_states(False)

        return _init_group

    def _sliced(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def step(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling() or is_capturing(self._device):
                return original(params, *args, **kwargs)
            lists = [params, *(a for a in args if isinstance(a, list) and len(a) == len(params))]
            cuts = self._pager.cuts(lists)
            # Asked of the whole list: are there no momenta yet?
            whole_asked = original.__name__ == "_fused_sgd" and any(len({t is None for t in one}) > 1 for one in lists)
            if not cuts or whole_asked or not _alike(lists, self._device) or _speaks(lists):
                return original(params, *args, **kwargs)
            if kwargs.get("eps1", 0) is None:  # Adafactor: of the first group's type, for all groups
                kwargs["eps1"] = torch.finfo(_first_group(params)).eps
            # Once it was worth it they always do: a plan that has all of them there would make the next step another one, and
            # that one's plan the next again.
            self._waits = self._waits or any(self._pager.any_away(one) for one in lists)
            waits = self._waits and _may_wait(params, args, kwargs)
            if waits and not original.__name__.startswith("_fused_"):  # these ops do not report to autograd
                # A backward that saved one of these is told now that it has changed. The gradients have not.
                torch.autograd.graph.increment_version([t for one in lists if one is not args[0] for t in one])
            for first, end in zip(cuts, cuts[1:], strict=False):
                parts = [a[first:end] if any(a is whole for whole in lists) else a for a in (params, *args)]
                if waits and self._add_pending(original, parts, kwargs):
                    continue
                original(*parts, **kwargs)
                for whole, part in zip((params, *args), parts, strict=True):
                    if any(whole is one for one in lists):
                        whole[first:end] = part  # SGD puts its first momentum there
            return None

        return step

    def _add_pending(self, original: Callable[..., None], parts: list[Any], kwargs: dict[str, Any]) -> bool:
        """Does the slice wait? Its tensors are held by other names, which have the bytes and versions of their own.

        Small parameters never leave, so numpy's views of them from before the budget are good: these are done at once.
        """
        large = [p.nbytes >= self._small_bytes for p in parts[0]]
        if not any(large):
            return False
        small = _chosen(parts, [not each for each in large])
        parts = [[t.data for t in part] if isinstance(part, list) else part for part in _chosen(parts, large)]

        def run() -> None:
            with _not_compiling():
                original(*parts, **kwargs)

        waits = self._pager.add_pending(run, [t for part in parts if isinstance(part, list) for t in part])
        if waits and small[0]:
            original(*small, **kwargs)
        return waits


@contextlib.contextmanager
def _not_compiling() -> Iterator[None]:
    """Slices end inside code that `torch.export` traces while torch's flag says that it compiles, and then optimizers
    take other formulas. The flag is one for all threads: a value that another thread has set in the meantime stays.
    """
    flag = torch.compiler._is_compiling_flag
    off: Any = float("0")  # no other object is this one
    if flag:
        torch.compiler._is_compiling_flag = off
    try:
        yield
    finally:
        if torch.compiler._is_compiling_flag is off:
            torch.compiler._is_compiling_flag = flag


def _chosen(parts: list[Any], which: list[bool]) -> list[Any]:
    return [list(itertools.compress(part, which)) if isinstance(part, list) else part for part in parts]


def _may_wait(params: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Only steps that are determined by their numbers alone: lists of plain tensors, settings that do not change in the
    meantime, and no mode that sees the ops of its block.
    """
    if torch.is_grad_enabled() or kwargs.get("capturable") or kwargs.get("differentiable") or not args:
        return False
    if _modes():
        return False
    for value in (params, *args, *kwargs.values()):
        if isinstance(value, list):
            if value and (len(value) != len(params) or any(type(t) not in _PLAIN or t.is_inference() for t in value)):
                return False
            if any(t.layout is not torch.strided for t in value):
                return False
            if any(t.dim() and t.shape != p.shape for t, p in zip(value, params, strict=False)):
                return False  # a step that fails does so in its call
        elif not isinstance(value, bool | int | float | str | None):
            return False
    return isinstance(args[0], list)


def _modes() -> bool:
    """Is one on, other than that of `torch.set_default_device`?"""
    functions = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return torch._C._len_torch_dispatch_stack() > 0 or any(type(mode) is not DeviceContext for mode in functions)


def _alike(lists: list[list[Any]], device: torch.device) -> bool:
    """Does every slice go the way of the whole? On an accelerator torch looks at whole lists to choose between one kernel for
    all and one for each; where all tensors are of the plainest sort a slice chooses the same."""
    return device.type == "cpu" or all(t is None or t.is_contiguous() for one in lists for t in one)


def _speaks(lists: list[list[Any]]) -> bool:
    """Do ranks speak within the step? DTensors that lie in different ways go by collectives, in the order of the ops; each rank
    would cut that order at places of its own, by its budget."""
    for row in zip(*lists, strict=True):
        placed = [
            (t.device_mesh, t.placements) for t in row if type(t) not in _PLAIN and hasattr(t, "placements") and t.dim()
        ]
        if any(each != placed[0] for each in placed) or any(p.is_partial() for _, all in placed[:1] for p in all):
            return True
    return False


def _first_group(params: list[torch.Tensor]) -> torch.dtype:
    groups = torch.optim.Optimizer._group_tensors_by_device_and_dtype([[*params]])
    return next(iter(groups))[1] or params[0].dtype
