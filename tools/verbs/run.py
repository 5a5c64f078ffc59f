"""Run a training script under a budget, unmodified.

    memmgr run --budget 12GB train.py --lr 3e-4
    memmgr run --budget 80% --log run.jsonl -m package.train
    memmgr run --ratio 60% train.py
    torchrun --nproc-per-node 2 --no-python memmgr run --budget 12GB train.py

The script runs in this process as `python` would run it, and its exit code is this command's. The budget opens at the
first call of a module, or the first tensor that autograd saves, on the device of that training. If it cannot be opened
the script ends there: in one line with code 2, or with a BudgetError if the tensors on the device already exceed it.

--budget takes 12GB, 80% (of the device), need*60%, auto, device (all that is free there), or none (the default: it only
measures). --policy evict only recomputes, and offload only copies; auto does both.

Python processes that the script starts have a budget, too. Each rank of a distributed job has the whole budget and a
log of its own; ranks on one host share --disk-size and --host. Options override MEMMGR_BUDGET and MEMMGR_CONF.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import resource
import shlex
import signal
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from memmgr.config.conf import (
    DEVICES,
    Refused,
    check_folder,
    check_limit,
    is_off,
    local_ranks,
    no_device,
    pairs_of,
    parse_conf,
)
from memmgr.config.sizes import is_binary, parse_budget, parse_host, parse_limit, parse_share, round_up, show_size
from memmgr.config.variables import refuse_unknown
from memmgr.policies import parse_policy
from memmgr.tools.common.as_python import load, set_path
from memmgr.tools.common.outputs import check_output
from memmgr.tools.common.policy_option import add_policy
from memmgr.tools.common.usage_error import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.usage = "memmgr run [options] (SCRIPT.py | -m MODULE) [its arguments]"
    parser.add_argument("--budget", metavar="SIZE", help="12GB, 80%% (of the device), none (default: measures)")
    parser.add_argument("--ratio", metavar="SHARE", help="60%%, 0.6: a share of what the run needs")
    add_policy(parser)
    parser.add_argument("--disk", metavar="FOLDER", help="a folder for evicted tensors; or none")
    parser.add_argument("--disk-size", metavar="SIZE", help="at most so many bytes there")
    parser.add_argument("--host", metavar="SIZE", help="memory for offloaded tensors; or none")
    parser.add_argument("--device", help="limited by the budget (default: accelerator or cpu)")
    parser.add_argument(
        "--log",
        "--write-log",
        metavar="FILE",
        help="for memmgr report (torchrun: use --write-log)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures when the script ends")
    parser.add_argument("--verify", action="store_true", help="compare all restored bytes with checksums")
    parser.add_argument("--fail-on-leak", action="store_true", help="exit code 3 where a leak was found")
    parser.add_argument("--quiet", action="store_true", help="no summary at the end")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as with python -m")
    parser.add_argument("script", help="the script, or the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the script; its exit code."""
    refuse_unknown()
    take_ratio(args)
    _note_misplaced(args)
    settings = _together(_inherited(args), _settings(args))
    if args.budget is not None and args.budget.strip().lower() == "none":
        args.budget = None
    set_path(args)
    code, main = load(args)
    os.environ["MEMMGR_BUDGET"] = args.budget or "none"
    os.environ["MEMMGR_CONF"] = json.dumps(settings)
    if getattr(args, "json", None) is not None:  # the verb trace has none
        atexit.register(_write_json, os.getpid(), os.path.abspath(args.json), list(sys.argv), args)
    # handlers run backwards: this one runs after the budget's, and after its summary is printed
    atexit.register(_die_if_interrupted)
    if not args.quiet:
        from memmgr.observe import summary

        summary.says_next = False
        atexit.register(_Closing(args))  # before torch is imported and arms itself, so after the budget has closed
    if "torch" in sys.modules:
        from memmgr import _environ

        try:
            _environ.autoload()
        except Refused:
            _Closing.silent = True
            raise
    ended = _start(args, code, main)
    fails_on_leak = getattr(args, "fail_on_leak", False)  # the verb trace has no such option
    if ended == 0 and fails_on_leak and (found := _leak_texts()):
        print(f"memmgr run: {found[0]}; --fail-on-leak: the exit code is 3", file=sys.stderr)
        return 3
    return ended


def _leak_texts() -> list[str]:
    """A sentence about each leak of the budget that is open."""
    module = sys.modules.get("memmgr.api.budget")
    last = module.last() if module is not None else None
    return [] if last is None else last.leak_texts()


def _note_misplaced(args: argparse.Namespace) -> None:
    """Says that a budget after the script's name is an argument of the script."""
    given = next((word for word in args.arguments if word.partition("=")[0] in ("--budget", "--ratio")), None)
    if args.budget is None and given is not None and "MEMMGR_BUDGET" not in os.environ:
        option = given.partition("=")[0]
        print(
            f"memmgr: {option} stands after {args.script}, so it is an argument of the script, and memmgr sets no limit. Options "
            f"of memmgr come before the script: {option} SIZE {args.script}",
            file=sys.stderr,
        )


