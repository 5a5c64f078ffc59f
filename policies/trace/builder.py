"""Builds a trace from the events of a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .trace import HELD, Op, OpKind, Storage, TierLink, Trace, TraceError


@dataclass
class TraceBuilder:
    """Makes a trace from a program's events: names bound to storages, counted references.

    A name is the program's name of a tensor. Each call is one event of the program, in order.
    """

    device: str = ""
    copy_on_write: bool = True
    ops: list[Op] = field(default_factory=list)
    backward_at: int | None = None
    _names: list[str] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _makers: list[int] = field(default_factory=list)
    _released: list[int] = field(default_factory=list)
    _references: list[int] = field(default_factory=list)
    _bound: dict[str, int] = field(default_factory=dict)

    def _storage(self, name: str, size_bytes: int, references: int) -> int:
        if size_bytes < 0:
            raise TraceError(f"{name} has {size_bytes} bytes")
        self._names.append(name)
        self._sizes.append(size_bytes)
        self._makers.append(len(self.ops))
        self._released.append(HELD)
        self._references.append(references)
        return len(self._names) - 1

    def _of(self, name: str) -> int:
        try:
            return self._bound[name]
        except KeyError:
            raise TraceError(f"{name} is not the name of a tensor that is held here") from None

    def _drop(self, storage: int, at: int) -> None:
        self._references[storage] -= 1
        if self._references[storage] == 0:
            self._released[storage] = at

    def constant(self, name: str, size_bytes: int) -> int:
        """A parameter, buffer or batch; returns its storage."""
        s = self._storage(f"c.{name}", size_bytes, 1)
        self.ops.append(Op("constant", 0.0, (), (s,), OpKind.CONSTANT))
        self._bound[name] = s
        return s

    def copy(self, source: str, target: str) -> None:
        """`target = source`: one more name for the same tensor."""
        s = self._of(source)
        self._bound[target] = s
        self._references[s] += 1

    def copy_from(self, source: str, target: str) -> None:
        """As `copy`, where `target` is bound already and releases its old storage."""
        s, old = self._of(source), self._of(target)
        self._references[s] += 1
        self._drop(old, len(self.ops))
        self._bound[target] = s

    def release(self, name: str) -> None:
        """`del name`; an unknown name is ignored, as the judge does."""
        if name in self._bound:
            self._drop(self._bound.pop(name), len(self.ops))

    def call(self, name: str, seconds: float, arguments: Sequence[str], results: Iterable[tuple[str, int, int]]) -> int:
        """An op; `results` are (name, bytes, argument that it is a view of, or -1). Returns the op's number."""
        k = len(self.ops)
        read = [self._of(a) for a in arguments]
        outputs = []
        for j, (result, size_bytes, alias) in enumerate(results):
            if not -1 <= alias < len(read):
                raise TraceError(f"{result} is a view of argument {alias} of {len(read)}")
            if alias >= 0:
                s = self._of(arguments[alias])
            else:
                s = self._storage(f"{k}.{j}", size_bytes, 0)
                outputs.append(s)
            self._references[s] += 1
            self._bound[result] = s
        kind = OpKind.COMPUTE if outputs else OpKind.VIEW
        self.ops.append(Op(name, seconds, tuple(dict.fromkeys(read)), tuple(outputs), kind))
        return k

    def mutate(self, name: str, seconds: float, arguments: Sequence[str], mutated: Iterable[int]) -> int:
        """An op that writes `arguments[i]` for i in `mutated`: the name is bound to a new version from then on, other
        names of the old version keep it."""
        k = len(self.ops)
        read = [self._of(a) for a in arguments]
        pairs = []
        for j, i in enumerate(mutated):
            if not 0 <= i < len(arguments):
                raise TraceError(f"it writes argument {i} of {len(arguments)}")
            old = self._of(arguments[i])
            new = self._storage(f"{k}.{j}", self._sizes[old], 1)
            self._bound[arguments[i]] = new
            self._drop(old, k + 1)
            pairs.append((old, new))
        outputs = tuple(new for _, new in pairs)
        self.ops.append(Op(name, seconds, tuple(dict.fromkeys(read)), outputs, OpKind.COMPUTE, tuple(pairs)))
        return k

    def begin_backward(self) -> None:
        """Backward starts with the next op."""
        self.backward_at = len(self.ops)

    def build(self, *, complete: bool = True, links: tuple[TierLink, ...] = ()) -> Trace:
        """The trace so far. Storages that are still bound are held at the end."""
        storages = tuple(
            Storage(*row) for row in zip(self._names, self._sizes, self._makers, self._released, strict=True)
        )
        return Trace(tuple(self.ops), storages, self.device, self.backward_at, links, self.copy_on_write, complete)
