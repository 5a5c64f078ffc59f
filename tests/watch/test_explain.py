"""`memmgr.explain`: the holders of memory with their lines, and leaks."""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import itertools
import linecache
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import memmgr
from memmgr.api import budget as budgets
from memmgr.native import binding as native
from memmgr.observe import holdings, source_lines
from memmgr.observe.holdings import Explanation
from memmgr.observe.leaks import PASSES, TOLD_PASSES, Leak, Leaks
from memmgr.observe.slowness import end_of_leak
from memmgr.observe.source_lines import show

from .test_told_leaks import train

TOP = 5


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 96)
        self.rnn = nn.LSTM(96, 160, batch_first=True)
        self.head = nn.Linear(160, 500)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(tokens)
        hidden, _ = self.rnn(embedded)
        return self.head(hidden)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2)
        weights = scores.softmax(-1)
        return self.out(weights @ v)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 64)
        self.blocks = nn.ModuleList(Attention(64) for _ in range(2))
        self.head = nn.Linear(64, 200)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Convnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 24, 3, padding=1)
        self.head = nn.Linear(24, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(images).relu()
        x = torch.tanh(self.second(x))
        return self.head(x.mean((2, 3)))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], dict[str | tuple[str, int], str]]] = {
    "lstm": (
        Lstm,
        lambda: torch.randint(500, (8, 32)),
        {"mm": "self.head(hidden)", "mkldnn_rnn_layer": "self.rnn(embedded)"},
    ),
    "gpt": (
        Gpt,
        lambda: torch.randint(200, (8, 64)),
        {
            ("addmm", 192): "self.qkv(x)",
            ("addmm", 200): "self.head(x)",
            "bmm": "weights @ v",
            "_softmax": "scores.softmax(-1)",
            "add.Tensor": "x + block(x)",
        },
    ),
    "convnet": (
        Convnet,
        lambda: torch.randn(4, 3, 48, 48),
        {"relu": ".relu()", "tanh": "torch.tanh(", "randn": "torch.randn("},
    ),
}


def _text(line: Any) -> str:
    """The source of a line in a file of this folder."""
    return linecache.getline(str(Path(__file__).with_name(Path(line.file).name)), line.line)


