"""Where shapes change from step to step, kinds of one family vouch for one another (rule 8)."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memmgr
from memmgr.native import binding

from .kernels import replaced

ENOUGH = 32  # signatures of a family that are checked (op_signature.cpp: kTriedEnough)
LENGTHS = range(20_000, 22_000)


@contextlib.contextmanager
def _family(run: Callable[..., Any], *, tried: int = ENOUGH, verify: bool = False) -> Iterator[tuple[Any, Any]]:
    """A budget in which `erfinv` is `run` and has been seen with `tried` lengths, the shortest and the longest first."""
    with memmgr.budget("1GB", policy="evict", disk=False, quiet=True, verify=verify) as mm, replaced("erfinv", run):
        native = binding.load()
        for n in [LENGTHS[0], LENGTHS[-1], *LENGTHS[1 : tried - 1]]:
            torch.ones(n).erfinv()
        yield mm, native


class Counted:
    """A kernel that counts its runs; a length of which it gives other bytes each time."""

    def __init__(self, unsteady: int = -1) -> None:
        self.runs, self._unsteady = 0, unsteady

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x * self.runs if len(x) == self._unsteady else x * 2


def _runs_of(run: Counted, make: Callable[[], torch.Tensor]) -> int:
    before = run.runs
    make()
    return run.runs - before


def test_what_others_were_tried_for_runs_once() -> None:
    run = Counted()
    with _family(run) as (mm, native):
        assert run.runs == 2 * ENOUGH
        for n in LENGTHS[100:400]:
            x = torch.randn(n)
            y = x.erfinv()
            assert native.describe(y)["trusted"]
            assert native.take_away(y, 0) == y.nbytes
            assert torch.equal(y, x * 2)
        assert run.runs == 2 * ENOUGH + 2 * 300  # once by the program, once to make it again
        assert mm.stats()["recomputes"] >= 300


@pytest.mark.parametrize("missing", ["one more", "a longer one", "a shorter one", "another rank", "another dtype"])
def test_what_they_do_not_vouch_for_is_tried(missing: str) -> None:
    run = Counted()
    n = LENGTHS[500]
    with _family(run, tried=ENOUGH - (missing == "one more")):
        made = {
            "one more": lambda: torch.ones(n).erfinv(),
            "a longer one": lambda: torch.ones(LENGTHS[-1] + 1).erfinv(),
            "a shorter one": lambda: torch.ones(LENGTHS[0] - 1).erfinv(),
            "another rank": lambda: torch.ones(n // 2, 2).erfinv(),
            "another dtype": lambda: torch.ones(n, dtype=torch.float64).erfinv(),
        }[missing]
        assert _runs_of(run, made) == 2
        if missing == "a longer one":
            assert _runs_of(run, lambda: torch.ones(LENGTHS[-1] + 1).erfinv()) == 1


def test_a_number_that_changes_in_every_step() -> None:
    x = torch.randn(LENGTHS[0])
    with memmgr.budget("1GB", policy="evict", disk=False, quiet=True) as mm:
        trials = []
        for i in range(ENOUGH + 20):
            y = torch.add(x, x, alpha=0.123 + i / 1000)
            want = y.tolist()
            assert binding.load().take_away(y, 0) == y.nbytes and y.tolist() == want
            trials.append(mm.stats()["trials"])
        assert trials[ENOUGH - 1] - trials[0] == ENOUGH - 1
        assert trials[-1] == trials[ENOUGH - 1]


def test_with_verify_each_is_tried() -> None:
    run = Counted()
    with _family(run, verify=True):
        assert _runs_of(run, lambda: torch.ones(LENGTHS[700]).erfinv()) == 2


@pytest.mark.parametrize("through", ["itself", "what was made of it"])
def test_bytes_that_differ_are_never_shown(through: str) -> None:
    """An error, where a trial would have kept it from being made again; and then all are tried."""
    n = LENGTHS[800]
    run = Counted(unsteady=n)
    with (
        pytest.raises(memmgr.RecomputeError, match=rf"{4 * n} bytes came back other .* verify=True"),
        _family(run) as (mm, native),
    ):
        x = torch.rand(n)
        (x + 1).exp()  # its trial
        y = x.erfinv()
        if through != "itself":
            y = y.exp()
        assert native.take_away(y, 0) == y.nbytes
        y.sum()
    with memmgr.budget("1GB", policy="evict", disk=False, quiet=True) as mm, replaced("erfinv", run):
        want = run.runs + 1
        y = x.erfinv()
        assert mm.stats()["refused_kinds"] == 1
        assert native.take_away(y, 0) == 0 and torch.equal(y, x * want)


def test_one_that_does_not_reproduce_speaks_against_its_family() -> None:
    run = Counted(unsteady=LENGTHS[5])
    with _family(run) as (mm, _):
        assert mm.stats()["refused_kinds"] == 1
        for n in LENGTHS[900:910]:
            assert _runs_of(run, lambda n=n: torch.ones(n).erfinv()) == 2


def test_training_with_lengths_that_change() -> None:
    """The same bits; after the first steps hardly an op runs twice."""

    def train(scope: Any, steps: int, seed: int) -> tuple[list[torch.Tensor], list[int]]:
        torch.manual_seed(0)
        lengths = random.Random(seed)
        model = nn.Sequential(
            nn.Embedding(100, 64), nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.Linear(64, 100)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        trials = []
        with scope as mm:
            for _ in range(steps):
                tokens = torch.randint(0, 100, (4, lengths.randint(80, 200)))
                nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                trials.append(mm.stats()["trials"] if mm is not None else 0)
        return [p.detach().clone() for p in model.parameters()], trials

    want, _ = train(contextlib.nullcontext(), 55, 0)
    peak = memmgr.budget("1GB", policy="evict", disk=False, quiet=True)
    whole, trials = train(peak, 55, 0)
    assert all(torch.equal(a, b) for a, b in zip(whole, want, strict=True))
    assert trials[-1] - trials[39] <= (trials[39] - trials[0]) / 20
    # Other lengths: hardly one has been checked itself, so the others of its family vouch for it.
    want, _ = train(contextlib.nullcontext(), 10, 1)
    for policy in ("evict", "torture"):
        budget = int(0.8 * peak.stats()["unmanaged_peak_bytes"]) if policy != "torture" else "1GB"
        tight = memmgr.budget(budget, policy=policy, quiet=True)
        got, trials = train(tight, 10, 1)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert tight.stats()["recomputes"] > 10 * trials[-1], "what was made again had been checked first"
