"""The pager's dispatch key, on the thread of the script from its `import memmgr` on.

Dynamo's guards compare the dispatch keys of tensors together with those that their thread includes. A function that was
compiled without ours would be compiled once more in the first budget: one of the recompilations that Dynamo allows, and
with sizes that vary another graph for an input, with other bits. Until a budget opens nothing is called for the key:
torch's table of kernels passes it over, at no cost for an op.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

KEY = "Fake"  # `kKey` of allocator/pager/kernel.h

_passing: Any = None  # the registration of what passes it over, until the pager registers its own kernel


def include() -> None:
    """The calling thread, and what torch starts from it, has the key from now on. Once a process, before its first budget."""
    let_higher_order_ops_through()
    _pass_over()
    _include(True)


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Inside the pager registers its kernel. Where that fails all is as before."""
    global _passing
    if _passing is None:
        yield
        return
    included = torch._C._dispatch_tls_is_dispatch_key_included(KEY)
    _include(False)
    _passing.reset()
    _passing = None
    try:
        yield
    except BaseException:
        _pass_over()
        raise
    finally:
        _include(included)


def _pass_over() -> None:
    global _passing
    # No `torch.library.Library`: that one ends before the last ops of a process that is ending.
    _passing = torch._C._dispatch_library("IMPL", "_", "", __file__, 0)
    _passing.fallback(KEY, torch.library.fallthrough_kernel, False)


def _include(on: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, on)


def let_higher_order_ops_through() -> None:
    """They have no kernel for the key, those that are made later neither; what they call is seen."""
    key = torch._C._dispatch_key_parse(KEY)
    for op in torch._ops._higher_order_ops.values():
        op.fallthrough(key)
    cls = torch._ops.HigherOrderOperator
    if not getattr(cls.__init__, "_memmgr", False):
        original = cls.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)  # type: ignore[no-untyped-call]
            self.fallthrough(key)

        init._memmgr = True  # type: ignore[attr-defined]
        cls.__init__ = init  # type: ignore[method-assign]
