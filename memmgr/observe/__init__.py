"""Observations of a run: figures, its summary line, error texts, telemetry."""
