"""The acts of the two calls, most instructive first, each with the seconds that it may take."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .figures import H100

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Act:
    """A process of the check."""

    name: str
    command: list[str]
    group: str  # acts of one group that follow one another run at once
    limit_seconds: float  # the act and all that it started are killed after that
    env: dict[str, str] = field(default_factory=dict)
    needs: str = ""  # the act is skipped if that group ran and no act of it went well; empty: never
    folder: Path | None = None  # where it runs; None: where the check runs
    missing: str = ""  # why it cannot run here; empty: it can


@dataclass(frozen=True)
class Place:
    """Where the check runs."""

    out: Path  # the folder for the acts' files
    # "cuda"; "cpu" is a rehearsal with tiny models; "simulated" a device of the tests with virtual time
    device: str = "cuda"
    figures: Path = H100  # the table of a simulation

    @property
    def on_gpu(self) -> bool:
        """There is something to measure."""
        return self.device == "cuda"

    @property
    def simulated(self) -> bool:
        """Times are virtual."""
        return self.device == "simulated"


def by_path(name: str, *words: str) -> list[str]:
    """A file of this folder, or of another one of the tools. -P: a folder ./memmgr must not shadow the installed package."""
    return [sys.executable, "-P", str(HERE / name), *words]


def train(place: Place, name: str, group: str, limit: float, spec: dict[str, Any], **env: str) -> Act:
    """An act that trains."""
    plain = {"MEMMGR_INSTALL": "0"} if spec.get("plain") else {}
    spec = {"seconds": limit - 6, "device": place.device, **spec}
    if place.simulated:
        tests = [folder / "tests" for folder in (HERE.parents[1], Path.cwd()) if (folder / "tests" / "memdev").is_dir()]
        limit *= SLOWER
        spec |= {"figures": str(place.figures), "tests": str(tests[0]) if tests else "", "seconds": limit - 6}
        if not tests:
            return Act(name, [], group, limit, missing="no checkout with tests/memdev here")
    elif not place.on_gpu:
        spec["tiny"] = True
    command = by_path("train.py", json.dumps(spec))
    return Act(name, command, group, limit, {**plain, **env}, needs="smoke")


def bits(place: Place, model: str, **spec: Any) -> Act:
    """The same bits under four policies. `torture` evicts all that it may, so each cell goes both ways."""
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
    if model == "gpt2":
        spec["tiny"] = True
    spec = {"model": model, "deterministic": True, "runs": runs, **spec}
    return train(place, f"bits {model}", "bits", 75, spec, CUBLAS_WORKSPACE_CONFIG=":4096:8")


def timing(place: Place, model: str, limit: float) -> Act:
    """Steps in half and a quarter of the activations, and the effect of each choice."""
    steady: dict[str, Any] = {"warm": 6, "settle": 60, "settle_seconds": 12, "steps": 6}
    fixed: dict[str, Any] = {"warm": 6, "settle": 60, "settle_seconds": 8, "steps": 4}
    trace = str(place.out / f"{model}-trace.json.gz")
    runs: list[dict[str, Any]] = [
        {"name": "none", "warm": 3, "steps": 8},
        {"name": "unlimited", "measure": True, "warm": 3, "steps": 8, "digest": False},
        {"name": "half auto", "of_activations": 0.5, **steady},
        {"name": "half offload", "of_activations": 0.5, "policy": "offload", **fixed},
        {"name": "half auto, remap", "of_activations": 0.5, "placement": "remap", **fixed},
        {"name": "half auto, profiled", "of_activations": 0.5, **fixed, "profile": trace},
        {"name": "quarter auto", "of_activations": 0.25, **fixed},
        {"name": "half evict", "of_activations": 0.5, "policy": "evict", **fixed},
    ]
    return train(place, f"timing {model}", f"timing {model}", limit, {"model": model, "host": "16GiB", "runs": runs})


def first(place: Place) -> list[Act]:
    """Does it work, and where is it slow?"""
    steps: dict[str, Any] = {"warm": 0, "steps": 3, "host": "1GiB"}
    smoke = [{"name": "none", **steps}, {"name": "measure", "measure": True, **steps}]
    smoke += [{"name": "75 %", "of_need": 0.75, **steps}]
    spec: dict[str, Any] = {"model": "resnet18", "deterministic": True, "runs": smoke}
    native = {"MEMMGR_CONF": "allocator:native"}
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **native}
    acts = [
        driver_calls(place),
        train(place, "smoke mapped", "smoke", 60, spec),
        train(place, "smoke late", "smoke", 60, {**spec, "late": True}),
        train(place, "smoke native", "smoke", 60, spec, **native),
        train(place, "smoke native expandable", "smoke", 60, spec, **expandable),
        train(place, "smoke plain torch", "smoke", 60, {**spec, "plain": True, "runs": smoke[:1]}),
    ]
    acts = [replace(act, needs="") for act in acts]
    acts += [bits(place, model) for model in ("lstm", "gpt_fp32", "resnet18", "unet", "gpt2", "recommender")]
    return [*acts, timing(place, "gpt2", 75), op_cost(place), timing(place, "resnet50", 75)]


def second(place: Place) -> list[Act]:
    """The mended models, uses besides plain training, and the figures beside torch's own ways to save memory."""
    acts = [bits(place, model) for model in ("lstm", "resnet18", "gpt2", "gpt_fp32")]
    acts += [marked_tests("tests", KERNELS_AND_DEVICE), marked_tests("undeclared writes", UNDECLARED_WRITES)]
    acts += [other(place, name, "ways", 60) for name in ("graphs", "streams", "compiled", "trainer", "answers")]
    acts += [timing(place, model, 75) for model in ("gpt2", "resnet50")]
    acts += [other(place, "largest", f"largest {way}", 60, way) for way in ("plain", "memmgr")]
    acts.append(other(place, "two", "two processes", 60))
    for model in ("gpt2", "resnet50"):
        methods = ("none", "checkpoint", "save_on_cpu")
        runs = [{"name": method, "method": method, "warm": 3, "steps": 6, "digest": False} for method in methods]
        spec = {"model": model, "plain": True, "runs": runs}
        acts.append(train(place, f"plain {model}", f"plain {model}", 30, spec))
    fixed = {"warm": 6, "settle": 60, "settle_seconds": 8, "steps": 4}
    runs = [
        {"name": "unlimited", "measure": True, "warm": 3, "steps": 3, "digest": False},
        {"name": "half auto", "of_activations": 0.5, **fixed},
    ]
    small = {"MEMMGR_CUDA_PAGE": str(2 << 20)}
    acts.append(train(place, "pages of 2 MiB gpt2", "pages", 30, {"model": "gpt2", "runs": runs}, **small))
    return [*acts, op_cost(place)]


