"""What the recorder and the manager expect of a native, as checks by name. Run by test_contract.py, once per native.

`python contract.py NAME [NAME...]` runs some in this process; MEMMGR_SHIM=0 makes it the accounting path.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import memmgr
import memmgr._native_py as native_py
from memmgr import _budget, _sleep, _stock

EVICT, OFFLOAD = 1, 2
PRESENT, EVICTED, OFFLOADED = range(3)
TRUST_YES = 1
CHECKS: dict[str, Callable[[], None]] = {}
MIB = 1 << 20
native_py.warned = True  # the warning has a test of its own


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def py_check(function: Callable[[], None]) -> Callable[[], None]:
    """Of the accounting path alone: about how it does it."""
    return check(function) if os.environ.get("MEMMGR_SHIM") == "0" else function


@contextmanager
def opened(limit: Any = "1GB", policy: str = "auto", **options: Any) -> Iterator[Any]:
    with memmgr.budget(limit, policy=policy, quiet=True, _sleep=False, **options):
        manager = _budget.current()
        assert manager is not None
        yield manager.native


def saved(native: Any) -> list[Any]:
    return list(native.handled())


def graph(n: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf, and a loss whose graph saves exp's and sigmoid's results, which nobody else holds."""
    x = torch.randn(n, n, requires_grad=True)
    return x, x.exp().sigmoid().sum()


def proven(native: Any) -> None:
    """The kinds of `graph` prove themselves at their first use."""
    graph()
    gc.collect()


def _public(thing: Any) -> list[str]:
    return sorted(name for name in dir(thing) if not name.startswith("_"))


@check
def api_is_complete() -> None:
    """What test_contract.py compares between the natives."""
    native = _budget._native()
    print("functions", *_public(native))
    print("Cell", *_public(native.Cell))
    print("Ref", *_public(native.Ref))
    print("Recipe", *_public(native.Recipe))


@check
def dictionaries_have_the_same_keys() -> None:
    with opened() as native:
        assert {"floor_bytes", "held_peak_bytes", "evictions", "prefetch_cancels"} <= set(native.counters())
        assert {"resident_peak_bytes", "unmanaged_peak_bytes", "outside_bytes"} <= set(native.arena_stats())
        assert {"queued_write_bytes", "used_peak_bytes", "direct"} <= set(native.tier_stats())
        assert len(native.pressure()) == 7 and len(native.columns()) == 9
        print(sorted(native.counters()), sorted(native.tier_stats()))
        print("arena", *sorted(native.arena_stats()))
    assert native.tier_stats() == {}


def _bump(tensor: torch.Tensor) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + 1,))


@check
def lookup_and_find() -> None:
    sparse = torch.eye(3).to_sparse()
    with opened() as native:
        with torch.no_grad():
            x = torch.randn(64, 64)
            y = x + 1
        assert native.find(x) is None and native.find(3) is None and native.lookup("x") is None
        cell = native.lookup(x)
        assert type(cell) is native.Cell and cell.nbytes == 64 * 64 * 4 and cell.recipe is None and cell.present
        assert native.find(x) is cell and native.find(x.t()) is cell and native.lookup(x[3]) is cell
        assert native.find(y) is None
        assert native.lookup(y) is not cell
        assert native.lookup(sparse) is None
        assert native.lookup(torch.empty(3, device="meta")) is None
        assert (cell.handles, cell.names, cell.slot, cell.gone, cell.held) == (0, 0, -1, PRESENT, False)


@check
def versions_tell_writes() -> None:
    with opened() as native:
        x = torch.randn(64)
        cell = native.lookup(x)
        view = x[2:]
        x.data.add_(1)  # another counter, dispatched: the recorder announces it
        after = native.find(x)
        assert after is None or after is not cell or not cell.names
        cell = native.lookup(x)
        _bump(view)  # a write that nobody announces
        assert not cell.fresh and native.find(x) is None
        assert native.lookup(x) is not cell


@check
def counters_are_not_disturbed() -> None:
    """Looking a tensor up leaves its version, and those of its relatives, alone."""
    with opened() as native:
        x = torch.randn(8)
        x.add_(1)
        other = x.data
        native.lookup(x)
        native.lookup(other)
        native.lookup(x)
        assert (x._version, other._version) == (1, 0)
        cell = native.find(x)
        other.mul_(2)
        assert native.find(x) is not cell or cell.names == 0


