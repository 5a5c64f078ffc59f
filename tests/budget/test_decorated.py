"""`@memmgr.budget(...)`: one budget over all calls of a function, so that steps share plans and a summary."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import forkserver
import pytest
import torch
from threads import in_threads

import memmgr
from memmgr.api.budget import current

LIMIT = "12MB"


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    yield
    with memmgr.budget(None, device="cpu", quiet=True):
        pass  # a budget that a test has left open between calls gives way
    assert current() is None


def _training() -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    layers = (
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)
    )
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2048, 64)

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_steps_keep_one_budget_its_plans_and_its_summary(capfd: pytest.CaptureFixture[str]) -> None:
    plain = _training()
    want = [plain().item() for _ in range(40)]
    mm = memmgr.budget(LIMIT, device="cpu", policy="offload")  # auto plans for seconds
    step = mm(_training())
    made = [step().item() for _ in range(20)]
    runtime: Any = current()
    runtime.plans.wait()  # on a busy machine the planner's process needs longer than 40 steps
    made += [step().item() for _ in range(20)]
    assert made == want
    assert "open" in repr(mm) and capfd.readouterr().err == ""
    stats = mm.stats()
    assert stats["passes"] == 40 and stats["planned_passes"] > 0, "each call began anew"
    assert stats["resident_bytes.peak"] <= 12_000_000 < stats["unmanaged_peak_bytes"]
    mm.close()
    said = capfd.readouterr().err
    assert said.count("memmgr: peak") == 1 and "40 passes" in said and repr(mm).endswith("closed>")
    mm.close()
    assert capfd.readouterr().err == ""


def test_at_the_end_of_the_process_it_has_its_summary() -> None:
    code = """
import torch, memmgr
w = torch.randn(256, 256, requires_grad=True)
@memmgr.budget("8MB", device="cpu")
def step():
    (w @ w).sum().backward()
for _ in range(3):
    step()
"""
    done = forkserver.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"memmgr: peak .* of 8 MB .*; (\d+) passes", done.stderr) == ["3"], done.stderr


def test_between_calls_it_gives_way_to_another_budget() -> None:
    mm = memmgr.budget("8MB", device="cpu", quiet=True)
    step = mm(lambda: current() is not None)
    assert step() and current() is not None
    with memmgr.budget("16MB", device="cpu", quiet=True) as other:
        assert other.stats()["budget_bytes"] == 16_000_000
        with pytest.raises(RuntimeError, match="do not nest"):
            step()
    assert step() and mm.stats()["budget_bytes"] == 8_000_000


def test_while_a_call_is_under_way_it_does_not() -> None:
    def open_another() -> None:
        with memmgr.budget("16MB", device="cpu", quiet=True):
            pass

    with pytest.raises(RuntimeError, match="do not nest"):
        memmgr.budget("8MB", device="cpu", quiet=True)(open_another)()


def test_a_call_that_fails_closes_it_and_the_next_opens_it_anew() -> None:
    mm = memmgr.budget("8MB", device="cpu", quiet=True)

    @mm
    def step(fail: bool) -> None:
        if fail:
            raise KeyError("on purpose")

    step(False)
    with pytest.raises(KeyError):
        step(True)
    assert current() is None
    step(False)
    assert current() is not None


def test_functions_that_share_a_budget_call_each_other_and_themselves() -> None:
    mm = memmgr.budget("8GB", device="cpu", quiet=True)

    @mm
    def down(n: int) -> int:
        return down(n - 1) if n else other()

    @mm
    def other() -> int:
        return 7

    first = down(2)
    manager = current()
    assert first == other() == 7 and current() is manager


def test_threads_share_it() -> None:
    mm = memmgr.budget("8MB", device="cpu", quiet=True)
    step, met = mm(lambda: met.append(current()) or together.wait()), []  # type: ignore[func-returns-value]
    together = threading.Barrier(4, timeout=60)
    in_threads(lambda _: step(), range(4))
    assert len(met) == 4 and met[0] is not None and len(set(map(id, met))) == 1
