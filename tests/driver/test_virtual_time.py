"""The double's clock: a program's calls and work take as long as the figures say, and it waits where it would on a GPU."""

import ctypes as c
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memmgr.tools.gpu import figures
from memmgr.tools.gpu.simulated import BY_WAIT, Simulation, summary

from .fake import NOT_READY, PROMPT, TIMED, FakeDriver

MIB = 1 << 20
SECOND = MIB  # bytes that a copy moves, or a kernel reads and writes, in one
FIGURES = {"memory": SECOND, "out": SECOND, "in": SECOND, "pageable_out": SECOND, "cuEventQuery": 0.25}


class Timed:
    """The double in virtual time: seconds are easy to count."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        driver.reset(0, TIMED)
        for name, value in FIGURES.items():
            driver.set_figure(name.encode(), value)
        self.memory = [driver.alloc(MIB) for _ in range(3)]
        self.host = [driver.host_alloc(MIB) for _ in range(2)]
        self.now = driver.now

    def kernel(self, stream: int, seconds: float = 1, memory: int = 0, value: int = 1) -> None:
        self.driver.fill(stream, self.memory[memory], int(seconds * SECOND), value)

    def out(self, stream: int, seconds: float = 1, memory: int = 0) -> None:
        self.driver("cuMemcpyDtoHAsync_v2", self.host[0], self.memory[memory], int(seconds * SECOND), stream)

    def into(self, stream: int, seconds: float = 1, memory: int = 1) -> None:
        self.driver("cuMemcpyHtoDAsync_v2", self.memory[memory], self.host[1], int(seconds * SECOND), stream)

    def finish(self, stream: int) -> float:
        """Virtual seconds at which the program has waited for the stream."""
        self.driver("cuStreamSynchronize", stream)
        return self.now()


@pytest.fixture
def timed(driver: FakeDriver) -> Iterator[Timed]:
    yield Timed(driver)
    for name in FIGURES:
        driver.set_figure(name.encode(), 0)
    driver.set_hollow(0)
    driver.reset(0, PROMPT)


def test_the_host_runs_ahead_until_it_waits(timed: Timed) -> None:
    stream = timed.driver.stream()
    for _ in range(3):
        timed.kernel(stream)
    assert timed.now() == 0
    assert timed.finish(stream) == 3
    timed.driver.set_figure(b"cuMemGetInfo", 0.5)
    timed.driver.cuMemGetInfo_v2(c.byref(c.c_size_t()), c.byref(c.c_size_t()))
    timed.driver.set_figure(b"cuMemGetInfo", 0)
    assert timed.now() == 3.5
    timed.kernel(stream)  # the device has been idle in between
    assert timed.finish(stream) == 4.5


def test_engines_work_at_once_and_each_does_one_thing_at_a_time(timed: Timed) -> None:
    a, b, d, e = (timed.driver.stream() for _ in range(4))
    timed.kernel(a, memory=2)
    timed.out(b)
    timed.into(d)
    assert max(timed.finish(each) for each in (a, b, d)) == 1
    timed.out(b)
    timed.out(e)
    assert timed.finish(b) == 2 and timed.finish(e) == 3


def test_the_first_large_copy_each_way_wakes_the_link(timed: Timed) -> None:
    timed.driver.set_figure(b"first_copy", 3)
    stream = timed.driver.stream()
    for seconds, ends in ((0.5, 0.5), (1, 3.5), (1, 4.5)):  # the first one is too small
        timed.out(stream, seconds)
        assert timed.finish(stream) == ends
    for ends in (7.5, 8.5):
        timed.into(stream)
        assert timed.finish(stream) == ends
    timed.driver.set_figure(b"first_copy", 0)


def test_an_engine_takes_what_is_ready_first(timed: Timed) -> None:
    """A copy that waits for a kernel does not hold up a later one of another stream."""
    compute, a, b, event = *(timed.driver.stream() for _ in range(3)), timed.driver.event()
    timed.kernel(compute, 1, memory=2)
    timed.driver("cuEventRecord", event, compute)
    timed.driver("cuStreamWaitEvent", a, event, 0)
    timed.out(a)
    timed.out(b)
    assert timed.finish(b) == 1
    assert timed.finish(a) == 2


def test_an_event_orders_streams_and_holds_their_times(timed: Timed) -> None:
    compute, copies = timed.driver.stream(), timed.driver.stream()
    begin, end = timed.driver.event(0), timed.driver.event(0)
    timed.kernel(compute, 0.75, value=5)
    timed.driver("cuEventRecord", begin, compute)
    timed.driver("cuStreamWaitEvent", copies, begin, 0)
    timed.out(copies, 0.5)
    timed.driver("cuEventRecord", end, copies)
    assert timed.driver.cuEventQuery(end) == NOT_READY
    timed.driver("cuEventSynchronize", end)
    assert timed.now() == 1.25
    milliseconds = c.c_float()
    timed.driver("cuEventElapsedTime", c.byref(milliseconds), begin, end)
    assert milliseconds.value == 500


def test_a_query_sees_what_its_own_cost_has_let_pass(timed: Timed) -> None:
    stream, event = timed.driver.stream(), timed.driver.event()
    timed.kernel(stream, 0.6)
    timed.driver("cuEventRecord", event, stream)
    answers = [timed.driver.cuEventQuery(event) for _ in range(3)]
    assert answers == [NOT_READY, NOT_READY, 0] and timed.now() == 0.75


def test_work_is_done_when_its_time_has_come(timed: Timed) -> None:
    stream = timed.driver.stream()
    timed.kernel(stream, 1, value=7)
    first = c.c_ubyte.from_address(timed.memory[0])
    first.value = 0
    timed.driver.cuEventQuery(timed.driver.event())
    assert first.value == 0
    timed.finish(stream)
    assert first.value == 7


def test_calls_that_wait_for_the_device_do(timed: Timed) -> None:
    stream = timed.driver.stream()
    timed.kernel(stream)
    timed.driver("cuMemFree_v2", timed.memory[2])
    assert timed.now() == 1
    timed.kernel(stream)
    pageable = (c.c_ubyte * MIB)()
    timed.driver("cuMemcpyDtoHAsync_v2", c.addressof(pageable), timed.memory[0], MIB // 2, stream)
    assert timed.now() == 2.5


def test_hollow_work_takes_its_time_and_does_nothing(timed: Timed) -> None:
    timed.driver.set_hollow(1)
    stream = timed.driver.stream()
    c.c_ubyte.from_address(timed.memory[0]).value = 3
    c.c_ubyte.from_address(timed.host[0]).value = 9
    timed.out(stream)
    assert timed.finish(stream) == 1
    assert c.c_ubyte.from_address(timed.host[0]).value == 9


def test_a_trace_says_why_kernels_waited(timed: Timed) -> None:
    simulation = Simulation(timed.driver.library, {**FIGURES, "cuMemGetInfo": 0.5})
    compute, copies, event = timed.driver.stream(), timed.driver.stream(), timed.driver.event()
    simulation.begin()
    timed.kernel(compute, 1, memory=2)
    timed.into(copies, 0.5)
    timed.into(copies, 1)
    timed.driver("cuEventRecord", event, copies)
    timed.driver("cuStreamWaitEvent", compute, event, 0)
    timed.kernel(compute, 0.25, memory=1)
    timed.finish(compute)
    timed.driver.cuMemGetInfo_v2(c.byref(c.c_size_t()), c.byref(c.c_size_t()))
    timed.driver.set_figure(b"cuMemGetInfo", 0)
    timed.kernel(compute, 0.75)
    timed.finish(compute)
    seen = simulation.end(1)
    assert (seen["step"], seen["kernels"], seen["in"], seen["ideal"]) == (3, 2, 1.5, 2)
    assert seen["idle"] == {"waits for copy in": 0.5, "host": 0.5}
    assert (seen["host"], seen["host_waits"]) == (0.5, 2.5)
    assert seen["overlap"] == round(1 / 1.5, 3) and seen["link_use"] == 0.5
    assert seen["drains"] == 2 and seen["in_bytes"] == 1.5 * MIB


def test_a_summary_joins_spans_and_names_the_largest_wait() -> None:
    """Rows: engine, label, begin, end, issued, bound, label of the work that was waited for, bytes."""
    rows = np.array(
        [
            [1, 1, 0, 2, 0, 0, 0, 8],
            [1, 1, 3, 4, 1, BY_WAIT, 2, 8],
            [2, 2, 1, 3, 0, 0, 0, 100],
            [4, 3, 0, 0.5, 0, 0, 0, 0],
        ]
    )
    seen = summary(rows, {0: "", 1: "mm", 2: "copy out", 3: "cuMemUnmap"}, 4.0, 2)
    assert (seen["step"], seen["kernels"], seen["out"], seen["unmap"], seen["map"]) == (2, 1.5, 1, 0.25, 0)
    assert seen["idle"] == {"waits for copy out": 0.5}
    assert seen["overlap"] == 0.5 and seen["lead"] == 1 and seen["ops"] == 1


def test_each_figure_has_a_source_and_a_date() -> None:
    table = json.loads(figures.H100.read_text())
    for name, figure in table["figures"].items():
        assert figure["value"] > 0 and figure["unit"] in figures.UNITS and figure["source"] and figure["date"], name
    assert figures.written(table) == figures.H100.read_text()
    assert figures.read(figures.H100)["launch"] == pytest.approx(4.6e-6)


def test_a_check_replaces_what_it_has_measured(tmp_path: Path) -> None:
    lines = [
        {"name": "begin.driver", "value": 13000, "detail": {"device": "A card"}},
        {"name": "host.launch_empty", "value": 2500},
        {"name": "link.host_alloc_dtoh_64MiB", "value": 25},
        {"name": "pages.idle_20MiB", "value": 4, "detail": {"create_us": 14, "unmap_freeing_each_us": 41}},
        {"name": "pages.beside_kernel_20MiB", "value": 6},
        {"name": "host.event_record", "error": "refused"},
    ]
    table = figures.of_check(lines, "2026-12-01")
    (tmp_path / "card.json").write_text(figures.written(table))
    read, before = figures.read(tmp_path / "card.json"), figures.read(figures.H100)
    assert table["name"] == "A card" and table["figures"]["launch"]["date"] == "2026-12-01"
    assert read["launch"] == pytest.approx(2.5e-6) and read["out"] == 25e9 and read["page_busy"] == 1.5
    assert read["cuMemCreate"] == pytest.approx(14e-6) and read["cuMemUnmap"] == pytest.approx(41e-6)
    assert read["cuEventRecord"] == before["cuEventRecord"]
    (tmp_path / "card.json").write_text('{"version": 9}')
    with pytest.raises(ValueError, match="version 9"):
        figures.read(tmp_path / "card.json")
