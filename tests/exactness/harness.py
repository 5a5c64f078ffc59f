"""Run a training function without and with memmgr, and compare everything that it leaves behind, bit for bit.

A *case* is a function ``fn(seed, scope) -> Record``.  ``scope`` makes the context manager that belongs around the training
loop: a budget, or nothing.  The harness enters the budget in one of two places, because users do both:

``loop``    the model is built outside and only the loop runs under the budget (the four-line example of the README);
``inside``  building, training and collecting all happen under the budget.

Results are kept as Python ``bytes``, never as tensors: they neither count against a budget nor can they be aliases of
something that changes later.
"""

import contextlib
import gc
import inspect
import os
import random
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch._dynamo

HUGE_BYTES = 8 << 30
"""A budget far above every case of this suite: a measurement under it is the case's unmanaged need."""

Scope = Callable[[], Any]


class Bits(NamedTuple):
    """One result, in a form that compares bit for bit (NaN equals the same NaN, -0.0 differs from 0.0)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def bits(value: Any) -> Bits:
    """Copy a tensor, number or string out of torch's memory."""
    if isinstance(value, torch.Tensor):
        t = value.detach()
        if t.layout == torch.sparse_coo:
            t = t.coalesce()
            index, values = bits(t.indices()), bits(t.values())
            return Bits("sparse:" + values.dtype, tuple(t.shape), index.data + b"|" + values.data)
        if hasattr(t, "to_local") and type(t) is not torch.Tensor and not isinstance(t, torch.nn.Parameter):
            t = t.to_local()  # DTensor: each rank compares its own shard
        t = t.resolve_conj().resolve_neg()
        shape = tuple(t.shape)
        dtype = str(t.dtype)
        flat = t.contiguous().reshape(-1)
        if flat.numel() == 0:
            return Bits(dtype, shape, b"")
        if flat.dtype == torch.bool:
            flat = flat.view(torch.uint8)
        # A copy: numpy has the address of its source, and a parameter would stay in memory from here on.
        return Bits(dtype, shape, flat.view(torch.uint8).clone().numpy().tobytes())
    if isinstance(value, bool | int | str | type(None)):
        return Bits(type(value).__name__, (), repr(value).encode())
    if isinstance(value, float):
        return Bits("float", (), struct.pack("<d", value))
    raise TypeError(f"cannot record a {type(value)}")


