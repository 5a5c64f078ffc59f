"""The error when nothing more can be evicted: its type, its time and its text."""

import contextlib
import gc
import os
import re
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch
from torch import nn

import memmgr
from memmgr.config.sizes import round_up, show_size
from memmgr.native import binding
from memmgr.observe import rehearsal
from memmgr.observe.error_text import (
    NAMED_KINDS,
    NAMED_MODULES,
    Exports,
    HeldBytes,
    Spent,
    failed_tier,
    torchs_own_words,
)

from .in_backward import in_backward
from .there import bytes_already_there

MB = 1_000_000


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    gc.collect()
    torch.manual_seed(0)
    yield
    gc.collect()


def wide(width: int = 512, depth: int = 8) -> nn.Module:
    """8.4 MB of parameters, next to no activations."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 512) -> None:
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bytes_of(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def check_error(error: memmgr.BudgetError, limit: int) -> None:
    """Checks the properties that all of them have."""
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, RuntimeError)
    text = str(error)
    assert text.startswith("DefaultCPUAllocator: can't allocate memory"), f"does not begin as torch's own: {text}"
    assert error.budget_bytes == limit
    assert error.floor_bytes > limit, f"names {error.floor_bytes:,}, but {limit:,} did not work"
    assert error.enough_bytes >= error.floor_bytes
    assert re.findall(r"\((\d+) bytes\)", text) == [str(error.enough_bytes)], "one budget is named, and once"
    for word in ("budget", "Resident"):
        assert word in text


def test_torch_says_it_like_this() -> None:
    """The words that ours begins with are really torch's."""
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_what_is_there_already_does_not_fit() -> None:
    model = wide()
    limit = bytes_of(model) // 2
    with pytest.raises(memmgr.BudgetError) as caught:
        memmgr.budget(limit, disk=False, quiet=True).__enter__()
    check_error(caught.value, limit)
    assert "parameters" in str(caught.value) and "Linear" in str(caught.value)
    assert caught.value.floor_bytes >= bytes_of(model)
    with memmgr.budget("8GB", quiet=True):  # nothing of the failed one is left open
        pass


@pytest.mark.parametrize("inside", [True, False], ids=["model inside", "model outside"])
@pytest.mark.parametrize("share", [1.5, 2.5, 3.5])
def test_model_states_alone_do_not_fit(share: float, inside: bool) -> None:
    """Parameters, gradients and two moments are 4x the parameters: where they have nowhere to go, any less fails at the first
    optimizer step."""
    model = None if inside else wide()
    there = bytes_already_there() - (0 if model is None else bytes_of(model))
    limit = int(bytes_of(wide()) * share) + there
    gc.collect()
    done: list[str] = []

    def train(steps: int) -> None:
        nonlocal model
        model = model or wide()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            done.append("begun")
            step(model, optimizer)
            done.append("stepped")

    with pytest.raises(memmgr.BudgetError) as caught, memmgr.budget(limit, disk=False, quiet=True):
        train(50)
    assert done == ["begun"], f"failed after {done.count('stepped')} optimizer steps"
    error = caught.value
    check_error(error, limit)
    text = str(error)
    for kind in ("parameters", "gradients"):
        assert kind in text, f"no split by kind: {text}"
    if share > 2.1:
        assert "optimizer state" in text
    assert "Linear" in text, "no split by module"
    floor = error.floor_bytes
    del caught, error
    model = None
    gc.collect()
    model = None if inside else wide()
    # The smallest budget that it names works, with a tenth to spare.
    with memmgr.budget(int(1.10 * floor), disk=False, quiet=True) as mm:
        train(2)
    assert mm.stats()["resident_bytes.peak"] <= 1.10 * floor


@pytest.mark.parametrize("policy", ["auto", "evict", "offload"])
def test_an_op_that_can_never_fit(policy: str) -> None:
    with memmgr.budget(20 * MB, policy=policy, quiet=True):
        a = torch.ones(2_000_000, requires_grad=True)
        with pytest.raises(memmgr.BudgetError) as caught:
            torch.cat([a, a, a])
        check_error(caught.value, 20 * MB)
        # The program may go on: the budget is open and nothing was lost.
        assert (a * 2).sum().item() == 4_000_000


