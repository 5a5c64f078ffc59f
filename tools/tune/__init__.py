"""Runs of the user's script for `memmgr tune`: each a process that ends after some passes."""
