"""`python -m memmgr.tools.tune.child ORDER RESULT`: runs the script as `memmgr run` does, takes the time of each pass, and
ends the process after some of them. With turns it waits while another process has the turn.

It ends at once (`os._exit`): the rest of the script, which may save a model or evaluate it, does not run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from memmgr.readers.patches import Patches
from memmgr.tools.bench.child import end_with_parent
from memmgr.tools.common.outputs import write_whole
from memmgr.tools.tune.batch_size import BatchSetter
from memmgr.tools.tune.job import GO, Job, Result
from memmgr.tools.verbs import run as run_verb

TRACED_PASS = 4
"""The first makes the optimizer's states possible, the second makes them, the third is the first of its kind. The fourth repeats
it, so the tensors that live from pass to pass are known.
"""


STEADY = 0.75
"""The share of the passes that are asked for that have to come after the last plan was made; half of them count."""
MOST_PASSES = 4
"""Times the passes that are asked for, where plans are made for that long."""


class Clock:
    """Counts passes, and ends the process after the last one that is asked for. Passes wait while a plan is made, and while
    another process has the turn. The clock stands still then: no pass is measured beside a search.

    `result`: gets the times.
    """

    def __init__(self, job: Job, result: Result, path: Path) -> None:
        self._job = job
        self.result = result
        self._path = path
        self._patches = Patches()
        self._pid = os.getpid()
        self._waited_seconds = 0.0
        result.begun = time.monotonic()

    def install(self) -> None:
        """Patches the function that runs a backward, once torch is there."""
        self._patches.when_imported("torch.autograd.graph", self._patch)

    def _patch(self, graph: ModuleType) -> None:
        self._patches.wrap(graph, "_engine_run_backward", self._timed)  # torch.autograd takes it from there next

    def _timed(self, original: Any) -> Any:
        @functools.wraps(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            import torch

            if torch._C._current_graph_task_id() != -1 or os.getpid() != self._pid:
                return original(*args, **kwargs)
            result = original(*args, **kwargs)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # a pass ends when its last kernel does
            self.result.ends.append(time.monotonic() - self._waited_seconds)
            self.result.processor.append(time.process_time())
            self._look()
            if self._is_enough() or not self._has_turn():
                self.finish()
            return result

        return run_backward

    def _look(self) -> None:
        runtime = _runtime()
        self.result.plans.append(self._planned_by_now(runtime) if runtime is not None else 0)

    def _planned_by_now(self, runtime: Any) -> int:
        began = time.monotonic()
        runtime.plans.wait()
        self._waited_seconds += time.monotonic() - began
        return int(runtime.plans.made)

    def _has_turn(self) -> bool:
        """Waits for the next turn where one is over. False: there is none."""
        if self._job.turns is None or len(self.result.ends) % self._job.turn_passes:
            return True
        began = time.monotonic()
        done, go = self._job.turns
        os.write(done, GO)
        answer = os.read(go, 1)
        self._waited_seconds += time.monotonic() - began
        return answer == GO

    def _is_enough(self) -> bool:
        asked, there = self._job.passes, len(self.result.ends)
        steady = there - self.result.last_plan
        is_whole = steady >= STEADY * asked and (self._job.trace is None or _traced())
        return there >= asked and (is_whole or there >= MOST_PASSES * asked)

    def finish(self) -> None:
        """Writes the result and ends the process."""
        self.write()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def write(self) -> None:
        """Writes the result."""
        runtime = _runtime()
        if runtime is not None:
            stats = runtime.stats()
            self.result.need_bytes = int(stats["unmanaged_peak_bytes"])
            self.result.peak_bytes = int(stats["resident_bytes.peak"])
            self.result.link = next((asdict(link) for link in runtime.plans.links()), None)
        elif "torch" in sys.modules and not sys.modules["torch"].accelerator.is_available():
            self.result.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        write_whole(self._path, json.dumps(asdict(self.result)))


def _runtime() -> Any:
    module = sys.modules.get("memmgr.api.budget")
    return module.last() if module is not None else None


def _traced() -> bool:
    runtime = _runtime()
    file = runtime.traced if runtime is not None else None
    return file is not None and (file.path is not None or bool(file.error))


def main(order: str, answer: str) -> int:
    """Runs the script; its exit code, where the script ends before the passes are over."""
    end_with_parent()  # a process that stands still would not end by itself
    job, result = Job.read(Path(order)), Result()
    clock = Clock(job, result, Path(answer))
    words = job.arguments
    args = argparse.Namespace(
        budget=job.budget, ratio=None, policy=None, disk=None, disk_size=None, host=None, device=None, log=None,
        verify=False, quiet=True, module=job.module, script=job.script, trace=job.trace, trace_pass=None, edit=None,
    )  # fmt: skip
    for name, value in job.options.items():
        setattr(args, name, value)
    if job.trace is not None:
        args.trace_pass = TRACED_PASS
    if job.batch is not None:
        source = "" if job.module else Path(job.script).read_text(encoding="utf-8")
        setter = BatchSetter(job.batch, result, source)
        words, args.edit = setter.arguments(words), setter.edit
        setter.install()
    args.arguments = words
    clock.install()
    code = 1
    try:
        code = run_verb.run(args) if job.budget is not None else run_verb.run_without(args)
    finally:
        error = run_verb.last_error()
        if error is not None:
            result.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
            result.floor_error = bool(getattr(error, "floor_bytes", 0)) or "out of memory" in str(error).lower()
        result.code = code
        clock.write()
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
