"""`data_ptr` for code that only compares addresses: a storage has one name for its whole life, in and out of budgets.

The pager gives the names (`allocator/pager/cells/names.h`). A storage's name is its address until its bytes move, so it
agrees with earlier answers of plain torch. Once a storage has another address than its name, these callers have to get
the name between and after budgets, too: then the patch on `data_ptr` stays until the end of a budget after which there
is no such storage.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from .patches import Patches

if TYPE_CHECKING:
    from memmgr.native._pager import Addressed, Pager

# Callers that compare addresses and read nothing: module, and in it these functions (none named: all).
NAMERS: dict[str, frozenset[str]] = {
    "torch.serialization": frozenset(),
    "torch.storage": frozenset({"_to"}),
    "torch.autograd.graph": frozenset({"_get_tid", "_get_sid"}),
    "torch._tensor": frozenset({"__deepcopy__", "_reduce_ex_internal"}),
    "torch.nn.modules.rnn": frozenset(),
    "torch.distributed.checkpoint._state_dict_stager": frozenset({"_offload_tensor"}),
    "torch.distributed.fsdp._fully_shard._fsdp_param": frozenset(),
    "torch.distributed.fsdp._flat_param": frozenset(),
    "torch.distributed.fsdp._runtime_utils": frozenset(),
    "torch.distributed.utils": frozenset({"_data_ptr_allocated"}),
    # A restored storage is aligned as it was: blocks begin at multiples of 64 bytes at least.
    "torch._inductor.utils": frozenset({"copy_misaligned_inputs"}),
    "torch.export.pt2_archive._package_weights": frozenset(),
    "safetensors.torch": frozenset(),  # the last one makes bytes, which is scoped
    "transformers.modeling_utils": frozenset(),
    "transformers.pytorch_utils": frozenset(),
    "transformers.trainer": frozenset(),
    "transformers.integrations.moe": frozenset(),
    "accelerate.accelerator": frozenset(),
    "accelerate.big_modeling": frozenset(),
    "accelerate.hooks": frozenset(),
    "accelerate.utils.modeling": frozenset(),
    "huggingface_hub.serialization._torch": frozenset(),
    "peft.tuners.tuners_utils": frozenset(),
}
_PASS_ON = frozenset({"data_ptr", "_data_ptr"})  # of torch.storage: typed storages ask their untyped one

ASKED = ((torch.Tensor, "data_ptr"), (torch.Tensor, "const_data_ptr"), (torch.UntypedStorage, "data_ptr"))

Answer = Callable[[Callable[[Any], int], Any, FrameType | None], int]
"""Answers in a budget: the original `data_ptr`, the tensor or storage, and the frame of the caller."""


class Pointers:
    """The patch on `data_ptr` of tensors and untyped storages; the process has one."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._installed = False
        self._pager: Pager | None = None
        self._answer: Answer | None = None

    def begin(self, pager: Pager, answer: Answer) -> None:
        """A budget opens, and answers."""
        self._pager, self._answer = pager, answer
        if not self._installed:
            self._installed = True
            for owner, name in ASKED:
                self._patches.wrap(owner, name, self._wrapper)

    def end(self) -> None:
        """The budget has closed. The patch stays while a storage has another name than its address."""
        self._answer = None
        if self._installed and self._pager is not None and not self._pager.names_differ():
            self._installed = False
            self._patches.undo()

    def name(self, original: Callable[[Any], int], owner: Any) -> int:
        """The name of a tensor or storage."""
        name = self._pager.name(addressed_of(owner)) if self._pager is not None else None
        return original(owner) if name is None else name

    def _wrapper(self, original: Callable[[Any], int]) -> Callable[[Any], int]:
        @functools.wraps(original)
        def data_ptr(owner: Any) -> int:
            caller, answer = _caller(sys._getframe(1)), self._answer
            if answer is not None:
                return answer(original, owner, caller)
            return self.name(original, owner) if only_compares(caller) else original(owner)

        return data_ptr


pointers = Pointers()


def addressed_of(owner: torch.Tensor | torch.UntypedStorage) -> Addressed:
    """The object that the pager takes for it."""
    return owner if isinstance(owner, torch.Tensor) else owner._cdata


def _caller(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_globals.get("__name__") == "torch.storage" and frame.f_code.co_name in _PASS_ON:
        frame = frame.f_back
    return frame


def only_compares(frame: FrameType | None) -> bool:
    """Is this the frame of a function that compares addresses and reads nothing?"""
    if frame is None:
        return False
    functions = NAMERS.get(frame.f_globals.get("__name__", ""))
    return functions is not None and (not functions or frame.f_code.co_name in functions)
