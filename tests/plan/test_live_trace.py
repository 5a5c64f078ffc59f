"""A measured pass: what the trace says of it, that it changes nothing, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memmgr
from memmgr import _budget
from memmgr._manager import Manager
from memmgr._trace import BETWEEN, Measured, Tracer
from memmgr._trace_file import read_trace
from memmgr.policies.plan.planner import plan
from memmgr.policies.rules.registry import parse_policy
from memmgr.policies.simulate import base as simulation
from memmgr.policies.simulate.simulator import simulate
from memmgr.policies.trace import HELD, Op, OpKind, TierLink, Trace
from memmgr.policies.trace.columns import Problem
from memmgr.policies.trace.least_memory import least_bytes
from memmgr.policies.trace.schedule import replay
from memmgr.tools import cli
from tests.budget import models
from tests.budget.there import bytes_already_there

TINY: dict[str, Callable[[], models.Training]] = {
    "gpt": lambda: models.gpt(layers=2, width=64, context=64, batch=4),
    "mlp": lambda: models.mlp(depth=4, width=64, batch=512),
    "convnet": lambda: models.convnet(width=8, stages=2, blocks=2, batch=4, height=24),
    "unet": lambda: models.unet(width=8, batch=2, height=48),
    "densenet": lambda: models.densenet(layers=4, growth=8, batch=4, height=24),
    "lstm": lambda: models.lstm(width=32, time=12, batch=64),
}


def manager() -> Manager:
    found = _budget.current()
    assert found is not None
    return found


def measure(step: Callable[[], Any], limit: int | None = None, **options: Any) -> Measured:
    """The third of three steps, measured."""
    options.setdefault("disk", False)
    with memmgr.budget(limit, quiet=True, _sleep=False, **options):
        step()
        manager().measuring.want()
        step()
        step()
        found = manager().measuring.last
    assert found is not None
    return found


def recorded_ops(step: Callable[[], Any]) -> float:
    """Of one step under a budget."""
    with memmgr.budget(None, quiet=True, _sleep=False, disk=False) as opened:
        step()
        return float(opened.stats()["recorded_ops"])


def program(trace: Trace) -> list[tuple[int, Op]]:
    """The program's own ops, with their numbers in the trace."""
    return [(k, op) for k, op in enumerate(trace.ops) if op.kind != OpKind.CONSTANT and op.name != BETWEEN]


def bits(training: models.Training) -> str:
    digest = hashlib.sha256()
    for value in training.model.state_dict().values():
        digest.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---- a pass written down by hand


@dataclass
class Small:
    """x (64, 32) and w (32, 64): all tensors of the pass are of 64 x 64 floats, but for the loss and w's gradient."""

    w: nn.Parameter
    x: Tensor

    def step(self) -> None:
        h = self.x @ self.w  # saves x
        r = h.relu()  # saves r
        del h
        v = r.exp().view(32, 128)  # exp saves its result
        q = v * v  # saves v twice
        q.add_(1)
        loss = q.sum()
        del r, v, q
        loss.backward()
        self.w.grad = None


@pytest.fixture
def small() -> tuple[Trace, Measured]:
    torch.manual_seed(0)
    training = Small(nn.Parameter(torch.randn(32, 64)), torch.randn(64, 32))
    found = measure(training.step)
    return found.trace, found


def test_the_ops_are_those_of_the_program(small: tuple[Trace, Measured]) -> None:
    trace, found = small
    ops = [op for _, op in program(trace)]
    forward = [
        op.name.removeprefix("aten::") for op in ops[: next(i for i, o in enumerate(ops) if "ones_like" in o.name)]
    ]
    assert forward == ["mm", "relu", "exp", "view", "mul", "add_", "sum"]
    assert [n for n in found.numbers if n >= 0] == list(range(len(ops)))
    assert trace.backward_at is not None
    later = [op.name.removeprefix("aten::") for k, op in program(trace) if k >= trace.backward_at]
    # v saved twice: v * g, twice, and their sum; then exp's, relu's, mm's derivative for w alone.
    made = [name for name in later if name not in ("detach", "t", "view", "expand")]
    assert made == ["mul", "mul", "add", "mul", "threshold_backward", "mm"]


