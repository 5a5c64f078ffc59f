"""Model states as a kind of their own: where they are, and how many bytes moved."""

import functools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch
from torch import nn

import memmgr
from memmgr.native import binding
from memmgr.observe.states import KINDS, STATE_PURPOSES, flows

CHILD = Path(__file__).parent / "states_child.py"


@functools.cache
def trained(**spec: Any) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "MEMMGR_PAGER_SMALL"}
    command = [sys.executable, CHILD, json.dumps(spec)]
    done = forkserver.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states") / "run.jsonl"


@pytest.fixture
def tight(log: Path) -> dict[str, Any]:
    return trained(share=0.4, log=str(log))


def test_states_are_told_apart_and_nothing_is_lost(tight: dict[str, Any]) -> None:
    stats, parameters = tight["stats"], tight["parameters"]

    def there(kind: str) -> int:
        return int(stats[f"resident_bytes.{kind}"] + stats[f"offloaded_bytes.{kind}"])

    assert there("parameters") == parameters
    assert there("optimizer_states") == 2 * parameters
    assert there("gradients") == 0, "they are None after the last step"
    assert sum(stats[f"resident_bytes.{kind}"] for kind in KINDS) == stats["resident_bytes.current"]
    assert sum(stats[f"moved_bytes.{kind}"] for kind in KINDS) == stats["offload_bytes"] + stats["reload_bytes"]


def test_what_moves_is_the_states(tight: dict[str, Any]) -> None:
    """Activations are small here, and the budget has no room for the states: all kinds of them go over the link."""
    found = flows(tight["stats"])
    assert found is not None
    moved = {flow.kind: flow.moved_bytes for flow in found.each}
    assert all(moved[kind] > 0.1 * tight["parameters"] for kind in STATE_PURPOSES), moved
    assert moved["other"] < 0.1 * found.moved_bytes, moved
    assert found.link_bytes > 0


def test_no_sum_of_states_falls(tight: dict[str, Any]) -> None:
    for before, after in zip(tight["readings"], tight["readings"][1:], strict=False):
        assert all(after[f"moved_bytes.{kind}"] >= before[f"moved_bytes.{kind}"] for kind in STATE_PURPOSES)


def test_the_summary_says_where_the_time_went(tight: dict[str, Any]) -> None:
    first, why, *_ = tight["said"].splitlines()
    assert re.search(r", (at least \S+x of an unlimited run|too few to tell a slowdown); evicted ", first)
    assert "recomputing" not in first, "each share is printed once"
    assert why.startswith("memmgr: where the time went: recomputing ") and " for reads and " in why


def test_where_all_fits_no_state_is_said_to_have_left() -> None:
    found = trained(share=2)
    assert len(found["said"].splitlines()) == 1 and "evicted 0 (0 B), offloaded 0 (0 B)" in found["said"]
    assert found["stats"]["offloaded_bytes.parameters"] == 0 == found["stats"]["moved_bytes.parameters"]


@pytest.mark.parametrize(
    "fused", [True, pytest.param(False, marks=pytest.mark.slow)]
)  # the pager sees the same gradients
def test_gradients_that_are_kept_over_a_step_are_seen(fused: bool) -> None:
    assert trained(share=0.5, keep=True, fused=fused)["stats"]["kept_gradient_bytes"] >= trained(share=2)["parameters"]


def test_gradients_that_accumulate_are_not_kept() -> None:
    assert trained(share=0.5, accumulate=3)["stats"]["kept_gradient_bytes"] == 0


ASKS = """
import sys, torch, memmgr
from torch import nn
from memmgr.native import binding

native, looks = binding.load(), []
objects_of = native.objects_of
native.objects_of = lambda types, *more: looks.append(types) or objects_of(types, *more)

def in_a_while():  # a hundred times as much as the last look took has passed
    mm._runtime._purposes._look_at_known._due = 0.0

def told():
    stats = mm.stats()
    return [stats[f"resident_bytes.{kind}"] for kind in ("parameters", "gradients", "optimizer_states")]

with memmgr.budget("100MB", policy=sys.argv[1], quiet=True) as mm:
    assert told() == [0, 0, 0]
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    in_a_while()
    assert told() == [1 << 20, 1 << 20, 2 << 20], told()
    looks.clear()
    more = nn.Linear(512, 512, bias=False)
    for _ in range(20):
        in_a_while()
        told()
    assert not looks
    more(torch.randn(4, 512)).sum().backward()
    assert len(looks) == 1
    in_a_while()
    assert told() == [2 << 20, 2 << 20, 2 << 20], told()
    assert len(looks) == 1

with memmgr.budget("100MB", policy=sys.argv[1], quiet=True) as mm, torch.no_grad():
    kept, looks = [], []
    for _ in range(64):
        kept.append(torch.randn(512, 512))
        told()
    assert len(looks) <= 7, len(looks)
"""


@pytest.mark.parametrize("policy", ["auto", "delta"])  # `delta` has a thread of its own, which does not train
def test_who_asks_in_the_middle_of_a_run_is_told_the_kinds(policy: str) -> None:
    """Also where memory has never been short; and a loop that asks for every batch does not pay a look each time."""
    done = forkserver.run([sys.executable, "-c", ASKS, policy], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_log_shows_the_kinds_and_never_more_than_the_budget(tight: dict[str, Any], log: Path) -> None:
    """When a budget closes all tensors are restored, at any limit: that is no part of the run."""
    stats = tight["stats"]
    found = [json.loads(line) for line in log.read_text().splitlines()]
    samples = [line for line in found if line["type"] == "sample"]
    assert samples and max(one["resident_bytes"] for one in samples) <= stats["budget_bytes"]
    assert found[-1]["stats"]["moved_bytes.optimizer_states"] >= stats["moved_bytes.optimizer_states"] > 0


@pytest.mark.parametrize("way", ["loop", "foreach", "fused"])
def test_states_have_no_bytes_until_they_are_touched(way: str, beyond: Callable[[str], int]) -> None:
    """Where room is short, an optimizer's initial states take none; plain zeros have their bytes at once."""

    def make() -> tuple[list[nn.Parameter], torch.optim.AdamW]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(128, 128)) for _ in range(8)]
        for p in params:
            p.grad = torch.randn_like(p)
        return params, torch.optim.AdamW(params, foreach=way == "foreach", fused=way == "fused")

    def plain() -> list[bytes]:
        params, optimizer = make()
        optimizer.step()
        return [p.detach().numpy().tobytes() for p in params]

    want = plain()  # as bytes: a tensor would count, and leave
    with memmgr.budget(beyond("1300kB"), quiet=True) as mm:
        params, optimizer = make()
        before = binding.load().resident()
        lists: list[list[Any]] = [[] for _ in range(6)]
        optimizer._init_group(optimizer.param_groups[0], *lists)
        states = [optimizer.state[p][name] for p in params for name in ("exp_avg", "exp_avg_sq")]
        assert mm.stats()["offload_bytes"] == 0
        assert binding.load().resident() - before < sum(s.nbytes for s in states) / 16  # the steps' counts, and bits
        assert {binding.load().describe(s)["residency"] for s in states} <= {"evicted", "packed"}
        assert all((s == 0).all() for s in states)
        ordinary = torch.zeros_like(params[0])
        assert binding.load().describe(ordinary)["residency"] == "resident"
        optimizer.step()
    assert mm.stats()["resident_bytes.peak"] <= mm.stats()["budget_bytes"]
    assert [p.detach().numpy().tobytes() for p in params] == want
