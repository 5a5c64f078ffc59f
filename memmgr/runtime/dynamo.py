"""Keeps Dynamo away from memmgr's Python.

Our code between two graphs of a compiled function runs in a frame that Dynamo would compile. The facts that it learns
of tensors there change the graphs of the program: other bits than without a budget (rule 15).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch._C._dynamo import eval_frame

_skipped: set[str] = set()
_PROGRAMS = "memmgr.tools."


def skip_ours() -> None:
    """From now on Dynamo compiles no function of memmgr's imported modules; it does compile the functions that they
    call. A wrapper of ours in the middle of a graph still becomes part of that. Models of memmgr's tools are compiled: their
    frames are the program's.
    """
    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    package = __name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package and not name.startswith(_PROGRAMS) and name not in _skipped:
            _skipped.add(name)
            for code in _codes_in(module):
                # skips code that decorators of other packages share
                if code.co_filename in (module.__file__, "<string>"):
                    eval_frame.set_code_exec_strategy(code, strategy)


def in_compiled_function() -> bool:
    """The calling thread is in one. When it returns torch gives the thread back the dispatch keys that it had before."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            return True
        frame = frame.f_back
    return False


def _codes_in(module: ModuleType) -> Iterator[CodeType]:
    """The code objects of its functions, of its classes' methods, and of functions defined in these."""
    for value in list(vars(module).values()):
        # the package's name: of the errors, which tracebacks show by their public names
        if getattr(value, "__module__", None) in (module.__name__, "memmgr"):
            for member in list(vars(value).values()) if isinstance(value, type) else [value]:
                yield from _codes_of(member)


def _codes_of(member: Any) -> Iterator[CodeType]:
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if isinstance(member, property):
        for function in (member.fget, member.fset, member.fdel):
            yield from _codes_of(function)
    elif isinstance(member, functools.cached_property):
        yield from _codes_of(member.func)
    elif isinstance(member, CodeType):
        yield member
        for constant in member.co_consts:
            yield from _codes_of(constant)
    elif isinstance(member, FunctionType | functools._lru_cache_wrapper):
        yield from _codes_of(getattr(member, "__code__", None))
        # a cached function, or a context manager's generator
        yield from _codes_of(getattr(member, "__wrapped__", None))
