"""`floor_bytes` against the true floor, which `true_floor.py` measures without memmgr; and the memory that recording may keep."""

import functools
import gc
import pathlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from threads import one_thread  # noqa: F401  a fixture

import memmgr
from memmgr.native import binding

from .models import MODELS
from .there import bytes_already_there
from .true_floor import IdealManager, live_curve, true_floor

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 2


def run(name: str) -> list[float]:
    """Builds the model and takes the steps."""
    torch.manual_seed(0)
    training = MODELS[name]()
    return [training.step() for _ in range(STEPS)]


@dataclass(frozen=True)
class Truth:
    """Measured without memmgr."""

    peak_bytes: int
    floor_bytes: int
    losses: tuple[float, ...]


@functools.cache
def plain(name: str) -> list[float]:
    return run(name)


@functools.cache
def truth(name: str) -> Truth:
    losses: list[float] = []
    peak = live_curve(lambda: losses.extend(run(name))).peak_bytes
    again: list[float] = []
    floor = true_floor(lambda: again.extend(run(name)))
    assert again == losses, "the ideal manager changed the run"
    assert floor < 0.9 * peak, "nothing could leave: this model tests nothing"
    return Truth(peak, floor, tuple(losses))


def managed(name: str, limit: int | None, **options: Any) -> dict[str, Any]:
    """The run under a budget; same losses as without. Limit and figures do not include bytes that other tests left there."""
    want = plain(name)  # run before, so that the bytes it leaves are there already
    there = bytes_already_there()
    try:
        with memmgr.budget(None if limit is None else limit + there, quiet=True, **options) as mm:
            losses = run(name)
    except memmgr.BudgetError as error:
        assert str(error.floor_bytes) in str(error)
        error.floor_bytes -= there
        raise
    assert losses == want
    stats = mm.stats()
    for key in ("resident_bytes.peak", "floor_bytes", "unmanaged_peak_bytes"):
        stats[key] -= there
    return stats


def test_the_ideal_manager_by_hand() -> None:
    """A chain of sines, small enough to count: each saves its input, nothing else is held."""
    n, depth = 100_000, 10
    size = 4 * n

    def chain() -> None:
        x = torch.ones(n, requires_grad=True)
        y = x
        for _ in range(depth):
            y = y.sin()
        y.backward(torch.ones(n))

    # Unmanaged: x, all ys, the gradient that comes and the one that is made, cos(y).
    assert live_curve(chain).peak_bytes == pytest.approx(size * (1 + depth + 3), rel=0.1)
    # At best: x and the last y (which the program holds), the gradient that the caller passed, the running node's
    # saved input, its incoming and outgoing gradient and its cosine.
    assert size * 5 <= true_floor(chain) <= size * 7


def test_the_ideal_manager_counts_what_the_program_holds() -> None:
    n, depth = 100_000, 10

    def chain() -> None:
        y = torch.ones(n, requires_grad=True)
        kept = [y]
        for _ in range(depth):
            y = y.sin()
            kept.append(y)
        y.sum().backward()

    assert true_floor(chain) >= 4 * n * (depth + 1)


def test_the_ideal_manager_shares_what_is_saved_twice() -> None:
    """A product of a tensor with itself, saved twice by one node: its bytes are needed once."""
    n = 100_000

    def twice() -> None:
        y = torch.ones(n, requires_grad=True).sin()
        z = (y * y).sum()
        del y
        z.backward()

    floor = true_floor(twice)
    # The leaf, its gradient coming in (expanded: none), y once, two products of the gradient, their sum.
    assert floor <= 4 * n * 5.1, f"{floor:,}"


def test_the_ideal_manager_keeps_the_bits() -> None:
    def gradients(ideal: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        training = MODELS["lstm"]()
        if ideal:
            with IdealManager():
                training.loss().backward()
        else:
            training.loss().backward()
        return [p.grad for p in training.model.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


# tests/pager/test_floor.py trains each model with a twentieth over its floor. The ideal manager takes seconds for most models.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("convnet", "unet"))) for name in MODELS]
)
def test_a_tenth_over_the_floor_works(name: str) -> None:
    assert truth(name).losses == tuple(plain(name))
    limit = int(1.10 * managed(name, None)["floor_bytes"])
    stats = managed(name, limit)
    assert stats["resident_bytes.peak"] <= limit


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3))]
)  # near copies
def test_a_tenth_over_the_floor_works_whatever_is_dropped(seed: int) -> None:
    """A recomputed tensor takes room, too. Here the disk seems to be free at times and hopeless at others, so that any
    tensor may have to be made again beside any other, as happens on a machine that is busy."""
    seems = random.Random(seed)

    def link_changes(*_: object) -> None:
        binding.load().set_link(seems.choice((1e-3, 1e-15)))  # s a byte

    limit = int(1.10 * managed("gpt", None)["floor_bytes"])
    there = bytes_already_there()
    with memmgr.budget(limit + there, quiet=True) as mm:
        torch.manual_seed(0)
        training = MODELS["gpt"]()
        for module in training.model.modules():
            module.register_forward_hook(link_changes)
        losses = [training.step() for _ in range(STEPS)]
    assert losses == plain("gpt")
    assert mm.stats()["resident_bytes.peak"] <= limit + there


def roots_in_a_loop() -> None:
    """A no-grad 16 MB tensor is reduced and added in a loop. In plain torch one is alive at a time."""
    x = torch.ones(1000, requires_grad=True)
    for _ in range(3):
        y = x
        for _ in range(8):
            with torch.no_grad():
                big = torch.randn(4_000_000)
            y = y + big.sum()
            del big
        y.square().sum().backward()


