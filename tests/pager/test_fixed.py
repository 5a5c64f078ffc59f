"""Memory of other libraries and of other processes: it counts, it is named, and it does not leave."""

import ctypes
import sys
from pathlib import Path

import forkserver
import numpy as np
import pytest
import torch

import memmgr

EACH = 1 << 20
FLOATS = EACH // 4


def budget(limit: int = 8 * EACH) -> memmgr.budget:
    return memmgr.budget(limit, device="cpu", quiet=True)


def of_numpy() -> torch.Tensor:
    return torch.from_numpy(np.ones(FLOATS, np.float32))


def of_buffer() -> torch.Tensor:
    return torch.frombuffer(bytearray(EACH), dtype=torch.float32)


def of_dlpack() -> torch.Tensor:
    return torch.from_dlpack(np.ones(FLOATS, np.float32))


def of_shared_memory() -> torch.Tensor:
    return torch.ones(FLOATS).share_memory_()


OWNERS = [(of_numpy, "library"), (of_buffer, "library"), (of_dlpack, "library"), (of_shared_memory, "shared")]


@pytest.mark.parametrize("make, owner", OWNERS)
@pytest.mark.parametrize("when", ["before", "inside"])
def test_memory_of_others_counts_until_it_ends(make, owner, when):
    tensor = make() if when == "before" else None
    with budget() as mm:
        before = mm.stats()
        tensor = make() if tensor is None else tensor
        for _ in range(3):
            (tensor[:8] + 1).sum()
        now = mm.stats()
        assert now[f"fixed_bytes.{owner}"] == EACH
        assert now["outside_bytes"] == EACH
        assert before["outside_bytes"] == (EACH if when == "before" else 0)
        del tensor
        after = mm.stats()
        assert after[f"fixed_bytes.{owner}"] == after["outside_bytes"] == 0


def test_others_leave_for_memory_that_cannot():
    with budget() as mm:
        ours = [torch.full((FLOATS,), float(i)) * 2 for i in range(6)]
        theirs = [of_numpy() for _ in range(5)]
        total = sum(float(t.sum()) for t in theirs)
        assert mm.stats()["resident_bytes.peak"] <= 8 * EACH
        assert [float(t[0]) for t in ours] == [2.0 * i for i in range(6)]
    assert total == 5 * FLOATS


def test_what_does_not_fit_is_an_error_and_counts_no_more():
    with budget() as mm:
        large = torch.from_numpy(np.ones(9 * FLOATS, np.float32))
        with pytest.raises(memmgr.BudgetError):
            large.sum()
        assert mm.stats()["outside_bytes"] == 0
        torch.ones(FLOATS).sum()


def test_pages_of_a_file_that_numpy_maps_are_named_and_do_not_count(tmp_path: Path):
    path = tmp_path / "large.npy"
    np.save(path, np.ones(16 * FLOATS, np.float32))
    with budget() as mm:
        tensor = torch.from_numpy(np.load(path, mmap_mode="r+"))
        assert float(tensor.sum()) == 16 * FLOATS
        stats = mm.stats()
        assert stats["fixed_bytes.mapped_file"] == 16 * EACH
        assert stats["outside_bytes"] == 0


def test_shared_memory_stays_shared():
    tensor = torch.zeros(FLOATS).share_memory_()
    with budget():
        tensor.add_(1)
        assert tensor.is_shared()
    assert tensor.is_shared()


