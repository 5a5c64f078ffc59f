"""Budgets of this folder run on the pager, with cells as small as the models here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from exactness import harness


@pytest.fixture(autouse=True)
def _pager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEMMGR_PAGER", "1")
    monkeypatch.setenv("MEMMGR_PAGER_SMALL", "512")
    monkeypatch.setattr(harness, "_needs", {})  # what the recorder needs is another figure
    yield


@pytest.fixture
def large_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold that users have."""
    monkeypatch.delenv("MEMMGR_PAGER_SMALL")
