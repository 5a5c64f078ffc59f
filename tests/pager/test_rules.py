"""The pager's rules, one by one."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch
from threads import in_threads
from torch import nn

import memmgr
from memmgr.native import binding as native

from .raw_reads import READS, same

LIMIT = "1GB"


@pytest.fixture
def pager() -> native.Pager:
    return native.load()


@pytest.fixture
def opened(pager: native.Pager) -> Iterator[native.Pager]:
    with memmgr.budget(LIMIT, quiet=True):
        yield pager
        pager.check()


def _away(pager: native.Pager, tensor: torch.Tensor, turn: int = 1) -> torch.Tensor:
    """`tensor` with its bytes below (odd turns) or dropped (even ones, where there is a recipe)."""
    assert pager.take_away(tensor, turn) > 0
    return tensor


def _numbers(n: int = 4096) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) * 1.5


def _state(pager: native.Pager, tensor: torch.Tensor) -> native.CellInfo:
    info = pager.describe(tensor)
    assert info is not None
    return info


def test_no_mode_and_no_hook(opened: native.Pager) -> None:
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.rule(2)
def test_a_raw_read_of_absent_bytes_is_an_error(opened: native.Pager) -> None:
    t = _away(opened, _numbers() + 0)
    with pytest.raises(RuntimeError, match="not in memory at this moment"):
        torch._C.TensorBase.data_ptr(t)  # below the wrapper
    assert _state(opened, t)["residency"] == "offloaded"
    assert t[3].item() == 4.5


@pytest.mark.rule(2)
def test_views_bring_nothing_back(opened: native.Pager) -> None:
    t = _away(opened, torch.randn(64, 64) + 0)
    shapes = t.T.shape, t.view(-1).shape, t.detach()[3:7].shape, t.unsqueeze(0).expand(5, -1, -1).shape
    assert shapes == ((64, 64), (4096,), (4, 64), (5, 64, 64))
    assert _state(opened, t)["residency"] == "offloaded"
    assert torch.empty_like(t).shape == t.shape
    assert _state(opened, t)["residency"] == "offloaded"


@pytest.mark.rule(3)
def test_pinned_is_pinned(opened: native.Pager) -> None:
    t = _numbers() + 0
    pin = opened.pin([t])
    assert opened.take_away(t) == 0
    del pin
    assert opened.take_away(t) > 0


@pytest.mark.rule(3)
def test_a_newborn_stays_until_an_op_has_touched_it(opened: native.Pager) -> None:
    t = torch.empty(4096)
    assert opened.take_away(t) == 0
    t.zero_()
    assert opened.take_away(t) > 0


@pytest.mark.parametrize("how", ["in place", "out=", "data", "no_grad", "foreach", "view"])
@pytest.mark.rule(4)
def test_old_bytes_outlive_a_write(opened: native.Pager, how: str) -> None:
    """A tensor that can only be made again from bytes that are about to change is settled before (rule 4)."""
    w = nn.Parameter(_numbers())
    opened.adopt(w)
    want = (w.detach() * 3).clone()
    y = w * 3
    assert _state(opened, y)["recipe"]
    _away(opened, y, 0)
    assert _state(opened, y)["residency"] == "evicted"
    assert _state(opened, w)["needed"] > 0
    if how == "in place":
        w.data.add_(1)
    elif how == "out=":
        torch.add(w.detach(), 1, out=w.data)
    elif how == "data":
        w.data.copy_(torch.zeros(4096))
    elif how == "no_grad":
        with torch.no_grad():
            w.mul_(2)
    elif how == "foreach":
        torch._foreach_add_([w.data], 1.0)
    else:
        w.data.view(64, 64)[3:5] = 7
    assert torch.equal(y.detach(), want)


@pytest.mark.rule(4)
def test_a_write_voids_the_copy_below(opened: native.Pager) -> None:
    t = _numbers() + 0
    _away(opened, t)
    assert t.sum().item() == _numbers().sum().item()  # back, and clean
    assert _state(opened, t)["clean"]
    t.view(64, 64)[0] = 1
    assert not _state(opened, t)["clean"]
    _away(opened, t)
    assert t[:64].sum().item() == 64


@pytest.mark.rule(5)
def test_roots_are_not_owned(opened: native.Pager) -> None:
    """A root that ends while its dependant is resident takes the recipe with it; one whose dependant is gone stays."""
    w = torch.nn.Parameter(_numbers())
    x = (_numbers() + 0).requires_grad_()
    y = x.detach().clone().requires_grad_() * 2
    del x
    gc.collect()
    first = opened.stats()["resident_cell_bytes"]
    want = y.detach().clone()
    _away(opened, y, 0)
    assert torch.equal(y.detach(), want)
    assert opened.stats()["resident_cell_bytes"] <= first + 2 * 4096 * 4
    del w


@pytest.mark.rule(5)
def test_chains_are_bounded(opened: native.Pager) -> None:
    """Grad mode without a backward: recipes neither pile up nor keep tensors that the program has released."""
    before = opened.stats()  # other tests' tensors live on
    h, w = torch.zeros(64, 64), nn.Parameter(torch.full((64, 64), 1e-3))
    for _ in range(1500):
        h = (h + w).detach()
    stats = opened.stats()
    assert stats["recipe_bytes"] - before["recipe_bytes"] < 2 << 20
    assert stats["cells"] - before["cells"] < 30
    _away(opened, h, 0)
    assert h[0, 0].item() == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize("make", [torch.zeros_like, torch.ones_like, lambda t: torch.full((len(t),), 2.5)])
def test_what_is_filled_without_gradient_costs_no_traffic(
    make: Callable[[torch.Tensor], torch.Tensor], large_only: None, beyond: Callable[[str], int]
) -> None:
    """An optimizer's first states: four times the budget of them, and none is written below."""
    like = torch.rand(1 << 18)
    plain = make(like)
    limit = beyond("4MB")  # in addition to existing bytes
    with memmgr.budget(limit, quiet=True) as mm, torch.no_grad():
        kept = [make(like) for _ in range(4 * limit // like.nbytes)]
        filled = mm.stats()
        for i, one in enumerate(kept):
            one.add_(i)
        assert all(torch.equal(one, plain + i) for i, one in enumerate(kept))
    # On a busy machine it seems cheaper to keep a bit for each element.
    assert filled["evicted_bytes"] + filled["packed"] * like.nbytes > 2 * limit
    assert filled["offload_bytes"] <= limit


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.nn.functional.dropout(x, 0.3),
        lambda x: x + torch.rand(4096),
        lambda x: x * torch.randn_like(x),
        lambda x: x * torch.bernoulli(torch.full((4096,), 0.4)),
        lambda x: x + torch.randint(9, (4096,)),
        lambda x: x.clone().uniform_() * x,
        lambda x: torch.native_dropout(x, 0.3, True)[0],
        lambda x: x * torch.rand(4096, generator=torch.Generator().manual_seed(5)),
    ],
)
@pytest.mark.rule(6)
def test_drawing_again_touches_no_generator(opened: native.Pager, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = _numbers().requires_grad_()
    torch.manual_seed(3)
    y = draw(x)
    want, state = y.detach().clone(), torch.get_rng_state()
    _away(opened, y, 0)
    assert torch.equal(y.detach(), want)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.rule(7)
def test_the_default_dtype_of_then(opened: native.Pager) -> None:
    n = torch.arange(4096)
    w = nn.Parameter(torch.ones(4096))
    try:
        torch.set_default_dtype(torch.float64)
        y = (n / 3) * w
    finally:
        torch.set_default_dtype(torch.float32)
    want = y.detach().clone()
    _away(opened, y, 0)
    assert y.dtype == torch.float64
    assert torch.equal(y.detach(), want)


ESCAPED: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda t: t.numpy(),
    "asarray": lambda t: __import__("numpy").asarray(t),
    "dlpack": lambda t: torch.from_dlpack(t),
    "to_dlpack": lambda t: torch.utils.dlpack.to_dlpack(t),
    "data_ptr": lambda t: (t.data_ptr(), t)[1],
    "storage data_ptr": lambda t: (t.untyped_storage().data_ptr(), t)[1],
    "slice of a storage": lambda t: t.untyped_storage()[8:64],
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.rule(9)
def test_scoped_readers_find_the_bytes_and_pin_nothing(opened: native.Pager, name: str) -> None:
    want = READS[name](_numbers())
    t = _away(opened, _numbers() + 0)
    assert same(READS[name](t), want)
    info = _state(opened, t)
    assert not info["escaped"]
    assert info["pins"] == 0
    assert opened.take_away(t) > 0


@pytest.mark.parametrize("name", ESCAPED)
@pytest.mark.rule(9)
def test_an_address_that_was_handed_out_stays(opened: native.Pager, name: str) -> None:
    t = _away(opened, _numbers() + 0)
    kept = ESCAPED[name](t)
    assert _state(opened, t)["escaped"]
    assert opened.take_away(t) == 0
    assert opened.stats()["escapes"] == 1
    assert torch.equal(t, _numbers())
    del kept


# A bare address is noted in budgets alone (exported.py).
@pytest.mark.parametrize("name", [name for name in ESCAPED if "data_ptr" not in name])
@pytest.mark.rule(9)
def test_an_export_from_before_the_budget_stays(name: str) -> None:
    t, other = torch.arange(65536.0), torch.arange(65536.0)
    kept = ESCAPED[name](t)
    with memmgr.budget("1GB", quiet=True):
        assert native.load().take_away(other) > 0
        assert native.load().take_away(t) == 0
        assert _state(native.load(), t)["escaped"]
    del kept


@pytest.mark.parametrize("name", [name for name in ESCAPED if "data_ptr" not in name])
@pytest.mark.rule(9)
def test_an_export_of_a_subclass_from_before_the_budget_stays(name: str) -> None:
    t = torch.arange(65536.0).as_subclass(type("Sub", (torch.Tensor,), {}))
    kept = ESCAPED[name](t)
    with memmgr.budget("1GB", quiet=True):
        assert native.load().take_away(t) == 0
    del kept


@pytest.mark.rule(9)
def test_a_capsule_by_a_name_from_before_the_import_is_noted() -> None:
    code = (
        "import torch; from torch.utils.dlpack import to_dlpack; import memmgr; from memmgr.native import binding\n"
        "t = torch.arange(65536.0); kept = to_dlpack(t)\n"
        "with memmgr.budget('1GB', device='cpu', quiet=True): assert binding.load().take_away(t) == 0"
    )
    done = forkserver.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.rule(9)
def test_an_address_stays_in_later_budgets_whichever_escape_came_first() -> None:
    with memmgr.budget("1GB", quiet=True):
        t = torch.arange(65536.0)
        array, address = t.numpy(), t.data_ptr()
    del array
    with memmgr.budget("1GB", quiet=True):
        assert native.load().take_away(t) == 0
        assert t.data_ptr() == address


def test_saving_a_model_larger_than_the_budget_pins_nothing(
    tmp_path: Path, pager: native.Pager, large_only: None, beyond: Callable[[str], int]
) -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
    tied = nn.Sequential(model[0], nn.Linear(512, 512))
    tied[1].weight = model[0].weight
    want = {k: v.clone() for k, v in model.state_dict().items()}
    with memmgr.budget(beyond("5MB"), quiet=True) as mm:
        for _ in range(2):
            torch.save(model.state_dict(), tmp_path / "model.pt")
        torch.save({"a": tied.state_dict()}, tmp_path / "tied.pt")
        stats = pager.stats()
        assert stats["pinned_cells"] == 0
        assert stats["escapes"] == 0
        found = torch.load(tmp_path / "model.pt")
        assert all(torch.equal(found[k], v) for k, v in want.items())
        both = torch.load(tmp_path / "tied.pt")["a"]
        assert both["0.weight"].untyped_storage()._cdata == both["1.weight"].untyped_storage()._cdata
    assert mm.stats()["resident_bytes.peak"] <= mm.stats()["budget_bytes"]


@pytest.mark.rule(9)
def test_addresses_that_are_compared_never_look_shared(opened: native.Pager) -> None:
    tensors = [_away(opened, _numbers() + i) for i in range(20)]
    names = {opened.name(t) for t in tensors}
    assert len(names) == 20
    assert all(_state(opened, t)["residency"] == "offloaded" for t in tensors)
    assert opened.name(tensors[0][4:]) == opened.name(tensors[0]) + 16


@pytest.mark.parametrize("turn", [0, 1], ids=["made again", "read back"])
def test_what_only_a_storage_object_has_is_read_beside_it(opened: native.Pager, turn: int) -> None:
    chain = [_numbers()]
    for _ in range(20):
        chain.append(chain[-1].sin())
    last = chain.pop()
    want = last.sum().item()
    assert opened.take_away(last, 0) > 0
    storages = [_away(opened, tensor, turn).untyped_storage() for tensor in chain[1:]]
    chain.clear()
    before = opened.stats()["rematerialized_ops"]
    assert last.sum().item() == want
    assert opened.stats()["rematerialized_ops"] - before == (20 if turn == 0 else 1)  # each once
    assert len(storages) == 19


@pytest.mark.rule(12)
def test_a_thread_older_than_the_budget_is_seen(pager: native.Pager) -> None:
    """Started below the threading module, before the budget: its very first op writes to a clean cell."""
    go, done = threading.Event(), threading.Event()
    t = _numbers() + 0

    def work() -> None:
        go.wait()
        t.add_(1)
        done.set()

    _thread.start_new_thread(work, ())
    with memmgr.budget(LIMIT, quiet=True):
        pager.adopt(t)
        _away(pager, t)
        assert t[0].item() == 0  # clean now
        go.set()
        done.wait()
        assert pager.stats()["unseen_ops"] == 1
        pager.take_away(t)
        assert torch.equal(t, _numbers() + 1)


@pytest.mark.rule(11)
def test_reclaim_needs_no_gil(large_only: None, beyond: Callable[[str], int]) -> None:
    """While one thread keeps the interpreter for a second, a backward in another reclaims and ends."""
    x = torch.randn(256, 1024, requires_grad=True)
    ended: list[float] = []
    with memmgr.budget(beyond("16MB"), quiet=True) as mm:
        h, kept = x, []
        for _ in range(24):
            h = torch.tanh(h)
            kept.append(h)
        loss = h.sum()
        before = mm.stats()["stall_seconds"]
        started = threading.Event()

        def backward() -> None:
            started.set()
            loss.backward()
            ended.append(time.perf_counter())

        thread = threading.Thread(target=backward)
        thread.start()
        started.wait()
        time.sleep(0.005)
        ctypes.PyDLL(None).usleep(1_500_000)  # with the GIL
        freed = time.perf_counter()
        thread.join()
        # `ended` is written with the GIL, so right after it came free: the backward had nothing left to do by then.
        assert ended[0] - freed < 0.5
        assert mm.stats()["stall_seconds"] > before


@pytest.mark.rule(3)
def test_two_threads_whose_ops_fit_one_by_one(large_only: None, beyond: Callable[[str], int]) -> None:
    """Each op pins 6 MB of 8: they take turns, and none runs out of memory (rule 3)."""
    tensors = [[torch.randn(512, 1024) for _ in range(3)] for _ in range(2)]
    failed: list[BaseException] = []

    def work(own: list[torch.Tensor]) -> None:
        try:
            for _ in range(40):
                torch.add(own[0], own[1], out=own[2])
        except BaseException as error:
            failed.append(error)

    with memmgr.budget(beyond("8MB"), quiet=True):
        in_threads(work, tensors)
    assert not failed
    for own in tensors:
        assert torch.equal(own[2], own[0] + own[1])


def _threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended in between
            names.append((task / "comm").read_text().strip())
    return names


def test_no_thread_is_woken_for_what_others_have(large_only: None, beyond: Callable[[str], int]) -> None:
    """It would take a core from the program's ops at each departure."""
    x = torch.randn(256, 1024, requires_grad=True)
    with memmgr.budget(beyond("8MB"), quiet=True, disk=False) as mm:
        h = x
        for _ in range(24):
            h = torch.tanh(h)
        h.sum().backward()
        assert mm.stats()["evictions"] >= 16
        assert "memmgr drops" not in _threads()


def test_what_is_there_leaves_when_a_budget_opens(large_only: None, beyond: Callable[[str], int]) -> None:
    tensors = [torch.randn(512, 512) for _ in range(10)]
    want = [t.sum().item() for t in tensors]
    with memmgr.budget(beyond("4MB"), quiet=True) as mm:
        assert mm.stats()["resident_bytes.current"] <= mm.stats()["budget_bytes"]
        assert [t.sum().item() for t in tensors] == want
    assert mm.stats()["resident_bytes.peak"] <= mm.stats()["budget_bytes"]
    for t in tensors:  # ordinary tensors again
        assert torch._C.TensorBase.data_ptr(t) != 0


def test_too_small_is_a_budget_error_where_it_happens(large_only: None, beyond: Callable[[str], int]) -> None:
    with memmgr.budget(beyond("2MB"), quiet=True):
        with pytest.raises(memmgr.BudgetError) as caught:
            torch.zeros(1_000_000)
        assert isinstance(caught.value, torch.OutOfMemoryError)
        assert caught.value.budget_bytes == beyond("2MB")
        assert torch.zeros(1000).sum().item() == 0


@pytest.mark.rule(13)
def test_an_exception_leaves_ordinary_tensors(pager: native.Pager) -> None:
    t = _numbers()
    before = torch.Tensor.numpy
    with pytest.raises(KeyError), memmgr.budget(LIMIT, quiet=True):
        assert torch.Tensor.numpy is not before
        pager.adopt(t)
        _away(pager, t)
        raise KeyError
    assert pager.describe(t) is None
    assert t[2].item() == 3.0
    assert torch.Tensor.numpy is before


def test_constructors_are_known_to_a_device_context_within_a_budget() -> None:
    """torch keeps them in a set: a function of ours in the place of one would run without the context's device."""
    known = torch.utils._device._device_constructors
    known.cache_clear()
    before = known()
    with memmgr.budget(LIMIT, quiet=True):
        known.cache_clear()
        assert known() == before
        with torch.device("meta"):
            assert torch.tensor([1.0]).device.type == "meta"


def test_the_end_of_a_storage_is_told(opened: native.Pager) -> None:
    before = opened.stats()["cells"]
    for _ in range(3):
        kept = [_away(opened, _numbers() + i) for i in range(30)]
        assert opened.stats()["cells"] >= before + 30
        del kept
        opened.drain()
    assert opened.stats()["cells"] <= before + 2
    assert opened.stats()["absent_cells"] == 0


def test_a_view_of_a_sparse_tensor_reads_it(opened: native.Pager) -> None:
    dense = torch.arange(4096, dtype=torch.float32).reshape(64, 64) * (torch.arange(64) % 3 == 0)
    sparse = dense.to_sparse()
    for part in (sparse._indices(), sparse._values()):
        opened.adopt(part)
        _away(opened, part)
    assert torch.equal(sparse.t().to_dense(), dense.t())
