"""The process of one run: `python worker.py '<RunSpec as JSON>'` trains and prints events, one JSON object a line;
with a second argument `turns` it waits for a line of standard input before every step.

Started by `runs.run`, by its path. Siblings are loaded by their paths too: importing them as `memmgr.tools.x` would
import memmgr, and an unmanaged run has to be a process in which memmgr does not exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_SECONDS = 0.005  # between two readings of memory


def _load(name: str) -> ModuleType:
    """A sibling module, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"_memmgr_worker_{name}", Path(__file__).with_name(name + ".py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


# ---- memory, seen from outside -------------------------------------------------------------------------------------


def rss_bytes() -> int:
    """The process's resident set now (Linux; elsewhere 0)."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def reset_high_water() -> bool:
    """Makes the kernel's high-water mark of the resident set start again here; False where that is not offered."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return True
    except OSError:
        return False


def high_water_bytes() -> int:
    """The kernel's high-water mark of the resident set: no peak is too short for it, as it would be for sampling."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


class Sampler:
    """Reads memory on a thread while the run goes on. `seconds`: between two readings."""

    def __init__(self, seconds: float) -> None:
        self.resident: Callable[[], int] | None = None
        self.timeline: list[tuple[float, int, int]] = []
        self._waiting, self._waited = False, 0.0
        self._seconds = seconds
        self._start_rss = rss_bytes()
        self._exact = reset_high_water()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="memory sampler", daemon=True)
        self._thread.start()

    @property
    def peak_rss(self) -> int:
        """The resident set at its highest so far, over the start."""
        sampled = max((rss for _, rss, _ in self.timeline), default=0)
        return max(sampled, high_water_bytes() - self._start_rss if self._exact else 0)

    def clock(self) -> float:
        """Seconds of this run: it stands still while others have their turn."""
        return time.perf_counter() - self._waited

    def wait_for_turn(self) -> None:
        """Until standard input has another line."""
        before, self._waiting = time.perf_counter(), True
        _say("waits")
        sys.stdin.readline()
        self._waited += time.perf_counter() - before
        self._waiting = False

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        next_resident, resident, cost = 0.0, -1, math.inf
        while not self._stop.wait(self._seconds):
            if self._waiting:
                continue
            now = self.clock()
            if self.resident is not None and now >= next_resident:
                begun = time.thread_time()
                resident = self.resident()
                # Reading takes about a hundredth of the run. Time in which the thread waits for the interpreter is no cost, and
                # the searches for models in some readings are rationed already: with both there was one in some seconds.
                cost = min(cost, time.thread_time() - begun)
                next_resident = now + max(0.02, 100 * cost)
            self.timeline.append((now, rss_bytes() - self._start_rss, resident))


def keep_nothing_back() -> bool:
    """Tells the C library to map every large block by itself from now on, and so to unmap it when it is freed.

    Otherwise glibc keeps freed heap memory for later, and fragments: the resident set is 5 to 13 % over the live bytes
    on the demo's GPT. It has to be said before there is a heap with holes in it, because holes are filled first. False
    where there is no glibc; the resident set then contains malloc's reserve.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(-3, 1 << 16))  # M_MMAP_THRESHOLD; setting it also stops it from rising
    except (OSError, AttributeError):
        return False


# ---- the run -------------------------------------------------------------------------------------------------------


class Training:
    """Model, optimizer and batches of a spec; `step` takes one optimizer step. `spec`: a RunSpec as plain data."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.manual_seed(spec["seed"])
        gpt, corpus = _load("gpt"), _load("corpus")
        config = gpt.GPTConfig(**spec["sizes"])
        self.model: nn.Module = gpt.GPT(config)
        self.batches = corpus.Batches(corpus.standard_library(), spec["batch"], config.context, spec["seed"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, weight_decay=0.1)

    def step(self) -> float:
        """Forward, backward, update; the loss."""
        loss: Tensor = self.model(*self.batches())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def digest(self, losses: list[str]) -> str:
        """SHA-256 over all results of the training."""
        sha = hashlib.sha256()
        state = self.optimizer.state_dict()["state"]
        moments = {f"{index}.{key}": value for index, entry in state.items() for key, value in entry.items()}
        rng = {"cpu": torch.get_rng_state()}
        for named in (self.model.state_dict(), moments, rng):
            for name in sorted(named):
                sha.update(name.encode())
                content = named[name].detach().cpu().contiguous().flatten().view(torch.uint8)
                sha.update(content.numpy().data)
        sha.update(" ".join(losses).encode())
        return sha.hexdigest()


def _warm_up() -> None:
    """One tiny step, so that code and thread pools belong to the start and not to the run."""
    layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(layer.parameters())
    nn.functional.cross_entropy(layer(torch.zeros(128, 64)), torch.zeros(128).long()).backward()
    optimizer.step()


@contextlib.contextmanager
def _budget(spec: dict[str, Any], sampler: Sampler, result: dict[str, Any]) -> Iterator[None]:
    """The context that the spec asks for: memmgr's, or none."""
    if spec["budget_bytes"] is None:
        yield
        return
    import memmgr

    with memmgr.budget(spec["budget_bytes"], policy=spec["policy"], quiet=True) as mm:
        sampler.resident = lambda: int(mm.stats()["resident_bytes.current"])
        try:
            yield
            stats = mm.stats()
        finally:
            sampler.resident = None
    result["stats"] = {key: value for key, value in stats.items() if isinstance(value, int | float)}


def work(spec: dict[str, Any], *, turns: bool = False) -> dict[str, Any]:
    """Trains as `spec` says; with `turns` each step waits for a line of standard input.

    Returns the fields of a RunResult that are known at the end.
    """
    if spec["budget_bytes"] is not None:
        import memmgr  # noqa: F401  loads its imports before memory is measured
    if spec["measure_need"]:
        keep_nothing_back()
    _warm_up()
    losses: list[str] = []
    result: dict[str, Any] = {}
    sampler = Sampler(SAMPLE_SECONDS)
    with _budget(spec, sampler, result):
        training = Training(spec)
        began = sampler.clock()
        for index in range(spec["steps"]):
            if turns:
                sampler.wait_for_turn()
            before = time.perf_counter()
            losses.append(training.step().hex())
            _say("step", index=index, loss=losses[-1], seconds=time.perf_counter() - before)
        digest = training.digest(losses)
        parameters = sum(p.numel() for p in training.model.parameters())
    result["rss_bytes"] = sampler.peak_rss
    sampler.stop()
    if spec["measure_need"]:
        result["need_bytes"] = result["rss_bytes"]
    timeline = _thin([(now - began, rss, held) for now, rss, held in sampler.timeline if now >= began])
    return result | {"digest": digest, "parameters": parameters, "timeline": timeline}


def _thin(points: list[tuple[float, int, int]], most: int = 3000) -> list[tuple[float, int, int]]:
    """At most `most` points; the highest of each group stays, so that no peak gets lost."""
    group = max(1, -(-len(points) // most))
    return [max(points[i : i + group], key=lambda point: point[1]) for i in range(0, len(points), group)]


if __name__ == "__main__":
    in_turns = sys.argv[2:] == ["turns"]
    if in_turns:
        _load("child").end_with_parent()
    _say("result", **work(json.loads(sys.argv[1]), turns=in_turns))