def test_sizes_views_writes_and_releases(small: tuple[Trace, Measured]) -> None:
    trace, _ = small
    whole = 64 * 64 * 4
    by_name = {op.name.removeprefix("aten::"): (k, op) for k, op in reversed(program(trace))}
    size = [s.size_bytes for s in trace.storages]
    constants = {trace.storages[s].name: size[s] for s in trace.constants}
    assert constants["c.parameter.0"] == constants["c.tensor.0"] == 64 * 32 * 4
    (mm, relu, exp, view, mul, add, total) = (by_name[n] for n in ("mm", "relu", "exp", "view", "mul", "add_", "sum"))
    for _, op in (mm, relu, exp, mul):
        assert [size[s] for s in op.outputs] == [whole] and op.kind == OpKind.COMPUTE
    assert sum(size[s] for s in total[1].outputs) == 64  # the least that a block takes
    h, r, e, q = (op.outputs[0] for _, op in (mm, relu, exp, mul))
    # views make nothing and name their storage
    assert (view[1].kind, view[1].outputs, view[1].inputs) == (OpKind.VIEW, (), (e,))
    assert mul[1].inputs == (e,)
    # in place: a new version in the same block; the old one is over
    new = add[1].outputs[0]
    assert add[1].writes == ((q, new),) and add[1].inputs == (q,) and size[new] == whole
    assert trace.storages[q].released == add[0] + 1 and add[1].kind == OpKind.COMPUTE
    # h dies when relu has it, the new version with the sum; nobody saved either, so both are the program's until then
    assert trace.storages[h].released == trace.storages[h].pinned_until == relu[0] + 1
    assert trace.storages[new].released == trace.storages[new].pinned_until == total[0] + 1
    assert trace.storages[r].released > trace.backward_at  # type: ignore[operator]
    assert trace.storages[e].pinned_until in (total[0] + 1, mul[0] + 1, add[0] + 1)
    # at the end there is the loss and w's gradient
    held = [s for s in trace.held_at_end if s not in trace.constants]
    assert sorted(size[s] for s in held if size[s] > 64) == [64 * 32 * 4]


def test_saves_and_uses(small: tuple[Trace, Measured]) -> None:
    trace, found = small
    name = {s: storage.name for s, storage in enumerate(trace.storages)}
    ops = {op.name.removeprefix("aten::"): op for _, op in reversed(program(trace))}
    x, r, e = (ops["mm"].inputs[0], ops["relu"].outputs[0], ops["exp"].outputs[0])
    assert name[x] == "c.tensor.0"
    assert found.save_index == {x: 0, r: 1, e: 2}  # w is not: x wants no gradient
    assert x in ops["mm"].saves and e in ops["mul"].saves
    assert {s for _, op in program(trace) for s in op.saves} == {x, r, e}
    uses = [s for k, op in enumerate(trace.ops) if k >= (trace.backward_at or 0) for s in op.uses]
    assert list(dict.fromkeys(uses)) == [e, r, x]  # last saved, first used
    assert not any(op.uses for op in trace.ops[: trace.backward_at])


def test_backward_cannot_run_again(small: tuple[Trace, Measured]) -> None:
    trace, _ = small
    assert {op.kind for op in trace.ops[trace.backward_at :]} <= {OpKind.ONCE, OpKind.VIEW, OpKind.CONSTANT}
    assert trace.device == "cpu" and not trace.copy_on_write and trace.complete


# ---- six models


@pytest.fixture(scope="module", params=sorted(TINY))
def six(request: pytest.FixtureRequest) -> tuple[str, Measured, int]:
    torch.manual_seed(0)
    _there[request.param] = bytes_already_there()
    training = TINY[request.param]()
    with memmgr.budget(None, disk=False, quiet=True, _sleep=False):
        training.step()
        manager().measuring.want()
        training.step()
        manager()._peaks = [0, 0]  # what the passes before needed, first steps of the optimizer among them
        training.step()
        found = manager().measuring.last
        peak = manager()._peaks[1]
    assert found is not None
    return request.param, found, peak


_there: dict[str, int] = {}  # what tests before these have left behind in the process, of each model's peak


