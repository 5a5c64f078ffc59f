"""A pass as plain data, and what can be decided about it: schedules, plans, and a plan in the terms of a live pass."""

from .builder import TraceBuilder
from .trace import HELD, VERSION, Op, OpKind, Storage, TierLink, Trace, TraceError

__all__ = ["HELD", "VERSION", "Op", "OpKind", "Storage", "TierLink", "Trace", "TraceBuilder", "TraceError"]
