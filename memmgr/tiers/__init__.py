"""Places below the device where bytes are parked. cuda_streams is imported by who needs it, not from here."""

from memmgr.tiers.host import HostTier, Slot
from memmgr.tiers.slab import Slab
from memmgr.tiers.streams import BlockTier, ByteTier, Reload, StreamApi, Tier, TierStats

__all__ = ["BlockTier", "ByteTier", "HostTier", "Reload", "Slab", "Slot", "StreamApi", "Tier", "TierStats"]
