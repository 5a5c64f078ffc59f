"""Predict the effect of a budget on a training step before any training: no memory and no device are needed.

    memmgr plan --device rtx4090 --budget 20GB model.py:make_step
    memmgr plan --device h100,rtx4090,l4 --sweep model.py:make_step
    memmgr plan --device a100-80 --batch 4 --optimizer adamw-fused ./llama-7b
    memmgr plan --device here.json --ratio 60% model.py:make_step

`make_step` is a function without arguments. It makes model, optimizer and batch and returns a function that does one
step. The file is executed, then both functions on fake tensors. A folder with the config.json of one of transformers'
language models does, too; nothing is downloaded.

Devices: {devices}; a table of memmgr doctor --measure; or cpu, which is measured now.

Exit code: 0 if the budget fits, and for a sweep; 1 if it does not fit; 2 for a step that cannot be planned, or a
wrong option.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memmgr.config.conf import is_off
from memmgr.config.did_you_mean import meant
from memmgr.config.sizes import UNLIMITED, Need, Room, parse_budget, parse_limit, show_seconds, show_size
from memmgr.tools.common.console import table
from memmgr.tools.common.interrupts import ends_at_once
from memmgr.tools.common.outputs import check_output
from memmgr.tools.common.rates import DEVICES, Rates, read_rates, with_tier
from memmgr.tools.common.step_file import is_model_folder, step_function
from memmgr.tools.common.sweep import cut, no_worse
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.verbs.run import take_ratio
from memmgr.tools.view import plot

if TYPE_CHECKING:
    from memmgr.policies.trace import TierLink, Trace
    from memmgr.tools.common.fake_trace import FakeStep
    from memmgr.tools.common.outlook import Outlook

__doc__ = (__doc__ or "").format(devices=", ".join(DEVICES))

_OPTIMIZERS = ("adamw", "adamw-fused", "sgd", "momentum", "adafactor")
_DTYPES = ("float32", "bfloat16", "float16")
_OF_A_FOLDER = {"batch": 1, "sequence": None, "optimizer": "adamw", "dtype": "bfloat16", "checkpointing": False}
"""Options, and their defaults."""
_TENTHS = (10, 9, 8, 7, 6, 5, 4, 3, 2, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("what", metavar="FILE.py:FUNCTION|FOLDER", help="what makes the step, or a model's config")
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="a name, a table, or with --sweep several, by commas"
    )
    parser.add_argument("--budget", metavar="SIZE", help="12GB, 80%% (of the device), need*0.6 (default 100%%)")
    parser.add_argument("--ratio", metavar="SHARE", help="60%%, 0.6: a share of what the step needs")
    parser.add_argument("--tier", metavar="TIER", help="host:64GB, disk:1TB, none (default: host, no limit)")
    parser.add_argument("--sweep", action="store_true", help="all of the need down to a tenth of it, every device")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="memory over the step, or the sweep: .png or .svg")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the trace, for memmgr simulate")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    model = parser.add_argument_group("of a folder with a config")
    model.add_argument("--batch", type=int, metavar="N", help="sequences in a step (default 1)")
    model.add_argument("--sequence", type=int, metavar="N", help="tokens in each (default 2048, or the model's limit)")
    model.add_argument("--optimizer", choices=_OPTIMIZERS, metavar="NAME", help=", ".join(_OPTIMIZERS))
    model.add_argument(
        "--dtype", choices=_DTYPES, metavar="DTYPE", help="float32, bfloat16 or float16 (default bfloat16)"
    )
    model.add_argument(
        "--checkpointing", action="store_true", default=None, help="with the model's own gradient checkpointing"
    )


_CPU = "cpu"  # this machine's, measured


@dataclass(frozen=True)
class _On:
    """A step on a device."""

    rates: Rates
    trace: Trace
    link: TierLink | None


def run(args: argparse.Namespace) -> int:
    """Plans; see the module's text for the exit code."""
    names = args.device.split(",")
    take_ratio(args)
    _check(args, names)
    _say(_executes(args.what))
    with ends_at_once("plan"):
        from memmgr.tools.common.make_step import maker

        make = maker(args)
    tier = _tier(args.tier)
    devices = [with_tier(rates, *tier) if tier else rates for rates in map(_device, names)]
    on = []
    steps: dict[bool, FakeStep] = {}
    for rates in devices:
        if rates.accelerator not in steps:
            steps[rates.accelerator] = _recorded(make, rates.accelerator)
        link = None if is_off(args.tier) else rates.link
        trace = replace(steps[rates.accelerator].trace(rates), links=(link,) if link else ())
        unknown = {w.signature for w in steps[rates.accelerator].works if w.signature not in rates.calls} - {"view"}
        if rates.calls and unknown:
            _say(f"{len(unknown)} kinds of op are not in the table of {rates.name}: told from its rates")
        on.append(_On(rates, trace, link))
    if args.trace:
        from memmgr.telemetry.trace_file import write_trace

        try:
            write_trace(args.trace, on[0].trace)
        except OSError as error:
            raise UsageError(f"--trace: {args.trace}: {error.strerror}") from None
    return _sweep(args, on) if args.sweep else _one(args, on[0])


