"""Streams on the accounting path: who waits for whom when torch's own allocator gives memory away in stream order.

That allocator hands a freed block at once to the stream that it was allocated on; a program that reads it on another
stream needs no `record_stream` while autograd holds it. We let go earlier than autograd, and bytes that come back are
another block. As long as one stream is used, its order is enough. From the second one on each of `RULES` is kept, by events
only: the CPU waits for nothing (docs/streams.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ._py_versions import C, bytes_of, quiet

RULES = (
    "uses",
    "remade",
    "filled",
    "joined",
    "checked",
    "offload.behind",
    "offload.source",
    "reload.written",
    "reload.target",
    "reload.filling",
    "reload.use",
)


class Streams:
    """The streams that were seen at work on one device since a budget opened."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._lock = threading.Lock()
        self._seen: dict[int, Any] = {}
        self._in_order: set[int] = set()  # those of them that wait for what the others did before
        self.left_out = ""  # a rule that is not kept: for tests
        self.quiet = False  # a graph is captured: no event may be put anywhere
        self.joined: Callable[[], None] = lambda: None
        torch.accelerator.synchronize(self._index)  # what was queued before is no concern of ours
        for stream in (self._default(), self.current()):
            self._seen[stream.stream_id] = stream
            self._in_order.add(stream.stream_id)

    def _default(self) -> Any:
        """The stream of a thread that has not chosen one: what was there before most likely comes from it."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(self.current()))
        thread.memmgr_own = True  # type: ignore[attr-defined]
        thread.start()
        thread.join()
        return found[0]

    def current(self) -> Any:
        """The stream that this thread's ops are queued on."""
        return C._accelerator_getStream(self._index)

    def new(self) -> Any:
        """One for copies; it is not a stream of the program's."""
        return torch.Stream(device=torch.device(C._get_accelerator().type, self._index))

    @property
    def several(self) -> bool:
        """Has more than one been seen?"""
        return len(self._seen) > 1

    def keeps(self, rule: str) -> bool:
        """False in the tests that show what happens without it."""
        return rule != self.left_out

    def note(self) -> None:
        """This thread is about to queue work on its current stream."""
        stream = self.current()
        if stream.stream_id not in self._in_order and not self.quiet:
            self._join(stream)

    def _join(self, stream: Any) -> None:
        # Until now the others' order was enough for what we let go and brought back: it is made the new one's, too.
        with self._lock:
            if stream.stream_id in self._in_order:
                return
            self._seen[stream.stream_id] = stream
            if self.keeps("joined"):
                self.behind_all(stream)
            self.joined()
            self._in_order.add(stream.stream_id)

    def behind_all(self, stream: Any) -> None:
        """`stream` waits for what has been queued so far."""
        for other in list(self._seen.values()):
            if other.stream_id != stream.stream_id:
                stream.wait_event(other.record_event())

    def filled(self) -> None:
        """The current stream has been told to make bytes that the program takes to be there: all others wait for it."""
        if not self.several or not self.keeps("filled"):
            return
        event = (current := self.current()).record_event()
        for other in list(self._seen.values()):
            if other.stream_id != current.stream_id:
                other.wait_event(event)

    def mark_all(self, storage: Any, rule: str) -> None:
        """When the storage is freed, whoever takes its memory waits for all that are seen by now."""
        if self.several and self.keeps(rule):
            mark(storage, list(self._seen.values()))


def mark(storage: Any, streams: list[Any]) -> None:
    """`Tensor.record_stream`, which does nothing for the stream that the storage was allocated on."""
    if storage.nbytes() == 0:
        return
    silence = quiet()
    tensor = bytes_of(storage)
    for stream in streams:
        tensor.record_stream(stream)
    del silence
