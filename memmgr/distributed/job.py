"""The ranks of a distributed job: one that fails reports it, and the others stop waiting for it.

Through the default process group's store. While a budget is open a thread checks it twice a second, and the processes
of this host's ranks. A rank that leaves its budget by an exception writes that exception. If a rank's process ends
inside its budget, its neighbours report it, or the first rank that gets an error of the backend. If its host has
vanished, no connection closes: a thread of C++ sends each rank's heartbeat, and the rank before it listens. If the
store does not answer, the rank that serves it is lost. A rank that learns of a failure has `GRACE_SECONDS` to end by
itself. Then its waits are aborted: process groups by torch's own `abort`, and gloo's connections between ranks, since
gloo has no abort.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from memmgr.common.errors import BudgetError, RankError
from memmgr.common.threads import join
from memmgr.observe.error_text import rank_error
from memmgr.readers.patches import Patches

from .rank_session import LOOK_SECONDS, Figures, RankSession, Silence

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

GRACE_SECONDS = 2.0
NAMING_SECONDS = 2.5  # a backend may say that a connection is closed before a rank knows whose
_OF_A_BACKEND = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|aborted", re.IGNORECASE)


class Job:
    """The job of one open budget. Does nothing where torch.distributed is not initialised.

    `figures`: of this rank, for the summary. `pager`: its heartbeat is this rank's sign of life. `silent_seconds`: a
    rank is lost after so many seconds without a sign of life; 0: never. `quiet`: no summary will be printed. `binary`:
    errors speak in powers of two.

    Known limitations: a rank that has no budget is not named. Nor is one whose host vanishes with the store of a launcher's
    agent, or where the store is written in Python: then the backend waits for its own timeout.
    """

    def __init__(
        self,
        figures: Callable[[], Figures],
        pager: Pager,
        *,
        silent_seconds: float,
        quiet: bool,
        binary: bool = False,
    ) -> None:
        self._figures = figures
        self._pager = pager
        self._silent_seconds = silent_seconds
        self._quiet = quiet
        self._binary = binary
        self._patches = Patches()
        self._member: RankSession | None = None
        self._threads: list[threading.Thread] = []
        self._leaving = threading.Event()
        self._heard = threading.Event()
        self._trouble: dict[str, Any] | None = None  # another rank's
        self.all_figures: list[Figures] | None = []  # of the ranks; empty: this process is alone; None: rank 0 has them

    def open(self) -> None:
        """Begins to watch, now or when torch.distributed is initialised."""
        if not dist.is_available():
            return
        for module in (dist, dist.distributed_c10d):
            self._patches.wrap(module, "init_process_group", self._begins)
            self._patches.wrap(module, "destroy_process_group", self._ends)
        if dist.is_initialized():
            self._join()

    def close(self, *, failed: bool) -> None:
        """Ends this rank's part when the budget closes, in order or after `failed`."""
        self._patches.undo()
        self._leave(failed)

    def failed(self, error: BaseException) -> RankError | None:
        """Reports an exception that leaves the budget to the other ranks, unless it came from one of them.

        Returns the error to raise in its place, if another rank is the cause.
        """
        member = self._member
        if member is None or (isinstance(error, SystemExit) and not error.code):
            return None
        with contextlib.suppress(Exception):  # the store may be lost: then this error is the only report
            if _is_of_a_backend(error):
                self._heard.wait(NAMING_SECONDS)
                if self._trouble is None and (silent := member.silent()) is not None and self._trouble is None:
                    self._trouble = {"rank": silent, "error": "", "text": "", "how": "silent"}
                    member.tell(**self._trouble)
                if self._trouble is not None:
                    return rank_error(self._trouble, member.rank, binary=self._binary)
            member.tell(rank=member.rank, **_described(error))
        # The other rank's failure arrived while this error was about to be reported.
        if self._trouble is not None and _is_of_a_backend(error):
            return rank_error(self._trouble, member.rank, binary=self._binary)
        return None

    # -- membership --

    def _begins(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self._join()

        return init_process_group

    def _ends(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def destroy_process_group(group: Any = None) -> None:
            if group is None or group is dist.group.WORLD:
                self._leave()
            original(group)

        return destroy_process_group

    def _join(self) -> None:
        global _member
        if self._member is not None or dist.get_world_size() < 2:
            return
        try:
            if _member is None or _member.group is not dist.group.WORLD:
                if _member is not None:
                    _member.forget()
                _member = RankSession()
            _member.opens()
        except Exception:  # a store that cannot do this: the run goes on without
            return
        self._member = _member
        self._leaving.clear()
        self._heard.clear()
        self._trouble = None
        beats = _member.needs_no_gil and self._pager.beat(*_member.beats(), LOOK_SECONDS)
        self._begin("memmgr-job", self._watch, _member, Silence(self._silent_seconds if beats else 0))
        if beats and self._silent_seconds:
            self._begin("memmgr-job-store", self._watch_store, _member, Silence(self._silent_seconds))

    def _begin(self, name: str, *call: Any) -> None:
        thread = threading.Thread(target=call[0], args=call[1:], name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _leave(self, failed: bool = False) -> None:
        member, self._member = self._member, None
        if member is None:
            return
        self._leaving.set()
        while self._threads:
            join(self._threads.pop(), 2 * LOOK_SECONDS)
        if not self._without_store():  # it may never answer
            with contextlib.suppress(Exception):
                if not failed and not self._quiet:
                    self.all_figures = member.hand_in(self._figures())
                member.leaves()
        self._pager.beat()

    def _without_store(self) -> bool:
        return self._trouble is not None and self._trouble.get("how") == "store"

    # -- the threads --

    def _watch(self, member: RankSession, silence: Silence) -> None:
        while not self._leaving.is_set():
            try:
                trouble = self._look(member, silence)
            except Exception:  # without the store it is not known whether a rank has ended in order
                lost = member.lost_with_store()
                trouble = None if lost is None else {"rank": lost, "error": "", "text": "", "how": "store"}
            if self._heard.is_set():
                return
            if trouble is not None and trouble["rank"] != member.rank:
                self._hear(member, trouble)
                return
            self._leaving.wait(LOOK_SECONDS)

    def _watch_store(self, member: RankSession, silence: Silence) -> None:
        # Where its host has vanished a question to it never ends, so the thread that asks cannot tell.
        while not self._leaving.wait(LOOK_SECONDS) and not self._heard.is_set():
            if silence.is_too_long(self._pager.beats()) and (host := member.host()) is not None:
                self._hear(member, {"rank": host, "error": "", "text": "", "how": "store"})

    def _hear(self, member: RankSession, trouble: dict[str, Any]) -> None:
        self._trouble = trouble
        self._heard.set()
        self._abort(member)

    def _look(self, member: RankSession, silence: Silence) -> dict[str, Any] | None:
        member.look_around()
        trouble = member.next_trouble()
        if trouble is None and (trouble := member.lost_neighbour(silence)) is not None:
            member.tell(**trouble)
        if trouble is None:
            for rank in member.ended():
                if member.state(rank).startswith("open"):
                    trouble = {"rank": rank, "error": "", "text": ""}
                    member.tell(**trouble)
                    break
        return trouble

    def _abort(self, member: RankSession) -> None:
        cut = member.cut_accepted if self._without_store() else member.cut_connections
        if self._leaving.wait(GRACE_SECONDS):
            return
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(Exception):  # not all backends have it
                group.abort()
        while not self._leaving.wait(LOOK_SECONDS):  # others may show theirs later
            with contextlib.suppress(Exception):
                cut()


_member: RankSession | None = None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and the errors that caused it."""
    met: set[int] = set()
    while error is not None and id(error) not in met:
        yield error
        met.add(id(error))
        error = error.__cause__ or error.__context__


def _is_of_a_backend(error: BaseException) -> bool:
    """Could it be the end of a wait for another rank?"""
    for each in _chain(error):
        ours = isinstance(each, torch.OutOfMemoryError)
        if isinstance(each, RuntimeError) and not ours and _OF_A_BACKEND.search(str(each)):
            return True
        if isinstance(each, dist.DistError):
            return True
    return False


def _budget_error(error: BaseException) -> BudgetError | None:
    """The BudgetError that the error was raised from; an error handled before does not count."""
    while not isinstance(error, BudgetError):
        if error.__cause__ is None:
            return None
        error = error.__cause__
    return error


def _described(error: BaseException) -> dict[str, Any]:
    error = _budget_error(error) or error  # pipelining raises errors of its own for those of a stage
    text = str(error).strip().splitlines()
    sizes = {name: int(getattr(error, name, 0)) for name in ("budget_bytes", "floor_bytes", "enough_bytes")}
    return {"error": type(error).__name__, "text": text[0][:500] if text else "", **sizes}
