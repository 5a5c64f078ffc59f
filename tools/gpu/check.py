"""Check memmgr on this machine's GPU: bits, step times, peaks, driver calls, and a verdict on each known risk.

    memmgr gpu-check first --out FOLDER          does it work, where is it slow?
    memmgr gpu-check second --out FOLDER         users' programs, and figures
    memmgr gpu-check --device cpu --out FOLDER   a rehearsal with tiny models
    memmgr gpu-check --simulated --out FOLDER    step times on a simulated H100

Made for a machine that is lent for minutes and has no network. Acts run in order of what they teach, each a process with
a limit of its own. Every figure is a JSON line in FOLDER/raw.jsonl as soon as it is known. An act that does not fit into
the seconds that are left is skipped, and a second start goes on where the first one stopped.
The last lines are the verdicts.

Exit code 1: an act failed, some bits differ, a check did not hold, or a peak passed its budget.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import IO, Any

if not __package__:  # run by its path: the siblings are beside it, and memmgr is not imported
    __package__ = "memmgr_gpu_check"
    sys.modules[__package__] = ModuleType(__package__)
    sys.modules[__package__].__path__ = [str(Path(__file__).resolve().parent)]

from . import figures
from .plans import CALLS, SIMULATED, SLOWER, Act, Place
from .verdicts import Line, summary

LEAST_SECONDS = 8.0
"""No act begins with less."""
CLOSER_SECONDS = 40.0
"""For an act that failed, once more under a tool."""
TEXT_LINES = 400
"""Lines that an act prints besides JSON are kept up to that number."""


class Wrong(Exception):
    """A mistake of the user; the text is the line."""


class Check:
    """Runs acts and keeps the lines that they print.

    `place`: the device, and the folder that gets the lines. `seconds`: after which no act begins and running ones are
    killed. `lines`: all lines, with the folder's lines of acts that are not repeated.
    """

    def __init__(self, place: Place, seconds: float) -> None:
        self.place, self.begun = place, time.monotonic()
        self.ends = self.begun + seconds
        self.lines: list[Line] = []
        self._lock = threading.Lock()
        self._good: dict[str, int] = {}
        self._suspect: tuple[Act, bool] | None = None
        self._looked = False
        self._done = self._earlier()
        try:
            place.out.mkdir(parents=True, exist_ok=True)
            (place.out / "raw.jsonl").open("ab").close()
        except OSError as error:
            print(f"{place.out}: raw.jsonl cannot be written ({error.strerror}): its lines are lost", flush=True)

    def _write(self, name: str, text: str) -> None:
        """Into a file of the folder, at once; a full disk loses it and nothing else."""
        with contextlib.suppress(OSError), (self.place.out / name).open("ab", buffering=0) as file:
            file.write(text.encode(errors="replace"))

    def _earlier(self) -> set[str]:
        """The acts that have ended well in this folder; their lines are read."""
        found: list[Line] = []
        with contextlib.suppress(OSError):
            if (self.place.out / "raw.jsonl").is_file():
                for text in (self.place.out / "raw.jsonl").read_text(errors="replace").splitlines():
                    with contextlib.suppress(ValueError):  # a line that was cut
                        line = json.loads(text)
                        if isinstance(line, dict) and "act" in line:
                            found.append(line)
        ends = {line["act"]: index for index, line in enumerate(found) if line.get("event") == "ended"}
        done = {act for act, index in ends.items() if found[index].get("code") == 0}
        self.lines += [line for line in found if line["act"] in done]
        return done

    def say(self, act: str, **fields: Any) -> None:
        """Keeps one line."""
        line = {"act": act, "at": round(time.monotonic() - self.begun, 1), **fields}
        with self._lock:
            self.lines.append(line)
            self._write("raw.jsonl", json.dumps(line) + "\n")

    def run(self, act: Act) -> None:
        """Runs one act within its limit and the time that is left."""
        if act.missing:
            return self.say(act.name, event="skipped", why=act.missing)
        limit = min(act.limit_seconds, self.ends - time.monotonic())
        if limit < LEAST_SECONDS:
            return self.say(act.name, event="skipped", why="no time left")
        begun = time.monotonic()
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **act.env}
        if self.place.simulated:
            env["OMP_NUM_THREADS"] = "1"
        elif not self.place.on_gpu:
            env |= {"MEMMGR_PAGER_SMALL": "512", "OMP_NUM_THREADS": "1"}  # cells as small as the models
        try:
            process = subprocess.Popen(
                act.command,
                env=env,
                cwd=act.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # processes that the act has started end with it
            )
        except OSError as error:
            return self.say(act.name, event="ended", code=str(error), seconds=0)
        assert process.stdout is not None and process.stderr is not None
        said: deque[str] = deque(maxlen=200)
        shown: deque[str] = deque(maxlen=200)
        threads = [
            threading.Thread(target=self._follow, args=(act.name, process.stdout, shown), daemon=True),
            threading.Thread(target=_drain, args=(process.stderr, said), daemon=True),
        ]
        for thread in threads:
            thread.start()
        code: int | str
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = f"killed after {limit:.0f} s"
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGABRT)  # faulthandler prints where each thread was
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.5)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for thread in threads:
            thread.join(timeout=2)
        text = "".join(said)
        told = {"stderr": text[-1500:]} if code != 0 and text.strip() else {}
        self.say(act.name, event="ended", code=code, seconds=round(time.monotonic() - begun, 1), **told)
        if code == 0:
            self._good[act.group] = self._good.get(act.group, 0) + 1
        elif self._suspect is None:
            by_signal = isinstance(code, int) and code < 0
            if by_signal or any(word in text + "".join(shown) for word in ("CUDA error", "illegal")):
                self._suspect = act, by_signal
        if text.strip():
            with self._lock:
                self._write("errors.txt", f"==== {act.name} ({code}) ====\n{text[-8000:]}\n")

    def _follow(self, act: str, lines: IO[str], shown: deque[str]) -> None:
        """Keeps each line of an act's output as it comes."""
        texts = 0
        with lines:
            for line in lines:
                shown.append(line)
                try:
                    self.say(act, **json.loads(line))
                except (ValueError, TypeError):
                    texts += 1
                    if texts <= TEXT_LINES:
                        self.say(act, event="text", text=line.rstrip()[:400])

    def all(self, acts: list[Act], at_once: int = 4) -> None:
        """Groups one after the other; a rehearsal runs one act at a time."""
        waiting = deque(acts)
        while waiting:
            group = [waiting.popleft()]
            while waiting and waiting[0].group == group[0].group:
                group.append(waiting.popleft())
            self._good.setdefault(group[0].group, 0)
            todo = []
            for act in group:
                if act.name in self._done:
                    self._good[act.group] += 1
                elif act.needs and self._good.get(act.needs) == 0:
                    self.say(act.name, event="skipped", why=f"nothing of {act.needs} went well")
                else:
                    todo.append(act)
            with ThreadPoolExecutor(at_once if self.place.on_gpu else 1) as pool:
                list(pool.map(self.run, todo))
            self._look_closer()

    def _look_closer(self) -> None:
        """Runs the first act that crashed under the tools that find the place."""
        if self._suspect is None or self._looked:
            return
        self._looked = True
        act, by_signal = self._suspect
        tools = {"compute-sanitizer": ["compute-sanitizer", "--tool", "memcheck"]}
        if by_signal:
            tools["cuda-gdb"] = ["cuda-gdb", "--batch", "-ex", "run", "-ex", "bt", "--args"]
        for tool, words in tools.items():
            command = [*words, *act.command]
            missing = "" if shutil.which(tool) else f"{tool} is not on the PATH"
            # The act's group is not kept: a good end here is none of the act.
            closer = replace(act, name=f"{tool} {act.name}", group=tool, command=command, missing=missing)
            self.run(replace(closer, limit_seconds=CLOSER_SECONDS))


