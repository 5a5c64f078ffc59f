"""The same bits as the unmanaged job, for every way to be parallel that gloo runs; `make soak` takes an hour of chance."""

import os
from pathlib import Path

import pytest

from . import matrix, programs, ranks

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
QUICK = {
    "ddp": ["ddp_static_graph", "ddp_bucket_views_kept", "ddp_many_parameters", "ddp_unused"],
    "hooks": ["ddp_hook_with_another_tensor", "ddp_builtin_hook", "zero_redundancy"],
    "shards": ["fsdp2_reshard", "fsdp2_checkpoint", "tp_sequence"],
    "stages and collectives": [
        "pp_1f1b",
        "expert_parallel",
        "all_reduce_in_forward",
        "functional_collectives_in_forward",
        "late_works",
    ],
}
"""In `make test`. Views that are kept are views too, parameters that are resharded are gathered more often, and 1F1B interleaves
all that GPipe does one after the other."""


def _run(world: int, names: list[str], folder: Path) -> None:
    timeout = 30 + 15 * world * len(names)
    outputs = ranks.finish_all(ranks.begin("job.matrix", *names, world=world, folder=folder, timeout=timeout), timeout)
    print(*outputs, sep="\n")


@pytest.mark.parametrize("kind", QUICK)
def test_the_same_bits_quick(kind: str, tmp_path: Path) -> None:
    _run(2, QUICK[kind], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if not any(name in names for names in QUICK.values())])
def test_the_same_bits_on_two_ranks(name: str, tmp_path: Path) -> None:
    _run(2, [name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_the_same_bits_on_four_ranks(name: str, tmp_path: Path) -> None:
    _run(4, [name], tmp_path)


def test_ranks_follow_plans(tmp_path: Path) -> None:
    ranks.finish_all(ranks.begin("job.programs", "planned", world=2, folder=tmp_path, timeout=120), 120)


def test_what_torch_distributed_takes_is_named(tmp_path: Path) -> None:
    ranks.finish_all(ranks.begin("job.programs", "named", world=2, folder=tmp_path, timeout=60), 60)


def test_a_collective_from_before_the_budget_finds_its_tensors_in_place(tmp_path: Path) -> None:
    ranks.finish_all(ranks.begin("job.programs", "begun_before", world=2, folder=tmp_path, timeout=60), 60)


@pytest.mark.parametrize("name", [n if n in FLOORS_QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FLOORS])
def test_the_floor_of_a_rank(name: str, tmp_path: Path) -> None:
    print(
        *ranks.finish_all(ranks.begin("job.programs", "floors", name, world=2, folder=tmp_path, timeout=90), 90),
        sep="\n",
    )


SOAK_SECONDS = float(os.environ.get("MEMMGR_SOAK_SECONDS", "6"))
SEED = int(os.environ.get("MEMMGR_SOAK_SEED", "1"))


@pytest.mark.timeout(SOAK_SECONDS + 300)
def test_soak_of_ranks(tmp_path: Path) -> None:
    timeout = SOAK_SECONDS + 120
    words = (str(SOAK_SECONDS), str(SEED))
    print(*ranks.finish_all(ranks.begin("job.chance", *words, world=2, folder=tmp_path, timeout=timeout), timeout))


def test_a_rank_may_print_more_than_a_pipe_holds(tmp_path: Path) -> None:
    _, second = ranks.finish_all(ranks.begin("job.programs", "talkative", world=2, folder=tmp_path, timeout=60), 60)
    assert len(second) >= programs.BYTES
