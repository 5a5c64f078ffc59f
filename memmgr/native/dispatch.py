"""The pager's dispatch key, on the script's threads from `import memmgr` on.

Dynamo's guards compare the dispatch keys of tensors together with those that their thread includes. A function that was
compiled without ours would be compiled once more in the first budget: one of the recompilations that Dynamo allows, and
with sizes that vary another graph for an input, with other bits. Until a budget opens nothing is called for the key:
torch's table of kernels passes it over, at no cost for an op.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import torch

from memmgr.common.constants import DISPATCH_KEY


def include() -> None:
    """The calling thread has the key from now on, and those that Python starts later. Only once a process."""
    if hasattr(threading.Thread, "_memmgr"):
        return
    passing = torch._C._dispatch_library("IMPL", "_", "", __file__, 0)
    passing.fallback(DISPATCH_KEY, torch.library.fallthrough_kernel, False)
    # Nothing takes it away but the pager's kernel, which gets its place.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(passing))
    _include()
    prepare()


def prepare() -> None:
    """Prepares the rest of the process for the key: threads get it, and higher-order ops pass it over."""
    _let_higher_order_ops_through()
    if hasattr(threading.Thread, "_memmgr"):
        return
    threading.Thread._memmgr = True  # type: ignore[attr-defined]
    original = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    @functools.wraps(original)
    def bootstrap(thread: threading.Thread) -> None:
        _include()
        original(thread)

    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]


def _include() -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(DISPATCH_KEY, True)


def _let_higher_order_ops_through() -> None:
    """Higher-order ops have no kernel for the key, nor do those defined later. The ops that they call are seen."""
    key = torch._C._dispatch_key_parse(DISPATCH_KEY)
    for op in torch._ops._higher_order_ops.values():
        op.fallthrough(key)
    cls = torch._ops.HigherOrderOperator
    if not hasattr(cls.__init__, "_memmgr"):
        original = cls.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)  # type: ignore[no-untyped-call]
            self.fallthrough(key)

        init._memmgr = True  # type: ignore[attr-defined]
        cls.__init__ = init  # type: ignore[method-assign]
