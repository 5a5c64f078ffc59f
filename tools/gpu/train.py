"""Trains one model several times in one process on a GPU and prints a JSON line for each run.

    python train.py '{"model": "gpt2", "runs": [{"name": "none"}, {"name": "half", "of_activations": 0.5}]}'

Started by its path by `check.py`, so that a process can leave memmgr out: `"plain": true` at the top never imports it, and all
runs are torch's own. Otherwise memmgr is imported before CUDA is initialised, as a user would, and its allocator serves all runs.

Keys at the top: `model`, `tiny`, `batch`, `deterministic`, `plain`, `runs`, `device`, `seconds` (no run begins later than that),
`late` (a tensor is on the device before memmgr is imported).
`device` "simulated" is the tests' device with virtual time (simulated.py) in `tests`, a folder of a checkout: the models are the
real ones, their kernels take their time and do nothing, `figures` is the table. All seconds of openings and steps are virtual.
Keys of a run, all optional except `name`:
    budget: bytes, or null for none; `of_activations`: the budget is the fixed part + this share of the activations;
    `of_need`: this share of the need. Both need an earlier run with `"measure": true`.
    policy, placement, host, leave_out (pools/stream_rules.h: StreamRule), verify: of the budget.
    steps: measured steps; warm: steps before at least; settle: most steps until a plan is followed.
    digest: of parameters, buffers and losses; default where `settle` does not make the number of steps vary;
    profile: a path for a trace of two steps;
    trace, trace_pass: a file for memmgr's trace of a pass, for link_bound.py in tools/bench/studies, and the number of the pass;
    method: of a plain run: "none", "checkpoint" or "save_on_cpu".
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

faulthandler.enable()
SPEC: dict[str, Any] = json.loads(sys.argv[1])
PLAIN = SPEC.get("plain", False)
EARLY = None
if SPEC.get("late"):
    import torch

    EARLY = torch.ones(1 << 20, device=SPEC.get("device", "cuda"))
if not PLAIN:
    import memmgr

# memmgr comes first, as in a user's program, and only where the spec has no "plain": hence the noqa.
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

SIMULATED = SPEC.get("device") == "simulated"
DEVICE = "memdev" if SIMULATED else SPEC.get("device", "cuda")
ON_GPU = DEVICE == "cuda"
TINY = SPEC.get("tiny", False)
BEGUN = time.perf_counter()
STEADY = 12
"""Steps between the last plan and the measured ones: two are noted, two map their sites, two may ask for another plan."""
PROFILED = 2  # steps under the profiler
OWN_STEPS = 5  # of a simulation, in which the machine's clock runs: one op of 64 is measured
clock = time.perf_counter  # of openings and steps; virtual in a simulation
simulation: Any = None
virtual_clock = 0  # the address of a simulation's clock


def say(**fields: Any) -> None:
    """A JSON line, at once."""
    print(json.dumps({"model": SPEC["model"], **fields}), flush=True)


def _sibling(name: str, folder: str = "bench") -> ModuleType:
    path = Path(__file__).resolve().parents[1] / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_gpu_train_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# ---- models ----------------------------------------------------------------------------------------------------------

Made = tuple[nn.Module, Callable[[], Tensor]]
"""A model and a function that draws a batch and gives the loss."""


def _autocast(on: bool) -> Any:
    return torch.autocast(DEVICE, torch.bfloat16, enabled=on)


def gpt2(fp32: bool = False) -> Made:
    """GPT-2 124M, 8 x 1,024 tokens, bf16 autocast; `fp32`: a small one in fp32 with math attention."""
    gpt = _sibling("gpt")
    sizes: dict[str, Any] = {
        "layers": 12,
        "heads": 12,
        "width": 768,
        "context": 1024,
        "vocabulary": 50257,
        "dropout": 0.1,
    }
    if (TINY and (ON_GPU or SIMULATED)) or fp32:
        sizes |= {"layers": 4, "heads": 4, "width": 256, "context": 256, "vocabulary": 1024}
    if TINY and DEVICE == "cpu":
        sizes |= {"layers": 2, "heads": 2, "width": 32, "context": 64, "vocabulary": 64}
    model = gpt.GPT(gpt.GPTConfig(**sizes))

    def loss() -> Tensor:
        tokens = torch.randint(sizes["vocabulary"], (SPEC.get("batch", 8), sizes["context"] + 1), device=DEVICE)
        with _autocast(not fp32):
            value: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        return value

    return model, loss


def resnet(depth: int) -> Made:
    """ResNet-50 at 224 x 224, batch 128, or a small ResNet-18; bf16 autocast, channels_last."""
    batch, side = (128, 224) if depth == 50 else (32, 96)
    if TINY:
        batch, side = 4, 64
    model = _sibling("resnet").ResNet(depth).to(memory_format=torch.channels_last)

    def loss() -> Tensor:
        images = torch.randn(SPEC.get("batch", batch), 3, side, side, device=DEVICE).contiguous(
            memory_format=torch.channels_last
        )
        labels = torch.randint(1000, (len(images),), device=DEVICE)
        with _autocast(True):
            return F.cross_entropy(model(images), labels)

    return model, loss


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width // 2)
        self.lstm = nn.LSTM(width // 2, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return out


def lstm() -> Made:
    """A two-layer LSTM with dropout: cuDNN advances the state of its dropout in place."""
    model = _Recurrent(512 if not TINY else 32)

    def loss() -> Tensor:
        tokens = torch.randint(256, (32, 65 if not TINY else 17), device=DEVICE)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return model, loss


class _UNet(nn.Module):
    def __init__(self, width: int = 24, levels: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(self._double(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(self._double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _double(inside: int, outside: int) -> nn.Sequential:
        parts = [nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU()]
        parts += [nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU()]
        return nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = skips.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([grow(x), skips.pop()], 1))
        out: Tensor = self.head(x)
        return out


def unet() -> Made:
    """A small U-Net in fp32."""
    model = _UNet() if not TINY else _UNet(8, 2)
    side = 128 if not TINY else 32

    def loss() -> Tensor:
        images = torch.randn(8, 3, side, side, device=DEVICE)
        out: Tensor = model(images)
        return F.mse_loss(out, images)

    return model, loss


class _Recommender(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 64, mode="sum") for _ in range(4))
        self.top = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.BatchNorm1d(512), nn.Linear(512, 1))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.top(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1))
        return out


def recommender() -> Made:
    """Embedding bags and a small network."""
    rows, batch = (20000, 2048) if not TINY else (500, 256)
    model = _Recommender(rows)

    def loss() -> Tensor:
        ids = torch.randint(rows, (batch, 4, 8), device=DEVICE)
        return F.binary_cross_entropy_with_logits(model(ids).squeeze(1), torch.rand(batch, device=DEVICE))

    return model, loss


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": gpt2,
    "gpt_fp32": lambda: gpt2(fp32=True),
    "resnet50": lambda: resnet(50),
    "resnet18": lambda: resnet(18),
    "lstm": lstm,
    "unet": unet,
    "recommender": recommender,
}


# ---- watched values --------------------------------------------------------------------------------------------------


class Nvml:
    """The highest use of the GPU's memory that NVML reports, read on a thread."""

    def __init__(self) -> None:
        self.peak = 0
        self._ask: Callable[[], int] | None = None
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._ask = lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self) -> None:
        while self._ask is not None:
            self.peak = max(self.peak, self._ask())
            time.sleep(0.01)

    def now(self) -> int:
        """Bytes in use on the GPU, of all processes."""
        return self._ask() if self._ask is not None else 0


