"""The ranks of a distributed job: one that is in trouble says so, and the others stop waiting for it.

Through the default process group's store. While a budget is open a thread looks there twice a second, and at the processes of
this host's ranks. A rank that leaves its budget by an exception writes what it was; one whose process ends inside its budget
is written down by its neighbours, or by the first rank that an error of the backend tells of it: the one whose thread looks no
more. Where the store is gone, so is the rank that had it. Who hears of it has `GRACE_SECONDS` to end by itself. Then what it
waits for is aborted: process groups by torch's own `abort`, and connections between ranks, since gloo has no abort.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import json
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from memmgr._errors import BudgetError, RankError, rank_error
from memmgr.readers.patches import Patches

LOOK_SECONDS = 0.5
GRACE_SECONDS = 2.0
NAMING_SECONDS = 2.5  # a backend may say that a connection is closed before anybody knows whose
SILENT_SECONDS = 4.0  # of a rank that looks no more, after that: eight looks
CONNECT_SECONDS = 2.0
ENOUGH_LOOKS = 4
MOST_UNANSWERED = 3  # by a store that does not refuse: it may be busy
FIGURES_SECONDS = 2.0
_OF_A_BACKEND = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|aborted", re.IGNORECASE)

Figures = dict[str, Any]


class Member:
    """This process as a rank of one process group: what it knows of the others. Budgets come and go meanwhile."""

    def __init__(self) -> None:
        c10d: Any = dist.distributed_c10d
        self.group = dist.group.WORLD
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        store = c10d._get_default_store()
        self._address = _address(store)
        self._host: int | None = None  # the rank that has the store
        self._host_has_left = False
        self._looks = 0
        self._unanswered = 0
        self._left = 0.0
        ports = os.environ.get("MASTER_PORT", ""), self._address[1] if self._address is not None else ""
        self._ports = {int(port) for port in ports if str(port).isdecimal()}
        # A client of its own: another one's `get` may hold its lock for minutes.
        self._store = c10d.PrefixStore("memmgr", store.clone())
        self._store.set_timeout(datetime.timedelta(seconds=2))
        self._place = _place()
        self._neighbours: dict[int, int] = {}  # rank: pidfd
        self._entries = 0
        self.seen = 0  # troubles
        self.budgets = 0
        me = self._store.add(f"place/{self._place}", 1)
        self._store.set(f"place/{self._place}/{me}", f"{self.rank} {os.getpid()}")
        if self._address is not None and self._address[1] in _listening():
            self._store.set("host", str(self.rank))
            atexit.register(self._linger)

    def opens(self) -> None:
        """A budget opens: what was told before is over where its rank has a budget again."""
        while (trouble := self.next_trouble()) is not None:
            state = self.state(trouble["rank"]).split()
            if trouble["rank"] != self.rank and not (state[0] == "open" and int(state[1]) >= self.seen):
                self.seen -= 1  # it is in trouble still: the thread hears of it
                break
        self.budgets += 1
        self._store.set(f"state/{self.rank}", f"open {self.seen} {self.budgets}")

    def leaves(self) -> None:
        """The budget has closed."""
        self._store.set(f"state/{self.rank}", f"left {self.seen} {self.budgets}")
        self._left = time.monotonic()

    def _linger(self) -> None:
        """Who has the store takes it along, so the others first hear that it has left in order."""
        time.sleep(max(0.0, self._left + 2 * LOOK_SECONDS - time.monotonic()))

    def state(self, rank: int) -> str:
        """`open` or `left`, the troubles that it knew when it opened, which of its budgets it is."""
        key = f"state/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else "none 0 0"

    def tell(self, **trouble: Any) -> None:
        """Tells all ranks."""
        number = self._store.add("troubles", 1)
        self._store.set(f"trouble/{number}", json.dumps(trouble))

    def next_trouble(self) -> dict[str, Any] | None:
        """What has been told and not been heard."""
        key = f"trouble/{self.seen + 1}"
        if not self._store.check([key]):
            return None
        self.seen += 1
        return dict(json.loads(self._store.get(key)))

    def ended(self) -> list[int]:
        """The ranks of this host whose processes are gone."""
        while self._store.check([key := f"place/{self._place}/{self._entries + 1}"]):
            self._entries += 1
            rank, pid = (int(word) for word in self._store.get(key).split())
            if rank != self.rank:
                with contextlib.suppress(OSError):
                    self._neighbours[rank] = _pidfd(pid)
        poll = select.poll()
        for fd in self._neighbours.values():
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        gone = {fd for fd, _ in poll.poll(0)}
        return [rank for rank, fd in self._neighbours.items() if fd < 0 or fd in gone]

    def beat(self) -> None:
        """Says that this rank looks, and learns who has the store while it can be asked."""
        self._store.add(f"beat/{self.rank}", 1)
        if self._host is None and self._store.check(["host"]):
            self._host = int(self._store.get("host"))
        self._looks += 1
        if self._host is not None and self._host != self.rank:
            self._host_has_left = self.state(self._host).startswith("left")

    def silent(self) -> int | None:
        """Another rank that is open and does not look any more. Takes `SILENT_SECONDS`."""
        before = self._beats()
        time.sleep(SILENT_SECONDS)
        after = self._beats()
        return next((rank for rank, beats in before.items() if after.get(rank) == beats), None)

    def _beats(self) -> dict[int, int]:
        others = [rank for rank in range(self.world) if rank != self.rank and self.state(rank).startswith("open")]
        return {rank: self._store.add(f"beat/{rank}", 0) for rank in others}

    def lost_with_store(self) -> int | None:
        """The rank that had the store, if that cannot be reached any more and the rank had not left its budget."""
        of_an_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._host is None and self._looks < ENOUGH_LOOKS and not of_an_agent:
            self._host = 0  # as torch has it; there was no time to hear it
        if self._address is None or self._host in (None, self.rank) or self._host_has_left:
            return None
        try:
            socket.create_connection(self._address, CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            return self._host
        except OSError:
            self._unanswered += 1
            return self._host if self._unanswered >= MOST_UNANSWERED else None
        self._unanswered = 0
        return None

    def forget(self) -> None:
        """Its process group is gone, and another one takes its place."""
        for fd in self._neighbours.values():
            if fd >= 0:
                os.close(fd)
        self._neighbours.clear()

    # -- what others wait for --

    def show_connections(self) -> None:
        """Says which connections are this rank's, so that who has the other end knows that it leads here."""
        mine = [f"{c.laddr.ip}:{c.laddr.port}" for c in self._connections()]
        self._store.set(f"ends/{self.rank}", json.dumps(mine))

    def cut_connections(self) -> None:
        """Shuts those to other ranks: what waits there for bytes gets an error of its backend."""
        theirs: set[str] = set()
        for rank in range(self.world):
            key = f"ends/{rank}"
            if rank != self.rank and self._store.check([key]):
                theirs.update(json.loads(self._store.get(key)))
        for c in self._connections():
            if f"{c.raddr.ip}:{c.raddr.port}" in theirs:
                _shut(c)

    def cut_accepted(self) -> None:
        """Without a store nobody can say where a connection leads. Each rank shuts what it has accepted: together all."""
        mine = _listening()
        for c in self._connections():
            if c.laddr.port in mine:
                _shut(c)

    def _connections(self) -> Iterator[Any]:
        for c in psutil.Process().net_connections("tcp"):
            # Without the store's own.
            if c.status == psutil.CONN_ESTABLISHED and not {c.laddr.port, c.raddr.port} & self._ports:
                yield c

    # -- figures --

    def hand_in(self, figures: Figures) -> list[Figures] | None:
        """Rank 0 gets those of all ranks that have a budget; None: this is another rank."""
        self._store.set(f"figures/{self.budgets}/{self.rank}", json.dumps(figures))
        if self.rank != 0:
            return None if self.state(0) != "none 0 0" else [figures]
        found, deadline = {0: figures}, time.monotonic() + FIGURES_SECONDS
        while True:
            # First: who leaves has handed in.
            are_open = {rank for rank in range(self.world) if self.state(rank).startswith("open")}
            for rank in range(self.world):
                key = f"figures/{self.budgets}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = json.loads(self._store.get(key))
            if found.keys() >= are_open or time.monotonic() > deadline:
                return list(found.values())
            time.sleep(0.02)


