"""Findings of a hostile tester: each gave wrong bits, a crash or a hang without the rule that it names."""

import contextlib
import copy
import io
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch
from threads import in_threads
from torch import nn

import memmgr
import memmgr.native.binding
from memmgr.observe.memory_inventory import holders


def _same_bits(run: Callable[[], Any], policy: str, limit: int) -> None:
    want = run()
    with memmgr.budget(limit if policy == "offload" else "1GB", policy=policy, quiet=True) as mm:
        assert run() == want
    assert mm.stats()["offloads"] > 3


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("policy", ["offload", "torture"])
def test_torchs_own_composites_that_read_an_address(kind: Any, policy: str, beyond: Callable[[str], int]) -> None:
    """A packed sequence's batch sizes are read by address for as long as the loop over them runs (rule 9)."""

    def run() -> list[float]:
        torch.manual_seed(0)
        with torch.no_grad():
            held = [torch.randn(256, 64) for _ in range(4)]
            packed = nn.utils.rnn.pack_sequence([torch.randn(n, 8) for n in (900, 600, 300)])
            out, _ = kind(8, 8)(packed)
            padded, lengths = nn.utils.rnn.pad_packed_sequence(out)
            return [padded.sum().item(), padded.abs().sum().item(), *lengths.tolist(), *(h.sum().item() for h in held)]

    _same_bits(run, policy, beyond("430kB"))


@pytest.mark.parametrize("policy", ["offload", "torture"])
def test_the_gradient_of_a_packed_sequence(policy: str, beyond: Callable[[str], int]) -> None:
    """Its loop reads the batch sizes by address, too."""

    def run() -> list[float]:
        torch.manual_seed(0)
        x = torch.randn(900, 3, 8, requires_grad=True)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([900, 600, 300]))
        squares = packed.data.square()
        held = [torch.randn(256, 64) for _ in range(4)]
        squares.sum().backward()
        assert x.grad is not None
        return [*x.grad[::50].flatten().tolist(), *(h.sum().item() for h in held)]

    _same_bits(run, policy, beyond("430kB"))


def test_indices_and_lengths_that_are_away() -> None:
    x, logits = torch.randn(300, 4), torch.randn(12, 2, 5).log_softmax(-1)
    targets, lengths = torch.tensor([[1, 2, 3], [2, 3, 1]]), (torch.tensor([12, 12]), torch.tensor([3, 3]))
    indices = torch.arange(10, 290, 2)
    pieces = [piece.sum().item() for piece in torch.tensor_split(x, indices)]
    loss = nn.functional.ctc_loss(logits, targets, *lengths).item()
    with memmgr.budget("1GB", policy="torture", quiet=True):
        assert [piece.sum().item() for piece in torch.tensor_split(x, indices)] == pieces
        assert nn.functional.ctc_loss(logits, targets, *lengths).item() == loss


@pytest.mark.parametrize("policy", ["auto", "torture"])
def test_a_budget_ends_while_another_thread_runs_ops(policy: str, beyond: Callable[[str], int]) -> None:
    """No op of it is about to pin tensors that the end takes away, and all are restored (rule 13)."""
    limit = beyond("600kB") if policy == "auto" else "1GB"
    for _ in range(25):
        tensors = [torch.ones(200, 200) for _ in range(6)]
        stop, failed = threading.Event(), []

        def work(tensors: list[torch.Tensor] = tensors, stop: Any = stop, failed: Any = failed) -> None:
            try:
                while not stop.is_set():
                    for t in tensors:
                        t.mul_(1.0).add_(0.0)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        with memmgr.budget(limit, policy=policy, quiet=True):
            thread.start()
            time.sleep(0.011)
        time.sleep(0.005)
        stop.set()
        thread.join(60)
        assert not thread.is_alive() and not failed, failed
        assert all(t.sum().item() == 40000 for t in tensors)


