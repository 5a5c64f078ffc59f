"""The public context manager."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import threading
from collections.abc import Callable
from html import escape
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import psutil
import torch

from memmgr.common.errors import RankError
from memmgr.common.say import say, warn
from memmgr.config.conf import check_file, check_folder, is_off, local_ranks
from memmgr.config.placement import default_placement, parse_placement
from memmgr.config.sizes import (
    SMALL_BYTES,
    SMALLEST_BARE,
    UNLIMITED,
    Need,
    Room,
    is_binary,
    parse_budget,
    parse_host,
    parse_limit,
    parse_size,
    show_size,
)
from memmgr.config.variables import refuse_unknown
from memmgr.native import binding as native
from memmgr.native import device as devices
from memmgr.native.build import NotBuiltError
from memmgr.observe.holdings import Explanation
from memmgr.observe.memory_inventory import live_tensors
from memmgr.observe.summary import main_figures
from memmgr.policies import Policy, parse_policy
from memmgr.runtime.config import SILENT_SECONDS, Config, default_folder
from memmgr.runtime.session import PagerRuntime

from .keywords import known_keywords

refuse_unknown()  # where torch has not loaded its entry points (TORCH_DEVICE_BACKEND_AUTOLOAD=0)

P = ParamSpec("P")
R = TypeVar("R")
_lock = threading.Lock()
_current: PagerRuntime | None = None
_last: PagerRuntime | None = None
# The state of decorated functions below has this lock.
_calls_lock = threading.RLock()
_decorating: budget | None = None
"""The budget that calls of decorated functions opened; between two calls any other one replaces it."""


_measuring: budget | None = None
"""A budget without a limit that the environment opened: any other budget replaces it."""


def let_give_way(measuring: budget) -> None:
    """Lets a budget that only measures close when another one opens."""
    global _measuring
    _measuring = measuring


def current() -> PagerRuntime | None:
    """The runtime of the open budget, or None."""
    return _current


def _before_fork() -> None:
    if _current is not None:
        _current.finish_steps()


def _in_child() -> None:
    global _current, _calls_lock
    _calls_lock = threading.RLock()  # a thread that is not here may have it
    if _current is not None:
        _current.disable_in_child()
        _current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)


_DISK = 'a folder, (folder, size) as in ("/tmp", "50GB"), True (the usual folder) or False (no disk)'


def _path(path: object, what: str, accepted: str) -> str:
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"{what}: expected {accepted}; got {path!r}")
    return os.fsdecode(path)


def _disk(disk: str | os.PathLike[str] | tuple[Any, ...] | bool | None) -> tuple[str | None, int]:
    if isinstance(disk, tuple) and len(disk) != 2:
        raise ValueError(f"disk: {disk!r} has {len(disk)} items; expected {_DISK}")
    folder, size = disk if isinstance(disk, tuple) else (disk, None)
    if is_off(folder):
        return None, 0
    usual = folder is None or folder is True
    folder = default_folder() if usual else _path(folder, "disk", _DISK)
    check_folder(folder, "MEMMGR_DISK" if usual and "MEMMGR_DISK" in os.environ else "disk")
    free = psutil.disk_usage(folder).total
    size = 0 if size is None else parse_limit(size, whole=free, what="disk")
    return folder, 0 if size == UNLIMITED else size


def _file(path: str | os.PathLike[str], what: str) -> str:
    name = _path(path, what, "the name of a file")
    check_file(name, what)
    return name


def _pass(number: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"trace_pass: expected the number of a pass, from 1; got {number!r}")
    if number < 1:
        raise ValueError(f"trace_pass: {number!r} is not the number of a pass; the first is 1")
    return number


def _silent(seconds: float) -> float:
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise TypeError(f"silent_seconds: expected a number of seconds; got {seconds!r}")
    if not (seconds == 0 or 1 <= seconds < float("inf")):
        raise ValueError(f"silent_seconds: {seconds!r} is neither 0 (never) nor a number of seconds from 1 up")
    return float(seconds)


def _flag(value: bool, what: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{what}: expected True or False; got {value!r}")
    return value


class budget:
    """Trains under a byte budget: the same bits, in less memory.

    A context manager and a decorator. Inside, the bytes that torch holds on `device` never pass `limit`. Tensors are
    evicted and recomputed, or offloaded and reloaded, as the policy decides. Each tensor that no op is using is a
    candidate. The budget counts all bytes: parameters, gradients, optimizer state, activations, workspaces, and memory
    allocated before entering.

    A decorated function's budget opens at its first call and stays open between calls, so that a step keeps its plans and a
    run has one summary. It closes when a call fails, when another budget opens, by `close()`, or at the process's end.
    If the limit must end with a function that is called once, use `with` inside it.

    Args:
        limit: `"12GB"` (10^9 bytes each, in any case), `"12GiB"` (2^30), `"80%"` of the device's memory (on the CPU: of the
            machine's, or of the memory that its container or job may use, in equal parts for the ranks of a host),
            bytes as an int; `None` or `"none"` for no limit, which only measures. `"need*60%"` or `"need*0.6"`: that
            share of the run's
            need. The first passes measure it: about three, of one backward each. Until then tensors are evicted only if
            they do not fit the device. A line on stderr gives the budget. `"auto"`: the smallest budget at which a
            planned pass is predicted to take at most 1.1 times as long as one without a limit, of 100, 95, 90
            ... 5 per cent of the need. `"device"`: the memory that is free on the device when the budget opens, and that of the
            tensors that are there already. A twentieth of the device's memory, at least 512 MiB, is left to memory that
            is not torch's. A run that would be out of memory is slower instead.
        device: the device that the budget limits, the CPU or a CUDA device; default the accelerator if there is one,
            else the CPU. On CUDA trainings have run on one H100 for minutes (torch 2.11): with the bits of unmanaged
            runs, and slowly. CUDA graphs, torch.compile, several streams or GPUs, and torch's own allocator in a budget
            have not run on a GPU.
        host: bytes of host memory for offloaded tensors. From an accelerator: the most that is page-locked, in pieces
            as it is needed, until the budget closes; default half of the free memory, at most twice the limit. Where its
            memory is the machine's (Jetson, GB10) default none: a copy would free nothing. On the CPU device: spare
            memory in addition to the budget. It is the page cache of the first so many bytes of the disk tier, and the
            system takes it back when it needs it; default none. `"none"`: none.
        disk: the tier below the CPU: a folder, `(folder, size)`, or False or `"none"` for none. Default the system's temporary
            folder. The file has mode 0600 and is unlinked as soon as it is open. From an accelerator it is a second step, below
            `host`, and there is none by default: the tensors that have been in host memory longest are moved to the
            file first. Ranks that a launcher has started on one host (`LOCAL_WORLD_SIZE`) share `size`, and `host`, in
            equal parts.
        policy: `"auto"`, `"evict"`, `"offload"`, `"delta"`, a filter such as `"dtr"`, or a pair such as `"lru+offload"`;
            `"torture"` (for tests) evicts each tensor as soon as it can. `memmgr.policies.POLICIES` has all. Or a
            `Policy` of
            your own: a filter, a director and a prefetcher, each a pure function from columns to columns.
        verify: compare all restored bytes with a checksum from before the eviction (a sample is compared anyway), and
            run each op twice at first use in every size (else 32 sizes of it suffice for the sizes in between).
        prefetch: False reads no tensor back before an op needs it. It shows the gain of reading ahead.
        lines: record the source line and the module of every large tensor, for `memmgr.explain`: about a microsecond for each,
            and some for each call of a module. By default lines are recorded in some passes, and in all while the telemetry has
            a reader; modules where it has a reader or a log.
        quiet: no summary line at the end.
        log: a file for the telemetry stream (JSON, an object a line), for `memmgr report`. An existing one is begun anew; in a
            process that opens several budgets with the same log, one follows the other. With several ranks each has its
            own, `run.rank1.jsonl`, and so has a process that begins while another writes to it, `run.12345.jsonl`.
        trace: a file for the trace of one pass, for `memmgr simulate` (JSON, an op a line); compressed if the name ends in .gz.
        trace_pass: the number of the pass that is traced, from 1; if it fails, the next that succeeds. The first pass
            is not typical.
        silent_seconds: of a distributed job, at least 1: a rank whose process has sent no heartbeat for so long counts
            as lost, and the others end with `RankError`; 0: never. A thread that needs no GIL sends the heartbeat twice
            a second, so a rank that computes or compiles for minutes is not lost. A rank that a debugger has stopped
            is.
        allocator: on CUDA. `"auto"`: memmgr's, which takes over if torch's own is in use already. `"native"`: torch's own
            caching allocator, under its memory fraction. All of its features stay: expandable segments, MemPool, graph
            trees, tensors shared with other processes, every statistic. Its cached pieces count as well, so the floor
            is a little higher, and its memory cannot be moved, so steps are slower. Set before the import:
            `MEMMGR_CONF=allocator:native`.

    Raises:
        ValueError: a size, policy or folder that is not one.
        TypeError: a size of another type, or a switch that is neither True nor False.
        NotImplementedError: a device that this version cannot manage.
        BudgetError: on entering, when the memory in use already exceeds the limit; later, when no more tensor can be
            evicted.
        RankError: on leaving, where another rank of a distributed job is in trouble and this one waited for it.
        RuntimeError: another CUDA allocator than these is in place, or memmgr's is where `native` is asked for. On entering:
            there is no library for this release of torch, and no compiler; or a budget is open already. Budgets do not nest
            and are not concurrent: the limit belongs to the device, not to a block of code, so a second one has no meaning.
            All threads are managed with it.

    Known limitations: a share of the need is of the measured passes, and the budget does not grow for a longer batch
    later. Without a backward (inference) the need stays unknown and there is no limit; after a minute a line on stderr
    reports that. On the CPU device, memory of libraries that do not use torch's allocator (mkldnn's scratch, BLAS's
    buffers) is not counted. Forked children (DataLoader workers) can read tensors that were absent, and are not
    managed.
    """

    @known_keywords("memmgr.budget")
    def __init__(
        self,
        limit: int | str | None,
        *,
        device: torch.device | str | None = None,
        host: int | str | None = None,
        disk: str | os.PathLike[str] | tuple[Any, ...] | bool | None = None,
        policy: str | Policy = "auto",
        verify: bool = False,
        quiet: bool = False,
        log: str | os.PathLike[str] | None = None,
        trace: str | os.PathLike[str] | None = None,
        trace_pass: int = 2,
        silent_seconds: float = SILENT_SECONDS,
        allocator: str = "auto",
        prefetch: bool = True,
        lines: bool = False,
        _throttle: int = 0,
        _placement: str | None = None,
        _plan: bool = True,
    ) -> None:
        if not isinstance(device, torch.device | str | None):
            raise TypeError(f'device: expected "cpu", "cuda", "cuda:1" or a torch.device; got {device!r}')
        self._device = devices.resolve(device, allocator)
        binary = is_binary(limit)
        self._share: str | None = None  # of the device, until it is asked how much it has
        self._room: Room | None = None  # the device is asked how much is free
        cpu = self._device.type == "cpu"
        asked = parse_budget(limit, whole=devices.machine_bytes() if cpu else 1 << 60)
        if isinstance(asked, Room):
            self._room, asked = asked, UNLIMITED
        elif not cpu and isinstance(limit, str) and limit.strip().endswith("%") and not isinstance(asked, Need):
            self._share, asked = limit, UNLIMITED
        # For an accelerator the file is a second tier, which the user has to ask for.
        folder, disk_bytes = _disk(disk) if cpu or disk is not None else (None, 0)
        self._config = Config(
            limit_bytes=UNLIMITED if isinstance(asked, Need) else asked,
            device=self._device,
            host_bytes=None if host is None else -(-parse_host(host) // local_ranks()),
            folder=folder,
            disk_bytes=-(-disk_bytes // local_ranks()),
            policy=policy if isinstance(policy, Policy) else parse_policy(policy),
            verify=_flag(verify, "verify"),
            quiet=_flag(quiet, "quiet"),
            throttle=_throttle,
            small_bytes=int(os.environ.get("MEMMGR_PAGER_SMALL", SMALL_BYTES)),
            placement=parse_placement(_placement or default_placement(self._device.type)),
            plan=_plan,
            prefetch=_flag(prefetch, "prefetch"),
            lines=_flag(lines, "lines"),
            log=None if log is None else _file(log, "log"),
            trace=None if trace is None else os.path.expanduser(_file(trace, "trace")),
            trace_pass=_pass(trace_pass),
            silent_seconds=_silent(silent_seconds),
            binary=binary,
            need=asked if isinstance(asked, Need) else None,
        )
        self._runtime: PagerRuntime | None = None
        self._calls = 0  # of decorated functions, under way

    def __enter__(self) -> budget:
        global _current, _last
        with _calls_lock:
            if _decorating is not None and not _decorating._calls:
                _decorating.close()
        if _measuring is not None and _measuring is not self:
            _measuring._close(failed=False, report=False)
        with _lock:
            if _current is not None:
                raise RuntimeError(
                    "memmgr: a budget is open already. Budgets do not nest: the limit belongs to the device, not to a block "
                    "of code. Close the other one first."
                )
            config = self._settled()
            _warn_if_nothing_will_leave(config)
            try:
                runtime = PagerRuntime(config)
            except NotBuiltError as why:
                raise NotBuiltError(f"memmgr: {why}") from None
            _current = runtime
        try:
            runtime.start()
            self._runtime = _last = runtime
            if self._room is not None and not config.quiet:
                limit = show_size(config.limit_bytes)
                say(f"the budget is {limit}: {self._room}, {config.device}")
        except BaseException:  # an interrupt may come when it has started
            try:
                runtime.close(failed=True, report=False)
            finally:
                _current = None
            raise
        return self

    @property
    def _gives_way(self) -> bool:
        """It only measures: it has no limit, and will have none, and no file is asked of it."""
        config = self._config
        limited = config.limit_bytes != UNLIMITED or config.need is not None or self._room is not None
        return not limited and self._share is None and config.log is None and config.trace is None

    def _settled(self) -> Config:
        """The configuration once the device may be asked."""
        device = devices.settle(self._device)
        if self._config.need is not None:
            return dataclasses.replace(self._config, device=device, limit_bytes=devices.room_bytes(device))
        if self._room is not None:
            return dataclasses.replace(self._config, device=device, limit_bytes=_room_now(device))
        if self._share is None:
            return dataclasses.replace(self._config, device=device)
        limit = parse_size(self._share, whole=devices.total_bytes(device))
        return dataclasses.replace(self._config, device=device, limit_bytes=limit)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        instead = self._failed(error) if error is not None else None
        if error is not None and self._runtime is not None:
            self._runtime.ended_by = type(error).__name__
        self._close(failed=kind is not None)
        if instead is not None:
            raise instead from error

    def _failed(self, error: BaseException) -> RankError | None:
        """Reports an exception to the other ranks. Returns the exception to raise instead, if one of them is its cause."""
        runtime = self._runtime
        return runtime.job.failed(error) if runtime is not None and runtime is _current else None

    def _close(self, *, failed: bool, report: bool = True) -> None:
        """Leaves the budget; `report=False` without its line, where another attempt follows and has one."""
        global _current, _decorating
        runtime = self._runtime
        if runtime is None or _current is not runtime:
            return  # a forked child: nothing of it is ours
        try:
            runtime.close(failed=failed, report=report)
        finally:
            _current = _decorating = None
            atexit.unregister(self._at_exit)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: see above."""
        if not callable(function):
            raise TypeError(f"a budget decorates a function; got {function!r}")

        @functools.wraps(function)
        def managed(*args: P.args, **kwargs: P.kwargs) -> R:
            self._begin_call()
            failed = True
            try:
                result = function(*args, **kwargs)
                failed = False
                return result
            finally:
                self._end_call(failed)

        return managed

    def _begin_call(self) -> None:
        global _decorating
        with _calls_lock:
            if _decorating is not self or not self._is_open():
                self.__enter__()
                self._calls, _decorating = 0, self
                atexit.register(self._at_exit)
            self._calls += 1

    def _end_call(self, failed: bool) -> None:
        with _calls_lock:
            self._calls -= 1
            if failed and not self._calls:
                self._close(failed=True)

    def _at_exit(self) -> None:
        """As after an exception: tensors that the last step still needs are restored only if they fit."""
        if self._is_open():
            assert self._runtime is not None
            self._runtime.process_ends()
            self._close(failed=True)

    def close(self) -> None:
        """Leaves the budget of a decorated function now, rather than at the end of the process. Nothing where it is not open."""
        self._close(failed=False)

    def stats(self) -> dict[str, Any]:
        """The figures of this budget, now or as they were at its end. See `memmgr.stats`."""
        if self._runtime is None:
            return {}
        return self._runtime.stats()

    @property
    def leaks(self) -> list[dict[str, Any]]:
        """The leaks that go on, or went on at the end, the largest first. `assert not mm.leaks` fails a test on a leak: after ten
        steps or more, while its tensors live.

        Each is a dict: `file` and `line`, which made most of its tensors; `caller`, the program's line that led there, where
        that is a library's; `bytes_per_step`; `since_step`, from 1; `bytes`, of them `absent_bytes`; `ops`; `module`; `kept`, the
        variable that keeps them, in words. None: not known.
        """
        return [] if self._runtime is None else self._runtime.leaks()

    def __repr__(self) -> str:
        return f"<{self._said()}>"

    def _repr_html_(self) -> str:
        """Representation for notebooks: the line, and the figures once there are any."""
        stats = self.stats()
        binary = self._config.binary
        rows = main_figures(stats, binary=binary) if stats else []
        if self._is_open():
            rows.insert(1, ("now", show_size(stats["resident_bytes.current"], binary=binary)))
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
        return f"<table><caption>{escape(self._said())}</caption>{cells}</table>"

    def _is_open(self) -> bool:
        return self._runtime is not None and self._runtime is _current

    def _said(self) -> str:
        """One line: the limit, the policy, the device, and if the budget is open."""
        config = self._config if self._runtime is None else self._runtime.config
        if self._room is not None and self._runtime is None:
            limit = str(self._room)
        elif self._share is not None and self._runtime is None:
            limit = f"{self._share} of the device"  # which is not asked before the budget opens
        elif config.need is not None and (self._runtime is None or not self._runtime.measured_need):
            limit = str(config.need)
        elif config.limit_bytes == UNLIMITED:
            limit = "no limit"
        else:
            limit = show_size(config.limit_bytes, binary=config.binary)
        state = "not opened yet" if self._runtime is None else "open" if self._is_open() else "closed"
        return f"memmgr.budget: {limit}, policy {config.policy.name}, on {config.device}, {state}"