SLOWER = 4
"""A simulation runs all ops of a real model on the CPUs that are there: its acts have so many times the seconds."""
SIMULATED = ("timing", "plain ")
"""The acts that a simulation has begin so: others are about bits or torch's own device."""
CALLS: dict[str, tuple[Callable[[Place], list[Act]], float]] = {"first": (first, 300), "second": (second, 400)}
"""By name: the acts, and the seconds that they have by default."""


# ---- acts that do not train ------------------------------------------------------------------------------------------


def other(place: Place, name: str, group: str, limit: float, *words: str) -> Act:
    """One of `acts.py`."""
    return Act(" ".join([name, *words]), by_path("acts.py", name, place.device, *words), group, limit)


def op_cost(place: Place) -> Act:
    """Host time of an op."""
    return Act("op cost", by_path("op_cost.py", place.device), "op cost", 25, needs="smoke")


def driver_calls(place: Place) -> Act:
    """The table of the costs of the driver's calls; compiled where no binary was carried here."""
    act = Act("driver calls", [], "driver", 30)
    if not place.on_gpu:
        return replace(act, missing="no GPU in a rehearsal")
    # carry/ beside the checkout's tools/, and beside carry/site where the package is installed in that folder.
    for folder in (HERE.parents[1] / "carry", HERE.parents[2].parent, Path("carry")):
        if (folder / "driver_calls").is_file():
            return replace(act, command=[str((folder / "driver_calls").resolve())])
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return replace(act, missing="no carry/driver_calls and no C++ compiler")
    words = shlex.join([compiler, *COMPILED_WITH, str(HERE / "driver_calls.cpp")])
    build = f'made=$(mktemp -d) && {words} -o "$made/calls" -ldl -lpthread'
    script = f'{build} && "$made/calls" "$@"; code=$?; rm -r "$made"; exit $code'
    return replace(act, command=["bash", "-c", script], limit_seconds=50)


COMPILED_WITH = ("-std=c++17", "-O2", "-static-libstdc++", "-static-libgcc")


KERNELS_AND_DEVICE = ("tests/driver/test_kernels.py", "tests/driver/test_real_device.py")
UNDECLARED_WRITES = ("tests/ops/test_state_arguments.py",)


def marked_tests(name: str, files: tuple[str, ...]) -> Act:
    """The tests marked gpu in these files, with the installed package and the checkout's tests."""
    # -P keeps the working folder off the path, and with it the checkout's ./memmgr, which lacks policies and tools.
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "gpu and not slow", "-p", "no:cacheprovider", *files]
    act = Act(name, pytest, "bits", 75, {"MEMMGR_INSTALL": "0"})
    for folder in (HERE.parents[1], Path.cwd()):
        if all((folder / file).is_file() for file in files):
            return replace(act, folder=folder, command=[*pytest, "--rootdir", str(folder)])
    return replace(act, missing="no checkout with tests/ here")
