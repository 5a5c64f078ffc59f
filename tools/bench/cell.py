"""The process of a cell: one model trained by one system, a step for each turn, and its measurements."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .models import Training, make
from .systems import SYSTEMS, NotHere, System, budget_of

WARM_STEPS, MOST_WARM_STEPS = 2, 16
"""Before the first turn: without memmgr, and until memmgr follows a plan and makes no other."""

PLANNED_STEPS, QUIET_STEPS = 2, 3
"""So many passes have followed a plan, and in so many no new one has come: making one takes a processor."""

MOST_WARM_STEPS_OF_A_TRY = 6

METERED_STEPS = 2


def preload() -> None:
    """Imports the slow modules once for all cells; runs no code of theirs, so that there are no threads when it forks."""
    torch.optim.AdamW([torch.nn.Parameter(torch.empty(1))])
    with contextlib.suppress(ImportError):
        from transformers import BertForMaskedLM, LlamaForCausalLM, ViTForImageClassification  # noqa: F401


def in_short(error: BaseException) -> str:
    """One line for a table's cell."""
    if isinstance(error, NotHere):
        return str(error)
    text = " ".join(str(error).split())
    least = text.partition("A budget of ")[2].partition(" (")[0]
    if least:
        return f"needs {least}"
    return f"{type(error).__name__}: {text}"[:160]


def memory_of(name: str) -> int:
    """Bytes of the resident set: VmRSS, or VmHWM, the most since `forget_peak` (Linux; elsewhere 0)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return 0


def forget_peak() -> None:
    """The kernel's high-water mark starts again here."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def digest_of(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of their bytes."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


class Steps:
    """A training with the measurements of each step."""

    def __init__(self, spec: dict[str, Any], system: System) -> None:
        self.on_gpu = spec["device"] != "cpu"
        torch.manual_seed(0)
        with torch.device(spec["device"]) if self.on_gpu else contextlib.nullcontext():
            self.training: Training = make(spec["model"], spec["tiny"], spec["batch"])
            system.apply(self.training)
        self.losses: list[str] = []

    def take(self) -> dict[str, float]:
        """One step; its seconds, by the clock and of the processor."""
        begun, used = time.perf_counter(), time.process_time()
        losses = self.training.step()
        if self.on_gpu:
            torch.cuda.synchronize()
        took = {"seconds": time.perf_counter() - begun, "processor": time.process_time() - used}
        self.losses.append(" ".join(float(loss).hex() for loss in losses))
        return took

    def digests(self) -> dict[str, str]:
        """Digests of the training's state so far."""
        model = self.training.model
        return {"parameters": digest_of(model.parameters()), "buffers": digest_of(model.buffers())}


def settled(steps: Steps, mm: Any, system: System, most: int = MOST_WARM_STEPS) -> None:
    """Warms up; under a budget until a plan is followed and no other has come for some steps, where there are plans."""
    plans, since = 0, 0
    for taken in range(most):
        if mm is None:
            if taken >= WARM_STEPS:
                return
        else:
            stats = mm.stats()
            since = since + 1 if stats["plans"] == plans else 0
            plans = stats["plans"]
            followed = stats["planned_passes"] >= PLANNED_STEPS and since >= QUIET_STEPS
            if taken >= 2 * WARM_STEPS and (followed or not system.planned or not stats["reclaims"]):
                return
        steps.take()


def metered(steps: Steps, device: str) -> int:
    """The most bytes that torch holds at once in some further steps, of a system without memmgr: a budget without a limit counts
    them, and those that were there before. On CUDA torch's own figure."""
    if device != "cpu":
        return int(torch.cuda.max_memory_allocated())
    import memmgr

    with memmgr.budget(None, device="cpu", policy="keep", quiet=True) as mm:
        for _ in range(METERED_STEPS):
            steps.take()
        return int(mm.stats()["resident_bytes.peak"])


def run(spec: dict[str, Any], pipe: Connection) -> None:
    """Runs the spec: "needs", "turns" or "attempt"."""
    system = SYSTEMS[spec["system"]]
    torch.set_num_threads(spec["threads"])
    if spec["device"] != "cpu":
        if system.policy:
            import memmgr
        torch.cuda.init()
    if system.policy:
        import memmgr  # noqa: F401  loads its imports before memory is measured
    _beforehand(spec["device"])
    {"needs": _needs, "turns": _turns, "attempt": _attempt}[spec["what"]](spec, system, pipe)


def _beforehand(device: str) -> None:
    """One tiny step, so that threads and code belong to the base of the resident set."""
    layer = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.zeros(128, 64, device=device)).square().mean().backward()
    optimizer.step()


def _needs(spec: dict[str, Any], system: System, pipe: Connection) -> None:
    """Peak and states, in bytes, and seconds a step, of a system without memmgr."""
    steps = Steps(spec, system)
    took = [steps.take()["seconds"] for _ in range(1 + spec["turns"])][1:]
    states = steps.training.state_bytes()
    pipe.send({"peak_bytes": metered(steps, spec["device"]), "state_bytes": states, "seconds": took})


def _turns(spec: dict[str, Any], system: System, pipe: Connection) -> None:
    """Warms up, reports that, and takes a step at each request; then sends its figures."""
    base = memory_of("VmRSS")
    forget_peak()
    with budget_of(system, spec["budget_bytes"], spec["device"]) as mm:
        steps = Steps(spec, system)
        settled(steps, mm, system)
        before = mm.stats() if mm is not None else {}
        pipe.send(_state(steps, spec))
        for _ in iter(pipe.recv, None):
            took = steps.take()
            pipe.send(took | _state(steps, spec))
        told: dict[str, Any] = {"outside_bytes": max(0, memory_of("VmHWM") - base)}
        told |= {"losses": steps.losses[:], **steps.digests()}
        if mm is not None:
            told |= _of_memmgr(before, mm.stats())
    if mm is None:
        told["inside_bytes"] = metered(steps, spec["device"])
    pipe.send(told)


def _state(steps: Steps, spec: dict[str, Any]) -> dict[str, Any]:
    """How far it is; the reference's digests too, of this very step: others may end there."""
    return {"steps": len(steps.losses)} | (steps.digests() if spec["reference"] else {})


_KEYS = (
    "planned_passes", "plans", "plan_seconds", "recompute_seconds", "stall_seconds", "offload_bytes", "reload_bytes",
    "evicted_bytes", "reclaims",
)  # fmt: skip


def _of_memmgr(before: Any, now: Any) -> dict[str, Any]:
    """Counters are those of the turns."""
    return {"inside_bytes": now["resident_bytes.peak"], **{key: now[key] - before[key] for key in _KEYS}}


def _attempt(spec: dict[str, Any], system: System, pipe: Connection) -> None:
    """Trains some steps in `budget_bytes`, or says why it cannot: the seconds of the last ones."""
    with budget_of(system, spec["budget_bytes"], spec["device"]) as mm:
        steps = Steps(spec, system)
        settled(steps, mm, system, MOST_WARM_STEPS_OF_A_TRY)
        took = [steps.take() for _ in range(spec["turns"])]
        peak = mm.stats()["resident_bytes.peak"] if mm is not None else 0
    if mm is None:
        peak = metered(steps, spec["device"])
    pipe.send({"peak_bytes": peak, **{key: [t[key] for t in took] for key in ("seconds", "processor")}})
