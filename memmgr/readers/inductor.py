"""Compiled graphs, launch by launch: all that memmgr knows of the code that Inductor writes.

Inductor writes a Python module for each graph. Its function `call` allocates buffers without an op, launches kernels and
calls ops. On the CPU a kernel is a C++ function with one argument for each tensor and number: it asks for the tensors'
addresses and reads and writes them until it returns. The pager takes the place of that function, so a launch is an op. On
an accelerator a kernel is Triton's, an object whose `run` queues it on a stream; the pager takes the place of `run`. It
takes the place of the function that allocates buffers, too, so that it knows which of them are new. The ops are seen as
they are.

A graph is paged if its module has no other code than this. Otherwise its inputs stay in memory until it returns.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import threading
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memmgr.common.constants import ARGUMENT_NUMBER, ARGUMENT_READ, ARGUMENT_WRITTEN
from memmgr.common.say import warn

if TYPE_CHECKING:
    from memmgr.native._pager import Pager


_INTEGERS = frozenset(("int64_t", "long"))
_NUMBERS = _INTEGERS | {"float", "double"}
# How a kernel takes its arguments (`CppPythonBindingsCodeCache.suffix_template`). A release that has another way is not
# paged before somebody has looked at it: at `kernels_in` and `_letter` here, and at dispatch/launch.cpp and remat/replay.cpp.
_BINDING = (
    "static_cast<T>(_torchinductor_pyobject_tensor_data_ptr(PyTuple_GET_ITEM(args, n)))",
    '{{"{entry_func}", {entry_func}_py, METH_VARARGS, ""}}',
)
# The arguments of kernels that Inductor's loops are written in. Templates (matrix products) have others.
_ARGUMENT = re.compile(r"(?:in_out_ptr|in_ptr|out_ptr|ks)\d+")
_STORE = re.compile(r"\b(?:in_)?out_ptr\d+\s*[\[+]")
# Types in the signature of a Triton kernel: a pointer, a number, or a number that was compiled in. A tensor descriptor is
# none of them: it has its tensor's address already.
_TRITON_TYPE = re.compile(r"\*.*|[iu]\d+|fp\d+|bf16|constexpr")
# The arguments that Inductor's own Triton kernels only read, unless they are among `mutated_arg_names`.
_TRITON_INPUT = re.compile(r"in_ptr\d+")
# A number that is compiled into such a kernel, and is an argument all the same. Sizes of blocks (XBLOCK) are none.
_TRITON_NUMBER = re.compile(r"[a-z]\w*")


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
        device: the device of the budget.
    """

    def __init__(self, pager: Pager, device: torch.device) -> None:
        self._pager = pager
        self._device = device.type
        # By the id of the code of `call`: two of them may be equal and call other kernels.
        self._known: dict[int, tuple[CodeType | None, str]] = {}  # with the reason, if it is not paged
        # Triton kernels whose `run` was replaced, and the hashes of their sources, by id.
        self._launched: dict[int, tuple[Any, str]] = {}
        self._lock = threading.Lock()
        self._warned = False  # one warning a budget

    def paged(self, graph: Any) -> bool:
        """Returns whether each launch and op of this graph pages its own tensors. At its first call in the budget its
        kernels become the pager's.
        """
        call, code = _call_of(graph)
        known = self._known.get(id(code))
        return not (self._first(graph, call, code) if known is None else known[1])

    def reason(self, graph: Any) -> str:
        """Why the graph, which has run, is not paged."""
        return self._known.get(id(_call_of(graph)[1]), (None, ""))[1]

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
        with self._lock:
            for kernel, _ in self._launched.values():
                vars(kernel).pop("run", None)
            self._launched.clear()
            self._known.clear()

    def _first(self, graph: Any, call: Any, code: CodeType | None) -> str:
        with self._lock:  # another thread's launches wait until all kernels are the pager's
            try:
                self._page(graph, call, code)
                why = ""
            except _NotPagedError as error:
                why = str(error)
            except Exception as error:  # code as no release that we know writes it
                why = f"{type(error).__name__}: {error}"
            self._known[id(code)] = code, why
            warned, self._warned = self._warned, self._warned or bool(why)
        if why and not warned:
            warn(
                f"a compiled graph is not paged, so its inputs stay in memory until it returns: {why}",
                RuntimeWarning,
            )
        return why

    def _page(self, graph: Any, call: Any, code: CodeType | None) -> None:
        source = getattr(graph, "source_code", None) or ""
        if self._device == "cpu":
            functions, launchers = kernels_in(source), {}
            _check_binding()
        else:
            functions, launchers = {}, triton_kernels_in(source)
        key = getattr(graph, "cache_key", None)
        if code is None or not source or os.path.basename(code.co_filename) != f"{key}.py" or code.co_name != "call":
            raise _NotPagedError("it is called through code that Inductor did not write")
        if not self._pager.page_buffers(call.__globals__.get(f"empty_strided_{self._device}")):
            raise _NotPagedError("it allocates its buffers in another way")
        check = call.__globals__.get("copy_if_misaligned")  # of graphs on an accelerator, since torch 2.13
        if check is not None and not self._pager.page_alignment_check(check):
            raise _NotPagedError("it checks the alignment of its inputs in another way")
        self._page_functions(functions, call)
        self._page_launchers(launchers, call)

    def _page_functions(self, kernels: dict[str, Kernel], call: Any) -> None:
        for name, kernel in kernels.items():
            function = call.__globals__.get(name)
            key = getattr(getattr(function, "__self__", None), "__name__", "")  # a hash of the kernel's source
            if not self._pager.page_kernel(function, key=key, name=f"inductor::{name}", **kernel._asdict()):
                raise _NotPagedError(f"{name} is bound in another way")

    def _page_launchers(self, sources: dict[str, str], call: Any) -> None:
        kernels = {name: call.__globals__.get(name) for name in sources}
        # Two graphs share a kernel with the same source.
        new = {name: kernel for name, kernel in kernels.items() if id(kernel) not in self._launched}
        facts = {name: read_triton(kernel, sources[name]) for name, kernel in new.items()}  # before one is replaced
        for name, kernel in new.items():
            key = hashlib.sha256(sources[name].encode()).hexdigest()
            # Two kernels of one source may be tuned to other blocks, which may round in another way.
            same = sum(1 for _, known in self._launched.values() if known == key)
            run = self._pager.paged_run(
                kernel.run, key=f"{key} {same}" if same else key, name=f"inductor::{name}", **facts[name]._asdict()
            )
            self._launched[id(kernel)] = kernel, key
            kernel.run = run