def test_a_request_that_the_system_refuses_without_a_limit_raises_no_floor() -> None:
    """A script that looks for its largest batch catches the error."""
    with memmgr.budget(None, quiet=True) as mm:
        with pytest.raises(RuntimeError):
            torch.empty(1 << 50)
        (torch.ones(100_000) * 2).sum()
        assert mm.stats()["floor_bytes"] <= mm.stats()["resident_bytes.peak"]


def test_an_error_in_backward_is_ours_too() -> None:
    """A backward that needs more than forward did."""
    with memmgr.budget(20 * MB, quiet=True):
        x = torch.ones(1000, requires_grad=True)
        y = in_backward(lambda grad: grad + torch.ones(50 * MB)[0])(x).sum()
        with pytest.raises(memmgr.BudgetError) as caught:
            y.backward()
        check_error(caught.value, 20 * MB)
        assert "a margin for the ops of the backward that have not run" in str(caught.value)


def test_held_tensors_are_named() -> None:
    """Tensors in a list of the program that have no recipe cannot leave, and the error names them."""
    kept = []
    with pytest.raises(memmgr.BudgetError) as caught, memmgr.budget(20 * MB, disk=False, quiet=True), torch.no_grad():
        x = torch.ones(500_000, requires_grad=True)
        for _ in range(100):
            x = x.sin()
            kept.append(x)
    check_error(caught.value, 20 * MB)
    assert "other tensors" in str(caught.value)
    assert 6 <= len(kept) <= 10


@pytest.mark.parametrize("device", ["mps", "xpu:0", torch.device("meta")])
def test_a_device_that_cannot_be_managed_is_refused(device: Any) -> None:
    """Rather than a budget that is not kept."""
    with pytest.raises(
        NotImplementedError, match=r"cannot be kept: memmgr has an allocator for CUDA only; device='cpu'"
    ):
        memmgr.budget("1GB", device=device)


def test_states_that_are_half_made_do_not_hide_the_rest() -> None:
    """The optimizer ran out of memory in the middle of making them; the error says how much all of them will take."""
    from memmgr.observe.memory_inventory import missing_states

    native = binding.load()
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    first, second, *_ = parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p)
    before = missing_states(native, "cpu")
    optimizer = torch.optim.AdamW(parameters)
    assert missing_states(native, "cpu") - before == 8 * bytes_of(model) // 4
    moments = {"exp_avg": torch.zeros_like(first), "exp_avg_sq": torch.zeros_like(first)}
    optimizer.state[first] = {"step": torch.zeros(()), **moments}
    optimizer.state[second] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(second)}
    assert missing_states(native, "cpu") - before == 8 * bytes_of(model) // 4 - 3 * first.nbytes


def test_a_tensor_that_another_thread_has_half_made_does_not_spoil_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the soak: an undefined tensor answers to nothing, and the out-of-memory error became that."""
    half = torch.ones(3)
    asked: list[int] = []
    whole = torch._C.TensorBase.device

    def device(tensor: torch.Tensor) -> torch.device:
        if tensor is half:
            asked.append(1)
            raise RuntimeError("tensor does not have a device")
        return whole.__get__(tensor)  # type: ignore[no-any-return]

    limit = bytes_already_there() + 4 * MB
    with memmgr.budget(limit, disk=False, quiet=True), monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "device", property(device), raising=False)
        with pytest.raises(memmgr.BudgetError, match="Resident now"):
            held = [torch.randn(MB // 4) for _ in range(8)]
            held.clear()
    assert asked


def test_before_a_forward_it_says_at_least_and_counts_what_an_optimizer_will_add() -> None:
    text = str(_opened_too_small(6 * MB, wide()))
    assert "A budget of at least" in text and "the rest of the run may need more" in text
    assert "`memmgr run` without --budget" in text, "no way to know what it needs"
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters())
    error = _opened_too_small(6 * MB, model)
    text = str(error)
    assert "A budget of at least" in text and "should do for a whole step" not in text, "no op has been seen"
    assert error.enough_bytes == round_up(error.floor_bytes), "the least is a floor, without an estimate"
    assert any("Still to come: " in said for said in error.details) and "Still to come" not in text
    (named,) = re.findall(r"\((\d+) bytes\)", text)
    assert int(named) >= 4 * bytes_of(model), "gradients and two moments"
    del optimizer


def _opened_too_small(limit: Any, model: nn.Module) -> memmgr.BudgetError:
    with pytest.raises(memmgr.BudgetError) as caught:
        memmgr.budget(limit, disk=False, quiet=True).__enter__()
    del model
    return caught.value


def _spent(limit: Any) -> memmgr.BudgetError:
    with pytest.raises(memmgr.BudgetError) as caught, memmgr.budget(limit, quiet=True):
        torch.ones(10 * MB, requires_grad=True).exp()
    return caught.value


def _sizes(text: str) -> set[str]:
    """The units in it, of sizes for people: torch says bytes, and so does the exact floor."""
    return set(re.findall(r"\d ([kKMGT]i?B)\b", text))


def test_sizes_are_in_the_units_of_the_user() -> None:
    there = bytes_already_there() // MB
    binary, decimal = _spent(f"{there + 20}MiB"), _spent(f"{there + 20}MB")
    assert "MiB" in _sizes(str(binary)) <= {"KiB", "MiB", "GiB"}, str(binary)
    assert "MB" in _sizes(str(decimal)) <= {"kB", "MB", "GB"}, str(decimal)
    assert f"the budget of {there + 20} MiB is spent" in str(binary)
    assert _sizes(str(_opened_too_small("6MiB", wide()))) <= {"KiB", "MiB"}


def test_a_failed_op_is_named_whatever_its_meta_kernel_asks_for() -> None:
    """torch's meta kernel of `ones` is Python, and makes its result on the default device unless it is given another one."""
    with memmgr.budget("1GB", quiet=True):
        for n in (4, 10 * MB, *range(1000, 1_000_000, 24_000)):
            torch.ones(n)
    assert "\nThis op (aten::ones) needs" in str(_spent(bytes_already_there() + 20 * MB))


