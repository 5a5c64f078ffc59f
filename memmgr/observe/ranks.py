"""Which rank of which distributed job this process is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def where_in_job(objects_of: Callable[[tuple[type, ...]], list[Any]]) -> dict[str, Any]:
    """For the telemetry's `hello`: `rank` and `world_size` (null: there is no job), `job`, and `mesh`, this rank's place in each
    dimension of the largest device mesh.

    Args:
        objects_of: the living objects of those types.
    """
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    mesh: dict[str, int] = {}
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = _place(objects_of)
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    job = " ".join(os.environ[name] for name in names if name in os.environ)
    return {"rank": rank, "world_size": world, "job": job if rank is not None else None, "mesh": mesh}


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _place(objects_of: Callable[[tuple[type, ...]], list[Any]]) -> dict[str, int]:
    module = sys.modules.get("torch.distributed.device_mesh")  # its import is not ours to pay for
    place: dict[str, int] = {}
    for mesh in objects_of((module.DeviceMesh,)) if module is not None else ():
        try:
            found = mesh.get_coordinate()
            names = mesh.mesh_dim_names or tuple(f"dimension {i}" for i in range(mesh.ndim))
        except (RuntimeError, AttributeError):  # of a destroyed process group
            continue
        if found is not None and len(found) > len(place):
            place = dict(zip(names, found, strict=True))
    return place
