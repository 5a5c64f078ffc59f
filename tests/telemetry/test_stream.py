"""The stream as a reader sees it (docs/telemetry.md)."""

import json
import os
import socket
import sys
import threading
from pathlib import Path

import torch

import memmgr
from memmgr.telemetry import stream
from memmgr.telemetry.consumers import QUEUE_LINES, Reader, dumps
from memmgr.telemetry.modules import PLACES
from memmgr.telemetry.publisher import MAP_STATES, MOST_READERS

from .reading import LIMIT, Watching, manager, training, unpaced, wait_until

LAYERS = {"aten.addmm.default", "aten.gelu.default"}
"""The ops of `training`'s step inside of its modules: the loss and the backward pass are outside."""


def test_the_model_needs_more_than_its_limit() -> None:
    with memmgr.budget(None, quiet=True) as mm:
        step = training()
        step()
        step()
    assert mm.stats()["unmanaged_peak_bytes"] > 1.3 * LIMIT


def test_a_reader_gets_hello_samples_events_and_the_end() -> None:
    with memmgr.budget(LIMIT, quiet=True) as mm:
        step = training()
        with Watching(interval_seconds=0.02) as watching:
            hello = watching.next("hello")
            wait_until(lambda: manager().telemetry.modules.watching)
            for _ in range(30):
                step()
            sample = watching.next("sample")
            passes = watching.next("passes")
            events = watching.next("events")
            stats = mm.stats()
            end_seen: list[dict[str, object]] = []

            def read_on() -> None:
                end_seen.extend(line for line in watching.lines() if line["type"] == "end")

            reader = threading.Thread(target=read_on)
            reader.start()
            mm.__exit__(None, None, None)
            reader.join(10)
            assert not reader.is_alive()
    assert hello["protocol"] == stream.PROTOCOL and hello["pid"] == os.getpid() and hello["budget_bytes"] == LIMIT
    assert hello["script"] == sys.argv
    assert hello["map_states"] == list(MAP_STATES) and hello["policy"] == "auto"
    assert 0 < sample["resident_bytes"] <= LIMIT
    assert sample["unmanaged_bytes"] == sample["resident_bytes"] + sample["evicted_bytes"] + sample["offloaded_bytes"]
    assert set(sample["total"]) == set(stats)
    assert passes["count"] > 0 and passes["unmanaged_peak_bytes"] > LIMIT
    assert {item["what"] for item in events["items"]} & {"evict", "offload"}
    assert len(end_seen) == 1 and end_seen[0]["failed"] is False
    assert end_seen[0]["stats"] == mm.stats()


def _learned() -> bool:
    modules = manager().telemetry.modules
    return modules.watching and not modules._due and not modules._handles


def test_events_and_cells_name_their_op_and_module() -> None:
    with memmgr.budget(LIMIT, quiet=True, policy="evict"):
        step = training()
        with Watching(interval_seconds=0.02, want=["cells", "holders"], cells=5) as watching:
            watching.next("sample")
            while not _learned():
                step()
            _all_events(watching, step)  # events that piled up while the modules were not known
            found = {(item["op"], item["module"]) for item in _all_events(watching, step)}
            assert ("aten.gelu.default", "Net.first.1") in found, found
            # The loss is computed outside of every module; whether one of its tensors leaves too is a matter of time.
            inside = {(op, module) for op, module in found if module and module.startswith("Net.")}
            assert all((op in LAYERS) == ((op, module) in inside) for op, module in found if op), found
            telemetry = manager().telemetry
            model = step.model  # type: ignore[attr-defined]
            loss = model(step.x).square().mean()  # cells to look at
            assert loss.item() > 0
            unpaced(telemetry)
            cells = watching.next("cells", after=telemetry._now())
            holders = telemetry.modules.holdings("cpu")
            del loss
    assert len(cells["cells"]) == 5 and cells["cells"][0]["bytes"] == 1024 * 256 * 4
    assert cells["cells"] == sorted(cells["cells"], key=lambda c: -c["bytes"])
    blocks = ("first", "second", "more.0", "more.1")
    assert {c["module"] for c in cells["cells"]} <= {f"Net.{block}.{layer}" for block in blocks for layer in range(3)}
    assert sum(m["resident_bytes"] + m["absent_bytes"] for m in cells["modules"]) >= sum(
        c["bytes"] for c in cells["cells"]
    )
    kinds, modules = holders
    parameters = sum(p.nbytes for p in model.parameters())
    assert kinds["parameters"] == parameters and 2 * parameters <= kinds["optimizer states"] <= 2.1 * parameters
    assert modules["Net.first.0"] >= 4 * (64 * 256 + 256)