@pytest.mark.parametrize("case", CASES)
def test_the_largest_holders_have_their_lines(case: str) -> None:
    make, data, calls = CASES[case]
    torch.manual_seed(0)
    with memmgr.budget(None, device="cpu", quiet=True):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(data()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = model(data())
        found = memmgr.explain()
    assert kept.requires_grad
    largest = [holder for holder in found.now if holder.by_op][:TOP]  # other tests may have left tensors
    assert len(largest) == TOP
    for holder in largest:
        assert len(holder.lines) == 1, holder
        text = _text(holder.lines[0])
        if holder.kind == "result":
            width = holder.bytes // holder.count // (4 * 8 * 64)
            assert (calls.get((holder.name, width)) or calls[holder.name]) in text, holder
        elif holder.kind == "optimizer state":
            assert "optimizer.step()" in text, holder
        else:
            assert holder.kind == "parameter", holder
            assert f"self.{holder.name.split('.')[-2]} = nn." in text, holder
    assert any(holder.kind == "made in backward" and "backward()" in _text(holder.lines[0]) for holder in found.peak)


def test_all_lines_and_modules_are_recorded_if_asked_for() -> None:
    torch.manual_seed(0)
    model = Gpt()
    with memmgr.budget(None, device="cpu", quiet=True, lines=True):
        for _ in range(6):  # pass 5 would not be recorded
            kept = model(torch.randint(200, (8, 64)))
            found = memmgr.explain()
            kept.square().mean().backward()
            model.zero_grad()
    results = [holder for holder in found.now if holder.kind == "result"]
    assert {holder.module for holder in results} >= {"Gpt", "Gpt.head", "Gpt.blocks.0", "Gpt.blocks.1.qkv"}
    assert all(len(holder.lines) == 1 for holder in results)
    assert "blocks.1.qkv.weight" not in str(found.leaks)


def _leaking(steps: int, hold: Callable[[list[torch.Tensor], torch.Tensor], None]) -> Explanation:
    found: list[Explanation] = []
    step = itertools.count(1)
    with memmgr.budget("6MB", device="cpu", quiet=True):
        train(steps, hold, lambda: found.append(memmgr.explain()) if next(step) == steps else None)
    return found[0]


def test_a_leak_is_told_within_ten_steps_with_its_line() -> None:
    found = _leaking(10, lambda held, y: held.append(y))
    assert [leak.ops for leak in found.leaks] == [("aten::addmm",)]
    (leak,) = found.leaks
    assert leak.line is not None
    assert "y = model(" in _text(leak.line)
    assert leak.bytes_per_pass == 256 * 64 * 4
    assert leak.since_pass == 1
    assert "a leak: +65.5 kB a step since step 1, made at " in str(found)


class _Recorder:
    everything: list[torch.Tensor] = []  # noqa: RUF012  # the leak that is looked for

    def __init__(self) -> None:
        self.history: list[torch.Tensor] = []
        self.by_step: dict[int, dict[str, torch.Tensor]] = {}
        self.last: torch.Tensor | None = None


class _Slots:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: deque[torch.Tensor] = deque()


LOSSES: list[torch.Tensor] = []
RECORDER = _Recorder()
SLOTS = _Slots()
HERE = show(__file__)


def _adder() -> Callable[[torch.Tensor | None], None]:
    kept: list[torch.Tensor] = []

    def add(y: torch.Tensor | None) -> None:
        kept.clear() if y is None else kept.append(y)

    return add


ADD = _adder()


def _consumer() -> Generator[None, torch.Tensor | None, None]:
    seen: list[torch.Tensor] = []
    while True:
        y = yield
        seen.clear() if y is None else seen.append(y)
        del y


CONSUMER = _consumer()
next(CONSUMER)
KEPT: dict[str, tuple[Callable[[list[torch.Tensor], torch.Tensor], object], str]] = {
    "global": (lambda mine, y: LOSSES.append(y), f"in the list `LOSSES` of {HERE}"),
    "local": (lambda mine, y: mine.append(y), "in the list `mine` of _kept()"),
    "attribute": (lambda mine, y: RECORDER.history.append(y), f"in the list `RECORDER.history` of {HERE}"),
    "slot": (lambda mine, y: SLOTS.kept.append(y), f"in the deque `SLOTS.kept` of {HERE}"),
    "dict": (
        lambda mine, y: RECORDER.by_step.setdefault(7, {}).update({str(len(RECORDER.by_step[7])): y}),
        f"in the dict `RECORDER.by_step[7]` of {HERE}",
    ),
    "class": (lambda mine, y: _Recorder.everything.append(y), "in the list `_Recorder.everything` of "),
    "closure": (lambda mine, y: ADD(y), "in the list `kept` of the closure _adder.<locals>.add()"),
    "generator": (lambda mine, y: CONSUMER.send(y), "in the list `seen` of the generator _consumer()"),
    "view": (lambda mine, y: mine.append(y.detach()[:1]), "in the list `mine` of _kept()"),
    "autograd": (
        lambda mine, y: mine.append(y.square().mean()),
        "by autograd, for tensors in the list `mine` of _kept()",
    ),
}


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    yield
    for kept in (LOSSES, RECORDER.history, RECORDER.by_step, SLOTS.kept, _Recorder.everything):
        kept.clear()
    ADD(None)
    CONSUMER.send(None)


def _kept(case: str) -> Explanation:
    hold = KEPT[case][0]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    mine: list[torch.Tensor] = []
    with memmgr.budget(None, device="cpu", quiet=True):
        for _ in range(9):
            y = model(torch.randn(256, 64))
            y.sum().backward(retain_graph=case == "autograd")
            hold(mine, y)
        del y
        return memmgr.explain()


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("case", KEPT)
def test_a_leak_has_the_variable_that_keeps_it(case: str) -> None:
    where = KEPT[case][1]
    found = _kept(case)
    assert found.leaks and all(leak.kept is not None for leak in found.leaks)
    leak = next(leak for leak in found.leaks if "aten::addmm" in leak.ops)
    assert leak.kept is not None and leak.kept.startswith(where), leak
    assert f" (addmm), kept {where}" in str(found) or f", kept {where}" in str(found)
    holder = next(holder for holder in found.now if holder.name == "addmm")
    assert where in holder.kept and f"kept {where}" in str(found)


def test_a_leak_that_c_code_keeps_is_not_given_a_variable() -> None:
    """A node of autograd in C++ refers to the tensor, and only its own next node refers to that node."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 256))
    with memmgr.budget(None, device="cpu", quiet=True):
        edges = [torch.autograd.graph.get_gradient_edge((weight * 2).exp().sum()) for _ in range(3)]
        found = memmgr.explain()
    assert edges
    results = [holder for holder in found.now if holder.kind == "result" and holder.name == "exp"]
    assert results and all(holder.kept == "" for holder in results), results


class _Ring:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y, self.me = y, self


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def _in_rings(keep: Callable[[_Ring], None]) -> list[str | None]:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    with memmgr.budget(None, device="cpu", quiet=True):
        for _ in range(9):
            y = model(torch.randn(256, 64))
            y.sum().backward()
            keep(_Ring(y))
        del y
        return [leak.kept for leak in memmgr.explain().leaks]


@pytest.mark.usefixtures("no_collection")
def test_a_leak_in_a_reference_cycle_is_told_as_one() -> None:
    assert _in_rings(lambda ring: None) == ["in a reference cycle of `_Ring`, which gc.collect() frees"]


def test_beside_a_reference_cycle_no_other_way_to_keep_less_is_advised() -> None:
    leak = Leak(1.0, 9, 0, 1, None, ("aten::mm",), kept="in a reference cycle of `_Ring`, which gc.collect() frees")
    assert "loss.item()" not in end_of_leak([leak.text()])
    assert "loss.item()" in end_of_leak([replace(leak, kept="in the list `losses` of train.py").text()])


@pytest.mark.usefixtures("no_collection")
def test_a_cycle_that_the_program_still_holds_is_not_said_to_be_freed() -> None:
    rings: list[_Ring] = []
    (kept,) = _in_rings(rings.append)
    assert kept and kept.startswith("in `rings[...].y` of ")
    numbers: list[int] = []

    def in_c(ring: _Ring) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(ring))
        numbers.append(id(ring))

    assert _in_rings(in_c) == [""]
    for number in numbers:
        ctypes.pythonapi.Py_DecRef(ctypes.cast(number, ctypes.py_object))


LIBRARY = """
from torch import nn

class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 256)

    def forward(self, x):
        return self.inner(x)