@check
def handles_keep_and_release() -> None:
    with opened() as native:
        before = native.resident()
        with torch.no_grad():
            y = torch.randn(512, 512) + 1
        handle = native.handle(y)
        cell = handle.cell
        assert cell.handles == 1 and cell.held and saved(native) == [cell] and not cell.ours_alone
        assert native.resident() - before >= MIB
        with torch.no_grad():
            reference = y.clone()
        size = cell.nbytes
        del y
        assert cell.ours_alone
        assert native.pressure()[2] == size
        out = native.unpack(handle)
        assert torch.equal(out, reference) and not cell.ours_alone
        del out, reference, handle
        assert saved(native) == [] and not cell.held
        assert native.resident() == before and native.pressure()[2] == 0


@check
def a_storage_object_alone_is_a_holder() -> None:
    with opened() as native:
        y = torch.zeros(512, 512) + 1
        storage = y.untyped_storage()
        handle = native.handle(y)
        cell = handle.cell
        del y
        assert not cell.ours_alone and not native.release(cell, OFFLOAD)
        del storage


@check
def release_and_bring_back() -> None:
    with opened() as native:
        with torch.no_grad():
            y = torch.randn(512, 512) + 1
        want = y.clone()
        handle = native.handle(y)
        cell = handle.cell
        assert not native.release(cell, OFFLOAD)  # the program has it
        del y
        resident = native.resident()
        assert native.release(cell, OFFLOAD)
        assert cell.gone == OFFLOADED and not cell.present and cell.slot >= 0
        assert native.resident() == resident - cell.nbytes
        assert native.pressure()[6] == 1
        assert not native.release(cell, OFFLOAD)
        assert native.lease(cell) is None
        assert native.bring_back(cell) is False and cell.present and cell.gone == PRESENT
        assert native.resident() == resident
        assert native.release(cell, OFFLOAD)  # clean now
        assert native.counters()["clean_drops"] == 1 and native.counters()["offloads"] == 1
        assert torch.equal(native.unpack(handle), want)
        assert cell.slot == -1, "once somebody has the bytes, the copy is worth nothing"
        assert native.counters()["reloads"] == 2


@check
def who_reads_ahead_is_woken_only_where_there_is_room() -> None:
    """Woken at every use it took the GIL some hundred times a pass, for nothing, from a pass that runs at its floor."""
    with opened("48MB", policy="lru+offload") as native:
        daemon = _budget.current().daemon
        assert daemon is not None
        woken: list[int] = []
        daemon.wake = lambda: woken.append(1)
        with torch.no_grad():
            handles = [native.handle(torch.randn(1024, 512) + 1) for _ in range(4)]
        for handle in handles:
            assert native.release(handle.cell, OFFLOAD)
        assert native.reserve_bytes() >= 3 << 20
        ballast = []
        while native.resident() + native.reserve_bytes() < native.pressure()[1]:
            ballast.append(torch.empty(1 << 18))
        native.unpack(handles[0])
        assert not woken
        del ballast
        native.unpack(handles[1])
        assert woken


@check
def eviction_and_recomputation() -> None:
    with opened() as native:
        proven(native)
        x, loss = graph()
        want = [c for c in saved(native) if c.recipe is not None and c.ours_alone]
        assert len(want) >= 2
        for cell in want:
            assert cell.recipe.trust == TRUST_YES, str(cell.recipe.func)
            assert native.release(cell, EVICT) and cell.gone == EVICTED and not cell.present
            assert native.bring_back(cell) is True  # wants recomputation
        loss.backward()
        e = x.detach().exp()
        s = e.sigmoid()
        assert torch.equal(x.grad, ((1 - s) * s) * e) or torch.allclose(x.grad, (1 - s) * s * e)
        assert native.counters()["evictions"] == len(want)
        del loss, want, cell
        assert saved(native) == []


@check
def unpack_says_modified_like_autograd() -> None:
    def message(manage: bool) -> str:
        x = torch.randn(4, 3, requires_grad=True)
        y = x.exp()
        z = y.sum()
        y.add_(1)
        try:
            z.backward() if False else y.sum().backward()
        except RuntimeError as error:
            return str(error)
        raise AssertionError("no error")

    with opened():
        text = message(True)
    plain = message(False)
    assert text.startswith("one of the variables needed for gradient computation has been modified by an inplace")
    assert "Hint: enable anomaly detection" in text
    assert plain[:90] == text[:90]


