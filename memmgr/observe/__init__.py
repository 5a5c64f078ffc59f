"""What a run tells: figures, the line at its end, what an error says, what the telemetry shows."""
