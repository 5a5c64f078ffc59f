"""Made-up passes of many shapes for tools/bench/studies/plan_quality.py: forward on a tape, backward from it, gradients added up.

Sizes and seconds are those of no machine; each op's derivative takes twice its time and reads the tensors that autograd
would save.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from memmgr.policies.trace import Trace, TraceBuilder


class Tape:
    """Runs ops forward and records the inputs of their derivatives."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.builder = TraceBuilder()
        self.size: dict[str, int] = {}
        self.notes: list[tuple[str, float, list[str], str, str, list[str]]] = []
        self.held: dict[str, int] = {}  # names of autograd's references: how many ops saved each
        self.locals: set[str] = set()
        self.count = 0

    def _name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def constant(self, size: int) -> str:
        x = self._name()
        self.builder.constant(x, size)
        return x

    def op(
        self, name: str, seconds: float, inputs: Sequence[str], size: int, *, saves: str = "inputs", weight: int = 0
    ) -> str:
        """`saves`: "inputs", "output" or "" for the tensors that the derivative reads; `weight`: bytes of a parameter
        of its own.
        """
        y = self._name()
        parameter = self.constant(weight) if weight else ""
        seconds *= self.random.uniform(0.8, 1.25)
        self.builder.call(name, seconds, [*inputs, *([parameter] if parameter else [])], [(y, size, -1)])
        self.size[y] = size
        self.locals.add(y)
        saved = [x for x in inputs if x in self.size] if saves == "inputs" else [y] if saves == "output" else []
        for x in saved:
            self.held[x] = self.held.get(x, 0) + 1
        self.notes.append((name, seconds, list(inputs), y, parameter, saved))
        return y

    def drop(self, *names: str) -> None:
        """Drops the program's own references; tensors saved by autograd stay."""
        for x in names:
            if x in self.locals:
                self.locals.remove(x)
                self._let_go(x)

    def _let_go(self, x: str) -> None:
        if x not in self.locals and not self.held.get(x, 0):
            self.builder.release(x)

    def backward(self, loss: str) -> Trace:
        """Everything in reverse; gradients of parameters are held at the end."""
        b = self.builder
        b.begin_backward()
        gradient = {loss: self._name()}
        b.call("ones_like", 1e-6, [loss], [(gradient[loss], self.size[loss], -1)])
        for name, seconds, inputs, y, parameter, saved in reversed(self.notes):
            g = gradient.pop(y, None)
            if g is None:
                raise ValueError(f"{y} has no gradient")
            wanted = [x for x in dict.fromkeys(inputs) if x in self.size]
            results = [(self._name(), self.size[x], -1) for x in wanted]
            if parameter:
                results.append((self._name(), self._bytes(parameter), -1))
            if results:
                b.call(f"{name}_backward", 2 * seconds, [g, *saved, *([parameter] if parameter else [])], results)
            b.release(g)
            for x, (made, _, _) in zip(wanted, results, strict=False):
                if x in gradient:
                    b.mutate("add_", self.size[x] * 1e-12, [gradient[x], made], [0])
                    b.release(made)
                else:
                    gradient[x] = made
            for x in saved:
                self.held[x] -= 1
                self._let_go(x)
            self.drop(y)
        return b.build().check()

    def _bytes(self, parameter: str) -> int:
        return self.builder._sizes[self.builder._bound[parameter]]


_MB = 10**6


