"""Storages in whole frames, as a device's blocks take them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memmgr.policies.trace import OpKind, TierLink, TraceBuilder
from memmgr.policies.trace.frames import in_frames

from .passes import layers

LINK = TierLink("host", 100.0, 50.0, capacity_bytes=1000, cpu_seconds_per_byte=0.5)


def test_storages_of_a_frame_or_more_fill_whole_frames() -> None:
    trace = replace(layers(3), links=(LINK,))
    size = max(s.size_bytes for s in trace.storages)
    frame = size // 2 + 1  # the largest are two frames, smaller ones a frame or less than one
    grown, factor = in_frames(trace, frame)
    for before, after in zip(trace.storages, grown.storages, strict=True):
        whole = -(-before.size_bytes // frame) * frame
        assert after.size_bytes == (whole if before.size_bytes >= frame else before.size_bytes)
    assert factor == sum(s.size_bytes for s in grown.storages) / sum(s.size_bytes for s in trace.storages) > 1
    assert (grown.ops, grown.cycle) == (trace.ops, trace.cycle)


def test_a_copy_takes_the_time_of_its_bytes_without_the_rest_of_the_frame() -> None:
    grown, factor = in_frames(replace(layers(3), links=(LINK,)), 1 << 20)
    assert factor == 1.0  # nothing fills a frame
    grown, factor = in_frames(replace(layers(3), links=(LINK,)), 4)
    assert factor > 1.1
    (link,) = grown.links
    assert link.write_bytes_per_second == pytest.approx(100.0 * factor)
    assert link.read_bytes_per_second == pytest.approx(50.0 * factor)
    assert link.cpu_seconds_per_byte == pytest.approx(0.5 / factor)
    assert link.capacity_bytes == int(1000 * factor)


def test_constants_fill_no_frames_where_none_can_leave() -> None:
    trace = layers(3)
    (constant,) = next(op.outputs for op in trace.ops if op.kind is OpKind.CONSTANT)
    trace = replace(trace, storages=tuple(replace(s, size_bytes=10) for s in trace.storages))
    sizes = [s.size_bytes for s in in_frames(trace, 8)[0].storages]
    assert sizes == [10 if number == constant else 16 for number in range(len(sizes))]
    assert {s.size_bytes for s in in_frames(replace(trace, links=(LINK,)), 8)[0].storages} == {16}


def test_versions_of_a_constant_fill_no_frames_either() -> None:
    builder = TraceBuilder()
    builder.constant("w", 10)
    builder.call("read", 1.0, ["w"], [("x", 10, -1)])
    builder.mutate("write", 1.0, ["w", "x"], [0])
    trace = builder.build().check()
    sizes = {s.name: s.size_bytes for s in in_frames(trace, 8)[0].storages}
    assert sorted(sizes.values()) == [10, 10, 16], sizes


def test_without_frames_a_pass_stays_as_it_is() -> None:
    trace = layers(2)
    assert in_frames(trace, 0) == (trace, 1.0)