def test_the_peak_is_the_allocators(six: tuple[str, Measured, int]) -> None:
    _, found, peak = six
    traced, at = found.trace.unmanaged_peak
    assert abs(traced / peak - 1) <= 0.02
    assert found.unmanaged_peak_bytes == peak
    assert at > 0


def test_a_trace_is_sound(six: tuple[str, Measured, int], tmp_path: Path) -> None:
    from memmgr._trace_file import write_trace

    _, found, _ = six
    trace = found.trace.check()
    assert 0 < (trace.backward_at or 0) < len(trace.ops)
    saved = [s for op in trace.ops for s in op.saves]
    assert set(found.save_index) == set(saved)
    assert set(found.save_index.values()) == set(range(max(found.save_index.values()) + 1))
    assert all(trace.storages[s].released <= len(trace.ops) for s in saved if s not in trace.constants)
    write_trace(tmp_path / "x.gz", trace)
    assert read_trace(tmp_path / "x.gz") == trace


def test_it_can_be_planned_and_simulated(six: tuple[str, Measured, int]) -> None:
    name, found, _ = six
    trace = found.trace
    there = _there[name]
    budget = there + int((trace.unmanaged_peak[0] - there) * 0.85)
    run = simulate(trace, budget, parse_policy("evict"))
    cost = replay(trace, run.steps, budget)
    assert run.feasible and cost.valid, (name, run.why, cost.why)
    made = plan(trace, budget)
    cost = replay(trace, made.steps, budget)
    assert made.feasible and cost.valid, (name, cost.why)
    assert trace.seconds < cost.seconds <= run.seconds * 1.02