@check
def overwritten_makes_a_new_cell() -> None:
    with opened() as native:
        x = torch.randn(64, 64)
        old = native.lookup(x)
        assert native.overwritten(x, None) is None and native.find(x) is None  # nobody asked for the old bytes
        handle = native.handle(x)
        old = handle.cell
        new = native.overwritten(x, None)
        assert new is not None and new is not old and not old.stale
        _bump(x)  # as ADInplaceOrView does after the kernel
        try:
            native.unpack(handle)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            raise AssertionError("a stale handle was unpacked")
        assert old.stale and native.find(x) is new and new.fresh


@check
def a_hidden_write_gives_saved_tensors_the_new_bytes() -> None:
    """No counter moves (batch norm's running statistics): autograd would not notice, and neither do we."""
    sparse = torch.eye(3).to_sparse()
    with opened() as native:
        x = torch.randn(64, 64)
        handle = native.handle(x)
        native.overwritten(x, None)
        assert torch.equal(native.unpack(handle), x) and not handle.cell.stale
        assert native.overwritten(sparse, None) is None


@check
def a_write_through_data_keeps_the_cell() -> None:
    """Autograd's own saved tensor would read the new bytes, so ours does too."""
    with opened() as native:
        x = torch.randn(64, 64, requires_grad=True)
        y = x.detach() * 2
        z = (y * x).sum()
        y.data.fill_(3.0)
        z.backward()
        assert torch.equal(x.grad, torch.full((64, 64), 3.0))
        del native


@check
def leases_pin() -> None:
    with opened() as native:
        y = torch.zeros(512, 512) + 1
        handle = native.handle(y)
        cell = handle.cell
        del y
        lease = native.lease(cell)
        assert lease.dtype is torch.uint8 and lease.numel() == cell.nbytes
        assert not cell.ours_alone and not native.release(cell, OFFLOAD)
        del lease
        assert native.release(cell, OFFLOAD)


@check
def roots_are_kept_for_recipes() -> None:
    with opened() as native:
        proven(native)
        x = torch.randn(512, 512, requires_grad=True)
        with torch.no_grad():
            a = torch.randn(512, 512) + 1
        y = (x * 2 + a).exp().sum()
        root = native.find(a)
        assert root is not None and root.names == 1 and root.recipe is None and root.held
        del a
        assert root.present and root in native.kept_roots()
        y.backward()
        del y
        native.end_pass()
        native.resident()
        assert root.names == 0 and not root.held


@check
def stranding_and_losing() -> None:
    with opened() as native:
        proven(native)
        x = torch.randn(512, 512, requires_grad=True)
        with torch.no_grad():
            a, root = torch.randn(512, 512), torch.randn(512, 512)
        y = (x + a).exp()
        loss = y.sum()
        cell = native.find(y)
        del y
        assert cell.ours_alone
        assert native.would_strand(a) == []
        assert native.release(cell, EVICT) and cell.gone == EVICTED
        assert native.would_strand(a) == [cell]
        assert native.would_strand(native.find(a)) == [cell]
        want = (x.detach() + a).exp()
        a.add_(1)  # rule 3: what needs the old bytes is made before the write
        assert cell.present and cell.recipe is None
        loss.backward()
        assert torch.equal(x.grad, want)

        y = (x + root).exp()
        cell = native.find(y)
        made_by = cell.recipe
        native.lose(native.find(root))
        assert not made_by.ok


@check
def exposed_memory_has_no_recipe() -> None:
    with opened() as native:
        proven(native)
        x = torch.randn(512, 512, requires_grad=True)
        y = x.exp()
        cell = native.find(y)
        assert cell.recipe is not None
        y.detach().numpy()
        assert cell.recipe is None and cell.exposed


@check
def a_private_copy_without_room_costs_only_the_recipe() -> None:
    add = torch.ops.aten.add.Tensor
    with opened() as native, torch.no_grad():
        x = torch.zeros(64, 64)
        x.numpy()
        native.lookup(x)
        copied = native.record(add, (x, 1), None)
        assert copied.ok and copied.inputs[0] is not native.find(x) and not copied.inputs[0].exposed
        large = torch.zeros(512, 512)
        large.numpy()
        assert not native.record(add, (large, 1), None).ok
        del copied  # a root that only a recipe holds would be given up for the next one
        native.set_budget(native.resident())
        assert not native.record(add, (x, 1), None).ok
        native.set_budget(2**64 - 1)


