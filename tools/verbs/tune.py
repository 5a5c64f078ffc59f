"""Find the budget of a training script, or its largest batch, by simulating and then by running it.

    memmgr tune train.py --lr 3e-4
    memmgr tune --slowdown 1.3 --picture tune.svg train.py
    memmgr tune --batch auto --budget 12GB train.py
    memmgr tune --batch=--batch-size --slowdown 1.2 train.py

One pass of the script is recorded, and simulated to find the knee: the smallest budget that is predicted to keep the
slowdown. The script then runs in half of its need, or in the knee where that is more, in turns with a run without
memmgr. The knee is looked for again with the costs that the run has shown. Each run ends after some passes: the rest of the
script, which may save a model, does not run.

--batch finds the largest batch in a budget and within the slowdown, for each sample. It is auto (the Trainer's or the first
DataLoader's), an environment variable or a name that the script assigns a number to, an --OPTION of the script,
per_device_train_batch_size, Lightning's batch_size, or call:FILE.py:FUNCTION, which is called with the size before the script.

Exit code: 0 for a proposal; 1 where nothing holds; 2 for a script that fails or a wrong option.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from memmgr.config.machine import free_bytes
from memmgr.config.sizes import Need, parse_budget, show_seconds, show_size
from memmgr.tools.common.console import megabytes, table
from memmgr.tools.common.policy_option import add_policy
from memmgr.tools.common.scratch import scratch_folder
from memmgr.tools.common.usage_error import UsageError, check_readable
from memmgr.tools.tune import batch_search
from memmgr.tools.tune.job import Batch, Job
from memmgr.tools.tune.runner import Runner
from memmgr.tools.verbs import run as run_verb
from memmgr.tools.view import plot

if TYPE_CHECKING:
    from memmgr.tools.tune.search import Tuned

MOST = 1.1
_PASSES = 24
_PASSES_OF_A_BATCH = 12
_NO_SIZE = 1 << 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.usage = "memmgr tune [options] (SCRIPT.py | -m MODULE) [its arguments]"
    parser.add_argument("--slowdown", metavar="X", help="the most that is accepted: 1.2, 20%% (default 1.1)")
    parser.add_argument("--batch", metavar="WHERE", help="find the largest batch; auto, or where it is set")
    parser.add_argument("--batch-now", type=int, metavar="N", help="the script's own batch, where it is not found")
    parser.add_argument("--budget", metavar="SIZE", help="of --batch: as of memmgr run (default: device)")
    parser.add_argument("--passes", type=int, metavar="N", help="of each run (default 24; with --batch 12)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a .png or .svg (default: SCRIPT.tune.png)")
    add_policy(parser)
    parser.add_argument("--disk", metavar="FOLDER", help="a folder for evicted tensors; or none")
    parser.add_argument("--device", help="limited by the budget (default: accelerator or cpu)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as with python -m")
    parser.add_argument("script", help="the script, or the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Tunes; see the module's text for the exit code."""
    most = _slowdown(args.slowdown) or MOST
    batch = batch_search.parse(args.batch) if args.batch is not None else None
    _check(args, batch)
    options = {name: getattr(args, name) for name in ("policy", "disk", "device") if getattr(args, name) is not None}
    passes = args.passes or (_PASSES if batch is None else _PASSES_OF_A_BATCH)
    job = Job(args.script, args.arguments, args.module, passes, options=options)
    with scratch_folder("tune") as folder, Runner(job, folder, _say) as runner:
        if batch is not None:
            return _largest_batch(args, runner, batch, most)
        return _budget(args, runner, most)


def _say(text: str) -> None:
    print(f"memmgr tune: {text}", file=sys.stderr, flush=True)


def _slowdown(text: str | None) -> float | None:
    """`1.2` or `20%`; None: not given."""
    if text is None:
        return None
    try:
        value = 1 + float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"--slowdown: {text!r} is neither a factor (1.2) nor a percentage (20%)") from None
    if not 1 < value < 100:
        raise UsageError(f"--slowdown: {text!r}: expected a factor over 1, 1.2 for example, or 20%")
    return value


def _check(args: argparse.Namespace, batch: Batch | None) -> None:
    """Checks the options before the script runs."""
    if not args.module:
        check_readable(Path(args.script))
    if args.passes is not None and args.passes < 6:
        raise UsageError(f"--passes: {args.passes} are too few to measure; at least 6")
    if batch is None:
        if args.budget is not None or args.batch_now is not None:
            raise UsageError("--budget and --batch-now belong to --batch; without it the budget is searched for")
        if args.picture is None and plot.available():
            args.picture = Path(f"{Path(args.script).stem if not args.module else args.script}.tune.png")
        plot.check_picture(args.picture)
        return
    if args.picture is not None:
        raise UsageError("--picture is of budgets, not of --batch")
    if args.batch_now is not None and args.batch_now < 1:
        raise UsageError(f"--batch-now: {args.batch_now} is less than 1")
    _fixed(args)


