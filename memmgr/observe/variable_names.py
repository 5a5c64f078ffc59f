"""Names of tensors that no model has: the program's variables that hold them, `x` or `batch['input_ids']`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from .source_lines import skipped_folders

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

_MOST = 64
"""Items of a container that are looked at."""


def by_variable(native: Pager) -> dict[int, str]:
    """The names by the address of the storage of tensors that need no gradient, from the functions that this thread is in.
    The innermost function's names come first.

    Known limitations: variables of other threads, attributes of objects and nested containers are not looked at. Below Python
    3.13, where a tracer is active (a debugger), no function's variables are.
    """
    found: dict[int, str] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((*skipped_folders(), "<frozen")):
            for name, tensor in _tensors(frame):
                info = None if tensor.requires_grad else native.storage_info(tensor)
                if info is not None:
                    found.setdefault(info["storage"], name)
        frame = frame.f_back
    return found


def _tensors(frame: FrameType) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the frame's variables, and those in tuples, lists and dicts among them."""
    is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_function and sys.version_info < (3, 13) and sys.gettrace() is not None:
        return
    variables = frame.f_locals
    try:
        for name, value in list(variables.items()):
            for item, tensor in _items(value):
                yield f"{name}{item}", tensor
    finally:
        if is_function and sys.version_info < (3, 13):
            variables.clear()  # Python keeps this copy, which would keep the tensors alive


def _items(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, Mapping) or type(value) in (tuple, list):
        try:
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for number, (key, item) in enumerate(items):
                if number == _MOST:
                    return
                if isinstance(item, torch.Tensor):
                    yield f"[{key!r}]", item
        except Exception:  # a mapping of the program's may do anything
            return
