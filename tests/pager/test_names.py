"""Rule 9, names: code that only compares addresses gets one number for a storage's whole life, in and out of budgets."""

import ast
import contextlib
import copy
import importlib
import importlib.util
import inspect
import pickle
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import graph

import memmgr
from memmgr.native import binding as native
from memmgr.readers.names import NAMERS

from .raw_reads import saved

COUNT = 20_000  # 80 kB: more than the 64 KiB from which tensors may leave
UNPATCHED = torch.Tensor.data_ptr
PLAIN = getattr(torch.Tensor, "const_data_ptr", UNPATCHED)  # the other counts as a write that no op announces


def _values() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full(COUNT, 3.0, np.float32)


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "full": lambda: torch.full((COUNT,), 3.0),
    "tensor of a list": lambda: torch.tensor([3.0] * COUNT),
    "as_tensor of a list": lambda: torch.as_tensor([3.0] * COUNT),
    "FloatTensor": lambda: torch.FloatTensor([3.0] * COUNT),
    "parameter": lambda: nn.Parameter(torch.tensor([3.0] * COUNT), requires_grad=False),
    "tensor of an array": lambda: torch.tensor(_values()),
    "from_numpy": lambda: torch.from_numpy(_values()),
    "frombuffer": lambda: torch.frombuffer(bytearray(_values().tobytes()), dtype=torch.float32),
    "load": lambda: saved(torch.from_numpy(_values())),
    "pickle": lambda: pickle.loads(pickle.dumps(torch.from_numpy(_values()))),
    "deepcopy": lambda: copy.deepcopy(torch.from_numpy(_values())),
    "storage": lambda: torch.tensor([], dtype=torch.float32).set_(torch.UntypedStorage(4 * COUNT)).fill_(3.0),  # type: ignore[call-overload]
}


def _name(tensor: torch.Tensor) -> int:
    return graph._get_sid(tensor)[0]


def _budget() -> memmgr.budget:
    return memmgr.budget("1GB", quiet=True, device="cpu")


def _away(tensor: torch.Tensor) -> bool:
    return native.load().take_away(tensor, 1) > 0


@pytest.fixture(autouse=True)
def _patch_ends() -> Iterator[None]:
    """With the storages of a test the patch ends, at the end of the next budget."""
    yield
    with _budget():
        pass
    assert torch.Tensor.data_ptr is UNPATCHED


@pytest.mark.parametrize("born_in_budget", [True, False])
@pytest.mark.parametrize("maker", MAKERS)
def test_name_is_the_same_before_in_and_after_budgets(maker: str, born_in_budget: bool) -> None:
    found: dict[str, int] = {}
    tensor = None if born_in_budget else MAKERS[maker]()
    if tensor is not None:
        found["plain torch"] = _name(tensor)
    for turn in range(3):
        with _budget():
            if tensor is None:
                tensor = MAKERS[maker]()
            found[f"{turn}: no op yet"] = _name(tensor)
            assert float(tensor.sum()) == 3.0 * COUNT
            found[f"{turn}: after an op"] = _name(tensor)
            for _ in range(2):
                _away(tensor)
                found[f"{turn}: away"] = _name(tensor)
                others = [torch.full((COUNT,), 1.0) for _ in range(8)]  # they take its place
                assert float(tensor[0]) == 3.0
                found[f"{turn}: back"] = _name(tensor)
                assert _name(tensor) not in {_name(t) for t in others}
                del others
            tensor.mul_(1.0)
            found[f"{turn}: written"] = _name(tensor)
        found[f"{turn}: closed"] = _name(tensor)
    assert len(set(found.values())) == 1, found


def test_what_moves_has_its_first_address_as_name() -> None:
    tensor = torch.full((COUNT,), 3.0)
    address = tensor.data_ptr()
    with _budget():
        tensor.add_(1)
        assert _away(tensor)
        held = [torch.full((COUNT,), 1.0) for _ in range(4)]
        assert _name(tensor) == address
        tensor.add_(1)
    assert tensor.data_ptr() != address, "it has not moved, so nothing was tested"
    assert _name(tensor) == address and _name(tensor[10:]) == address + 40
    del held


