"""Keyword arguments: an unknown one is an error that names the near one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from memmgr.config.did_you_mean import meant

P = ParamSpec("P")
R = TypeVar("R")


def known_keywords(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function raises `TypeError`, in one line, for a keyword argument that it does not have.

    Args:
        name: the public name, for the error.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [key for key in inspect.signature(function).parameters if key != "self"]
        public = [key for key in known if not key.startswith("_")]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for key in kwargs:
                if key not in known:
                    near = meant(key, public)
                    raise TypeError(f"{name}() has no argument {key!r}" + (near or f"; it has {', '.join(public)}"))
            return function(*args, **kwargs)

        return checked

    return decorate