class SavesUnseen(torch.autograd.Function):
    """Saves what was made below the dispatcher, which no op of the program reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2
        below = torch._C._DisableTorchDispatch()
        unseen = torch.ones(1 << 16)
        del below
        ctx.save_for_backward(unseen)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (unseen,) = ctx.saved_tensors
        return gradients[0] * 2 * unseen[0]


def test_what_was_made_unseen_may_be_saved() -> None:
    w = torch.ones(8, requires_grad=True)

    def step() -> None:
        SavesUnseen.apply(w.exp()).sin().sum().backward()
        w.grad = None

    trace = measure(step).trace
    (unseen,) = (k for k, s in enumerate(trace.storages) if s.size_bytes == 4 << 16)
    assert [op.name for op in trace.ops if unseen in op.saves] == ["aten::sin"]  # the next that was seen


def test_a_pass_that_cannot_be_written_down_costs_plans_only(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    training = Small(nn.Parameter(torch.randn(32, 64)), torch.randn(64, 32))
    monkeypatch.setattr("memmgr._trace.Rows.trace", lambda *_: {}[0])
    with memmgr.budget("1GB", quiet=True, _sleep=False):
        training.step()
        manager().measuring.want()
        training.step()
        with pytest.warns(UserWarning, match="could not be measured .KeyError: 0."):
            training.step()
        assert manager().measuring.last is None
        manager().measuring.want()
        training.step()  # and nobody measures any more
        training.step()


# ---- under pressure


def shape(found: Measured) -> list[Any]:
    """What must not depend on what left memory meanwhile: ops, and of their storages all but names and times."""
    trace = found.trace
    at = {k: n for k, n in enumerate(found.numbers) if n >= 0}

    def when(k: int) -> int:
        return HELD if k == HELD else max((n for q, n in at.items() if q < k), default=-1)

    number: dict[int, int] = {}

    def known(storages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number.setdefault(s, len(number)) for s in storages if "scratch" not in trace.storages[s].name)

    rows: list[Any] = []
    for _, op in program(trace):
        outputs = [trace.storages[s] for s in op.outputs if "scratch" not in trace.storages[s].name]
        ends = [(s.size_bytes, when(s.released), when(s.pinned_until)) for s in outputs]
        rows.append((op.name, op.kind, known(op.inputs), known(op.outputs), ends, known(op.saves), known(op.uses)))
    return rows


@pytest.mark.parametrize("name", ["gpt", "unet"])
@pytest.mark.parametrize("policy", ["evict", "offload", "torture"])
def test_identities_survive_what_leaves_and_comes_back(name: str, policy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    free = measure(TINY[name]().step)
    torch.manual_seed(0)
    training = TINY[name]()
    limit = int(free.unmanaged_peak_bytes * 0.8)
    tight = measure(training.step, limit, policy=policy, disk=False if policy == "evict" else tmp_path)
    stats = memmgr.stats()
    assert stats["evictions"] + stats["offloads"] > 0 and stats["resident_bytes.peak"] <= limit
    assert shape(tight) == shape(free)
    assert list(tight.save_index.values()) == list(free.save_index.values())


@pytest.mark.parametrize("policy", ["auto", "torture"])
def test_a_traced_pass_has_the_same_bits(policy: str, tmp_path: Path) -> None:
    made = []
    for traced in (False, True):
        torch.manual_seed(0)
        training = TINY["gpt"]()
        need = 0
        with memmgr.budget(None if not made else need or None, quiet=True, disk=False):
            losses = [training.step()]
            need = int(memmgr.stats()["unmanaged_peak_bytes"])
        with memmgr.budget(int(need * 0.7), policy=policy, disk=tmp_path, quiet=True, _plan=False):
            if traced:
                manager().measuring.want()
            losses += [training.step() for _ in range(3)]
            assert (manager().measuring.last is not None) is traced
        assert memmgr.stats()["evictions"] + memmgr.stats()["offloads"] > 0
        made.append((losses, bits(training), torch.get_rng_state().tolist()))
    assert made[0] == made[1]


# ---- what stays


def test_nothing_stays(tmp_path: Path) -> None:
    torch.manual_seed(0)
    training = TINY["unet"]()
    depth = torch._C._len_torch_dispatch_stack()
    seen: list[weakref.ref[Tensor]] = []
    handle = training.model.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    with memmgr.budget(None, quiet=True, disk=False, _sleep=False):
        for _ in range(2):
            training.step()
        before = manager().native.resident()
        tables = manager().native.table_size()[0]
        inside = torch._C._len_torch_dispatch_stack()
        manager().measuring.want()
        training.step()
        callback = manager().measuring.tracer
        assert callback is not None and callback.active
        references = sys.getrefcount(callback)
        training.step()
        assert not callback.active and manager().measuring.last is not None
        assert torch._C._len_torch_dispatch_stack() == inside
        gc.collect()
        assert manager().native.resident() == before
        assert manager().native.table_size()[0] <= tables
        assert sys.getrefcount(callback) < references  # the shim has let go of it
        assert not callback._ops and not callback._storages
        assert all(ref() is None for ref in seen)
    handle.remove()
    assert torch._C._len_torch_dispatch_stack() == depth


def test_what_dies_in_a_traced_pass_dies_at_once() -> None:
    with memmgr.budget(None, quiet=True, disk=False, _sleep=False):
        w = nn.Parameter(torch.randn(256, 256))
        manager().measuring.want()
        w.sum().backward()
        before = manager().native.resident()
        a = (w * 2).exp()
        assert manager().native.resident() > before
        del a
        assert manager().native.resident() == before


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_pass_that_fails_is_not_the_trace(where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("on purpose")

    w = nn.Parameter(torch.randn(64, 64))
    with memmgr.budget(None, quiet=True, disk=False, _sleep=False):
        manager().measuring.want()
        w.exp().sum().backward()
        with pytest.raises(ValueError, match="on purpose"):
            if where == "forward":
                w.exp().sum()
                raise ValueError("on purpose")
            Fails.apply(w.exp()).sum().backward()  # type: ignore[no-untyped-call]
        assert manager().measuring.last is None
        w.exp().sum().backward()
        found = manager().measuring.last
        if where == "backward":  # ... ends a pass, so the next one is whole
            assert found is not None
            assert [op.name for _, op in program(found.trace)][:2] == ["aten::exp", "aten::sum"]
        else:  # the pass went on until the next backward
            assert found is not None
            assert [op.name for _, op in program(found.trace)].count("aten::exp") == 2


def test_the_optimizers_step_is_not_part_of_it() -> None:
    w = nn.Parameter(torch.randn(64, 64))
    momentum = torch.zeros_like(w)

    def step() -> None:
        w.sin().sum().backward()
        with torch.no_grad():
            momentum.mul_(0.9).add_(w.grad)
            w.sub_(momentum)
        w.grad = None

    trace = measure(step).trace
    names = [op.name.removeprefix("aten::") for _, op in program(trace)]
    assert names[:2] == ["sin", "sum"] and "sub_" not in names
    elsewhere = sum(s.size_bytes for s in trace.storages if s.name.startswith("c.elsewhere"))
    assert elsewhere >= momentum.nbytes


# ---- how one asks for it


def test_a_budget_writes_its_trace(tmp_path: Path) -> None:
    torch.manual_seed(0)
    training = TINY["mlp"]()
    with memmgr.budget(None, trace=tmp_path / "run.trace", trace_pass=2, quiet=True, disk=tmp_path):
        training.step()
        assert not (tmp_path / "run.trace").exists()
        training.step()
        written = read_trace(tmp_path / "run.trace")
        training.step()
        assert manager().measuring.last is not None and manager().measuring.last.trace == written  # type: ignore[union-attr]
    assert [link.tier for link in written.links] == ["disk"]
    with pytest.raises(ValueError, match="trace_pass: 0"):
        memmgr.budget(None, trace=tmp_path / "x", trace_pass=0)
    with pytest.raises(ValueError, match=r"trace: .* is not a file in a folder that exists"):
        memmgr.budget(None, trace=tmp_path / "no" / "x")


def test_the_sleeper_wakes_for_it() -> None:
    training = TINY["mlp"]()
    with memmgr.budget("1GB", quiet=True):
        for _ in range(4):
            training.step()
        assert manager().sleeper.asleep
        manager().measuring.want()
        training.step()
        training.step()
        assert manager().measuring.last is not None and len(program(manager().measuring.last.trace)) > 10  # type: ignore[union-attr]
        for _ in range(3):
            training.step()
        assert manager().sleeper.asleep


SCRIPT = """
import torch
w = torch.nn.Parameter(torch.randn(64, 64))
for _ in range(3):
    w.exp().sum().backward()
