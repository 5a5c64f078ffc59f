"""One rank in trouble is named by all others within seconds, in any wait."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from . import ranks
from .trouble import BUDGET, SILENT_SECONDS, STOPPED, WITH_STORE

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
        assert all(found["served"]), "a connection of the user's own was shut"
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


def _play(folder: Path, world: int, trouble: str) -> None:
    """A job in which a rank is killed, stands still, is busy or ends early, until all ranks that go on have ended."""
    gone = 0 if trouble in WITH_STORE else world - 1
    processes = ranks.begin("job.trouble", "ddp", trouble, world=world, folder=folder, timeout=60)
    if trouble in ("lost", "store", "no budget"):
        processes.pop(gone).communicate(timeout=60)
    if trouble == "all stopped":
        _stop_all(processes, folder)
    still = [processes.pop(gone)] if trouble in STOPPED else []
    try:
        ranks.finish_all(processes, 60)
    finally:
        for process in still:
            process.kill()
            process.communicate(timeout=60)


def _stop_all(processes: list[Any], folder: Path) -> None:
    """All processes stand still for longer than `silent_seconds`, and go on before they have ended."""
    end = time.monotonic() + 40
    while not all((folder / f"step{rank}").exists() for rank in range(2)) and time.monotonic() < end:
        time.sleep(0.05)
    for process in processes:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
    time.sleep(2.5 * SILENT_SECONDS)
    (folder / "stopped at").write_text((folder / "step0").read_text())
    for process in processes:
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)


# In all of these jobs of two ranks the processes wait, for the most part.
PATIENT = (
    "all stopped",
    "busy",
    "stopped",
    "stopped, with the store",
    "lost",
    "no budget",
    "store",
    "none, with the store",
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, str], Path]]:
    """Yields a function from the number of ranks and a trouble to the folder of a job that has ended. Jobs of PATIENT run two at
    a time, and begin with the first request; any other job runs alone."""
    pool = ThreadPoolExecutor(max_workers=2)
    begun: dict[str, tuple[Path, Future[None]]] = {}

    def folder_of(world: int, trouble: str) -> Path:
        if world != 2 or trouble not in PATIENT:
            folder = tmp_path_factory.mktemp("job")
            _play(folder, world, trouble)
            return folder
        for each in (trouble, *PATIENT):
            if each not in begun:
                folder = tmp_path_factory.mktemp("job")
                begun[each] = folder, pool.submit(_play, folder, 2, each)
        folder, job = begun[trouble]
        job.result()
        return folder

    yield folder_of
    pool.shutdown(cancel_futures=True)


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
def test_nobody_is_left_who_could_tell(played: Callable[[int, str], Path], world: int, trouble: str) -> None:
    """The rank is named all the same, if it had a budget, and in any case nobody waits."""
    gone = 0 if trouble == "store" else world - 1
    folder = played(world, trouble)
    for rank in set(range(world)) - {gone}:
        found = ranks.read(folder, rank)
        assert found is not None, f"rank {rank} had no error"
        assert found["when"] - float((folder / "when").read_text()) < SECONDS, found
        if trouble == "no budget":
            assert found["who"] is None or found["who"] != rank, found
        else:
            assert found["who"] == gone and f"memmgr: rank {gone} is gone" in found["text"], found


@pytest.mark.parametrize(
    ("world", "trouble"),
    [
        (2, "stopped"),
        (2, "stopped, with the store"),
        pytest.param(4, "stopped", marks=pytest.mark.slow),
        pytest.param(4, "stopped, with the store", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stands_still_is_lost(played: Callable[[int, str], Path], world: int, trouble: str) -> None:
    """Its connections stay open, as of a host without power: the rank is named after `silent_seconds`."""
    gone = 0 if "store" in trouble else world - 1
    folder = played(world, trouble)
    for rank in set(range(world)) - {gone}:
        found = ranks.read(folder, rank)
        assert found is not None and found["who"] == gone, found
        took = found["when"] - float((folder / "when").read_text())
        assert SILENT_SECONDS < took < SILENT_SECONDS + 8, took
        assert all(found["served"]), "a connection of the user's own was shut"
        if trouble == "stopped":
            assert found["floor_bytes"] > 0 and "Its floor was" in found["text"]


def test_a_rank_that_is_busy_is_not_lost(played: Callable[[int, str], Path]) -> None:
    """A call of C keeps the GIL for four times `silent_seconds`."""
    folder = played(2, "busy")
    assert not any(ranks.read(folder, rank) for rank in range(2))


def test_ranks_that_stand_still_together_are_not_lost(played: Callable[[int, str], Path]) -> None:
    folder = played(2, "all stopped")
    assert (folder / "stopped at").read_text() != "4"
    assert not any(ranks.read(folder, rank) for rank in range(2))
    assert (folder / "step0").read_text() == "4"


@pytest.mark.slow
def test_all_can_begin_again(tmp_path: Path) -> None:
    """Failures of the first budget are over in the second."""
    ranks.finish_all(ranks.begin("job.trouble", "ddp", "again", world=2, folder=tmp_path, timeout=60), 60)
    for rank in range(2):
        assert ranks.read(tmp_path, rank) is not None and ranks.read(tmp_path / "again", rank) is not None


@pytest.mark.parametrize("trouble", [pytest.param("none", marks=pytest.mark.slow), "none, with the store"])
def test_a_rank_that_ends_in_order_is_no_trouble(played: Callable[[int, str], Path], trouble: str) -> None:
    folder = played(2, trouble)
    assert not any(ranks.read(folder, rank) for rank in range(2))


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
    processes = ranks.begin("job.programs", "unfinished", trouble, world=2, folder=tmp_path, timeout=60)
    if trouble == "SIGKILL":
        processes.pop().communicate(timeout=60)
    ranks.finish_all(processes, 60)
    assert (ranks.read(tmp_path, 1) or {}).get("error") == (None if trouble == "SIGKILL" else trouble)
    found = ranks.read(tmp_path, 0)
    assert found is not None and found["took"] < SECONDS, found
