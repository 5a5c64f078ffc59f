"""Each part earns its place: recomputation alone, offloading alone, the choice between them, managed tensors, a bad disk."""

import errno
import functools
import gc
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memmgr
from memmgr.api import budget as budgets
from memmgr.native import binding

from . import models
from .models import Training
from .outside import Seen, watch

STEPS = 3
BOTH = ["gpt", "convnet"]
SMALL = "a convnet of one stage"  # its plans take a tenth of the other's time
MODELS = {**models.MODELS, SMALL: functools.partial(models.convnet, stages=1, blocks=2, batch=16)}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()


def bits(training: Training) -> list[bytes]:
    """The bits of all tensors that training has changed."""
    tensors = [*training.model.parameters(), *training.model.buffers(), torch.get_rng_state()]
    for state in training.optimizer.state_dict()["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            moment = state[name]
            tensors.append(moment.to_tensor() if isinstance(moment, memmgr.ManagedTensor) else moment)
    return [t.detach().contiguous().numpy().tobytes() for t in tensors]


def train(name: str, steps: int = STEPS) -> tuple[list[float], list[bytes]]:
    torch.manual_seed(0)
    training = MODELS[name]()
    losses = []
    for _ in range(steps):
        losses.append(training.step())
        runtime = budgets.current()
        if runtime is not None:
            runtime.plans.wait()  # the plan that is being made is there
    return losses, bits(training)


@functools.cache
def want(name: str, steps: int = STEPS) -> tuple[list[float], list[bytes]]:
    return train(name, steps)


@functools.cache
def need(name: str) -> int:
    with memmgr.budget(None, quiet=True) as mm:
        train(name)
    return int(mm.stats()["unmanaged_peak_bytes"])


def at(name: str, share: float, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """Trains under a share of its need; the same bits, inside the budget."""
    want(name, steps)
    limit = int(need(name) * share)
    gc.collect()
    with memmgr.budget(limit, quiet=True, **options) as mm:
        got = train(name, steps)
    assert got == want(name, steps), "other bits"
    stats = mm.stats()
    assert stats["resident_bytes.peak"] <= limit
    return stats


@pytest.mark.parametrize("name", BOTH)
def test_offload_alone(name: str) -> None:
    stats = at(name, 0.5, policy="offload")
    assert stats["recomputes"] == 0 and stats["evictions"] == 0
    assert stats["offloads"] > 0 and stats["reloads"] > 0
    # No more bytes are reloaded than offloaded, unless clean copies were dropped.
    assert stats["reload_bytes"] <= stats["offload_bytes"] * 1.01 or stats["clean_drops"] > 0


@pytest.mark.parametrize("name", BOTH)
def test_evict_alone(name: str) -> None:
    stats = at(name, 0.5, policy="evict")
    assert stats["offloads"] == 0 and stats["reloads"] == 0 and stats["write_backs"] == 0
    assert stats["evictions"] > 0 and stats["recomputes"] > 0
    assert stats["recompute_seconds"] > 0


_ONE = [
    pytest.param("gpt", marks=pytest.mark.slow),
    "convnet",
]  # `test_evict_alone` and `test_offload_alone` run both models


@pytest.mark.parametrize("name", _ONE)
@pytest.mark.parametrize("policy", ["evict", "auto"])
def test_without_a_disk_tensors_are_evicted(policy: str, name: str) -> None:
    stats = at(name, 0.5, policy=policy, disk=False)
    assert stats["evictions"] > 0 and stats["offloads"] == 0


def test_more_saved_means_more_moved() -> None:
    half, most = at("gpt", 0.5, policy="evict"), at("gpt", 0.9, policy="evict")
    assert most["evicted_bytes"] < half["evicted_bytes"]


SIZES: dict[str, dict[str, int]] = {
    "gpt": {"layers": 4, "width": 192, "context": 128, "batch": 12},
    "convnet": {"width": 24, "stages": 2, "blocks": 4, "batch": 24},
}


@functools.cache
def without_a_disk(name: str) -> Seen:
    spec = {"model": name, "sizes": SIZES[name], "steps": STEPS, "inside": True}
    return watch(spec | {"how": "measure", "options": {"disk": False}})


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.slow), "convnet"])  # the same tier
def test_bytes_written_as_the_system_counts_them(name: str, tmp_path: Path) -> None:
    spec = {"model": name, "sizes": SIZES[name], "steps": STEPS, "inside": True}
    measured = without_a_disk(name)
    budget = measured.stats["unmanaged_peak_bytes"] // 2
    seen = watch(spec | {"how": "with", "budget": budget, "options": {"policy": "offload", "disk": str(tmp_path)}})
    # O_DIRECT passes by the page cache, so the block layer's figure is exact; without it, it may be written much later.
    field = "write_bytes" if seen.result["tier"]["direct"] else "wchar"
    probed = seen.result["tier_at_start"]["written_bytes"]  # to measure the link
    assert probed > 0
    written = seen.result["io"][field] - measured.result["io"][field] - probed
    said = seen.stats["offload_bytes"]
    print(f"{name}: {field} {written:,}, offload_bytes {said:,}")
    assert said > 20_000_000, "too little was offloaded for the comparison to mean anything"
    assert written == pytest.approx(said, rel=0.05)
    # And it is the tier that counts the same.
    assert seen.result["tier"]["written_bytes"] - probed == pytest.approx(said, rel=0.05)


