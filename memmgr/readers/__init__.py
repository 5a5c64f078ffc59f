"""Functions that read a tensor's bytes without an op, captures, and callbacks: each has a guard while a budget is open.

This file imports nothing: `import memmgr` loads `exported` alone.
"""
