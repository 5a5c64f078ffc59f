"""Collects the facts for a BudgetError: torch's words, the holders of the memory, the floor. error_text.py writes its text."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memmgr.common.constants import Escape
from memmgr.common.errors import BudgetError
from memmgr.config.sizes import UNLIMITED
from memmgr.native.device import out_of_memory_words
from memmgr.readers.patches import Patches

from .advice import fixed_memory
from .error_text import (
    SPENT,
    Ahead,
    Exports,
    FailedOp,
    HeldBytes,
    Spent,
    failed_tier,
    is_full,
    torchs_own_words,
)
from .kept_results import kept_results
from .loops import Loop, loop_around
from .memory_inventory import (
    Census,
    has_sparse_gradients,
    holders,
    missing_states,
    states_below,
    step_bytes,
    update_bytes,
)
from .passes import Passes
from .rehearsal import Rehearsal, in_step, module_call, transformed
from .source_lines import SourceLine

if TYPE_CHECKING:
    from memmgr.native._pager import Pager
    from memmgr.runtime.config import Config

LOSS = 1.78
"""The memory of an op of backward over that of the largest of the forward: it holds three tensors where that held two, and a
convolution takes more for itself. Found, as the next, with the models of tests/budget."""

GROWS = 1.27
"""The most memory of an op of backward, over the one that found no room."""

HIDDEN_BYTES = 8 << 20
"""Fewer hidden bytes are taken for those of the op that has failed, and are not reported."""

AGAIN = 1.2
"""Without a tier: the factor for tensors recomputed beside an op, and for gradients that wait for others."""


HAS_ADDRESSES = {
    Escape.POINTER: "A caller of data_ptr()",
    Escape.NUMPY: "NumPy",
    Escape.DLPACK: "DLPack",
    Escape.SHARED: "Shared memory",
}


def of_torchs(spent: Callable[[str], BudgetError | None]) -> Callable[..., BaseException]:
    """A `__new__` of torch's out-of-memory error: one that quotes memmgr's allocator becomes the result of `spent` on its text,
    unless that is None.

    All code of C++ that allocates outside of an op (`torch.tensor` of a list) ends with that class, and has no other hook.
    """

    def new(kind: type[torch.OutOfMemoryError], *args: Any) -> BaseException:
        ours = kind is torch.OutOfMemoryError and len(args) == 1 and SPENT in str(args[0])
        return (spent(str(args[0])) if ours else None) or RuntimeError.__new__(kind, *args)

    return new


class Explainer:
    """Makes the errors of one budget, where memory ran out: nothing of the pager is locked there.

    Args:
        happened: told of each, while `detail` says that somebody looks (`Telemetry.happened`).
        compiled: the compiled model that the calling thread is in, by its name; empty: none.
        leak: a sentence about the largest leak; empty: there is none.
        lines: source lines by their numbers.

    Attributes:
        refused: a request has found no room since the last whole pass.
    """

    def __init__(
        self,
        asked: Config,
        native: Pager,
        passes: Passes,
        happened: Callable[..., None],
        detail: Callable[[], bool],
        compiled: Callable[[], str] = lambda: "",
        leak: Callable[[], str] = lambda: "",
        lines: Callable[[], Sequence[SourceLine | None]] = lambda: (),
    ) -> None:
        self._asked = asked
        self._native = native
        self._passes = passes
        self._happened = happened
        self._detail = detail
        self._compiled = compiled
        self._leak = leak
        self._lines = lines
        self.refused = False
        self._patches = Patches()
        # Pairs of the allocator's text and the error, of all threads.
        self._spent: deque[tuple[str, BudgetError]] = deque(maxlen=16)

    def begin(self) -> None:
        """From here on torch's out-of-memory errors that quote the allocator are ours."""
        self._patches.wrap(torch.OutOfMemoryError, "__new__", lambda _: of_torchs(self._outside))

    def end(self) -> None:
        """Undoes it."""
        self._patches.undo()

    def _outside(self, text: str) -> BudgetError | None:
        """The error of a request outside of an op. A compiled graph reads the refusal from the allocator itself."""
        return None if self._compiled() else self.spent(text)

    def spent(self, text: str) -> BudgetError:
        """This thread found no room; `text` is the allocator's."""
        if self._asked.limit_bytes < UNLIMITED:  # else the system has refused it, and no budget is large enough
            self._native.note_refused()
        self.refused = True
        census = Census(self._native)
        held = self._held_bytes(census)
        op = FailedOp(**self._native.failed_op())
        error = self._error(torchs_own_words(text), held, census, failed=failed_tier(text), op=op)
        if self._detail():
            self._happened(
                "budget_error",
                floor_bytes=error.floor_bytes,
                enough_bytes=error.enough_bytes,
                resident=held.kinds,
                modules=dict(held.modules),
                details=list(error.details),
                error=str(error),
                text=text.splitlines()[0],
            )
        self._spent.append((text.splitlines()[0], error.copy()))
        return error

    def meant_by(self, error: RuntimeError) -> BudgetError | None:
        """The error to raise for torch's: the one of `spent` that it quotes, or a new one if C++ found no room."""
        text = str(error)
        for said, told in reversed(tuple(self._spent)):
            if said in text or told.headline in text:
                return told.copy()
        return self.spent(text) if isinstance(error, torch.OutOfMemoryError) and SPENT in text else None

    def too_big(self, there_bytes: int) -> BudgetError:
        """The error for resident memory that does not fit when the budget opens, and cannot leave."""
        census = Census(self._native)
        words = out_of_memory_words(self._asked.device)
        return self._error(words, self._held_bytes(census), census, there_bytes=there_bytes)

    def kept(self, known: list[torch.Tensor] | None = None, *, graphs: bool = False) -> str:
        """Sentences about the results that a loop without a backward keeps, a validation for one; empty: there are few.

        Args:
            known: the tensors of Python, where they have been searched for.
            graphs: only results that keep their graphs count.
        """
        if self._passes.in_backward or (self._passes.count and torch.is_grad_enabled()):
            return ""
        known = self._native.objects_of((torch.Tensor,)) if known is None else known
        found = kept_results(self._native, known, self._lines())
        if found is None or (graphs and not found.keeps_graphs):
            return ""
        return found.text(self._asked.device, binary=self._asked.binary)

    def _error(
        self,
        first: str,
        held: HeldBytes,
        census: Census,
        failed: tuple[str, str] | None = None,
        there_bytes: int = 0,
        op: FailedOp | None = None,
    ) -> BudgetError:
        tier, now = self._native.tier_stats(), self._native.stats()
        ahead, floor_bytes = self._ahead(held, now, census, below=bool(tier)), now["floor_bytes"]
        if failed is not None and not is_full(failed):  # nobody can count on that one, as the floor does
            tier, floor_bytes = {}, floor_bytes + held.states_bytes
        return Spent(
            first,
            held,
            budget_bytes=self._asked.limit_bytes,
            so_far_bytes=floor_bytes,
            untried_bytes=0 if tier else now["untried_bytes"],
            below_bytes=tier.get("used_peak_bytes", 0),
            room_bytes=tier.get("capacity_bytes", 0),
            ahead=ahead,
            binary=self._asked.binary,
            states_stay=not tier,
            compiled=self._compiled(),
            hidden_bytes=self._hidden_bytes(held),
            failed=failed,
            there_bytes=there_bytes,
            op=op or FailedOp(),
            exports=self._exports(now, loop_around(census)),
            trains=self._trains(),
            fixed=fixed_memory(now, self._asked.limit_bytes, binary=self._asked.binary),
            leak=self._leak(),
            kept=self.kept(census.objects_of((torch.Tensor,))),
        ).error()

    def _trains(self) -> bool:
        return (self._passes.in_backward or in_step()) and not transformed()

    def _exports(self, now: dict[str, int], loop: Loop | None) -> Exports:
        count = now["exported_cells"]
        by = HAS_ADDRESSES.get(Escape(now["exported_why"])) if count else None
        left = None
        if loop is not None:  # this turn's is not exported yet
            left = (loop.left + 1) * max(1, round(count / loop.done) if loop.done else 1)
        grow = count > 0 and (not self._trains() or self._passes.count < 2 or self._passes.exports_grow)
        return Exports(count, now["exported_bytes"], by, left, grow) if by else Exports()

    def _hidden_bytes(self, held: HeldBytes) -> int:
        """Bytes of the device's allocator that no tensor has: cuBLAS takes 32 MiB and more for each stream."""
        if self._asked.device.type == "cpu":
            return 0
        hidden = self._native.resident() - sum(held.kinds.values())
        return hidden if hidden > HIDDEN_BYTES else 0

    def _ahead(self, held: HeldBytes, now: dict[str, int], census: Census, *, below: bool) -> Callable[[], Ahead]:
        """Estimates the rest by where this thread is: a forward is rehearsed, a backward follows its forward, an update is last.

        Args:
            below: there is a tier below, so that model states are no part of the floors so far.

        Returns:
            A function that returns the estimate; separate, since a rehearsal takes time.
        """
        passes, states = self._passes, held.states_bytes + held.missing_bytes
        moved = held.states_bytes if below else 0
        if passes.in_backward and not passes.count and not transformed():  # gradients are being made
            forward = passes.forward_floor_bytes
            work = forward - (0 if below else held.states_bytes - held.kinds.get("gradients", 0))
            most = max(LOSS * forward, GROWS * now["floor_bytes"])
            return functools.partial(Ahead, int(most), int(states + AGAIN * LOSS * max(0, work)))
        otherwise = self._without_rehearsal(held, now, census, moved)
        call = None if passes.in_backward or transformed() else module_call()
        if call is None:
            return lambda: otherwise
        rehearsal, compiled, name = Rehearsal(*call), self._compiled(), "" if in_step() else type(call[0]).__name__
        loop = loop_around(census) if name else None
        calls = loop.left + 1 if loop is not None and loop.gathers else 0
        stays = now["resident_bytes.current"] - now["resident_cell_bytes"] + now["escaped_bytes"]

        def ahead() -> Ahead:
            found = rehearsal.found()
            if found is None:
                return otherwise
            if compiled:  # nothing leaves in its graph, and its backward is given all that its forward has saved
                whole = states + found.inputs_bytes + found.made_bytes + found.op_bytes
                return Ahead(whole, whole, True, name, calls, found.outputs_bytes)
            made = int(AGAIN * (found.inputs_bytes + found.activations_bytes))
            return Ahead(stays + found.op_bytes, states + made, True, name, calls, found.outputs_bytes)

        return ahead

    def _without_rehearsal(self, held: HeldBytes, now: dict[str, int], census: Census, moved: int) -> Ahead:
        passes = self._passes
        if not passes.count or not held.step_bytes:  # without an optimizer no two passes need be alike
            return Ahead(int(LOSS * now["floor_bytes"]))
        coming = missing_states(census, self._asked.device, gradients=False)
        if passes.count == 1 or not passes.steps_before:
            # No backward was beside the states that the first update makes.
            # Some of them may be gone again: zeros are made from nothing.
            made = held.kinds.get("optimizer states", 0) + held.below_bytes
            # An update of sparse gradients makes one result of their size after the other.
            results = held.kinds.get("other tensors", 0) if in_step() and has_sparse_gradients(census) else 0
            least = now["floor_bytes"] + results
            return Ahead(0, max(least, int(AGAIN * (passes.backward_floor_bytes + max(moved, made) + coming))))
        return Ahead(0, now["floor_bytes"] + moved + coming)

    def _held_bytes(self, native: Census) -> HeldBytes:
        device = self._asked.device
        kinds, modules = holders(native, device, rest=self._native.resident_cells())
        missing = missing_states(native, device)
        return HeldBytes(
            kinds,
            modules,
            missing,
            step_bytes(native, device),
            update_bytes(native, device),
            states_below(native),
            missing - missing_states(native, device, history=False),
        )
