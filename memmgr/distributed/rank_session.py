"""The state of a rank and of the others of its job, through the default process group's store."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

LOOK_SECONDS = 0.5
SILENT_SECONDS = 4.0  # of a rank that gives no sign of life, after an error of the backend: eight looks
CONNECT_SECONDS = 2.0
ENOUGH_LOOKS = 4
FIGURES_SECONDS = 2.0
NEXT_RANKS = 8  # so many are asked for one that is open: a look costs the store a few questions
_DEVICES = ("cpu", "cuda")  # that gloo serves

Figures = dict[str, Any]


class Silence:
    """How long something has stayed as it was.

    A look counts a fourth of `seconds` at most: a process that was stopped, with all others or alone, has not listened
    meanwhile. `seconds`: that are too long; 0: none are.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sign: object = None
        self._lasted = 0.0
        self._looked = time.monotonic()

    def is_too_long(self, sign: object) -> bool:
        """Checks once more. `sign` changes with every heartbeat."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, self._seconds / 4), now
        self._lasted = self._lasted + passed if sign == self._sign else 0.0
        self._sign = sign
        return 0 < self._seconds <= self._lasted


class RankSession:
    """This process as a rank of one process group. Outlives budgets."""

    def __init__(self) -> None:
        c10d: Any = dist.distributed_c10d
        self.group = dist.group.WORLD
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        store = c10d._get_default_store()
        self._address = _address(store)
        self._host: int | None = None  # the rank that has the store
        self._host_has_left = False
        self._looks = 0
        self._left = 0.0
        self._groups: dict[str, list[bytes]] = {}  # addresses that gloo has written for them
        self._ports: dict[int, str] = {}  # where this rank's process groups listen, with the whole address
        self._host_listens: set[str] = set()  # those of the rank that has the store
        # A client of its own: another one's `get` may hold its lock for minutes.
        self._store = c10d.PrefixStore("memmgr", store.clone())
        self._store.set_timeout(datetime.timedelta(seconds=2))
        self.needs_no_gil = _is_native(store)
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
        """A budget opens: earlier failures are over if their ranks have a budget again."""
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
        """The rank that serves the store takes it along, so the others must first see that it has left in order."""
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
        """The next reported failure that this rank has not handled."""
        key = f"trouble/{self.seen + 1}"
        if not self._store.check([key]):
            return None
        self.seen += 1
        return dict(json.loads(self._store.get(key)))

    def ended(self) -> list[int]:
        """The ranks of this host whose processes have ended."""
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

    def beats(self) -> tuple[Any, str]:
        """Where a sign of life goes: a store, and a key there."""
        return self._store, f"beat/{self.rank}"

    def look_around(self) -> None:
        """Records which rank serves the store while it answers, and where this rank's process groups listen."""
        if self._host is None and self._store.check(["host"]):
            self._host = int(self._store.get("host"))
        self._looks += 1
        if self._host is not None and self._host != self.rank:
            self._host_has_left = self.state(self._host).startswith("left")
        self._meet_groups()
        self._host_listens = self._listens(self._host or 0)

    def silent(self) -> int | None:
        """Another rank that is open and gives no sign of life any more. Takes `SILENT_SECONDS`."""
        before = self._beats()
        time.sleep(SILENT_SECONDS)
        after = self._beats()
        return next((rank for rank, beat in before.items() if after.get(rank) == beat), None)

    def _beats(self) -> dict[int, str]:
        others = [rank for rank in range(self.world) if rank != self.rank and self.state(rank).startswith("open")]
        return {rank: self._beat(rank) for rank in others}

    def _beat(self, rank: int) -> str:
        """A count and its floor, in bytes; empty: it has not said anything yet."""
        key = f"beat/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def lost_neighbour(self, silence: Silence) -> dict[str, Any] | None:
        """The next rank that is open, if nothing has been heard of it for too long: each rank listens to one."""
        near = ((self.rank + k) % self.world for k in range(1, min(self.world, NEXT_RANKS + 1)))
        rank = next((rank for rank in near if self.state(rank).startswith("open")), None)
        beat = "" if rank is None else self._beat(rank)
        if not silence.is_too_long((rank, beat)) or not beat:
            return None
        return {"rank": rank, "error": "", "text": "", "how": "silent", "floor_bytes": int(beat.split()[1])}

    def lost_with_store(self) -> int | None:
        """The rank that had the store, if that cannot be reached any more and the rank had not left its budget."""
        if self._address is None or (host := self.host()) is None:
            return None
        try:
            socket.create_connection(self._address, CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            return host
        except OSError:
            pass  # it may be busy
        return None

    def host(self) -> int | None:
        """The other rank that has the store, if it is known and has not left its budget in order."""
        if (
            self._host is None
            and self._looks < ENOUGH_LOOKS
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        ):
            self._host = 0  # as torch has it; there was no time to hear it
        return None if self._host == self.rank or self._host_has_left else self._host

    def forget(self) -> None:
        """Its process group was destroyed, and another one takes its place."""
        for fd in self._neighbours.values():
            if fd >= 0:
                os.close(fd)
        self._neighbours.clear()

    # -- connections that other ranks wait on --

    def _meet_groups(self) -> None:
        """After process groups were made or destroyed: the ports of the existing ones, which gloo has sent to the other ranks."""
        world: Any = dist.distributed_c10d._world
        groups = {name: group for group, name in dict(world.pg_names).items() if group in world.pg_map}
        if groups.keys() == self._groups.keys():
            return
        met = {name: blobs for name, blobs in self._groups.items() if name in groups}
        for name in groups.keys() - met.keys():
            met[name] = []
            with contextlib.suppress(Exception):  # a store that cannot do this: nothing of this group is shut
                met[name].extend(_rendezvous(groups[name], world.pg_map[groups[name]][1]))
        blobs = list(itertools.chain.from_iterable(met.values()))
        listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        self._ports = {
            a.port: f"{a.ip}:{a.port}" for a in listening if any(_names_port(blob, a.port) for blob in blobs)
        }
        self._groups = met
        self._store.set(f"ports/{self.rank}", json.dumps(list(self._ports.values())))

    def cut_connections(self) -> None:
        """Shuts the connections of process groups to other ranks: an operation that waits for bytes there gets an error
        of its backend.
        """
        others = (self._listens(rank) for rank in range(self.world) if rank != self.rank)
        self._cut(set().union(*others))

    def cut_accepted(self) -> None:
        """Without a store the other ranks' ports are not known. Each rank shuts the connections that it has accepted:
        together all. The rank that served the store does not, so connections to it are shut, too.
        """
        self._cut(self._host_listens)

    def _listens(self, rank: int) -> set[str]:
        key = f"ports/{rank}"
        return set(json.loads(self._store.get(key))) if self._store.check([key]) else set()

    def _cut(self, theirs: set[str]) -> None:
        # Selected by the ports of the process groups: other connections of this process stay.
        for c in psutil.Process().net_connections("tcp"):
            if c.status != psutil.CONN_ESTABLISHED:
                continue
            if c.laddr.port in self._ports or f"{c.raddr.ip}:{c.raddr.port}" in theirs:
                _shut(c)

    # -- figures --

    def hand_in(self, figures: Figures) -> list[Figures] | None:
        """Rank 0 gets those of all ranks that have a budget; None: this is another rank."""
        self._store.set(f"figures/{self.budgets}/{self.rank}", json.dumps(figures))
        if self.rank != 0:
            return None if self.state(0) != "none 0 0" else [figures]
        found, deadline = {0: figures}, time.monotonic() + FIGURES_SECONDS
        while True:
            # Checked first: a rank that leaves has handed in its figures.
            are_open = {rank for rank in range(self.world) if self.state(rank).startswith("open")}
            for rank in range(self.world):
                key = f"figures/{self.budgets}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = json.loads(self._store.get(key))
            if found.keys() >= are_open or time.monotonic() > deadline:
                return list(found.values())
            time.sleep(0.02)


def _place() -> str:
    """Where a process id means the same process: this boot of this machine, this namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    where = boot.read_text().strip() if boot.exists() else socket.gethostname()
    space = Path("/proc/self/ns/pid")
    return f"{where}/{os.stat(space).st_ino if space.exists() else 0}"


def _pidfd(pid: int) -> int:
    """-1: the process has ended already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def _address(store: Any) -> tuple[str, int] | None:
    """The address of a store that a process serves."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, int(store.port)) if hasattr(store, "host") and hasattr(store, "port") else None


def _is_native(store: Any) -> bool:
    """Is it written in C++, so that a question to it needs no GIL?"""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    c10d: Any = dist
    return type(store) in (c10d.TCPStore, c10d.FileStore, c10d.HashStore)


def _rendezvous(group: Any, store: Any) -> Iterator[bytes]:
    """The bytes that gloo has written for the other ranks of a process group: for each of its devices the addresses of
    this rank.
    """
    mine = store.clone()  # another client of it may be in a long question
    mine.set_timeout(datetime.timedelta(seconds=2))
    for device in _DEVICES:
        number = 0
        while mine.check([key := f"{device}//{number}/{dist.get_rank(group)}"]):
            yield bytes(mine.get(key))
            number += 1


def _names_port(blob: bytes, port: int) -> bool:
    """Is there a socket's address in it with this port?"""
    return any(
        struct.pack("=H", family) + struct.pack(">H", port) in blob for family in (socket.AF_INET, socket.AF_INET6)
    )


def _listening() -> set[int]:
    """The ports of this process."""
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def _shut(connection: Any) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as end:
        end.shutdown(socket.SHUT_RDWR)