def test_a_request_needs_its_own_bytes_also_after_a_larger_one() -> None:
    """Programs try smaller sizes until one fits; the floor of the whole budget keeps the largest."""
    texts = []
    with memmgr.budget(bytes_already_there() + 50 * MB, quiet=True):
        for numbers in (100 * MB, 20 * MB):
            with pytest.raises(memmgr.BudgetError) as caught:
                torch.empty(numbers)
            texts.append(str(caught.value))
    for text, least in zip(texts, (400, 80), strict=True):
        (needs,) = re.findall(r"\(aten::empty\) needs ([\d.]+) MB", text)
        assert least <= float(needs) < 1.1 * least


def test_opening_says_the_same_in_the_same_words() -> None:
    opening, spent = str(_opened_too_small(6 * MB, wide())), str(_spent(bytes_already_there() + 20 * MB))
    assert "MB are on the device already." in opening
    named = {
        opening: r"A budget of at least [\d.]+ MB \(\d+ bytes\) is needed, and the rest of the run may need more: ",
        spent: r"This op \(aten::ones\) needs [\d.]+ MB\. A budget of [\d.]+ MB \(\d+ bytes\) should do for it and for ",
    }
    for text, words in named.items():
        first, held, last = text.splitlines()
        assert re.search(
            r"can't allocate memory.* memmgr: the budget of [\d.]+ MB is spent, and nothing more can be evicted\.",
            first,
        )
        assert re.match(r"Resident now: .*\. Floor so far: [\d.]+ MB\.$", held)
        assert re.match(words, last)


def _twice() -> None:
    y = nn.Linear(4, 4)(torch.ones(4)).square().sum()
    y.backward()
    y.backward()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (_twice, "backward through the graph a second time"),
        (lambda: torch.autograd.grad(torch.ones(1), torch.ones(1)), "does not require grad"),
        (lambda: int(torch.ones(2)), "converted to"),
        (lambda: bool(torch.ones(2)), "ambiguous"),
        (lambda: nn.Linear(4, 4).load_state_dict({"more": 1}), "Unexpected key"),
        (lambda: torch.ones(4).apply_(lambda x: 1 // 0), "by zero"),
    ],
)
def test_an_error_of_the_program_has_no_frame_of_memmgr(call: Callable[[], object], words: str) -> None:
    with memmgr.budget(bytes_already_there() + 20 * MB, quiet=True), pytest.raises(Exception, match=words) as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)
    ours = os.path.dirname(memmgr.__file__)
    assert len(frames) > 1 and not [frame for frame in frames if frame.filename.startswith(ours)]


