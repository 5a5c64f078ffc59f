"""Compiled graphs on the CPU, launch by launch: all that memmgr knows of the code that Inductor writes.

Inductor writes a Python module for each graph. Its function `call` allocates buffers without an op, launches kernels and
calls ops. A kernel is a C++ function with one argument for each tensor and number: it asks for the tensors' addresses and
reads and writes them until it returns. The pager takes the place of that function, so a launch is an op. The ops are seen
as they are.

A graph is paged if its module has no other code than this. Otherwise its inputs stay in memory until it returns.
"""

from __future__ import annotations

import ast
import os
import threading
import warnings
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from memmgr.common.constants import ARGUMENT_NUMBER, ARGUMENT_READ, ARGUMENT_WRITTEN

if TYPE_CHECKING:
    from memmgr.native._pager import Pager


_NUMBERS = frozenset(("int64_t", "long", "float", "double"))
# How a kernel takes its arguments (`CppPythonBindingsCodeCache.suffix_template`). A release that has another way is not
# paged before somebody has looked at it.
_BINDING = (
    "static_cast<T>(_torchinductor_pyobject_tensor_data_ptr(PyTuple_GET_ITEM(args, n)))",
    '{{"{entry_func}", {entry_func}_py, METH_VARARGS, ""}}',
)


class PagedGraphs:
    """Which graphs of one budget are paged.

    Args:
        device: the device of the budget: on an accelerator no graph is paged.
    """

    def __init__(self, pager: Pager, device: torch.device) -> None:
        self._pager = pager
        self._on_cpu = device.type == "cpu"
        # By the id of the code of `call`: two of them may be equal and call other kernels.
        self._known: dict[int, tuple[CodeType | None, str]] = {}  # with the reason, if it is not paged
        self._lock = threading.Lock()
        self._told = False  # one warning a budget

    def paged(self, graph: Any) -> bool:
        """Returns whether each launch and op of this graph pages its own tensors. At its first call in the budget its
        kernels become the pager's.
        """
        call = getattr(graph, "current_callable", None)
        code = getattr(getattr(call, "__func__", call), "__code__", None)
        known = self._known.get(id(code))
        return not (self._first(graph, call, code) if known is None else known[1])

    def reason(self, graph: Any) -> str:
        """Why the graph, which has run, is not paged."""
        call = getattr(graph, "current_callable", None)
        return self._known.get(id(getattr(getattr(call, "__func__", call), "__code__", None)), (None, ""))[1]

    def remove(self) -> None:
        """Kernels run as they were."""
        self._pager.unpage_kernels()
        self._known.clear()

    def _first(self, graph: Any, call: Any, code: CodeType | None) -> str:
        if not self._on_cpu:
            self._known[id(code)] = code, "it runs on an accelerator"
            return self._known[id(code)][1]
        with self._lock:  # another thread's launches wait until all kernels are the pager's
            try:
                self._page(_kernels(graph, call, code), call)
                why = ""
            except _NotPagedError as error:
                why = str(error)
            except Exception as error:  # code as no release that we know writes it
                why = f"{type(error).__name__}: {error}"
            self._known[id(code)] = code, why
            told, self._told = self._told, self._told or bool(why)
        if why and not told:
            warnings.warn(
                f"memmgr: a compiled graph is not paged, so its inputs stay in memory until it returns: {why}",
                RuntimeWarning,
                stacklevel=4,
            )
        return why

    def _page(self, kernels: dict[str, str], call: Any) -> None:
        for name, args in kernels.items():
            function = call.__globals__.get(name)
            library = getattr(getattr(function, "__self__", None), "__name__", "")  # a hash of the kernel's source
            if not self._pager.page_kernel(function, key=library, name=f"inductor::{name}", args=args):
                raise _NotPagedError(f"{name} is bound in another way")


class _NotPagedError(Exception):
    """The reason why a graph is not paged."""


def _kernels(graph: Any, call: Any, code: CodeType | None) -> dict[str, str]:
    """The kernels of a graph; raises _NotPagedError if it cannot be paged."""
    from torch._inductor import codecache

    template = getattr(getattr(codecache, "CppPythonBindingsCodeCache", None), "suffix_template", "")
    if not all(part in template for part in _BINDING):
        raise _NotPagedError(f"torch {torch.__version__} binds kernels in another way")
    source, key = getattr(graph, "source_code", None), getattr(graph, "cache_key", None)
    kernels = kernels_in(source) if source else {}
    if code is None or not source or os.path.basename(code.co_filename) != f"{key}.py" or code.co_name != "call":
        raise _NotPagedError("it is called through code that Inductor did not write")
    return kernels


def kernels_in(source: str) -> dict[str, str]:
    """The kernels that a module of Inductor's loads, by their names in it, each with a letter for each argument
    (`Pager.page_kernel`).

    Raises:
        _NotPagedError: it has other code as well.
    """
    found: dict[str, str] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign | ast.Expr):
            _read(statement, found)
    return found


def _read(statement: ast.Assign | ast.Expr, found: dict[str, str]) -> None:
    """Adds the kernel that the statement loads, if it loads one."""
    for node in ast.walk(statement):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, function = node.func.value, node.func.attr
        asynchronous = isinstance(owner, ast.Name) and owner.id == "async_compile"
        if function == "cpp_pybinding" and isinstance(statement, ast.Assign):
            target, types = statement.targets[0], ast.literal_eval(node.args[0])
            if isinstance(target, ast.Name) and isinstance(types, list):
                found[target.id] = "".join(map(_letter, types))
                continue
        if function.startswith("load") or (asynchronous and function != "wait"):
            raise _NotPagedError(f"it has code made by {function}()")


def _letter(argument_type: str) -> str:
    constant = argument_type.startswith("const ")
    kind = argument_type.removeprefix("const ").strip()
    if kind.endswith("*"):
        return ARGUMENT_READ if constant else ARGUMENT_WRITTEN
    if kind in _NUMBERS:
        return ARGUMENT_NUMBER
    raise _NotPagedError(f"a kernel has an argument of type {argument_type}")