@py_check
def a_record_that_fails_keeps_no_copy() -> None:
    sparse = torch.eye(64).to_sparse()
    with opened() as native, torch.no_grad():
        x = torch.zeros(64, 64)
        x.numpy()
        native.lookup(x)
        before = native.resident(), len(native.table())
        assert native.record(torch.ops.aten.mm.default, (x, sparse), None) is None
        assert (native.resident(), len(native.table())) == before


@py_check
def placement_is_refused_and_said() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with memmgr.budget("1GB", quiet=True, _placement="window+apart"):
            w = torch.ones(64, 64, requires_grad=True)
            w.exp().sum().backward()
    assert w.grad is not None
    assert [str(w.message) for w in said if "placement" in str(w.message)], [str(w.message) for w in said]


@py_check
def what_a_replay_fills_is_counted() -> None:
    with opened() as native:
        for trained in (False, True):  # the first time proves the kinds
            x = torch.randn(512, 512, requires_grad=True)
            with torch.enable_grad():
                noise = torch.empty(512, 512).fill_(3.0)
                loss = (x * noise).sum()
            cell = native.find(noise)
            del noise
            if trained:
                resident = native.resident()
                assert native.release(cell, EVICT) and native.resident() == resident - cell.nbytes
                loss.backward()
                want = torch.full((512, 512), 3.0)
                assert torch.equal(x.grad, want)
                del want
            del loss, cell
        native.arena_check()
        x.grad = None
        native.end_pass()
        assert native.resident() < resident


@py_check
def a_write_to_an_unpacked_tensor_is_one_to_the_saved_tensor() -> None:
    def attempt() -> str:
        x = torch.randn(8, 8, requires_grad=True)
        y = x.exp()
        loss = y.sum()
        with torch.no_grad():
            y.grad_fn._saved_result.add_(1)
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)[:80]
        return ""

    plain = attempt()
    with opened():
        assert plain and attempt() == plain


@py_check
def threads_do_not_spend_the_same_room() -> None:
    with opened() as native:
        native.set_budget(native.resident() + 1000)
        promised, done = threading.Event(), threading.Event()

        def other() -> None:
            assert native._fits(600, promise=True)
            promised.set()
            done.wait(10)
            native._promise(0)

        thread = threading.Thread(target=other)
        thread.start()
        assert promised.wait(10) and native._fits(400) and not native._fits(401)
        done.set()
        thread.join()
        assert native._fits(1000)
        native.set_budget(2**64 - 1)


@py_check
def signals_wait_for_the_books() -> None:
    before = signal.default_int_handler
    signal.signal(signal.SIGINT, before)  # a shell's background job begins with it ignored
    with opened() as native:
        with native._lock:
            signal.raise_signal(signal.SIGINT)  # would be raised here
            time.sleep(0.01)
        try:
            for _ in range(200):
                time.sleep(0.01)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the interrupt was lost")
        torch.zeros(3) + 1
    assert signal.getsignal(signal.SIGINT) is before


@check
def columns_and_arming() -> None:
    with opened("1GB") as native:
        proven(native)
        _, loss = graph()
        cells, *buffers = native.columns()
        sizes = torch.frombuffer(buffers[0], dtype=torch.int64).tolist()
        assert sizes == [c.nbytes for c in cells] and all(c.ours_alone for c in cells)
        assert [len(b) for b in buffers] == [8 * len(cells)] * 5 + [len(cells)] * 2 + [8 * len(cells)]
        order = torch.frombuffer(buffers[7], dtype=torch.int64).tolist()
        assert order == sorted(order)
        native.arm([(c, EVICT) for c in cells])
        assert native.pressure()[4] == sum(sizes) and native.columns()[0] == []
        native.disarm_all()
        assert native.pressure()[4] == 0 and len(native.columns()[0]) == len(cells)
        del loss