def test_a_warning_of_torch_names_the_line_of_the_program() -> None:
    """A tensor that requires grad is converted to a number."""
    program = (
        "import torch, memmgr\n"
        f"with memmgr.budget({20 * MB}, quiet=True):\n"
        "    float(torch.ones(1, requires_grad=True) * 2)\n"
    )
    said = forkserver.run([sys.executable, "-c", program], capture_output=True, text=True).stderr
    assert "<string>:3: UserWarning: Converting a tensor with requires_grad=True" in said


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_it_is_one_error_not_a_chain(where: str) -> None:
    limit = bytes_already_there() + 20 * MB
    with memmgr.budget(limit, quiet=True):
        x = torch.ones(1000, requires_grad=True)
        y = in_backward(lambda grad: grad + torch.ones(50 * MB)[0])(x).sum()
        with pytest.raises(memmgr.BudgetError) as caught:
            y.backward() if where == "backward" else torch.ones(50 * MB)
    error = caught.value
    check_error(error, limit)
    shown = "".join(traceback.format_exception(error))
    assert shown.count("Traceback (most recent call last)") == 1, shown


def test_a_full_disk_asks_for_more_disk(tmp_path: Path) -> None:
    limit, disk = 8 * MB + bytes_already_there(), 2 * MB
    seen = []
    for _ in range(4):
        layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        model, x = nn.Sequential(*layers), torch.randn(2048, 64)
        try:
            with memmgr.budget(limit, policy="offload", disk=(tmp_path, disk), quiet=True):
                model(x).square().mean().backward()
            break
        except memmgr.BudgetError as error:
            text = str(error)
            assert "the disk tier is full" in text and "More disk, not more budget" in text, text
            assert error.tier_bytes > disk
            seen.append(error.tier_bytes)
            disk = int(1.25 * error.tier_bytes)
    assert 1 <= len(seen) <= 3 and seen == sorted(seen)


def test_what_the_allocator_adds_is_taken_off_and_torchs_own_is_not() -> None:
    ours = (
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. memmgr: the budget of 3145728 bytes is spent: "
        "2097152 bytes are in use and nothing more can be evicted. The disk tier failed: No space left on device."
    )
    assert torchs_own_words(ours) == ours.partition(" memmgr")[0]
    assert failed_tier(ours) == ("disk", "No space left on device")
    assert failed_tier(ours.partition(" The disk")[0]) is None
    plain = (
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: Error code 12\nmore"
    )
    assert torchs_own_words(plain) == plain.partition("\n")[0]


def test_four_kinds_and_two_modules_are_named() -> None:
    kinds = {f"kind {i}": (9 - i) * MB for i in range(6)}
    held = HeldBytes(kinds, [(f"Module{i}", (9 - i) * MB) for i in range(4)], 0)
    text = str(Spent("Words.", held, budget_bytes=MB, so_far_bytes=MB).error())
    assert (NAMED_KINDS, NAMED_MODULES) == (4, 2)  # as the page of errors says
    assert [i for i in range(6) if f"kind {i} " in text] == [0, 1, 2, 3] and "2 other kinds 9 MB" in text, text
    assert "(largest modules: Module0 9 MB, Module1 8 MB)" in text, text


def test_a_copy_is_advised_where_numpy_has_the_address() -> None:
    held = HeldBytes({"other tensors": 5 * MB}, [], 0)
    for by, copies in (("NumPy", True), ("DLPack", False)):
        for count, words in (
            (1, "the address of a tensor that holds 2 MB"),
            (2, "the addresses of 2 tensors that hold 2 MB"),
        ):
            spent = Spent("Words.", held, budget_bytes=MB, exports=Exports(count, 2 * MB, by, grow=True))
            text = str(spent.error())
            assert f"{by} has {words}. Such" in text and ("`.numpy().copy()`" in text) == copies, text
    assert "DLPack" not in str(Spent("Words.", held, budget_bytes=MB, exports=Exports(2, MB, "DLPack")).error())


def test_a_tier_that_failed_otherwise_is_named_with_its_reason() -> None:
    held = HeldBytes({"saved for backward": 5 * MB, "parameters": MB}, [], 0, MB)
    spent = Spent("Words.", held, budget_bytes=6 * MB, so_far_bytes=7 * MB, failed=("disk", "Input/output error"))
    error = spent.error()
    assert "The disk tier failed: Input/output error." in str(error) and error.tier_bytes == 0


