"""Gives the pager the purpose of cells: parameter, gradient, optimizer state. A cell without one counts as an
activation.

Bytes are counted by cell when they move, and by purpose when figures are read. So no op waits for this code, and a cell
may move before its purpose is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memmgr.common.constants import Purpose
from memmgr.common.threads import Rationed

from .memory_inventory import model_states, size_of
from .states import STATE_PURPOSES

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

OWNERS = (torch.nn.Module, torch.optim.Optimizer)


class Backwards(Protocol):
    """The attribute that is used of the passes."""

    in_several_threads: bool


class Purposes:
    """The purposes of one budget's cells.

    Attributes:
        kept_bytes: the most bytes of gradients that one backward found in place from an earlier one: they were set to
            zero, and not to None.

    Known limitations: models and optimizers are searched for when the budget opens; at passes 1, 2, 4, 8 ... once
    memory has been short or figures have been read; when the budget closes and a hundredth more is held than they
    explain; and when a reader of the telemetry asks. Before the first pass the figures search themselves, in ever fewer
    of their calls. A tensor made in between counts as other until then. Gradients are known at the end of their backward
    once memory has been short; they, and the states of known optimizers, are when figures are read, which takes at most
    a hundredth of the time. They count as other while other threads train, and while their parameters are not known.
    """

    def __init__(self, native: Pager, backwards: Backwards) -> None:
        self._native = native
        self._backwards = backwards
        # Weak references to the owners: torch refuses to swap a tensor that has weak references.
        self._owners: list[weakref.ref[Any]] = []
        self._gradients: dict[int, tuple[int, int]] = {}
        self._next = 0
        self._unknown = 0
        self._passes = 0
        self._asked, self._next_asked = 0, 1  # how often figures were read
        self._look_at_known = Rationed(0.01, self._name_what_is_known)
        self.kept_bytes = 0

    def ended_pass(self, count: int) -> None:
        """A backward has ended in this thread."""
        self._passes = count
        reclaims = self._native.arena_stats()["reclaims"]
        if (reclaims or self._asked) and count >= self._next:
            self._next = 2 * count
            if reclaims:
                self.look()
            else:
                self.look_for_new()
        if not reclaims:
            return
        found: dict[int, tuple[int, int]] = {}
        gradients: list[torch.Tensor] = []
        kept = 0
        for parameter in parameters_of(ref() for ref in self._owners):
            if not parameter.requires_grad or not parameter.is_leaf:
                continue
            # Torch 2.13 destroys the heap where a thread asks for the gradients of a model that another one trains. Between
            # this question and the look Python changes no threads.
            if self._backwards.in_several_threads:
                return
            gradient = parameter.grad
            if gradient is None:
                continue
            gradients += plain(gradient)
            which, version = found[id(parameter)] = gradient._cdata, gradient._version
            # Backward adds to it in one write. A second one set it to zero; a new gradient has none, wherever it lies.
            before, then = self._gradients.get(id(parameter), (0, 0))
            kept += size_of(gradient) if which == before and version >= then + 2 else 0
        self._gradients, self.kept_bytes = found, max(self.kept_bytes, kept)
        self._native.set_purpose(gradients, Purpose.GRADIENTS)

    def ask(self) -> None:
        """Called when figures are read, which a loop may do for every batch. A search goes over all objects of the process:
        the ends of passes have it.
        """
        self._asked += 1
        if not self._passes and self._asked >= self._next_asked and self.look_for_new():
            self._next_asked = 2 * self._asked
        self._look_at_known()

    def _name_what_is_known(self) -> None:
        """Gradients and states of the models and optimizers that are known."""
        self._name_states(self.owners())
        gradients = self._native.gradients_of(parameters_of(ref() for ref in self._owners))
        self._native.set_purpose([part for g in gradients for part in plain(g)], Purpose.GRADIENTS)
        self._unknown = min(self._unknown, self._held()[0])

    def look(self) -> None:
        """Finds models and optimizers. In any thread."""
        # One look for both: the garbage collector hands out all that it knows, half a million objects in some processes.
        self.know(self._native.objects_of(OWNERS))

    def owners(self) -> list[Any]:
        """The models and optimizers that are known."""
        return [owner for owner in (ref() for ref in self._owners) if owner is not None]

    def look_for_new(self) -> bool:
        """Finds them where more has come to stay since than they explain: a loop that opens a budget for every batch does not
        pay for a look at each end, too. Returns whether it looked."""
        unknown, known = self._held()
        found = unknown - self._unknown > known // 100
        if found:
            self.look()
        return found

    def know(self, owners: list[Any]) -> None:
        """These are the process's models and optimizers."""
        self._owners = [weakref.ref(owner) for owner in owners]
        self._name_states(owners)
        self._native.set_purpose([part for p in parameters_of(owners) for part in plain(p)], Purpose.PARAMETERS)
        self._unknown, _ = self._held()

    def _name_states(self, owners: list[Any]) -> None:
        optimizers = [owner for owner in owners if issubclass(type(owner), torch.optim.Optimizer)]
        states = [tensor for _, _, tensor in model_states((), optimizers)]
        self._native.set_purpose([part for tensor in states for part in plain(tensor)], Purpose.OPTIMIZER_STATES)

    def _held(self) -> tuple[int, int]:
        """Bytes, in memory or in the tier, without a known owner, and of all."""
        now = self._native.stats()
        held = now["resident_bytes.current"] + now["offloaded_now_bytes"]
        return held - sum(
            now[f"{name}.{kind}"] for name in ("resident_bytes", "offloaded_bytes") for kind in STATE_PURPOSES
        ), held


def parameters_of(owners: Iterable[Any]) -> list[torch.Tensor]:
    """Parameters of modules, without their children's, and of optimizers' groups; None has none."""
    found: dict[int, torch.Tensor] = {}
    for owner in owners:
        if isinstance(owner, torch.optim.Optimizer):
            for group in list(getattr(owner, "param_groups", [])):
                found.update({id(tensor): tensor for tensor in list(group["params"])})
        elif owner is not None:
            for tensor in list(owner.__dict__.get("_parameters", {}).values()):
                if isinstance(tensor, torch.Tensor):
                    found[id(tensor)] = tensor
    return list(found.values())


def plain(tensor: Any) -> list[torch.Tensor]:
    """The tensors with storages that `tensor` consists of: itself, or the inner tensors of a wrapper subclass (a
    DTensor's shard).
    """
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain(getattr(tensor, name))]
