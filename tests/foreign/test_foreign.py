"""The runner of other projects' tests: the differences that it counts, and tests that end their process."""

import json
from pathlib import Path
from typing import Any

import pytest

from foreign import exclusions, page, run
from foreign.suites import SUITES, Suite

TESTS = """
import os
import memmgr, torch

def budget():
    return memmgr.stats().get("budget_bytes", 0)

def test_same():
    torch.testing.assert_close(torch.ones(40), torch.ones(40))

def test_other_bits_within_its_tolerance():
    torch.testing.assert_close(torch.ones(40) + (1e-7 if budget() else 0), torch.ones(40))

def test_other_gradient():
    x = torch.ones(40, requires_grad=True)
    (x * (2 if budget() else 3)).sum().backward()

def test_fails():
    assert not budget()

def test_crashes():
    if budget():
        os._exit(3)

def test_hangs():
    while budget():
        pass

def test_varies():
    assert torch.allclose(torch.tensor(float(os.getpid())), torch.tensor(float(os.getpid())))

def test_fails_plain():
    assert budget()

def test_after_all():
    assert torch.equal(torch.arange(40.0), torch.arange(40.0))
"""


def _line(outcome: str = "passed", entries: tuple[str, ...] = ("equal:1", "equal:2"), text: str = "") -> dict[str, Any]:
    return {"id": "t", "outcome": outcome, "entries": list(entries), "text": text}


def test_difference_is_empty_for_the_same_entries() -> None:
    assert run.difference(_line(), _line()) == ""


def test_difference_names_the_first_entry_with_other_bits() -> None:
    found = run.difference(_line(), _line(entries=("equal:1", "loss:3")))
    assert found == "other bits: 1 of 2 entries, entry 1 the first: equal"


def test_difference_in_an_entry_that_varies_plain_does_not_count() -> None:
    again, leaving = _line(entries=("equal:1", "equal:9")), _line(entries=("equal:1", "equal:3"))
    assert run.difference(_line(), leaving, again) == ""
    assert run.difference(_line(), _line(entries=("equal:4", "equal:3")), again) != ""


def test_difference_in_outcome_has_the_error() -> None:
    assert run.difference(_line(), _line("failed", (), "no room")) == "passed, then failed: no room"


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """One of a single file of tests."""
    monkeypatch.setattr(run, "BUILD", tmp_path)
    made = Suite("made", "a made one", ("test_made.py",))
    source = tmp_path / "made" / "source"
    source.mkdir(parents=True)
    (source / "test_made.py").write_text(TESTS)
    return made


def _write(suite: Suite, which: str, *found: dict[str, Any]) -> None:
    run.results(suite, which).write_text("".join(json.dumps(line) + "\n" for line in found))


def test_a_known_difference_is_counted_apart(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(suite, "plain", _line())
    _write(suite, "leaving", _line(entries=("equal:1", "equal:3")))
    assert list(run.judge(suite).different) == ["t"]
    entry = exclusions.Entry("^t$", "a reason")
    monkeypatch.setattr(run, "DIFFERENT", {suite.name: (entry,)})
    assert run.judge(suite).known == {"t": "a reason"} and not run.judge(suite).different


def test_a_line_that_was_cut_off_is_no_end(suite: Suite) -> None:
    run.results(suite, "plain").write_text(json.dumps(_line()) + '\n{"id": "u", "outcome": "pas')
    assert list(run.ended(run.results(suite, "plain"))) == ["t"]


@pytest.mark.slow
def test_a_suite_from_begin_to_verdict(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SECONDS", {"plain": 60, "leaving": 15})
    verdict = run.run_all(suite, 0)
    found = {name.rpartition("::")[2]: how for name, how in verdict.different.items()}
    assert sorted(found) == [
        "test_crashes",
        "test_fails",
        "test_hangs",
        "test_other_bits_within_its_tolerance",
        "test_other_gradient",
    ]
    assert "ended with 3" in found["test_crashes"] and "no end" in found["test_hangs"]
    assert (verdict.begun, verdict.plain_failures, verdict.varying, verdict.same) == (9, 1, 1, 2)


def test_the_page_has_every_suite_and_no_difference_without_a_reason() -> None:
    rows = [
        line.split(" | ") for line in page.PAGE.read_text().partition(page.MARK)[2].splitlines() if line[:2] == "| "
    ]
    header, *suites, together = rows
    assert [row[0].removeprefix("| ") for row in suites] == [suite.title for suite in SUITES.values()]
    assert int(together[header.index("begun")].replace(",", "")) >= 3000
    assert {row[header.index("different")] for row in suites} == {"0"}, "what differs is mended, or gets a reason"


def test_every_exclusion_has_a_suite_and_a_reason() -> None:
    for table in (exclusions.NOT_RUN, exclusions.DIFFERENT):
        assert set(table) <= set(SUITES)
        assert all(len(entry.reason) > 20 for entries in table.values() for entry in entries)
