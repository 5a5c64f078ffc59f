"""Kernels of torch's that a test replaces by its own."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def replaced(op: str, run: Callable[..., Any]) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is a kernel already
        library.impl(op, run, "CPU")
    try:
        yield
    finally:
        library._destroy()