def chain(n: int, seed: int) -> Trace:
    """Convolution, norm, activation, narrower and longer towards the end (VGG)."""
    t = Tape(seed)
    x = t.constant(8 * _MB)
    size = 64.0 * _MB
    for i in range(n // 6):
        if i % max(n // 36, 1) == max(n // 36, 1) - 1:
            size *= 0.6
        y = t.op("conv", 3e-3, [x], int(size), weight=4 * _MB)
        z = t.op("norm", 3e-4, [y], int(size), weight=1000)
        a = t.op("relu", 1e-4, [z], int(size), saves="output")
        t.drop(x, y, z)
        x = a
    loss = t.op("loss", 1e-5, [x], 8)
    t.drop(x)
    return t.backward(loss)


def transformer(n: int, seed: int) -> Trace:
    """Blocks of attention and MLP with residuals and dropouts."""
    t = Tape(seed)
    width = 16 * _MB
    x = t.op("embed", 1e-4, [t.constant(_MB)], width, saves="", weight=64 * _MB)
    for _ in range(max(n // 29, 1)):
        for kind in ("attention", "mlp"):
            h = t.op("norm", 1e-4, [x], width, weight=1000)
            if kind == "attention":
                q, k, v = (t.op("mm", 1e-3, [h], width, weight=4 * _MB) for _ in range(3))
                s = t.op("bmm", 8e-4, [q, k], 3 * width)
                p = t.op("softmax", 2e-4, [s], 3 * width, saves="output")
                d = t.op("dropout", 2e-4, [p], 3 * width, saves="output")
                m = t.op("bmm", 8e-4, [d, v], width)
                t.drop(h, q, k, v, s, p, d)
            else:
                u = t.op("mm", 4e-3, [h], 4 * width, weight=16 * _MB)
                g = t.op("gelu", 2e-4, [u], 4 * width)
                m = t.op("mm", 4e-3, [g], width, weight=16 * _MB)
                t.drop(h, u, g)
            y = t.op("add", 5e-5, [x, m], width, saves="")
            t.drop(x, m)
            x = y
    loss = t.op("loss", 1e-3, [x], 8)
    t.drop(x)
    return t.backward(loss)


def unet(n: int, seed: int) -> Trace:
    """Down and up again, each level joined to its mirror image: the tensor made first is needed last."""
    t = Tape(seed)
    x, size, levels = t.constant(3 * _MB), 128 * _MB, 5
    per = max(n // (levels * 12), 1)
    skips = []

    def block(x: str, size: int) -> str:
        for _ in range(per):
            y = t.op("conv", size / _MB * 3e-5, [x], size, weight=2 * _MB)
            a = t.op("relu", size / _MB * 1e-6, [y], size, saves="output")
            t.drop(x, y)
            x = a
        return x

    for _ in range(levels):
        x = block(x, size)
        skips.append((x, size))
        size //= 2
        x = t.op("pool", 1e-4, [x], size)
    x = block(x, size)
    for skip, size in reversed(skips):
        up = t.op("upsample", 1e-4, [x], size, saves="")
        joined = t.op("cat", 1e-4, [up, skip], 2 * size, saves="")
        t.drop(x, up, skip)
        x = block(joined, size)
    loss = t.op("loss", 1e-4, [x], 8)
    t.drop(x)
    return t.backward(loss)


def dense(n: int, seed: int) -> Trace:
    """Each layer reads all before it of its block (DenseNet): cheap concatenations, expensive memory."""
    t = Tape(seed)
    x = t.op("conv", 1e-3, [t.constant(_MB)], 32 * _MB, weight=_MB)
    per = 12
    for _ in range(max(n // (per * 11), 1)):
        parts = [x]
        for _ in range(per):
            joined = t.op("cat", 1e-4, parts, sum(t.size[p] for p in parts), saves="")
            z = t.op("norm", 2e-4, [joined], t.size[joined], weight=1000)
            y = t.op("conv", 1e-3, [z], 8 * _MB, weight=_MB)
            t.drop(joined, z)
            parts.append(y)
        last = t.op("cat", 1e-4, parts, sum(t.size[p] for p in parts), saves="")
        t.drop(*parts)
        x = t.op("conv", 1e-3, [last], 32 * _MB, weight=_MB)
        t.drop(last)
    loss = t.op("loss", 1e-4, [x], 8)
    t.drop(x)
    return t.backward(loss)


def branches(n: int, seed: int) -> Trace:
    """Four ways of different depth from each tensor to the next (Inception)."""
    t = Tape(seed)
    x = t.op("conv", 1e-3, [t.constant(_MB)], 48 * _MB, weight=_MB)
    for _ in range(max(n // 37, 1)):
        ends = []
        for depth in (1, 2, 3, 2):
            y = x
            for _ in range(depth):
                c = t.op("conv", t.random.uniform(3e-4, 3e-3), [y], 12 * _MB, weight=_MB)
                a = t.op("relu", 4e-5, [c], 12 * _MB, saves="output")
                t.drop(c, *([y] if y != x else []))
                y = a
            ends.append(y)
        joined = t.op("cat", 1e-4, ends, 48 * _MB, saves="")
        t.drop(x, *ends)
        x = joined
    loss = t.op("loss", 1e-4, [x], 8)
    t.drop(x)
    return t.backward(loss)


def recurrent(n: int, seed: int) -> Trace:
    """Many small, even ops over time steps that share a parameter (an unrolled LSTM)."""
    t = Tape(seed)
    weight, size = t.constant(32 * _MB), 2 * _MB
    h, c = (t.op("zeros", 1e-5, [t.constant(8)], size, saves="") for _ in range(2))
    for _ in range(max(n // 24, 1)):
        gates = t.op("mm", 4e-4, [h, weight], 4 * size)
        i, f, o, u = (t.op("sigmoid", 4e-5, [gates], size, saves="output") for _ in range(4))
        kept, new = t.op("mul", 3e-5, [f, c], size), t.op("mul", 3e-5, [i, u], size)
        c2 = t.op("add", 3e-5, [kept, new], size, saves="")
        tanh = t.op("tanh", 3e-5, [c2], size, saves="output")
        h2 = t.op("mul", 3e-5, [o, tanh], size)
        t.drop(gates, i, f, o, u, kept, new, tanh, c, h)
        h, c = h2, c2
    both = t.op("mul", 3e-5, [h, c], size)
    loss = t.op("loss", 1e-4, [both], 8)
    t.drop(h, c, both)
    return t.backward(loss)


def tree(n: int, seed: int) -> Trace:
    """Leaves joined two by two up to one root (TreeLSTM): half of the ops are at the bottom."""
    t = Tape(seed)
    size = 4 * _MB
    row = []
    for _ in range(max(n // 18, 2)):
        leaf = t.op("embed", 1e-4, [t.constant(1000)], size, saves="")
        row.append(t.op("mm", 6e-4, [leaf], size, weight=0))
        t.drop(leaf)
    while len(row) > 1:
        above = []
        for left, right in zip(row[::2], row[1::2], strict=False):
            m = t.op("mm", 1e-3, [left, right], 2 * size)
            s = t.op("sigmoid", 6e-5, [m], 2 * size, saves="output")
            above.append(t.op("mul", 6e-5, [s, m], size))
            t.drop(left, right, m, s)
        row = above + row[len(above) * 2 :]
    loss = t.op("loss", 1e-4, row, 8)
    t.drop(*row)
    return t.backward(loss)


SHAPES: dict[str, Callable[[int, int], Trace]] = {
    "chain": chain, "transformer": transformer, "unet": unet, "dense": dense, "branches": branches,
    "recurrent": recurrent, "tree": tree,
}  # fmt: skip
"""Name: (about how many ops, seed) -> pass."""
