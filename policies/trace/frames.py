"""Storages in whole frames: the bytes of blocks on a device whose addresses are planned for a whole period."""

from __future__ import annotations

from dataclasses import replace

from .trace import OpKind, Trace


def in_frames(trace: Trace, frame_bytes: int) -> tuple[Trace, float]:
    """The pass with each storage of a frame or more as large as its frames.

    A plan with room for all bytes lacks room for frames otherwise: GPT-2's parameters and states are 2.4 to 9.4 MB
    each, and an eighth smaller than their frames of 2 MiB. Returns the pass, and by how much the storages have grown
    together. A copy moves the bytes without the rest of the frame, so the links are faster by that. `frame_bytes`: of a
    frame; 0: blocks have no frames.

    A storage that stays for longer than a period is in the heap and fills no frames. Without a tier those are the constants
    and their later versions. With one they may leave, and then fill frames when they are back.

    *Known limitations*: with a tier constants that stay count as whole frames. All copies are taken to have grown alike.
    """
    if not frame_bytes:
        return trace, 1.0
    stay = set() if trace.links else _constants(trace)
    storages = tuple(
        replace(s, size_bytes=-(-s.size_bytes // frame_bytes) * frame_bytes)
        if s.size_bytes >= frame_bytes and number not in stay
        else s
        for number, s in enumerate(trace.storages)
    )
    before = sum(s.size_bytes for s in trace.storages)
    grown = sum(s.size_bytes for s in storages) / before if before else 1.0
    links = tuple(
        replace(
            link,
            write_bytes_per_second=link.write_bytes_per_second * grown,
            read_bytes_per_second=link.read_bytes_per_second * grown,
            cpu_seconds_per_byte=link.cpu_seconds_per_byte / grown,
            capacity_bytes=None if link.capacity_bytes is None else int(link.capacity_bytes * grown),
        )
        for link in trace.links
    )
    return replace(trace, storages=storages, links=links), grown


def _constants(trace: Trace) -> set[int]:
    """The storages of constants, with all versions that are written in place."""
    found: set[int] = set()
    for op in trace.ops:
        if op.kind is OpKind.CONSTANT:
            found.update(op.outputs)
        found.update(new for old, new in op.writes if old in found)
    return found