def _check(args: argparse.Namespace, names: list[str]) -> None:
    """Checks the options before the user's file runs, and before any tracing or measuring."""
    plot.check_picture(args.picture)
    if args.trace is not None:
        check_output(args.trace, "--trace", [Path(args.what.rpartition(":")[0])])
    for option in ("batch", "sequence"):
        if (given := getattr(args, option)) is not None and given < 1:
            raise UsageError(f"--{option}: {given} is less than 1")
    _take_model(args)
    if len(names) > 1 and not args.sweep:
        raise UsageError("several devices are compared with --sweep")
    if len(names) > 1 and args.trace is not None:
        raise UsageError("--trace is of one device: its times are in it")
    if args.budget is not None and args.sweep:
        raise UsageError("--sweep has budgets of its own: leave --budget and --ratio out")
    _tier(args.tier)
    if args.budget is not None:
        try:
            parse_budget(args.budget, whole=1 << 60, what="--budget")
        except ValueError as error:
            raise UsageError(str(error)) from None
    for name in names:
        if name not in (*DEVICES, _CPU) and not name.endswith(".json"):
            known = (*DEVICES, _CPU)
            raise UsageError(
                f"--device: {name!r} is neither a table.json nor one of {', '.join(known)}{meant(name, known, 0.9, parts=True)}"
            )
        if name.endswith(".json"):
            read_rates(Path(name))
    if not is_model_folder(Path(args.what)):
        step_function(args.what)


def _take_model(args: argparse.Namespace) -> None:
    """Options that describe the model of a folder are an error with a file, which makes its own model; then sets the
    defaults.
    """
    for option, usual in _OF_A_FOLDER.items():
        given = getattr(args, option)
        if given is not None and not Path(args.what).is_dir():
            raise UsageError(f"--{option} is of a folder with a config, and {args.what} is none")
        setattr(args, option, usual if given is None else given)


def _say(text: str) -> None:
    print(f"memmgr plan: {text}", file=sys.stderr, flush=True)


def _executes(what: str) -> str:
    """One line for the user: the code that will be executed."""
    path, _, function = what.rpartition(":")
    if is_model_folder(Path(what)):
        return f"makes the model of {what} with transformers, on fake tensors; no code of the folder is executed"
    return f"executes {path}, then {function}() and one step on fake tensors"


def _device(name: str) -> Rates:
    if name in DEVICES:
        return DEVICES[name]
    if name != _CPU:
        return read_rates(Path(name))
    from memmgr.tools.bench.measure import measure

    _say("measuring this machine (memmgr doctor --measure keeps it)")
    return measure(tempfile.gettempdir(), size=64 << 20, cpu=True)