"""


def test_the_verb(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import subprocess

    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-P", "-m", "memmgr.tools.cli", "trace", "--out", "run.trace"]
    done = subprocess.run([*words, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "memmgr simulate --log run.trace" in done.stderr
    names = [op.name for _, op in program(read_trace(tmp_path / "run.trace"))]
    assert names[:2] == ["aten::exp", "aten::sum"]
    capfd.readouterr()
    assert cli.main(["simulate", "--log", str(tmp_path / "run.trace"), "--ratio", "1", "--json"]) == 0
    assert '"feasible": true' in capfd.readouterr().out
    late = subprocess.run(
        [*words, "--pass", "9", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert "3 whole passes, and pass 9 was to be recorded" in late.stderr
    assert cli.main(["trace", "--out", str(tmp_path / "no" / "x"), "train.py"]) == 2
    assert "--out" in capfd.readouterr().err


def test_a_node_of_backward_has_what_it_asked_for_until_it_ends() -> None:
    """A product's node makes two gradients, one after the other; both operands stay until the second is there."""
    torch.manual_seed(0)
    w, v = (nn.Parameter(torch.randn(1, 48, 48)) for _ in range(2))

    def step() -> None:
        torch.bmm(w + 1, v + 1).exp().sum().backward()
        w.grad = v.grad = None

    trace = measure(step).trace
    adds = [op for _, op in program(trace) if op.name == "aten::add"]
    operands = [s for op in adds for s in op.outputs if trace.storages[s].size_bytes >= 4 * 48 * 48]
    assert len(operands) == 2
    _, first, second = (k for k, op in program(trace) if op.name == "aten::bmm")
    for s in operands:
        assert trace.storages[s].released == second + 1
        assert s in trace.ops[second].wanted
    assert not set(operands) <= set(trace.ops[second].inputs)  # it reads one of them
    assert any(set(operands) & set(op.uses) for k, op in program(trace) if k <= first)


