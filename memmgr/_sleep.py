"""When the last passes fitted, nothing is recorded; a surprise is met after the fact.

With room to spare two such passes are enough; without, it takes more of them, and after each surprise twice as many.
Asleep, neither the mode nor the hooks are on the thread's stacks, so an op costs what it costs without memmgr; the
allocator still keeps the budget. When it runs out, the saved tensors of the pass that is under way are found through
the autograd graph and get their hooks then: they become handles and can be offloaded. Where there is nothing to offload to
(policies that only evict; a tier smaller than the budget), there is no sleep: what nobody recorded cannot be made again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ._stock import live_nodes, raw_saved

if TYPE_CHECKING:
    from ._manager import Manager

SPARE = 0.9  # a pass left room to spare when it needed at most this share of the budget
CALM_PASSES = 2  # so many such passes in a row put the recorder to sleep
TIGHT_PASSES = 8  # so many that fitted at all do as well
MOST_TIGHT_PASSES = 1024  # where surprises keep coming


def hooks_on_top() -> Any:
    """The innermost saved-tensor hooks of this thread, or None."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        return None
    try:
        return top(False)
    except TypeError:
        return top()


def adopt_graph(manager: Manager) -> int:
    """Gives hooks to every saved tensor that the live graphs hold; returns how many.

    Runs in any thread while the others are between bytecodes or blocked in malloc: it only touches saved variables of
    nodes that are already built.
    """
    native = manager.native
    adopted = 0
    for node in live_nodes(native):
        for name, found in raw_saved(node):
            found = [saved for saved in found if not _is_a_leaf(saved)]
            if not all(_may_have_hooks(saved) for saved in found) or _was_written(node, name):
                continue
            for saved in found:
                try:
                    saved.register_hooks(native.pack, native.unpack)
                    adopted += 1
                except RuntimeError:
                    continue  # is empty
    return adopted


def _is_a_leaf(saved: Any) -> bool:
    """A parameter, which cannot leave: with hooks a custom Function would get another tensor in its stead."""
    data = getattr(saved, "data", None)
    if not isinstance(data, torch.Tensor):
        return False
    return isinstance(data, torch.nn.Parameter) or (data.requires_grad and data.is_leaf)


def _may_have_hooks(saved: Any) -> bool:
    """Has it none yet, neither ours nor the program's, and is it a tensor that can leave?

    A subclass cannot (FSDP's, nested ones), and may not bear the detour below autograd. Nor may the wrappers of torch.func's
    transforms, which refuse hooks on the stack: what is packed below them loses its level.
    """
    # Older torches may lack these: then registering refuses what has hooks.
    if getattr(saved, "unpack_hook", None) is not None:
        return False
    data = getattr(saved, "data", None)
    if data is None:
        return True  # nothing was saved, or it was released: registering says so
    if type(data) not in (torch.Tensor, torch.nn.Parameter) or data.layout is not torch.strided:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(data)


def _was_written(node: Any, raw_name: str) -> bool:
    """Was one of these modified since it was saved? Hooks would take the place of autograd's own check (rule 8).

    Only for what has no hooks: reading it is no more than that check then.
    """
    name = raw_name.removeprefix("_raw")
    try:
        getattr(node, name if hasattr(type(node), name) else "saved_tensors")  # the latter: a custom Function
    except RuntimeError:
        return True
    return False


class Sleeper:
    """Decides at the end of each pass whether the next one is recorded."""

    def __init__(self, manager: Manager, allowed: bool) -> None:
        self._manager = manager
        self._allowed = allowed
        self.asleep = False
        self._spared = self._fitted = 0  # passes in a row
        self._patience = TIGHT_PASSES
        self.surprises = 0

    def end_of_pass(self, needed_bytes: int) -> None:
        """Called with what the pass would have needed unmanaged, in the thread that ran its backward."""
        if not self._allowed:
            return
        limit_bytes = self._manager.config.limit_bytes
        fits = needed_bytes <= limit_bytes and self.surprises == 0
        self._fitted = self._fitted + 1 if fits else 0
        self._spared = self._spared + 1 if fits and needed_bytes <= SPARE * limit_bytes else 0
        self.surprises = 0
        spared, fitted = self._spared >= CALM_PASSES, self._fitted >= self._patience
        if not self.asleep:
            if (spared or fitted) and self._can_meet_surprises():
                self._sleep()
        elif not fits:
            self._patience = min(2 * self._patience, MOST_TIGHT_PASSES)
            self.wake()
        elif not spared and not fitted:
            self.wake()

    def _can_meet_surprises(self) -> bool:
        """Asleep nothing can be evicted: what a larger pass has too much goes to a tier that can hold it."""
        manager = self._manager
        if not manager.has_tier:
            return False
        room = int(manager.native.tier_stats()["capacity_bytes"])  # 0: as much as the disk has
        return room == 0 or room >= manager.config.limit_bytes

    def _sleep(self) -> None:
        manager = self._manager
        native = manager.native
        if not manager.ours_on_top():
            return
        # Drops need watched writes, and nothing is watched now: from here on only copies. What was dropped already (of a
        # graph that is kept) may need what is overwritten next.
        if native.pressure()[3] and manager.replayer.dropped():
            return
        with native.Finally(self._fall_asleep):
            pass
        manager.telemetry.happened("sleep")

    def _fall_asleep(self) -> None:
        manager = self._manager
        manager.native.forget_recipes()
        manager.native.set_options(False, True, manager.config.verify, 0)
        manager.native.set_watching(False)
        manager.step_out()
        self.asleep = True

    def wake(self) -> None:
        """Records again, if nobody else's mode or hooks are in the way; else the next end of a pass tries again."""
        manager = self._manager
        if not manager.can_step_in():
            return
        with manager.native.Finally(self._wake):
            pass
        manager.telemetry.happened("wake")

    def _wake(self) -> None:
        manager = self._manager
        manager.step_in()
        manager.native.forget_recipes()  # of other threads, which went on recording
        manager.restore_options()
        manager.native.set_watching(True)
        self.asleep = False
