"""`memmgr bench`: real cells of tiny models, their bits, a cell that dies, going on from a file, the picture, wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forkserver
import psutil
import pytest
from torch._functorch import config as functorch

from memmgr.config.machine import memory_bytes
from memmgr.tools import cli
from memmgr.tools.bench import names, rows, turns, verb
from memmgr.tools.bench.largest import Try, bisect
from memmgr.tools.bench.models import MODELS, make
from memmgr.tools.bench.picture import draw
from memmgr.tools.bench.rows import Row, rows_of
from memmgr.tools.bench.systems import SYSTEMS
from memmgr.tools.bench.table import HEAD, LARGEST_HEAD, cells, largest_cells
from memmgr.tools.bench.turns import Cell, Nursery, together
from memmgr.tools.common.usage_error import UsageError

SPEC = {"model": "GPT", "group": "own", "budget": "", "budget_bytes": None, "batch": None, "tiny": True, "device": "cpu",
        "threads": 1, "turns": 2, "what": "turns"}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick_starts() -> Iterator[None]:
    """The process that cells are forked from is itself forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "subprocess", forkserver)
        yield


def bench(out: Path, *words: str) -> int:
    return cli.main(["bench", "--tiny", "--threads", "1", "--turns", "2", "--out", str(out), *words])


OF_ALL_SORTS = "unmanaged,offload_activations,auto,online,coop,vdnn"
ASKED = ("--models", "GPT", "--systems", OF_ALL_SORTS, "--budgets", "70%")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one small bench."""
    out = tmp_path_factory.mktemp("bench") / "new"
    assert bench(out, *ASKED) == 0
    return out


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bench of two models, in the memory that checkpointing takes."""
    out = tmp_path_factory.mktemp("bench") / "new"
    words = (
        "--models",
        "GPT,ResNet",
        "--systems",
        "unmanaged,checkpoint,auto",
        "--budgets",
        "checkpoint",
        "--batch",
        "3",
    )
    assert bench(out, *words) == 0
    return out


def found(out: Path) -> dict[str, Row]:
    data = json.loads((out / "bench.json").read_text())
    return {row.key: row for row in map(Row.from_json, data["rows"])}


def test_every_cell_is_there_with_the_bits_of_plain_torch(measured: Path, checkpointed: Path) -> None:
    there, of_two = found(measured), found(checkpointed)
    free = ("|unmanaged", "|offload_activations", "70%|unmanaged")
    managed = ("70%|auto", "70%|online", "70%|coop", "70%|vdnn")
    assert set(there) == {f"GPT|{cell}" for cell in (*free, *managed)}
    cells = ("|unmanaged", "|checkpoint", "checkpoint|auto")
    assert set(of_two) == {f"{model}|{cell}" for model in ("GPT", "ResNet") for cell in cells}
    gpt = there["GPT|70%|auto"]
    assert gpt.error == "" and gpt.bits == "yes" and gpt.budget_bytes is not None
    assert 0.5 * gpt.need_bytes < gpt.inside_bytes <= gpt.budget_bytes == int(0.7 * gpt.need_bytes)
    assert gpt.outside_bytes > 0 and len(gpt.seconds_of_turns) == 2 and gpt.ratios[0] <= gpt.ratios[1] <= gpt.ratios[2]
    assert there["GPT||unmanaged"].ratios == (1.0, 1.0, 1.0)
    assert there["GPT||unmanaged"].inside_bytes == there["GPT||unmanaged"].need_bytes
    assert of_two["GPT||checkpoint"].inside_bytes < of_two["GPT||unmanaged"].inside_bytes
    assert of_two["GPT||checkpoint"].bits == "yes"
    assert "3 samples a step" in (checkpointed / "bench.md").read_text()


def test_checkpointing_counts_a_batch_twice(checkpointed: Path) -> None:
    """Batch norm's running statistics move in forward, and forward runs again. memmgr's do not."""
    assert found(checkpointed)["ResNet||checkpoint"].bits == "parameters"
    assert found(checkpointed)["ResNet|checkpoint|auto"].bits in ("yes", "")  # "": the tiny model does not fit