class Job:
    """The job of one open budget. Does nothing where torch.distributed is not initialised.

    Args:
        figures: of this rank, for the summary.
        quiet: there will be none.
        binary: errors speak in powers of two.

    Known limitations: a rank that has no budget is not named. A host that is lost without closing its connections is named once
    the backend has waited for its own timeout.
    """

    def __init__(self, figures: Callable[[], Figures], *, quiet: bool, binary: bool = False) -> None:
        self._figures = figures
        self._quiet = quiet
        self._binary = binary
        self._patches = Patches()
        self._member: Member | None = None
        self._thread: threading.Thread | None = None
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
        """The budget closes, in order or because of what `failed` was told."""
        self._patches.undo()
        self._leave(failed)

    def failed(self, error: BaseException) -> RankError | None:
        """An exception leaves the budget: the other ranks are told, unless it came from one of them.

        Returns:
            What to raise in its place: another rank is the cause.
        """
        member = self._member
        if member is None or (isinstance(error, SystemExit) and not error.code):
            return None
        with contextlib.suppress(Exception):  # the store may be gone: then this error is all there is
            if _is_of_a_backend(error):
                self._heard.wait(NAMING_SECONDS)
                if self._trouble is None and (silent := member.silent()) is not None and self._trouble is None:
                    self._trouble = {"rank": silent, "error": "", "text": "", "how": "silent"}
                    member.tell(**self._trouble)
                if self._trouble is not None:
                    return rank_error(self._trouble, member.rank, binary=self._binary)
            member.show_connections()
            member.tell(rank=member.rank, **_described(error))
        if self._trouble is not None and _is_of_a_backend(error):  # heard while this one was about to be told
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
                _member = Member()
            _member.opens()
        except Exception:  # a store that cannot do this: the run goes on without
            return
        self._member = _member
        self._leaving.clear()
        self._heard.clear()
        self._trouble = None
        self._thread = threading.Thread(target=self._watch, args=(_member,), name="memmgr-job", daemon=True)
        self._thread.start()

    def _leave(self, failed: bool = False) -> None:
        member, self._member = self._member, None
        if member is None:
            return
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(2 * LOOK_SECONDS)
        with contextlib.suppress(Exception):
            if not failed and not self._quiet:
                self.all_figures = member.hand_in(self._figures())
            member.leaves()

    # -- the thread --

    def _watch(self, member: Member) -> None:
        while not self._leaving.is_set():
            try:
                trouble = self._look(member)
            except Exception:  # without the store nobody knows whether a rank has ended in order
                lost = member.lost_with_store()
                trouble = None if lost is None else {"rank": lost, "error": "", "text": "", "how": "store"}
            if trouble is not None and trouble["rank"] != member.rank:
                self._trouble = trouble
                self._heard.set()
                self._abort(member)
                return
            self._leaving.wait(LOOK_SECONDS)

    def _look(self, member: Member) -> dict[str, Any] | None:
        member.beat()
        trouble = member.next_trouble()
        if trouble is None:
            for rank in member.ended():
                if member.state(rank).startswith("open"):
                    trouble = {"rank": rank, "error": "", "text": ""}
                    member.tell(**trouble)
                    break
        return trouble

    def _abort(self, member: Member) -> None:
        without_store = self._trouble is not None and self._trouble.get("how") == "store"
        cut = member.cut_accepted if without_store else member.cut_connections
        with contextlib.suppress(Exception):
            member.show_connections()
        if self._leaving.wait(GRACE_SECONDS):
            return
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(Exception):  # not all backends have it
                group.abort()
        while not self._leaving.wait(LOOK_SECONDS):  # others may show theirs later
            with contextlib.suppress(Exception):
                cut()


_member: Member | None = None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was raised for."""
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
    """Only where it was raised for one: what was handled before has nothing to do with it."""
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


def _place() -> str:
    """Where a process id means the same process: this boot of this machine, this namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    where = boot.read_text().strip() if boot.exists() else socket.gethostname()
    space = Path("/proc/self/ns/pid")
    return f"{where}/{os.stat(space).st_ino if space.exists() else 0}"


def _pidfd(pid: int) -> int:
    """-1: the process is gone already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def _address(store: Any) -> tuple[str, int] | None:
    """Of a store that a process serves."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, int(store.port)) if hasattr(store, "host") and hasattr(store, "port") else None


def _listening() -> set[int]:
    """The ports of this process."""
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def _shut(connection: Any) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as end:
        end.shutdown(socket.SHUT_RDWR)