class _NotPagedError(Exception):
    """The reason why a graph is not paged."""


def _call_of(graph: Any) -> tuple[Any, CodeType | None]:
    """The function `call` of the graph's module, and its code. On an accelerator torch's function that copies inputs of
    another alignment is around it.
    """
    call = getattr(graph, "current_callable", None)
    if isinstance(call, FunctionType) and call.__qualname__ == "align_inputs_from_check_idxs.<locals>.run":
        call = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))["model"].cell_contents
    return call, getattr(getattr(call, "__func__", call), "__code__", None)


def _check_binding() -> None:
    from torch._inductor import codecache

    template = getattr(getattr(codecache, "CppPythonBindingsCodeCache", None), "suffix_template", "")
    if not all(part in template for part in _BINDING):
        raise _NotPagedError(f"torch {torch.__version__} binds kernels in another way")


def kernels_in(source: str) -> dict[str, Kernel]:
    """The C++ kernels that a module of Inductor's loads, by their names in it.

    Raises:
        _NotPagedError: it has other code as well.
    """
    found: dict[str, Kernel] = {}
    for target, made_by, args in _loaded(source):
        if made_by != "cpp_pybinding" or not target:
            raise _NotPagedError(f"it has code made by {made_by}()")
        types = ast.literal_eval(args[0])
        text = args[1].value if len(args) > 1 and isinstance(args[1], ast.Constant) else ""
        found[target] = Kernel("".join(map(_letter, types)), _repeats(types, text if isinstance(text, str) else ""))
    return found


def triton_kernels_in(source: str) -> dict[str, str]:
    """The Triton kernels that a module of Inductor's loads, by their names in it, with their sources. C++ kernels beside
    them compute on the host, where a budget of an accelerator has no cells.

    Raises:
        _NotPagedError: it has other code as well.
    """
    found: dict[str, str] = {}
    for target, made_by, args in _loaded(source):
        if made_by == "triton" and target and len(args) > 1:
            found[target] = ast.literal_eval(args[1])
        elif made_by != "cpp_pybinding":
            raise _NotPagedError(f"it has code made by {made_by}()")
    return found


def _loaded(source: str) -> Iterator[tuple[str, str, list[ast.expr]]]:
    """Each call at the top of a module that compiles or loads code: the name that it is assigned to (empty: none), the
    function's name and its arguments.
    """
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.Assign | ast.Expr):
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, function = node.func.value, node.func.attr
            asynchronous = isinstance(owner, ast.Name) and owner.id == "async_compile"
            if function == "cpp_pybinding" or function.startswith("load") or (asynchronous and function != "wait"):
                yield target.id if isinstance(target, ast.Name) else "", function, node.args


def read_triton(kernel: Any, source: str) -> Kernel:
    """The leading arguments of a Triton kernel's `run`, and whether it repeats.

    Raises:
        _NotPagedError: its arguments cannot be read.
    """
    meta, mutated = getattr(kernel, "triton_meta", None), getattr(kernel, "mutated_arg_names", None)
    signature = meta.get("signature") if isinstance(meta, dict) else None
    if not isinstance(signature, dict) or mutated is None or "run" in vars(kernel):
        raise _NotPagedError(f"a kernel is a {type(kernel).__name__}, whose arguments are not known")
    for kind in signature.values():
        if not isinstance(kind, str) or not _TRITON_TYPE.fullmatch(kind):
            raise _NotPagedError(f"a kernel has an argument of type {kind}")
    if getattr(kernel, "custom_kernel", True):  # the program's own: it may write to any tensor
        return Kernel("", False)
    letters, known = "", "tl.atomic_" not in source
    for name, kind in signature.items():
        if kind == "constexpr" and not _TRITON_NUMBER.fullmatch(name):
            break
        if not kind.startswith("*"):
            letters += ARGUMENT_NUMBER
            continue
        letters += ARGUMENT_READ if _TRITON_INPUT.fullmatch(name) and name not in mutated else ARGUMENT_WRITTEN
        known &= _ARGUMENT.fullmatch(name) is not None
    return Kernel(letters, known and not _stores_at_computed_index(source))


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
    return not _stores_at_computed_index(source)


def _stores_at_computed_index(source: str) -> bool:
    return any("tmp" in _index(source, found.end()) for found in _STORE.finditer(source))


def _index(source: str, begin: int) -> str:
    """The text from `begin` to the next comma, or to the end of the brackets that it is in."""
    depth, at = 1, begin
    while depth and at < len(source) and (depth > 1 or source[at] != ","):
        depth += (source[at] in "([") - (source[at] in ")]")
        at += 1
    return source[begin:at]
