"""Sizes as people write them, the arguments of `budget` that are not ones, and figures of the machine."""

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import memmgr
from memmgr.api import budget as budgets
from memmgr.config import machine
from memmgr.config.sizes import (
    UNLIMITED,
    Need,
    Room,
    is_binary,
    need_share,
    parse_budget,
    parse_host,
    parse_limit,
    parse_share,
    parse_size,
    show_size,
)
from memmgr.native import device as devices

GOOD: list[tuple[Any, int]] = [
    (65_536, 65_536),
    (12_000_000_000, 12_000_000_000),
    (12e9, 12_000_000_000),
    ("12000000000", 12_000_000_000),
    ("12_000_000_000", 12_000_000_000),
    ("1e9", 10**9),
    ("1e3MB", 10**9),
    ("1.5E-1 GiB", int(0.15 * 2**30)),
    ("2EB", 2 * 10**18),
    ("12GB", 12 * 10**9),
    ("12 GB", 12 * 10**9),
    ("  12GB\n", 12 * 10**9),
    ("12gB", 12 * 10**9),
    ("12G", 12 * 10**9),
    ("12g", 12 * 10**9),
    ("12GiB", 12 * 2**30),
    ("12Gi", 12 * 2**30),
    ("12gib", 12 * 2**30),
    ("12gb", 12 * 10**9),
    ("12Gb", 12 * 10**9),
    ("12 Gb", 12 * 10**9),
    ("500mb", 500 * 10**6),
    ("12b", 12),
    ("9007199254740993", 9007199254740993),
    ("1.5GB", 1_500_000_000),
    (".5GiB", 2**29),
    ("0.5TB", 5 * 10**11),
    ("500MB", 500 * 10**6),
    ("500MiB", 500 * 2**20),
    ("64kB", 64_000),
    ("64KB", 64_000),
    ("64KiB", 65_536),
    ("512B", 512),
    ("2PB", 2 * 10**15),
    ("80%", 800),
    ("80 %", 800),
    ("0.5%", 5),
    ("100%", 1000),
]

# The value, and a word that the error must contain in addition to the accepted forms.
BAD: list[tuple[Any, type[Exception], str]] = [
    ("", ValueError, "''"),
    ("GB", ValueError, "'GB'"),
    ("lots", ValueError, "'lots'"),
    ("12 XB", ValueError, "XB"),
    ("12GBs", ValueError, "unknown unit 'GBs' in '12GBs'; was 12GB meant"),
    ("12 gigs", ValueError, "was 12GB meant"),
    ("12G B", ValueError, "was 12GB meant"),
    ("1,5GB", ValueError, "was 1.5GB meant"),
    ("1,500MB", ValueError, "1,500MB"),
    ("1e3e3", ValueError, "1e3e3"),
    ("1e400GB", ValueError, "more than any machine has"),
    (10**30, ValueError, "more than any machine has"),
    ("10EB", ValueError, "9.22 EB at most"),
    ("-5MB", ValueError, "not a positive size"),
    ("-1GB", ValueError, "-1GB"),
    ("+1GB", ValueError, "+1GB"),
    ("0", ValueError, "positive"),
    ("0GB", ValueError, "positive"),
    ("0.1B", ValueError, "positive"),
    ("nan", ValueError, "nan"),
    ("inf", ValueError, "inf"),
    ("12", ValueError, "was 12GB meant"),
    ("1.5", ValueError, "was 1.5GB meant"),
    (12, ValueError, "was 12GB meant"),
    (12.0, ValueError, "was 12GB meant"),
    ("12000", ValueError, "was 12000MB meant"),
    ("65_535", ValueError, "without a unit"),
    ("0%", ValueError, "0%"),
    ("101%", ValueError, "101%"),
    ("-5%", ValueError, "-5%"),
    ("80%GB", ValueError, "80%GB"),
    (0, ValueError, "positive"),
    (-5, ValueError, "-5"),
    (1.5, ValueError, "whole"),
    (float("nan"), ValueError, "positive"),
    (float("inf"), ValueError, "positive"),
    (True, TypeError, "True"),
    (None, TypeError, "None"),
    ((1, "GB"), TypeError, "GB"),
    (b"12GB", TypeError, "12GB"),
    (1j, TypeError, "1j"),
]


@pytest.mark.parametrize(("given", "size"), GOOD, ids=[repr(g) for g, _ in GOOD])
def test_good(given: Any, size: int) -> None:
    got = parse_size(given, whole=1000)
    assert got == size and type(got) is int


def test_the_figure_of_no_limit_is_no_limit() -> None:
    """A program may open a budget with that of `memmgr.stats()`."""
    assert parse_budget(UNLIMITED) == UNLIMITED


