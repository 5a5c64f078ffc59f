"""One rank of a job in which one comes to grief: `python -m job.trouble RANK WORLD FOLDER MODEL TROUBLE`."""

import atexit
import contextlib
import ctypes
import gc
import http.client
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import memmgr
from memmgr.distributed import job, rank_session

from . import ranks

BUDGET = 40_000_000
STEP = 2  # in which it happens
KILLED = {"SIGKILL", "lost", "store", "no budget"}
STOPPED = {"stopped", "stopped, with the store"}
"""Its process stands still, connections and all, as those of a host that has vanished."""
SILENT_SECONDS = 2.0  # for these
"""Its process is killed: with neighbours that see it; on a host of its own; with the store that it has; without a budget."""
WITH_STORE = {"store", "none, with the store", "stopped, with the store"}
LIVES_SECONDS = 20.0  # the process in trouble goes on so long, connections and all


def _model(kind: str, world: int) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)])
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Served:
    """A user's own server in each rank, and connections to all of them that stay open: none of memmgr's business."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (folder / f"part{rank}").write_text(str(server.server_port))
        os.replace(folder / f"part{rank}", folder / f"server{rank}")
        self._asked = {}
        for other in range(world):
            end = time.monotonic() + 30
            while not (place := folder / f"server{other}").exists() and time.monotonic() < end:
                time.sleep(0.02)
            self._asked[other] = http.client.HTTPConnection("127.0.0.1", int(place.read_text()), timeout=10)
            assert self.answers(other)
            self._asked[other].auto_open = 0

    def answers(self, rank: int) -> bool:
        """Over the connection of the beginning."""
        try:
            self._asked[rank].request("GET", "/")
            return self._asked[rank].getresponse().read() == b"here"
        except (OSError, http.client.HTTPException):
            return False


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, *args: object) -> None:
        pass


def _train(model: nn.Module, here: bool, trouble: str, folder: Path) -> None:
    opt = torch.optim.AdamW(model.parameters())
    for step in range(5):
        if trouble.startswith("none") and step == STEP and not here:
            return
        if here and step == STEP:
            if trouble in STOPPED:
                time.sleep(3 * rank_session.LOOK_SECONDS)  # all have heard where the others listen
            (folder / "when").write_text(str(time.time()))
            if trouble in KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            if trouble in STOPPED:
                os.kill(os.getpid(), signal.SIGSTOP)
            if trouble == "busy":  # in a call of C that keeps the GIL
                ctypes.PyDLL(None).usleep(ctypes.c_uint(int(4 * SILENT_SECONDS * 1e6)))
            if trouble.startswith("none"):
                return  # in order, before the others
            if trouble in ("ValueError", "again"):
                raise ValueError("the batch is not what it was")
            if trouble not in ("busy", "all stopped"):
                torch.ones(BUDGET)
        if trouble == "all stopped":
            time.sleep(0.5)
            (folder / f"step{dist.get_rank()}").write_text(str(step))
        model(torch.randn(64, 64)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def _once_more(kind: str, rank: int, world: int, folder: Path) -> None:
    """All ranks begin again, as a script does that handles the error."""
    dist.destroy_process_group()
    folder = folder / "again"
    folder.mkdir(exist_ok=True)
    ranks.join(rank, world, folder, 60)
    with memmgr.budget(BUDGET, quiet=True):
        _train(_model(kind, world), False, "", folder)
    ranks.write(folder, rank)


def main(rank: int, world: int, folder: Path, kind: str, trouble: str) -> None:
    join = ranks.join_with_store if trouble in WITH_STORE else ranks.join
    join(rank, world, folder, 60)
    if trouble == "lost":
        rank_session._place = lambda: f"host {rank}"
    os.environ["MEMMGR_PAGER_SMALL"] = "512"  # so that there is a floor
    served = Served(rank, world, folder)
    model = _model(kind, world)
    here = rank == (0 if trouble in WITH_STORE else world - 1)
    unmanaged = here and trouble == "no budget"
    awaited = (RuntimeError,) if trouble == "no budget" else (memmgr.RankError, memmgr.BudgetError, ValueError)
    try:
        short = {"silent_seconds": SILENT_SECONDS} if trouble in STOPPED | {"busy", "all stopped"} else {}
        with contextlib.nullcontext() if unmanaged else memmgr.budget(BUDGET, quiet=True, **short):
            _train(model, here, trouble, folder)
            if trouble.startswith("none") and not here:
                time.sleep(3)
                assert not any(each._heard.is_set() for each in gc.get_objects() if isinstance(each, job.Job))
    except awaited as error:
        ranks.write(
            folder,
            rank,
            error=type(error).__name__,
            text=str(error),
            who=getattr(error, "rank", None),
            floor_bytes=getattr(error, "floor_bytes", 0),
            enough_bytes=getattr(error, "enough_bytes", 0),
            when=time.time(),
            # One that is gone, or stands still, answers nobody.
            served=[
                served.answers(other)
                for other in range(world)
                if other == rank or trouble in ("BudgetError", "ValueError")
            ],
        )
        if trouble == "again":
            _once_more(kind, rank, world, folder)
            return
        # The process lives on, with its connections and its server, until the others have asked.
        if here or trouble in ("BudgetError", "ValueError"):
            end = time.monotonic() + LIVES_SECONDS
            while time.monotonic() < end and any(ranks.read(folder, other) is None for other in range(world)):
                time.sleep(0.05)


def to_its_end(rank: int, world: int, folder: Path, kind: str, trouble: str) -> None:
    main(rank, world, folder, kind, trouble)
    if trouble in WITH_STORE:
        sys.stdout.flush()
        atexit._run_exitfuncs()


if __name__ == "__main__":
    ranks.run(to_its_end)
