"""The live bytes that other tests left behind: a budget counts them, and they are no part of the test."""

import gc

import memmgr


def bytes_already_there() -> int:
    """Bytes of the tensors that are alive now."""
    gc.collect()
    with memmgr.budget(None, quiet=True) as mm:
        there = mm.stats()["resident_bytes.current"]
    return int(there)
