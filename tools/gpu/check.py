"""Checks memmgr on a GPU that is lent for minutes: acts in order of what they teach, each a process with a limit.

    python tools/gpu/check.py first --out FOLDER --seconds 300

Every figure is a JSON line in FOLDER/raw.jsonl as soon as it is known; FOLDER/errors.txt has what went wrong, FOLDER/smi.csv what
nvidia-smi saw meanwhile. An act that does not fit into the seconds that are left is skipped, and so is one whose name FOLDER's
raw.jsonl has already (a second start goes on). The last lines printed are a summary.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GIB = 1 << 30


@dataclass
class Act:
    """A process of the check.

    Attributes:
        group: acts of one group that follow one another run at once.
        limit: seconds after which it is killed, with all that it started.
        needs: the check ends before this act if no act of that group went well.
    """

    name: str
    command: list[str]
    group: str
    limit: float
    env: dict[str, str] = field(default_factory=dict)
    needs: str = ""


def train(name: str, group: str, limit: float, spec: dict[str, Any], **env: str) -> Act:
    """An act that trains."""
    plain = {"MEMMGR_INSTALL": "0"} if spec.get("plain") else {}
    spec = {"seconds": limit - 6, **spec}
    return Act(name, [sys.executable, "-P", str(HERE / "train.py"), json.dumps(spec)], group, limit, {**plain, **env})


def bits(model: str, **spec: Any) -> Act:
    """Same bits under three policies; nothing leaves by chance in `torture`, so each cell goes both ways."""
    common: dict[str, Any] = {"warm": 0, "steps": 3, "host": "2GiB"}
    runs = [
        {"name": "none", **common},
        {"name": "none again", **common},
        {"name": "measure", "measure": True, **common},
        {"name": "auto", "of_need": 0.75, **common},
        {"name": "offload", "of_need": 0.75, "policy": "offload", **common},
        {"name": "evict", "of_activations": 0.75, "policy": "evict", **common},
        {"name": "torture", "of_need": 1.0, "policy": "torture", **common},
    ]
    spec = {"model": model, "deterministic": True, "runs": runs, **spec}
    return train(f"bits {model}", "bits", 75, spec, CUBLAS_WORKSPACE_CONFIG=":4096:8")


def timing(model: str, limit: float, out: Path) -> Act:
    """Steps in half and a quarter of the activations, and what each choice changes."""
    steady: dict[str, Any] = {"warm": 6, "settle": 60, "settle_seconds": 7, "steps": 6}
    fixed: dict[str, Any] = {"warm": 6, "settle": 30, "settle_seconds": 4, "steps": 4}
    runs: list[dict[str, Any]] = [
        {"name": "none", "warm": 3, "steps": 8},
        {"name": "unlimited", "measure": True, "warm": 3, "steps": 8, "digest": False},
        {"name": "half auto", "of_activations": 0.5, **steady},
        {"name": "half offload", "of_activations": 0.5, "policy": "offload", **fixed},
        {"name": "half auto, remap", "of_activations": 0.5, "placement": "remap", **fixed},
        {"name": "half auto, profiled", "of_activations": 0.5, **fixed, "profile": str(out / f"{model}-trace.json.gz")},
        {"name": "quarter auto", "of_activations": 0.25, **fixed},
        {"name": "half evict", "of_activations": 0.5, "policy": "evict", **fixed},
    ]
    return train(f"timing {model}", f"timing {model}", limit, {"model": model, "host": "16GiB", "runs": runs})


def first(out: Path) -> list[Act]:
    """Does it work, and where is it slow?"""
    steps: dict[str, Any] = {"warm": 0, "steps": 3, "host": "1GiB"}
    smoke = [{"name": "none", **steps}, {"name": "measure", "measure": True, **steps}]
    smoke += [{"name": "60 %", "of_need": 0.6, **steps}]
    spec: dict[str, Any] = {"model": "resnet18", "deterministic": True, "runs": smoke}
    native = {"MEMMGR_CONF": "allocator:native"}
    acts = [
        Act("driver calls", [str(HERE.parents[1] / "carry" / "driver_calls")], "driver", 30),
        train("smoke mapped", "smoke", 60, spec),
        train("smoke native", "smoke", 60, spec, **native),
        train("smoke native expandable", "smoke", 60, spec, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", **native),
        train("smoke plain torch", "smoke", 60, {**spec, "plain": True, "runs": smoke[:1]}),
    ]  # fmt: skip
    models = ("lstm", "gpt_fp32", "resnet18", "unet", "gpt2", "recommender")
    acts += [bits(model, **({"tiny": True} if model == "gpt2" else {})) for model in models]
    for act in acts:
        if act.group == "bits":
            act.needs = "smoke"
    op_cost = Act("op cost", [sys.executable, "-P", str(HERE / "op_cost.py")], "op cost", 25, needs="smoke")
    for act in (timing("gpt2", 95, out), op_cost, timing("resnet50", 95, out)):
        act.needs = "smoke"
        acts.append(act)
    return acts


def second(out: Path) -> list[Act]:
    """What was mended, and the figures: timings beside torch's own ways to save memory."""
    models = ("lstm", "resnet18", "gpt2", "gpt_fp32")
    acts = [bits(model, **({"tiny": True} if model == "gpt2" else {})) for model in models]
    tests = ["tests/driver/test_kernels.py", "tests/driver/test_real_device.py"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "gpu", "-p", "no:cacheprovider", *tests]
    acts.append(Act("tests", pytest, "bits", 75, {"MEMMGR_INSTALL": "0"}))
    for model in ("gpt2", "resnet50"):
        acts.append(timing(model, 75, out))
    for model in ("gpt2", "resnet50"):
        methods = ("none", "checkpoint", "save_on_cpu")
        runs = [{"name": method, "method": method, "warm": 3, "steps": 6, "digest": False} for method in methods]
        acts.append(train(f"plain {model}", f"plain {model}", 30, {"model": model, "plain": True, "runs": runs}))
    fixed = {"warm": 6, "settle": 30, "settle_seconds": 5, "steps": 4}
    runs = [
        {"name": "unlimited", "measure": True, "warm": 3, "steps": 3, "digest": False},
        {"name": "half auto", "of_activations": 0.5, **fixed},
    ]
    small = {"MEMMGR_CUDA_PAGE": str(2 << 20)}
    acts.append(train("pages of 2 MiB gpt2", "pages", 30, {"model": "gpt2", "runs": runs}, **small))
    acts.append(Act("op cost", [sys.executable, "-P", str(HERE / "op_cost.py")], "op cost", 25))
    return acts