"""


def test_a_line_of_a_library_has_the_line_of_the_program_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "adapters_of_a_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    source_lines.library_folders.cache_clear()
    try:
        model = importlib.import_module("adapters_of_a_library").Adapter()
        kept = []
        with memmgr.budget(None, device="cpu", quiet=True) as mm:
            for _ in range(9):
                y = model(torch.randn(256, 64))
                y.sum().backward()
                kept.append(y.detach())
            found = memmgr.explain()
            (leak,) = mm.leaks
    finally:
        source_lines.library_folders.cache_clear()
    called = f"{HERE}:{_line_of('y = model(torch.randn(256, 64))', after='adapters_of_a_library')}"
    line = f"adapters_of_a_library.py:{LIBRARY.splitlines().index('        return self.inner(x)') + 1}"
    assert f"{line}, called from {called}" in found.by_line()
    assert (f"{leak['file']}:{leak['line']}", leak["caller"]) == (line, called)


def _line_of(text: str, after: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if f'"{after}"' in line)
    return next(i for i in range(first, len(lines)) if text in lines[i]) + 1


class _Proxy:
    """As a proxy of a web framework outside of a request: every look at it fails."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        object.__setattr__(self, "held", held)

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("outside of a request")


def test_an_object_that_cannot_be_looked_at_ends_no_budget() -> None:
    proxies: list[Any] = []
    found = None
    with memmgr.budget(None, device="cpu", quiet=True):
        for _ in range(9):
            y = nn.Parameter(torch.randn(64, 256)) * 2
            y.sum().backward()
            proxies.append(_Proxy([y]))
        del y
        found = memmgr.explain()
    assert found.leaks and proxies


