"""The search for living objects, beside threads that make some."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import memmgr
from memmgr.native import binding
from memmgr.observe import memory_inventory


@contextmanager
def opened() -> Iterator[Any]:
    with memmgr.budget(None, quiet=True):
        yield binding.load()


@contextmanager
def _filling(asked: list[str]) -> Iterator[None]:
    """Another thread fills a tuple from a generator; a function that is called in here lets it finish first."""
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


def _known(native: Any) -> list[torch.Tensor]:
    return list(native.objects_of((torch.Tensor,)))


def test_tuples_that_others_fill_are_left_alone() -> None:
    """A search for all tensors must not hold a reference to a tuple that another thread is about to fill from a
    generator."""
    looks: dict[str, Callable[[Any], Any]] = {
        "device": lambda native: memory_inventory.live_tensors(_known(native), "cpu"),
        "state": lambda native: memory_inventory.holders(native, "cpu", rest=native.resident_cells()),
        "param_groups": lambda native: memory_inventory.missing_states(native, "cpu"),
        "grad_fn": lambda native: memory_inventory.saved_without_hooks(_known(native), "cpu"),
    }
    for name, look in looks.items():
        asked: list[str] = []
        with opened() as native, _filling(asked):
            look(native)
        assert asked and name in asked, (name, asked)


def test_what_is_found_is_of_the_types_asked_for() -> None:
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


def test_what_the_collector_knows_is_found_once_wherever_it_lies() -> None:
    """In lists of any length, of each generation; also while a collection frees objects of other threads."""

    class Mark:
        pass

    class Ends:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            found.append(sorted(map(id, native.objects_of((Mark,)))))

    found: list[list[int]] = []
    native = binding.load()
    gc.collect()
    gc.disable()
    try:
        for generation in (0, 1, 2):
            for count in (*range(6), 1000):
                marks = [Mark() for _ in range(count)]
                if generation:
                    gc.collect(generation - 1)
                known = sorted(id(o) for o in gc.get_objects() if type(o) is Mark)
                assert known == sorted(map(id, marks)) == sorted(map(id, native.objects_of((Mark,))))
                Ends()
                gc.collect(generation)
                assert found.pop() == known
                lists = gc.get_objects()
                assert len(native.objects_of((object,))) - len(lists) in range(-8, 8), (
                    "one of these lists, and what holds it"
                )
                del marks, lists
    finally:
        gc.enable()


def test_a_trial_holds_nothing_when_it_is_over() -> None:
    """The tensor that it read belongs to the program alone when the op returns, not when some thread has released it.
    Otherwise the bytes of tensors that end then stay, and the budget is exhausted without need."""
    with memmgr.budget("1GB", quiet=True, verify=True):  # each is tried, although its family is trusted
        native = binding.load()
        holders = set()
        for i in range(300):  # each a kind of its own
            x = torch.ones(20_000 + i)
            x.exp()
            info = native.describe(x)
            assert info is not None
            holders.add(info["holders"])
        assert native.stats()["trials"] >= 300
    assert holders == {2}, holders  # the tensor's, and that of this function
