"""Issue 19, truth 1: the same bits as the unmanaged job, for every way to be parallel that gloo runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import matrix, ranks

ALL = [name for name in matrix.CASES if name != "fsdp2_with_tp"]
FOUR = ["fsdp2_with_tp", "ddp", "fsdp2_reshard", "pp_gpipe", "pp_interleaved", "ring_attention", "expert_parallel"]
FLOORS = [
    "pp_1f1b",
    "pp_gpipe",
    "pp_interleaved",
    "ddp",
    "ddp_bucket_views",
    "fsdp2_reshard",
    "fsdp2_keep",
    "tp_sequence",
]
FLOORS_QUICK = ["fsdp2_reshard"]  # it has the most that is not the rank's own
QUICK = ["tp_sequence", "expert_parallel"]
"""In `make test`; the plain ones of each kind are in tests/pager and tests/exactness."""


def _run(world: int, names: list[str], folder: Path) -> None:
    timeout = 30 + 15 * world * len(names)
    outputs = ranks.finish_all(ranks.begin("job.matrix", *names, world=world, folder=folder, timeout=timeout), timeout)
    print(*outputs, sep="\n")


def test_the_same_bits_quick(tmp_path: Path) -> None:
    _run(2, QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in QUICK])
def test_the_same_bits_on_two_ranks(name: str, tmp_path: Path) -> None:
    _run(2, [name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_the_same_bits_on_four_ranks(name: str, tmp_path: Path) -> None:
    _run(4, [name], tmp_path)


def test_ranks_follow_plans(tmp_path: Path) -> None:
    ranks.finish_all(ranks.begin("job.planned", world=2, folder=tmp_path, timeout=120), 120)


def test_what_torch_distributed_takes_is_named(tmp_path: Path) -> None:
    ranks.finish_all(ranks.begin("job.holders", world=2, folder=tmp_path, timeout=60), 60)


@pytest.mark.parametrize("name", [n if n in FLOORS_QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FLOORS])
def test_the_floor_of_a_rank(name: str, tmp_path: Path) -> None:
    print(*ranks.finish_all(ranks.begin("job.floors", name, world=2, folder=tmp_path, timeout=90), 90), sep="\n")
