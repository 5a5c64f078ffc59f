"""Compiled graphs on the CPU, launch by launch: all that memmgr knows of the code that Inductor writes.

Inductor writes a Python module for each graph. Its function `call` allocates buffers without an op, launches kernels and
calls ops. A kernel is a C++ function with one argument for each tensor and number: it asks for the tensors' addresses and
reads and writes them until it returns. The pager takes the place of that function, so a launch is an op. It takes the place
of the function that allocates buffers, too, so that it knows which of them are new. The ops are seen as they are.

A graph is paged if its module has no other code than this. Otherwise its inputs stay in memory until it returns.
"""

from __future__ import annotations

import ast
import os
import re
import threading
import warnings
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memmgr.common.constants import ARGUMENT_NUMBER, ARGUMENT_READ, ARGUMENT_WRITTEN

if TYPE_CHECKING:
    from memmgr.native._pager import Pager


_INTEGERS = frozenset(("int64_t", "long"))
_NUMBERS = _INTEGERS | {"float", "double"}
# How a kernel takes its arguments (`CppPythonBindingsCodeCache.suffix_template`). A release that has another way is not
# paged before somebody has looked at it.
_BINDING = (
    "static_cast<T>(_torchinductor_pyobject_tensor_data_ptr(PyTuple_GET_ITEM(args, n)))",
    '{{"{entry_func}", {entry_func}_py, METH_VARARGS, ""}}',
)
# The arguments of kernels that Inductor's loops are written in. Templates (matrix products) have others.
_ARGUMENT = re.compile(r"(?:in_out_ptr|in_ptr|out_ptr|ks)\d+")
_STORE = re.compile(r"\b(?:in_)?out_ptr\d+\s*[\[+]")


class Kernel(NamedTuple):
    """A kernel of a module of Inductor's.

    Attributes:
        args: a letter for each argument (ARGUMENT_READ, ...).
        repeats: the same bytes and integers make the same bytes again.
    """

    args: str
    repeats: bool


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
        self._warned = False  # one warning a budget

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

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `function` for a graph that is paged, the first of `args`. In the forward of a training the pager records
        how results are made, although gradient mode is off.
        """
        facts = getattr(args[0], "fx_kwargs", {})
        forward = not (facts.get("is_inference", True) or facts.get("is_backward", True))
        return self._pager.call_graph(function, args, kwargs, forward)

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
            warned, self._warned = self._warned, self._warned or bool(why)
        if why and not warned:
            warnings.warn(
                f"memmgr: a compiled graph is not paged, so its inputs stay in memory until it returns: {why}",
                RuntimeWarning,
                stacklevel=4,
            )
        return why

    def _page(self, kernels: dict[str, Kernel], call: Any) -> None:
        if not self._pager.page_buffers(call.__globals__.get("empty_strided_cpu")):
            raise _NotPagedError("it allocates its buffers in another way")
        for name, kernel in kernels.items():
            function = call.__globals__.get(name)
            key = getattr(getattr(function, "__self__", None), "__name__", "")  # a hash of the kernel's source
            if not self._pager.page_kernel(function, key=key, name=f"inductor::{name}", **kernel._asdict()):
                raise _NotPagedError(f"{name} is bound in another way")


class _NotPagedError(Exception):
    """The reason why a graph is not paged."""


def _kernels(graph: Any, call: Any, code: CodeType | None) -> dict[str, Kernel]:
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


def kernels_in(source: str) -> dict[str, Kernel]:
    """The kernels that a module of Inductor's loads, by their names in it.

    Raises:
        _NotPagedError: it has other code as well.
    """
    found: dict[str, Kernel] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign | ast.Expr):
            _read(statement, found)
    return found


def _read(statement: ast.Assign | ast.Expr, found: dict[str, Kernel]) -> None:
    """Adds the kernel that the statement loads, if it loads one."""
    for node in ast.walk(statement):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, function = node.func.value, node.func.attr
        asynchronous = isinstance(owner, ast.Name) and owner.id == "async_compile"
        if function == "cpp_pybinding" and isinstance(statement, ast.Assign):
            target, types = statement.targets[0], ast.literal_eval(node.args[0])
            if isinstance(target, ast.Name) and isinstance(types, list):
                text = node.args[1] if len(node.args) > 1 else None
                source = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
                found[target.id] = Kernel("".join(map(_letter, types)), _repeats(types, source))
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


def _repeats(types: list[str], source: str) -> bool:
    """Returns true if a kernel with this source makes the same bytes of the same bytes. False where that is not known.

    A kernel that adds atomically, or stores at an index that it has computed from data, writes in the order of its threads.
    A floating-point argument is passed in another register, which a replay does not fill.
    """
    parameters = re.search(r'extern "C"\s+void\s+kernel\(([^)]*)\)', source)
    if not parameters or "atomic_add" in source:
        return False
    names = [parameter.split()[-1].lstrip("*") for parameter in parameters[1].split(",") if parameter.strip()]
    if len(names) != len(types) or not all(map(_ARGUMENT.fullmatch, names)):
        return False
    if any(not kind.endswith("*") and kind.removeprefix("const ").strip() not in _INTEGERS for kind in types):
        return False
    return not any("tmp" in _index(source, found.end()) for found in _STORE.finditer(source))


def _index(source: str, begin: int) -> str:
    """The text from `begin` to the next comma, or to the end of the brackets that it is in."""
    depth, at = 1, begin
    while depth and at < len(source) and (depth > 1 or source[at] != ","):
        depth += (source[at] in "([") - (source[at] in ")]")
        at += 1
    return source[begin:at]
