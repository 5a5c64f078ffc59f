"""A training step to watch, and a reader."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memmgr.api import budget as budgets
from memmgr.telemetry import stream
from memmgr.telemetry.publisher import Telemetry

LIMIT = 8_000_000
"""In bytes: less than the step needs unmanaged, more than its floor."""


def _block() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


class Net(torch.nn.Module):
    """Four blocks of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _block(), _block()
        self.more = torch.nn.Sequential(_block(), _block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(self.second(self.first(x)))


def training(seed: int = 0) -> Callable[[], float]:
    """One step, as a function that returns the loss."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(1024, 64)

    def step() -> float:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step.model, step.x = model, x  # type: ignore[attr-defined]
    return step


def manager() -> Any:
    found = budgets.current()
    assert found is not None
    return found


class Watching:
    """A reader in this process. The stream's thread serves it while the test waits."""

    def __init__(self, pid: int | None = None, **request: Any) -> None:
        self.socket: socket.socket = stream.connect(pid or os.getpid(), 10.0)
        self._rest = b""
        if request:
            self.socket.sendall(json.dumps(request).encode() + b"\n")

    def ask(self, raw: bytes) -> None:
        self.socket.sendall(raw)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Line by line, until the other side closes."""
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                yield json.loads(line)
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:  # it closed without reading all that we said
                return
            if not data:
                assert not self._rest, "the stream ended in the middle of a line"
                return
            self._rest += data

    def next(self, kind: str, seconds: float = 20.0, after: float = 0.0) -> dict[str, Any]:
        """The next line of that type, made later than `after` on the stream's clock."""
        deadline = time.monotonic() + seconds
        for line in self.lines():
            if line["type"] == kind and line.get("seconds", 0.0) >= after:
                return line
            assert time.monotonic() < deadline, f"no {kind} line in {seconds} s"
        raise AssertionError(f"the stream ended without a {kind} line")

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "Watching":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def wait_until(what: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


class _NoPause(dict[str, float]):
    """Keeps no time before which a line may not be made."""

    def __missing__(self, kind: str) -> float:
        return 0.0

    def __setitem__(self, kind: str, not_before: float) -> None:
        pass


def unpaced(telemetry: Telemetry) -> None:
    """Makes lines follow their interval alone from here on: after a costly one a slow machine would pause for minutes."""
    telemetry._not_before = _NoPause()
