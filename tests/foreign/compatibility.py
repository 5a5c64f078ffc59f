"""Trains a little with each framework, in processes of their own, and writes docs/compatibility.md.

    python tests/foreign/compatibility.py                   # all of them; `make compatibility` installs them first
    python tests/foreign/compatibility.py --only ddp lora   # some, shown and not written

Each check runs three times in one process: plain, in a budget without a limit that measures, and in one that is two
fifths of the way from the floor to its need. Exit code 1 if a check has other bits, or exceeds its budget.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from compatibility_checks import CHECKS, Check, Left, Scope

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
NEXT_SECTION = "\n## "  # other people's tests, which run.py writes
SHARE = 0.4  # of the way from the floor to the need
TIMEOUT_SECONDS = 300
HEAD = """# Compatibility

<!-- Made by tests/foreign/compatibility.py: `make compatibility`. -->

Each row is a small training in a process of its own: once plain, once in a budget that is {share} % of the way from its floor to
its need. *Same bits* compares losses and parameters. *Evictions* counts the tensors that were evicted or offloaded in the
budget. Here tensors of 512 bytes and more can be evicted, by default those of 64 KiB and more.
Run with memmgr {memmgr}, torch {torch}, Python {python} on the CPU.

| | versions | same bits | peak of budget | evictions | why not |
|---|---|---|---|---|---|
"""


@dataclass
class Outcome:
    """Result of one process.

    Attributes:
        same: its bits are those without memmgr.
        peak_bytes: most bytes on the device.
        limit_bytes: its budget.
        left: tensors that were evicted.
        reason: why it could not run, or its error.
    """

    same: bool = False
    peak_bytes: int = 0
    limit_bytes: int = 0
    left: int = 0
    reason: str = ""

    @property
    def good(self) -> bool:
        """As it should be."""
        return not self.reason and self.same and 0 < self.peak_bytes <= self.limit_bytes


# ---- in the process of a check -----------------------------------------------------------------------------------------


def digest(left: Left) -> str:
    """SHA-256 of all bits."""
    sums = hashlib.sha256()
    for value in left:
        sums.update(
            value.detach().contiguous().numpy().tobytes() if isinstance(value, torch.Tensor) else value.hex().encode()
        )
    return sums.hexdigest()


def once(check: Check, limit: int | str | None) -> tuple[str, dict[str, float]]:
    """The bits, and the figures of the budget."""
    import memmgr

    torch.manual_seed(0)
    found = digest(check.run(Scope(limit)))
    gc.collect()
    return found, memmgr.stats()


def work(check: Check) -> Outcome:
    """All three runs."""
    if check.ranks > 1:
        where = f"file://{os.environ['MEETING']}"
        torch.distributed.init_process_group(
            "gloo", init_method=where, rank=int(os.environ["RANK"]), world_size=check.ranks
        )
    want, _ = once(check, "plain")
    _, measured = once(check, None)
    need, floor = measured["unmanaged_peak_bytes"], measured["floor_bytes"]
    limit = int(floor + SHARE * (need - floor))
    got, stats = once(check, limit)
    if check.ranks > 1:
        torch.distributed.destroy_process_group()
    return Outcome(got == want, int(stats["resident_bytes.peak"]), limit, int(stats["evictions"] + stats["offloads"]))


def child(name: str, into: Path) -> None:
    """Writes the result, also of a failure."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        outcome = work(CHECKS[name])
    except Exception as error:
        outcome = Outcome(reason=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    into.write_text(json.dumps(asdict(outcome)))


# ---- around it ---------------------------------------------------------------------------------------------------------


def missing(check: Check) -> str:
    """Why it cannot run; empty: it can."""
    for name in check.packages:
        try:
            version(name)
        except PackageNotFoundError:
            return f"{name} is not installed"
    return ""


def run(name: str) -> Outcome:
    """One check, in as many processes as it has ranks: the worst of them."""
    check = CHECKS[name]
    if why := missing(check):
        return Outcome(reason=why)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(check.ranks)]
        common = {
            k: v for k, v in os.environ.items() if k not in ("MEMMGR_BUDGET", "MEMMGR_CONF", "RANK", "WORLD_SIZE")
        }
        common |= {
            "OMP_NUM_THREADS": "1",
            "MEMMGR_PAGER_SMALL": "512",
            "HF_HUB_OFFLINE": "1",
            "MEETING": f"{folder}/meeting",
        }
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name]
        processes = [
            subprocess.Popen(
                [*command, str(file)],
                env=common | ({"RANK": str(rank), "WORLD_SIZE": str(check.ranks)} if check.ranks > 1 else {}),
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=folder,
            )
            for rank, file in enumerate(files)
        ]  # fmt: skip
        outcomes = [_outcome(process, file) for process, file in zip(processes, files, strict=True)]
    return min(outcomes, key=lambda outcome: (outcome.good, -len(outcome.reason)))


def _outcome(process: subprocess.Popen[str], file: Path) -> Outcome:
    try:
        _, said = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Outcome(reason=f"it took more than {TIMEOUT_SECONDS} s")
    if not file.is_file():
        return Outcome(reason=f"the process ended with {process.returncode}: {(said.strip().splitlines() or [''])[-1]}")
    return Outcome(**json.loads(file.read_text()))


def row(name: str, outcome: Outcome) -> str:
    """A line of the table."""
    check = CHECKS[name]
    versions = ", ".join(
        f"{package} {version(package)}" for package in check.packages if not missing(Check("", check.run, (package,)))
    )
    if outcome.reason:
        cells = ["not run", "", "", outcome.reason.replace("|", "/")]
    else:
        peak = f"{outcome.peak_bytes / 1e6:.2f} of {outcome.limit_bytes / 1e6:.2f} MB"
        over = outcome.peak_bytes > outcome.limit_bytes
        cells = ["yes" if outcome.same else "**no**", f"**{peak}**" if over else peak, str(outcome.left), ""]
    return "| " + " | ".join([check.title, versions, *cells]) + " |\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKS), metavar="NAME", help="these, and write nothing")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], Path(args.child[1]))
        return 0
    text, good = "", True
    for name in args.only or CHECKS:
        outcome = run(name)
        good = good and (outcome.good or bool(missing(CHECKS[name])))
        line = row(name, outcome)
        print(line, end="", flush=True)
        text += line
    if not args.only:
        own = {"memmgr": version("memmgr"), "torch": torch.__version__, "python": platform.python_version()}
        _, mark, rest = PAGE.read_text().partition(NEXT_SECTION)
        PAGE.write_text(HEAD.format(share=round(100 * SHARE), **own) + text + mark + rest)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
