"""Records the bits of the tensors that a test compares or differentiates.

A foreign test holds no record of its own, but it hands its results to a few functions: `assert_close`, `allclose`,
`assertEqual`, `backward`. Each call becomes one entry: the function's name and a digest of all tensors that it was given.
Tolerances of the test do not matter then: two runs are the same where their lists of entries are.
"""

import contextlib
import functools
import hashlib
import sys
import unittest
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from ops.sweep import bits

MOST_ENTRIES = 1500  # of one test; the digest of the last one covers all that follow
MOST_NODES = 5000  # of an autograd graph whose leaves are looked for
ASSERTIONS = ("Equal", "AlmostEqual", "ListEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "True")


def digest(value: Any) -> str:
    """Eight hexadecimal digits of all bits in a tree of tensors, arrays and numbers."""
    sums = hashlib.sha1()
    _add(sums, value)
    return sums.hexdigest()[:8]


def _add(sums: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        try:
            _add(sums, bits(value))
        except (RuntimeError, NotImplementedError, TypeError) as error:  # a wrapper subclass, a layout without bytes
            sums.update(type(error).__name__.encode())
    elif isinstance(value, np.ndarray):
        sums.update(value.tobytes() if value.dtype != object else b"objects")
    elif isinstance(value, dict):
        for key, part in value.items():
            sums.update(str(key).encode() if isinstance(key, str | int) else b"key")
            _add(sums, part)
    elif isinstance(value, list | tuple):
        for part in value:
            _add(sums, part)
    elif isinstance(value, bytes):
        sums.update(value)
    elif isinstance(value, bool | int | float | complex | str):
        sums.update(repr(value).encode())
    else:
        sums.update(type(value).__name__.encode())


def _has_bits(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(_has_bits(part) for part in value)
    return isinstance(value, torch.Tensor | np.ndarray | float | complex)


def _is_eager() -> bool:
    """No transform, mode or compiler is on the stack, so a tensor has bytes of its own."""
    return (
        torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch.compiler.is_compiling()
    )


def _leaves(roots: Any) -> list[torch.Tensor]:
    """The tensors that a backward pass from `roots` puts gradients into."""
    roots = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    nodes = [t.grad_fn for t in roots if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen, found = set(nodes), []
    while nodes and len(seen) < MOST_NODES:
        node = nodes.pop()
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            found.append(leaf)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)
    return found


class Recorder:
    """The entries of the test that runs now.

    Attributes:
        entries: in the order of the calls, `name:digest`.
        evicted: cells that left in its budget.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Before a test."""
        self.entries: list[str] = []
        self.evicted = 0
        self._busy = False

    def note(self, name: str, value: Any) -> None:
        """Adds an entry, outside of transforms and compiled code."""
        if self._busy or not _is_eager():
            return
        self._busy = True
        try:
            found = digest(value)
        finally:
            self._busy = False
        if len(self.entries) < MOST_ENTRIES:
            self.entries.append(f"{name}:{found}")
        else:
            self.entries[-1] = f"rest:{digest([self.entries[-1], found])}"

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Calls of a recorded function by another recorded function are no entries."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def wrap(self, owner: Any, name: str) -> None:
        """Replaces a function that compares by one that records its arguments first."""
        function = getattr(owner, name)
        if hasattr(function, "of_recorder"):
            return

        @functools.wraps(function)
        def recording(*args: Any, **kwargs: Any) -> Any:
            given = [*args[1:], *kwargs.values()] if isinstance(owner, type) and owner is not torch.Tensor else args
            if _has_bits(list(given)):
                self.note(name, list(given))
            with self.inside():
                return function(*args, **kwargs)

        recording.of_recorder = True  # type: ignore[attr-defined]
        setattr(owner, name, recording)

    def wrap_backward(self) -> None:
        """Records the tensors that a backward pass starts from, and the gradients of its leaves."""
        backward, grad = torch.autograd.backward, torch.autograd.grad

        @functools.wraps(backward)
        def recording_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._busy or not _is_eager():
                return backward(tensors, *args, **kwargs)
            self.note("loss", tensors)
            leaves = _leaves(tensors)
            backward(tensors, *args, **kwargs)
            self.note("gradients", [leaf.grad for leaf in leaves])

        @functools.wraps(grad)
        def recording_grad(*args: Any, **kwargs: Any) -> Any:
            found = grad(*args, **kwargs)
            self.note("grad", found)
            return found

        torch.autograd.backward, torch.autograd.grad = recording_backward, recording_grad

    def install(self) -> None:
        """Wraps functions that compare. Functions that are imported later are wrapped by a second call."""
        for name in ("allclose", "equal"):
            self.wrap(torch, name)
            self.wrap(torch.Tensor, name)
        self.wrap(torch.testing, "assert_close")
        for name in ASSERTIONS:
            self.wrap(unittest.TestCase, f"assert{name}")
        for name in ("assert_allclose", "assert_array_equal", "assert_equal"):
            self.wrap(np.testing, name)
        if (internal := sys.modules.get("torch.testing._internal.common_utils")) is not None:
            self.wrap(internal.TestCase, "assertEqual")
        if not hasattr(torch.autograd.backward, "__wrapped__"):
            self.wrap_backward()


RECORDER = Recorder()
