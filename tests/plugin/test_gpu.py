"""On a GPU: the three orders of importing, and queries of scripts. Each program is a process (gpu_training.py,
tools/gpu/answers.py)."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memmgr.tools.gpu import answers

PAGE = 2 << 20
TRAINING = Path(__file__).with_name("gpu_training.py")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _probe(program: object, *words: str, **variables: str) -> Any:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("MEMMGR_BUDGET", "MEMMGR_INSTALL", "MEMMGR_CONF"))
    }
    done = subprocess.run(
        [sys.executable, "-P", str(program), *words],
        env={**clean, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode != 0:
        return done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def _native() -> Any:
    return _probe(TRAINING, "native", MEMMGR_INSTALL="0")


@pytest.mark.parametrize("memory", ["mapped", "plain"])
def test_every_question_is_answered(memory: str) -> None:
    found = _probe(answers.__file__, MEMMGR_CUDA_MEMORY=memory)
    if memory == "plain":
        found.pop("empty_cache")  # one piece of memory, which stays
    assert found.pop("allocator") == "memmgr"
    assert set(found.values()) == {"ok"}, found


@pytest.mark.parametrize("order", ["environment", "first"])
def test_a_budget_gives_the_same_bits(order: str) -> None:
    plain = _native()
    assert plain["allocator"] == "native"
    limit = int(0.6 * plain["peak_bytes"])
    variables = {"MEMMGR_BUDGET": str(limit)} if order == "environment" else {}
    managed = _probe(TRAINING, order, str(limit), **variables)
    assert managed["allocator"] == "memmgr"
    assert (managed["digest"], managed["losses"]) == (plain["digest"], plain["losses"])
    assert managed["peak_bytes"] <= limit
    assert managed["reserved_peak_bytes"] <= limit + 2 * PAGE  # in two areas, each of whole pages
    assert managed["stats"]["evictions"] + managed["stats"]["offloads"] > 0


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_a_model_that_is_there_before_the_import(share: float) -> None:
    """The third order: memmgr's allocator takes over, and the tensors move."""
    plain = _native()
    limit = int(share * plain["reserved_peak_bytes"])
    managed = _probe(TRAINING, "late", str(limit))
    assert isinstance(managed, dict), managed
    assert managed["allocator"] == "memmgr"
    assert (managed["digest"], managed["losses"]) == (plain["digest"], plain["losses"])
    assert managed["reserved_peak_bytes"] <= limit + 2 * PAGE < plain["reserved_peak_bytes"]
    assert managed["stats"]["resident_bytes.peak"] <= limit
    assert managed["stats"]["evictions"] + managed["stats"]["offloads"] > 0


def test_without_a_budget_nothing_changes_but_the_allocator() -> None:
    plain = _native()
    assert _probe(TRAINING, "native", MEMMGR_BUDGET="none")["digest"] == plain["digest"]
