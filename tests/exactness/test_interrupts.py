"""Ctrl-C at every place of memmgr's Python, one after the other: the state afterwards must be as if it had not come.

A trace function raises KeyboardInterrupt where the interpreter begins a line or a call of the package, which is where a
real one can come, among other places: `test_threads.py` sends real ones at random times. One place is no real one: a
trace function may also raise at the end of a `with`, before its `__exit__` is called, where the interpreter never looks.
"""

import gc
import hashlib
import itertools
import linecache
import os
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from budget.there import bytes_already_there
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memmgr
from memmgr.native import binding
from memmgr.readers.readers import Readers
from memmgr.runtime.compiled import CompiledGraphs
from memmgr.runtime.periods import Periods
from memmgr.runtime.steps import SlicedSteps
from memmgr.telemetry.publisher import Telemetry

from .harness import Record, differences, global_state

GENERATOR = 0x20  # inspect.CO_GENERATOR: Python swallows exceptions raised in a generator that is being dropped


class Interrupt:
    """Raises at the `at`-th line or call of the package, or of these modules of it, that this thread comes to."""

    def __init__(self, at: int, modules: tuple[str, ...] = ("",)) -> None:
        self._at = at
        self._modules = tuple(f"memmgr.{module}" for module in modules)
        self.seen = 0
        self.where = ""

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _come(self, frame: FrameType) -> None:
        self.seen += 1
        if self.seen == self._at:
            self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
            raise KeyboardInterrupt

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not frame.f_globals.get("__name__", "").startswith(self._modules):
            return None
        if frame.f_code.co_flags & GENERATOR and frame.f_code.co_name.startswith("<"):
            return None
        self._come(frame)
        lines: set[int] = set()

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            number = frame.f_lineno
            if event == "line":
                again = number in lines and linecache.getline(name, number).strip().startswith("with ")
                if not again:
                    lines.add(number)
                    self._come(frame)
            return line

        return line


class Training:
    """Two passes, or more, from the same parameters and random numbers each time, through so many blocks."""

    def __init__(self, passes: int = 2) -> None:
        torch.manual_seed(0)
        blocks = [[nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32), nn.Tanh()] for _ in range(passes)]
        self.model = nn.Sequential(*itertools.chain(*blocks))
        self.data = [torch.randn(256, 32) for _ in range(passes)]
        self.start = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.rng = torch.get_rng_state()

    def restore(self) -> None:
        self.model.zero_grad(set_to_none=True)
        torch.set_rng_state(self.rng)

    def passes(self) -> None:
        for x in self.data:
            self.model(x).square().mean().backward()

    def result(self) -> Record:
        record = Record()
        record.model(self.model)
        record.put("rng", torch.get_rng_state())
        return record

    def run(self) -> Record:
        self.restore()
        self.passes()
        return self.result()


def limited(share: float) -> tuple[Training, int]:
    """A training, and a budget of this share of its need in addition to existing bytes."""
    there = bytes_already_there()
    training = Training()
    with memmgr.budget(8 << 30, quiet=True) as mm:
        training.run()
    return training, there + int((mm.stats()["unmanaged_peak_bytes"] - there) * share)


def nothing_stays(training: Training, before: dict[str, Any]) -> None:
    training.restore()
    gc.collect()
    after = global_state()
    assert not {k: (before[k], after[k]) for k in before if before[k] != after[k]}


def numbers() -> bytes:
    return hashlib.sha1(torch.get_rng_state().numpy().tobytes()).digest()


def random_states(training: Training) -> set[bytes]:
    """The generator's states that an unmanaged run passes through."""
    legitimate = {numbers()}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            legitimate.add(numbers())
            return out

    training.restore()
    with Watch():
        training.passes()
    return legitimate