@pytest.mark.usefixtures("nothing_stays")
def test_a_tensor_of_a_trace_with_symbolic_sizes_hides_no_variable() -> None:
    sized = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.randn(7, 5))
    found = _kept("global")
    assert sized is not None and all(leak.kept for leak in found.leaks)


def test_the_telemetrys_explanation_looks_for_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made again and again while a log is written."""
    monkeypatch.setattr(holdings, "Keepers", None)
    with memmgr.budget(None, device="cpu", quiet=True):
        kept = torch.randn(256, 256)
        runtime = budgets.last()
        assert runtime is not None and kept is not None
        assert runtime.figures.explain().now
    assert not any(holder.kept for holder in runtime.figures.explain().now)


def test_an_activation_has_its_module_by_its_line_where_none_was_recorded() -> None:
    torch.manual_seed(0)
    model, other = Gpt(), Convnet()
    with memmgr.budget(None, device="cpu", quiet=True):
        kept = [model(torch.randint(200, (8, 64))), other(torch.randn(4, 3, 48, 48))]
        found = memmgr.explain()
    assert kept
    modules = {holder.module for holder in found.now if holder.kind == "result"}
    assert {"Gpt", "Gpt.blocks.*", "Convnet"} <= modules, modules
    assert not any(module.endswith(".forward") for module in modules)


def test_a_line_of_a_notebook_has_the_number_of_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for IPython's compiler: a cell's file has a name that says nothing."""

    class Compiler:
        def format_code_name(self, file: str) -> tuple[str, str] | None:
            return ("Cell", "In[3]") if "ipykernel" in file else None

    shell = SimpleNamespace(compile=Compiler())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert show("/tmp/ipykernel_7/123.py") == "In[3]" and show("/nowhere/train.py") == "/nowhere/train.py"
    shell.compile = SimpleNamespace()  # IPython 7's
    assert show("/tmp/ipykernel_7/123.py") == "/tmp/ipykernel_7/123.py"


def test_a_leak_is_told_once_while_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Under a budget a leak does not fail, it gets slower."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    held: list[torch.Tensor] = []

    def step() -> str:
        y = model(torch.randn(256, 64))
        y.square().mean().backward()
        held.append(y)
        return capsys.readouterr().err

    with memmgr.budget("6MB", device="cpu"):
        told = next(filter(None, (step() for _ in range(500))))
        assert 10 * 65_536 * len(held) >= 6_000_000 or len(held) > TOLD_PASSES
        told += "".join(step() for _ in range(20))
    assert told.count("memmgr: a leak: +65.5 kB a step since step 1, made at ") == 1 and told.count("\n") == 1, told


def test_a_leak_that_begins_late_has_its_line() -> None:
    """After pass 16 lines are recorded only of ops that seem to leak."""
    steps = iter(range(100))
    found = _leaking(34, lambda held, y: held.append(y) if next(steps) >= 20 else None)
    assert [leak.since_pass for leak in found.leaks] == [21]
    assert found.leaks[0].line is not None
    assert "y = model(" in _text(found.leaks[0].line)


def test_an_op_that_leaked_in_one_budget_has_no_lines_in_the_next_one() -> None:
    """In passes 9 to 15 no line is recorded, of marked ops excepted."""
    assert _leaking(10, lambda held, y: held.append(y)).leaks
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(256, 64)
    with memmgr.budget(None, device="cpu", quiet=True):
        for _ in range(9):
            model(x).sum().backward()
        y = model(x)
        rows = [row for row in native.load().living() if row["birth"] == native.load().passes_ended()]
    assert y.requires_grad and rows
    assert {row["line"] for row in rows} == {0}


@pytest.mark.parametrize("length", [1, 4])
def test_a_history_of_fixed_length_is_no_leak(length: int) -> None:
    def hold(held: list[torch.Tensor], y: torch.Tensor) -> None:
        held.append(y)
        del held[:-length]

    assert not _leaking(16, hold).leaks