def test_evict_alone_writes_nothing() -> None:
    spec = {"model": "convnet", "sizes": SIZES["convnet"], "steps": STEPS, "inside": True}
    measured = without_a_disk("convnet")
    budget = measured.stats["unmanaged_peak_bytes"] // 2
    seen = watch(spec | {"how": "with", "budget": budget, "options": {"policy": "evict"}})
    assert seen.stats["evictions"] > 0
    for field in ("write_bytes", "wchar"):
        assert seen.result["io"][field] - measured.result["io"][field] < 1_000_000


def offloaded_share(stats: dict[str, Any]) -> float:
    """The share of the bytes that left that was offloaded."""
    return float(stats["offload_bytes"] / max(1, stats["offload_bytes"] + stats["evicted_bytes"]))


@pytest.mark.usefixtures("large_only")  # the time of a link for a small cell is its latency, which no throttle changes
@pytest.mark.parametrize(
    "name", [SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in BOTH)]
)  # half a minute
def test_auto_chooses_by_the_link(name: str) -> None:
    """Ops take ticks of a counter, because measured times decide by chance in a run as short as this. The disk's time is
    measured, and another process that writes to it makes one run in some wrong, so the median of three counts.
    """
    binding.load().count_ticks(3_000_000)
    try:
        seen = {
            speed: statistics.median(
                offloaded_share(at(name, 0.5, steps=6 if name == SMALL else 8, policy="auto", _throttle=speed))
                for _ in range(3)
            )
            for speed in (50_000_000, 2_000_000_000)
        }
    finally:
        binding.load().count_ticks(0)
    slow, fast = seen.values()
    assert fast > slow + 0.2, f"the choice does not depend on the link: {seen}"


