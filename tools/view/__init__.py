"""Views of a run for users: the state from its telemetry, as text, screens, pages and pictures."""
