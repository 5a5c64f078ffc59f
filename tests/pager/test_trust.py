"""Trust is earned (rule 8): an op that does not reproduce is not run again."""

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness.harness import HUGE_BYTES
from torch import nn

import memmgr
from memmgr.native import binding

from .kernels import replaced

Step = Callable[[torch.Tensor], torch.Tensor]


class Unsteady:
    """A kernel that gives other bytes for arguments that it has seen before: right the first time, wrong whenever it is
    run again."""

    def __init__(self, right: Callable[[torch.Tensor], torch.Tensor], *, in_place: bool) -> None:
        self._right, self._in_place = right, in_place
        self._met: Counter[bytes] = Counter()
        self.again = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        seen = bytes(x.detach().contiguous().view(torch.uint8).flatten().tolist())
        out = self._right(x)
        self.again += self._met[seen] > 0
        out = out + self._met[seen] if self._met[seen] else out
        self._met[seen] += 1
        return x.copy_(out) if self._in_place else out


UNSTEADY: dict[str, tuple[str, Step]] = {
    "functional": ("erfinv", lambda h: h.detach().erfinv()),
    "in place": ("erfinv_", lambda h: (h.detach() * 0.5).erfinv_()),
}


@pytest.mark.parametrize("name", UNSTEADY)
@pytest.mark.rule(8)
def test_an_op_that_does_not_reproduce_is_run_once_more_and_never_again(name: str) -> None:
    op, step = UNSTEADY[name]
    kernel = Unsteady(lambda x: torch.special.ndtri((x + 1) / 2) / 2**0.5, in_place=op.endswith("_"))

    def train(scope: Any) -> tuple[torch.Tensor, Any]:
        kernel.again = 0
        kernel._met.clear()
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(61, 61) * 0.1)
        with scope as mm:
            for _ in range(3):
                h = torch.rand(61, 61) * 0.1
                for i in range(4):
                    h = torch.tanh(step(h * 0.5) @ w + i)
                h.square().mean().backward()
            del h
            stats = mm.stats() if mm is not None else {}
        assert w.grad is not None
        return w.grad, stats

    with replaced(op, kernel):
        want, _ = train(contextlib.nullcontext())
        assert kernel.again == 0, "the same input comes twice unmanaged, so nothing can be told"
        got, stats = train(memmgr.budget(HUGE_BYTES, policy="torture", quiet=True))
    assert torch.equal(got, want)
    assert stats["evictions"] > 0
    assert kernel.again == 1, f"run again {kernel.again} times: once to learn that it does not reproduce"