def _room_now(device: torch.device) -> int:
    """The budget `"device"`: the memory that is free on the device, and that of the tensors that are there already.

    Raises:
        RuntimeError: hardly anything is free.
    """
    tensors = live_tensors(native.load().objects_of((torch.Tensor,)), device)
    held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    room = devices.free_bytes(device) + sum(held.values())
    if room < SMALLEST_BARE:
        raise RuntimeError(f"memmgr: no memory is free on {device}: name a budget in bytes")
    return room


def _warn_if_nothing_will_leave(config: Config) -> None:
    cpu = config.device.type == "cpu"
    there = devices.machine_bytes() if cpu else devices.total_bytes(config.device)
    if there is not None and there < config.limit_bytes < UNLIMITED:
        whose = "this machine" if cpu else str(config.device)
        warn(
            f"the budget of {show_size(config.limit_bytes, binary=config.binary)} is more than {whose} has "
            f"({show_size(there, binary=config.binary)}): nothing is evicted before that is full"
        )


def last() -> PagerRuntime | None:
    """The runtime of the open budget, or of the last one."""
    return _current or _last


@known_keywords("memmgr.explain")
def explain(top: int = 10) -> Explanation:
    """Explains the memory of the open budget: its holders now and at the peak, by module and by source line, and its leaks.

    `print(memmgr.explain())` shows tables. A leak is memory that outlives its pass in one pass after the other; after five
    of them it is in `leaks`, with its line, and with the variable that keeps its oldest tensors now. The largest holders have
    theirs as well, where it is known: a global or local variable, an attribute, a closure, a class, or autograd for these; or a
    reference cycle. A line of a library has the program's line beside it that led there.

    Args:
        top: rows that each table shows.

    Raises:
        RuntimeError: no budget is open.

    Known limitations: tensors under 64 KiB are one sum. Lines are recorded in the first two passes and then in ever fewer,
    unless `budget(lines=True)` asks for all; a tensor of another pass has the lines of those like it, which may be several.
    A tensor that a backward made has the line that called it. Parameters that are older than the budget have no line. Without
    `budget(lines=True)`, a log or a reader, the module of an activation is the one whose method its line is in; of several such
    modules the name has a star (`GPT.blocks.*`). References that C++ code holds are not seen. The search for variables ends after
    three seconds.
    """
    if not isinstance(top, int) or top < 0:
        raise TypeError(f"top: expected a number of rows, from 0; got {top!r}")
    if _current is None:
        ended = "the last one is closed, and its tensors are not followed any longer (`memmgr.stats()` has its figures)"
        raise RuntimeError(
            f"memmgr: explain() needs an open budget: {ended if _last else 'none was opened'}. "
            "Call it inside `with memmgr.budget(...)`, after some steps"
        )
    return _current.explain(top)


def stats() -> dict[str, Any]:
    """The figures of the open budget, or of the last one; empty when there was none.

    Returns:
        A flat dict of numbers. `_bytes` and `_seconds` in a name are its unit; the others are counts, except for
        `fragmentation`, a share. `memmgr.observe.figures.FIGURES` has a sentence for each key. `escapes.FILE:LINE` counts
        the addresses that a line of the program has handed out for good.
    """
    runtime = last()
    return runtime.stats() if runtime is not None else {}