def test_a_system_that_cannot_run_says_why_in_its_cell(measured: Path) -> None:
    there = found(measured)["GPT||offload_activations"]
    assert there.error == "needs an accelerator: it offloads to the CPU"
    assert any(there.error in line for line in (measured / "bench.md").read_text().splitlines())


@pytest.mark.parametrize("system", ["online", "coop", "vdnn"])
def test_it_runs_live_with_the_bits_of_plain_torch(measured: Path, system: str) -> None:
    there = found(measured)["GPT|70%|" + system]
    if system == "coop":  # recompute only has a floor
        assert there.error.startswith("needs ")
        return
    assert there.error == "" and there.bits == "yes" and there.stats is not None
    assert there.budget_bytes is not None and there.inside_bytes <= there.budget_bytes


def test_a_step_without_its_plan_says_so() -> None:
    """The policy beneath the planner decided: those are not the figures of the system that the cell names."""
    said = []
    for planned, reclaims, system in ((0, 5, "vdnn"), (2, 5, "vdnn"), (0, 0, "vdnn"), (0, 5, "online")):
        stats = {"planned_passes": planned, "reclaims": reclaims}
        row = Row("GPT", "50%", system, 50, 100, 50, 60, 1.0, (1.0, 1.0, 1.0), 1.0, "yes", stats=stats)
        said.append(next(cells([row]))[-1])
    assert said == ["yes, no plan", "yes", "yes", "yes"]


def test_a_reason_is_in_a_column_that_is_named_after_it() -> None:
    row = Row("GPT", "5%", "auto", 50, 100, 0, 0, 0.0, (0.0, 0.0, 0.0), 0.0, "", error="needs 2.78 MB")
    found = {"GPT": {"memory_bytes": 10**6, "systems": {"auto": {"error": "needs 3 MB", "batch": 0}}}}
    record = SimpleNamespace(largest=found)
    for head, told in ((HEAD, next(cells([row]))), (LARGEST_HEAD, next(largest_cells(record)))):  # type: ignore[arg-type]
        named = dict(zip(head, told, strict=True))
        assert [name for name, word in named.items() if word.startswith("needs ")] == [head[-1]]
        assert head[-1].endswith(", or why not")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_what_a_step_calls_is_compiled() -> None:
    """A GAN is two models in a list, which nobody calls."""
    before = functorch.activation_memory_budget
    try:
        for name in ("GAN", "GPT"):
            training = make(name, tiny=True)
            SYSTEMS["compile"].apply(training)
            called = list(training.model) if name == "GAN" else [training.model]
            assert all(module._compiled_call_impl is not None for module in called)
    finally:
        functorch.activation_memory_budget = before  # pytest's patches would delete it


def test_machine_and_versions_are_said(measured: Path) -> None:
    data = json.loads((measured / "bench.json").read_text())
    assert {"processor", "cores", "memory_bytes", "python", "torch", "memmgr"} <= set(data["machine"])
    assert data["machine"]["torch"] in (measured / "bench.md").read_text()


def test_the_picture_has_content(measured: Path) -> None:
    image = pytest.importorskip("matplotlib.image").imread(measured / "bench.png")
    assert image.shape[0] > 200 and image.shape[1] > 400
    assert len({tuple(pixel) for pixel in image[::3, ::3].reshape(-1, image.shape[2]).round(1)}) > 5


def test_a_long_heading_stays_inside_the_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    draw([Row("GPT", "", "unmanaged")], tmp_path / "long.png", "a heading of many words " * 12)
    assert (image.imread(tmp_path / "long.png")[:, -4:, :3] == 1).all(), "ink at the right edge"


