"""Training on the accounting path: the same bits, within the budget, and one warning that says what is weaker."""

from __future__ import annotations

import json

import pytest

from .harness import run_child

WARNING = "The budget is kept by accounting before each op instead of in the allocator"


def _train(model: str, policy: str, fraction: float, **variables: str) -> dict[str, object]:
    done = run_child(["-W", "always", "train.py", model, policy, str(fraction)], shim=False, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(WARNING) == 1, done.stderr
    assert done.stderr.count("Warning:") == 1 and "RuntimeWarning: memmgr: MEMMGR_SHIM=0" in done.stderr, done.stderr
    got: dict[str, object] = json.loads(done.stdout)
    return got


@pytest.mark.parametrize("model", ["gpt", "conv"])
@pytest.mark.parametrize(
    ("policy", "fraction"), [("auto", 0.6), ("evict", 0.6), ("offload", 0.6), ("torture", 1.0)], ids=lambda v: str(v)
)
def test_same_bits_within_the_budget(model: str, policy: str, fraction: float) -> None:
    got = _train(model, policy, fraction)
    plain, measured, managed, limit = got["plain"], got["measured"], got["managed"], got["limit"]
    assert plain[:2] == measured[:2] == managed[:2]
    stats = managed[2]
    assert stats["passes"] == 3
    assert stats["evictions"] + stats["offloads"] > 0, "the case proves nothing"
    assert 0 < stats["floor_bytes"] <= stats["resident_bytes.peak"] <= limit
    if policy == "evict":
        assert stats["offloads"] == 0 and stats["recomputes"] > 0
    if policy == "offload":
        assert stats["evictions"] == 0 and stats["recomputes"] == 0


def test_without_the_core_library() -> None:
    """Not even the tier of the core: one in plain Python."""
    got = _train("gpt", "offload", 0.6, MEMMGR_CORE_LIB="/nonexistent/libmemmgr_core.so")
    assert got["plain"][:2] == got["managed"][:2]
    assert got["managed"][2]["reloads"] > 0


def test_below_the_floor_is_a_budget_error() -> None:
    done = run_child(["train.py", "gpt", "auto", "0.05"], shim=False)
    assert done.returncode != 0
    assert "BudgetError: DefaultCPUAllocator: can't allocate memory" in done.stderr
    assert "mallest budget that would have worked so far" in done.stderr


def test_peaks_agree_with_the_shim() -> None:
    """What was counted op by op is what the allocator counted, less what the ops took for themselves."""
    runs = [run_child(["train.py", "gpt", "auto", "1.0"], shim) for shim in (True, False)]
    assert all(run.returncode == 0 for run in runs), [run.stderr for run in runs]
    shim, py = (json.loads(run.stdout) for run in runs)
    assert shim["plain"][:2] == py["plain"][:2]
    exact, counted = (run["measured"][2]["unmanaged_peak_bytes"] for run in (shim, py))
    assert 0.85 * exact <= counted <= 1.02 * exact, (exact, counted)