@check
def what_nobody_saved_counts_as_run_again() -> None:
    """It is there as long as the program has it. Once that lets go, what was made from it cannot be made without it."""
    with opened("1GB") as native:
        x = torch.randn(512, 512, requires_grad=True)
        for _ in range(3):  # the kinds prove themselves
            y = x * 2.0  # saves nothing
            z = y.exp()  # saves its result
            loss = z.sum()
            cell = max((c for c in saved(native) if c.nbytes == x.nbytes), key=lambda c: c.seq)
            del z

        def chain() -> tuple[float, float]:
            cells, *buffers = native.columns()
            at = next(i for i, c in enumerate(cells) if c is cell)
            return tuple(torch.frombuffer(buffers[k], dtype=torch.float64)[at].item() for k in (3, 4))

        made_y = cell.recipe.inputs[0].recipe
        assert cell.recipe.inputs[0].present and made_y.cost > 0
        assert made_y.inputs[0].recipe is not None  # x can be made again, but is the program's own
        assert chain() == (made_y.cost, made_y.cost)
        w = y.sin()  # saves y
        assert chain() == (0.0, 0.0)
        del loss, w, y


@check
def pressure_releases_in_the_armed_order() -> None:
    with opened("1GB") as native, torch.no_grad():
        ys = [torch.zeros(256, 256) + i for i in range(4)]
        handles = [native.handle(y) for y in ys]
        del ys
        cells = [h.cell for h in handles]
        native.arm([(c, OFFLOAD) for c in (cells[2], cells[0])])
        native.set_budget(native.resident())
        keep = torch.zeros(256, 256)
        assert [c.gone for c in cells] == [PRESENT, PRESENT, OFFLOADED, PRESENT]
        more = torch.zeros(256, 256)
        assert [c.gone for c in cells] == [OFFLOADED, PRESENT, OFFLOADED, PRESENT]
        rest = torch.zeros(256, 512)  # nothing is armed: whatever may leave, oldest save first
        assert [c.gone for c in cells] == [OFFLOADED] * 4
        assert native.counters()["unranked"] == 2
        assert native.resident() <= native.pressure()[1]
        native.set_budget(2**64 - 1)
        del keep, more, rest


