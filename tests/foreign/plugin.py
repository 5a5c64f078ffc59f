"""A plug-in for pytest: each test in a budget of its own from which everything is evicted after every op.

It writes one line of JSON for each test that begins and one for each that ends, so that a driver sees a crash or a hang and
goes on behind it. `FOREIGN` in the environment names the file of its settings.
"""

import contextlib
import gc
import json
import random
import re
import time
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreign.recorder import RECORDER
from foreign.settings import ended, from_environment

LIMIT = "8GB"  # far above any test, but finite: only then are kinds of ops tried at their first use (rule 8)


SETTINGS = from_environment()
_reports: list[pytest.TestReport] = []


def _write(**line: Any) -> None:
    with open(SETTINGS.results, "a") as file:
        file.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Around a test: the budget, where one is asked for."""
    if not SETTINGS.leaving:
        yield
        return
    import memmgr

    with memmgr.budget(LIMIT, policy="torture", device="cpu", quiet=True) as opened:
        yield
    stats = opened.stats()
    RECORDER.evicted = int(stats["evictions"] + stats["offloads"])


@contextlib.contextmanager
def recorded(name: str) -> Iterator[list[str]]:
    """A test's scope and its entries. The state of the random generator afterwards is the last one."""
    seed = zlib.crc32(name.encode())
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    RECORDER.install()
    RECORDER.clear()
    with scope():
        yield RECORDER.entries
        RECORDER.note("random state", torch.get_rng_state())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses the tests. A limit takes them in the order of a sum of their names: from all parts, and the same ones always."""
    chosen = [i for i in items if not any(re.search(pattern, i.nodeid) for pattern in SETTINGS.not_run)]
    excluded = len(items) - len(chosen)
    if SETTINGS.only is not None:
        only = set(SETTINGS.only)
        chosen = [item for item in chosen if item.nodeid in only]
    if 0 < SETTINGS.limit < len(chosen):
        kept = set(sorted((zlib.crc32(i.nodeid.encode()), i.nodeid) for i in chosen)[: SETTINGS.limit])
        chosen = [i for i in chosen if (zlib.crc32(i.nodeid.encode()), i.nodeid) in kept]
    _write(collected=len(items), excluded=excluded, chosen=len(chosen))
    done = ended(Path(SETTINGS.results))
    items[:] = [item for item in chosen if item.nodeid not in done]
    if SETTINGS.leaving:
        from memmgr.runtime import session

        # Each budget takes stock of the heap. Objects of the imports need not be walked for each test.
        session._thaw = lambda: None
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    _reports.clear()
    RECORDER.clear()
    _write(id=item.nodeid)
    begun = time.monotonic()
    result = yield
    failed = [report for report in _reports if report.failed]
    called = [report for report in _reports if report.when == "call"]
    outcome = "failed" if failed else "passed" if any(r.passed for r in called) else "skipped"
    _write(
        id=item.nodeid,
        outcome=outcome,
        text=_text(failed[0]) if failed else "",
        entries=RECORDER.entries,
        evicted=RECORDER.evicted,
        seconds=round(time.monotonic() - begun, 2),
    )
    return result


def _text(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"{report.when}: {(crash.message if crash else str(report.longrepr)).strip()[-1500:]}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _reports.append(report)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    if getattr(item, "module", None) is not None and getattr(item.module, "IN_RANKS", False):
        return (yield)  # its ranks record, each in a budget of its own
    with recorded(item.nodeid):
        return (yield)


@pytest.fixture
def note() -> Any:
    """(name, tree of tensors): records bits in a test of ours over other people's models and databases."""
    return RECORDER.note