@pytest.mark.parametrize(("given", "kind", "word"), BAD, ids=[repr(g) for g, _, _ in BAD])
def test_bad(given: Any, kind: type[Exception], word: str) -> None:
    with pytest.raises(kind) as caught:
        parse_size(given, whole=1000, what="budget")
    text = str(caught.value)
    assert text.startswith("budget: ") and word in text
    forms = '"12GB"' in text and '"12GiB"' in text
    assert forms is not ("meant" in text), f"shows neither a guess nor the accepted forms, or both: {text}"
    assert forms is ('"80%"' in text)


def test_a_percentage_of_nothing() -> None:
    with pytest.raises(ValueError, match=r"^disk: a percentage makes no sense here") as caught:
        parse_size("80%", what="disk")
    assert "12GB" in str(caught.value) and '"80%"' not in str(caught.value)


@pytest.mark.parametrize("given", [None, "none", "None", " NONE "])
def test_no_limit(given: str | None) -> None:
    assert parse_limit(given) == UNLIMITED
    with memmgr.budget(given, quiet=True) as mm:
        assert mm.stats()["budget_bytes"] == UNLIMITED


@pytest.mark.parametrize(
    ("given", "is_"),
    [
        ("auto", Need(None)),
        (" Auto", Need(None)),
        ("need", Need(1.0)),
        ("need*0.6", Need(0.6)),
        ("NEED * 60%", Need(0.6)),
    ],
)
def test_what_the_run_decides(given: str, is_: Need) -> None:
    assert parse_budget(given) == is_
    with pytest.raises(ValueError):
        parse_limit(given, what="disk")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("need*60", r"60 times what the run needs; was 60% of it meant\?"),
        ("need*0", "is nothing"),
        ("need*", r"cannot read 'need\*' as a size; did you mean 'need\*60%'\?$"),
        ("ned*0.6", r"did you mean 'need\*0.6'\?"),
        ("need60", r"did you mean 'need\*60%'\?"),
        ("60% of the need", r"did you mean 'need\*60%'\?"),
        ("need*-1", r"did you mean 'need\*1'\?"),
        ("atuo", r"did you mean 'auto'\?"),
        ("noen", r"did you mean 'none'\?"),
        ("lots", r'"80%", "need\*60%" \(of what the run needs\), "auto", "device" \(.*\) or "none" \(no limit\)$'),
        ("devise", r"'devise' as a size; did you mean 'device'\?$"),
        ("0", r'\'0\' is not a positive size; expected "12GB".*"80%", "need\*60%".*or "none" \(no limit\)$'),
        ("out", r"cannot read 'out' as a size; expected [^;]*or \"none\" \(no limit\)$"),
        ("12XB", r'unknown unit.*or "none" \(no limit\)$'),
        ("", r'is empty; expected [^;]*or "none" \(no limit\)$'),
    ],
)
def test_what_was_meant(given: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        memmgr.budget(given)
    assert str(caught.value).startswith("budget: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "share"), [("60%", 0.6), (" 0.6", 0.6), ("1", 1.0)])
def test_a_ratio(text: str, share: float) -> None:
    assert parse_share(text) == Need(share)


@pytest.mark.parametrize("text", ["", "60GB", "lots", "60", "0", "-1", "nan", "101%", "1.5"])
def test_what_is_no_ratio(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--ratio: "):
        parse_share(text)


@pytest.mark.parametrize(
    ("text", "share"), [("need*0.6", 0.6), ("need * 60%", 0.6), ("NEED", 1.0), ("need*", None), ("60%", None)]
)
def test_a_share_of_the_need(text: str, share: float | None) -> None:
    assert need_share(text) == share


@pytest.mark.parametrize("options", [{"host": "none"}, {"disk": "none"}, {"disk": (None, "none")}, {"disk": "NONE "}])
def test_none_is_none_everywhere(options: dict[str, Any]) -> None:
    assert parse_host("none") == 0 and parse_host("1MB") == 10**6
    with memmgr.budget("8GB", quiet=True, **options) as mm:
        assert mm._config.host_bytes in (None, 0) and (mm._config.folder is None) == (
            options.get("disk") in ("none", "NONE ")
        )


@pytest.mark.parametrize("text", ["80%", "lots", "0", "12", "12XB", ""])
def test_only_what_is_accepted_is_listed(text: str) -> None:
    """Host memory is no share of anything, and neither is a size whose whole is not known."""
    for read in (parse_host, parse_limit, parse_budget, parse_size):
        with pytest.raises(ValueError) as caught:
            read(text)
        said = str(caught.value)
        listed = text != "12"  # of which there is a guess
        assert '"80%"' not in said and "12GB" in said and ("none" in said) == (listed and read is not parse_size)


def test_units_of_the_user() -> None:
    assert [given for given in ("12GiB", "12gi", "1.5 mib", "12GB", "12g", "80%", 12, None) if is_binary(given)] == [
        "12GiB",
        "12gi",
        "1.5 mib",
    ]


def test_a_budget_of_more_than_there_is() -> None:
    said = pytest.warns(UserWarning, match="the budget of 1 PB is more than this machine has")
    with said as caught, memmgr.budget("1000TB", quiet=True):
        pass
    assert len(caught) == 1 and "nothing is evicted before" in str(caught[0].message)


def test_the_size_of_the_disk_alone() -> None:
    """The folder is the usual one."""
    for size in ("1GB", "none"):
        with memmgr.budget("8GB", disk=(None, size), quiet=True):
            pass


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_620_000_000, "1.62 GB"),
        (12 * 10**12, "12 TB"),
        (4 * 10**15, "4 PB"),
        (2**63, "9.22 EB"),
    ],
)
def test_show(size: int, text: str) -> None:
    assert show_size(size) == text