def test_the_same_command_goes_on_and_measures_nothing_twice(
    measured: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (measured / "bench.json").read_bytes()
    monkeypatch.setattr(Nursery, "start", lambda *_: pytest.fail("a cell was started"))
    assert bench(measured, *ASKED, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == json.loads(before)["rows"]


def test_what_ran_out_of_time_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--models", "GAN", "--systems", "unmanaged,save_on_cpu", "--budgets", "50%")
    assert bench(tmp_path, *asked, "--minutes", "0") == 3
    assert "the same command goes on" in capsys.readouterr().err
    assert not found(tmp_path) if (tmp_path / "bench.json").exists() else True
    assert bench(tmp_path, *asked) == 0
    assert found(tmp_path)["GAN||save_on_cpu"].bits == "yes"


def test_a_record_of_other_settings_is_not_gone_on_with(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(measured, "--turns", "3") == 2
    said = capsys.readouterr().err
    assert "turns was 2, is 3" in said and "--out" in said and said.count("\n") == 1


def test_a_cell_that_is_killed_does_not_end_the_table() -> None:
    """By the system, when memory is short; here by us, after its first turn."""
    with Nursery("cpu") as children:
        specs = [SPEC | {"key": s, "system": s, "reference": s == "unmanaged"} for s in ("unmanaged", "save_on_cpu")]

        def say(text: str) -> None:
            if text.endswith("turn 2 of 3"):
                os.kill(children._cells["save_on_cpu"][1], 9)

        done = together(children, specs, 3, say)
    told = rows_of(done, 100)
    assert [row.error for row in told] == ["", "its process was ended by SIGKILL"]
    assert told[0].bits == "yes" and len(told[0].seconds_of_turns) == 3
    assert "SIGKILL" in list(cells(told))[1][-1]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "not within a minute"
        time.sleep(0.02)


def test_a_bench_that_is_killed_leaves_nothing_behind() -> None:
    """Cells are stopped while they wait: nothing else would end them."""
    script = f"""
from memmgr.tools.bench.turns import Nursery
with Nursery("cpu") as children:
    children.start({SPEC | {"key": "k", "system": "unmanaged", "reference": True}!r})
    assert "error" not in children.ask("k", send=False)
    print(children._cells["k"][1], flush=True)
    import time
    time.sleep(600)
"""
    with forkserver.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            cell = psutil.Process(int(parent.stdout.readline()))
            until(lambda: cell.status() == psutil.STATUS_STOPPED)
        finally:
            parent.kill()
    until(lambda: not cell.is_running() or cell.status() == psutil.STATUS_ZOMBIE)


def test_an_interrupt_waits_for_no_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor for the end of an interpreter that has torch: together it was up to twelve seconds."""
    (tmp_path / "torch.py").write_text("import os, time\nos.kill(os.getppid(), 2)\ntime.sleep(20)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(KeyboardInterrupt), Nursery("cpu") as children:
        children.start(SPEC | {"key": "k", "system": "unmanaged", "reference": True})
    assert [parent.returncode for parent in children._parents.values()] == [-9]


def test_an_interrupt_leaves_no_cell() -> None:
    with pytest.raises(KeyboardInterrupt), Nursery("cpu") as children:
        children.start(SPEC | {"key": "k", "system": "unmanaged", "reference": True})
        assert "error" not in children.ask("k", send=False)
        cell = psutil.Process(children._cells["k"][1])
        children._cells["k"][0].send(True)
        os.kill(cell.pid, signal.SIGCONT)
        raise KeyboardInterrupt  # there may be half of an answer
    until(lambda: not cell.is_running() or cell.status() == psutil.STATUS_ZOMBIE)


def test_a_parent_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Nursery("cpu") as children, pytest.raises(UsageError, match="no torch today"):
        children.start(SPEC | {"key": "k", "system": "unmanaged", "reference": True})


def test_an_unmanaged_cell_has_no_memmgr(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(verb.__file__).parent)!r})
import child
cell = child.load()
cell.preload()
assert "torch" in sys.modules
print([n for n in sys.modules if n.startswith("memmgr.") and n[7:] not in ("_environ", "config", "config.variables")])
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def cell(system: str, parameters: str, losses: list[str], buffers: str = "b") -> Cell:
    turn = {"seconds": 1.0, "processor": 1.0, "steps": 2, "parameters": parameters, "buffers": buffers}
    told: dict[str, Any] = {"inside_bytes": 1, "outside_bytes": 1, "losses": losses, "parameters": parameters}
    warm = {"steps": 1, "parameters": "w", "buffers": "b"}
    return Cell(SPEC | {"system": system}, [turn], told | {"buffers": buffers, "warm": warm})


def test_other_bits_are_no() -> None:
    reference = cell("unmanaged", "p", ["1", "2"])
    others = {
        "yes": cell("auto", "p", ["1", "2"]), "parameters": cell("auto", "p", ["1", "2"], "other"),
    }  # fmt: skip
    for bits, other in others.items():
        assert rows_of([reference, other], 1)[1].bits == bits
    for other in (cell("auto", "q", ["1", "2"]), cell("auto", "p", ["1", "3"])):
        assert rows_of([reference, other], 1)[1].bits == "no"
    assert rows._quartiles([1.0, 2.0, 3.0]) == (1.5, 2.0, 2.5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--models", "GPT3"],
            "'GPT3' is none of GPT, Llama, BERT, ResNet, U-Net, DenseNet, ViT, LSTM, TreeLSTM, GAN; did you mean 'GPT'?",
        ),
        (["--systems", "auto,magic"], "'magic' is none of unmanaged"),
        (["--budgets", "50%,lots"], "'lots' is neither a percentage"),
        (["--budgets", "0%"], "'0%' is neither"),
        (["--max-batch", "--memory", "many"], "--memory: cannot read 'many' as a size"),
        (["--turns", "0"], "not a positive number"),
        (["--batch", "0"], "--batch: 0 is not a positive number"),
        (["--max-batch", "--batch", "3"], "leave --batch out"),
        (["--minutes", "-1"], "--minutes: -1 is no time"),
        (["--minutes", "nan"], "--minutes: nan is no time"),
        (["--max-batch", "--slowest", "0"], "--slowest: 0 is not a positive number"),
        (["--memory", "2GB"], "--memory is of --max-batch"),
        (["--slowest", "2"], "--slowest is of --max-batch"),
        (["--max-batch", "--budgets", "50%"], "--budgets are of steps; with --max-batch the budget is --memory"),
    ],
)
def test_bad_input_is_one_clear_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path / "x", *words) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and "Traceback" not in said


def test_a_gpu_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    assert bench(tmp_path / "x", "--device", "cuda") == 2
    assert "built without CUDA" in capsys.readouterr().err
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench(tmp_path / "x", "--device", "cuda") == 2
    assert "finds no GPU" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_file_that_is_no_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bench.json").write_text("[]")
    assert bench(tmp_path) == 2
    assert "is no bench of this version" in capsys.readouterr().err


@pytest.mark.parametrize("largest", [1, 2, 5, 8, 13, 31, 100])
@pytest.mark.parametrize("first", [1, 8, 64])
def test_bisection_ends_within_a_sixteenth(largest: int, first: int) -> None:
    asked: list[int] = []

    def tried(batch: int) -> Try:
        asked.append(batch)
        return Try(batch, error="" if batch <= largest else "needs more")

    good, bad = bisect(tried, first)
    assert good is not None and bad is not None and good.batch <= largest < bad.batch
    assert bad.batch - good.batch <= max(1, good.batch // 16) and len(asked) == len(set(asked)) < 16


def test_nothing_fits() -> None:
    good, bad = bisect(lambda batch: Try(batch, error="needs more"), 8)
    assert good is None and bad is not None and bad.batch == 1


def test_memory_none_is_the_machines() -> None:
    assert verb._size("none") == memory_bytes() and verb._size("2GB") == 2 * 10**9


def test_the_largest_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--max-batch", "--models", "DenseNet", "--systems", "checkpoint", "--memory", "1.5MB", "--slowest", "1000")
    assert bench(tmp_path, *asked) == 0
    systems = json.loads((tmp_path / "bench.json").read_text())["largest"]["DenseNet"]["systems"]
    assert 1 <= systems["unmanaged"]["batch"] < systems["checkpoint"]["batch"]
    assert all(0 < one["peak_bytes"] <= 1_500_000 for one in systems.values())
    assert "checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_and_says_what_it_keeps(name: str) -> None:
    training = make(name, tiny=True)
    parameters = sum(p.nbytes for p in training.model.parameters())
    assert training.state_bytes() == 2 * parameters
    training.step()
    assert training.state_bytes() > 2 * parameters and training.blocks


def test_every_system_has_a_line() -> None:
    assert all(system.line for system in SYSTEMS.values())
    assert tuple(SYSTEMS) == names.SYSTEMS and tuple(MODELS) == names.MODELS
    assert "unmanaged" in (verb.__doc__ or "") and "TreeLSTM" in (verb.__doc__ or "")
