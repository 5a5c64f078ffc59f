"""The values that a user sets: sizes, environment variables, placement; the machine's memory. Nothing here imports torch."""
