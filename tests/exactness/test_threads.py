"""Training in threads, two lock inversions, Ctrl-C, and a soak.

Programs that could hang run in a process of their own: ``python -m exactness.test_threads NAME``.
"""

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from . import cases, children
from .harness import HUGE_BYTES, MODES, CaseFunction, Record, Scope, assert_same, check, global_state

THREADED: dict[str, CaseFunction] = {}


def threaded(fn: CaseFunction) -> CaseFunction:
    THREADED[fn.__name__] = fn
    return fn


def join(threads: list[threading.Thread], errors: list[BaseException]) -> None:
    for t in threads:
        t.join(60)
        assert not t.is_alive(), f"{t.name} hangs"
    if errors:
        raise errors[0]


def spawn(bodies: list[Callable[[], None]]) -> tuple[list[threading.Thread], list[BaseException]]:
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(b,), name=f"trainer-{i}") for i, b in enumerate(bodies)]
    for t in threads:
        t.start()
    return threads, errors


class Turns:
    """Makes two threads that share the default generator deterministic: each phase waits for its turn."""

    def __init__(self, parties: int) -> None:
        self._parties, self._turn, self._cv = parties, 0, threading.Condition()

    @contextlib.contextmanager
    def turn(self, who: int) -> Any:
        with self._cv:
            assert self._cv.wait_for(lambda: self._turn % self._parties == who, 60), "waited a minute for its turn"
        try:
            yield
        finally:
            with self._cv:
                self._turn += 1
                self._cv.notify_all()


@threaded
def dropout_in_two_threads_by_turns(seed: int, scope: Scope) -> Record:
    """Forward A, forward B, backward A, backward B: each recompute happens with the shared generator moved by the other."""
    models = [cases.MLP(), cases.MLP()]
    data = [[torch.randn(128, 32) for _ in range(5)] for _ in models]
    losses: list[list[torch.Tensor]] = [[], []]
    turns, record = Turns(2), Record()

    def body(who: int) -> None:
        opt = cases.adamw(models[who])
        for x in data[who]:
            with turns.turn(who):
                loss = models[who](x).square().mean()
            with turns.turn(who):
                loss.backward()
                losses[who].append(loss.detach())
                opt.step()
                opt.zero_grad()

    with scope():
        join(*spawn([lambda: body(0), lambda: body(1)]))
    for who, model in enumerate(models):
        for i, loss in enumerate(losses[who]):
            record.put(f"loss {who} {i}", loss)
        record.model(model, f"model {who}")
    record.rng()
    return record


@threaded
def two_threads_at_once_with_own_generators(seed: int, scope: Scope) -> Record:
    models, record = [cases.MLP(p=0.0), cases.UNet()], Record()
    models[1].head.register_forward_pre_hook(lambda m, a: None)
    met = threading.Barrier(2)  # both hold the tensors that their passes saved, so that half of the need always binds

    def body(who: int) -> None:
        try:
            train(who)
        except BaseException:
            met.abort()
            raise

    def train(who: int) -> None:
        g = torch.Generator().manual_seed(seed + who)
        model, opt = models[who], cases.sgd(models[who])
        for _ in range(5):
            x = torch.randn((96, 32) if who == 0 else (2, 3, 16, 16), generator=g)
            keep = torch.empty_like(x).bernoulli_(0.9, generator=g)
            h = _without_dropout(model)(x * keep) if who else model(x * keep)
            noise = torch.rand(h.shape, generator=g)
            loss = (h.sigmoid() * noise).square().mean()
            met.wait(60)
            loss.backward()
            opt.step()
            opt.zero_grad()

    with scope():
        join(*spawn([lambda: body(0), lambda: body(1)]))
    for who, model in enumerate(models):
        record.model(model, f"model {who}")
    record.rng()
    return record


def _without_dropout(model: cases.UNet) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in model.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = model.middle(x)
        for up, merge in zip(model.up, model.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], 1))
        return model.head(x)

    return run