def test_a_reader_that_comes_late_has_lines_after_a_pass_and_none_are_taken_when_it_left() -> None:
    """Without a reader no line is taken in passes 9 to 15."""

    def made() -> set[bool]:
        y = model(step.x)  # type: ignore[attr-defined]
        rows = [row for row in native.living() if row["birth"] == native.passes_ended()]
        assert rows and y.requires_grad
        return {row["line"] > 0 for row in rows}

    with memmgr.budget(None, quiet=True):
        step = training()
        model, native = step.model, manager().native  # type: ignore[attr-defined]
        for _ in range(9):
            step()
        assert made() == {False}
        with Watching(interval_seconds=0.02, want=["cells"], cells=5):
            wait_until(lambda: bool(manager().telemetry.watched))
            step()
            assert made() == {True}
        wait_until(lambda: not manager().telemetry.watched)
        step()
        assert made() == {False}


def _all_events(watching: Watching, step: object) -> list[dict[str, object]]:
    items: list[dict[str, object]] = []
    assert callable(step)
    now = manager().telemetry._now()
    while not items:
        step()
        items += watching.next("events", after=now)["items"]
    return items


def test_alternating_passes_are_both_known() -> None:
    """Two ways through the model: each is learned once."""
    with memmgr.budget(LIMIT, quiet=True):
        step = training()
        model = step.model  # type: ignore[attr-defined]
        x = torch.randn(256, 64)

        def other() -> None:
            model.first(x).tanh().sum().backward()

        with Watching(interval_seconds=0.02) as watching:
            watching.next("sample")
            native = manager().native
            for _ in range(40):
                step()
                other()
            native.ops_astray()
            step()
            other()
            assert native.ops_astray() == 0


def test_the_map_covers_what_is_live() -> None:
    with memmgr.budget(LIMIT, quiet=True):
        step = training()
        with Watching(interval_seconds=0.02, want=["map"], columns=40) as watching:
            step()
            telemetry = manager().telemetry
            unpaced(telemetry)
            shown = watching.next("map", after=telemetry._now())
            resident = manager().native.resident()
            live = manager().native.arena_stats()["live_bytes"]
            del step
    assert len(shown["columns"]) == 40 and all(len(column) == len(MAP_STATES) for column in shown["columns"])
    in_use = sum(sum(column[1:4]) for column in shown["columns"])
    assert in_use <= resident and abs(in_use - live) <= 40 + live // 10
    assert abs(sum(map(sum, shown["columns"])) - shown["span_bytes"]) <= 40 * 8


BAD_REQUESTS = [
    b"nonsense\n",
    b"[1]\n",
    b'{"interval_seconds": 0}\n',
    b'{"interval_seconds": "often"}\n',
    b'{"want": ["weights"]}\n',
    b'{"want": 7}\n',
    b'{"cells": "many"}\n',
    b"\xff\xfe\n",
    b'{"interval_seconds": NaN}\n',
    b"[" * 3000 + b"\n",
]


def test_a_bad_request_is_answered_and_changes_nothing() -> None:
    """Each request has a connection of its own, in one budget."""
    with memmgr.budget(LIMIT, quiet=True):
        for request_line in BAD_REQUESTS:
            with Watching() as watching:
                watching.ask(request_line)
                assert watching.next("error")["text"], request_line
                watching.ask(b'{"interval_seconds": 0.02}\n')
                assert watching.next("sample")["resident_bytes"] >= 0, request_line
                assert not manager().telemetry.errors, request_line


def test_an_endless_request_ends_the_connection() -> None:
    with memmgr.budget(LIMIT, quiet=True), Watching() as watching:
        watching.next("sample")
        watching.ask(b"x" * 70_000)
        assert "4096 bytes" in watching.next("error")["text"]
        assert not [line for line in watching.lines() if line["type"] == "sample"]


def test_only_so_many_readers() -> None:
    with memmgr.budget(LIMIT, quiet=True):
        readers = [Watching() for _ in range(MOST_READERS)]
        for reader in readers:
            reader.next("hello")
        with Watching() as late:
            assert "readers" in late.next("error")["text"]
        readers[0].close()
        wait_until(lambda: len(manager().telemetry._readers) < MOST_READERS)
        with Watching() as next_one:
            next_one.next("hello")
        for reader in readers:
            reader.close()