def carried_state() -> None:
    """60 passes of a recurrent net whose state is carried, detached, from one to the next."""
    torch.manual_seed(0)
    cell = torch.nn.RNNCell(64, 64)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.01)
    state = torch.zeros(256, 64)
    for _ in range(60):  # its chain is longer than recipes may be
        for _ in range(4):
            state = cell(torch.randn(256, 64), state)
        state.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = state.detach()


def carried_loss() -> None:
    """A running mean of losses, as logging keeps it: detached values that each name a pass."""
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    running = torch.zeros(())
    for _ in range(50):
        loss = model(torch.randn(1024, 256)).square().mean()
        running = 0.9 * running + 0.1 * loss.detach()
        loss.backward()
        model.zero_grad()


def no_backward() -> None:
    """Evaluation that forgets `no_grad`: graphs are built and dropped."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    total = 0.0
    for _ in range(30):
        total += model(torch.randn(1024, 256)).square().mean().item()


def views_of_a_batch() -> None:
    """Slices of a large batch in turn: each names it."""
    data = torch.randn(4_000_000)
    w = torch.ones(1000, requires_grad=True)
    for i in range(20):
        (data[i * 1000 : (i + 1) * 1000] * w).sum().backward()
        data = data + 0.0


def draws_thrown_away() -> None:
    """Each seeded op has a recipe with the generator's state, 5 KB: thousands of results that nobody keeps."""
    w = torch.ones(1000, requires_grad=True)
    probabilities = torch.ones(100)
    for _ in range(2000):
        torch.multinomial(probabilities, 4, replacement=True)
    w.sum().backward()


LOOPS: dict[str, Callable[[], object]] = {
    "draws thrown away": draws_thrown_away,
    "roots in a loop": roots_in_a_loop,
    "carried state": carried_state,
    "carried loss": carried_loss,
    "no backward": no_backward,
    "views of a batch": views_of_a_batch,
    **{name: functools.partial(run, name) for name in MODELS},
}


# One training; the loops keep more than trainings do, and the floors of all trainings are measured above.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MODELS and name != "lstm")) for name in LOOPS]
)
def test_recording_keeps_nothing_alive(name: str) -> None:
    """Live bytes under an unlimited budget, by our books and by torch's profiler, are at most plain torch's and 1 %."""
    loop = LOOPS[name]
    torch.manual_seed(0)
    want = live_curve(loop).peak_bytes
    there = bytes_already_there()
    torch.manual_seed(0)
    with memmgr.budget(None, quiet=True) as mm:
        loop()
    got = mm.stats()["resident_bytes.peak"] - there
    # Blocks are rounded up to 512 bytes.
    assert got <= 1.01 * want + 100_000, f"plain {want:,}, recorded {got:,}"
    assert mm.stats()["recorded_ops"] > 0, "nothing was recorded, so nothing was tested"
    gc.collect()
    torch.manual_seed(0)

    def managed_loop() -> None:
        with memmgr.budget(None, quiet=True):
            loop()

    seen = live_curve(managed_loop).peak_bytes
    assert 0.9 * want <= seen <= 1.01 * want + 100_000, f"plain {want:,}, the profiler saw {seen:,}"


@pytest.mark.parametrize("name", ["roots in a loop", "carried state", "views of a batch"])
def test_what_recording_keeps_never_costs_the_run(name: str) -> None:
    """Roots that only recipes hold are evicted first: a run that fits without memmgr fits with it, and without a tier."""
    torch.manual_seed(0)
    want = live_curve(LOOPS[name]).peak_bytes
    limit = int(1.05 * want) + 100_000 + bytes_already_there()
    torch.manual_seed(0)
    with memmgr.budget(limit, disk=False, policy="evict", quiet=True) as mm:
        LOOPS[name]()
    assert mm.stats()["resident_bytes.peak"] <= limit


def dropouts() -> list[float]:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(3):
        layers += [
            torch.nn.Linear(32, 64),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(64, 32),
            torch.nn.Tanh(),
        ]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4096, 32)
    losses = []
    for _ in range(5):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def free_dropouts() -> tuple[list[float], int, int]:
    """The losses without a budget; floor and need in bytes, beyond those left behind by other tests."""
    want = dropouts()
    gc.collect()
    there = bytes_already_there()
    with memmgr.budget("1GB", quiet=True) as free:
        dropouts()
    gc.collect()
    return want, free.stats()["floor_bytes"] - there, free.stats()["unmanaged_peak_bytes"] - there


@pytest.mark.parametrize("share", [1.02, pytest.param(1.1, marks=pytest.mark.slow)])  # the smaller one has less room
def test_near_the_floor_dropout_is_not_made_again_where_that_needs_more_room_than_there_is(share: float) -> None:
    """Made again, a layer's dropout needs mask and input beside the tensors of backward: more than any step holds otherwise."""
    want, floor, need = free_dropouts()
    assert floor < 0.6 * need, "nothing could leave"
    with memmgr.budget(bytes_already_there() + int(share * floor), quiet=True) as tight:
        assert dropouts() == want
    assert tight.stats()["offloads"] > 0


def test_near_the_floor_a_full_disk_tier_is_no_reason_to_make_an_input_again_and_again(tmp_path: pathlib.Path) -> None:
    """An op's input that is made first and has nowhere to wait is dropped for the next one, and so on for ever."""
    want, floor, _ = free_dropouts()
    limit = bytes_already_there() + int(1.5 * floor)
    with memmgr.budget(limit, disk=(tmp_path, "300kB"), quiet=True, _plan=False) as tight:
        binding.load().set_link(1.0)  # seconds a byte: each cell that can be dropped is
        assert dropouts() == want
    assert tight.stats()["tier_errors"] > 0, "the tier was not full"