PLANS = {"first": first, "second": second}


class Check:
    """Runs the acts and keeps what they say."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.ends = out, time.monotonic() + seconds
        out.mkdir(parents=True, exist_ok=True)
        self.raw = (out / "raw.jsonl").open("a", buffering=1)
        self.errors = (out / "errors.txt").open("a", buffering=1)
        self.lock = threading.Lock()
        self.good: dict[str, int] = {}
        self.lines: list[dict[str, Any]] = []
        self.begun = time.monotonic()

    def say(self, act: str, **fields: Any) -> None:
        """Notes one line; a full disk loses it and nothing else."""
        line = {"act": act, "at": round(time.monotonic() - self.begun, 1), **fields}
        with self.lock:
            self.lines.append(line)
            with contextlib.suppress(OSError):
                self.raw.write(json.dumps(line) + "\n")

    def run(self, act: Act) -> None:
        """One act, with its limit and what is left of the time."""
        limit = min(act.limit, self.ends - time.monotonic())
        if limit < 8:
            return self.say(act.name, event="skipped", why="no time left")
        begun = time.monotonic()
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **act.env}
        try:
            process = subprocess.Popen(
                act.command,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return self.say(act.name, event="ended", code=f"{error}")
        said: list[str] = []

        def follow() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                try:
                    self.say(act.name, **json.loads(line))
                except (ValueError, TypeError):
                    self.say(act.name, event="text", text=line.rstrip()[:400])

        def listen() -> None:
            assert process.stderr is not None
            said.extend(process.stderr)

        threads = [threading.Thread(target=follow, daemon=True), threading.Thread(target=listen, daemon=True)]
        for thread in threads:
            thread.start()
        code: int | str
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = f"killed after {limit:.0f} s"
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGABRT)  # faulthandler prints where it was
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.5)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(timeout=2)
        self.say(act.name, event="ended", code=code, seconds=round(time.monotonic() - begun, 1))
        if code == 0:
            self.good[act.group] = self.good.get(act.group, 0) + 1
        text = "".join(said)
        if text.strip():
            with self.lock, contextlib.suppress(OSError):
                self.errors.write(f"==== {act.name} ({code}) ====\n{text[-6000:]}\n")

    def all(self, acts: list[Act], at_once: int = 4) -> None:
        """Groups one after the other."""
        at = 0
        while at < len(acts):
            group = [acts[at]]
            while at + len(group) < len(acts) and acts[at + len(group)].group == group[0].group:
                group.append(acts[at + len(group)])
            at += len(group)
            if group[0].needs and not self.good.get(group[0].needs):
                for act in group:
                    self.say(act.name, event="skipped", why=f"nothing of {act.needs} went well")
                continue
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(self.run, group))


def facts(check: Check) -> None:
    """Of the machine."""
    commands = {
        "smi": "nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.current,pcie.link.gen.max,"
        "pcie.link.width.current,persistence_mode,bar1.memory.total --format=csv,noheader",
        "memory": "free -m | sed -n 2p",
        "limits": "ulimit -l; nproc; uname -r; cat /sys/kernel/mm/transparent_hugepage/enabled",
        "tools": "which g++ nvcc make compute-sanitizer cuda-gdb; python3 --version",
        "cpu": "lscpu | grep -E 'Model name|NUMA node\\(s\\)'",
    }
    for name, command in commands.items():
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=10)
            check.say("facts", name=name, text=done.stdout.strip()[:400])


HOLD = "import ctypes,time; c=ctypes.CDLL('libcuda.so.1'); c.cuInit(0); p=ctypes.c_void_p(); c.cuDevicePrimaryCtxRetain(ctypes.byref(p),0); time.sleep(900)"


def main() -> int:
    """Runs a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--only", default="", help="acts whose name begins with one of these, with commas between")
    args = parser.parse_args()
    check = Check(args.out, args.seconds)
    helpers = []
    with contextlib.suppress(OSError):
        helpers.append(subprocess.Popen([sys.executable, "-c", HOLD]))
    if shutil.which("nvidia-smi"):
        smi = ["nvidia-smi", "--query-gpu=timestamp,memory.used,utilization.gpu,clocks.sm,pcie.link.gen.current", "--format=csv,noheader", "-lms", "500"]  # fmt: skip
        helpers.append(subprocess.Popen(smi, stdout=(args.out / "smi.csv").open("w"), stderr=subprocess.DEVNULL))
    try:
        facts(check)
        acts = PLANS[args.plan](args.out)
        if args.only:
            acts = [act for act in acts if act.name.startswith(tuple(args.only.split(",")))]
        check.all(acts)
    finally:
        for helper in helpers:
            helper.kill()
    summary(check.lines)
    return 0


