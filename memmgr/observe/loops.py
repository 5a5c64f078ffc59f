"""Finds the turns left in the loop that an error interrupts.

Python shows the iterator of a comprehension (up to 3.11) and of a generator expression; in a `for` loop, only a DataLoader's.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from types import FrameType

from .memory_inventory import Census

_CALL = "_call_impl"  # of a module


@dataclass(frozen=True)
class Loop:
    """Describes a loop of the program.

    Attributes:
        left: turns to come, without this one.
        done: turns before this one; None: not known.
        gathers: it makes a list of the results of its turns.
    """

    left: int
    done: int | None = None
    gathers: bool = False


def loop_around(census: Census) -> Loop | None:
    """The loop of the program that the calling thread is in, around its outermost module; None: none is known."""
    return _comprehension() or _loader(census)


def _comprehension() -> Loop | None:
    found: Loop | None = None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == _CALL:
            found = None  # a loop over layers
        elif found is None and ".0" in frame.f_code.co_varnames and not name.startswith(("torch.", "memmgr.")):
            left = operator.length_hint(frame.f_locals.get(".0"), -1)
            found = Loop(left, gathers=frame.f_code.co_name == "<listcomp>") if left >= 0 else None
        frame = frame.f_back
    return found


def _loader(census: Census) -> Loop | None:
    """The loop over the only DataLoader that has begun and not ended; None: there are none or several."""
    found = []
    for iterator in census.loaders():
        try:
            whole, done = len(iterator), int(iterator._num_yielded)
        except (TypeError, AttributeError, NotImplementedError):
            continue  # its data set has no length
        if 0 < done < whole:
            found.append(Loop(whole - done, done - 1))
    return found[0] if len(found) == 1 else None