# Auto evicts and offloads. Torture takes as long as the other three, and offload twice as long as auto.
@pytest.mark.parametrize(
    ("policy", "share"),
    [
        ("auto", 0.6),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("offload", 0.5), ("evict", 0.7), ("torture", 1.0))),
    ],
)
def test_an_interrupt_of_a_reader_leaves_nothing(policy: str, share: float) -> None:
    """The pager has Python only where bytes are read without an op, and around backward."""
    training, limit = limited(share)
    legitimate = random_states(training)

    def passes() -> None:
        training.passes()
        for p in training.model.parameters():
            assert p.grad is not None
            p.grad.tolist()
            p.grad.untyped_storage()[0]
            training.data[0].sum().item()
        torch.set_rng_state(torch.get_rng_state())

    want = training.run()
    before = global_state()
    faults: list[str] = []
    with memmgr.budget(limit, policy=policy, quiet=True) as mm:
        native = binding.load()
        for _ in range(3):
            training.run()
        training.restore()
        native.drain()
        pinned = native.stats()["pinned_cells"]
        at, reached = 0, True
        while reached:
            at += 1
            training.restore()
            with Interrupt(at) as interrupt:
                try:
                    passes()
                except KeyboardInterrupt:
                    pass
                except Exception as error:
                    faults.append(f"{interrupt.where}: {type(error).__name__}: {error}")
            reached, where = interrupt.where != "", interrupt.where
            if numbers() not in legitimate:
                faults.append(f"{where}: the generator is in a state that no unmanaged run passes through")
            if any(not torch.equal(v, training.start[k]) for k, v in training.model.named_parameters()):
                faults.append(f"{where}: a parameter changed")
            faults += [f"{where}: {line}" for line in differences(want, training.run())]
            training.restore()
            native.drain()
            native.check()
            if native.stats()["pinned_cells"] != pinned:
                faults.append(f"{where}: {native.stats()['pinned_cells']} cells are pinned, {pinned} before")
            assert len(faults) < 5, faults
        assert at > 30, "nothing was interrupted"
    assert not faults
    assert mm.stats()["evictions"] + mm.stats()["offloads"] > 0
    assert mm.stats()["resident_bytes.peak"] <= limit
    nothing_stays(training, before)


OPENING = {
    "open readers": (Readers, "install"),
    "open graphs": (CompiledGraphs, "install"),
    "open steps": (SlicedSteps, "install"),
    "open telemetry": (Telemetry, "start"),
    "open periods": (Periods, "begin"),
}
PARTS = ("open", *OPENING, "look", "periods", "plans", "ranker", "steps", "graphs", "native", "readers", "job")


@pytest.mark.parametrize("part", PARTS)
def test_an_interrupt_that_comes_while_c_runs_leaves_no_budget_open(part: str) -> None:
    """It is raised when that call returns, which a trace function cannot do: in the longest calls of opening and closing."""
    before = global_state()
    interrupted = 0
    patches = pytest.MonkeyPatch()  # the fixture's `undo` would also undo the patches of conftest.py

    def interrupt(owner: Any, name: str) -> None:
        run = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> None:
            nonlocal interrupted
            run(*args, **kwargs)
            patches.undo()
            interrupted += 1
            raise KeyboardInterrupt

        patches.setattr(owner, name, call)

    mm = memmgr.budget(1 << 30, quiet=True)
    kept: list[torch.Tensor] = []

    def run() -> None:
        if part == "open":
            interrupt(binding.load(), "open")
        elif part in OPENING:
            interrupt(*OPENING[part])
        with mm:
            runtime = mm._runtime
            assert runtime is not None
            kept.append(torch.randn(256, 256) + 1)
            assert runtime.native.take_away(kept[0]) > 0
            parts = {"look": (runtime._purposes, "look_for_new"), "job": (runtime.job, "close")}
            parts |= {name: (getattr(runtime, f"_{name}"), "remove") for name in ("steps", "graphs", "readers")}
            parts |= {name: (getattr(runtime, f"_{name}"), "close") for name in ("periods", "ranker")}
            parts |= {"plans": (runtime.plans, "close"), "native": (runtime.native, "close")}
            interrupt(*parts[part])

    with pytest.raises(KeyboardInterrupt):
        run()
    assert interrupted == 1
    gc.collect()
    after = global_state()
    assert not {k: (before[k], after[k]) for k in before if before[k] != after[k]}
    with memmgr.budget(1 << 30, quiet=True):
        kept.append(torch.randn(256, 256) + 1)
    for tensor in kept:
        assert tensor.square().sum() > 0
