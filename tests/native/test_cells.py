"""What the recorder and the manager expect of the shim's cells: lookup, versions, handles, releases, order."""

from __future__ import annotations

import pytest
import torch

from memmgr import _budget

from .shim import EVICT, MIB, OFFLOAD, OFFLOADED, PRESENT, graph, opened, proven, saved


def _bump(tensor: torch.Tensor) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + 1,))


def test_lookup_and_find() -> None:
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


def test_versions_tell_writes() -> None:
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


def test_counters_are_not_disturbed() -> None:
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


def test_handles_keep_and_release() -> None:
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


def test_release_and_bring_back() -> None:
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


def test_overwritten_makes_a_new_cell() -> None:
    with opened() as native:
        x = torch.randn(64, 64)
        old = native.lookup(x)
        assert native.overwritten(x, None) is None and native.find(x) is None  # nobody asked for the old bytes
        handle = native.handle(x)
        old = handle.cell
        new = native.overwritten(x, None)
        assert new is not None and new is not old and not old.stale
        _bump(x)  # as ADInplaceOrView does after the kernel
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            native.unpack(handle)
        assert old.stale and native.find(x) is new and new.fresh


def test_a_hidden_write_gives_saved_tensors_the_new_bytes() -> None:
    """No counter moves (batch norm's running statistics): autograd would not notice, and neither do we."""
    sparse = torch.eye(3).to_sparse()
    with opened() as native:
        x = torch.randn(64, 64)
        handle = native.handle(x)
        native.overwritten(x, None)
        assert torch.equal(native.unpack(handle), x) and not handle.cell.stale
        assert native.overwritten(sparse, None) is None


def test_leases_pin() -> None:
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


def test_roots_are_kept_for_recipes() -> None:
    with opened() as native:
        proven()
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


def test_exposed_memory_has_no_recipe() -> None:
    with opened() as native:
        proven()
        x = torch.randn(512, 512, requires_grad=True)
        y = x.exp()
        cell = native.find(y)
        assert cell.recipe is not None
        y.detach().numpy()
        assert cell.recipe is None and cell.exposed


def test_a_private_copy_without_room_costs_only_the_recipe() -> None:
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


def test_refs_rebuild_views() -> None:
    with opened() as native:
        base = torch.randn(6, 8, dtype=torch.complex64)
        for view in (base.t(), base[1:, ::2], base.conj(), base.conj().imag, base.real, base[2:3].expand(4, 8)):
            handle = native.handle(view)
            again = native.unpack(handle)
            assert torch.equal(again, view) and again.stride() == view.stride()
            assert (again.is_conj(), again.is_neg(), again.dtype) == (view.is_conj(), view.is_neg(), view.dtype)


def test_columns_and_arming() -> None:
    with opened("1GB") as native:
        proven()
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


def test_pressure_releases_in_the_armed_order() -> None:
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


def test_who_reads_ahead_is_woken_only_where_there_is_room() -> None:
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


def test_checksums_and_clones() -> None:
    with opened() as native:
        a, b = torch.arange(1000.0), torch.arange(1000.0)
        assert native.checksum(a) == native.checksum(b[10:]) and isinstance(native.checksum(a), int)
        b[999] += 1
        assert native.checksum(a) != native.checksum(b)
        cell = native.lookup(a)
        copy = native.clone_storage(cell)
        assert torch.equal(copy.view(torch.float32), a) and native.checksum(copy) == native.checksum(a)
