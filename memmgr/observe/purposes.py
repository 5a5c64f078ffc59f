"""Tells the pager what cells are for: parameters, gradients, optimizer states. What nobody says is an activation's.

Bytes are counted by cell where they move, and by purpose where somebody asks: so nothing here is in the way of an op, and it
does not matter that a cell has moved before its purpose is known.
"""

from __future__ import annotations

import enum
import weakref
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memmgr._stock import model_states


class Purpose(enum.IntEnum):
    """The values are those of `allocator/pager/cell.h`."""

    OTHER = 0
    PARAMETER = 1
    GRADIENT = 2
    OPTIMIZER_STATE = 3


class Native(Protocol):
    """What is used of the pager."""

    def objects_of(self, types: tuple[type, ...]) -> list[Any]: ...
    def set_purpose(self, tensors: list[torch.Tensor], purpose: int) -> None: ...
    def arena_stats(self) -> dict[str, int]: ...


class Purposes:
    """The purposes of one budget's cells.

    Attributes:
        kept_bytes: the most of gradients that one backward found as an earlier one had left them but for what was written
            in between: they were set to zero, and not to None.

    Known limitations: models and optimizers are looked for at passes 1, 2, 4, 8 ... once memory has been short, when the
    budget closes, and when a reader of the telemetry asks: what is made in between counts as other until then. Gradients are
    known where their backward ends; one that an earlier end has found no parameter for is other.
    """

    def __init__(self, native: Native) -> None:
        self._native = native
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._gradients: dict[int, tuple[int, int]] = {}
        self._next = 0
        self.kept_bytes = 0

    def ended_pass(self, count: int) -> None:
        """A backward has ended in this thread."""
        if not self._native.arena_stats()["reclaims"]:
            return
        if count >= self._next:
            self._next = 2 * count
            self.look()
        found: dict[int, tuple[int, int]] = {}
        gradients: list[torch.Tensor] = []
        kept = 0
        for ref in self._parameters:
            parameter = ref()
            gradient = parameter.grad if parameter is not None else None
            if parameter is None or gradient is None:
                continue
            gradients += plain(gradient)
            which, version = found[id(ref)] = gradient._cdata, gradient._version
            # Backward adds to it in one write. A second one set it to zero; a new gradient has none, wherever it lies.
            before, then = self._gradients.get(id(ref), (0, 0))
            kept += gradient.nbytes if which == before and version >= then + 2 else 0
        self._gradients, self.kept_bytes = found, max(self.kept_bytes, kept)
        self._native.set_purpose(gradients, Purpose.GRADIENT)

    def look(self) -> None:
        """Finds models and optimizers. In any thread."""
        modules = self._native.objects_of((torch.nn.Module,))
        optimizers = self._native.objects_of((torch.optim.Optimizer,))
        parameters = {id(tensor): tensor for kind, _, tensor in model_states(modules) if kind == "parameters"}
        for optimizer in optimizers:
            for group in list(getattr(optimizer, "param_groups", [])):
                parameters.update({id(tensor): tensor for tensor in list(group["params"])})
        states = [tensor for _, _, tensor in model_states((), optimizers)]
        known = {id(ref()): ref for ref in self._parameters}
        self._parameters = [
            known.get(id(p)) or weakref.ref(p) for p in parameters.values() if p.requires_grad and p.is_leaf
        ]
        self._native.set_purpose([part for tensor in states for part in plain(tensor)], Purpose.OPTIMIZER_STATE)
        self._native.set_purpose([part for p in parameters.values() for part in plain(p)], Purpose.PARAMETER)


def plain(tensor: Any) -> list[torch.Tensor]:
    """The tensors with storages that it is made of: itself, or what is in a subclass that wraps others (a DTensor's shard)."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain(getattr(tensor, name))]
