"""A pass as plain data, and decisions about it: schedules and plans."""

from .builder import TraceBuilder
from .trace import HELD, VERSION, Op, OpKind, Storage, TierLink, Trace, TraceError

__all__ = ["HELD", "VERSION", "Op", "OpKind", "Storage", "TierLink", "Trace", "TraceBuilder", "TraceError"]