def _drain(lines: IO[str], into: deque[str]) -> None:
    with lines:
        into.extend(lines)


# ---- the machine -----------------------------------------------------------------------------------------------------

FACTS = {
    "smi": "nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,persistence_mode,mig.mode.current --format=csv,noheader",
    "memory": "free -m | sed -n 2p",
    "limits": "ulimit -l; nproc; uname -r; cat /sys/kernel/mm/transparent_hugepage/enabled",
    "tools": "for t in g++ nvcc make compute-sanitizer cuda-gdb; do command -v $t || echo no $t; done",
    "cpu": "lscpu | grep -E 'Model name|NUMA node\\(s\\)'",
}
HOLD = (
    "import ctypes,time; c=ctypes.CDLL('libcuda.so.1'); c.cuInit(0); p=ctypes.c_void_p(); "
    "c.cuDevicePrimaryCtxRetain(ctypes.byref(p),0); time.sleep(900)"
)
"""Keeps the device up: without persistence mode each process would wait for it."""
SAMPLES = "timestamp,memory.used,utilization.gpu,clocks.sm,pcie.link.gen.current"


def facts(check: Check) -> None:
    """Writes the facts of the machine."""
    check.say("facts", name="python", text=sys.version.split()[0])
    for name, command in FACTS.items():
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=10)
            check.say("facts", name=name, text=done.stdout.strip()[:400])