def _fixed(args: argparse.Namespace) -> int | None:
    """The budget of --batch in bytes; None: it depends on the device. Raises `UsageError`: it depends on the batch."""
    text = "device" if args.budget is None else args.budget
    try:
        asked = parse_budget(text, whole=_NO_SIZE, what="--budget")
    except ValueError as error:
        raise UsageError(str(error)) from None
    if isinstance(asked, Need):
        raise UsageError(
            "--budget: a share of the need grows with the batch; name a size, a share of the device, or device"
        )
    return asked if isinstance(asked, int) and asked < _NO_SIZE // 100 else None


# ---- budget --------------------------------------------------------------------------------------------------------


def _budget(args: argparse.Namespace, runner: Runner, most: float) -> int:
    from memmgr.tools.tune.search import Curve, Tuned, propose

    runner.probe()
    trace, unlimited = runner.trace()
    curve = Curve(trace, unlimited.factor or 1.0, _say, unlimited.peak_bytes)
    points, proposal = propose(curve, most, runner.measure)
    points[0] = replace(points[0], run=unlimited)
    tuned = Tuned(curve.need_bytes, unlimited.plain_seconds, most, points, proposal, in_turns=runner.in_turns)
    if trace.device == "cpu":
        tuned.device_bytes = free_bytes()
    if args.picture is not None:
        _draw(tuned, args)
    if args.json:
        print(json.dumps(tuned.plain()))
    else:
        _show(tuned, args, trace.device)
    return 0 if proposal is not None else 1


def _draw(tuned: Tuned, args: argparse.Namespace) -> None:
    from memmgr.tools.tune.search import device_sizes

    need = tuned.need_bytes
    made = tuned.proposal
    marks = plot.Marks(
        measured=[(at.share / 100, at.measured, at.run.doubt) for at in tuned.curve if at.run and at.measured],
        proposal=None if made is None or made.measured is None else (made.share / 100, made.measured),
        sizes=[(size / need, name) for size, name in device_sizes(need)],
        limit=tuned.most,
    )
    rows = [
        [plot.Point(at.share / 100, at.predicted, at.lower_bound, "predicted, corrected by the runs")]
        for at in tuned.curve
    ]
    name = args.script if args.module else Path(args.script).name
    title = f"{name}: {megabytes(need)} and {show_seconds(tuned.seconds)} a pass without a budget"
    if made is not None:
        title += f"; proposed {show_size(made.budget_bytes)}, {_factor(made.measured)}"
    plot.slowdown(rows, args.picture, title, marks)


def _factor(value: float | None, doubt: float = 0.0) -> str:
    return "-" if value is None else f"{value:.2f}x" + (f" ±{doubt:.2f}" if doubt else "")


def _show(tuned: Tuned, args: argparse.Namespace, device: str) -> None:
    from memmgr.tools.tune.search import device_sizes

    print(
        f"a pass without a budget: {show_size(tuned.need_bytes)}, {show_seconds(tuned.seconds)}. Time over that, by budget "
        "(predicted: corrected by the runs):"
    )
    held = [at for at in tuned.curve if at.predicted is not None or at.run is not None]
    rows = []
    for at in held:
        run = at.run
        chosen = tuned.proposal is not None and at.share == tuned.proposal.share
        rows.append(
            [
                show_size(at.budget_bytes),
                f"{at.share} %",
                show_size(run.peak_bytes) if run is not None and run.peak_bytes else "",
                _factor(at.predicted),
                "" if run is None else run.why or _factor(run.factor, run.doubt) + "*" * run.is_doubtful,
                "<- proposal" if chosen else "",
            ]
        )
    table(["budget", "of the need", "peak", "predicted", "measured", ""], rows)
    if len(held) < len(tuned.curve):
        print(f"below {held[-1].share} % no plan was found")
    for size, name in device_sizes(tuned.need_bytes):
        print(f"{100 * size / tuned.need_bytes:.0f} % of the need is the memory of {name}")
    if args.picture is not None:
        print(args.picture)
    _show_proposal(tuned, args, device)