def _tier(text: str | None) -> tuple[str, int | None] | None:
    """Which, and how many bytes (None: no limit); None: nothing is said of it, or there is none."""
    if text is None or is_off(text):
        return None
    tier, colon, size = text.partition(":")
    if not colon or tier not in ("host", "disk"):
        raise UsageError(f"--tier: {text!r} is neither host:SIZE, disk:SIZE nor none")
    try:
        room = parse_limit(size, what="--tier")
    except ValueError as error:
        raise UsageError(str(error)) from None
    return tier, None if room == UNLIMITED else room


def _recorded(make: Callable[[], Callable[[], object]], accelerator: bool) -> FakeStep:
    from memmgr.tools.common.fake_step import StepError, record

    begun = time.perf_counter()
    try:
        with ends_at_once("plan"):
            step = record(make, accelerator=accelerator)
    except StepError as error:
        raise UsageError(str(error)) from None
    except UsageError:
        raise
    except Exception as error:  # of the user's code
        raise UsageError(_said_by_step(error, accelerator)) from None
    if step.asked:
        _say(f"{step.asked}: a number that the step asks for is taken as 1")
    _say(f"traced {step.end - step.begin:,} calls of torch in {show_seconds(time.perf_counter() - begun)}")
    return step


def _said_by_step(error: Exception, accelerator: bool) -> str:
    """The error of a user's step, with its line."""
    import torch

    import memmgr

    ours = (str(Path(__file__).parents[1]), *(str(Path(str(each.__file__)).parent) for each in (memmgr, torch)))
    frames = [at for at in traceback.extract_tb(error.__traceback__) if not at.filename.startswith(ours)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    text = f"{where}{type(error).__name__}: {error}"
    hint = " (the step is planned for cpu, the default; --device names an accelerator)"
    return text + hint * (not accelerator and "cuda" in str(error).lower())


def _budget(args: argparse.Namespace, on: _On) -> int:
    """As live: here the need is known, and `auto` is the knee of the step's curve."""
    from memmgr.policies.plan.knee import knee
    from memmgr.tools.common.outlook import outlook

    peak = on.trace.unmanaged_peak[0]
    try:
        asked = parse_budget(args.budget or on.rates.memory_bytes, whole=on.rates.memory_bytes, what="--budget")
    except ValueError as error:
        raise UsageError(str(error)) from None
    if isinstance(asked, Room):
        return on.rates.memory_bytes
    if not isinstance(asked, Need):
        return peak if asked == UNLIMITED else asked
    if asked.share is not None:
        return max(1, int(peak * asked.share))
    return knee(peak, lambda size: outlook(on.trace, size, on.link)[0].overhead).budget_bytes


def _one(args: argparse.Namespace, on: _On) -> int:
    from memmgr.tools.common.outlook import fitting, half_overhead, levels, outlook

    begun = time.perf_counter()
    found, made = outlook(on.trace, _budget(args, on), on.link)
    took = time.perf_counter() - begun
    found = replace(
        found,
        half_overhead_budget_bytes=half_overhead(on.trace, found, on.link),
        fitting_budget_bytes=None if found.fits else fitting(on.trace, found, on.link),
    )
    if args.picture:
        managed = levels(on.trace, made.steps, made) if made.feasible else []
        plot.memory_of_step(
            levels(on.trace), managed, found.budget_bytes, args.picture, f"{args.what} on {on.rates.name}"
        )
    if args.json:
        print(json.dumps(asdict(found)))
    else:
        _show(found, on, took)
        if args.picture:
            print(args.picture)
    return 0 if found.fits else 1


def _show(found: Outlook, on: _On, took: float) -> None:

    print(f"device     {on.rates.name}: {show_size(on.rates.memory_bytes)} ({on.rates.source})")
    held = ", ".join(f"{_plural(kind)} {show_size(size)}" for kind, size in found.held_bytes.items())
    print(f"needs      {show_size(found.unmanaged_peak_bytes)} and {show_seconds(found.unmanaged_seconds)} a step")
    if held:
        print(f"           from step to step: {held}")
    budget = show_size(found.budget_bytes)
    if found.overhead is None or found.seconds is None:
        alone = f"; the largest op alone needs {show_size(found.least_bytes)}"
        print(f"budget     {budget}: does not fit{alone if found.budget_bytes < found.least_bytes else ''}")
        if found.fitting_budget_bytes is not None:
            share = round(100 * found.fitting_budget_bytes / found.unmanaged_peak_bytes)
            print(f"           {show_size(found.fitting_budget_bytes)} ({share} % of the need) would")
        if found.tier_room_bytes is not None and found.tier_bytes > found.tier_room_bytes:
            print(
                f"           {show_size(found.tier_bytes)} would be offloaded, where {show_size(found.tier_room_bytes)} fit"
            )
        return
    print(f"budget     {budget}: fits, {show_seconds(found.seconds)} a step, {found.overhead:.3f}x", end="")
    print(f" (no method below {found.lower_bound:.3f}x)" if found.lower_bound is not None else "")
    if not (found.written_bytes or found.read_bytes or found.remade_bytes):
        print("           everything stays in memory")
    rows = [
        [_plural(kind), *(show_size(sizes.get(kind, 0)) if sizes.get(kind) else "" for sizes in (
            found.written_bytes, found.read_bytes, found.remade_bytes))]
        for kind in dict.fromkeys((*found.written_bytes, *found.read_bytes, *found.remade_bytes))
    ]  # fmt: skip
    if rows:
        table(["memory", "written", "read", "recomputed"], rows)
    if found.tier_bytes:
        room = f" of {show_size(found.tier_room_bytes)}" if found.tier_room_bytes is not None else ""
        print(f"tier       {show_size(found.tier_bytes)}{room} at most")
    if found.half_overhead_budget_bytes is not None:
        half = 1 + (found.overhead - 1) / 2
        print(
            f"better     {show_size(found.half_overhead_budget_bytes)} takes at most {half:.3f}x, half of that extra time"
        )
    print(f"planned    {on.trace.ops_run:,} ops in {show_seconds(took)}")


def _plural(kind: str) -> str:
    return kind if kind == "other" else f"{kind}s"


def _curve(on: _On) -> list[Outlook]:
    """At every budget of a sweep."""
    from memmgr.tools.common.outlook import outlook

    found = [outlook(on.trace, on.trace.unmanaged_peak[0] * tenths // 10, on.link)[0] for tenths in _TENTHS]
    return [
        replace(found[k], budget_bytes=own.budget_bytes, lower_bound=own.lower_bound)
        for own, k in zip(found, no_worse([o.seconds for o in found]), strict=True)
    ]


def _sweep(args: argparse.Namespace, on: list[_On]) -> int:
    found = list(zip(*map(_curve, on), strict=True))
    if args.picture:
        points = [
            [
                # Each device has a bound of its own, and the picture shows one.
                plot.Point(tenths / 10, o.overhead, o.lower_bound if len(on) == 1 else None, one.rates.name)
                for o, one in zip(row, on, strict=True)
            ]
            for tenths, row in zip(_TENTHS, found, strict=True)
        ]
        plot.slowdown(points, args.picture, args.what + cut([o.overhead for row in found for o in row], plot.HIGHEST))
    if args.json:
        print(json.dumps([asdict(o) for row in found for o in row]))
        return 0
    for one in on:
        print(f"{one.rates.name}: {show_size(one.trace.unmanaged_peak[0])}, {show_seconds(one.trace.seconds)} a step")
    print("a step at a budget, and its time over a step without one (*: more than the device has; -: does not fit)")
    rows = []
    for tenths, row in zip(_TENTHS, found, strict=True):
        cells = [
            "-" if o.seconds is None else f"{show_seconds(o.seconds)}  {o.overhead:.2f}x"
            + ("*" if o.budget_bytes > one.rates.memory_bytes else " ")
            for o, one in zip(row, on, strict=True)
        ]  # fmt: skip
        rows.append([f"{tenths * 10} %", show_size(row[0].budget_bytes), *cells])
    table(["budget", "", *(one.rates.name for one in on)], rows)
    if args.picture:
        print(args.picture)
    return 0
