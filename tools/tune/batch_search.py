"""The search for the largest batch of the user's script, by running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.tune.batch_size import TRAINERS_NAME, assigned, option_of
from memmgr.tools.tune.job import Batch, Job, Result
from memmgr.tools.tune.runner import FEWEST, Runner, usual_seconds

FORMS = "auto, VARIABLE, --OPTION, per_device_train_batch_size, batch_size or call:FILE.py:FUNCTION"


@dataclass(frozen=True)
class Row:
    """One batch that was tried; the fields of --json."""

    batch: int  # samples
    seconds: float = 0.0  # of a pass
    # time of a sample over that of the script's own batch without memmgr; None: it failed
    slowdown: float | None = None
    need_bytes: int = 0  # the most that a pass would have held without a budget
    error: str = ""  # why it does not hold


def parse(text: str) -> Batch:
    """The argument of --batch. Raises `UsageError`: a function that is not FILE.py:FUNCTION."""
    if text == "auto":
        return Batch()
    if text.startswith("call:"):
        path, colon, name = text.removeprefix("call:").rpartition(":")
        if not colon or not name.isidentifier() or not Path(path).is_file():
            raise UsageError(f"--batch: {text!r} does not name a function of a file; expected call:FILE.py:FUNCTION")
        return Batch("call", f"{path}:{name}")
    if text.startswith("-"):
        return Batch("option", text)
    if not text.isidentifier():
        raise UsageError(f"--batch: {text!r} is none of {FORMS}")
    return Batch("name", text)


def own_size(batch: Batch, job: Job, plain: Result) -> int:
    """The batch size of the script as it is.

    Raises `UsageError`: the script does not have that option, name, Trainer or DataLoader.
    """
    found: int | None = None
    if batch.how == "auto":
        found = plain.batches.get("trainer", plain.batches.get("loader"))
        if found is None:
            raise UsageError(
                f"--batch auto: the script has no Trainer and no DataLoader with a batch size; name one of {FORMS}"
            )
    elif batch.how == "option":
        found = option_of(job.arguments, batch.name)
    elif batch.how == "name":
        found = plain.batches.get("trainer") if batch.name == TRAINERS_NAME else plain.batches.get("lightning")
        if found is None and not job.module:
            found = assigned(Path(job.script).read_text(encoding="utf-8"), batch.name)
    if found is None:
        raise UsageError("--batch: the batch size of the script as it is cannot be found; say it with --batch-now N")
    return found


def search(
    runner: Runner, batch: Batch, now: int, plain: Result, budget: str, most: float | None, say: Callable[[str], None]
) -> tuple[list[Row], Row | None]:
    """Doubles the batch from the script's own and bisects.

    Returns all that were tried, and the largest that holds, None if none does. `batch`: how to set it. `now`: the
    script's own batch. `plain`: the run of that one without memmgr. `most`: a sample may take so many times as long as
    in `plain`; None: as long as it likes. `say`: gets a line before each run.
    """
    from memmgr.tools.bench.largest import Try, bisect  # imports torch

    rows: dict[int, Row] = {}
    sample_seconds = usual_seconds(plain) / now

    def tried(size: int) -> Try:
        if plain.samples is not None and size > plain.samples:
            rows[size] = Row(size, error=f"the data set has {plain.samples} samples")
        else:
            say(f"runs with a batch of {size}")
            result = runner.managed(budget, replace(batch, size=size, before=now))
            rows[size] = _row(size, result, sample_seconds, most, runner)
        row = rows[size]
        return Try(size, row.seconds, peak_bytes=row.need_bytes, error=row.error)

    good, _ = bisect(tried, now)
    return sorted(rows.values(), key=lambda row: row.batch), rows[good.batch] if good is not None else None


def _row(size: int, result: Result, sample_seconds: float, most: float | None, runner: Runner) -> Row:
    if result.error:
        if not result.floor_error:
            raise UsageError(f"the script failed with a batch of {size}: {result.error}\n{runner.last_lines()}")
        return Row(size, error="does not fit")
    if not result.applied:
        raise UsageError("--batch: nothing in the script takes its batch size from there")
    if len(result.seconds) < FEWEST:
        return Row(size, error=f"the script made only {len(result.ends)} passes")
    planned = next((k for k, count in enumerate(result.planned) if count), 0)
    first = max(len(result.seconds) // 2, min(planned, len(result.seconds) - FEWEST))
    seconds = sum(result.seconds[first:]) / len(result.seconds[first:])
    slowdown = seconds / size / sample_seconds
    late = most is not None and slowdown > most
    return Row(size, seconds, slowdown, result.peak_bytes, f"{slowdown:.2f}x a sample" if late else "")
