"""Which passes are measured, and what becomes of what was seen: a file for the user (`budget(trace=)`), plans."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ._consumers import log_path
from ._trace import Measured, Tracer
from ._trace_file import write_trace

if TYPE_CHECKING:
    from ._manager import Manager


class Measuring:
    """Asks the tracer for passes, from one end of backward to the next.

    Attributes:
        last: the pass that was measured last.
    """

    def __init__(self, native: Any, manager: Manager) -> None:
        self._manager = manager
        self.tracer: Tracer | None = Tracer(native, manager)  # None: it has failed, and nothing is measured any more
        self.last: Measured | None = None
        self._ending: Measured | None = None  # the pass that is ending, if it was measured
        self._wanted = False
        self._for_file = False  # the pass that is measured is the one that the user wants
        self._written = False

    def want(self) -> None:
        """The pass that begins at the next end of a backward is measured; `last` has it at its own end."""
        self._wanted = True

    @property
    def here(self) -> bool:
        """Is a pass of this thread being measured?"""
        return self.tracer is not None and self.tracer.here

    def begin(self) -> None:
        """A pass begins."""
        config = self._manager.config
        due = self._manager.passes + 1 >= config.trace_pass
        self._for_file = config.trace is not None and not self._written and due
        if self.tracer is None or self.tracer.active or not (self._for_file or self._wanted):
            return
        if self._manager.can_trace():
            self.tracer.begin()

    def turn(self) -> None:
        """Backward begins, in a pass that is `here`."""
        assert self.tracer is not None
        self.tracer.turn()

    def end(self, completed: bool) -> None:
        """Backward has ended, in a pass that was `here`. One that failed is tried again with the next."""
        assert self.tracer is not None
        if not completed or not self._manager.open:
            self.tracer.abort()
            return
        tier = self._manager.tier()
        try:
            measured = self.tracer.end([tier] if tier is not None else [])
        except Exception as error:  # costs plans, not correctness, so it must not cost the training
            self.tracer.abort()
            self.tracer = None
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"memmgr: a pass could not be measured ({why}); please report this", stacklevel=2)
            return
        if measured is None:
            return
        self.last = self._ending = measured
        self._wanted = False
        path = self._manager.config.trace
        if path is not None and self._for_file:
            self._written = True
            try:
                write_trace(log_path(path), measured.trace)
            except OSError as error:
                warnings.warn(f"memmgr: the trace was not written: {error}", stacklevel=2)

    def take(self) -> Measured | None:
        """The pass that is ending, if it was measured; once."""
        ending, self._ending = self._ending, None
        return ending

    def abort(self) -> None:
        """Forgets the pass that is under way."""
        if self.tracer is not None:
            self.tracer.abort()
