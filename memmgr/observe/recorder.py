"""What the recorder's runs say of themselves to the telemetry. Goes with the recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memmgr._manager import Manager


class RecorderFigures:
    """A `memmgr._telemetry.About`."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self.device_type = manager.device.type

    def hello(self) -> dict[str, Any]:
        """What does not change."""
        config = self._manager.config
        return {
            "device": str(config.device),
            "budget_bytes": config.limit_bytes,
            "policy": config.policy.name,
            "disk_folder": config.folder,
            "tier": self._manager.tier_name(),
        }

    def sample(self) -> dict[str, Any]:
        """What does."""
        manager, native = self._manager, self._manager.native
        resident, budget, saved, _, _, largest, _ = native.pressure()
        counters, tier = native.counters(), native.tier_stats()
        gone, offloaded = counters["gone_bytes"], counters["offloaded_bytes"]
        return {
            "phase": "asleep" if manager.sleeper.asleep else "backward" if manager.last.in_backward else "forward",
            "budget_bytes": budget,
            "resident_bytes": resident,
            "saved_bytes": min(saved, resident),
            "evicted_bytes": max(0, gone - offloaded),
            "offloaded_bytes": offloaded,
            "unmanaged_bytes": resident + gone,
            "tier_bytes": tier.get("used_bytes", 0),
            "largest_request_bytes": largest,
            "total": manager.stats(),
        }
