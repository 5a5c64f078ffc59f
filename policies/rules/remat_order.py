"""In which order to make again what is gone: live cells (memmgr/_replay.py) and the storages of a trace (simulate/remat.py).

Of an op's inputs the one whose making needs most beyond itself is made first, so that the others do not lie about meanwhile. For
trees no depth-first order needs less room (Sethi & Ullman 1970; with sizes: Liu, On the storage requirement in the out-of-core
multifrontal method for sparse factorization, 1986); for shared inputs it is a rule of thumb. An LSTM's cell state
would otherwise be made after the gates of all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Cell = TypeVar("Cell", bound=Hashable)
Op = TypeVar("Op", bound=Hashable)


@dataclass(frozen=True)
class Making(Generic[Cell, Op]):
    """What is made of what.

    Attributes:
        gone: neither in memory nor in a tier.
        maker: the op that makes it; raises what the caller wants raised if that cannot run.
        inputs: what an op reads, each once.
        outputs: what it makes.
        size_bytes: of a thing.
        present: in memory.
    """

    gone: Callable[[Cell], bool]
    maker: Callable[[Cell], Op]
    inputs: Callable[[Op], Sequence[Cell]]
    outputs: Callable[[Op], Sequence[Cell]]
    size_bytes: Callable[[Cell], int]
    present: Callable[[Cell], bool]


def remake_order(making: Making[Cell, Op], wanted: Sequence[Cell]) -> tuple[list[Op], dict[Cell, int]]:
    """The ops to run until all of `wanted` has been made, each after those that it needs, and how often each of their inputs is
    used: the whole of it before the first op runs, so that what two of them need is made once and kept for both.

    One after the other in the order of `wanted`; what cannot be made again raises what `making.maker` raises.
    """
    order, uses, branches = needed(making, wanted)
    if branches and len(order) > 2:
        order, uses, _ = needed(making, wanted, _extra_bytes(making, order))
    return order, uses


def needed(
    making: Making[Cell, Op], wanted: Sequence[Cell], extra_bytes: Mapping[Cell, int] | None = None
) -> tuple[list[Op], dict[Cell, int], bool]:
    """As `remake_order`, by what is known of the bytes that a thing's making needs beyond itself, and whether an op needs more
    than one thing that has to be made: else there is one order only."""
    gone, maker, inputs_of = making.gone, making.maker, making.inputs
    order: list[Op] = []
    uses: dict[Cell, int] = {}
    done: set[Op] = set()
    branches = len(wanted) > 1
    # Iterative: a chain of ten thousand ops needs no deep stack.
    stack = [(s, False) for s in reversed(wanted)]
    while stack:
        s, expanded = stack.pop()
        if not gone(s):
            continue
        op = maker(s)
        if op in done:
            continue
        inputs = inputs_of(op)
        if expanded:
            done.add(op)
            order.append(op)
            for i in inputs:
                uses[i] = uses.get(i, 0) + 1
            continue
        stack.append((s, True))
        missing = [i for i in inputs if gone(i)]
        if len(missing) > 1:
            branches = True
            if extra_bytes:
                missing.sort(key=lambda i: extra_bytes.get(i, 0))  # the last is popped first
        for i in missing:
            stack.append((i, False))
    return order, uses, branches


def _extra_bytes(making: Making[Cell, Op], order: Iterable[Op]) -> dict[Cell, int]:
    """Of each thing that `order` makes: how many bytes its making needs at once, beyond itself."""
    extra: dict[Cell, int] = {}
    for op in order:
        # What is offloaded needs its own bytes and no more; what is in memory needs nothing.
        sizes = {i: making.size_bytes(i) for i in making.inputs(op) if not making.present(i)}
        peak = held = 0
        for i in sorted(sizes, key=lambda i: extra.get(i, 0), reverse=True):
            peak = max(peak, held + sizes[i] + extra.get(i, 0))
            held += sizes[i]
        made = {i: making.size_bytes(i) for i in making.outputs(op)}
        peak = max(peak, held + sum(made.values()))
        for i, nbytes in made.items():
            extra[i] = peak - nbytes
    return extra


def shared(
    making: Making[Cell, Op],
    order: Sequence[Op],
    wanted: Sequence[Cell],
    most_bytes: int,
    nobody_saved: Callable[[Cell], bool],
) -> list[Cell]:
    """What `order` makes, nobody saved, and the making of `wanted` reads later, by ops that `order` does not run; nothing if that
    is more than `most_bytes`."""
    made = {cell for op in order for cell in making.outputs(op) if nobody_saved(cell)}
    if not made:
        return []
    running = set(order)
    rest = [op for op in needed(making, wanted)[0] if op not in running]
    found = list(dict.fromkeys(cell for op in rest for cell in making.inputs(op) if cell in made))
    return found if sum(map(making.size_bytes, found)) <= most_bytes else []


__all__ = ["Making", "needed", "remake_order", "shared"]