def test_views_differ_by_their_offset() -> None:
    with _budget():
        tensor = torch.tensor([3.0] * COUNT)
        names = [_name(tensor), _name(tensor[100:])]
        _away(tensor + 0)
        tensor.add_(1)
        assert _away(tensor)
        assert [_name(tensor), _name(tensor[100:])] == names == [names[0], names[0] + 400]
        assert _name(tensor[:0]) == 0, "as in plain torch"


def _born_at(address: int) -> torch.Tensor:
    held = []
    for _ in range(500):
        tensor = torch.full((COUNT,), 1.0)
        if PLAIN(tensor) == address:
            return tensor
        held.append(tensor)
    raise AssertionError("nothing was put where the other one was, so nothing is tested")


def test_tensor_at_a_claimed_address_has_a_number_of_its_own() -> None:
    with _budget():
        first = torch.full((COUNT,), 3.0)
        name = _name(first)
        assert name == PLAIN(first)
        assert _away(first)
        second = _born_at(name)
        of_second = _name(second)
        assert of_second != name and of_second
        assert _away(second)
        third = _born_at(name)
        assert len({_name(first), of_second, _name(second), _name(third)}) == 3
        assert _name(second) == of_second
        del first  # the address is free again, and its next owner may have it as its name
        assert _name(second) == of_second
        of_third = _name(third)
    assert (_name(second), _name(third)) == (of_second, of_third)
    with _budget():
        second.add_(1)
        assert _away(second)
        assert (_name(second), _name(third)) == (of_second, of_third)


