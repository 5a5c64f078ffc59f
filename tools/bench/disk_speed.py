"""How fast a folder's disk is, and the host's memory, in bytes a second."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time

BLOCK_BYTES = 8 << 20


def disk_speed(folder: str, size: int) -> tuple[float, float]:
    """(write, read) of a file of that size, past the page cache.

    Raises `OSError`: the folder cannot be written, or is full.

    Known limitation: where the file system ignores the request to forget pages, the read is from memory.
    """
    block = mmap.mmap(-1, BLOCK_BYTES)  # aligned to pages
    block.write(os.urandom(1 << 20) * (BLOCK_BYTES >> 20))  # nothing that a file system could compress away
    blocks = max(1, size // BLOCK_BYTES)
    fd, path = tempfile.mkstemp(dir=folder, prefix="memmgr-doctor-")
    try:
        os.unlink(path)
        begun = time.perf_counter()
        for _ in range(blocks):
            os.write(fd, block)
        os.fsync(fd)
        wrote = time.perf_counter() - begun
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(fd, 0, os.SEEK_SET)
        begun = time.perf_counter()
        for _ in range(blocks):
            os.readv(fd, [block])
        read = time.perf_counter() - begun
    finally:
        os.close(fd)
        block.close()
    return blocks * BLOCK_BYTES / wrote, blocks * BLOCK_BYTES / read


def copy_speed(size: int) -> float:
    """Bytes per second of a copy from memory to memory, in one thread."""
    source, target = bytearray(size), bytearray(size)
    view = memoryview(target)
    view[:] = source  # pages are there from now on
    begun = time.perf_counter()
    view[:] = source
    return size / (time.perf_counter() - begun)