def run_without(args: argparse.Namespace) -> int:
    """Runs the script as `python` does, without a budget, to measure the cost of one; its exit code."""
    os.environ.pop("MEMMGR_BUDGET", None)
    set_path(args)
    return _start(args, *load(args))


def last_error() -> BaseException | None:
    """The exception that has ended the script."""
    return _Closing.error


def _start(args: argparse.Namespace, code: CodeType, main: ModuleType) -> int:
    sys.argv[:] = [str(main.__file__) if args.module else args.script, *args.arguments]
    sys.modules["__main__"] = main
    return _execute(code, main)


def take_ratio(args: argparse.Namespace) -> None:
    """`--ratio 60%` is a budget: `need*60%`."""
    ratio = getattr(args, "ratio", None)  # the verb trace has none
    if ratio is None:
        return
    if args.budget is not None:
        raise UsageError("--budget and --ratio both say how much: leave one out")
    try:
        parse_share(ratio)
    except ValueError as error:
        raise UsageError(str(error)) from None
    args.budget = f"need*{ratio.strip()}"


def _inherited(args: argparse.Namespace) -> dict[str, str]:
    """The settings of the variables, for options that are not given."""
    limit, text = os.environ.get("MEMMGR_BUDGET"), os.environ.get("MEMMGR_CONF", "")
    try:
        if limit is not None:
            check_limit(limit)
        found = parse_conf(text)
    except ValueError as error:
        raise UsageError(str(error)) from None
    args.budget = limit if args.budget is None else args.budget
    args.quiet = args.quiet or found.get("quiet", False)
    return dict(pairs_of(text))


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options as MEMMGR_CONF; errors in them are raised before the script begins."""
    try:
        if args.budget is not None:
            parse_budget(args.budget, whole=1 << 60, what="--budget")
        if args.policy is not None:
            parse_policy(args.policy)
        if args.host is not None:
            parse_host(args.host, "--host")
        if args.disk_size is not None:
            parse_limit(args.disk_size, whole=1 << 60, what="--disk-size")
        if args.disk is not None and not is_off(args.disk):
            check_folder(args.disk, "--disk")
        if args.device is not None and args.device.partition(":")[0] not in DEVICES:
            raise no_device(args.device, "--device")
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.log is not None:
        check_output(Path(args.log), "--log", [Path(args.script)])
    if getattr(args, "json", None) is not None:
        check_output(Path(args.json), "--json", [Path(args.script)])
    wanted = {
        "policy": args.policy,
        "disk": args.disk,
        "disk_size": args.disk_size,
        "host": args.host,
        "device": args.device,
        "log": os.path.abspath(args.log) if args.log is not None else None,
        "verify": args.verify or None,
        "quiet": args.quiet or None,
        "trace": getattr(args, "trace", None),  # of the verb trace
        "trace_pass": getattr(args, "trace_pass", None),
    }
    return {key: value for key, value in wanted.items() if value is not None}


def _together(inherited: dict[str, str], said: dict[str, Any]) -> dict[str, Any]:
    """The options over the variables; a size of no disk is refused, and one that a variable says goes with its disk."""
    if is_off(said.get("disk")):
        inherited.pop("disk_size", None)
    settings = inherited | said
    if is_off(settings.get("disk")) and "disk_size" in said:
        whose = "--disk" if "disk" in said else "MEMMGR_CONF's disk"
        raise UsageError(f"--disk-size is of no disk: {whose} is {settings['disk']}")
    return settings


# ---- as python would ----------------------------------------------------------------------------------------------


def _execute(code: CodeType, main: ModuleType) -> int:
    """Runs it; exceptions are shown as Python shows them, without the frames of this file."""
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        _Closing.silent = _Closing.silent or isinstance(end, Refused)
        if end.code is None:
            return 0
        if isinstance(end.code, int):
            return end.code
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        autostart = sys.modules.get("memmgr.api.autostart")
        if autostart is not None and isinstance(error, autostart.NotOpenedError):
            _Closing.silent = True
            raise UsageError(" ".join(str(error).split())) from None
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        _Closing.error = error
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _die_if_interrupted() -> None:
    """Ends by the signal, so that the shell sees the same exit as without memmgr."""
    if isinstance(_Closing.error, KeyboardInterrupt):
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


# ---- at the end ---------------------------------------------------------------------------------------------------


class _Closing:
    """Prints the summary when the process ends, and the command that shows more."""

    error: BaseException | None = None
    silent = False  # the summary was printed

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._words = list(sys.argv)
        self._pid = os.getpid()

    def __call__(self) -> None:
        if os.getpid() != self._pid or type(self).silent:
            return  # a fork that ends in the ordinary way
        module = sys.modules.get("memmgr.api.budget")
        stats = module.stats() if module is not None else {}
        lines = summary_lines(stats, self._args, type(self).error)
        rank = os.environ.get("RANK")
        if rank not in (None, "0") and type(self).error is None:
            return  # rank 0 speaks for all
        before = f"memmgr[{rank}]: " if rank is not None else "memmgr: "
        print("".join(f"{before}{line}\n" for line in lines), end="", file=sys.stderr, flush=True)


def _write_json(pid: int, path: str, command: list[str], args: argparse.Namespace) -> None:
    if os.getpid() != pid:
        return  # a fork that ends in the ordinary way
    from memmgr.telemetry.consumers import log_path
    from memmgr.tools.common.outputs import write_whole
    from memmgr.tools.common.run_summary import run_as_json

    module = sys.modules.get("memmgr.api.budget")
    last = module.last() if module is not None else None
    stats, leaks = ({}, []) if last is None else (last.stats(), last.leaks())
    try:
        found = run_as_json(stats, args.budget, command, _Closing.error, leaks)
        write_whole(Path(log_path(path)), json.dumps(found, indent=1) + "\n")
    except OSError as error:
        print(f"memmgr run: --json: {path}: {error.strerror}", file=sys.stderr)


WORK_SECONDS = 1.0
"""Seconds of the processor: a child that has imported torch took more, one that calls git for a commit less."""


def children_worked() -> bool:
    """This process is a launcher, most likely."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime > WORK_SECONDS


