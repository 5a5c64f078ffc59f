"""The seam between Python and C++: the stub, the constants, and how the module's functions take their arguments."""

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memmgr.common.constants import Order
from memmgr.native import binding

sys.path.append(str(Path(__file__).parents[2] / "tools" / "house"))
import make_stub


def test_stub_and_constants_are_those_of_the_module() -> None:
    """`make stub` writes both."""
    module = binding.load()
    assert make_stub.STUB.read_text() == make_stub.stub(module)
    assert make_stub.CONSTANTS.read_text() == make_stub.constants(module)


def test_every_function_of_the_module_is_in_the_stub() -> None:
    module: Any = binding.load()
    functions = {name for name, thing in vars(module).items() if callable(thing) and not isinstance(thing, type)}
    assert functions == {function["name"] for function in module._functions()}


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: m.tier_inject(1), TypeError, r"tier_inject\(\) takes at most 0 positional arguments \(1 given\)"),
        (lambda m: m.pin([], True), TypeError, r"pin\(\) takes at most 1 positional arguments \(2 given\)"),
        (lambda m: m.pin([], writes=True), TypeError, r"pin\(\) got an unexpected keyword argument 'writes'"),
        (lambda m: m.pin([], tensors=[]), TypeError, r"pin\(\) got multiple values for argument 'tensors'"),
        (lambda m: m.escape(torch.ones(1)), TypeError, r"escape\(\) missing required argument 'why'"),
        (lambda m: m.escape(torch.ones(1), 99), ValueError, "no Escape 99"),
        (lambda m: m.set_purpose([], -1), ValueError, "no Purpose -1"),
        (lambda m: m.set_purpose((), 0), TypeError, "a list is needed, not tuple"),
        (lambda m: m.set_purpose([], "0"), TypeError, "'str' object cannot be interpreted as an integer"),
        (lambda m: m.set_limit(-1), OverflowError, "negative"),
        (lambda m: m.memory_map(1 << 32), OverflowError, "4294967296 is out of range"),
        (lambda m: m.memory_map(0), ValueError, "1 to 4096 columns"),
        (lambda m: m.add_pending(None, [], 1), TypeError, r"takes at most 2 positional arguments \(3 given\)"),
        (lambda m: m.raise_in(0, KeyError, b"x"), TypeError, "bad argument type"),
        (lambda m: m.set_ranking(b"1", b"1"), ValueError, "an int64 and a uint8 for each"),
        (lambda m: m.set_ranking("1", b""), TypeError, "bytes is needed, not str"),
    ],
)
def test_wrong_arguments_raise_errors_of_python(
    call: Callable[[Any], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(binding.load())


def test_arguments_by_position_and_by_name_are_the_same() -> None:
    module: Any = binding.load()
    tensor = torch.ones(1)
    assert module.take_away(tensor) == module.take_away(tensor, -1) == module.take_away(turn=-1, tensor=tensor) == 0
    assert module.escape(why=Order.DTR, tensor=tensor) is False  # no budget is open
    name = "".join(["tur", "n"])  # a key that is not interned
    assert module.take_away(tensor, **{name: 1}) == 0


def test_calls_keep_no_references() -> None:
    module: Any = binding.load()
    tensor, key = torch.ones(1), "x" * 40
    before = sys.getrefcount(tensor), sys.getrefcount(key)
    for _ in range(100):
        module.take_away(tensor=tensor, turn=2)
        module.describe(tensor)
        module.beat(None, key=key)
        with pytest.raises(TypeError):
            module.take_away(tensor, tensor=tensor)
    assert (sys.getrefcount(tensor), sys.getrefcount(key)) == before


class Marked(Exception):
    pass


class Kept:
    """Tells when it ends."""

    def __init__(self, ended: list[str]) -> None:
        self._ended = ended

    def __del__(self) -> None:
        self._ended.append("end")


def test_around_calls_before_and_after() -> None:
    seen: list[Any] = []

    def original(a: int, *, b: int = 0) -> int:
        """The sum."""
        seen.append("original")
        return a + b

    def leave(result: int | None, error: BaseException | None) -> None:
        seen.append((result, error))

    def enter(*args: int, **kwargs: int) -> Callable[[Any, Any], None]:
        seen.append((args, kwargs))
        return leave

    called = binding.load().around(original, enter)
    assert called(1, b=2) == 3
    assert seen == [((1,), {"b": 2}), "original", (3, None)]
    assert (called.__name__, called.__doc__, called.__wrapped__) == ("original", "The sum.", original)
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
        called(1, c=2)
    assert isinstance(seen[-1][1], TypeError) and len(seen) == 5, "its error is handed on, and raised"


def test_around_keeps_what_enter_returns_until_the_end() -> None:
    ended: list[str] = []

    def original(fails: bool) -> str:
        ended.append("original")
        if fails:
            raise Marked
        return "made"

    called = binding.load().around(original, lambda _: Kept(ended))
    assert called(False) == "made" and ended == ["original", "end"]
    with pytest.raises(Marked):
        called(True)
    assert ended == ["original", "end"] * 2


def test_around_raises_the_error_of_either_function() -> None:
    def fails(*_: Any) -> None:
        raise Marked

    ran: list[int] = []
    with pytest.raises(Marked):
        binding.load().around(ran.append, fails)(1)
    assert not ran, "where the first function fails the original does not run"
    with pytest.raises(Marked):
        binding.load().around(ran.append, lambda _: fails)(1)
    assert ran == [1]

    def replaces(_: Any, error: BaseException | None) -> None:
        raise Marked from error

    with pytest.raises(Marked) as caught:
        binding.load().around(int, lambda _: replaces)("no number")
    assert isinstance(caught.value.__cause__, ValueError)


def test_around_is_copied_and_pickled_as_a_function_is(monkeypatch: pytest.MonkeyPatch) -> None:
    called = binding.load().around(make_stub.stub, lambda *_: None)
    assert copy.copy(called) is copy.deepcopy([called])[0] is called
    monkeypatch.setattr(make_stub, "stub", called)
    assert pickle.loads(pickle.dumps(called)) is called


def test_around_is_bound_as_a_function_is_and_ends_with_its_cycle() -> None:
    class Owner:
        def add(self, other: int) -> tuple[Any, int]:
            return self, other

    around = binding.load().around
    setattr(Owner, "add", around(Owner.add, lambda *_: None))  # noqa: B010
    owner = Owner()
    method = owner.add
    assert owner.add(1) == method(1) == Owner.add(owner, 1) == (owner, 1)
    ended: list[str] = []

    def enter(*_: Any, kept: Kept = Kept(ended)) -> None:  # noqa: B008
        return None

    called: Any = around(int, enter)
    called.itself = called
    assert weakref.ref(called)() is called
    del called, enter
    gc.collect()
    assert ended == ["end"]