@pytest.mark.parametrize(
    ("size", "text"), [(999, "999 B"), (1024, "1 KiB"), (1023 * 2**20, "1023 MiB"), (12 * 2**30, "12 GiB")]
)
def test_show_in_powers_of_two(size: int, text: str) -> None:
    assert show_size(size, binary=True) == text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": "12Gbit"}, ("budget", "12GB")),
        ({"limit": "12"}, ("budget", "12GB")),
        ({"limit": -1}, ("budget", "12GB")),
        ({"limit": "1GB", "host": "x"}, ("host", "12GB")),
        ({"limit": "1GB", "disk": "/nowhere/at/all"}, ("disk", "folder")),
        ({"limit": "1GB", "disk": ("/tmp", "8Mbit")}, ("disk", "unit")),
        ({"limit": "1GB", "policy": "best"}, ("best", "--policy help")),
    ],
)
def test_bad_arguments_are_found_before_anything_opens(options: dict[str, Any], words: tuple[str, ...]) -> None:
    limit = options.pop("limit")
    with pytest.raises(ValueError) as caught:
        memmgr.budget(limit, **options)
    for word in words:
        assert word in str(caught.value)
    with memmgr.budget("8GB", quiet=True):
        pass  # nothing of the bad one is left open


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: memmgr.budget("1GB", polcy="auto"), "memmgr.budget() has no argument 'polcy'; did you mean 'policy'?"),
        (
            lambda: memmgr.budget(None, throttle=1),
            "memmgr.budget() has no argument 'throttle'; it has limit, device, host",
        ),
        (lambda: memmgr.explain(tpo=3), "memmgr.explain() has no argument 'tpo'; did you mean 'top'?"),
        (lambda: memmgr.manage(tensr=1), "memmgr.manage() has no argument 'tensr'; did you mean 'tensor'?"),
    ],
)
def test_unknown_argument_is_an_error_that_names_the_near_one(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).startswith(text) and "\n" not in str(caught.value) and "_throttle" not in str(caught.value)


def test_signatures_remain_visible() -> None:
    assert (
        "policy" in inspect.signature(memmgr.budget).parameters
        and "top" in inspect.signature(memmgr.explain).parameters
    )


def test_percent_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for group, whole in ((None, psutil.virtual_memory().total), (10**9, 10**9), (2**62, psutil.virtual_memory().total)):
        monkeypatch.setattr(machine, "group_bytes", lambda group=group: group)
        with memmgr.budget("80%", device="cpu", quiet=True) as mm:
            assert mm.stats()["budget_bytes"] == int(whole * 0.8)