def _try(limit: int, disk: Any, inside: bool) -> None:
    """Two steps of AdamW; the budget opens before the first, or in the first call of a module, as MEMMGR_BUDGET's does."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(1024, 64)
    budget = memmgr.budget(limit, device="cpu", disk=disk, quiet=True)
    with contextlib.ExitStack() as stack:
        if inside:
            handle = model.register_forward_pre_hook(lambda *_: (handle.remove(), stack.enter_context(budget))[0])
        else:
            stack.enter_context(budget)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("inside", [True, False], ids=["in the first forward", "before it"])
@pytest.mark.parametrize("room", [0, 400_000], ids=["no disk", "a small disk"])
def test_over_what_is_there_already_one_budget_is_named_that_works(room: int, inside: bool, tmp_path: Path) -> None:
    """The named budget includes the optimizer's states to come and, where a forward has begun, the largest op."""
    disk: Any = (tmp_path, room) if room else False
    limit, said = 300_000, []
    while len(said) < 4:
        try:
            _try(limit, disk, inside)
            break
        except memmgr.BudgetError as error:
            assert error.enough_bytes > limit
            limit = error.enough_bytes
            said.append("whole" if "should do for a whole step" in str(error) else "at least")
            assert (said[-1] == "at least") == (f"A budget of at least {show_size(limit)} (" in str(error)), error
        gc.collect()
    unknown = not inside and not room  # with the disk, the budget opens over the rest, and a forward begins
    assert said == (["at least", "whole"] if unknown else ["whole"]), (said, limit)


def test_sparse_gradients_and_states_are_counted() -> None:
    """Torch has no `nbytes` for them, and a momentum of sparse gradients is one."""
    table = nn.Embedding(20_000, 64, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    with memmgr.budget(16 * MB, quiet=True):
        for _ in range(2):
            table(torch.arange(4000)).square().mean().backward()
            optimizer.step()
        with pytest.raises(memmgr.BudgetError) as caught:
            torch.ones(8 * MB)
    check_error(caught.value, 16 * MB)


def test_a_second_run_needs_no_room_that_an_error_would_have_to_name() -> None:
    """An LSTM saves one large result, dropped only once a second run of it has been compared: in its own place."""

    def train(budget: int) -> memmgr.BudgetError | None:
        layers = nn.ModuleList(nn.LSTM(36, 36, batch_first=True) for _ in range(3))
        optimizer = torch.optim.AdamW(layers.parameters())
        try:
            with memmgr.budget(budget, policy="evict", disk=False, quiet=True):
                for _ in range(3):
                    out = torch.randn(32, 60, 36)
                    for layer in layers:
                        out, _ = layer(out)
                    out.square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except memmgr.BudgetError as error:
            return error
        return None

    asked = [2 * MB]
    while (error := train(asked[-1])) is not None:
        asked.append(error.enough_bytes)
        assert len(asked) <= 2, f"the budget that was named does not work: {asked}"


def sixteen(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x])


def sixteen_forked(x: torch.Tensor) -> torch.Tensor:
    return torch.jit.wait(torch.jit.fork(sixteen, x))


class Sixteen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sixteen(x)


def in_a_callback(x: torch.Tensor) -> Any:
    first: torch.futures.Future[int] = torch.futures.Future()
    second = first.then(lambda done: done.value()).then(lambda done: sixteen(x))
    first.set_result(1)
    return second


def of_a_storage(x: torch.Tensor) -> Any:
    return x.untyped_storage().resize_(64 * MB)


def loaded(x: torch.Tensor) -> Any:
    """Torch makes a RuntimeError of all that fails there."""
    return nn.Linear(1300, 1300, bias=False).load_state_dict({"weight": torch.ones(1300, 1300)})