def test_a_reader_that_does_not_read_loses_lines_and_is_told() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    reader = Reader(ours)
    line = {"type": "sample", "filling": "x" * 20_000, "number": 0}
    for number in range(3 * QUEUE_LINES):
        reader.put({**line, "number": number})
    assert reader.waiting and len(reader._queue) <= QUEUE_LINES
    got = b""
    theirs.setblocking(False)
    while reader.waiting or got.count(b"\n") < 2:
        reader.flush()
        try:
            got += theirs.recv(1 << 20)
        except BlockingIOError:
            if not reader.waiting:
                break
    lines = [json.loads(text) for text in got.splitlines()]
    dropped = [entry["lines"] for entry in lines if entry["type"] == "dropped"]
    numbers = [entry["number"] for entry in lines if entry["type"] == "sample"]
    assert dropped and sum(dropped) + len(numbers) == 3 * QUEUE_LINES
    assert numbers == sorted(numbers) and numbers[-1] == 3 * QUEUE_LINES - 1
    reader.close()
    theirs.close()


def test_a_reader_that_went_away_is_forgotten() -> None:
    with memmgr.budget(LIMIT, quiet=True):
        watching = Watching(interval_seconds=0.02)
        watching.next("sample")
        assert manager().telemetry.detail
        watching.close()
        wait_until(lambda: not manager().telemetry._readers)
        wait_until(lambda: not manager().telemetry.detail)
        modules = torch.nn.modules.module
        assert not modules._global_forward_hooks and not modules._global_forward_pre_hooks


def test_lines_are_json_on_one_line() -> None:
    data = dumps({"text": "a\nb\u2028", "path": Path("x")})
    assert data.count(b"\n") == 1 and json.loads(data) == {"text": "a\nb\u2028", "path": "x"}


def test_a_module_has_one_name_however_it_is_called() -> None:
    """A budget that opens in the middle of a forward (`memmgr run`) sees the rest of it first."""
    step = training()
    model = step.model  # type: ignore[attr-defined]
    with memmgr.budget(LIMIT, quiet=True), Watching(interval_seconds=0.02) as watching:
        watching.next("sample")
        modules = manager().telemetry.modules
        model.second(step.x).sum().backward()  # type: ignore[attr-defined]
        model.second(step.x).sum().backward()  # type: ignore[attr-defined]
        names = {modules.name(modules._known[id(child)][1]) for child in model.second.modules()}
        assert names == {"Net.second", "Net.second.0", "Net.second.1", "Net.second.2"}
        step()
        named = {modules.name(modules._known[id(child)][1]) for child in model.second.modules()}
        assert named == names
        assert [type(root()) for root in modules._roots.values()] == [type(model)]


def test_all_cells_and_events_have_a_name() -> None:
    """Parameters, states and gradients by their names; other tensors by their op; each with a module or a place."""
    with memmgr.budget(LIMIT, quiet=True):
        step = training()
        with Watching(interval_seconds=0.02, want=["cells"], cells=200) as watching:
            watching.next("sample")
            while not _learned():
                step()
            _all_events(watching, step)
            events = _all_events(watching, step)
            model = step.model  # type: ignore[attr-defined]
            loss = model(step.x).square().mean()
            loss.backward()
            telemetry = manager().telemetry
            unpaced(telemetry)
            telemetry._look_for_names._due = 0.0
            cells = watching.next("cells", after=telemetry._now())["cells"]
            del loss
    of_states = {cell["name"] for cell in cells if cell["name"] and cell["name"].endswith("weight")}
    names = {f"{block}.{layer}.weight" for block in ("first", "second", "more.0", "more.1") for layer in (0, 2)}
    assert of_states == {f"{kind}{n}" for kind in ("", "gradient of ", "exp_avg of ", "exp_avg_sq of ") for n in names}
    others = {(cell["op"], cell["module"]) for cell in cells if cell["name"] is None}
    assert all(op is not None or module == PLACES[-1] for op, module in others), others
    assert None not in {module for _, module in others}, others
    unknown = {item["op"] for item in events if item["module"] is None and item["what"] != "stall"}
    assert unknown <= {"aten.randn.default"}, "the batch is older than the reader"
