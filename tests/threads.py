"""Threads of a test."""

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch


def in_threads(work: Callable[[Any], object], arguments: Iterable[Any]) -> None:
    """Runs `work` in a thread for each argument, all at once, and raises the first exception of one."""
    errors: list[BaseException] = []

    def run(argument: Any) -> None:
        try:
            work(argument)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes with one thread: all runs are alike, and the profiler sees all allocations."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    yield
    gc.collect()
    torch.set_num_threads(threads)