def synchronize() -> None:
    """Waits for the GPU."""
    if ON_GPU:
        torch.cuda.synchronize()
    elif SIMULATED:
        torch.accelerator.synchronize()


def digest(model: nn.Module, losses: list[Tensor]) -> str:
    """SHA-256 of the parameters, the buffers and the losses."""
    sha = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers(), *losses]:
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]


def native_figures() -> dict[str, int]:
    """Counters of the device and of the link below it."""
    from memmgr.native import binding

    native = binding.load()
    figures: dict[str, int] = {}
    with contextlib.suppress(Exception):
        figures |= {f"device.{key}": value for key, value in native.device_stats().items()}
    with contextlib.suppress(Exception):
        figures |= {f"tier.{key}": value for key, value in native.tier_stats().items()}
    return figures


KEPT = (
    "evictions evicted_bytes offloads offload_bytes reloads reload_bytes clean_drops recomputes recompute_seconds "
    "rematerializations stall_seconds room_seconds reclaims reads_ahead late_reads write_backs planned_passes passes "
    "short_periods plans plan_seconds trials refused_kinds retries ops recorded_ops "
    "search_seconds own_seconds"
).split()


def plans_now(mm: Any) -> bool:
    """A plan is being made at this moment."""
    thread = getattr(getattr(mm._runtime, "plans", None), "_thread", None)
    return thread is not None and bool(thread.is_alive())