@pytest.mark.parametrize(
    ("mine", "limits", "least"),
    [
        ("0::/\n", {"memory.max": "8000"}, 8000),  # in a container
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "max", "memory.max": "9000"}, 5000),  # a job
        ("0::/../x\n", {"memory.max": "8000"}, 8000),  # a group of the machine's, seen from inside
        ("4:memory:/job\n1:cpu:/\n", {"memory/job/memory.limit_in_bytes": "7000"}, 7000),
        ("4:memory:/gone\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, 9223372036854771712),
        ("", {}, None),
    ],
)
def test_what_a_container_or_a_job_may_use(
    mine: str, limits: dict[str, str], least: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_MINE", tmp_path / "mine")
    assert machine.group_bytes() is None, "there are no groups at all"
    (tmp_path / "mine").write_text(mine)
    for name, text in limits.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text + "\n")
    assert machine.group_bytes() == least
    assert machine.memory_bytes() == min(least or 2**62, psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("available", "used", "cache", "free"),
    [
        (6000, 3000, 0, 5000),  # the group's limit is 8000
        (4000, 3000, 0, 4000),  # of the machine less is free
        (9000, 7000, 2000, 3000),  # page cache is taken back
        (9000, 9000, 0, 0),
    ],
)
def test_free_memory_is_that_of_the_machine_and_of_the_group(
    available: int, used: int, cache: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_GROUPS", tmp_path)
    monkeypatch.setattr(machine, "_MINE", tmp_path / "mine")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    assert machine.free_bytes() == available, "there are no groups"
    (tmp_path / "mine").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("8000\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    assert machine.free_bytes() == free


GIB = 2**30


@pytest.mark.parametrize(("whole", "free", "left"), [(8 * GIB, 6 * GIB, GIB // 2), (40 * GIB, 30 * GIB, 2 * GIB)])
def test_the_budget_device_is_the_free_memory_and_that_of_the_tensors(
    whole: int, free: int, left: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "memory_bytes", lambda: whole)
    monkeypatch.setattr(devices, "machine_free_bytes", lambda: free)
    assert parse_budget(" Device ") == Room()
    mm = memmgr.budget("device", device="cpu")
    assert "the free memory of the device" in repr(mm)
    with mm:
        before = mm.stats()["budget_bytes"]
    held = torch.zeros(1 << 20)
    views = [held[:1000], held.view(1024, 1024)]
    with mm:
        assert free - left <= before <= mm.stats()["budget_bytes"] - held.nbytes
        assert mm.stats()["budget_bytes"] < before + 2 * held.nbytes, "views are counted once"
    del views
    assert re.search(r"memmgr: the budget is [\d.]+ GB: the free memory of the device, cpu", capfd.readouterr().err)


def test_host_memory_of_a_container_is_what_its_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_groups", lambda: [(10 * GIB, 2 * GIB)])
    assert devices.host_bytes(torch.device("cpu"), 100 * GIB) == GIB
    assert devices.room_bytes(torch.device("cpu")) < 9 * GIB  # and the resident set of this process
    assert devices.host_bytes_in_group(2 * GIB) == 2 * GIB
    with pytest.warns(
        UserWarning, match=r"host: 3\.22 GB is more than the 2\.15 GB that this container or job has left"
    ):
        assert devices.host_bytes_in_group(3 * GIB) == 2 * GIB
    monkeypatch.setattr(machine, "_groups", list)
    assert devices.host_bytes_in_group(2**50) == 2**50


def test_a_device_without_free_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "machine_free_bytes", lambda: 1000)
    monkeypatch.setattr(budgets, "live_tensors", lambda known, device: [])
    with pytest.raises(RuntimeError, match="no memory is free on cpu: name a budget in bytes"), memmgr.budget("device"):
        pass


def test_a_device_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"^device: 'cud' is no device; expected cpu, .*; did you mean 'cuda'\?$"):
        memmgr.budget("1GB", device="cud")


def test_nested_budgets() -> None:
    with memmgr.budget("8GB", quiet=True) as outer:
        with pytest.raises(RuntimeError, match="do not nest") as caught:
            memmgr.budget("4GB", quiet=True).__enter__()
        assert not isinstance(caught.value, torch.OutOfMemoryError)
        # The outer one goes on.
        w = torch.randn(64, 64, requires_grad=True)
        (w @ w).sum().backward()
        assert outer.stats()["budget_bytes"] == 8 * 10**9 and outer.stats()["passes"] == 1
    with memmgr.budget("4GB", quiet=True):
        pass
    assert "nest" in (memmgr.budget.__doc__ or ""), "what nested budgets mean is to be said in the docstring"


def test_disk_as_a_path(tmp_path: Path) -> None:
    with memmgr.budget("8GB", disk=tmp_path, quiet=True):
        assert list(tmp_path.iterdir()) == [], "the tier's file has a name"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("switch", ["verify", "quiet", "prefetch", "lines"])
def test_a_switch_is_true_or_false(switch: str) -> None:
    options: dict[str, Any] = {switch: "yes"}
    with pytest.raises(TypeError, match=f"^{switch}: expected True or False; got 'yes'$"):
        memmgr.budget("1GB", **options)


TIMES = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 900 0 0 0 0 100 0 0 0 0
cpu2 900 0 0 0 0 0 200 400 50 0
cpu3 900 0 0 0 0 0 0 800 0 0
intr 5 5 5 5 5 5 5 5 5
"""


def test_lost_time_is_that_of_interrupts_and_the_host_on_the_processors_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stat").write_text(TIMES)
    monkeypatch.setattr(machine, "_TIMES", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    assert machine.lost_seconds() == 700 / os.sysconf("SC_CLK_TCK")


def test_lost_time_is_none_where_the_kernel_hides_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_TIMES", tmp_path / "none")
    assert machine.lost_seconds() == 0.0


def test_lost_time_is_what_psutil_reads() -> None:
    times = psutil.cpu_times(percpu=True)
    read = sum(times[number].irq + times[number].softirq + times[number].steal for number in os.sched_getaffinity(0))
    hundredths = round(100 * machine.lost_seconds()) - round(100 * read)  # the kernel counts them
    assert 0 <= hundredths < 500