MKLDNN = """
import sys, torch, memmgr
x = torch.randn(1, 8, 64, 64)
if sys.argv[1] == "inside":
    with memmgr.budget("1GB", quiet=True):
        y = torch.relu(x.to_mkldnn())
    del y
else:
    y = torch.relu(x.to_mkldnn())
    with memmgr.budget("1GB", quiet=True):
        del y
print("survived")
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("made", ["inside", "before"])
def test_memory_that_is_freed_by_asking_for_the_allocator_again(made: str) -> None:
    """oneDNN's tensors are freed by the allocator in place at that time, which is another one than they came from."""
    done = forkserver.run([sys.executable, "-c", MKLDNN, made], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "survived" in done.stdout, done.stderr


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("policy", ["auto", "torture"])
def test_statistics_that_an_op_moves_without_saying_so(policy: str, grad: bool) -> None:
    """Rule 4: `batch_norm_update_stats` has no `training` among its arguments, so it always moves them."""

    def run() -> list[float]:
        torch.manual_seed(0)
        mean, var, seen = torch.zeros(2048), torch.ones(2048), []
        with torch.set_grad_enabled(grad):
            for _ in range(4):
                batch = torch.randn(8, 2048)
                made = torch.batch_norm_update_stats(batch, mean, var, 0.1)
                seen += [mean.sum().item(), var.sum().item(), *(m.sum().item() for m in made)]
        return seen

    want = run()
    with memmgr.budget("1GB", policy=policy, quiet=True, verify=True):
        assert run() == want


def _saturated() -> torch.Tensor:
    x = torch.linspace(-1e5, 1e5, 4096).view(64, 64)
    y = x * nn.Parameter(torch.ones(64, 64))  # needs the bytes from before
    torch._saturate_weight_to_fp16(x)
    return torch.cat([x, y.detach()])


def _mapped() -> torch.Tensor:
    x, y = torch.ones(32, 32), torch.full((32, 32), 2.0)
    z = x * nn.Parameter(torch.ones(32, 32))
    x.map_(y, lambda a, b: a + b)  # type: ignore[attr-defined]
    return torch.cat([x, z.detach()])


def _sobol() -> torch.Tensor:
    engine = torch.quasirandom.SobolEngine(50, scramble=True, seed=1)
    first = engine.draw(8)
    engine.fast_forward(3)
    return torch.cat([first, engine.draw(4)])


RAW: dict[str, Callable[[], torch.Tensor]] = {
    "apply_": lambda: torch.ones(32, 32).apply_(lambda v: v + 1),
    "map_": _mapped,
    "Sobol": _sobol,
    "qparams": lambda: torch.stack(torch.choose_qparams_optimized(torch.arange(4096.0), 4096, 200, 0.16, 8)),
    "saturate": _saturated,
    "script": lambda: _saved(torch.jit.script(nn.Linear(64, 64))),
    "traced script": lambda: _saved(torch.jit.trace(nn.Linear(64, 64), torch.ones(8, 64))),
    "attributes of a script": lambda: _saved(torch.jit.script(nn.Sequential(_Attributes()))),
}


class _Attributes(nn.Module):
    more: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.plain = torch.randn(64, 64)
        self.more = [torch.randn(64, 64)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight @ self.plain @ self.more[0]


def _saved(module: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    result: torch.Tensor = torch.jit.load(buffer)(torch.ones(64, 64))
    return result.detach()


@pytest.mark.filterwarnings("ignore:.*(deprecated|out of range).*")
@pytest.mark.parametrize("name", RAW)
def test_more_that_reads_raw(name: str) -> None:
    torch.manual_seed(0)
    want = RAW[name]()
    with memmgr.budget("1GB", policy="torture", quiet=True, verify=True):
        torch.manual_seed(0)
        assert torch.equal(RAW[name](), want)


CONSTANTS = """
import io, sys, torch, memmgr

def saved():
    torch.manual_seed(0)
    if sys.argv[1] == "frozen script":
        script = torch.jit.freeze(torch.jit.script(torch.nn.Linear(256, 256).eval()))
    else:
        constant = torch.randn(256, 256)
        script = torch.jit.trace(lambda x: x + constant, torch.ones(256, 256))
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)(torch.ones(256, 256))

want = saved()
with memmgr.budget("1GB", policy="torture", quiet=True):
    assert torch.equal(saved(), want)
"""


@pytest.mark.parametrize("owner", ["frozen script", "traced function"])
def test_constants_of_a_graph_are_in_memory_while_they_are_saved(owner: str) -> None:
    """In a process of its own: torch keeps these constants until the process ends."""
    done = forkserver.run([sys.executable, "-c", CONSTANTS, owner], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
def test_a_deep_copy_of_a_script_has_room_where_it_and_its_copy_have_none_together() -> None:
    script = torch.jit.script(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))  # 2.1 MB
    with memmgr.budget("2600KB", quiet=True) as mm:
        made = copy.deepcopy(script)
        stats = mm.stats()
        assert stats["offloads"] + stats["evictions"] > 0
    for want, found in zip(script.parameters(), made.parameters(), strict=True):
        assert torch.equal(want, found)


PROFILED = """
import json, sys, torch, memmgr
from torch import nn

def train():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        loss = model(torch.randn(64, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()

want = train()
with memmgr.budget("1GB", policy="torture", quiet=True):
    if sys.argv[1] == "observer":
        observer = torch.profiler.ExecutionTraceObserver()
        observer.register_callback(sys.argv[2])
        observer.start()
        assert train() == want
        observer.stop()
        observer.unregister_callback()
        assert len(json.load(open(sys.argv[2]))["nodes"]) > 100
    else:
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, record_shapes=True, with_stack=True, profile_memory=True) as seen:
            assert train() == want
        assert any(event.input_shapes == [[64], [64, 64], [64, 64], [], []] for event in seen.events())
"""


@pytest.mark.parametrize("what", ["profiler", "observer"])
def test_profilers_note_addresses_outside_of_ops(what: str, tmp_path: Path) -> None:
    """Their callbacks met the trap: shapes were lost, a page of C++ stack was written for each, and torch's observer of
    execution traces crashed the process."""
    done = forkserver.run(
        [sys.executable, "-c", PROFILED, what, str(tmp_path / "trace.json")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "memmgr" not in done.stderr, done.stderr[:3000]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11's, for any reader
@pytest.mark.parametrize("begins", ["before the budget", "in it", "in it, and goes on after it"])
def test_a_profiler_hears_every_op(begins: str) -> None:
    """Torch's callbacks of the thread that opens a budget rest while no other listener has one (rule 12)."""
    x = torch.randn(64, 64)

    def names(profile: Any) -> list[str]:
        return [event.name for event in profile.events()]

    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    opened = memmgr.budget("1GB", quiet=True)
    if begins == "before the budget":
        profile.__enter__()
    opened.__enter__()
    if begins != "before the budget":
        x.cos()
        profile.__enter__()
    x.sin()
    if begins == "in it, and goes on after it":
        opened.__exit__(None, None, None)
        x.tan()
    profile.__exit__(None, None, None)
    wanted = ["aten::sin", *(["aten::tan"] if "after" in begins else [])]
    assert [name for name in names(profile) if name in ("aten::cos", "aten::sin", "aten::tan")] == wanted
    with profile_again() as later:
        x.exp()
    assert "aten::exp" in names(later)
    if "after" not in begins:
        opened.__exit__(None, None, None)
    with profile_again() as after:
        x.exp()
    assert "aten::exp" in names(after)


def profile_again() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def test_a_budget_that_opens_inside_of_vmap() -> None:
    """The budget outlives the level, whose guards restore the state that they found."""
    x, z = torch.randn(4, 4096), torch.ones(4096)
    with contextlib.ExitStack() as opened:

        def doubled(row: torch.Tensor) -> torch.Tensor:
            opened.enter_context(memmgr.budget("1GB", policy="torture", quiet=True))
            return row * 2

        y = torch.vmap(doubled)(x)
        assert memmgr.native.binding.load().adopt(z)
        for _ in range(3):
            z.add_(1)
        assert torch.equal(y, x * 2) and torch.equal(z, torch.full((4096,), 4.0))


def test_the_trap_is_back_when_the_profiler_has_ended() -> None:
    """Also for tensors evicted before it began, or while it ran."""
    before, while_it_ran = torch.ones(4096) + 0, torch.ones(4096) + 0
    with memmgr.budget("1GB", quiet=True):
        native = memmgr.native.binding.load()
        native.take_away(before, 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            native.take_away(while_it_ran, 1)
        for x in (before, while_it_ran):
            with pytest.raises(RuntimeError, match="not in memory at this moment"):
                torch._C.TensorBase.data_ptr(x)  # below the wrapper
            assert torch.equal(x, torch.ones(4096))


def test_a_thread_waits_until_others_have_written_to_what_they_have_made(
    large_only: None, beyond: Callable[[str], int]
) -> None:
    """Rule 3: a newborn cannot leave, and whose turn it is to write to it has only to go on."""
    mb = torch.ones(1 << 18)
    made, go = threading.Event(), threading.Event()

    def other() -> None:
        x = torch.empty(1 << 18)
        made.set()
        go.wait()
        time.sleep(0.05)
        x.fill_(1)

    def ended_by_another_thread() -> None:
        ours = [torch.empty(1 << 16)]
        in_threads(lambda _: ours.clear(), range(1))

    with memmgr.budget(beyond("3.4MB"), quiet=True):
        for _ in range(3):
            ended_by_another_thread()
        thread = threading.Thread(target=other)
        thread.start()
        made.wait()
        a, b = mb + 1, mb + 2
        go.set()
        total = (a * b).sum().item()  # takes three, and there is room for three and the half of one
        thread.join()
    assert total == 6 * (1 << 18)


def test_memory_of_others_waits_for_room_as_an_op_does(large_only: None, beyond: Callable[[str], int]) -> None:
    """`dcp.async_save` beside training, near the floor, ended in an error where the next op would have left room."""
    made, go = threading.Event(), threading.Event()

    def other() -> None:
        x = torch.empty(1 << 19)
        made.set()
        go.wait()
        time.sleep(0.05)
        x.fill_(1)

    with memmgr.budget(beyond("2.6MB"), quiet=True) as mm:
        thread = threading.Thread(target=other)
        thread.start()
        made.wait()
        outside = torch.UntypedStorage(1 << 20)
        go.set()
        torch.empty(0).set_(outside)  # type: ignore[call-overload]
        thread.join()
        assert mm.stats()["adopted_bytes"] == 1 << 20


def test_the_floor_of_a_compiled_region(large_only: None) -> None:
    """Its arguments stay, and so does all that it makes until it returns."""
    with memmgr.budget(None, policy="keep", quiet=True) as mm:
        native = memmgr.native.binding.load()
        a, b = torch.ones(1 << 18) + 0, torch.ones(1 << 18) + 0
        region = native.pin([a, b], region=True)
        inside = [torch.empty(1 << 18) for _ in range(3)]
        del inside, region
        assert mm.stats()["floor_bytes"] >= 5 << 20


def test_a_library_that_cannot_be_loaded_is_built_again(tmp_path: Path) -> None:
    """A build of sources that change during it is not kept."""
    script = """
import shutil, sys
from pathlib import Path
import memmgr.native.cache as cache
from memmgr.native import binding, build
good, folder = Path(sys.argv[1]), Path(sys.argv[2])
built = []
def again(source, target, *args, **more):
    built.append(target)
    shutil.copy(good, target)
binding.compile_library = again
cache.place = lambda *parts: folder.joinpath(parts[-1])
(folder / "_pager.so").write_text("no library")
binding.load()
assert len(built) == 1
"""
    good = Path(str(getattr(memmgr.native.binding.load(), "__file__", "")))
    done = forkserver.run([sys.executable, "-c", script, str(good), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_bytes_that_are_needed_go_below_where_the_op_that_writes_leaves_no_room(beyond: Callable[[str], int]) -> None:
    """Rule 4's copy: the op's pinned tensors leave no room for it, and no other cell can be evicted."""
    with memmgr.budget("1GB", quiet=True) as mm:
        native = memmgr.native.binding.load()
        x, z = torch.arange(1e6), torch.ones(1_000_000)
        y = x * 2
        assert native.take_away(y, 0) == y.nbytes
        native.set_limit(mm.stats()["resident_bytes.current"] + 1_000_000)
        x.add_(z)
        stats = mm.stats()
        assert stats["resident_bytes.current"] <= stats["budget_bytes"]
        native.set_limit(1 << 30)
        assert torch.equal(y, torch.arange(1e6) * 2) and torch.equal(x, torch.arange(1e6) + 1)
        assert native.stats()["copies_before_write"] == 1 and mm.stats()["offloads"] == 1


def test_the_first_op_without_room_waits_for_another_threads(beyond: Callable[[str], int]) -> None:
    """Nothing is away yet: that another op runs is enough to try again once it has ended."""
    begun, free = threading.Event(), threading.Event()
    with torch.library._scoped_library("memmgr_waits", "FRAGMENT") as library:
        library.define("until_told(Tensor x) -> Tensor")

        def until_told(x: torch.Tensor) -> torch.Tensor:
            begun.set()
            assert free.wait(60)
            return torch.zeros(1)

        library.impl("until_told", until_told, "CPU")
        with memmgr.budget(beyond("10MB"), quiet=True) as mm:
            x = torch.arange(1_500_000.0)
            thread = threading.Thread(target=torch.ops.memmgr_waits.until_told, args=(x,))
            thread.start()
            assert begun.wait(60)
            assert not mm.stats()["offloads"]
            threading.Timer(0.3, free.set).start()
            y = torch.arange(1_500_000.0)
            thread.join(60)
            assert memmgr.native.binding.load().stats()["retries"] > 0
            assert x.sum().item() == y.sum().item()


@pytest.mark.parametrize("fits", [True, False])
def test_an_op_may_wait_for_threads_whose_ops_wait_for_room(fits: bool, beyond: Callable[[str], int]) -> None:
    """They waited for its end, to have all the room, and it waited for theirs."""
    with torch.library._scoped_library("memmgr_joins", "FRAGMENT") as library:
        library.define("in_a_thread(Tensor x) -> Tensor")

        def in_a_thread(x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(lambda: torch.cat([x, x]).sum()).result()

        library.impl("in_a_thread", in_a_thread, "CPU")
        x = torch.arange(1_000_000.0)
        want = torch.ops.memmgr_joins.in_a_thread(x)
        with memmgr.budget(beyond("13MB" if fits else "7MB"), quiet=True):
            others = [torch.arange(1_000_000.0) for _ in range(4)]
            if fits:
                assert torch.equal(torch.ops.memmgr_joins.in_a_thread(x), want)
            else:
                with pytest.raises(torch.OutOfMemoryError):
                    torch.ops.memmgr_joins.in_a_thread(x)
            assert sum(t.sum().item() for t in others) == 4 * others[0].sum().item()


def test_an_rnn_writes_to_what_its_forward_has_kept() -> None:
    """Its backward computes there, which no schema says, and a second one meets it again (rule 4)."""
    torch.manual_seed(0)
    rnn, x = nn.LSTM(16, 24, batch_first=True), torch.randn(8, 6, 16)

    def run() -> list[list[float]]:
        loss = rnn(x)[0].square().mean()
        found = [torch.autograd.grad(loss, [*rnn.parameters()], retain_graph=True) for _ in range(3)]
        return [g.flatten().tolist() for each in found for g in each]

    want = run()
    with memmgr.budget("1GB", policy="torture", verify=True, quiet=True):
        assert run() == want


def test_a_gradient_can_leave_though_another_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No object of Python's is made of it: where that thread began a backward meanwhile torch 2.13 destroyed the heap."""
    monkeypatch.delattr(memmgr.native.binding.load(), "gradients_of")
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    w = nn.Parameter(torch.ones(64, 64))
    (w * 1).sum().backward()
    thread = threading.Thread(target=spin)
    thread.start()
    try:
        with memmgr.budget("1GB", quiet=True, policy="keep"):
            kinds, _ = holders(memmgr.native.binding.load(), "cpu")
            assert memmgr.native.binding.load().describe(w.grad) is not None
    finally:
        stop.set()
        thread.join()
    assert kinds["gradients"] >= w.nbytes


IDLE = """
import concurrent.futures, time
import memmgr.native.binding

native = memmgr.native.binding.load()
assert native.others_wait()
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    assert pool.submit(sum, [1, 2]).result() == 3
    time.sleep(0.05)
    assert native.others_wait()
    pool.submit(time.sleep, 0.5)
    time.sleep(0.1)
    assert not native.others_wait()
"""


def test_an_executors_idle_threads_wait() -> None:
    """Many programs have some. Tensors that their graphs have saved are examined all the same."""
    done = forkserver.run([sys.executable, "-c", IDLE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


class Blocked:
    """A thread that runs `body`, which calls its argument and is held there."""

    def __init__(self, body: Callable[[Callable[[], None]], None]) -> None:
        self._inside, self._go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=body, args=(self._stay,))

    def _stay(self) -> None:
        self._inside.set()
        self._go.wait(60)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._inside.wait(60)

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._thread.join(60)


def _in_backward(stay: Callable[[], None]) -> None:
    class Stay(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            stay()
            return g

    Stay.apply(torch.ones(4, requires_grad=True)).sum().backward()


def test_nobody_reads_gradients_while_another_thread_puts_some_in_place() -> None:
    """Backward does that without the GIL: a gradient that was just found may be freed, and torch's heap is destroyed."""
    native = memmgr.native.binding.load()
    w = nn.Parameter(torch.ones(64, 64))
    (w * 1).sum().backward()
    with memmgr.budget("1GB", quiet=True, policy="keep"):
        assert native.gradient_bytes(w) == w.nbytes
        assert native.gradient_info(w) is not None
        with Blocked(_in_backward):
            assert native.gradient_bytes(w) == 0
            assert native.gradient_info(w) is None
            assert native.gradients_of([w]) == []
        assert native.gradient_bytes(w) == w.nbytes


def test_a_gradient_is_not_adopted_while_another_thread_may_drop_some() -> None:
    """`p.grad = None` lets the GIL go between the death of a gradient and the end of its name."""
    native = memmgr.native.binding.load()
    stop, running = threading.Event(), threading.Event()
    other = nn.Parameter(torch.ones(4))

    def drops() -> None:
        running.set()
        while not stop.is_set():
            time.sleep(0.001)  # a call of C's, as where a gradient dies
            other.grad = None

    w = nn.Parameter(torch.ones(64, 64))
    (w * 1).sum().backward()
    thread = threading.Thread(target=drops)
    thread.start()
    try:
        assert running.wait(60)
        with memmgr.budget("1GB", quiet=True, policy="keep"):
            assert native.gradient_bytes(w) == 0
            assert native.describe(w.grad) is None
            w.grad.add_(1)  # an op touches it
            assert native.describe(w.grad) is not None
    finally:
        stop.set()
        thread.join(60)
    assert torch.equal(w.grad, torch.full((64, 64), 2.0))


IN_AN_OP = """
import threading, time, torch, memmgr
torch.set_num_threads(1)

a = torch.randn(2500, 2500)
want = a @ a
seconds = time.monotonic()
a @ a
seconds = time.monotonic() - seconds
begins, got = threading.Event(), []

def multiply():
    begins.set()
    got.append(a @ a)

thread = threading.Thread(target=multiply)
thread.start()
begins.wait()
time.sleep(seconds / 4)
with memmgr.budget(1.2 * a.nbytes, policy="offload", quiet=True) as mm:
    b = torch.ones(2500, 2500)
    b += 1
    thread.join()
    left = mm.stats()["offloads"]
assert left > 0, "nothing had to leave"
assert torch.equal(got.pop(), want)
print("right")
"""


def test_what_an_op_reads_that_began_before_the_budget_stays() -> None:
    """No op has pinned it: the op would read memory that was given back to the system."""
    done = forkserver.run([sys.executable, "-c", IN_AN_OP], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("right\n")


def test_a_thread_that_sleeps_keeps_nothing_from_leaving() -> None:
    """It began its call before the budget opened, as an op might have; the system says that it computes nothing."""
    ends = threading.Event()

    def sleep() -> None:
        while not ends.is_set():
            time.sleep(3)

    thread = threading.Thread(target=sleep)
    thread.start()
    try:
        with memmgr.budget("1GB", policy="torture", quiet=True) as mm:
            for _ in range(4):
                torch.ones(100, 100).add_(1)
            stats = mm.stats()
    finally:
        ends.set()
        thread.join()
    assert stats["evictions"] + stats["offloads"] >= 4
