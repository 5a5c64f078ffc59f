"""Traces of a job's ranks, recorded inside torchrun, and their simulation by `memmgr simulate --job`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import forkserver
import pytest

from memmgr.telemetry.trace_file import read_about, read_trace
from memmgr.tools import cli
from memmgr.tools.view.simulate_job import waiting_seconds

from .ranks import ENVIRONMENT, one_launcher
from .test_launch import TORCHRUN

PIPELINE = """
import json, os, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
blocks = [torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)) for _ in range((8, 2)[rank])]
stage = torch.nn.Sequential(*blocks)
opt = torch.optim.SGD(stage.parameters(), lr=1e-3)
for step in range(int(os.environ.get("STEPS", "3"))):
    x = torch.randn(512, 128) if rank == 0 else torch.empty(512, 128)
    if rank:
        dist.recv(x, 0)
        stage(x.requires_grad_()).square().mean().backward()
        dist.send(x.grad, 0)
    else:
        y = stage(x)
        dist.send(y.detach(), 1)
        gradient = torch.empty(512, 128)
        dist.recv(gradient, 1)
        y.backward(gradient)
    opt.step()
    opt.zero_grad()
if "FIGURES" in os.environ:
    import memmgr
    stats = memmgr.stats()
    figures = {key: stats[key] for key in ("offload_bytes", "reload_bytes", "resident_bytes.peak")}
    open(f"{os.environ['FIGURES']}.{rank}", "w").write(json.dumps(figures))
dist.destroy_process_group()
"""


def launch(folder: Path, *words: str, **variables: str) -> str:
    with one_launcher():
        done = forkserver.run(
            [sys.executable, "-m", *TORCHRUN, *words], cwd=folder, capture_output=True, text=True, timeout=120,
            env={**os.environ, **ENVIRONMENT, **variables},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the traces of two unequal stages."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(PIPELINE)
    words = ("trace", "--out", "run.trace", "--device", "cpu", "train.py")
    with forkserver.commands(tmp_path_factory.mktemp("path")) as path:
        said = launch(folder, "--no-python", str(path / "memmgr"), *words)
    assert said.count("memmgr simulate --job") == 1 and "run.rank1.trace" in said
    return folder


def found(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    needs = [read_trace(folder / f"run.rank{rank}.trace").unmanaged_peak[0] for rank in (0, 1)]
    total = sum(needs) * 4 // 10
    assert cli.main(["simulate", "--job", str(folder), "--total", f"{total}B", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(one["budget_bytes"] for one in told["ranks"]) <= total
    assert told["equal_step_seconds"] is None or told["step_seconds"] <= told["equal_step_seconds"]
    return list(told["ranks"])


def test_each_rank_writes_its_own(folder: Path) -> None:
    heads = [read_about(folder / f"run.rank{rank}.trace") for rank in (0, 1)]
    assert [head["rank"] for head in heads] == [0, 1] and all(head["world_size"] == 2 for head in heads)
    assert heads[0]["job"] == heads[1]["job"] and heads[0]["host"] == heads[1]["host"]
    assert all(waiting_seconds(read_trace(folder / f"run.rank{rank}.trace")) > 0 for rank in (0, 1))


@pytest.mark.slow
def test_the_slowest_rank_moves_less_than_in_the_equal_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counted, not by the clock."""
    heavy, light = ranks = found(folder, capsys)
    assert heavy["need_bytes"] > light["need_bytes"] and heavy["budget_bytes"] > light["budget_bytes"]
    moved = {}
    for which in ("equal_bytes", "budget_bytes"):
        cases = " ".join(f"{one['rank']}) export MEMMGR_BUDGET={one[which] // 1000}kB;;" for one in ranks)
        (folder / "each.sh").write_text(f"case $RANK in {cases} esac\nexec {sys.executable} train.py\n")
        launch(
            folder, "--no-python", "bash", "each.sh", STEPS="10", FIGURES=which, MEMMGR_CONF="device:cpu,policy:offload"
        )
        figures = [json.loads((folder / f"{which}.{one['rank']}").read_text()) for one in ranks]
        assert all(f["resident_bytes.peak"] <= one[which] for f, one in zip(figures, ranks, strict=True))
        moved[which] = figures[0]["offload_bytes"] + figures[0]["reload_bytes"]
    assert moved["budget_bytes"] < moved["equal_bytes"]