def own_seconds(step: Callable[[], None], mm: Any) -> float:
    """The seconds of a step in which memmgr itself computes for its ops, by the machine's clock: a simulation's stands still
    meanwhile. The simulated driver's own work for memmgr's calls is in them. The run takes no other figure after it."""
    from memmgr.native import binding

    binding.load().read_clock(0)
    sums = [float(mm.stats()["own_seconds"])]
    for _ in range(OWN_STEPS):
        step()
        synchronize()
        sums.append(float(mm.stats()["own_seconds"]))
    binding.load().read_clock(virtual_clock)
    return statistics.median(after - before for before, after in pairwise(sums))


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The changes of counters; a key that was not there counts from zero."""
    return {key: round(value - before.get(key, 0), 6) for key, value in after.items() if value != before.get(key, 0)}


# ---- a run -----------------------------------------------------------------------------------------------------------

MEASURED: dict[str, int] = {}
nvml = Nvml() if ON_GPU else None


@contextlib.contextmanager
def budget(run: dict[str, Any]) -> Iterator[Any]:
    """The budget of the run, or none."""
    if PLAIN or not ({"budget", "of_activations", "of_need", "measure"} & run.keys()):
        yield None
        return
    from memmgr.native import binding

    limit = run.get("budget")
    if "of_activations" in run:
        limit = MEASURED["fixed"] + int(run["of_activations"] * (MEASURED["need"] - MEASURED["fixed"]))
    if "of_need" in run:
        limit = int(run["of_need"] * MEASURED["need"])
    options: dict[str, Any] = {key: run[key] for key in ("policy", "host", "verify") if key in run}
    if "placement" in run:
        options["_placement"] = run["placement"]
    if limit is not None:
        options.setdefault("host", SPEC.get("host", "6GiB"))
    options |= {key: run[key] for key in ("log", "trace", "trace_pass") if key in run}
    begun = clock()
    with memmgr.budget(limit, device=DEVICE, quiet=True, **options) as mm:
        say(run=run["name"], event="opened", budget=limit, seconds=round(clock() - begun, 3))
        binding.load().leave_out(run.get("leave_out", 0))
        try:
            yield mm
        finally:
            binding.load().leave_out(0)


def forward_of(method: str, model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The loss under a method of saving memory that torch itself has."""
    if method == "checkpoint":
        blocks = [m for m in model.modules() if type(m).__name__ in ("Block", "Bottleneck", "BasicBlock")]
        for block in blocks:
            inner = block.forward
            block.forward = lambda *args, _inner=inner: checkpoint(_inner, *args, use_reentrant=False)
        return loss
    if method == "save_on_cpu":

        def saved() -> Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return loss()

        return saved
    return loss


def run_once(run: dict[str, Any]) -> None:
    """Trains by the run's settings and prints its figures."""
    out: dict[str, Any] = {"run": run["name"], "event": "result"}
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        with contextlib.suppress(RuntimeError):
            torch.cuda.reset_peak_memory_stats()
    if nvml is not None:
        nvml.peak = nvml.now()
        out["nvml_before"] = nvml.peak
    with budget(run) as mm:
        trained(run, mm, out)