def test_a_slice_of_a_counted_storage_is_not_counted_again():
    with budget() as mm:
        whole = torch.ones(FLOATS)
        part = torch.empty(0).set_(whole.untyped_storage()[: EACH // 2])
        part.add_(1)
        assert mm.stats()["outside_bytes"] == 0
        assert float(whole[0]) == 2


def test_tensors_whose_sizes_are_symbols_are_passed_over():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        fake = mode.from_tensor(torch.ones(FLOATS), symbolic_context=context)
        with budget():
            assert (fake * 2).shape == fake.shape


def test_the_summary_names_memory_that_cannot_leave(capfd):
    with memmgr.budget(8 * EACH, device="cpu"):
        tensor = of_numpy()
        tensor.sum()
    assert "of the peak fixed: 1.05 MB of NumPy's or another library's" in capfd.readouterr().err


def test_an_error_names_memory_that_cannot_leave():
    with budget():
        tensor = of_numpy()
        tensor.sum()
        with pytest.raises(memmgr.BudgetError) as error:
            torch.empty(100 * FLOATS)
        assert "Fixed tensors: 1.05 MB of NumPy's or another library's." in " ".join(error.value.details)


def test_a_view_from_before_the_budget_shares_the_bytes_in_it():
    child = f"""
import numpy as np, torch, memmgr
for name in ("numpy", "asarray", "dlpack"):
    tensor = torch.ones({FLOATS})
    array = {{"numpy": torch.Tensor.numpy, "asarray": np.asarray, "dlpack": np.from_dlpack}}[name](tensor)
    part = array[5:]
    del array
    with memmgr.budget({4 * EACH}, device="cpu", quiet=True) as mm:
        sum(float((torch.full(({FLOATS},), 2.0) * i).sum()) for i in range(6))
        others = [torch.full(({FLOATS},), 2.0) * i for i in range(6)]
        tensor.add_(1)
        assert (part == 2).all(), name
        if name != "dlpack":
            part[0] = 7
            assert tensor[5] == 7, name
        assert mm.stats()["escapes"] == 1, name
    del part, tensor, others
"""
    forkserver.run([sys.executable, "-c", child], check=True)


@pytest.mark.parametrize("when", ["before", "in an earlier budget"])
@pytest.mark.parametrize("kind", ["usual", "mapped"])
@pytest.mark.parametrize("policy", ["auto", "torture"])
def test_a_slice_of_a_storage_shares_its_bytes_in_later_budgets(tmp_path, when, kind, policy):
    child = f"""
import contextlib, torch, memmgr
torch.arange(60000.0).numpy().tofile({str(tmp_path / "f")!r})
first = memmgr.budget({16 * EACH}, device="cpu", quiet=True)
with first if {when != "before"} else contextlib.nullcontext():
    storage = torch.arange(60000.0).untyped_storage()
    if {kind == "mapped"}:
        storage = torch.UntypedStorage.from_file({str(tmp_path / "f")!r}, False, 240000)
    whole = torch.empty(0).set_(storage, 0, (60000,), (1,))
    whole[:9].mul_(2)
    part = torch.empty(0).set_(storage[4000:200000], 0, (49000,), (1,))
    del storage
    part.add_(3)
    assert torch.equal(part, whole[1000:50000])
for _ in range(2):
    with memmgr.budget({16 * EACH}, device="cpu", quiet=True, policy={policy!r}):
        others = [torch.randn(60000) for _ in range(6)]
        whole.add_(1)
        del others
    others = [torch.zeros(60000) for _ in range(6)]
    assert torch.equal(part, whole[1000:50000])
    assert part.data_ptr() - whole.data_ptr() == 4000
    part.fill_(7)
    assert not any(t.any() for t in others) and bool((whole[1000:50000] == 7).all())
"""
    forkserver.run([sys.executable, "-c", child], check=True)


@pytest.mark.parametrize("policy", ["auto", "torture"])
def test_an_address_from_an_earlier_budget_stays_valid(policy):
    with budget():
        tensor = torch.ones(FLOATS)
        address = tensor.data_ptr()
        ctypes.memset(address, 0, 4)
    with budget(2 * EACH):
        pass
    for _ in range(2):
        with memmgr.budget(8 * EACH, device="cpu", quiet=True, policy=policy):
            others = [torch.randn(FLOATS) for _ in range(10)]
            tensor.add_(1)
            others = [torch.zeros(FLOATS) for _ in range(5)]
            ctypes.memset(address, 0, EACH)
            assert not tensor.any()
            assert tensor.data_ptr() == address
        del others
    assert tensor.data_ptr() == address
