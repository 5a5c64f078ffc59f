"""Opening a budget, leaving it, and what lies between."""
