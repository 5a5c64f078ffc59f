"""What a user sees of a run: the state that its telemetry tells, as text, screens, pages and pictures."""
