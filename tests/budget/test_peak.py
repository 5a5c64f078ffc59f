"""The peak stays inside the budget, by memmgr's own account and by the system's, seen from outside the process."""

import functools
from typing import Any

import pytest

from .outside import Seen, watch

ROOM_BYTES = 64_000_000
"""Bytes that a process may take over its budget: Python objects, mkldnn's scratch, thread stacks, the recorder's own."""

SIZES: dict[str, dict[str, int]] = {
    "gpt": {"layers": 3, "width": 256, "context": 256, "batch": 7},
    "convnet": {"width": 32, "stages": 2, "blocks": 4, "batch": 32},
}
STEPS = 3


def spec(model: str, how: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "sizes": SIZES[model], "how": how, "steps": STEPS, **more}


@functools.cache
def need(model: str) -> int:
    """The unmanaged run's peak, in bytes that torch's allocator holds."""
    seen = watch(spec(model, "measure", inside=True))
    return int(seen.stats["unmanaged_peak_bytes"])


@functools.cache
def plain(model: str) -> Seen:
    """The same script without memmgr."""
    seen = watch(spec(model, "plain"))
    assert not seen.result["memmgr"], "memmgr was imported by the run that is to do without it"
    return seen


def managed(model: str, share: float, how: str, env: bool = False, **more: Any) -> tuple[Seen, int]:
    """The run under a budget, checked for the properties of every such run."""
    budget = int(need(model) * share)
    # If the script fits into the budget by itself, that the managed one does too proves nothing.
    assert plain(model).rss_bytes >= 1.3 * budget, (
        f"the unmanaged {model} takes {plain(model).rss_bytes:,} bytes, not 30 % more than the budget of {budget:,}"
    )
    environment = {"MEMMGR_BUDGET": str(budget), "MEMMGR_CONF": "quiet:1"} if env else None
    seen = watch(spec(model, how, budget=budget, **more), environment)
    assert seen.stats["budget_bytes"] == budget
    peak = seen.stats["resident_bytes.peak"]
    assert 0 < peak <= budget, f"memmgr says {peak:,} bytes of {budget:,}"
    # The traceback of an exception holds the whole graph, which is read back when the budget ends (docs/develop/pager.md).
    most = (plain(model).rss_bytes if "fail" in more else budget) + ROOM_BYTES
    assert seen.rss_bytes <= most, f"seen from outside: {seen.rss_bytes:,} bytes over the start, at most {most:,}"
    assert seen.rss_bytes >= 0.5 * budget, "the samples missed the run"
    moved = seen.stats["evictions"] + seen.stats["offloads"]
    assert moved > 0, "nothing was evicted or offloaded, so nothing was tested"
    print(
        f"{model} {how} at {share:.0%}: budget {budget:,}, peak {peak:,}, rss {seen.rss_bytes:,}, unmanaged rss "
        f"{plain(model).rss_bytes:,}, {seen.samples} samples, longest gap {1e3 * seen.gap_seconds:.0f} ms"
    )
    return seen, budget


def same_bits(seen: Seen, model: str) -> None:
    assert seen.result["error"] is None
    assert seen.result["losses"] == plain(model).result["losses"]
    assert seen.result["digest"] == plain(model).result["digest"]


# A run takes five seconds: one model, whose convolutions take scratch memory of their own, in `make test`. The GPT is slow.
@pytest.mark.parametrize(
    ("model", "share", "inside"),
    [
        ("convnet", 0.5, True),
        ("convnet", 0.75, False),
        pytest.param("gpt", 0.75, False, marks=pytest.mark.slow),
        pytest.param("gpt", 0.5, True, marks=pytest.mark.slow),
    ],
)
def test_with(model: str, share: float, inside: bool) -> None:
    seen, _ = managed(model, share, "with", inside=inside)
    same_bits(seen, model)
    outside = seen.stats["outside_bytes"]
    if inside:
        assert outside < 100_000, f"{outside:,} bytes are counted as allocated before, but nothing was"
    else:
        assert outside > 0, "stock was not taken: the model was there before"


@pytest.mark.parametrize(
    ("model", "share"),
    [
        ("convnet", 0.5),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("gpt", 0.5), ("gpt", 0.75), ("convnet", 0.75))),
    ],
)
def test_environment(model: str, share: float) -> None:
    seen, _ = managed(model, share, "environment", env=True)
    assert seen.result["memmgr"], "MEMMGR_BUDGET was set, but nothing imported memmgr"
    same_bits(seen, model)


def test_environment_costs_nothing_when_unset() -> None:
    assert not plain("convnet").result["memmgr"]


def test_environment_with_a_bad_value_can_be_one_warning() -> None:
    """With `strict:off`; otherwise the process ends (test_api.py)."""
    seen = watch(spec("convnet", "environment") | {"steps": 1}, {"MEMMGR_BUDGET": "lots", "MEMMGR_CONF": "strict:off"})
    assert seen.result["error"] is None and seen.result["losses"] == plain("convnet").result["losses"][:1]
    warnings = [line for line in seen.text.splitlines() if "MEMMGR_BUDGET" in line]
    assert len(warnings) == 1, f"expected one warning, got {warnings}"
    assert "12GB" in warnings[0], "the warning does not show what would be accepted"


@pytest.mark.parametrize(
    ("model", "share", "where"),
    [
        ("convnet", 0.75, "backward"),
        pytest.param("convnet", 0.75, "forward", marks=pytest.mark.slow),  # its traceback holds less
        pytest.param("gpt", 0.5, "forward", marks=pytest.mark.slow),
        pytest.param("gpt", 0.5, "backward", marks=pytest.mark.slow),
    ],
)
def test_leaving_by_an_exception(model: str, share: float, where: str) -> None:
    seen, _ = managed(model, share, "with", fail=where)
    assert seen.result["error"] == "Deliberate"
    # The steps before the exception are the unmanaged ones.
    assert seen.result["losses"] == plain(model).result["losses"][: STEPS - 1]
