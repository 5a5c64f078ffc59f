"""Unmodified scripts under their launchers; limits shared by the ranks of one host; one summary; traces of a job's
ranks, and their simulation by `memmgr simulate --job`.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forkserver
import psutil
import pytest

from memmgr import budget
from memmgr.observe.summary import spread
from memmgr.telemetry.trace_file import read_about, read_trace
from memmgr.tools import cli
from memmgr.tools.view.simulate_job import waiting_seconds

from .ranks import ENVIRONMENT, one_launcher

TRAIN = """
import hashlib, os, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", **({"init_method": "file://" + os.path.abspath("store"), "rank": int(os.environ["RANK"]), "world_size": 2} if sys.argv[1:] else {}))
torch.manual_seed(0)
blocks = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*blocks))
opt = torch.optim.AdamW(model.parameters())
x = torch.randn(1024, 64)
for step in range(4):
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()
    if step == 2 and sys.argv[1:] and dist.get_rank() == 1:
        torch.ones(10_000_000)
bits = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
os.write(1, f"bits {bits}\\n".encode())  # at once: both ranks write to one pipe
dist.destroy_process_group()
"""
TORCHRUN = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_ip", "127.0.0.1"]
RUN = [sys.executable, "-m", "memmgr.tools.cli", "run", "--budget", "12MB"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def _launch(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **ENVIRONMENT, "ACCELERATE_LOG_LEVEL": "ERROR", **variables}
    with one_launcher():
        done = forkserver.run(
            [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=120, env=environment
        )
    assert done.returncode == 0, done.stderr
    return done


def _bits(said: str) -> list[str]:
    return re.findall(r"bits ([0-9a-f]{64})", said)


def _alone(folder: Path, **variables: str) -> list[subprocess.Popen[str]]:
    """Two ranks without a launcher that ends all of them as soon as one has ended."""
    ranks = []
    for rank in range(2):
        environment = {**os.environ, **ENVIRONMENT, "RANK": str(rank), **variables}
        words = [sys.executable, "train.py", "trouble"]
        start = subprocess.Popen if variables else forkserver.Popen
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(start(words, cwd=folder, env=environment, text=True, **pipes))
    return ranks


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        pytest.param("torchrun --no-python memmgr run", marks=pytest.mark.slow),
        pytest.param("accelerate launch", marks=pytest.mark.slow),
    ],
)
def test_an_unmodified_script(folder: Path, launcher: str) -> None:
    words = ["-m", *(ACCELERATE if launcher == "accelerate launch" else TORCHRUN)]
    plain = [bits for process in _alone(folder) for bits in _bits(process.communicate(timeout=60)[0])]
    if "no-python" in launcher:
        done = _launch(folder, *words, "--no-python", *RUN, "train.py")
    else:
        done = _launch(folder, *words, "train.py", MEMMGR_BUDGET="12MB")
    assert _bits(done.stdout) == plain and len(set(plain)) == 1 and len(plain) == 2
    # Once, by rank 0, with how far they are apart.
    assert len(re.findall("^memmgr: peak .* of 12 MB", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert len(re.findall("^memmgr: of 2 ranks: peak .* to .*x of an unlimited run", done.stderr, re.MULTILINE)) == 1
    assert "memmgr[1]" not in done.stderr


@pytest.mark.slow
def test_the_last_traceback_names_the_rank_in_trouble(folder: Path) -> None:
    ranks = _alone(folder, MEMMGR_BUDGET="12MB")
    well, ill = (process.communicate(timeout=60)[1] for process in ranks)
    assert all(process.returncode == 1 for process in ranks)
    assert "BudgetError" in ill and "RankError" not in ill
    said = re.findall(r"A budget of .* \((\d+) bytes\) should do for a whole step", ill)
    assert len(said) == 1
    assert "RankError: memmgr: rank 1 has ended with BudgetError: its budget of 12 MB is spent." in well
    assert f"({said[0]} bytes) should do there." in well


def test_ranks_of_one_host_share_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = budget("80%", disk=(tmp_path, "1GB"), host="2GB")._config
    assert config.limit_bytes == int(psutil.virtual_memory().total // 4 * 0.8)
    assert (config.disk_bytes, config.host_bytes) == (250_000_000, 500_000_000)
    assert budget("1GB", disk=tmp_path)._config.disk_bytes == 0  # no limit stays none
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "nonsense")
    assert budget("1GB", disk=(tmp_path, "1GB"))._config.disk_bytes == 1_000_000_000


def _figures(peak: int, lost: float) -> dict[str, float]:
    return {
        "resident_bytes.peak": peak,
        "wall_seconds": 10.0,
        "recompute_seconds": lost,
        "stall_seconds": 0.0,
        "budget_bytes": 20_000_000,
        "passes": 5,
    }


def test_the_spread_is_one_line() -> None:
    ranks = [_figures(11_000_000, 1.0), _figures(9_000_000, 0.0), _figures(10_000_000, 5.0)]
    assert spread(ranks) == ["of 3 ranks: peak 9 MB to 11 MB; at least 1.00x to 2.00x of an unlimited run"]
    assert spread(ranks[:1]) == [] == spread([])


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
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_each_rank_writes_its_own(traced: Path) -> None:
    heads = [read_about(traced / f"run.rank{rank}.trace") for rank in (0, 1)]
    assert [head["rank"] for head in heads] == [0, 1] and all(head["world_size"] == 2 for head in heads)
    assert heads[0]["job"] == heads[1]["job"] and heads[0]["host"] == heads[1]["host"]
    assert all(waiting_seconds(read_trace(traced / f"run.rank{rank}.trace")) > 0 for rank in (0, 1))


@pytest.mark.slow
def test_the_slowest_rank_moves_less_than_in_the_equal_split(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counted, not by the clock."""
    heavy, light = ranks = found(traced, capsys)
    assert heavy["need_bytes"] > light["need_bytes"] and heavy["budget_bytes"] > light["budget_bytes"]
    moved = {}
    for which in ("equal_bytes", "budget_bytes"):
        cases = " ".join(f"{one['rank']}) export MEMMGR_BUDGET={one[which] // 1000}kB;;" for one in ranks)
        (traced / "each.sh").write_text(f"case $RANK in {cases} esac\nexec {sys.executable} train.py\n")
        launch(
            traced, "--no-python", "bash", "each.sh", STEPS="10", FIGURES=which, MEMMGR_CONF="device:cpu,policy:offload"
        )
        figures = [json.loads((traced / f"{which}.{one['rank']}").read_text()) for one in ranks]
        assert all(f["resident_bytes.peak"] <= one[which] for f, one in zip(figures, ranks, strict=True))
        moved[which] = figures[0]["offload_bytes"] + figures[0]["reload_bytes"]
    assert moved["budget_bytes"] < moved["equal_bytes"]