@contextlib.contextmanager
def helpers(place: Place) -> Iterator[None]:
    """Runs helper processes beside the acts."""
    running: list[subprocess.Popen[bytes]] = []
    quiet = subprocess.DEVNULL
    if place.on_gpu:
        running.append(subprocess.Popen([sys.executable, "-c", HOLD], stdout=quiet, stderr=quiet))
        smi = ["nvidia-smi", f"--query-gpu={SAMPLES}", "--format=csv,noheader", "-lms", "500"]
        with contextlib.suppress(OSError), (place.out / "smi.csv").open("a") as file:
            running.append(subprocess.Popen(smi, stdout=file, stderr=quiet))
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def has_gpu() -> bool:
    """The driver has a device; asked without torch."""
    try:
        driver, count = ctypes.CDLL(os.environ.get("MEMMGR_DRIVER") or "libcuda.so.1"), ctypes.c_int()
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


# ---- the command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "call", nargs="?", choices=(*CALLS, "both"), default="both", help="default: one after the other"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), metavar="FOLDER", help="default: ./gpu-check")
    parser.add_argument("--seconds", type=float, help="for all acts (default: first 300, second 400)")
    parser.add_argument("--only", default="", help="acts whose names begin so; several with commas")
    parser.add_argument(
        "--simulated",
        nargs="?",
        type=Path,
        const=figures.H100,
        metavar="FIGURES",
        help="no GPU: virtual times by a table of figures (default: an H100's)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal with tiny models")


def run(args: argparse.Namespace) -> int:
    """Runs the acts; 0 when all held. Raises `Wrong`: no such act, no time, or no GPU."""
    place = Place(args.out, args.device) if args.simulated is None else Place(args.out, "simulated", args.simulated)
    calls = list(CALLS) if args.call == "both" else [args.call]
    seconds = sum(CALLS[name][1] for name in calls) if args.seconds is None else args.seconds
    if place.simulated and args.seconds is None:
        seconds *= SLOWER
    if not seconds > 0:
        raise Wrong(f"--seconds {seconds:g}: there is no time")
    acts = [act for name in calls for act in CALLS[name][0](place)]
    once: dict[str, Act] = {}
    for act in acts:
        once.setdefault(act.name, act)  # both calls may have it
    acts = [act for act in once.values() if not place.simulated or act.name.startswith(SIMULATED)]
    for prefix in filter(None, (word.strip() for word in args.only.split(","))):
        if not any(act.name.startswith(prefix) for act in acts):
            raise Wrong(f"no act begins with {prefix!r}; there are {', '.join(act.name for act in acts)}")
    if args.only:
        prefixes = tuple(word.strip() for word in args.only.split(",") if word.strip())
        acts = [act for act in acts if act.name.startswith(prefixes)]
    if place.on_gpu and not has_gpu():
        raise Wrong("the driver has no GPU; --device cpu rehearses the same acts with tiny models")
    if place.simulated:
        try:
            figures.read(place.figures)
        except (OSError, ValueError, KeyError) as error:
            raise Wrong(f"--simulated: {error}") from None
        print(
            f"A SIMULATION with the figures of {place.figures}: no GPU was used, and all times are virtual.", flush=True
        )
    elif not place.on_gpu:
        print("A rehearsal on the CPU with tiny models: its figures say nothing about a GPU.", flush=True)
    check = Check(place, seconds)
    with helpers(place):
        facts(check)
        check.all(acts)
    calls_seen = [line for line in check.lines if line["act"] == "driver calls"]
    if any("value" in line for line in calls_seen):
        with contextlib.suppress(OSError):
            table = figures.of_check(calls_seen, time.strftime("%Y-%m-%d"))
            (place.out / "figures.json").write_text(figures.written(table))
    return 0 if summary(check.lines) else 1


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except Wrong as wrong:
        print(f"gpu-check: {wrong}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