@contextlib.contextmanager
def measuring() -> Iterator[tuple[Callable[[], None], Tracer]]:
    """A step with ops that write, at the beginning of a pass that is measured."""
    _, step = dropouts()
    with memmgr.budget(None, quiet=True, _sleep=False, disk=False):
        tracer = manager().measuring.tracer
        assert tracer is not None
        step()
        manager().measuring.want()
        step()
        yield step, tracer


@pytest.mark.parametrize("moment", ["_wrote", "_event"])
def test_ctrl_c_while_an_op_is_noted(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a pass, or when it is over: no trace is made of it, and the passes after it are like any other."""
    with measuring() as (step, tracer):
        passes = manager().passes
        calls = []
        original = getattr(tracer, moment)

        def interrupted(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return original(*args)

        if moment == "_wrote":
            tracer.abort()  # the shim was given the original
            monkeypatch.setattr(tracer, moment, interrupted)
            tracer.begin()
        else:
            monkeypatch.setattr(tracer, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            step()
        assert len(calls) == 3
        assert manager().measuring.last is None and not manager().last.in_backward
        assert manager().passes == passes + (moment == "_event")
        step()
        step()
        step()
        found = manager().measuring.last
    assert found is not None and found.trace.check()
    assert sum(op.name == "aten::div_" for op in found.trace.ops) == 2


def test_an_op_that_fails_is_in_no_trace() -> None:
    with measuring() as (step, _):
        with pytest.raises(RuntimeError, match="shapes"):
            torch.ones(2, 3, requires_grad=True) @ torch.ones(2, 3)
        assert not manager().measuring.here
        step()
        assert manager().measuring.last is None
        step()
        assert manager().measuring.last is not None


def test_a_mode_that_a_closed_budget_left_does_nothing_twice() -> None:
    """A thread that did not close the budget keeps its mode, and the next budget puts another on top."""

    _, step = dropouts()
    recorded, trace = recorded_ops(step), measure(step).trace
    first = memmgr.budget(None, quiet=True, _sleep=False, disk=False)
    first.__enter__()
    step()
    thread = threading.Thread(target=first.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    try:
        again, second = recorded_ops(step), measure(step).trace
    finally:
        torch._C._pop_torch_dispatch_stack(None)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert again == recorded
    ops, others = ([op.name for op in t.ops if op.name.startswith("aten::")] for t in (second, trace))
    assert ops == others
    assert sum(op.name == "aten::div_" for op in second.ops) == 2


def test_a_budget_that_is_opened_inside_an_op_records() -> None:
    """The op is in the hand of a mode whose budget another thread has closed meanwhile; the new one's mode is not below it."""
    _, step = dropouts()
    want = recorded_ops(step)
    first = memmgr.budget(None, quiet=True, _sleep=False, disk=False)
    recorded = []
    keys = torch._C.DispatchKey

    @torch.library.custom_op("memmgr_tests::opens_a_budget", mutates_args=())
    def opens_a_budget(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=first.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        exclude = torch._C._dispatch_tls_local_exclude_set()
        for key in (keys.AutogradFunctionality, keys.ADInplaceOrView, keys.AutogradCPU, keys.AutogradOther):
            exclude = exclude.remove(key) if exclude.has(key) else exclude - torch._C.DispatchKeySet(key)
        guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)
        with guard, torch.enable_grad():
            recorded.append(recorded_ops(step))
        return x + 1

    first.__enter__()
    try:
        opens_a_budget(torch.ones(4))
    finally:
        torch._C._pop_torch_dispatch_stack(None)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert recorded == [want]


def test_what_is_too_long_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward after forward, say, with grad mode on."""
    with measuring() as (step, tracer):
        tracer.abort()
        monkeypatch.setattr("memmgr._trace.MOST_OPS", 20)
        tracer.begin()
        step()
        assert manager().measuring.last is None
        monkeypatch.undo()
        step()
        assert manager().measuring.last is None, "it began with the limit that was"
        step()
        assert manager().measuring.last is not None


# ---- what leaves bits behind


def dropouts(n: int = 1 << 15) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 8))
    x = torch.randn(n // 64, 64)

    def step() -> None:
        model(x).pow(2).sum().backward()
        model.zero_grad()

    return model, step


def test_a_mask_is_made_of_its_bits() -> None:
    """In the trace, as an eviction leaves it: the op that draws makes the bits, the one that scales makes the mask of them."""
    n = 1 << 15
    _, step = dropouts(n)
    step()
    measured = measure(step)
    trace = measured.trace
    scaled = [(k, op) for k, op in program(trace) if op.name == "aten::div_"]
    assert len(scaled) == 2
    for k, op in scaled:
        (drawn,) = op.inputs
        maker = trace.ops[trace.storages[drawn].maker]
        (mask,) = op.outputs
        assert maker.name == "aten::bernoulli_" and trace.storages[drawn].size_bytes == n // 8
        assert op.writes == () and op.seconds > 0 and maker.seconds >= 0
        assert trace.storages[drawn].released == trace.storages[mask].released > k + 1
        assert trace.storages[drawn].pinned_until == trace.storages[drawn].released, "nobody can let go of them"
    whole, bits = measured.unmanaged_peak_bytes, 2 * n // 8
    assert whole <= trace.unmanaged_peak[0] <= whole + bits
    # Less than what one mask takes; other tests may have left something that counts as well.
    made = plan(trace, whole - n, solve=False)
    assert made.feasible
    again = [trace.ops[s.target].name for s in made.steps if s.do.name == "RECOMPUTE"]
    assert "aten::div_" in again and "aten::bernoulli_" not in again


def test_planned_passes_keep_bits() -> None:
    def train(into: dict[str, Any] | None = None, **options: Any) -> str:
        torch.manual_seed(0)
        training = TINY["gpt"]()
        with memmgr.budget(quiet=True, **options) if options else contextlib.nullcontext() as mm:
            for _ in range(8):
                training.step()
                if mm is not None and manager().plans.thread is not None:
                    manager().plans.thread.join()
        if into is not None:
            into.update(mm.stats())
        return bits(training)

    want = train()
    free: dict[str, Any] = {}
    there = bytes_already_there()
    assert train(free, limit=None) == want
    tight: dict[str, Any] = {}
    limit = bytes_already_there() + (free["unmanaged_peak_bytes"] - there) * 6 // 10
    assert train(tight, limit=limit, policy="evict") == want
    assert tight["planned_passes"] > 0 and tight["binarized"] > 0


def test_near_the_floor_a_simulated_run_offloads_what_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = dropouts()
    step()
    trace = measure(step).trace
    trace = replace(
        trace, ops=tuple(replace(op, seconds=1e-3) for op in trace.ops)
    )  # whatever the machine did meanwhile
    least = least_bytes(Problem.of(trace))
    fast = TierLink("disk", 1e9, 1e9)
    assert simulate(trace, int(1.01 * least), parse_policy("auto"), fast).feasible
    slow = TierLink("disk", 1e7, 1e7)  # so that dropping is what the policy would rather do
    assert simulate(trace, int(1.01 * least), parse_policy("auto"), slow).feasible
    monkeypatch.setattr(simulation, "room_bytes", lambda trace: [0] * len(trace.storages))
    assert not simulate(trace, int(1.01 * least), parse_policy("auto"), slow).feasible, "the test tests nothing"


def test_a_node_holds_what_it_asked_for_although_the_next_one_asks_for_it_too() -> None:
    """Of a result that two nodes save a plan once let go between two ops of the first; live it could not leave there."""
    layer = torch.nn.Linear(64, 64)
    x = torch.randn(512, 64)

    def step() -> None:
        torch.tanh(layer(x)).pow(3).mean().backward()  # tanh saves its result, and pow saves it as its input

    trace = measure(step).trace
    made = next(op.outputs[0] for _, op in program(trace) if op.name == "aten::tanh")
    back = [(k, op) for k, op in program(trace) if k >= (trace.backward_at or 0)]
    first = next(i for i, (_, op) in enumerate(back) if made in op.uses)
    last = next(i for i, (_, op) in enumerate(back) if op.name == "aten::tanh_backward")
    assert sum(made in op.inputs for _, op in back[first:last]) < last - first, "every op reads it: nothing is tested"
    assert all(made in op.uses for _, op in back[first : last + 1])
    assert not any(made in op.uses for _, op in back[last + 1 :])
