"""The search for the largest batch of the user's script, by running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memmgr.config.did_you_mean import meant
from memmgr.config.sizes import show_size
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.tune.batch_size import TRAINERS_NAME, assigned, option_of, settable
from memmgr.tools.tune.job import Batch, Job, Result
from memmgr.tools.tune.runner import Runner, compare

FORMS = "auto, VARIABLE, --OPTION, per_device_train_batch_size, batch_size or call:FILE.py:FUNCTION"


@dataclass(frozen=True)
class Row:
    """One batch that was tried; the fields of --json."""

    batch: int  # samples
    seconds: float = 0.0  # of a pass
    # time of a sample over that of the script's own batch without memmgr; None: it failed
    slowdown: float | None = None
    doubt: float = 0.0  # `slowdown` may be off by so much
    need_bytes: int = 0  # the most that a pass would have held without a budget
    error: str = ""  # why it does not hold
    doubtful: bool = False  # other programs were at work: `Measured.is_doubtful`


@dataclass
class Search:
    """The batches that were tried so far."""

    budget: str  # as of `memmgr run`
    now: int  # the script's own batch
    most: float  # a sample may take so many times as long as one of the script's own batch without memmgr
    rows: dict[int, Row] = field(default_factory=dict)  # by their size
    complete: bool = False  # nothing has ended it early

    @property
    def tried(self) -> list[Row]:
        """The smallest batch first."""
        return sorted(self.rows.values(), key=lambda row: row.batch)

    @property
    def largest(self) -> Row | None:
        """The largest that holds."""
        return next((row for row in reversed(self.tried) if not row.error), None)

    def plain(self) -> dict[str, Any]:
        """The object of --json."""
        largest = vars(self.largest) if self.largest else None
        tried = [vars(row) for row in self.tried]
        return {
            "budget": self.budget, "now": self.now, "largest": largest, "tried": tried, "complete": self.complete,
        }  # fmt: skip


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
        near = guess(batch, job)
        raise UsageError(
            f"--batch: {batch.name!r}: the script's own batch size is not found there{near or '; --batch-now N says it'}"
        )
    return found


def guess(batch: Batch, job: Job) -> str:
    """`; did you mean 'BATCH'?`, where a name that the script sets or reads, or an option, is near; else empty."""
    names = [] if job.module else settable(Path(job.script).read_text(encoding="utf-8"))
    return meant(batch.name, {*names, TRAINERS_NAME, "auto"} - {batch.name})


def search(
    runner: Runner,
    batch: Batch,
    found: Search,
    samples: int | None,
    budget_bytes: int | None,
    say: Callable[[str], None],
) -> None:
    """Doubles the batch from the script's own and bisects.

    `batch`: how to set it. `found`: gets each batch once it has been tried. `samples`: of the data set; None: not known.
    `budget_bytes`: as `Runner.batch` has it. `say`: gets a line before and after each run.
    """
    from memmgr.tools.bench.largest import Try, bisect  # imports torch

    rows, now = found.rows, found.now

    def tried(size: int) -> Try:
        if samples is not None and size > samples:
            rows[size] = Row(size, error=f"the data set has {samples} samples")
        else:
            say(f"batch {size}: runs, about {runner.expected(size / now)}")
            managed, plain = runner.batch(found.budget, budget_bytes, replace(batch, size=size, before=now))
            if not managed.applied and not managed.error:
                near = guess(batch, runner.job)
                raise UsageError(
                    f"--batch: {batch.name or batch.how!r}: nothing in the script takes its batch size from there{near}"
                )
            rows[size] = _row(size, now, managed, plain, found.most, runner)
        row = rows[size]
        doubt = f" ±{row.doubt:.2f}" * row.doubtful
        fits = f"fits, {row.slowdown:.2f}x{doubt} a sample, needs {show_size(row.need_bytes)}" if row.slowdown else ""
        say(f"batch {size}: {row.error or fits}")
        return Try(size, row.seconds, peak_bytes=row.need_bytes, error=row.error)

    bisect(tried, now)
    found.complete = True


def _row(size: int, now: int, managed: Result, plain: Result, most: float, runner: Runner) -> Row:
    if managed.error:
        if not managed.floor_error:
            raise UsageError(f"the script failed with a batch of {size}: {managed.error}\n{runner.last_lines()}")
        return Row(size, error="does not fit")
    found = compare(plain, managed, size / now)
    if found.factor is None:
        return Row(size, error=f"{found.why} (it made {len(managed.ends)})")
    late = f"more than {most:.2f}x a sample" if found.factor > most else ""
    if late and found.is_doubtful and found.factor - found.doubt <= most:
        late = f"in doubt: {late}, or not"
    return Row(size, found.seconds, found.factor, found.doubt, managed.need_bytes, late, found.is_doubtful)
