"""Tensors that are mapped from files: counted, paged from the file itself, with the bits and the sharing of plain torch."""

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import memmgr

SIDE, COUNT = 256, 8
EACH = SIDE * SIDE * 4
LIMIT = 4 * EACH


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "weights.safetensors"
    save_file({f"w{i}": torch.randn(SIDE, SIDE) / 16 for i in range(COUNT)}, path)
    return path


def mapped(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


def torch_mapped(path: Path) -> dict[str, torch.Tensor]:
    """The same weights out of a checkpoint of torch's own."""
    own = path.with_suffix(".pt")
    if not own.exists():
        torch.save({name: t.clone() for name, t in load_file(path).items()}, own)
    return torch.load(own, mmap=True)


def run(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    x = torch.ones(SIDE, SIDE)
    for _ in range(2):
        for w in weights.values():
            x = torch.tanh(x @ w)
    return x


def train(weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    for w in weights.values():
        w.requires_grad_()
    optimizer = torch.optim.AdamW(weights.values(), lr=0.01)
    for _ in range(3):
        run(weights).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [w.detach().clone() for w in weights.values()]


def budget(limit: int = LIMIT, **options: object) -> memmgr.budget:
    return memmgr.budget(limit, device="cpu", quiet=True, **options)


def pages_of(path: Path) -> int:
    """Bytes of the file's mappings that are in this process's memory."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(path.name)
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.parametrize("load", [mapped, torch_mapped])
@pytest.mark.parametrize("options", [{}, {"disk": False}, {"policy": "evict"}, {"policy": "offload"}, {"verify": True}])
def test_inference_reads_weights_from_their_file_and_writes_none(file, load, options):
    expected = run(load(file))
    with budget(**options) as mm:
        weights = load(file)
        got = [run(weights) for _ in range(2)]
        assert pages_of(file if load is mapped else file.with_suffix(".pt")) < LIMIT / 2
        stats = mm.stats()
    assert all(torch.equal(g, expected) for g in got)
    assert stats["resident_bytes.peak"] <= LIMIT
    assert stats["reloads"] > COUNT
    assert stats["mapped_bytes"] == COUNT * EACH  # none has another copy


@pytest.mark.parametrize("load", [mapped, torch_mapped])
@pytest.mark.parametrize(
    "policy", ["auto", pytest.param("offload", marks=pytest.mark.slow), "torture"]
)  # auto offloads
@pytest.mark.parametrize("before", [False, True], ids=["loaded inside", "loaded before"])
def test_training_has_the_bits_of_plain_torch(file, load, policy, before):
    expected = train(load(file))
    weights = load(file) if before else None
    with budget(10 * EACH, policy=policy) as mm:
        weights = weights or load(file)
        got = train(weights)
        assert mm.stats()["resident_bytes.peak"] <= 10 * EACH
    assert all(map(torch.equal, got, expected))
    assert all(map(torch.equal, weights.values(), expected))
    assert not any(map(torch.equal, load(file).values(), expected))  # the file is as it was


def test_weights_that_were_written_before_the_budget_keep_their_bytes(file):
    weights, expected = load_file(file), load_file(file)
    for some in (weights, expected):
        some["w3"][7] = 5
        some["w4"].mul_(2)
    before = run(expected)
    with budget() as mm:
        assert torch.equal(run(weights), before)
        # Nor is w5's beginning a page of the file any more.
        assert mm.stats()["mapped_bytes"] == 2 * (COUNT - 3) * EACH
    assert torch.equal(run(weights), before)


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("first_used", [False, True])
def test_two_tensors_over_one_range_share_their_bytes(file, when, first_used):
    with safe_open(file, "pt") as f:
        first = f.get_tensor("w1")
        second = f.get_tensor("w1") if when == "before" else None
        with budget(3 * LIMIT // 2) as mm:
            if first_used:
                first.sum()
                run({f"w{i}": f.get_tensor(f"w{i}") for i in range(2, COUNT)})  # it leaves
            first.add_(1)
            if second is None:
                second = f.get_tensor("w1")
            assert torch.equal(first, second)
            second.mul_(3)
            run({f"w{i}": f.get_tensor(f"w{i}") for i in range(2, COUNT)})
            assert torch.equal(first, second)
            assert mm.stats()["escapes"] >= 2
        second.sub_(1)
        assert torch.equal(first, second)
        assert torch.equal(f.get_tensor("w1"), first)  # the mapping is where they are
    assert torch.equal(first, (load_file(file)["w1"] + 1) * 3 - 1)


def test_a_written_tensor_is_in_the_mapping_again_when_the_budget_ends(file):
    with safe_open(file, "pt") as f:
        weight = f.get_tensor("w1")
        address = weight.data_ptr()
        for _ in range(2):
            with budget():
                weight.add_(1)
                run(load_file(file))
            assert weight.data_ptr() == address
            assert torch.equal(f.get_tensor("w1"), weight)
    assert torch.equal(weight, load_file(file)["w1"] + 1 + 1)


def test_a_small_slice_sees_what_is_written_to_a_large_one_around_it(file):
    mapping = torch.UntypedStorage.from_file(str(file), False, file.stat().st_size)
    start = file.stat().st_size - 2 * EACH
    large = torch.empty(0).set_(mapping[start : start + EACH])
    small = torch.empty(0).set_(mapping[start + 4096 : start + 8192])
    with budget(2 * LIMIT):
        large.fill_(7)
        run(load_file(file))
        assert torch.equal(small, torch.full_like(small, 7))
        small.fill_(8)
        assert torch.equal(large[1024:2048], small)


def change_file(path: Path, change: str) -> None:
    """Zeroes the weights in the file, with another size or time of modification, or the same ones."""
    found = path.stat()
    data = bytearray(path.read_bytes())
    data[-COUNT * EACH :] = bytes(COUNT * EACH)
    with open(path, "r+b") as f:
        f.write(data)
        if change == "shorter":
            f.truncate(found.st_size // 2)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + (change == "time")))


CHANGED = r"weights.safetensors has changed since"


@pytest.mark.parametrize("change", ["time", "shorter", "same time"])
def test_a_file_that_changes_under_its_tensors_is_an_error(file, change):
    weights = load_file(file)
    with pytest.raises(RuntimeError, match=CHANGED), budget():  # at its end, too: an absent tensor stays lost
        run(weights)
        run(dict(list(weights.items())[1:]))
        change_file(file, change)
        with pytest.raises(RuntimeError, match=CHANGED):
            run(weights)
    with pytest.raises(RuntimeError, match="these bytes were lost"), budget():
        weights["w0"].sum()


@pytest.mark.parametrize("change", ["time", "shorter", "same time"])
def test_a_file_that_changes_before_the_end_of_a_budget_keeps_resident_weights(file, change):
    expected = load_file(file)["w0"].clone()
    with budget() as mm:
        weights = load_file(file)
        run(weights)
        weight = weights.pop("w0")
        weights.clear()
        assert torch.equal(weight, expected)
        stats = mm.stats()
        change_file(file, change)
    assert torch.equal(weight, expected)
    assert stats["reloads"] > 0 and stats["absent_cells"] == 0


@pytest.mark.parametrize("written", [False, True])
def test_a_pinned_weight_does_not_hinder_saving_over_its_file(file, written):
    expected = load_file(file)
    with budget() as mm:
        weights = load_file(file)
        if written:
            weights["w1"].add_(1)
            expected["w1"].add_(1)
        with memmgr.pin(weights["w1"]):
            save_file(weights, file)
            assert mm.stats()["mapped_bytes"] == 0
        run(weights)
        assert all(torch.equal(weights[name], t) for name, t in expected.items())
    assert all(torch.equal(weights[name], t) for name, t in expected.items())


@pytest.mark.parametrize("load, save", [(mapped, save_file), (torch_mapped, torch.save)])
def test_saving_over_the_mapped_file_keeps_the_weights(file, load, save):
    expected = list(load(file).values())
    path = file if load is mapped else file.with_suffix(".pt")
    with budget() as mm:
        weights = load(file)
        run(weights)
        with torch.no_grad():
            weights["w2"].add_(1)
        save(weights, path)
        assert mm.stats()["mapped_bytes"] == 0
        for name, t in load(file).items():
            assert torch.equal(t, weights[name])
        run(weights)
    expected[2] = expected[2] + 1
    assert all(map(torch.equal, weights.values(), expected))


def test_a_renamed_or_removed_file_is_read_by_its_mapping(file):
    expected = run(load_file(file))
    weights = load_file(file)
    with budget():
        run(weights)
        file.unlink()
        file.write_bytes(b"another one")
        assert torch.equal(run(weights), expected)


def test_a_file_that_was_removed_before_the_budget_leaves_for_the_tier(file):
    weights, expected = load_file(file), run(load_file(file))
    file.unlink()
    with budget() as mm:
        assert torch.equal(run(weights), expected)
        stats = mm.stats()
    assert stats["mapped_bytes"] == 0 and stats["resident_bytes.peak"] <= LIMIT


def test_numpy_views_share_the_bytes_of_mapped_tensors(file):
    weights = load_file(file)
    with budget():
        view = weights["w0"].numpy()
        view[3] = 4
        run(load_file(file))
        assert torch.equal(weights["w0"], torch.from_numpy(view))
        weights["w0"][5] = 6
        assert (view[5] == 6).all()
    weights["w0"][7] = 8
    assert (view[7] == 8).all()


def test_bytes_lie_in_a_line_as_they_did_in_the_file(file):
    weights = load_file(file)
    before = [t.data_ptr() % 64 for t in load_file(file).values()]
    with budget():
        run(weights)
        run(weights)
        assert [t.data_ptr() % 64 for t in list(weights.values())[:2]] == before[:2]
    assert [t.data_ptr() % 64 for t in weights.values()] == before


def test_conversion_while_loading_leaves_no_pages(file):
    with budget() as mm:
        weights = {name: t.to(torch.bfloat16) for name, t in load_file(file).items()}
        assert pages_of(file) < EACH
        assert mm.stats()["resident_bytes.peak"] <= LIMIT
    assert all(torch.equal(weights[name], t.to(torch.bfloat16)) for name, t in load_file(file).items())


def test_assigned_and_tied_weights_are_paged(file):
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(SIDE, SIDE, bias=False), torch.nn.Linear(SIDE, SIDE, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    def losses(limit: int | None) -> list[torch.Tensor]:
        def go() -> list[torch.Tensor]:
            model = Tied()
            weight = torch_mapped(file)["w0"]
            model.load_state_dict({"a.weight": weight, "b.weight": weight}, assign=True)
            assert model.a.weight is model.b.weight or model.a.weight.data_ptr() == model.b.weight.data_ptr()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found = []
            for _ in range(3):
                loss = model(torch.ones(SIDE, SIDE)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
            return found

        if limit is None:
            return go()
        with budget(limit):
            return go()

    torch.manual_seed(0)
    assert losses(9 * EACH) == losses(None)


def test_a_forked_child_reads_what_is_away(file):
    expected = run(load_file(file))
    with budget():
        weights = load_file(file)
        run(weights)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(run(weights), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(run(weights), expected)


def test_no_file_stays_open(file):
    def opened() -> list[str]:
        return [
            os.readlink(f"/proc/self/fd/{n}")
            for n in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{n}")
        ]

    weights = load_file(file)
    with budget():
        run(weights)
        assert str(file) in opened()
    assert str(file) not in opened()


def test_an_item_of_a_storage_is_read_without_room_for_all_of_it(file):
    storage = torch.UntypedStorage.from_file(str(file), False, file.stat().st_size)
    expected = storage[EACH + 5]
    with budget(EACH // 2) as mm:
        assert storage[EACH : 2 * EACH][5] == expected
        assert mm.stats()["cells"] == 0


def test_an_item_of_a_storage_is_the_one_that_another_tensor_wrote(file):
    with safe_open(file, "pt") as f:
        first, second = f.get_tensor("w1"), f.get_tensor("w1")
        storage = second.untyped_storage()
        with budget(3 * LIMIT // 2):
            first.fill_(7.0)
            run({f"w{i}": f.get_tensor(f"w{i}") for i in range(2, COUNT)})  # it leaves
            assert storage[3] == 0x40


@pytest.mark.parametrize("function", ["asarray", "tensor", "as_tensor"])
def test_a_tensor_of_a_storage_has_its_bytes_while_everything_leaves(file, function):
    storage = load_file(file)["w0"].untyped_storage()
    want = getattr(torch, function)(storage, dtype=torch.uint8)
    with budget(4 * EACH, policy="torture"):
        assert torch.equal(getattr(torch, function)(storage, dtype=torch.uint8), want)


def test_weights_are_loaded_within_a_budget_that_is_smaller_than_one_of_them(file):
    expected = load_file(file)
    with budget(EACH // 2) as mm:
        weights = load_file(file)
        assert mm.stats()["resident_bytes.peak"] <= EACH // 2
    assert all(torch.equal(weights[name], t) for name, t in expected.items())