@torch.library.custom_op("memmgr_test::spends", mutates_args=())
def spends(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(1000)


QUOTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "no gradients": torch.no_grad()(sixteen),
    "op in Python": spends,
    "load_state_dict": loaded,
    "script": lambda x: torch.jit.script(sixteen)(x),
    "traced": lambda x: torch.jit.trace(sixteen, torch.ones(4))(x),
    "module": lambda x: torch.jit.script(Sixteen())(x),
    "frozen": lambda x: torch.jit.freeze(torch.jit.script(Sixteen().eval()))(x),
    "forked": lambda x: torch.jit.script(sixteen_forked)(x),
    "wait": lambda x: in_a_callback(x).wait(),
    "value": lambda x: in_a_callback(x).value(),
    "wait_all": lambda x: torch.futures.wait_all([in_a_callback(x)]),
    "resize_": of_a_storage,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", QUOTED)
def test_what_torch_quotes_in_an_error_of_its_own_is_ours_too(name: str) -> None:
    """TorchScript, futures and C++ beside ops have errors of their own; the tensors that they keep alive end with them."""
    with memmgr.budget(9 * MB, quiet=True) as mm:
        x = torch.ones(300_000)
        with pytest.raises(memmgr.BudgetError) as caught:
            QUOTED[name](x)
        check_error(caught.value, 9 * MB)
        there = weakref.ref(x)
        del x, caught
        deadline = time.monotonic() + 10  # torch's pool frees a finished task at some later time
        while there() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert there() is None, "an error that memmgr keeps holds the tensors of whoever was told it"
        assert sixteen(torch.ones(100)).sum() == 1600
    assert mm.stats()["resident_bytes.peak"] <= 9 * MB


def test_a_checkpoint_that_does_not_fit_is_ours_too(tmp_path: Path) -> None:
    torch.save(torch.ones(8 * MB), tmp_path / "large.pt")
    with memmgr.budget(9 * MB, quiet=True):
        with pytest.raises(memmgr.BudgetError) as caught:
            torch.load(tmp_path / "large.pt")
        check_error(caught.value, 9 * MB)


GROWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "resize_": lambda small: small.resize_(8 * MB),
    "out=": lambda small: torch.add(torch.ones(1).expand(8 * MB), 1, out=small),
    "of the storage": lambda small: small.untyped_storage().resize_(32 * MB),
    "set_": lambda small: torch.empty(0).set_(small.untyped_storage(), 0, (8 * MB,)),
    "storage of its own": lambda small: torch.UntypedStorage(4).resize_(32 * MB),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", GROWS)
def test_what_was_there_before_grows_inside_the_budget(name: str) -> None:
    """A storage remembers the allocator of its first bytes, and asks that one for more."""
    small, later = (torch.empty(0).set_(torch.UntypedStorage(16), 0, (4,)) for _ in range(2))  # torch's own allocator's
    with memmgr.budget(9 * MB, quiet=True) as mm:
        later.fill_(0)
        with pytest.raises(memmgr.BudgetError) as caught:
            GROWS[name](small)
    check_error(caught.value, 9 * MB)
    assert mm.stats()["resident_bytes.peak"] <= 9 * MB
    GROWS[name](later)


WAITS = """
import torch, memmgr
with memmgr.budget(9_000_000, quiet=True):
    kept = torch.UntypedStorage(4_000_000).clone()
    try:
        torch.UntypedStorage(8_000_000).clone()
    except memmgr.BudgetError:
        print("told")
"""


def test_what_finds_no_room_outside_of_an_op_does_not_wait_for_itself() -> None:
    """The thread runs alone, and such a thread is counted among the running ones."""
    done = forkserver.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "told\n", done.stderr


def test_dlpack_of_what_has_no_room_is_ours_too() -> None:
    x = torch.ones(2 * MB)
    with memmgr.budget(9 * MB, quiet=True), memmgr.pin(torch.ones(1 * MB)):
        with pytest.raises(memmgr.BudgetError) as caught:
            torch.utils.dlpack.to_dlpack(x)
        check_error(caught.value, 9 * MB)


def test_a_functions_forward_is_known_where_apply_is_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is from torch 2.14.1 on."""
    monkeypatch.setattr(rehearsal, "_APPLY", None)

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            assert rehearsal._in_function()
            return x.clone()

    assert not rehearsal._in_function()
    Asks.apply(torch.ones(1))


FEW_ADDRESSES = """
import os, resource, torch, memmgr
from memmgr.native import binding
binding.load()
taken = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
resource.setrlimit(resource.RLIMIT_AS, (taken + (600 << 20),) * 2)
try:
    memmgr.budget("50MB", quiet=True).__enter__()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_too_few_addresses_are_named_with_a_way_out() -> None:
    done = forkserver.run([sys.executable, "-c", FEW_ADDRESSES], capture_output=True, text=True, timeout=120)
    assert re.search("cannot reserve [0-9]+ bytes of addresses.*`ulimit -v`", done.stdout), done.stdout + done.stderr