@check
def out_of_memory_is_a_budget_error() -> None:
    try:
        with opened(8 * MIB, policy="offload") as native:
            kept = [torch.zeros(MIB // 4) for _ in range(6)]
            torch.zeros(3 * MIB // 4)
    except memmgr.BudgetError as error:
        assert str(error).startswith("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), error
        assert error.floor_bytes > 8 * MIB and error.budget_bytes == 8 * MIB
        del kept
    else:
        raise AssertionError("no error")
    assert native.counters()["floor_bytes"] > 8 * MIB
    torch.zeros(MIB)  # and everything is as it was


@check
def write_back_then_clean_drop() -> None:
    with opened() as native:
        y = torch.randn(512, 512) + 1
        want = y.clone()
        handle = native.handle(y)
        cell = handle.cell
        assert not native.write_back(cell)  # the program has it
        del y
        assert native.write_back(cell) and not native.write_back(cell) and cell.slot >= 0
        assert native.release(cell, OFFLOAD) and native.counters()["clean_drops"] == 1
        assert native.offloaded(10)[0] == [cell]
        assert native.prefetch(cell, 0) == 1 and cell.arriving and native.prefetch(cell, 0) == -1
        assert torch.equal(native.unpack(handle), want)
        assert native.counters()["prefetch_hits"] == 1


@check
def eviction_during_a_write_back() -> None:
    """The write must have ended before its source is freed, and its copy goes with the bytes."""
    with opened(disk=(tempfile.gettempdir(), "1GB"), _throttle=50 * MIB) as native:
        proven(native)
        x, loss = graph(1024)
        cell = next(c for c in saved(native) if c.recipe is not None and c.ours_alone)
        assert native.write_back(cell)
        assert native.release(cell, EVICT)
        assert cell.gone == EVICTED and cell.slot == -1
        loss.backward()
        assert x.grad is not None


@check
def a_failing_disk_loses_nothing() -> None:
    with opened() as native, torch.no_grad():
        y = torch.randn(512, 512) + 1
        want = y.clone()
        handle = native.handle(y)
        cell = handle.cell
        del y
        native.tier_inject(errno.ENOSPC, 0, 0, 0)
        assert not native.release(cell, OFFLOAD) and cell.present
        assert native.counters()["tier_errors"] == 1
        native.tier_inject(0, 0, 0, 0)
        assert native.release(cell, OFFLOAD)
        native.tier_inject(0, 0, errno.EIO, 0)
        try:
            native.bring_back(cell)
        except OSError:
            pass
        else:
            raise AssertionError("no error")
        native.tier_inject(0, 0, 0, 0)
        assert torch.equal(native.unpack(handle), want)


@check
def a_recipe_that_is_cut_while_its_copy_ends_is_not_counted_on() -> None:
    """To evict, a write that is under way is waited for without the lock. What nothing can make again is not dropped then."""
    root = torch.arange(MIB / 4)
    with opened(_throttle=4_000_000) as native:
        native.handle(root * 2.0)  # the kind proves itself
        for _ in range(20):
            handle = native.handle(root * 2.0)
            cell = handle.cell
            written = native.tier_stats()["written_bytes"]
            assert native.write_back(cell)
            while native.tier_stats()["written_bytes"] == written:  # what has not begun is not waited for
                time.sleep(0.001)
            thread = threading.Thread(target=native.release, args=(cell, EVICT))
            thread.start()
            while cell.slot >= 0:  # the thread has taken it, and waits
                time.sleep(0.001)
            caught = cell.gone == PRESENT  # else this thread came too late
            if caught:
                native.drop_recipe(cell)
            thread.join()
            assert torch.equal(native.unpack(handle), root * 2.0)
            if caught:
                break
        assert caught


@check
def checksums_and_clones() -> None:
    with opened() as native:
        a, b = torch.arange(1000.0), torch.arange(1000.0)
        assert native.checksum(a) == native.checksum(b[10:]) and isinstance(native.checksum(a), int)
        b[999] += 1
        assert native.checksum(a) != native.checksum(b)
        cell = native.lookup(a)
        copy = native.clone_storage(cell)
        assert torch.equal(copy.view(torch.float32), a) and native.checksum(copy) == native.checksum(a)


class Counting:
    """A native that counts the private copies made of it."""

    def __init__(self, native: Any) -> None:
        self.native, self.copies, self.taken = native, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def clone_storage(self, cell: Any) -> Any:
        self.copies += 1
        return self.native.clone_storage(cell)

    def take(self, cell: Any, tensor: torch.Tensor) -> Any:
        own = self.native.take(cell, tensor)
        self.taken += own is not None
        return own


@check
def only_what_one_tensor_has_alone_is_taken() -> None:
    with opened() as native:
        base = torch.randn(100)

        def cell_and_tensor() -> tuple[Any, torch.Tensor]:
            made = base * 2.0
            cell = native.find(made)
            assert cell is not None and cell.recipe is not None and cell.present
            return cell, made

        cell, made = cell_and_tensor()
        alias = made.view(10, 10)
        assert native.take(cell, made) is None and cell.present, "somebody else reads those bytes"
        del alias
        handle = native.handle(made)
        assert native.take(cell, made) is None and cell.present, "autograd wants them"
        del handle
        gc.collect()
        assert native.take(cell, base) is None, "other bytes"
        assert native.take(cell, made) is made and not cell.present
        assert native.find(made) is None, "the cell is found by bytes that are no longer its own"
        assert native.misplaced() == 0


@check
def a_write_on_the_way_needs_no_copy() -> None:
    with opened(policy="evict") as native:
        manager = _budget.current()
        assert manager is not None
        x = torch.randn(256, 256, requires_grad=True)

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            torch.manual_seed(1)
            mask = torch.empty_like(x).uniform_().div_(0.8)
            return (x * mask).sum(), mask.detach().clone()

        for _ in range(2):  # the kinds prove themselves
            loss, want = forward()
        assert all(native.release(cell, EVICT) for cell in saved(native))
        manager.replayer._native = counting = Counting(native)
        loss.backward()
        assert x.grad is not None and torch.equal(x.grad, want)
        assert (counting.copies, counting.taken) == (0, 1)


@check
def what_others_read_is_copied_before_a_write() -> None:
    with opened(policy="evict") as native:
        manager = _budget.current()
        assert manager is not None
        x, y = (torch.randn(256, 256, requires_grad=True) for _ in range(2))
        base = torch.randn(256, 256)

        def forward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            first = base * 2.0  # saved before it is written, so that its version is wanted as well
            loss = (x * first.clone()).sum()
            second = first + 0.0
            loss = loss + (y * second.mul_(first)).sum()
            return loss, base * 2.0, base * 2.0 * (base * 2.0)

        for _ in range(2):
            loss, want_x, want_y = forward()
        assert all(native.release(cell, EVICT) for cell in saved(native))
        manager.replayer._native = counting = Counting(native)
        loss.backward()
        assert x.grad is not None and y.grad is not None
        assert torch.equal(x.grad, want_x) and torch.equal(y.grad, want_y)
        assert counting.copies + counting.taken == 1


@check
def random_bytes_that_came_back_may_leave_again() -> None:
    with opened(policy="evict") as native:
        x = torch.randn(256, 256, requires_grad=True)
        for _ in range(2):
            loss = (x * torch.empty_like(x).uniform_()).sum()
        (cell,) = saved(native)
        for _ in range(2):
            assert native.release(cell, EVICT) and not cell.present
            loss.backward(retain_graph=True)
            assert cell.present


def two_chains(base: torch.Tensor, n: int) -> torch.Tensor:
    """n numbers, whose two factors are made from twice as many each."""

    def factor(scale: float) -> torch.Tensor:
        wide = base * scale
        return wide[:n] + wide[n:]

    return factor(2.0) * factor(3.0)


def chains_dropped(native: Any, base: torch.Tensor, room: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, loss, x's gradient): the product of two chains is gone, and there is room for `room` tensors of its size."""
    n = base.numel() // 2
    x = torch.randn(n, requires_grad=True)
    for _ in range(2):
        loss = (x * two_chains(base, n)).sum()
    want = two_chains(base, n)
    (cell,) = [c for c in saved(native) if c.nbytes == 4 * n]
    assert native.release(cell, EVICT) and cell.slot < 0
    gc.collect()
    native.set_budget(native.resident() + int(room * 4 * n))
    return x, loss, want


@check
def what_was_made_on_the_way_waits_below() -> None:
    # One factor beside the making of the other takes four tensors; the product of both takes three.
    base = torch.randn(MIB // 2)
    with opened() as native:
        x, loss, want = chains_dropped(native, base, 3.4)
        before = native.counters()
        loss.backward()
        native.set_budget(1000 * MIB)
        assert x.grad is not None and torch.equal(x.grad, want)
        after = native.counters()
        assert after["offloads"] == before["offloads"] + 1 and after["reloads"] == before["reloads"] + 1
        assert after["floor_bytes"] == before["floor_bytes"], "the run did without what was refused"
        del loss
        gc.collect()
        assert not saved(native) and native.tier_stats()["used_bytes"] == 0, "what waited there is over"


@check
def a_recomputation_without_room_is_an_error_that_names_the_floor() -> None:
    def check_one(policy: str, room: float) -> None:
        base = torch.randn(MIB // 2)
        with opened(policy=policy) as native:
            _, loss, _ = chains_dropped(native, base, room)
            before = native.counters()["floor_bytes"]
            try:
                loss.backward()
            except torch.OutOfMemoryError:
                pass
            else:
                raise AssertionError("there was no room")
            native.set_budget(1000 * MIB)
            assert native.counters()["floor_bytes"] > before
            del loss

    check_one("evict", 3.4)
    check_one("auto", 2.4)


@check
def near_the_floor_what_needs_room_is_offloaded() -> None:
    """What making a cell takes at once has to be there beside the floor, or the cell leaves by a copy."""
    n = MIB // 4
    base = torch.randn(2 * n)
    with opened() as native:
        x = torch.randn(n, requires_grad=True)
        for _ in range(2):
            loss = (x * two_chains(base, n)).sum()
        (cell,) = [c for c in saved(native) if c.nbytes == 4 * n]
        held = torch.empty(64 * MIB, dtype=torch.uint8)
        x.detach() * 1.0  # something is allocated beside it: the floor is known
        floor = native.counters()["floor_bytes"]
        assert floor >= 64 * MIB
        # The widest op of its chain reads what is there anyway and makes two tensors, the next reads those and makes one.
        for room, evicts in ((2.1, True), (1.9, False)):
            native.set_budget(floor + int(room * 4 * n))
            columns = native.columns()
            assert bool(columns[6][columns[0].index(cell)]) is evicts
        assert native.release(cell, EVICT) and cell.slot >= 0, "dropped without room to make it again"
        del held
        loss.backward()


@check
def refs_rebuild_views() -> None:
    with opened() as native:
        base = torch.randn(6, 8, dtype=torch.complex64)
        for view in (base.t(), base[1:, ::2], base.conj(), base.conj().imag, base.real, base[2:3].expand(4, 8)):
            handle = native.handle(view)
            again = native.unpack(handle)
            assert torch.equal(again, view) and again.stride() == view.stride()
            assert (again.is_conj(), again.is_neg(), again.dtype) == (view.is_conj(), view.is_neg(), view.dtype)


@check
def circumstances_are_interned() -> None:
    native = _budget._native()
    now = native.environment()
    values = native.environment_values(now)
    assert native.environment() == now and all(isinstance(v, int) for v in values)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert native.environment() != now
    torch.set_num_threads(threads)
    assert native.environment() == now
    torch.set_flush_denormal(True)
    assert native.environment_values(native.environment())[14] != 0
    torch.set_flush_denormal(False)
    print(values)


@contextmanager
def _filling(asked: list[str]) -> Iterator[None]:
    """Another thread fills a tuple from a generator; whoever is asked for something in here lets it finish first."""
    begun, go, done = threading.Event(), threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def numbers() -> Iterator[int]:
        begun.set()
        go.wait(10)
        yield from range(3)

    def fill() -> None:
        try:
            assert tuple(n for n in numbers()) == (0, 1, 2)
        except BaseException as error:
            failed.append(error)
        done.set()

    def hand_over(name: str) -> None:
        asked.append(name)
        go.set()
        done.wait(10)

    class Asked(torch.Tensor):
        @property
        def grad_fn(self) -> Any:
            hand_over("grad_fn")

    class Optimizer(torch.optim.SGD):
        @property
        def param_groups(self) -> Any:
            hand_over("param_groups")
            return []

        @property
        def state(self) -> Any:
            hand_over("state")
            return {}

    def device(self: torch.Tensor) -> torch.device:
        hand_over("device")
        return torch.device("cpu")

    there = [torch.randn(2).as_subclass(Asked), Optimizer.__new__(Optimizer)]
    thread = threading.Thread(target=fill)
    thread.start()
    begun.wait(10)
    torch.Tensor.device = property(device)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del torch.Tensor.device
        go.set()
        thread.join()
        del there
    if failed:
        raise failed[0]


@check
def tuples_that_others_fill_are_left_alone() -> None:
    """Who looks for all tensors must not hold a reference to what another thread is about to make of a generator."""
    looks: dict[str, Callable[[Any], Any]] = {
        "device": lambda manager: _stock.live_tensors(manager.native, "cpu"),
        "state": lambda manager: _stock.holders(manager.native, "cpu"),
        "param_groups": lambda manager: _stock.missing_states(manager.native, "cpu"),
        "grad_fn": lambda manager: _sleep.adopt_graph(manager),
    }
    for name, look in looks.items():
        asked: list[str] = []
        with opened():
            manager = _budget.current()
            with _filling(asked):
                look(manager)
        assert asked and name in asked, (name, asked)


@check
def what_is_found_is_of_the_types_asked_for() -> None:
    class Odd(torch.nn.Parameter):
        pass

    there: list[Any] = [torch.randn(2), torch.nn.Parameter(torch.randn(2)), Odd(torch.randn(2)), torch.nn.Linear(2, 2)]
    with opened() as native:
        tensors = native.objects_of((torch.Tensor,))
        both = native.objects_of((torch.nn.Parameter, torch.nn.Module))
    assert all(any(x is y for y in tensors) for x in there[:3]) and not any(x is there[3] for x in tensors)
    assert all(any(x is y for y in both) for x in there[1:]) and not any(x is there[0] for x in both)
    assert len({id(x) for x in both}) == len(both)
    assert all(issubclass(type(x), torch.Tensor) for x in tensors)


@check
def nothing_stays() -> None:
    with opened() as native:
        x, loss = graph()
        loss.backward()
        del loss, x
    gc.collect()
    assert saved(native) == [] and native.table() == []
    native.arena_check()


@check
def a_thousand_ops_leak_nothing() -> None:
    with opened() as native:
        for _ in range(3):
            for _ in range(60):
                _, loss = graph(32)
                loss.backward()
            del loss
            gc.collect()
            seen = (native.resident(), len(native.table()), native.pressure()[2])
        for _ in range(60):
            _, loss = graph(32)
            loss.backward()
        del loss, _
        gc.collect()
        assert native.resident() <= seen[0] and len(native.table()) <= seen[1] and native.pressure()[2] == seen[2]
        native.arena_check()


if __name__ == "__main__":
    for wanted in sys.argv[1:] or list(CHECKS):
        CHECKS[wanted]()
        print("passed", wanted, flush=True)