@contextlib.contextmanager
def _no_room_beside(n: int, results: int = 1) -> Any:
    """A budget with room for its inputs, of n floats, and so many results of that length, and no further one. A kind is
    tried once in a process: each test has an n of its own."""
    with memmgr.budget("1GB", policy="evict", disk=False, quiet=True) as mm:
        native = binding.load()
        x = torch.rand(n) * 0.1
        held = mm.stats()["resident_bytes.current"]
        native.set_limit(held + results * x.nbytes + x.nbytes // 2)
        yield x, native, mm


class Interrupted:
    """A kernel whose second run is interrupted."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.runs == 2:
            raise KeyboardInterrupt
        return x * 3


@pytest.mark.parametrize("n", [272_001, 272_002], ids=["in its place", "beside it"])
def test_an_interrupt_in_a_second_run_is_the_users(n: int) -> None:
    """It was taken for a second run that failed: the program went on, and the kind was never run again."""
    kernel = Interrupted()
    with replaced("erfinv", kernel), _no_room_beside(n, results=n - 272_000) as (x, native, mm):
        refused = native.stats()["refused_kinds"]
        with pytest.raises(KeyboardInterrupt):
            x.erfinv()
        assert kernel.runs == 2 and native.stats()["refused_kinds"] == refused
        y = x.erfinv()
        assert kernel.runs == 4  # tried after all
        native.set_limit(1 << 30)
        assert y.equal(x * 3) and mm.stats()["refused_kinds"] == refused


def _in_as_little(make: Callable[[], torch.Tensor], native: Any, mm: Any) -> torch.Tensor:
    """Made under the smallest limit that is enough, within 20 kB."""
    limit = mm.stats()["resident_bytes.current"]
    while True:
        limit += 20_000
        native.set_limit(limit)
        with contextlib.suppress(memmgr.BudgetError):
            made = make()
            native.set_limit(1 << 30)
            return made


def test_a_number_lies_where_its_kernel_may_read_it() -> None:
    """Two doubles are read at once, from a multiple of their size."""
    with memmgr.budget("1GB", quiet=True):
        native = binding.load()
        x = torch.zeros(307, dtype=torch.complex128)
        for i in range(40):
            x[i] = 2e-6 + i
        assert native.take_away(x, 0) == x.nbytes
        assert x[:40].tolist() == [2e-6 + i for i in range(40)]


def test_a_trial_needs_no_room_for_a_second_result() -> None:
    with _no_room_beside(262_144) as (x, native, mm):
        trials = native.stats()["trials"]
        y = torch.special.erfcx(x)  # a length of this test alone: trust earned by another test's could cover it
        assert native.stats()["trials"] == trials + 1
        want = y.tolist()
        assert native.take_away(y, 0) == y.nbytes
        assert y.tolist() == want and mm.stats()["refused_kinds"] == 0


def test_a_small_result_beside_a_large_one() -> None:
    n = 263_000
    with _no_room_beside(n) as (x, native, _):
        trials = native.stats()["trials"]
        normed, mean, rstd = torch.native_layer_norm(x.view(1000, -1), [263], None, None, 1e-5)
        assert native.stats()["trials"] == trials + 1
        native.set_limit(1 << 30)
        want = normed.clone()
        assert native.take_away(normed, 0) == normed.nbytes
        assert torch.equal(normed, want)
        again = torch.native_layer_norm(x.view(1000, -1) + 0, [263], None, None, 1e-5)
        assert all(torch.equal(a, b) for a, b in zip((normed, mean, rstd), again, strict=True))


def test_what_does_not_reproduce_leaves_its_last_result() -> None:
    runs = 0

    def unsteady(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return x + runs

    with _no_room_beside(264_000) as (x, native, mm), replaced("erfinv", unsteady):
        y = x.erfinv()
        native.set_limit(1 << 30)
        assert runs == 2
        assert torch.equal(y, x + runs)
        assert native.take_away(y, 0) == 0 and mm.stats()["refused_kinds"] == 1
        del y
        assert torch.equal(x.erfinv(), x + 3) and runs == 3


@pytest.mark.parametrize("there", [7, -1])
def test_gaps_are_seen_whatever_was_in_memory_before(there: int) -> None:
    """The second run's memory is full of ones."""

    def writes_half(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[: len(x) // 2] = x[: len(x) // 2]
        return out

    def fill_free_memory(value: int) -> None:
        torch.full((len(x),), value, dtype=torch.int32)

    with _no_room_beside(266_002 if there == 7 else 268_002) as (x, native, mm), replaced("erfinv", writes_half):
        trials = native.stats()["trials"]
        fill_free_memory(there)
        y = x.erfinv()
        assert native.stats()["trials"] == trials + 2  # filling memory is an op, too
        want = y.tolist()
        assert native.take_away(y, 0) == y.nbytes
        fill_free_memory(5)
        assert y.tolist() == want and mm.stats()["refused_kinds"] == 0


@pytest.mark.parametrize("how", [RuntimeError, torch.OutOfMemoryError])
def test_a_second_run_that_fails_is_made_good(how: type[Exception]) -> None:
    """The first result was freed for it: the op runs once more, and is not checked in place again."""
    runs = 0

    def fails_once(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        if runs == 2:
            raise how("no")
        return x * 2

    with _no_room_beside(265_000 + how.__name__.count("Memory")) as (x, native, _), replaced("erfinv", fails_once):
        y = x.erfinv()
        native.set_limit(1 << 30)
        assert runs == 3
        assert torch.equal(y, x * 2)
        assert native.take_away(y, 0) == 0


# A trial's memory is full of ones before, and it leaves ones behind. Large blocks come from the system again, cleared.
@pytest.mark.parametrize("room", ["beside", "in its place"])
@pytest.mark.parametrize(("there", "steps"), [(7, 32), (0xFF, 2)])
def test_gaps_in_a_result_do_not_keep_an_op_from_running_again(there: int, steps: int, room: str) -> None:
    """oneDNN's LSTM leaves bytes of its workspace as malloc gave them. They are zeros from the trial on, the rest is
    unchanged."""
    batch, width = 16 if room == "beside" else 17, 64  # another kind
    weights = [torch.randn(4 * width, width) * 0.1 for _ in range(2)] + [torch.randn(4 * width) for _ in range(2)]
    state = [torch.zeros(batch, width) for _ in range(2)]

    def layer(x: torch.Tensor) -> torch.Tensor:
        results = torch.ops.aten.mkldnn_rnn_layer(x, *weights, *state, False, [], 2, width, 1, True, False, False, True)
        workspace: torch.Tensor = results[3]
        return workspace

    def junk_in_free_memory(nbytes: int) -> None:
        junk = [torch.full((nbytes,), min(there + i, 0xFF), dtype=torch.uint8) for i in range(4)]
        del junk

    with memmgr.budget("1GB", policy="evict", disk=False, quiet=True) as mm:
        native = binding.load()
        x = torch.randn(steps, batch, width)
        spaces: list[torch.Tensor] = []
        for _ in range(3):
            junk_in_free_memory(spaces[0].nbytes if spaces else 300_000)
            if room == "beside" or spaces:
                spaces.append(layer(x))
            else:
                spaces.append(_in_as_little(lambda: layer(x), native, mm))
            there = 7
        before = [space.clone() for space in spaces]
        assert all(torch.equal(space, before[0]) for space in before)
        for space in spaces:
            assert native.take_away(space, 0) == space.nbytes
        junk_in_free_memory(spaces[0].nbytes)
        assert all(torch.equal(space, want) for space, want in zip(spaces, before, strict=True))
        assert mm.stats()["refused_kinds"] == 0


def test_a_fused_lstm_runs_again() -> None:
    """oneDNN leaves gaps in its workspace, which is most of an LSTM's saved bytes, and makes one only where gradients
    are on."""

    def train(scope: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.LSTM(64, 64, batch_first=True) for _ in range(4))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        with scope as mm:
            for _ in range(4):
                out = torch.randn(16, 32, 64)
                for lstm in layers:
                    out, _ = lstm(out)
                out.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            stats = mm.stats() if mm is not None else {}
        return [p.detach().clone() for p in layers.parameters()], stats

    want, _ = train(contextlib.nullcontext())
    _, whole = train(memmgr.budget("1GB", policy="evict", disk=False, quiet=True))
    budget = int(0.6 * whole["unmanaged_peak_bytes"])
    got, stats = train(memmgr.budget(budget, policy="evict", disk=False, quiet=True))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert whole["refused_kinds"] == 0
    assert stats["evicted_bytes"] > 0 and stats["recomputes"] > 0


@pytest.mark.parametrize("how", ["an op", "pin"])
def test_a_disk_that_gives_other_bytes_ends_the_run(tmp_path: Path, how: str) -> None:
    """Never a wrong value: the error is raised where the bytes are wanted, again when they are asked for again, and at the end."""
    native = binding.load()
    with (
        pytest.raises(memmgr.RecomputeError, match="came back other than they left"),
        memmgr.budget("1GB", policy="offload", verify=True, quiet=True, disk=tmp_path),
    ):
        x = torch.randn(100_000)
        assert native.take_away(x, 1) == x.nbytes
        tiers = []
        for file in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the listing's own
                if str(tmp_path) in os.readlink(f"/proc/self/fd/{file}"):
                    tiers.append(f"/proc/self/fd/{file}")
        (tier,) = tiers
        with open(tier, "r+b", buffering=0) as file:
            file.write(b"\x5a" * x.nbytes)
            os.fsync(file.fileno())
        for _ in range(2):
            with pytest.raises(
                memmgr.RecomputeError,
                match=r"400000 bytes came back other than they left \(read back\), a result of aten::randn\.",
            ):
                x + 1 if how == "an op" else native.pin([x])


def test_an_input_that_only_a_storage_object_has_is_recomputed_where_its_read_fails() -> None:
    """Such an input is made aside, for the op that runs again. The read that failed is counted. A kernel of its own makes
    the input: its family has earned no trust, which would want a checksum that no offload takes."""
    native = binding.load()
    with memmgr.budget("1GB", quiet=True) as mm, replaced("erfinv", lambda t: t * 2):
        x = torch.randn(100_000).erfinv()
        y = x.exp()
        want = y.clone()
        storage = x.untyped_storage()
        assert native.take_away(x, 1) == native.take_away(y, 2) == x.nbytes
        del x
        native.tier_inject(read=errno.EIO)
        assert torch.equal(y, want)
        native.tier_inject()
        stats = mm.stats()
        del storage
    assert stats["tier_errors"] == 1 and stats["recomputes"] >= 2 and stats["reloads"] == 0


WRITTEN_AND_READ: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copied along": lambda x, y: x[:, 1:].copy_(y[:, :-1]),
    "added along": lambda x, y: x[:, 1:].add_(y[:, :-1]),
    "shifted by a row of every second": lambda x, y: x[2::2, 1:].copy_(y[:-2:2, :-1]),
    "summed up": lambda x, y: torch.cumsum(y[:, :-1], 1, out=x[:, 1:]),
    "as other numbers": lambda x, y: x.view(torch.int32)[:, 1:].copy_(y[:, :-1]),
}


@pytest.mark.parametrize("name", WRITTEN_AND_READ)
def test_an_op_that_reads_what_it_writes(name: str) -> None:
    """Torch permits it where strides are not dense: the op reads values that it has written before, and a second run
    would not."""
    op, native = WRITTEN_AND_READ[name], binding.load()
    values = torch.randn(192, 192)

    def run(shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = values * 2
        y = x if shared else values * 3
        op(x, y)
        return x, y

    want = run(True)[0].view(torch.int32)  # among floats there are some that equal none
    with memmgr.budget("1GB", quiet=True, disk=False):
        for shared in (False, False, True, True):  # trust earned by the others does not count
            x, y = run(shared)
            for t in (x, y):
                native.take_away(t, 0)
            assert not shared or torch.equal(x.view(torch.int32), want)


BESIDE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "the other half": lambda x, y: x[:, :96].mul_(y[:, 96:]),
    "every second": lambda x, y: x.view(192, 96, 2)[..., 0].copy_(y.view(192, 96, 2)[..., 1]),
    "other rows": lambda x, y: x[::2].copy_(y[1::2]),
    "itself": lambda x, y: x.mul_(y),
}


@pytest.mark.parametrize("name", BESIDE)
def test_an_op_that_writes_beside_what_it_reads(name: str) -> None:
    native = binding.load()
    with memmgr.budget("1GB", quiet=True, disk=False):
        for shared in (False, True):
            x, y = torch.rand(192, 192) * 2, torch.rand(192, 192) * 3
            BESIDE[name](x, x if shared else y)
            want = x.clone()
            assert native.take_away(x, 0) == x.nbytes
            assert torch.equal(x, want)


def test_what_a_kernel_made_that_is_registered_no_more_is_made_again_by_it() -> None:
    """Libraries replace kernels of torch's for as long as one of their contexts is open."""

    def trained() -> list[bytes]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(263, 1013))
        found = []
        for i in range(6):
            with replaced("erfc", [torch.tanh, torch.sin][i % 2]) if i % 3 else contextlib.nullcontext():
                y = (weight * (i + 1)).erfc()
                z = y.exp()
            others = [torch.ones(263, 1013) * k for k in range(8)]
            (y.sum() + z.sum()).backward()
            found += [t.detach().numpy().tobytes() for t in (y, z, weight.grad)]
            weight.grad = None
            del others
        return found

    plain = trained()
    with memmgr.budget("14MB", policy="torture", quiet=True) as mm:
        assert trained() == plain
    assert mm.stats()["recomputes"] > 0


@pytest.mark.parametrize("name", ["index_put", "put", "index_put_"])
def test_what_threads_race_for_is_not_made_again(name: str) -> None:
    """A check whose indices do not repeat does not cover the next call, whose indices do."""
    n = 50_000

    def act(x: torch.Tensor, where: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if name == "put":
            return x.put(where, values, accumulate=True)
        x = x * 1 if name.endswith("_") else x
        return getattr(x, name)((where,), values, accumulate=True)

    native = binding.load()
    with memmgr.budget("1GB", policy="evict", disk=False, quiet=True):
        x, values = torch.randn(n), torch.randn(n)
        act(x, torch.arange(n), values)
        y = act(x, torch.randint(0, 50, (n,)), values)
        want = y.tolist()
        assert native.take_away(y, 0) == 0 and y.tolist() == want
        torch.use_deterministic_algorithms(True)
        try:
            y = act(x, torch.randint(0, 50, (n,)), values)
            want = y.tolist()
            assert native.take_away(y, 0) == y.nbytes and y.tolist() == want
        finally:
            torch.use_deterministic_algorithms(False)