@threaded
def backward_in_another_thread(seed: int, scope: Scope) -> Record:
    """Forward in the main thread with backward in a worker, and the other way round."""
    model, record = cases.MLP(), Record()
    opt = cases.adamw(model)
    with scope():
        for step in range(6):
            x = torch.randn(128, 32)
            box: list[torch.Tensor] = []
            if step % 2:
                join(*spawn([lambda: box.append(model(x).square().mean())]))
                box[0].backward()
            else:
                box.append(model(x).square().mean())
                join(*spawn([lambda: box[0].backward()]))
            record.losses(box.pop().detach())
            opt.step()
            opt.zero_grad()
    return record.ended(model)


@threaded
def thread_older_than_the_budget(seed: int, scope: Scope) -> Record:
    """A thread that was running before the budget opened trains too: its tensors need not leave, but its bits must hold."""
    old, new, record = cases.MLP(p=0.0), cases.MLP(), Record()
    begin = threading.Event()

    def body() -> None:
        assert begin.wait(60)
        g = torch.Generator().manual_seed(1)
        opt = cases.sgd(old)
        for _ in range(6):
            old(torch.randn(64, 32, generator=g)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    threads, errors = spawn([body])
    opt = cases.sgd(new)
    with scope():
        begin.set()
        for _ in range(6):
            new(torch.randn(128, 32)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        join(threads, errors)
    record.model(old, "old")
    record.model(new, "new")
    record.rng()
    return record


@threaded
def thread_outlives_the_budget(seed: int, scope: Scope) -> Record:
    """The context is left while a thread of it is between its forward and its backward."""
    model, other, record = cases.MLP(), cases.MLP(p=0.0), Record()
    ready, left = threading.Event(), threading.Event()

    def body() -> None:
        g = torch.Generator().manual_seed(1)
        for step in range(6):
            loss = other(torch.randn(64, 32, generator=g)).square().mean()
            if step == 3:
                ready.set()
                assert left.wait(60)
            loss.backward()

    with scope():
        threads, errors = spawn([body])
        for _ in range(3):
            model(torch.randn(128, 32)).square().mean().backward()
        assert ready.wait(60)
    left.set()
    join(threads, errors)
    record.model(model)
    record.model(other, "other")
    record.rng()
    return record


@threaded
def data_parallel_threads(seed: int, scope: Scope) -> Record:
    """One model, replicas by thread (as ``parallel_apply`` does), one backward through all of them."""
    model, record = cases.MLP(p=0.0), Record()
    opt = cases.sgd(model)
    with scope():
        for _ in range(5):
            x = torch.randn(3, 64, 32)
            parts: dict[int, torch.Tensor] = {}
            # The batch norm buffers are shared: one after the other, each in its own thread.
            for i in range(3):
                join(*spawn([lambda i=i: parts.__setitem__(i, model(x[i]))]))
            loss = torch.cat([parts[i] for i in range(3)]).square().mean()
            del parts
            loss.backward()
            opt.step()
            opt.zero_grad()
            record.losses(loss.detach())
    del loss
    return record.ended(model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", THREADED)
def test_same_bits(name: str, mode: str) -> None:
    loop_only = name.startswith(("thread_older", "thread_outlives"))
    if loop_only and mode != "torture" and not mode.endswith("@100"):
        pytest.skip("what this thread holds cannot leave, or leaves the budget's reach: only the bits are under test")
    if loop_only:
        from .harness import managed, reference

        got = managed(THREADED[name], HUGE_BYTES, mode.partition("@")[0], place="loop")
        assert_same(reference(THREADED[name]), got.record, mode)
        return
    # The bytes that two threads hold at the same time vary from run to run, and with them whether three quarters bind.
    by_luck = name.startswith("two_threads_at_once") and mode.endswith("@75")
    check(THREADED[name], mode, moves=not by_luck)


SCRIPTS: dict[str, Callable[..., None]] = {}


def script(fn: Callable[..., None]) -> Callable[..., None]:
    SCRIPTS[fn.__name__] = fn
    return fn


def _graph(w: torch.Tensor, x: torch.Tensor, layers: int = 8) -> torch.Tensor:
    h = x
    for _ in range(layers):
        h = F.dropout((h @ w).tanh(), 0.1)
    return h.square().mean()


def _need(step: Callable[[], None]) -> tuple[int, int]:
    import memmgr

    with memmgr.budget(HUGE_BYTES, quiet=True) as mm:
        for _ in range(3):
            step()
    stats = mm.stats()
    return int(stats["unmanaged_peak_bytes"]), int(stats["floor_bytes"])


@script
def generator_mutex_against_the_gil(policy: str) -> None:
    """``multinomial`` mallocs under the generator's mutex while another thread, with the GIL, wants that mutex."""
    import memmgr

    w, x = torch.randn(256, 256, requires_grad=True), torch.randn(1024, 256)
    probabilities = torch.rand(400_000)

    def step() -> None:
        _graph(w, x).backward()

    w.grad = torch.zeros_like(w)
    peak, floor = _need(step)
    # The probabilities, and a cumulative distribution in each of the two samplers.
    limit = max(int(floor * 1.1), int(peak * 0.6)) + 3 * probabilities.nbytes
    stop = threading.Event()
    counts = {"sampled": 0, "asked": 0, "out of memory": 0}

    def sample() -> None:
        while not stop.is_set():
            try:
                torch.multinomial(probabilities, 64, replacement=True)
                counts["sampled"] += 1
            except torch.OutOfMemoryError:
                counts["out of memory"] += 1

    def ask() -> None:
        while not stop.is_set():
            torch.get_rng_state()
            torch.set_rng_state(torch.get_rng_state())
            counts["asked"] += 1
            if counts["asked"] % 16 == 0:
                time.sleep(0.0002)  # let the trainer have the GIL now and then

    with memmgr.budget(limit, policy=policy, quiet=True) as mm:
        threads, errors = spawn([sample, sample, ask])
        end = time.monotonic() + 60
        passes = 0
        while time.monotonic() < end and (passes < 6 or counts["sampled"] < 40 or counts["asked"] < 200):
            step()
            passes += 1
        stop.set()
        join(threads, errors)
    stats = mm.stats()
    print(counts, passes, stats["evictions"], stats["offloads"])
    assert passes >= 6 and counts["sampled"] >= 40 and counts["asked"] >= 200
    assert stats["evictions"] + stats["offloads"] > 0, "no reclaim, so nothing was tested"


@script
def seeded_recipe_inside_the_generators_mutex(policy: str) -> None:
    """One thread: ``multinomial``'s own malloc reclaims cells that seeded ops made. Replaying one there would deadlock on itself."""
    import memmgr

    w, x = torch.randn(256, 256, requires_grad=True), torch.randn(1024, 256)
    probabilities = torch.rand(500_000)

    def step() -> torch.Tensor:
        loss = _graph(w, x)
        torch.multinomial(probabilities, 32, replacement=True)
        loss.backward()
        grad = w.grad.clone()
        w.grad = None
        return grad

    torch.manual_seed(3)
    want = [step() for _ in range(12)]
    peak, floor = _need(lambda: (step(), None)[1])
    torch.manual_seed(3)
    with memmgr.budget(max(int(floor * 1.1), int(peak * 0.5)), policy=policy, quiet=True) as mm:
        for i, grad in enumerate(want):
            assert torch.equal(step(), grad), f"pass {i}"
    stats = mm.stats()
    print(
        {
            k: stats[k]
            for k in (
                "budget_bytes",
                "unmanaged_peak_bytes",
                "floor_bytes",
                "resident_bytes.peak",
                "evictions",
                "offloads",
            )
        },
        peak,
        floor,
    )
    assert stats["evictions"] + stats["offloads"] > 0, "no reclaim, so nothing was tested"


@script
def nothing_to_give_while_the_mutex_is_held(policy: str) -> None:
    """Nothing can be reclaimed and Python cannot be asked (its GIL holder waits for the mutex): out of memory, not a hang."""
    import memmgr

    w = torch.randn(64, 64, requires_grad=True)
    probabilities = torch.rand(1_000_000)
    held = [torch.zeros(1 << 18) for _ in range(8)]
    (w @ w).sum().backward()
    resident = 8 * (1 << 20) + probabilities.nbytes
    stop = threading.Event()
    with memmgr.budget(resident + (3 << 20), policy=policy, disk=False, quiet=True):
        loss = (w.exp() @ w).tanh().sum()

        def ask() -> None:
            while not stop.is_set():
                torch.set_rng_state(torch.get_rng_state())

        threads, errors = spawn([ask])
        failures = 0
        for _ in range(5):
            try:
                torch.multinomial(probabilities, 64, replacement=True)
            except torch.OutOfMemoryError:
                failures += 1
        stop.set()
        join(threads, errors)
        loss.backward()
    assert failures == 5, failures
    assert len(held) == 8


def forked(body: Callable[[], bool]) -> None:
    """Runs it in a forked child, and sees that it comes to its end there, and to a good one."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if body() else 2
        finally:
            os._exit(status)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, f"the forked child ended with {status}"
            return
        time.sleep(0.001)
    os.kill(pid, signal.SIGABRT)
    os.waitpid(pid, 0)
    raise AssertionError("the forked child hung")


@script
def fork_before_the_first_op() -> None:
    """Threads that never ran an op fork while others run their first, which takes a lock of torch's around a malloc."""
    import memmgr

    stop = threading.Event()

    def first_op() -> None:
        torch.ones(4)

    def start_threads() -> None:
        while not stop.is_set():
            join(*spawn([first_op] * 4))

    def fork() -> None:
        forked(lambda: torch.ones(4).sum().item() == 4)

    assert torch.ones(4).sum().item() == 4  # loads the objects that torch makes once in a process
    with memmgr.budget("64MB", quiet=True):
        threads, errors = spawn([start_threads] * 3)
        try:
            for _ in range(100):
                join(*spawn([fork]))
        finally:
            stop.set()
            join(threads, errors)


@script
def soak(seconds: str, policy: str) -> None:
    """Random threads allocating, seeding, training and forking under a tight budget."""
    import memmgr

    w0 = torch.randn(128, 128) * 0.1
    peak, floor = _need(lambda: _checked_step(w0, random.Random(0)))
    limit = max(int(peak * 1.2), int(floor * 2)) + (6 << 20)
    stop, deadline = threading.Event(), time.monotonic() + float(seconds)
    counts: dict[str, int] = {}
    lock = threading.Lock()

    def count(what: str) -> None:
        with lock:
            counts[what] = counts.get(what, 0) + 1

    def until_stop(body: Callable[[random.Random], None], seed: int) -> Callable[[], None]:
        def run() -> None:
            r = random.Random(seed)
            while not stop.is_set():
                try:
                    body(r)
                    count(body.__name__)
                except torch.OutOfMemoryError:
                    count(f"{body.__name__}: out of memory")
                    time.sleep(0.001)

        return run

    def allocate(r: random.Random) -> None:
        held = [torch.empty(r.randrange(1, 1 << 18)) for _ in range(r.randrange(1, 5))]
        held[0].fill_(1.0)
        value = r.random()
        for t in held[1:]:
            t.fill_(value)
        time.sleep(r.random() * 0.002)
        assert all(t[-1].item() == pytest.approx(value) for t in held[1:])

    def seed_generators(r: random.Random) -> None:
        g = torch.Generator().manual_seed(11)
        first = torch.rand(64, generator=g)
        if r.random() < 0.5:
            torch.manual_seed(r.randrange(1 << 30))
        state = torch.get_rng_state()
        torch.multinomial(torch.rand(r.randrange(1000, 60000)), 8, replacement=r.random() < 0.5)
        torch.set_rng_state(state)
        g.manual_seed(11)
        assert torch.equal(first, torch.rand(64, generator=g))

    def train(r: random.Random) -> None:
        _checked_step(w0, r)

    def train_in_a_new_thread(r: random.Random) -> None:
        threads, errors = spawn([lambda: _checked_step(w0, random.Random(r.random()))])
        for t in threads:
            t.join(60)
            assert not t.is_alive()
        if errors:
            raise errors[0]

    def fork(r: random.Random) -> None:
        time.sleep(0.05)

        def in_the_child() -> bool:
            t = torch.ones(1 << 12) + 1
            big = torch.empty(limit // 4 + (1 << 20))  # more than the budget: the child is unmanaged
            return t.sum().item() == 8192 and big.numel() > 0

        forked(in_the_child)

    def collect(r: random.Random) -> None:
        gc.collect()
        time.sleep(0.05)

    with memmgr.budget(limit, policy=policy, quiet=True) as mm:
        threads, errors = spawn(
            [
                until_stop(b, i)
                for i, b in enumerate(
                    (allocate, allocate, seed_generators, train, train, train_in_a_new_thread, fork, collect)
                )
            ]
        )
        while time.monotonic() < deadline and not errors:
            time.sleep(0.1)
            mm.stats()
        stop.set()
        join(threads, errors)
    stats = mm.stats()
    print(
        counts,
        {
            k: stats[k]
            for k in ("evictions", "offloads", "recomputes", "reloads", "resident_bytes.peak", "budget_bytes")
        },
    )
    assert stats["resident_bytes.peak"] <= stats["budget_bytes"]
    assert stats["evictions"] + stats["offloads"] > 0, "no reclaim, so nothing was tested"
    for what in ("allocate", "seed_generators", "train", "train_in_a_new_thread", "fork"):
        assert counts.get(what, 0) > 0, f"{what} never succeeded: {counts}"


def _checked_step(w0: torch.Tensor, r: random.Random) -> None:
    """A forward and backward whose random mask is known, so that the gradient can be checked however others move the generator."""
    w = w0.clone().requires_grad_()
    mask = torch.rand_like(w0).round()
    kept = mask.numpy().tobytes()
    h = (w * mask).exp()
    depth = r.randrange(1, 4)
    for _ in range(depth):
        h = h + F.dropout(h, 0.0).tanh() * torch.empty_like(h).bernoulli_(1.0)
    del mask
    time.sleep(r.random() * 0.002)
    h.sum().backward()
    got = w.grad
    with torch.no_grad():
        m = torch.frombuffer(bytearray(kept), dtype=torch.float32).view_as(w0)
        h = (w0 * m).exp()
        first, slopes = h, []
        for _ in range(depth):
            t = h.tanh()
            slopes.append(t)
            h = h + t
        g = torch.ones_like(h)
        for t in reversed(slopes):
            g = g + g * (1 - t * t)
        # Not torch.testing: an out-of-memory error inside it comes out as another error.
        assert torch.allclose(got, g * first * m, rtol=1e-4, atol=1e-6)


@script
def interrupted(policy: str, share: str, stay: str, throttle: str) -> None:
    """Ctrl-C at random moments of forward, backward, pack, unpack and reclaim; then all is as it was, and training goes on.

    On a tier that is throttled (bytes a second; 0: it is not) most of these moments are inside malloc, in a reclaim.
    """
    import memmgr

    from .test_interrupts import Training, numbers, random_states

    training = Training(5)
    legitimate, want = random_states(training), training.run()

    def managed_passes() -> None:
        training.restore()
        nonlocal duration, stalled
        with memmgr.budget(limit, **options) as mm:
            began = time.perf_counter()
            training.passes()
            duration = time.perf_counter() - began
        stalled = mm.stats()["stall_seconds"]

    options: dict[str, Any] = {"policy": policy, "quiet": True, "_throttle": int(throttle)}
    duration = stalled = 0.0
    limit = HUGE_BYTES
    with memmgr.budget(HUGE_BYTES, quiet=True) as mm:
        training.run()
    limit = max(int(mm.stats()["unmanaged_peak_bytes"] * float(share)), int(mm.stats()["floor_bytes"] * 1.1))
    managed_passes()
    managed_passes()
    # Three quarters of the passes, where the machine has nothing else to do.
    assert not int(throttle) or stalled > 0.1, f"only {stalled:.3f} s of {duration:.3f} are waited for room or bytes"
    before = global_state()

    armed = False

    def on_alarm(signum: int, frame: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, on_alarm)
    r = random.Random(5)
    hit = lost = 0
    unraisable: list[Any] = []
    sys.unraisablehook = lambda u: unraisable.append(u.exc_type)

    def try_once() -> None:
        nonlocal armed, hit, lost, duration
        training.restore()
        caught = False
        unraisable.clear()
        armed = True
        began = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, max(1e-5, r.random() * duration))
        try:
            training.passes()
            armed = False
            duration = time.perf_counter() - began  # it came too late: they may take less than they did
        except KeyboardInterrupt:
            caught = True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            armed = False
        hit += caught
        lost += KeyboardInterrupt in unraisable
        assert numbers() in legitimate, (
            "the interrupt left the generator in a state that no unmanaged run passes through"
        )
        for k, v in training.model.named_parameters():
            assert torch.equal(v, training.start[k]), f"{k} changed"

    rounds = int(os.environ.get("EXACTNESS_INTERRUPTS", "24"))
    tried = 0
    while tried < rounds or (hit < rounds // 4 and tried < 4 * rounds):
        tried += 1
        if stay == "stay":
            with memmgr.budget(limit, **options) as mm:
                try_once()
                got = training.run()
        else:
            with contextlib.suppress(KeyboardInterrupt), memmgr.budget(limit, **options) as mm:
                try_once()
                raise KeyboardInterrupt
            got = training.run()
        assert_same(want, got, f"round {tried}")
        assert mm.stats()["resident_bytes.peak"] <= mm.stats()["budget_bytes"]
        training.model.zero_grad(set_to_none=True)
        del got
    gc.collect()
    after = global_state()
    changed = {k: (before[k], after[k]) for k in before if before[k] != after[k]}
    assert not changed, changed
    print(f"{stalled:.3f} of {duration:.3f} s stalled; {hit} of {tried} interrupts arrived, {lost} were swallowed")
    assert hit >= rounds // 4, "hardly an interrupt arrived: little was tested"
    assert lost <= tried // 20, "interrupts are swallowed by callbacks"


# Auto does both; each takes six seconds.
@pytest.mark.parametrize("policy", ["auto", *(pytest.param(p, marks=pytest.mark.slow) for p in ("evict", "offload"))])
@pytest.mark.parametrize("name", ["generator_mutex_against_the_gil", "seeded_recipe_inside_the_generators_mutex"])
def test_lock_inversion(name: str, policy: str) -> None:
    children.run("test_threads", name, policy, timeout=90)


def test_out_of_memory_instead_of_a_hang() -> None:
    children.run("test_threads", "nothing_to_give_while_the_mutex_is_held", "auto", timeout=60)


# Auto stays in its budget here, and offload leaves it below; torture is interrupted at every place in test_interrupts.py. The
# other pairs of a policy and a way to go on are slow.
@pytest.mark.parametrize(
    ("policy", "share", "stay"),
    [
        pytest.param("torture", "1.0", "leave", marks=pytest.mark.slow),
        ("auto", "0.4", "stay"),
        pytest.param("torture", "1.0", "stay", marks=pytest.mark.slow),
        pytest.param("auto", "0.4", "leave", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c(policy: str, share: str, stay: str) -> None:
    children.run("test_threads", "interrupted", policy, share, stay, "0", timeout=180)


@pytest.mark.parametrize("stay", [pytest.param("stay", marks=pytest.mark.slow), "leave"])  # auto stays above
def test_ctrl_c_in_the_middle_of_a_reclaim(stay: str) -> None:
    rounds = {"EXACTNESS_INTERRUPTS": "8"}  # opening measures the tier, which takes its time here
    children.run("test_threads", "interrupted", "offload", "0.5", stay, "30000000", timeout=180, env=rounds)


def test_fork_before_the_first_op() -> None:
    children.run("test_threads", "fork_before_the_first_op", timeout=90)


SOAK_SECONDS = float(os.environ.get("MEMMGR_SOAK_SECONDS", "3"))
"""`make soak` takes an hour."""


@pytest.mark.timeout(SOAK_SECONDS + 300)
@pytest.mark.parametrize("policy", ["auto"])
def test_soak(policy: str) -> None:
    print(children.run("test_threads", "soak", str(SOAK_SECONDS), policy, timeout=SOAK_SECONDS + 60))


if __name__ == "__main__":
    children.arm()
    SCRIPTS[sys.argv[1]](*sys.argv[2:])
