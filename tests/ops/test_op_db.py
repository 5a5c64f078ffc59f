"""Every differentiable op and module of PyTorch's own databases, under torture, has the bits that it has without memmgr.

`make test` runs one bucket of 64; MEMMGR_TEST_ALL_OPS=1 (`make test-ops`) runs all, and MEMMGR_OPS_SHARD=i/n the i-th
of n shares (0 <= i < n). One op by hand: `python -m tests.ops.sweep --op NAME`.
"""

import os

import pytest

from . import sweep
from .exclusions import NOT_DETERMINISTIC, RAISES, SKIPPED, is_skipped, lstsq_reads_unwritten_memory

pytestmark = pytest.mark.ops


def _buckets() -> list[int]:
    shard = os.environ.get("MEMMGR_OPS_SHARD")
    if shard:
        index, count = (int(part) for part in shard.split("/"))
        if not 0 <= index < count <= sweep.BUCKETS:
            raise ValueError(f"MEMMGR_OPS_SHARD={shard!r}: give i/n with 0 <= i < n <= {sweep.BUCKETS}")
        return list(range(index, sweep.BUCKETS, count))
    return list(range(sweep.BUCKETS) if os.environ.get("MEMMGR_TEST_ALL_OPS") == "1" else range(48, sweep.BUCKETS, 64))


@pytest.fixture(scope="module", autouse=True)
def _databases() -> None:
    """Imported once, outside the tests: it takes some seconds."""
    sweep.op_names()
    sweep.freeze_heap()


@pytest.fixture(autouse=True)
def _whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are small."""
    monkeypatch.setenv("MEMMGR_PAGER_SMALL", "1")


def _unlisted(cases: list[str], listed: dict[str, str]) -> list[str]:
    return [name for name in cases if name.rpartition("/")[0].split("/")[0] not in listed]


@pytest.mark.parametrize("bucket", _buckets())
def test_same_bits(bucket: int) -> None:
    report = sweep.sweep(sweep.cases_in(bucket), is_skipped)
    print(report.summary())
    assert not report.different, "\n" + "\n".join(f"{name}: {how}" for name, how in report.different.items())
    assert not (new := _unlisted(report.nondeterministic, NOT_DETERMINISTIC)), f"two unmanaged runs differ: {new}"
    raised = [line.split(": ")[0] for line in report.raised]
    assert not (new := _unlisted(raised, RAISES)), f"raise without memmgr: {new}"
    # Otherwise nothing was shown.
    assert min(report.stats[k] for k in ("evictions", "recomputes", "offloads", "reloads")) > report.same / 4, (
        report.stats
    )


@pytest.mark.slow  # the list only has to be shorter with a later torch; no rule depends on it
def test_lstsq_is_as_the_list_says() -> None:
    assert set(NOT_DETERMINISTIC) <= {"linalg.lstsq", "linalg.lstsq.grad_oriented"}  # the ones shown here
    assert lstsq_reads_unwritten_memory() == bool(NOT_DETERMINISTIC)


# A sample of the list, whose entries only have to be removed some day; the three others take nine seconds.
_SLOW = {"abs", "as_strided.partial_views", "float_power"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in sorted(RAISES)]
)
def test_still_raises_without_memmgr(name: str) -> None:
    report = sweep.sweep(list(sweep.cases_of(name)))
    assert report.raised, f"no sample of {name} raises now: take it off the list"
    assert report.same > 0 and not report.different


def test_lists_name_ops() -> None:
    assert {*SKIPPED, *NOT_DETERMINISTIC, *RAISES} <= set(sweep.op_names())