def trained(run: dict[str, Any], mm: Any, out: dict[str, Any]) -> None:
    """The run itself: its tensors are freed before its budget closes."""
    torch.manual_seed(11)
    with torch.device(DEVICE):
        model, loss = MODELS[SPEC["model"]]()
    loss = forward_of(run.get("method", "none"), model, loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses: list[Tensor] = []

    def step() -> None:
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())

    warm_times: list[float] = []
    beside_planner: list[float] = []
    warm, most = run.get("warm", 2), run.get("settle", 0)
    plans, since = -1, 0
    settle_begun = clock()
    for taken in range(max(warm, most)):
        planning = mm is not None and plans_now(mm)
        begun = clock()
        step()
        synchronize()
        warm_times.append(round(clock() - begun, 4))
        if planning and plans_now(mm):
            beside_planner.append(warm_times[-1])
        if mm is None or taken + 1 < warm:
            continue
        if SIMULATED:
            mm._runtime.plans.wait()  # a plan takes no virtual time
        stats = mm.stats()
        since = since + 1 if stats["plans"] == plans else 0
        plans = stats["plans"]
        if not stats["reclaims"] or (stats["planned_passes"] >= 2 and since >= STEADY):
            break
        if clock() - settle_begun > run.get("settle_seconds", 8):
            break
    out["warm"] = warm_times[:4] + ["..."] * (len(warm_times) > 8) + warm_times[max(4, len(warm_times) - 4) :]
    out["warm_steps"], out["settle_seconds"] = len(warm_times), round(clock() - settle_begun, 2)
    if beside_planner:
        out["beside_planner"] = {"steps": len(beside_planner), "seconds": round(statistics.median(beside_planner), 5)}
    before = (mm.stats(), native_figures()) if mm is not None else ({}, {})
    steps = run.get("steps", 5)
    host_times, marks = [], []
    synchronize()
    if SIMULATED:
        simulation.begin()
    begun = clock()
    for _ in range(steps):
        at = clock()
        step()
        host_times.append(clock() - at)
        if ON_GPU:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
    synchronize()
    out["step"] = round((clock() - begun) / steps, 5)
    if SIMULATED:
        seen = out["simulated"] = simulation.end(steps)
        out["kernel_seconds"] = seen["kernels"]
        out["DtoH"] = {"seconds": seen["out"], "under_kernels": seen["out_under_kernels"]}
        out["HtoD"] = {"seconds": seen["in"], "under_kernels": seen["in_under_kernels"]}
    out["host_step"] = round(statistics.median(host_times), 5)
    if len(marks) > 2:
        out["device_steps"] = [round(a.elapsed_time(b), 2) for a, b in zip(marks, marks[1:], strict=False)]
    if mm is not None:
        stats, figures = mm.stats(), native_figures()
        kept = {key: stats[key] for key in KEPT if key in stats}
        out["per_step"] = {
            key: round(value / steps, 6)
            for key, value in (
                difference(kept, {k: before[0].get(k, 0) for k in kept}) | difference(figures, before[1])
            ).items()
        }
        if SIMULATED:  # the core's own clock is the machine's
            out["per_step"] |= {f"device.{name}_nanoseconds": 1e9 * seen[name] for name in ("map", "unmap")}
        out |= {
            "peak": stats["resident_bytes.peak"],
            "committed_peak": stats["committed_bytes.peak"],
            "budget": stats.get("budget_bytes"),
            "plans": stats["plans"],
            "plan_seconds": round(stats["plan_seconds"], 3),
            "planned_passes": stats["planned_passes"],
            "passes": stats["passes"],
            "tier_peak": stats["tier_bytes.peak"],
            "link": stats.get("link_bytes_per_second"),
            "driver_errors": figures.get("device.driver_errors"),
            "refused_kinds": stats["refused_kinds"],
            "trials": stats["trials"],
        }
        made = mm._runtime.plans.latest() if hasattr(mm, "_runtime") and mm._runtime else None
        if made is not None:
            out["planned"] = {
                "overhead": round(made.overhead, 4),
                "lower_bound": made.lower_bound,
                "rematerialized": made.rematerialized,
                "offloaded": made.offloaded,
            }
        out["plan_errors"] = mm._runtime.plans.errors() if mm._runtime else []
    if ON_GPU:
        with contextlib.suppress(RuntimeError):
            out["torch_peak"] = torch.cuda.max_memory_allocated()
            out["reserved_peak"] = torch.cuda.max_memory_reserved()
    if nvml is not None:
        out["nvml_peak"] = nvml.peak
    if run.get("measure"):
        optimizer.zero_grad()
        MEASURED["need"] = int(out["peak"])
        synchronize()
        MEASURED["fixed"] = int(mm.stats()["resident_bytes.current"])
        out |= MEASURED
    out["first_losses"] = [float(value).hex() for value in losses[:3]]
    if run.get("digest", not most):  # after a number of steps that is the same in each run
        out["digest"] = digest(model, losses)
    if SIMULATED and mm is not None:
        out["per_step"]["own_seconds"] = round(own_seconds(step, mm), 6)
    if run.get("profile") and ON_GPU:
        out |= profiled(step, run["profile"])
    say(**out)


