"""`memmgr bench`: models, budgets and systems side by side.

A cell's process imports `cell`, `models` and `systems` without memmgr (see `child`), so nothing here imports it above them.
"""