def _show_proposal(tuned: Tuned, args: argparse.Namespace, device: str) -> None:
    made = tuned.proposal
    runs = [at.run for at in tuned.curve if at.run is not None]
    busy = any(run.is_doubtful for run in runs)
    if not tuned.in_turns and any(run.slowdown for run in runs):
        print(
            "runs were compared one after the other (there is no memory for both at a time): load falsifies their times"
        )
    if busy:
        print(
            "* the machine was busy: equal passes of that run differ, so the larger one of its time and its processor time counts"
        )
    if made is not None and made.run is not None:
        again = " (run this again on an idle machine to confirm it)" * made.run.is_doubtful
        print(
            f"proposal{again}: {show_size(made.budget_bytes)}, {made.share} % of the need: measured "
            f"{_factor(made.measured, made.run.doubt)} over {made.run.passes} passes, after the first {made.run.after}, which "
            f"are slower; before that run {_factor(made.before)} was predicted\n  {_command(args, show_size(made.budget_bytes))}"
        )
    elif tried := [at for at in tuned.curve if at.measured is not None and at.share < 100]:
        best = _command(args, show_size(min(tried, key=lambda at: at.measured or 0.0).budget_bytes), log="run.jsonl")
        again = "Run this again on an idle machine; the" if busy else "The"
        print(
            f"no proposal: each budget that was run is slower than {_factor(tuned.most)}. {again} report of a run says why:\n"
            f"  {best}\n  memmgr report run.jsonl"
        )
    else:
        why = next((run.why for run in runs if run.why), "no smaller budget is predicted to hold")
        print(f"no proposal within {_factor(tuned.most)}: {why}")
    if device != "cpu":
        print(f"all memory of the device, so that it is slower instead of out of memory:\n  {_command(args, 'device')}")
    elif tuned.device_bytes is not None and tuned.device_bytes >= tuned.need_bytes:
        print(f"{show_size(tuned.device_bytes)} are free here, so the script also runs without a budget")


def _command(args: argparse.Namespace, budget: str, arguments: list[str] | None = None, log: str | None = None) -> str:
    """The command that runs the script in a budget."""
    own = argparse.Namespace(**{**vars(args), "disk_size": None, "host": None, "log": log, "verify": False})
    own.arguments = args.arguments if arguments is None else arguments
    return run_verb.command(own, budget=budget.replace(" ", ""))


# ---- batch ---------------------------------------------------------------------------------------------------------


def _largest_batch(args: argparse.Namespace, runner: Runner, batch: Batch, most: float) -> int:
    plain = runner.probe(batch)
    now = args.batch_now or batch_search.own_size(batch, runner.job, plain)
    found = batch_search.Search(args.budget or "device", now, most)
    try:
        batch_search.search(runner, batch, found, plain.samples, _fixed(args), _say)
    finally:  # an interrupt, or a script that fails with a larger batch, does not lose those that were tried
        if args.json and found.rows:
            print(json.dumps(found.plain()))
        elif found.rows:
            _show_batches(args, batch, found)
    return 0 if found.largest is not None else 1


def _show_batches(args: argparse.Namespace, batch: Batch, found: batch_search.Search) -> None:
    best = found.largest
    table(
        ["batch", "needs", "a pass", "a sample", ""],
        [
            [
                str(row.batch),
                show_size(row.need_bytes) if row.need_bytes else "",
                show_seconds(row.seconds) if row.seconds else "",
                _factor(row.slowdown, row.doubt) + "*" * row.doubtful if row.slowdown is not None else "",
                "<- proposal" if row is best else row.error or ("now" if row.batch == found.now else ""),
            ]
            for row in found.tried
        ],
    )
    so_far = "" if found.complete else " so far"
    busy = any(row.doubtful for row in found.tried)
    if busy:
        print("* the machine was busy: equal passes of that run differ. Run this again on an idle machine")
    if best is None:
        limit = f"in {found.budget} within {_factor(found.most)} a sample"
        print(f"no batch holds{' for sure' * busy}{so_far} {limit}; --slowdown accepts a larger one")
        return
    print(
        f"the largest batch{so_far} in {found.budget}: {best.batch} (now {found.now}); a sample takes "
        f"{_factor(best.slowdown, best.doubt)} the time of now without a budget"
    )
    print(f"  {_with_batch(args, batch, best.batch, found.budget)}")


def _with_batch(args: argparse.Namespace, batch: Batch, size: int, budget: str) -> str:
    from memmgr.tools.tune.batch_size import with_option

    if batch.how == "option":
        return _command(args, budget, with_option(args.arguments, batch.name, size))
    place = {"auto": "the script's batch size", "call": batch.name}.get(batch.how, batch.name)
    return f"{_command(args, budget)}   with {size} as {place}"