def summary_lines(stats: dict[str, Any], args: argparse.Namespace, error: BaseException | None) -> list[str]:
    """The lines that `run` prints after the budget's own line.

    `stats`: `memmgr.stats()`; empty where no budget was opened. `error`: the exception that ended the script.
    """
    binary = is_binary(args.budget)

    def size(count: int) -> str:
        return show_size(count, binary=binary)

    floor, enough = getattr(error, "floor_bytes", 0), getattr(error, "enough_bytes", 0)
    below = getattr(error, "tier_bytes", 0)
    if below and args.disk_size is not None:
        return [
            "the disk tier was full. Next:",
            "  " + command(args, disk_size=_round_up(below * local_ranks(), above=25)),
        ]
    if below:
        return ["the tier was full: --disk FOLDER on a disk with more room, or --host"]
    if floor:
        # As in the error, whose budget has room to spare; a budget that is only the floor gets some.
        named = (
            size(round_up(enough, binary=binary)).replace(" ", "")
            if enough > floor
            else _round_up(floor, binary=binary)
        )
        return ["the budget was too small. Next:", "  " + command(args, budget=named)]
    if not stats and (isinstance(error, KeyboardInterrupt) or children_worked()):
        return []  # a launcher: its child processes have printed the summary
    if not stats:
        return ["no module was called and nothing was saved for backward in this process, so no budget was opened"]
    from memmgr.observe.slowness import more_advice

    leaks = _leak_texts()
    lines = more_advice(stats, binary=binary, leaks=leaks)
    changed = {}
    if args.budget is None and not leaks and stats["floor_bytes"] < stats["unmanaged_peak_bytes"]:
        middle = (stats["floor_bytes"] + stats["unmanaged_peak_bytes"]) // 2
        changed["budget"] = _round_up(middle, above=0)
    if args.log is not None:
        from memmgr.observe.summary import next_command
        from memmgr.telemetry.consumers import log_path

        lines.append(next_command(log_path(args.log)))
    else:
        stem = args.script.rpartition(".")[2] if args.module else Path(args.script).stem
        changed["log"] = f"{stem}.jsonl"
    if changed:
        word = "to train in less" if "budget" in changed else "to look closer"
        lines.append(f"{word}:  " + command(args, **changed))
    return lines


def _round_up(size: int, above: int = 5, binary: bool = False) -> str:
    """A budget so many per cent above `size`, in a form that can be typed."""
    units = (
        ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if binary else ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
    )
    unit, name = next((pair for pair in units if size >= pair[0]), units[-1])
    tenths = -(-size * (100 + above) // 100 * 10 // unit)
    return f"{tenths // 10}{name}" if tenths % 10 == 0 else f"{tenths / 10:.1f}{name}"


def command(args: argparse.Namespace, **changed: str) -> str:
    """This command line with some options changed, ready to be pasted."""
    words = ["memmgr", "run"]
    for name in ("budget", "policy", "disk", "disk_size", "host", "device", "log"):
        value = changed.get(name, getattr(args, name))
        if value is not None:
            words += ["--" + name.replace("_", "-"), str(value)]
    words += ["--verify"] if args.verify else []
    words += (["-m"] if args.module else []) + [args.script, *args.arguments]
    return shlex.join(words)
