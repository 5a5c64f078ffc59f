"""Shared set-up of all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memmgr.native import binding, build


def pytest_configure(config: pytest.Config) -> None:
    """Compiles libraries of first use before the workers start, and before any test has a time-out. A shell without job
    control starts background programs with Ctrl-C ignored, and tests send it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Else Inductor compiles a program for each kind of vectors that the processor has, to see that the compiler knows them: a
    # third of its first use. Any compiler that compiles the core does.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    if not hasattr(config, "workerinput"):
        try:
            binding.load()
        except build.NotBuiltError as error:
            if "no C++ compiler was found" not in str(error):  # without one, tests that need none go on
                raise pytest.UsageError(str(error)) from None


_FAST = (
    "core/",
    "policies/",
    "tools/test_cli.py",
    "tools/test_completion.py",
    "tools/test_words.py",
    "tools/test_packaging.py",
)
_TESTS = Path(__file__).parent
# The files that take longest, by processor time; the others follow in the order of their paths, and none of them takes
# a quarter of a minute. So all workers end at the same time.
_LONGEST = (
    *("exactness/test_models.py", "driver/test_sanitizers.py", "tools/test_docs.py", "memdev/test_managed.py"),
    *("budget/test_named_budget.py", "exactness/test_hostile.py", "plan/test_planner.py", "tools/test_run_script.py"),
    *("memdev/test_compiled.py", "exactness/test_threads.py", "pager/test_pending.py", "tools/test_tune.py"),
    *("job/test_matrix.py", "exactness/test_leaks.py", "watch/test_lightning.py", "budget/test_peak.py"),
    *("pager/test_plans.py", "tools/test_examples.py", "core/test_pages.py", "plan/test_plan_verb.py"),
    *("plan/test_online.py", "plan/test_simulate_verb.py", "plan/test_ahead.py", "plan/test_paging.py"),
    *("plan/test_simulate_job.py", "ops/test_state_arguments.py"),
    *("tools/test_bench.py", "budget/test_floor.py", "memdev/test_timed.py"),
    *("pager/test_plans_beside.py", "budget/test_parts.py", "budget/test_api.py"),
    *("driver/test_device.py", "pager/test_variants.py", "compiled_programs/test_launches.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the mark `fast` to the tests of `make test-fast`, and puts the files that take longest first."""
    ranks = {name: rank for rank, name in enumerate(_LONGEST)}
    places = {item: item.path.relative_to(_TESTS).as_posix() for item in items}
    for item, place in places.items():
        if item.get_closest_marker("rule") or place.startswith(_FAST):
            item.add_marker("fast")
    items.sort(key=lambda item: ranks.get(places[item], len(ranks)))


@pytest.fixture(autouse=True)
def _small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells as small as the models here; a user's are of 64 KiB and more."""
    monkeypatch.setenv("MEMMGR_PAGER_SMALL", "512")


@pytest.fixture(autouse=True)
def _stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that other files have imported are frozen (`_nothing_stays`), and each budget would look through them
    again.
    """
    from memmgr.runtime import session

    monkeypatch.setattr(session, "_thaw", lambda: None)


@pytest.fixture(autouse=True)
def _checked_graph(request: pytest.FixtureRequest) -> None:
    """The pager checks its graph after ops, in a fiftieth of the time (tests/pager/test_graph.py: after every op)."""
    place = request.path.relative_to(_TESTS).parts[0]
    if (native := sys.modules.get("memmgr.native.binding")) and native._loaded:
        native._loaded.set_graph_checks(0.02 if place in ("pager", "exactness") else 0.0)


@pytest.fixture
def large_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold that users have."""
    monkeypatch.delenv("MEMMGR_PAGER_SMALL")


@pytest.fixture(autouse=True)
def _no_compiled_code_stays() -> Iterator[None]:
    """Compiled code keeps the tensors that it was traced with, and the budgets of later tests would count them."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    # A frame that made no graph counts as well: modules are not named in a process that has compiled (runtime/left.py).
    if dynamo is not None and (dynamo.utils.counters["stats"]["unique_graphs"] or dynamo.utils.counters.get("frames")):
        dynamo.reset()
        dynamo.utils.counters.clear()
        gc.collect()


def _held() -> int:
    """Bytes of the tensors that Python knows of."""
    import torch

    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    sizes = {}
    for t in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse and others have no storage of their own
            storage = t.untyped_storage()
            sizes[storage._cdata] = 0 if storage.device.type == "meta" else storage.nbytes()
    return sum(sizes.values())


_before: tuple[str, int, int] = ("", 0, 0)  # the last file, the bytes held and the number of failed tests when it began


@pytest.fixture(autouse=True, scope="module")
def _nothing_stays(request: pytest.FixtureRequest) -> None:
    """Checks that a file leaves no tensors behind. The budgets of later files would count them, and their floors would
    not. Seen when the next file begins: until then pytest itself holds the last test's arguments.
    """
    global _before
    (file, before, failed), held = _before, _held()
    _before = (request.node.nodeid, held, request.session.testsfailed)
    if failed == request.session.testsfailed:  # a failed test's traceback holds its tensors
        assert held - before < 64 << 10, f"{held - before:,} bytes of tensors outlive the tests of {file}"
    # torch's optimizers import it, and each collection would go through it until the file ends.
    import torch._dynamo  # noqa: F401

    # Modules imported by now live to the end: half a million objects that no collection has to look at.
    gc.freeze()


@pytest.fixture
def beyond() -> Callable[[str], int]:
    """(size) -> a budget of that much more than the bytes left behind by other tests."""
    from budget.there import bytes_already_there

    from memmgr.config.sizes import parse_size

    there = bytes_already_there()
    return lambda size: there + parse_size(size)
