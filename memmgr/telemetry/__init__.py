"""The stream of a run's activity: its publisher, its socket and log, and the file of a recorded pass."""
