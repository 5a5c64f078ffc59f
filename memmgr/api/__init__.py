"""The functions that `import memmgr` offers: `budget`, `stats`, `manage`, `pin`; and the budget of an unmodified script."""