def summary(lines: list[dict[str, Any]]) -> None:
    """What a reader needs first."""
    digests: dict[str, str] = {}
    for line in lines:
        act, event = line["act"], line.get("event")
        if act == "facts":
            print(f"{line['name']}: {line['text'][:200]!r}")
        elif event == "result":
            if line["run"] == "none":
                digests[act] = line.get("digest", "")
            mark = ""
            if line.get("digest") and digests.get(act):
                mark = "same" if line["digest"] == digests[act] else "OTHER BITS"
            per = line.get("per_step", {})
            planned = line.get("planned", {})
            over = "OVER BUDGET" if line.get("peak", 0) > (line.get("budget") or 1 << 62) else ""
            print(
                f"{act} | {line['run']} | {1e3 * line['step']:.1f} ms (host {1e3 * line['host_step']:.1f}) {mark} {over} "
                f"peak {line.get('peak', line.get('torch_peak', 0)) / 1e9:.2f} of {min(line.get('budget') or 0, 1 << 50) / 1e9:.2f} GB "
                f"nvml {(line.get('nvml_peak', 0) - line.get('nvml_before', 0)) / 1e9:.2f} | out {per.get('offload_bytes', 0) / 1e9:.2f} "
                f"in {per.get('reload_bytes', 0) / 1e9:.2f} ev {per.get('evictions', 0):.0f} remat {per.get('rematerializations', 0):.0f} "
                f"maps {per.get('device.maps', 0):.0f} ({per.get('device.map_nanoseconds', 0) / 1e6:.1f} + {per.get('device.unmap_nanoseconds', 0) / 1e6:.1f} ms) sync {per.get('device.synchronizations', 0):.0f} waits {per.get('device.waits', 0):.0f} "
                f"stall {per.get('stall_seconds', 0):.4f} | plans {line.get('plans')} ({line.get('plan_seconds')} s) "
                f"followed {per.get('planned_passes', 0):.2f} predicted {planned.get('overhead')} warm {line.get('warm')}"[
                    :700
                ]
            )
        elif event == "failed":
            print(f"{act} | {line['run']} | FAILED {line['error'][:500]}")
        elif event == "op cost":
            print(f"{act} | {line['name']} | {line['microseconds']}")
        elif event in ("ended", "skipped"):
            print(f"{act} | {event} {line.get('code', line.get('why'))} ({line.get('seconds')} s)")


if __name__ == "__main__":
    sys.exit(main())