class Record(dict[str, Bits]):
    """The final values of a run: name -> bits, in the order in which they were recorded."""

    def put(self, name: str, value: Any) -> None:
        if name in self:
            raise KeyError(f"recorded twice: {name}")
        self[name] = bits(value)

    def losses(self, value: Any) -> None:
        """Append the next loss (or any other value) of the loop."""
        self.put(f"loss[{sum(k.startswith('loss[') for k in self)}]", value)

    def model(self, model: torch.nn.Module, name: str = "model") -> None:
        for key, p in model.named_parameters(remove_duplicate=False):
            self.put(f"{name}.{key}", p)
            self.put(f"{name}.{key}.grad", p.grad)
        for key, b in model.named_buffers(remove_duplicate=False):
            self.put(f"{name}.{key} (buffer)", b)

    def optimizer(self, opt: torch.optim.Optimizer, name: str = "optimizer") -> None:
        for index, state in opt.state_dict()["state"].items():
            for key, value in state.items():
                self.put(f"{name}[{index}].{key}", value)

    def rng(self) -> None:
        """The default generator's state, and the next numbers drawn from it."""
        self.put("rng_state", torch.get_rng_state())
        self.put("python_random", random.random())
        self.put("numpy_random", float(np.random.random()))

    def ended(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Self:
        """Records the state of a training that has ended."""
        self.model(model)
        if optimizer is not None:
            self.optimizer(optimizer)
        self.rng()
        return self


def differences(want: Record, got: Record) -> list[str]:
    """One line per entry that differs; empty when the two runs are the same bits."""
    lines = [f"{k}: only unmanaged" for k in want if k not in got]
    lines += [f"{k}: only managed" for k in got if k not in want]
    for key in want:
        if key not in got or want[key] == got[key]:
            continue
        a, b = want[key], got[key]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            lines.append(f"{key}: {a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}")
            continue
        where = [i for i, (x, y) in enumerate(zip(a.data, b.data, strict=False)) if x != y]
        lines.append(
            f"{key}: {a.dtype}{list(a.shape)}, {len(where)} of {len(a.data)} bytes differ, first at byte {where[0] if where else min(len(a.data), len(b.data))}"
            + (f" ({_scalar(a)} became {_scalar(b)})" if a.shape == () else "")
        )
    return lines


def _scalar(b: Bits) -> Any:
    if b.dtype == "torch.float32":
        return struct.unpack("<f", b.data)[0]
    if b.dtype in ("float", "torch.float64"):
        return struct.unpack("<d", b.data)[0]
    return b.data


_PATCHABLE = [
    (torch.Tensor, "data_ptr"),
    (torch.Tensor, "numpy"),
    (torch.Tensor, "__dlpack__"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch.Tensor, "backward"),
    (torch.UntypedStorage, "data_ptr"),
    (torch.UntypedStorage, "resize_"),
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (torch.autograd.graph, "_engine_run_backward"),
    (threading.Thread, "start"),
    (threading.Thread, "run"),
    (torch, "set_rng_state"),
]


def global_state() -> dict[str, Any]:
    """Everything outside the caller's own objects that a context could leave changed.

    A budget's end gives up the plan that is being made, and does not wait for its thread: that is done here.
    """
    for thread in threading.enumerate():
        if thread.name == "memmgr-plan":
            thread.join(20)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    state: dict[str, Any] = {
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "saved tensor hooks": hooks,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "threads of an op": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "default dtype": torch.get_default_dtype(),
        "denormals": bool((torch.tensor([1e-40]) * 1.0).ne(0).item()),
        "threads": sorted(t.name for t in threading.enumerate()),
        "files": _open_files(),
    }
    for owner, name in _PATCHABLE:
        if name in vars(owner) or hasattr(owner, name):
            found = getattr(owner, name)
            # The patch for names stays while a storage has another address than its name (tests/pager/test_names.py).
            state[f"{getattr(owner, '__name__', owner)}.{name}"] = (
                inspect.unwrap(found) if name == "data_ptr" else found
            )
    return state


def _open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if not target.startswith(("pipe:", "socket:", "/dev/", "anon_inode:", "/proc/")):
                found[fd] = target
    return found


def _left(key: str, before: Any, after: Any) -> bool:
    """Is there something that was not there? A file or thread of an earlier test may end meanwhile."""
    if key == "files":
        return any(fd not in before or before[fd] != target for fd, target in after.items())
    if key == "threads":
        return bool(Counter(after) - Counter(before))
    return bool(before != after)


def assert_left_clean(before: dict[str, Any]) -> None:
    """Rule 13: leaving the context leaves no threads, no files and no changed global."""
    deadline = time.monotonic() + 1.0
    while True:
        after = global_state()
        changed = {k: (before[k], after[k]) for k in before if _left(k, before[k], after[k])}
        # A thread pool of a case may still wind down.
        if not changed or "threads" not in changed or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert not changed, "leaving the context left changed: " + "; ".join(
        f"{k}: {a!r} -> {b!r}" for k, (a, b) in changed.items()
    )


CaseFunction = Callable[[int, Scope], Record]


_imported = 0  # the number of modules when the heap was frozen last


def _reset(seed: int) -> None:
    global _imported
    gc.collect()
    # A quarter of the suite's time was in collections that went through the modules of transformers. No case has tensors
    # here but in compiled code.
    if len(sys.modules) > _imported and not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        gc.freeze()
        _imported = len(sys.modules)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def unmanaged(fn: CaseFunction, seed: int = 0) -> Record:
    _reset(seed)
    return fn(seed, contextlib.nullcontext)


@dataclass
class Managed:
    """The record of a managed run, and memmgr's figures."""

    record: Record
    stats: dict[str, Any] = field(default_factory=dict)


def managed(
    fn: CaseFunction,
    limit: int | str = HUGE_BYTES,
    policy: str = "auto",
    *,
    seed: int = 0,
    place: str = "loop",
    **options: Any,
) -> Managed:
    """Run ``fn`` under a budget; checks rule 13 and the budget itself as it goes."""
    import memmgr

    _reset(seed)
    before = global_state()
    managers: list[Any] = []

    @contextlib.contextmanager
    def budget() -> Iterator[Any]:
        size = f"{limit}B" if isinstance(limit, int) else limit  # a bare small number is taken for a slip
        with memmgr.budget(size, policy=policy, quiet=True, **options) as mm:
            managers.append(mm)
            yield mm

    if place == "loop":
        record = fn(seed, budget)
    else:
        with budget():
            record = fn(seed, contextlib.nullcontext)
    assert managers, "the case never entered its scope"
    stats = dict(managers[-1].stats())
    managers.clear()
    gc.collect()
    assert stats["resident_bytes.peak"] <= stats["budget_bytes"], (
        f"peak {stats['resident_bytes.peak']:,} passed the budget {stats['budget_bytes']:,}"
    )
    assert_left_clean(before)
    return Managed(record, stats)


def assert_same(want: Record, got: Record, label: str) -> None:
    lines = differences(want, got)
    if not lines:
        return
    for (fn, seed), record in _references.items():
        if record is want and (lines := differences(want, unmanaged(fn, seed))):
            label = "the unmanaged run is not deterministic, so this case cannot judge anything"
            break
    lines = lines or differences(want, got)
    raise AssertionError(f"{label}: {len(lines)} of {len(want)} entries differ\n  " + "\n  ".join(lines[:12]))


@dataclass
class Need:
    """The need of a case: measured once, under a budget that does not bind."""

    reference: Record
    peak_bytes: int
    floor_bytes: int
    stats: dict[str, Any]

    def limit(self, share: float) -> int:
        """``share`` of the unmanaged peak, or 1.1 x the floor if that is higher."""
        return max(int(self.peak_bytes * share), int(self.floor_bytes * 1.1) + 512)


_references: dict[tuple[Any, int], Record] = {}
_needs: dict[tuple[Any, int, str], Need] = {}


def reference(fn: CaseFunction, seed: int = 0) -> Record:
    """The unmanaged run, made once."""
    key = (fn, seed)
    if key not in _references:
        _references[key] = unmanaged(fn, seed)
    return _references[key]


def need(fn: CaseFunction, seed: int = 0, place: str = "loop") -> Need:
    key = (fn, seed, place)
    if key not in _needs:
        want = reference(fn, seed)
        got = managed(fn, HUGE_BYTES, "auto", seed=seed, place=place)
        assert_same(want, got.record, "under a budget that does not bind")
        _needs[key] = Need(want, int(got.stats["unmanaged_peak_bytes"]), int(got.stats["floor_bytes"]), got.stats)
        assert 0 < _needs[key].floor_bytes <= _needs[key].peak_bytes, (
            f"floor {_needs[key].floor_bytes:,}, unmanaged peak {_needs[key].peak_bytes:,}"
        )
    return _needs[key]


def _fitting(fn: CaseFunction, limit: int, policy: str, **options: Any) -> Managed:
    """The run under the limit, or, after an error, under the budget that the error names.

    Cases here hold fractions of a megabyte, where one generator state or one recomputed chain is a tenth of the floor.
    The quality of the named floor is tested in tests/budget/test_floor.py, on larger models.
    """
    for _ in range(20):
        try:
            return managed(fn, limit, policy, **options)
        except torch.OutOfMemoryError as error:
            # Plain if the op ran under a transform of torch.func, which the mode does not see. In small steps: far
            # above the floor the limit would not bind any more, and the test would be void.
            limit = int(max(getattr(error, "floor_bytes", 0), limit) * 1.03) + 4096
            error.__traceback__ = None
        gc.collect()
    return managed(fn, limit, policy, **options)


MODES = ("torture", "auto@100", "auto@75", "auto@50")
_PLACES = {"torture": "inside", "auto@100": "loop", "auto@75": "inside", "auto@50": "loop"}


def check(
    fn: CaseFunction, mode: str, *, seed: int = 0, moves: bool = True, like: CaseFunction | None = None, **options: Any
) -> Managed:
    """Run a case in one mode (``policy`` or ``policy@percent of the unmanaged peak``) and compare.

    Args:
        moves: the case saves activations that memmgr can evict, so a run without evictions and offloads under
            ``torture`` (or below its need) is void, and fails.
        like: a case that leaves the same bits and needs as much, and takes less time.
    """
    plain = like or fn
    place = _PLACES.get(mode, "loop")
    policy, _, percent = mode.partition("@")
    if not percent:
        want, limit = reference(plain, seed), HUGE_BYTES
        binding = policy == "torture"
    else:
        measured = need(plain, seed, place)
        want, limit = measured.reference, measured.limit(int(percent) / 100)
        binding = limit < 0.98 * measured.peak_bytes
    got = _fitting(fn, limit, policy, seed=seed, place=place, **options)
    assert_same(want, got.record, mode)
    if moves and binding:
        moved = got.stats["evictions"] + got.stats["offloads"]
        assert moved > 0, f"{mode}: nothing was evicted or offloaded, so nothing was tested: {got.stats}"
    return got


@dataclass
class Outcome:
    """A run's record, or the error that ended it."""

    record: Record | None
    error: BaseException | None

    def same_as(self, other: "Outcome", label: str) -> None:
        if self.error is not None or other.error is not None:
            a, b = _error(self.error), _error(other.error)
            assert a == b, f"{label}: unmanaged {a or 'runs'}, managed {b or 'runs'}"
            return
        assert self.record is not None and other.record is not None
        assert_same(self.record, other.record, label)


def _error(e: BaseException | None) -> str:
    """An error's type and its first words; sizes and versions differ in nothing that matters."""
    if e is None:
        return ""
    return f"{type(e).__name__}: {str(e)[:80]}"


def outcome(run: Callable[[], Record | Managed]) -> Outcome:
    try:
        result = run()
    except Exception as e:
        e.__traceback__ = None
        return Outcome(None, e)
    return Outcome(result.record if isinstance(result, Managed) else result, None)