def test_foreign_memory_at_a_claimed_address() -> None:
    """A tensor from before the budget leaves, and malloc gives its memory to an array."""
    size = 64 << 20  # malloc maps it by itself
    first = torch.full((size // 4,), 3.0)
    name = _name(first)
    with _budget():
        first.add_(1)
        assert _away(first)
        arrays = []
        for _ in range(20):
            arrays.append(np.empty(size, np.uint8))
            if abs(arrays[-1].ctypes.data - name) < size:
                break
        else:
            pytest.skip("malloc has put nothing there")
        one, two = torch.from_numpy(arrays[-1]), torch.from_numpy(arrays[-1])
        assert _name(one) == _name(two) != _name(first)
        assert _name(first) == name
        of_one = _name(one)
        del first
        assert _name(two) == of_one
        del one
        assert _name(two) == _name(torch.from_numpy(arrays[-1])) == of_one
    assert _name(two) == of_one


def test_two_storages_over_the_same_memory_have_one_name() -> None:
    array = _values()
    one, two = torch.from_numpy(array), torch.from_numpy(array)
    name = _name(one)
    assert name == _name(two)
    with _budget():
        assert (_name(one), _name(two), _name(torch.from_numpy(array))) == (name,) * 3
        tensor = torch.full((COUNT,), 3.0)
        of_tensor = _name(tensor)
        for _ in range(3):
            assert _away(tensor)
            held = [torch.full((COUNT,), 1.0) for _ in range(4)]
            tensor.add_(1)
        assert PLAIN(tensor) != of_tensor, "it has not moved, so nothing was tested"
        other = torch.from_numpy(tensor.numpy())
        assert _name(other) == _name(tensor) == of_tensor
        assert _name(other[10:]) == of_tensor + 40
        del held
    assert _name(other) == _name(tensor) == of_tensor
    assert _name(torch.from_numpy(tensor.numpy())) == of_tensor


def test_alias_of_a_tensor_that_is_back_at_its_first_address() -> None:
    with _budget():
        tensor = torch.full((COUNT,), 3.0)
        name = _name(tensor)
        for _ in range(100):
            assert _away(tensor)
            tensor.add_(1)
            if PLAIN(tensor) == name:
                break
        else:
            pytest.skip("it always came back elsewhere")
        assert _name(torch.from_numpy(tensor.numpy())) == _name(tensor) == name
    assert _name(torch.from_numpy(tensor.numpy())) == _name(tensor) == name


def test_storage_that_is_resized_has_the_name_of_its_new_memory() -> None:
    with _budget():
        tensor = torch.full((COUNT,), 3.0)
        _name(tensor)
        assert _away(tensor)
        tensor.add_(1)
        storage = tensor.untyped_storage()
    storage.resize_(0)
    assert _name(tensor) == PLAIN(tensor)
    storage.resize_(8 * COUNT)
    assert _name(tensor) == PLAIN(tensor)


@pytest.mark.parametrize("seed", range(4))
def test_names_through_a_random_life(seed: int) -> None:
    """Tensors come, go, leave, come back and are asked, while budgets open and close."""
    choose = random.Random(seed)
    living: dict[int, tuple[torch.Tensor, int]] = {}
    serial = 0
    makers = list(MAKERS.values())
    with contextlib.ExitStack() as stack:
        is_open = False
        for _ in range(600):
            what = choose.random()
            if what < 0.02:
                if is_open:
                    stack.close()
                else:
                    stack.enter_context(_budget())
                is_open = not is_open
            elif what < 0.35 or not living:
                tensor = makers[0]() if choose.random() < 0.7 else choose.choice(makers)()
                serial += 1
                living[serial] = tensor, (_name(tensor) if choose.random() < 0.7 else 0)
            elif what < 0.55:
                del living[choose.choice(list(living))]
            else:
                key = choose.choice(list(living))
                tensor, name = living[key]
                if what < 0.75 and is_open:
                    _away(tensor)
                elif what < 0.9:
                    tensor.mul_(1.0)
                if choose.random() < 0.5:
                    living[key] = tensor, name or _name(tensor)
            names = [name for _, name in living.values() if name]
            tensor = None
            assert not [name for asked, name in living.values() if name and _name(asked) != name]
            for a, b in zip(sorted(names), sorted(names)[1:], strict=False):
                assert b - a >= 4 * COUNT
        assert len({_name(asked) for asked, _ in living.values()}) == len(living)
        living.clear()


@pytest.mark.parametrize("when", ["in", "opens", "closes"])
@pytest.mark.parametrize("maker", MAKERS)
def test_write_to_a_saved_tensor_is_seen(maker: str, when: str) -> None:
    """`allow_mutation_on_saved_tensors` finds a saved tensor again by its address."""

    def gradient(around: str) -> float:
        with graph.allow_mutation_on_saved_tensors(), contextlib.ExitStack() as stack:
            if around in ("in", "closes"):
                stack.enter_context(_budget())
            a = torch.ones(COUNT, requires_grad=True)
            b = MAKERS[maker]()
            out = a * b
            if around == "opens":
                stack.enter_context(_budget())
                b + 1
                _away(b)
            elif around != "plain":
                _away(b)
                if around == "closes":
                    stack.close()
            b.fill_(7.0)
            out.sum().backward()
            assert a.grad is not None
            return a.grad[0].item()

    assert gradient("plain") == 3.0
    assert gradient(when) == 3.0


def test_patch_stays_while_a_name_differs_from_its_address() -> None:
    tensor = torch.full((COUNT,), 3.0)
    with _budget():
        tensor.add_(1)
        assert _away(tensor)
        held = [torch.full((COUNT,), 1.0) for _ in range(4)]
        tensor.add_(1)
    assert torch.Tensor.data_ptr is not UNPATCHED
    assert tensor.data_ptr() == PLAIN(tensor), "who may read has the address"
    with _budget():
        pass
    assert torch.Tensor.data_ptr is not UNPATCHED
    del tensor, held
    with _budget():
        pass
    assert torch.Tensor.data_ptr is UNPATCHED


@pytest.mark.parametrize("module", NAMERS)
def test_callers_exist(module: str) -> None:
    """A function with another name in another version would get real addresses, and its tensors would be pinned for
    ever."""
    if not importlib.util.find_spec(module.partition(".")[0]):
        pytest.skip("not installed")
    try:
        found: ModuleType = importlib.import_module(module)
    except ImportError as error:
        pytest.skip(str(error))
    functions = [node for node in ast.walk(ast.parse(inspect.getsource(found))) if isinstance(node, ast.FunctionDef)]
    asking = {node.name for node in functions if "data_ptr" in ast.unparse(node)}
    assert asking >= NAMERS[module] and asking