def wide_training(manage: bool, steps: int = 4) -> tuple[int, list[float], list[bytes], int]:
    """Trains an MLP of 2.1 M parameters, its moments managed or not.

    Returns:
        Resident bytes after the last step, losses, bits, parameters.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    x = torch.randn(8, 512)
    training = Training(model, lambda: model(x).square().mean())
    losses = []
    for _ in range(steps):
        losses.append(training.step())
        if manage:
            for state in training.optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = memmgr.manage(state[name])
    native = memmgr.api.budget.current().native  # type: ignore[union-attr]
    parameters = sum(p.numel() for p in model.parameters())
    deadline = time.monotonic() + (15.0 if manage else 0.0)
    # A cell is dropped as soon as its write has ended, not before.
    while native.resident() > 4.1 * parameters and time.monotonic() < deadline:
        time.sleep(0.02)
    return native.resident(), losses, bits(training), parameters


def test_moments_live_on_disk_between_steps() -> None:
    with memmgr.budget("8GB", quiet=True):
        resident, losses, left, parameters = wide_training(False)
    gc.collect()
    with memmgr.budget("8GB", quiet=True):
        less, losses_managed, left_managed, _ = wide_training(True)
    assert losses_managed == losses and left_managed == left, "other bits"
    saved = resident - less
    print(f"{parameters:,} parameters: resident {resident:,}, managed {less:,}: {saved / parameters:.2f} bytes each")
    assert saved == pytest.approx(8 * parameters, rel=0.02)


def test_managed_moments_after_the_budget() -> None:
    """Leaving the context brings them back: they are tensors with the right values."""
    with memmgr.budget("8GB", quiet=True):
        t = memmgr.manage(torch.arange(1_000_000, dtype=torch.float32))
        t.mul_(2.0)
        time.sleep(0.2)
    assert torch.equal(t + 0.0, torch.arange(1_000_000, dtype=torch.float32) * 2)
    t.add_(1.0)
    assert t[10].item() == 21.0


def test_manage_without_a_budget() -> None:
    t = memmgr.manage(torch.ones(1000))
    t.add_(1.0)
    assert t.shape == (1000,) and t.sum().item() == 2000.0
    assert memmgr.manage(t) is t


@pytest.mark.parametrize(
    ("thing", "error"),
    [
        ([1.0], TypeError),
        (torch.ones(3).to_sparse(), TypeError),
        (torch.ones(3, dtype=torch.cfloat).conj(), TypeError),
        (torch.ones(3, dtype=torch.cfloat).conj().imag, TypeError),
        (torch.ones(3, requires_grad=True), ValueError),
    ],
)
def test_what_cannot_be_managed(thing: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"memmgr\.manage takes"):
        memmgr.manage(thing)


def survives(name: str, share: float, **options: Any) -> tuple[dict[str, Any], RuntimeError | OSError | None]:
    """Trains under a disk that will fail: the right bits, or a clear error after which the model still trains."""
    want(name)
    limit = int(need(name) * share)
    inject = options.pop("inject", None)
    torch.manual_seed(0)
    training = MODELS[name]()
    losses: list[float] = []
    error: RuntimeError | OSError | None = None  # over the pager a failed read of an op is torch's error
    with memmgr.budget(limit, quiet=True, **options) as mm:
        if inject:
            memmgr.api.budget.current().native.tier_inject(**inject)  # type: ignore[union-attr]
        try:
            for _ in range(STEPS):
                losses.append(training.step())
        except (RuntimeError, OSError) as e:
            error = e.with_traceback(None)
            training.optimizer.zero_grad()
    assert losses == want(name)[0][: len(losses)], "a wrong loss before the error"
    if error is None:
        assert bits(training) == want(name)[1]
    else:
        # Nothing is lost: the parameters are those after the last whole step, and training goes on.
        for parameter in training.model.parameters():
            assert torch.isfinite(parameter).all()
        gc.collect()
        assert training.step() > 0
    return mm.stats(), error


def test_a_full_disk_is_met_by_eviction(tmp_path: Path) -> None:
    stats, error = survives("gpt", 0.5, policy="auto", disk=(tmp_path, "8MB"))
    assert error is None, f"auto could have evicted: {error}"
    assert stats["evictions"] > 0
    assert stats["tier_bytes.peak"] <= 8_000_000


def test_what_a_budget_could_not_bring_back_is_no_fault_of_the_next() -> None:
    """Each read of the lost tensor raises, as long as the tensor is held."""
    lost = torch.arange(50_000.0)
    with (
        pytest.raises(RuntimeError, match="reading 200000 bytes back"),
        memmgr.budget("1GB", policy="offload", quiet=True),
    ):
        native = memmgr.api.budget.current().native  # type: ignore[union-attr]
        assert native.adopt(lost) and native.take_away(lost)
        native.tier_inject(read=errno.EIO)
    for _ in range(2):
        with memmgr.budget("1GB", quiet=True):
            assert torch.ones(50_000).exp().sum() > 0
            with pytest.raises(RuntimeError, match="were lost when an earlier budget could not bring them back"):
                lost.sum()
    with pytest.raises(RuntimeError, match="are not in memory"):
        lost.sum()


def test_a_full_disk_with_nothing_else(tmp_path: Path) -> None:
    stats, error = survives("gpt", 0.5, policy="offload", disk=(tmp_path, "8MB"))
    assert stats["tier_errors"] > 0
    assert isinstance(error, torch.OutOfMemoryError)
    assert "disk" in str(error) and "space" in str(error), f"the error does not say that the disk is full: {error}"


# Each code with each model and each place once; the other pairs are slow.
@pytest.mark.parametrize(
    ("name", "after", "code"),
    [
        pytest.param(
            name, after, code, marks=[pytest.mark.slow] * ((name == "gpt") == bool(after) == (code == errno.EIO))
        )
        for name in BOTH
        for after in (0, 5)
        for code in (errno.EIO, errno.ENOSPC)
    ],
)
def test_writes_that_fail(name: str, after: int, code: int) -> None:
    stats, error = survives(name, 0.5, policy="auto", inject={"write": code, "after_writes": after})
    assert error is None, f"auto could have evicted: {error}"
    if not stats["tier_errors"]:
        # A failed write ahead of need is not reported if it was taken back, because the tensor was written to or ended. A disk
        # that is full is asked again once clean copies have been given up.
        mended = code == errno.ENOSPC and stats["reloads"] > 0
        assert stats["offloads"] <= after or stats["write_backs"] > 0 or mended, "the injected error went unnoticed"


def test_a_full_disk_is_asked_again_once_clean_copies_are_given_up() -> None:
    first, second = torch.rand(50_000), torch.rand(50_000)
    want = first.tolist(), second.tolist()
    with memmgr.budget("1GB", quiet=True) as mm:
        native = memmgr.api.budget.current().native  # type: ignore[union-attr]
        for tensor in (first, second):
            assert native.adopt(tensor)
        for copies in (0, 1):  # of the resident cells
            native.tier_inject(write=errno.ENOSPC)
            assert (native.take_away(second, 1) > 0) == bool(copies)
            assert mm.stats()["tier_errors"] == 1
            native.tier_inject()
            assert copies or native.take_away(first, 1) > 0
            assert (first.tolist(), second.tolist()) == want


def test_writes_that_fail_with_nothing_else() -> None:
    stats, error = survives("gpt", 0.5, policy="offload", inject={"write": errno.EIO, "after_writes": 3})
    assert stats["tier_errors"] > 0
    if error is not None:  # one failed write may be survived; a clear error is fine too
        assert "disk" in str(error) and "nput/output error" in str(error)


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("policy", ["auto", "offload"])
def test_reads_that_fail(policy: str, after: int) -> None:
    """A tensor with a recipe is recomputed; otherwise the error names the cause. Never a wrong gradient."""
    stats, error = survives("gpt", 0.5, policy=policy, inject={"read": errno.EIO, "after_reads": after})
    if error is not None:
        assert "disk tier" in str(error) and "nput/output error" in str(error), f"not clear: {error}"
    elif stats["reloads"] > after:
        assert stats["tier_errors"] > 0
