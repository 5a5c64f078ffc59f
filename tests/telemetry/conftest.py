"""Each test has a runtime folder of its own, so that it sees no other process's sockets."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mm") as folder:  # short: a socket's path may have a hundred bytes
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.delenv("MEMMGR_TELEMETRY", raising=False)
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        yield Path(folder)
