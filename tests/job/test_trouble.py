"""Issue 19, point 4: one rank in trouble is named by all others within seconds, whatever they wait in."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import ranks
from .trouble import BUDGET

SECONDS = 10.0
TROUBLES = ("BudgetError", "ValueError", "SIGKILL")


def _try(folder: Path, world: int, model: str, trouble: str) -> float:
    """How long the last rank took to say it."""
    folder.mkdir(exist_ok=True)
    processes = ranks.begin("job.trouble", model, trouble, world=world, folder=folder, timeout=60)
    last = world - 1
    if trouble == "SIGKILL":
        processes.pop().communicate(timeout=60)
    ranks.finish_all(processes, 60)
    took = 0.0
    own = ranks.read(folder, last)
    assert (own is None) == (trouble == "SIGKILL")
    for rank in range(last):
        found = ranks.read(folder, rank)
        assert found is not None, f"rank {rank} had no error"
        assert found["error"] == "RankError" and found["who"] == last, found
        assert f"memmgr: rank {last} " in found["text"]
        if trouble == "BudgetError":
            assert own is not None and own["floor_bytes"] > BUDGET
            assert (found["floor_bytes"], found["enough_bytes"]) == (own["floor_bytes"], own["enough_bytes"])
            assert f"({own['enough_bytes']} bytes)" in found["text"]
        elif trouble == "ValueError":
            assert "ValueError: the batch is not what it was" in found["text"]
        else:
            assert "is gone" in found["text"]
        took = max(took, found["when"] - float((folder / "when").read_text()))
    assert took < SECONDS
    return took


# In `make test` the ones in which most differs: a process that lives on, and one that is gone.
QUICK = {(2, "ddp", "BudgetError"), (2, "fsdp2", "SIGKILL")}


@pytest.mark.parametrize(
    ("world", "model", "trouble"),
    [
        pytest.param(world, model, trouble, marks=[] if (world, model, trouble) in QUICK else [pytest.mark.slow])
        for world in (2, 4)
        for model in ("ddp", "fsdp2")
        for trouble in TROUBLES
    ],
)
def test_the_others_name_the_rank(tmp_path: Path, world: int, model: str, trouble: str) -> None:
    _try(tmp_path, world, model, trouble)


@pytest.mark.parametrize(
    ("world", "trouble"),
    [
        pytest.param(world, trouble, marks=[] if world == 2 else [pytest.mark.slow])
        for world in (2, 4)
        for trouble in ("lost", "store", "no budget")
    ],
)
def test_nobody_is_left_who_could_tell(tmp_path: Path, world: int, trouble: str) -> None:
    """The rank is named all the same, if it had a budget, and in any case nobody waits."""
    gone = 0 if trouble == "store" else world - 1
    processes = ranks.begin("job.trouble", "ddp", trouble, world=world, folder=tmp_path, timeout=60)
    processes.pop(gone).communicate(timeout=60)
    ranks.finish_all(processes, 60)
    for rank in set(range(world)) - {gone}:
        found = ranks.read(tmp_path, rank)
        assert found is not None, f"rank {rank} had no error"
        assert found["when"] - float((tmp_path / "when").read_text()) < SECONDS, found
        if trouble == "no budget":
            assert found["who"] is None or found["who"] != rank, found
        else:
            assert found["who"] == gone and f"memmgr: rank {gone} is gone" in found["text"], found


@pytest.mark.slow
def test_all_can_begin_again(tmp_path: Path) -> None:
    """What was told of the first budget is over in the second."""
    ranks.finish_all(ranks.begin("job.trouble", "ddp", "again", world=2, folder=tmp_path, timeout=60), 60)
    for rank in range(2):
        assert ranks.read(tmp_path, rank) is not None and ranks.read(tmp_path / "again", rank) is not None


@pytest.mark.parametrize("trouble", [pytest.param("none", marks=pytest.mark.slow), "none, with the store"])
def test_a_rank_that_ends_in_order_is_no_trouble(tmp_path: Path, trouble: str) -> None:
    ranks.finish_all(ranks.begin("job.trouble", "ddp", trouble, world=2, folder=tmp_path, timeout=60), 60)
    assert not any(ranks.read(tmp_path, rank) for rank in range(2))


@pytest.mark.slow
def test_fifty_of_fifty(tmp_path: Path) -> None:
    took = []
    for number in range(50):
        model, trouble = ("ddp", "fsdp2")[number % 2], TROUBLES[number % 3]
        took.append(_try(tmp_path / str(number), 2, model, trouble))
    print(f"50 of 50; {min(took):.1f} to {max(took):.1f} s")


@pytest.mark.parametrize("trouble", [TROUBLES[0], *(pytest.param(t, marks=pytest.mark.slow) for t in TROUBLES[1:])])
def test_the_step_of_a_survivor_is_whole(tmp_path: Path, trouble: str) -> None:
    """Its slices wait when the other rank fails within the same step: they have happened (rule 14)."""
    processes = ranks.begin("job.unfinished", trouble, world=2, folder=tmp_path, timeout=60)
    if trouble == "SIGKILL":
        processes.pop().communicate(timeout=60)
    ranks.finish_all(processes, 60)
    assert (ranks.read(tmp_path, 1) or {}).get("error") == (None if trouble == "SIGKILL" else trouble)
    found = ranks.read(tmp_path, 0)
    assert found is not None and found["took"] < SECONDS, found
