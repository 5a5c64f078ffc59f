"""Issue 19, point 3 and truth 1: ranks that differ in budgets, plans and speed; `make soak` takes an hour of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from . import ranks, talkative

SOAK_SECONDS = float(os.environ.get("MEMMGR_SOAK_SECONDS", "6"))
SEED = int(os.environ.get("MEMMGR_SOAK_SEED", "1"))


@pytest.mark.timeout(SOAK_SECONDS + 300)
def test_soak_of_ranks(tmp_path: Path) -> None:
    timeout = SOAK_SECONDS + 120
    words = (str(SOAK_SECONDS), str(SEED))
    print(*ranks.finish_all(ranks.begin("job.chance", *words, world=2, folder=tmp_path, timeout=timeout), timeout))


def test_a_rank_may_print_more_than_a_pipe_holds(tmp_path: Path) -> None:
    _, second = ranks.finish_all(ranks.begin("job.talkative", world=2, folder=tmp_path, timeout=60), 60)
    assert len(second) >= talkative.BYTES
