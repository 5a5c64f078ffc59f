"""The errors that memmgr raises. `memmgr/observe/error_text.py` writes their texts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import OutOfMemoryError


class BudgetError(OutOfMemoryError):
    """The budget is spent and nothing more can be let go.

    A subclass of `torch.OutOfMemoryError`, so that a handler of torch's own error handles this one. Its text begins
    as torch's does, then names the holders of the memory, and a change that helps.

    The text is written, and `enough_bytes` found, when either is first read: a program that tries smaller batches reads none.

    Attributes:
        floor_bytes: the smallest budget that would have worked up to here, in bytes; a later part of the run may need more.
            Without a tier it counts tensors that can no longer be dropped. A smaller budget may drop them earlier.
        enough_bytes: the budget that the text names, in bytes, at least `floor_bytes`. In a training step it should do for all of
            the step, with the rest of backward and the optimizer; in a module without gradients for the module's
            call; elsewhere for the op and for two more results like its own. The text says which. An estimate.
        budget_bytes: the budget that was passed, in bytes.
        details: the reasons why so much is needed: states still to come, a compiled graph, exported addresses. The text leaves
            them out; the log has them, and `memmgr doctor --explain` prints them.
        tier_bytes: how large the tier below (`disk=`, or `host=` on an accelerator) would have to be, in bytes, where that was
            full and not the budget too small; else 0.

    Known limitation: where C++ code allocates outside of an op, torch's error becomes one of these when Python raises it. C++
    code that catches it before sees torch's.
    """

    __module__ = "memmgr"  # shown in tracebacks
    floor_bytes: int = 0
    budget_bytes: int = 0
    tier_bytes: int = 0
    _enough_bytes: int = 0
    _details: tuple[str, ...] = ()
    _rest: Callable[[], tuple[int, str, tuple[str, ...]]] | None = None

    def __init__(self, *args: Any) -> None:
        # An object that torch's `__new__` returned (`of_torchs`) is initialized a second time.
        if not vars(self):
            super().__init__(*args)

    def told_later(self, rest: Callable[[], tuple[int, str, tuple[str, ...]]]) -> None:
        """`rest` gives the budget that is named, in bytes, the last line of the text, and the details."""
        self._rest = functools.cache(rest)

    def copy(self) -> BudgetError:
        """Another object, which no traceback has: it would keep tensors alive."""
        copy = BudgetError(*_ARGS.__get__(self))
        vars(copy).update(vars(self))
        return copy

    @property
    def headline(self) -> str:
        """The first line of its text."""
        return str(_ARGS.__get__(self)[0]).partition("\n")[0]

    def _tell(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            self._enough_bytes, last, self._details = rest()
            _ARGS.__set__(self, ("\n".join((*_ARGS.__get__(self), last)),))

    @property
    def details(self) -> tuple[str, ...]:
        self._tell()
        return self._details

    @property
    def enough_bytes(self) -> int:
        self._tell()
        return self._enough_bytes

    @enough_bytes.setter
    def enough_bytes(self, size: int) -> None:
        self._tell()
        self._enough_bytes = size

    @property
    def args(self) -> tuple[Any, ...]:
        self._tell()
        return _ARGS.__get__(self)  # type: ignore[no-any-return]

    @args.setter
    def args(self, values: tuple[Any, ...]) -> None:
        self._tell()
        _ARGS.__set__(self, values)

    def __str__(self) -> str:
        self._tell()
        return super().__str__()

    def __repr__(self) -> str:
        self._tell()
        return super().__repr__()

    def __reduce__(self) -> Any:
        self._tell()
        return super().__reduce__()


_ARGS: Any = vars(BaseException)["args"]


class RecomputeError(RuntimeError):
    """Bytes came back other than they left, made again or read back: raised instead of a wrong gradient."""

    __module__ = "memmgr"


class RankError(RuntimeError):
    """Another rank of this distributed job is in trouble, and this one would have waited for it.

    Raised where an error of the backend ("connection closed by peer") leaves the budget; that one is its `__cause__`.

    Attributes:
        rank: the rank in trouble.
        budget_bytes: its budget, in bytes, where a `BudgetError` is its trouble; else 0, as the next two.
        floor_bytes: the smallest budget that would have worked there so far, in bytes; known of one that has fallen silent, too.
        enough_bytes: the budget that its error names, in bytes.
    """

    __module__ = "memmgr"

    rank: int = -1
    budget_bytes: int = 0
    floor_bytes: int = 0
    enough_bytes: int = 0
