"""What a BudgetError of the pager says: torch's own words, who holds what, the floor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from memmgr._device import out_of_memory_words
from memmgr._errors import BudgetError, Holdings, budget_error, failed_tier, torchs_own_words
from memmgr._stock import Inventory, holders, missing_states, step_bytes

from .passes import Passes


class Asked(Protocol):
    """What the budget was asked for."""

    @property
    def limit_bytes(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def binary(self) -> bool: ...


class Native(Inventory, Protocol):
    """What is used of the pager."""

    def stats(self) -> dict[str, int]: ...
    def tier_stats(self) -> dict[str, int]: ...
    def resident_cells(self) -> list[tuple[int, int]]: ...


class Explainer:
    """Makes the errors of one budget, where memory ran out: nothing of the pager is locked there.

    Args:
        happened: told of each (`Telemetry.happened`).
    """

    def __init__(self, asked: Asked, native: Native, passes: Passes, happened: Callable[..., None]) -> None:
        self._asked = asked
        self._native = native
        self._passes = passes
        self._happened = happened

    def spent(self, text: str) -> BudgetError:
        """An op found no room; `text` is what the allocator said."""
        held = self._holdings()
        error = self._error(torchs_own_words(text), held, failed=failed_tier(text))
        self._happened(
            "budget_error",
            floor_bytes=error.floor_bytes,
            held=held.kinds,
            modules=dict(held.modules),
            text=text.splitlines()[0],
        )
        return error

    def too_big(self, there_bytes: int) -> BudgetError:
        """What is there when the budget opens does not fit, and cannot leave."""
        return self._error(out_of_memory_words(self._asked.device), self._holdings(), there_bytes=there_bytes)

    def _error(self, first: str, held: Holdings, **more: Any) -> BudgetError:
        tier = self._native.tier_stats()
        return budget_error(
            first,
            held,
            budget_bytes=self._asked.limit_bytes,
            floor_bytes=self._native.stats()["floor_bytes"],
            below_bytes=tier.get("used_peak_bytes", 0),
            seen=self._passes.in_backward or self._passes.count > 0,
            binary=self._asked.binary,
            states_stay=not tier,
            **more,
        )

    def _holdings(self) -> Holdings:
        native, device = self._native, self._asked.device
        kinds, modules = holders(native, device, rest=native.resident_cells())
        return Holdings(kinds, modules, missing_states(native, device), step_bytes(native, device))
