"""A thousand steps of a GPT in half of its need: no count grows. And `kill -9` in the middle of a step leaves no
file."""

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from budget import models

from . import children

STEPS = 1000
HUNDRED = STEPS // 10
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MEMMGR_PAGER_SMALL": "4096"}


def gpt() -> models.Training:
    torch.manual_seed(0)
    return models.gpt(layers=3, context=64, batch=4)


def half() -> int:
    import memmgr

    with memmgr.budget(None, policy="keep", quiet=True) as mm:
        training = gpt()
        for _ in range(2):
            training.step()
    return int(mm.stats()["unmanaged_peak_bytes"] / 2)


def long() -> None:
    """Prints the counts after every hundred steps, and the time of one of them."""
    import memmgr

    limit = half()
    process = psutil.Process()
    with memmgr.budget(limit, quiet=True) as mm:
        training = gpt()
        for _hundred in range(10):
            wall, processor = [], []
            for _ in range(HUNDRED):
                begun, used = time.perf_counter(), time.process_time()
                training.step()
                wall.append(time.perf_counter() - begun)
                processor.append(time.process_time() - used)
            for thread in threading.enumerate():
                if thread.name == "memmgr-plan":
                    thread.join()
            seen = {
                "rss": process.memory_info().rss,
                "threads": process.num_threads(),
                "files": process.num_fds(),
                "step": statistics.median(wall),
                "processor": statistics.quantiles(processor, n=4)[0],
            }
            print("HUNDRED", json.dumps(seen), flush=True)
        stats = mm.stats()
        assert stats["resident_bytes.peak"] <= limit and stats["reloads"] + stats["evictions"] > STEPS


@pytest.mark.slow
def test_a_thousand_steps_grow_nothing() -> None:
    output = children.run("test_long_run", "long", timeout=850, env=ENVIRONMENT)
    print(output)
    hundreds: list[dict[str, Any]] = [
        json.loads(line.removeprefix("HUNDRED ")) for line in output.splitlines() if line.startswith("HUNDRED ")
    ]
    warm, last = hundreds[1], hundreds[-1]  # the first hundred measures, and makes plans
    assert last["rss"] - warm["rss"] < 4 << 20
    assert last["threads"] <= warm["threads"] and last["files"] <= warm["files"]
    # Processor time of a step's lower quartile: other work of the machine affects it least.
    assert min(one["processor"] for one in hundreds[-3:]) < 1.25 * min(one["processor"] for one in hundreds[1:4])


def waits_in_a_step(folder: str) -> None:
    """Stops in the middle of its fourth step, with bytes in the tier, until it is killed; or, without such a wish, ends."""
    import memmgr

    limit = half()
    with memmgr.budget(limit, policy="offload", disk=folder, quiet=True) as mm:
        training = gpt()
        for step in range(4):
            if step == 3 and "STAYS" in os.environ:
                next(training.model.parameters()).register_hook(
                    lambda _: (print("IN STEP", flush=True), time.sleep(600))
                )
            training.step()
        assert mm.stats()["offloads"] > 0


def tiers_of(pid: int, folder: Path) -> list[str]:
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if link.startswith(str(folder))]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A socket's path may have a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="mm") as folder:
        yield Path(folder)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at /proc")
def test_kill_9_in_a_step_leaves_no_file(tmp_path: Path, short_folder: Path) -> None:
    tier, runtime = tmp_path, short_folder
    environment = ENVIRONMENT | {"XDG_RUNTIME_DIR": str(runtime)}
    process = children.start(
        "test_long_run", "waits_in_a_step", str(tier), timeout=120, env=environment | {"STAYS": "1"}
    )
    assert process.stdout is not None and process.stdout.readline() == "IN STEP\n"
    assert len(tiers_of(process.pid, tier)) == 1, "its tier is not in the folder, so nothing is tested"
    assert list((runtime / "memmgr").iterdir()), "nor is its address"
    process.kill()
    process.communicate()
    assert list(tier.iterdir()) == []
    children.run("test_long_run", "waits_in_a_step", str(tier), timeout=120, env=environment)
    assert [path for folder in (tier, runtime) for path in folder.rglob("*") if not path.is_dir()] == []


if __name__ == "__main__":
    children.arm()
    globals()[sys.argv[1]](*sys.argv[2:])
