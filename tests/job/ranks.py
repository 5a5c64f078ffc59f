"""Starts the ranks of a job in processes of their own, and collects their output."""

import contextlib
import datetime
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exactness import children

from memmgr.api import budget as budgets
from memmgr.native import binding as native

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@contextlib.contextmanager
def one_launcher() -> Iterator[None]:
    """One torchrun at a time on this machine: it looks for a free port, and lets go of it before its ranks take it. The ranks
    of two jobs then meet each other (seen: a rank's line twice, another one's never, an abort in gloo)."""
    with open(Path(tempfile.gettempdir()) / "memmgr-tests-torchrun.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def begin(module: str, *words: str, world: int, folder: Path, timeout: float) -> list[subprocess.Popen[str]]:
    """`python -m MODULE RANK WORLD FOLDER WORDS` for each rank."""
    return [
        children.start(module, str(rank), str(world), str(folder), *words, timeout=timeout, env=ENVIRONMENT)
        for rank in range(world)
    ]


def finish_all(ranks: list[subprocess.Popen[str]], timeout: float) -> list[str]:
    """The output of each rank; an assertion that shows the output of all that failed. All are read at once: a rank
    whose pipe is full would wait for its reader, and the others for the rank."""
    failures, outputs = [], []
    with ThreadPoolExecutor(len(ranks)) as pool:
        finishing = [pool.submit(children.finish, process, timeout) for process in ranks]
    for rank, finished in enumerate(finishing):
        try:
            outputs.append(finished.result())
        except AssertionError as error:
            failures.append(f"rank {rank}: {error}")
    assert not failures, "\n".join(failures)
    return outputs


def run(main: Callable[..., None]) -> None:
    """In a rank: `main(rank, world, folder, *words)`, and nothing after it: gloo's own threads now and then crash in the
    interpreter's last moments, with or without us."""
    children.arm()
    rank, world, folder, *words = sys.argv[1:]
    main(int(rank), int(world), Path(folder), *words)
    sys.stdout.flush()
    os._exit(0)


def join(rank: int, world: int, folder: Path, seconds: float) -> None:
    """In a rank: the process group, over a store that is a file, so that ports need not be found."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=seconds),
    )


def join_with_store(rank: int, world: int, folder: Path, seconds: float) -> None:
    """The same over a store that rank 0 has, as without a launcher's own."""
    torch.set_num_threads(1)
    timeout, port = datetime.timedelta(seconds=seconds), folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, True, timeout=timeout, wait_for_workers=False)
        port.with_suffix(".part").write_text(str(store.port))
        os.replace(port.with_suffix(".part"), port)
    else:
        end = time.monotonic() + seconds
        while not port.exists() and time.monotonic() < end:
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), world, False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def no_pins() -> None:
    """At the end of a step nothing is pinned, neither by a Work that has ended nor by a reducer that has reduced."""
    if budgets.current() is None:
        return
    pager = native.load()
    deadline = time.monotonic() + 2
    while True:  # a backend's thread wakes the waiting thread before it marks the Work as done
        pager.drain()
        if pager.stats()["works_in_flight"] == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.001)
    assert pager.stats()["works_in_flight"] == 0
    # A tensor whose address was handed out stays while it lives, by rule 9: torch reads a gathered object through
    # numpy.
    pinned = [cell for cell in pager.cells() if cell["pins"] and not cell["small"] and not cell["escaped"]]
    assert not pinned, pinned


def write(folder: Path, rank: int, **found: Any) -> None:
    """For `read`."""
    place = folder / f"rank{rank}.json"
    part = place.with_suffix(".part")
    part.write_text(json.dumps(found))
    os.replace(part, place)


def read(folder: Path, rank: int) -> dict[str, Any] | None:
    """The result that the rank has written; None if there is none."""
    place = folder / f"rank{rank}.json"
    return dict(json.loads(place.read_text())) if place.exists() else None
