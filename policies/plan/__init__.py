"""From a trace and a budget to a schedule, and the bounds that stand beside it."""