def profiled(step: Callable[[], None], path: str) -> dict[str, Any]:
    """Two steps under torch's profiler: the seconds of one step's kernels and copies, and how much of these lies under those; the
    trace goes to `path`."""
    from torch.profiler import ProfilerActivity, profile

    times = _sibling("simulated", "gpu")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            step()
        synchronize()
    copies: dict[str, list[tuple[float, float]]] = {"DtoH": [], "HtoD": []}
    kernels: list[tuple[float, float]] = []
    for event in profiler.events() or []:
        if event.device_type.name != "CUDA":
            continue
        span = (event.time_range.start / 1e6, event.time_range.end / 1e6)
        if "Memcpy" in event.name:
            for way in copies:
                if way in event.name:
                    copies[way].append(span)
        elif "Memset" not in event.name:
            kernels.append(span)
    busy = times.union(kernels)
    found: dict[str, Any] = {"kernel_seconds": round(times.length(busy) / PROFILED, 5)}
    for way, spans in copies.items():
        copying = times.union(spans)
        hidden = times.both(busy, copying)
        found[way] = {
            "seconds": round(times.length(copying) / PROFILED, 5),
            "under_kernels": round(hidden / PROFILED, 5),
            "count": len(spans) / PROFILED,
        }
    found["strips"] = times.strips(
        {"kernels": busy, "to host": times.union(copies["DtoH"]), "to GPU": times.union(copies["HtoD"])}, columns=140
    )
    with contextlib.suppress(Exception):
        profiler.export_chrome_trace(path)
    return found


def simulate() -> None:
    """Makes the tests' device this process's accelerator."""
    global simulation, clock, virtual_clock
    tests = Path(SPEC["tests"])
    sys.path.insert(0, str(tests))
    memory = 80 << 30
    handles = importlib.import_module("memdev").start(mode="timed", memory_bytes=memory, hollow=True)
    os.environ["MEMMGR_DRIVER"] = str(handles.driver_path)
    if not PLAIN:
        from memmgr.native import binding
        from memmgr.native.build import load_core

        virtual_clock = ctypes.cast(handles.fake.fake_nanoseconds, ctypes.c_void_p).value or 0
        binding.load().read_clock(virtual_clock)
        # Locked in the pieces of a GPU, and never touched.
        load_core().mm_test_lock_pieces(ctypes.c_uint64(0), ctypes.c_uint64(0), 0)
    figures = _sibling("figures", "gpu")
    table = figures.read(Path(SPEC.get("figures", figures.H100)))
    simulation = _sibling("simulated", "gpu").Simulation(handles.fake, table)
    clock = simulation.now

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, dropout_p: float = 0.0) -> Tensor:
        fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
        out: Tensor = fused(q, k, v, None, dropout_p, is_causal)[0]
        return out

    # One kernel each way, as on a GPU.
    F.scaled_dot_product_attention = attention  # type: ignore[assignment]


def main() -> None:
    """Does all runs, one after the other. A failure is reported, and the next run begins."""
    if SPEC.get("deterministic"):
        torch.use_deterministic_algorithms(True, warn_only=True)
    with contextlib.suppress(Exception):
        torch.backends.cudnn.benchmark = SPEC.get("benchmark", False)
    if SIMULATED:
        simulate()
    if ON_GPU:
        torch.cuda.init()
        torch.zeros(1, device=DEVICE)
    say(event="begun", plain=PLAIN, torch=torch.__version__, seconds=round(time.perf_counter() - BEGUN, 2))
    good = 0
    for run in SPEC["runs"]:
        if time.perf_counter() - BEGUN > SPEC.get("seconds", 1e9):
            say(run=run["name"], event="skipped", why="no time left")
            continue
        try:
            run_once(run)
            good += 1
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            say(run=run["name"], event="failed", error=f"{type(error).__name__}: {error}"[:1500], stack=text[-3000:])
            if "CUDA error" in text or "illegal" in text:
                sys.exit(4)
    sys.exit(0 if good else 5)


if __name__ == "__main__":
    main()
