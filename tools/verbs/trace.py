"""Record one pass of a training script, for memmgr simulate.

    memmgr trace --out run.trace train.py --lr 3e-4
    memmgr trace --out run.trace.gz --pass 5 --budget 12GB -m package.train
    memmgr simulate run.trace --policy all --ratio 0.6
    torchrun --nproc-per-node 2 --no-python \\
        memmgr trace --out run.trace train.py        a file for each rank

A pass is one forward and its backward. The second one is recorded (the first compiles and is not like the others),
every op with its time, inputs and outputs, and the time of each release. Parameters and states are known as such where the pass
before it was equal: --pass 4. The script runs to its end as under memmgr
run, with the same bits. Without --budget no tensor is evicted; with one the trace has the times of the pass under it.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from memmgr.config.conf import Refused, local_ranks
from memmgr.config.sizes import show_size
from memmgr.tools.common.other_work import OtherWork
from memmgr.tools.common.outputs import check_output
from memmgr.tools.common.policy_option import add_policy
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.verbs import run as run_verb

if TYPE_CHECKING:
    from memmgr.runtime.session import PagerRuntime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.usage = "memmgr trace --out FILE [options] (SCRIPT.py | -m MODULE) [its arguments]"
    parser.add_argument("--out", metavar="FILE", required=True, help="the trace; compressed if it ends in .gz")
    parser.add_argument("--pass", dest="number", type=int, default=2, metavar="N", help="which one, from 1 (default 2)")
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="12GB, 80%% (of the device), need*60%%, none (default)",
    )
    add_policy(parser)
    parser.add_argument("--disk", metavar="FOLDER", help="a folder for evicted tensors; or none")
    parser.add_argument("--device", help="which is measured (default: accelerator or cpu)")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as with python -m")
    parser.add_argument("script", help="the script, or the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the script; its exit code."""
    if args.number < 1:
        raise UsageError(f"--pass: {args.number} is not the number of a pass; the first is 1")
    out = os.path.abspath(args.out)
    check_output(Path(args.out), "--out", [Path(args.script)])
    args.trace, args.trace_pass = out, args.number
    args.disk_size = args.host = args.log = None
    args.verify, args.quiet = False, True
    args.others = OtherWork()
    atexit.register(_close, os.getpid(), args)  # before torch is imported, so after the budget has closed
    try:
        args.ended = run_verb.run(args)
        return int(args.ended)
    except (UsageError, Refused):
        atexit.unregister(_close)  # the summary is printed
        raise


def _close(pid: int, args: argparse.Namespace) -> None:
    if os.getpid() != pid:
        return  # a fork that ends in the ordinary way
    module = sys.modules.get("memmgr.api.budget")
    last = module.last() if module is not None else None
    if last is None and run_verb.children_worked():
        return  # a launcher: its child processes have printed the summary
    busy = args.others.line("the times in the trace are too long; memory and the order of the ops do not depend on it")
    traced = last.traced if last is not None else None
    there = traced is not None and traced.trace is not None and not traced.error
    for line in (*(busy if there else ()), *outcome(args, last)):
        print("memmgr: " + line, file=sys.stderr, flush=True)
    if not there and getattr(args, "ended", 1) == 0:  # the script's code would say that it is
        sys.stdout.flush()
        os._exit(1)


def outcome(args: argparse.Namespace, manager: PagerRuntime | None) -> list[str]:
    """The lines printed at the end; `manager` is the budget's, None if none was opened."""
    traced = manager.traced if manager is not None else None
    if traced is not None and traced.error:
        return [f"no trace: {args.trace}: {traced.error}"]
    trace = traced.trace if traced is not None else None
    if trace is None or traced is None or traced.path is None:
        passes = manager.stats()["passes"] if manager is not None else 0
        return [f"no trace: the script made {passes} whole passes, and pass {args.number} was to be recorded"]
    from memmgr.telemetry.consumers import log_path

    peak, _ = trace.unmanaged_peak
    name = str(traced.path) if os.path.isabs(args.out) else os.path.relpath(traced.path)
    said = f"{name}: {trace.ops_run:,} ops, {show_size(peak)} without a budget, {trace.seconds * 1e3:,.1f} ms."
    if log_path(args.trace) == Path(args.trace):  # no rank
        return [f"{said} Next:", f"  memmgr simulate {shlex.quote(name)} --policy all --ratio 0.6"]
    if os.environ.get("RANK") != "0":
        return [said]
    total = -(-peak * local_ranks() * 6 // 10_000_000)
    return [f"{said} Next:", f"  memmgr simulate --job {shlex.quote(os.path.dirname(name) or '.')} --total {total}MB"]