def _survivors(births: list[int], size: int) -> dict[str, Any]:
    places = [{"line": 0, "module": 0, "bytes": size}]
    return {"op": "aten::mm", "births": births, "bytes": size, "absent_bytes": 0, "places": places}


class Counted:
    """A pager that holds `rows`."""

    def __init__(self) -> None:
        self.passes = 0
        self.rows: list[Any] = []

    def survivors(self, mark: int) -> list[Any]:
        return self.rows

    def grown(self, mark: int) -> list[Any]:
        return []

    def passes_ended(self) -> int:
        return self.passes


def test_a_leak_ends_where_it_is_freed_and_where_it_stops() -> None:
    pager = Counted()
    leaks = Leaks(cast(Any, pager))
    for i in range(1, PASSES + 1):
        pager.passes = i + 1
        pager.rows = [_survivors(list(range(i)), 100 * i)]
        leaks.look()
        assert bool(leaks.found(lambda: [None])) == (i == PASSES)
    (leak,) = leaks.found(lambda: [None])
    assert (leak.bytes_per_pass, leak.bytes, leak.line) == (100, 100 * PASSES, None)
    assert "made at a line that is not known (mm)" in leak.text()
    assert "(mm in head)" in leak.text(module="head")
    assert "(mm, outside of modules)" in leak.text(module="(outside of modules)")
    for _ in range(3):  # nothing is added any more
        pager.passes += 1
        leaks.look()
    assert not leaks.found(lambda: [None])
    pager.rows = [_survivors([0, 1, pager.passes - 2], 300)]
    leaks.look()
    assert not leaks.found(lambda: [None])


def test_explain_without_a_budget_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with memmgr.budget("64MB", quiet=True):
        pass
    with pytest.raises(RuntimeError, match="the last one is closed, and its tensors are not followed"):
        memmgr.explain()
    monkeypatch.setattr(memmgr.api.budget, "_last", None)
    with pytest.raises(RuntimeError, match="needs an open budget: none was opened"):
        memmgr.explain()
    assert inspect.signature(memmgr.explain).parameters["top"].default == 10
    assert "memmgr.api.budget" in sys.modules


def test_nothing_of_a_program_is_left_after_its_budget() -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(compile("def work():\n    return torch.ones(4096) * 2", "program.py", "exec"), names)
    code = weakref.ref(names["work"].__code__)
    with memmgr.budget("64MB", quiet=True, lines=True):
        kept = names["work"]()
        kept.requires_grad_().sum().backward()
        assert any(str(line) == "program.py:2" for holder in memmgr.explain().now for line in holder.lines)
        assert native.load().living_at_peak()
    names.clear()
    gc.collect()
    assert code() is None
    assert not native.load().living_at_peak()


def test_a_batch_has_the_name_of_its_variable() -> None:
    model = nn.Linear(256, 4)
    images, labels = torch.randn(200, 256), torch.randn(200, 4)
    data = [{"images": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    loader = torch.utils.data.DataLoader(data, batch_size=100)  # type: ignore[arg-type]
    dead: list[weakref.ref[torch.Tensor]] = []
    with memmgr.budget("1GB", quiet=True):
        for batch in loader:
            (model(batch["images"]) - batch["labels"]).square().mean().backward()
            doubled = 2 * batch["images"]
            found = {(holder.kind, holder.name) for holder in memmgr.explain().now}
            dead.append(weakref.ref(batch["images"]))
        kinds = {(holder.kind, holder.name) for holder in memmgr.explain().now}
        gc.collect()
        assert dead[0]() is None, "a copy of the variables holds the batch before"
    assert ("batch", "batch['images']") in found and ("batch", "images") not in found, found
    assert ("batch", "doubled") not in found and doubled.shape == (100, 256)
    assert ("data", "images") in kinds, "no loader is gone over any more"


def test_an_input_that_no_loader_makes_is_data_with_a_name() -> None:
    model, x = nn.Linear(256, 4), torch.randn(200, 256)
    with memmgr.budget("1GB", quiet=True):
        model(x).square().mean().backward()
        assert ("data", "x") in {(holder.kind, holder.name) for holder in memmgr.explain().now}
    assert x.sum() != 0, "the variable is untouched"
