"""PyTorch's operator database under memmgr: every op, forward and backward, must leave the same bits.

Each sample is run twice without memmgr (the second time on memory that was filled with other values before, which finds
ops that read unwritten memory), and twice under a budget with ``policy="torture"``, in which every tensor is evicted
after every op, also held ones, by turns dropped (and made again) and offloaded. Compared are: outputs, gradients, the
op's writes to its arguments, the random generator afterwards, and the kind of exception if there was one.

A sample alone would exercise little: its inputs are leaves that the caller holds, so no tensor could be evicted.
Therefore the op is given *copies* of the leaves, made by a recorded op, and neither they nor the op's outputs are held
during backward.

As a program, for one op, or for everything with each bucket in a process of its own:
    python -m tests.ops.sweep --op nn.functional.linear [--case float32/plain] [--verbose]
    python -m tests.ops.sweep --all [--jobs 2]
"""

import argparse
import gc
import os
import random
import subprocess
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map

BUCKETS = 64
LIMIT = "8GB"  # far above any sample, but finite: only then are kinds proven at their first use (rule 8)
SAMPLES = {torch.float32: 6, torch.float64: 3, torch.bfloat16: 3, torch.complex64: 3}
INPLACE_SAMPLES = {torch.float32: 6, torch.float64: 2, torch.bfloat16: 2, torch.complex64: 2}
DOUBLE_SAMPLES = {torch.float32: 2}  # create_graph=True: the backward is recorded too
MODULE_SAMPLES = {torch.float32: 6, torch.float64: 2, torch.bfloat16: 2}
SAMPLES_PER_BUDGET = 50
FILLED_WORDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PLAIN, INPLACE, DOUBLE, MODULE = "plain", "inplace", "double", "module"


class Bits(NamedTuple):
    """One tensor as bytes: NaN equals the same NaN, -0.0 differs from 0.0."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def bits(value: Any) -> Any:
    """A copy outside torch's memory. An object that is no tensor is given as its repr."""
    if not isinstance(value, torch.Tensor):
        return repr(value) if isinstance(value, bool | int | float | complex | str | None) else type(value).__name__
    with torch.no_grad():
        t = value.detach()
        if t.is_nested:
            return tuple(bits(part) for part in t.unbind())
        if t.layout is torch.sparse_coo:
            return ("sparse", tuple(t.shape), bits(t._indices()), bits(t._values()))
        if t.layout in (torch.sparse_csr, torch.sparse_bsr):
            return ("csr", tuple(t.shape), bits(t.crow_indices()), bits(t.col_indices()), bits(t.values()))
        if t.layout in (torch.sparse_csc, torch.sparse_bsc):
            return ("csc", tuple(t.shape), bits(t.ccol_indices()), bits(t.row_indices()), bits(t.values()))
        if t.layout is not torch.strided:
            t = t.to_dense()
        # A copy of our own, made below the recorder: asking the tensor itself for a pointer would count as exposing it.
        t = torch.clone(t.resolve_conj().resolve_neg(), memory_format=torch.contiguous_format)
        data = b"" if t.numel() == 0 else t.reshape(-1).view(torch.uint8).numpy().tobytes()
        return Bits(str(t.dtype), tuple(t.shape), data)


class Result(NamedTuple):
    """The results of one run, by name."""

    entries: dict[str, Any]

    def differences(self, other: "Result") -> list[str]:
        a, b = self.entries, other.entries
        return [
            f"{name} ({_how(a.get(name), b.get(name))})" for name in {**a, **b} if a.get(name, ()) != b.get(name, ())
        ]


def _how(a: Any, b: Any) -> str:
    if isinstance(a, Bits) and isinstance(b, Bits):
        if a[:2] != b[:2]:
            return f"{a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}"
        return f"{a.dtype}{list(a.shape)}, {sum(x != y for x, y in zip(a.data, b.data, strict=True))} bytes"
    if isinstance(a, Bits) or isinstance(b, Bits):
        return f"{'present' if a else 'absent'} -> {'present' if b else 'absent'}"
    return f"{str(a)[:160]} -> {str(b)[:300]}"


@dataclass
class Case:
    """One sample of one op (or module) in one dtype and one of the ways to run it."""

    op: str
    dtype: torch.dtype
    way: str
    index: int
    call: Callable[..., Any]
    sample: tuple[Any, ...]  # the arguments of `call`, with leaves in them
    finish: Callable[[Any], Any] = lambda out: out

    @property
    def name(self) -> str:
        return f"{self.op}/{str(self.dtype).removeprefix('torch.')}/{self.way}/{self.index}"

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def quiet_op() -> Iterator[None]:
    """Around the op and nothing else: the database calls deprecated, experimental and not deterministic variants on
    purpose, and each of them warns (UserWarning, FutureWarning, DeprecationWarning). memmgr's warnings stay errors."""
    with warnings.catch_warnings():
        for kind in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        warnings.filterwarnings("error", message=".*memmgr")
        yield


def op_names() -> list[str]:
    """All ops and modules of the databases that can be differentiated on the CPU."""
    with quiet_op():
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    names = {full_name(op) for op in op_db if op.supports_autograd}
    return sorted(names | {f"module {info.name}" for info in module_db})


def full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def bucket_of(name: str) -> int:
    """Stable, and the same for an op's variants."""
    return zlib.crc32(name.encode()) % BUCKETS


def cases_of(name: str, dtypes: set[torch.dtype] | None = None) -> Iterator[Case]:
    """All cases of one op or module."""
    with quiet_op():
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    if name.startswith("module "):
        for info in module_db:
            if f"module {info.name}" == name:
                yield from _module_cases(info, dtypes)
        return
    for op in op_db:
        if full_name(op) != name or not op.supports_autograd:
            continue
        supported = op.supported_backward_dtypes("cpu")
        for dtype in SAMPLES:
            if dtype in supported and (dtypes is None or dtype in dtypes):
                yield from _op_cases(op, dtype)


def _op_cases(op: Any, dtype: torch.dtype) -> Iterator[Case]:
    ways: list[tuple[str, Any, int]] = [(PLAIN, op.op, SAMPLES[dtype])]
    if op.inplace_variant is not None and op.inplace_variant is not op.op and op.supports_inplace_autograd:
        ways.append((INPLACE, op.inplace_variant, INPLACE_SAMPLES[dtype]))
    if op.supports_gradgrad and dtype in DOUBLE_SAMPLES:
        ways.append((DOUBLE, op.op, DOUBLE_SAMPLES[dtype]))
    for way, call, count in ways:
        _seed_all(zlib.crc32(f"{full_name(op)} {dtype}".encode()))
        with quiet_op():
            samples = list(islice(op.sample_inputs("cpu", dtype, requires_grad=True), count))
        for index, sample in enumerate(samples):
            if way == INPLACE and sample.broadcasts_input:
                continue  # cannot be written in place
            given = (sample.input, tuple(sample.args), dict(sample.kwargs))
            yield Case(full_name(op), dtype, way, index, _calls(call), given, sample.output_process_fn_grad)


def _calls(function: Any) -> Callable[..., Any]:
    return lambda value, args, kwargs: function(value, *args, **kwargs)


def _module_cases(info: Any, dtypes: set[torch.dtype] | None) -> Iterator[Case]:
    for dtype, count in MODULE_SAMPLES.items():
        if dtype not in info.dtypes or (dtypes is not None and dtype not in dtypes):
            continue
        for training in (True, False):
            _seed_all(zlib.crc32(f"{info.name} {dtype}".encode()))
            with quiet_op():
                inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
            for index, given in enumerate(inputs[:count]):
                if given.forward_input is None:
                    continue
                build = given.constructor_input
                sample = (tuple(given.forward_input.args), dict(given.forward_input.kwargs))
                way = MODULE if training else MODULE + "-eval"
                call = _module_call(info.module_cls, build, dtype, training)
                yield Case(f"module {info.name}", dtype, way, index, call, sample)


class ModuleRun:
    """Marks a call that makes its own leaves: parameters, and buffers that it may write."""

    def __init__(self, module: torch.nn.Module, out: Any) -> None:
        self.module, self.out = module, out


def _module_call(cls: Any, build: Any, dtype: torch.dtype, training: bool) -> Callable[..., Any]:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleRun:
        module = cls(*build.args, **build.kwargs).to(dtype)
        module.train(training)
        return ModuleRun(module, module(*args, **kwargs))

    return call


def _private(tree: Any) -> Any:
    """A copy of all tensors in `tree`, with strides, offsets and shared storages as they are; leaves stay leaves."""
    storages: dict[int, torch.UntypedStorage] = {}
    tensors: dict[int, torch.Tensor] = {}

    def copy(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        if id(t) in tensors:
            return tensors[id(t)]
        with torch.no_grad():
            if type(t) is torch.Tensor and t.layout is torch.strided and not t.is_nested and not t.is_quantized:
                old = t.untyped_storage()
                if old._cdata not in storages:
                    storages[old._cdata] = old.clone()
                new = torch.empty(0, dtype=t.dtype).set_(storages[old._cdata], t.storage_offset(), t.size(), t.stride())
                if t.is_conj():
                    new = torch._conj(new)
                if t.is_neg():
                    new = torch._neg_view(new)
            else:
                new = t.detach().clone()
        tensors[id(t)] = new.requires_grad_(t.requires_grad)
        return tensors[id(t)]

    return tree_map(copy, tree)


def _weights(t: torch.Tensor) -> torch.Tensor:
    """Fixed numbers of many magnitudes and both signs, so that gradients are neither all equal nor all zero."""
    n = torch.arange(t.numel(), dtype=torch.float64)
    return ((n * 7 % 11 - 4.5) / 4).to(t.dtype).reshape(t.shape)


def _loss(out: Any) -> torch.Tensor | None:
    """One number from everything in `out` that can be differentiated."""
    total = None
    for t in tree_flatten(out)[0]:
        if not isinstance(t, torch.Tensor) or not t.requires_grad or t.numel() == 0:
            continue
        if t.is_nested or t.layout is not torch.strided:
            t = torch.cat([p.flatten() for p in t.unbind()]) if t.is_nested else t.to_dense()
        if t.dtype is torch.complex32:
            t = t.to(torch.complex64)  # has no sum
        term = (t * _weights(t)).sum()
        if term.is_complex():
            term = torch.view_as_real(term).sum()
        term = term.double()
        total = term if total is None else total + term
    return total


def run(case: Case) -> Result:
    """Runs the sample once, as the context around us has it (managed or not)."""
    found: dict[str, Any] = {}
    sample = _private(case.sample)
    leaves = [t for t in tree_flatten(sample)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    _seed_all(case.seed)
    try:
        with quiet_op():
            _run(case, sample, leaves, found)
    except Exception as error:  # compared like a result; its text names the sizes and addresses of the run
        found["exception"] = type(error).__name__
        found["text"] = str(error)
    found["random state"] = bits(torch.get_rng_state())
    found["next number"] = repr((random.random(), float(np.random.random())))
    return Result(found)


def _run(case: Case, sample: Any, leaves: list[torch.Tensor], found: dict[str, Any]) -> None:
    def made(t: Any) -> Any:
        # The op's input is an intermediate result that only memmgr holds: it can be evicted, and made again.
        if not isinstance(t, torch.Tensor) or not t.requires_grad or t.layout is not torch.strided or t.is_nested:
            return t
        part = t.untyped_storage().nbytes() != t.numel() * t.itemsize
        looks_around = part and case.op.startswith("as_strided") and case.way != INPLACE
        return t if looks_around else torch.clone(t)

    given = tree_map(made, sample)
    out = case.call(*given)
    module = None
    if isinstance(out, ModuleRun):
        module, out = out.module, out.out
        leaves = leaves + list(module.parameters())
    out = case.finish(out)
    for i, t in enumerate(tree_flatten(out)[0]):
        found[f"output {i}"] = bits(t)
    for i, t in enumerate(tree_flatten(given)[0]):
        if isinstance(t, torch.Tensor):
            found[f"argument {i} afterwards"] = bits(t)
    loss = _loss(out)
    del out, given, t
    if loss is None or not leaves:
        return
    found["loss"] = bits(loss)
    double = case.way == DOUBLE
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=double)
    del loss
    for i, grad in enumerate(grads):
        found[f"gradient {i}"] = bits(grad)
    if double:
        again = _loss([g for g in grads if g is not None])
        del grads, grad
        if again is not None:
            for i, grad in enumerate(torch.autograd.grad(again, leaves, allow_unused=True)):
                found[f"second gradient {i}"] = bits(grad)
    if module is not None:
        for name, buffer in module.named_buffers():
            found[f"buffer {name}"] = bits(buffer)


@dataclass
class Report:
    """Results of a sweep."""

    same: int = 0
    raised: list[str] = field(default_factory=list)  # the sample raises, with and without memmgr
    nondeterministic: list[str] = field(default_factory=list)  # two unmanaged runs differ
    skipped: list[str] = field(default_factory=list)
    different: dict[str, str] = field(default_factory=dict)  # case -> the difference
    stats: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, other: "Report") -> None:
        self.same += other.same
        self.raised += other.raised
        self.nondeterministic += other.nondeterministic
        self.skipped += other.skipped
        self.different.update(other.different)
        self.stats.update(other.stats)
        self.seconds += other.seconds

    def summary(self) -> str:
        s = self.stats
        return (
            f"{self.same} same bits, {len(self.different)} different, {len(self.raised)} raise without memmgr too, "
            f"{len(self.nondeterministic)} not deterministic, {len(self.skipped)} skipped; {s['evictions']} evictions, "
            f"{s['recomputes']} recomputes, {s['offloads']} offloads, {s['refused_kinds']} kinds do not reproduce, "
            f"{self.seconds:.1f} s"
        )


@contextmanager
def torture() -> Iterator[Any]:
    import memmgr

    with memmgr.budget(LIMIT, policy="torture", device="cpu", quiet=True) as opened:
        yield opened


def _texts_aside(result: Result) -> Result:
    return Result({k: v for k, v in result.entries.items() if k != "text"})


def _differences(want: Result, got: Result) -> list[str]:
    return _texts_aside(want).differences(_texts_aside(got))


def fill_free_memory(value: int = 1) -> None:
    """Leaves ones where small blocks are free: an op that reads unwritten memory then gives other bits."""
    blocks = [torch.full((words,), value, dtype=torch.int32) for words in FILLED_WORDS for _ in range(16)]
    del blocks


_frozen = False


def freeze_heap() -> None:
    """Opening a budget collects garbage and walks the heap; objects made by the databases need not be walked again."""
    global _frozen
    if not _frozen:
        gc.collect()
        gc.freeze()
        _frozen = True


def sweep(cases: list[Case], skip: Callable[[Case], bool] = lambda case: False, verbose: bool = False) -> Report:
    """Runs cases in batches: first all unmanaged, then all under one budget."""
    report = Report()
    begun = time.perf_counter()
    freeze_heap()
    for start in range(0, len(cases), SAMPLES_PER_BUDGET):
        batch = []
        for case in cases[start : start + SAMPLES_PER_BUDGET]:
            if skip(case):
                report.skipped.append(case.name)
                continue
            if verbose:
                print(f"  {case.name} unmanaged", flush=True)
            first = run(case)
            fill_free_memory()
            if _differences(first, run(case)):
                report.nondeterministic.append(case.name)
            else:
                batch.append((case, first))
        if batch:
            _compare(batch, report, verbose)
    report.seconds = time.perf_counter() - begun
    return report


def _compare(batch: list[tuple[Case, Result]], report: Report, verbose: bool) -> None:
    suspects = []
    with torture() as opened:
        for case, want in batch:
            if verbose:
                print(f"  {case.name} managed", flush=True)
            results = [run(case) for _ in range(2)]  # the pager takes turns of its own
            if any(_differences(want, got) for got in results):
                suspects.append((case, want, results))
            elif "exception" in want.entries:
                report.raised.append(f"{case.name}: {want.entries['exception']}: {want.entries['text'][:100]}")
            else:
                report.same += 1
    stats = opened.stats()
    report.stats.update({k: stats[k] for k in ("evictions", "recomputes", "offloads", "reloads", "refused_kinds")})
    for case, want, results in suspects:
        turn = next(i for i, got in enumerate(results) if _differences(want, got))
        text = results[turn].entries.get("text", "")
        lines = "; ".join(_differences(want, results[turn]))
        report.different[case.name] = f"turn {turn}: {lines}" + (f" [{text[:400]}]" if text else "")


def cases_in(bucket: int) -> list[Case]:
    return [case for name in op_names() if bucket_of(name) == bucket for case in cases_of(name)]


def main() -> int:
    import faulthandler
    import json

    faulthandler.enable()
    os.environ.setdefault("MEMMGR_PAGER_SMALL", "1")  # the samples are small
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", help="only this op (full name); may be repeated")
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--bucket", type=int, action="append")
    parser.add_argument("--all", action="store_true", help="every bucket, each in a process of its own")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--no-exclusions", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from .exclusions import is_skipped

    skip = (lambda case: False) if options.no_exclusions else is_skipped
    if options.all:
        return _all(options)
    cases = [c for b in options.bucket or [] for c in cases_in(b)]
    cases += [c for name in options.op or [] for c in cases_of(name)]
    if options.case:
        cases = [c for c in cases if options.case in c.name]
    report = sweep(cases, skip, options.verbose)
    if options.json:
        Path(options.json).write_text(json.dumps(vars(report)))
    print(report.summary())
    for name, how in report.different.items():
        print(f"DIFFERENT {name}: {how}")
    _print_lists(report)
    return int(bool(report.different))


def _print_lists(report: Report) -> None:
    for title, lines in (
        ("not deterministic", report.nondeterministic),
        ("raises", report.raised),
        ("skipped", report.skipped),
    ):
        for line in lines:
            print(f"{title}: {line}")


def _all(options: argparse.Namespace) -> int:
    import json
    import tempfile

    total = Report()
    waiting, running, shown = list(range(BUCKETS)), {}, 0
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                b = waiting.pop(0)
                command = [
                    sys.executable,
                    "-m",
                    "tests.ops.sweep",
                    "--bucket",
                    str(b),
                    "--json",
                    f"{folder}/{b}",
                    "--verbose",
                ]
                if options.no_exclusions:
                    command.append("--no-exclusions")
                log = open(f"{folder}/{b}.log", "w")  # noqa: SIM115
                running[b] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            time.sleep(0.2)
            for b, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[b]
                result = Path(f"{folder}/{b}")
                if result.exists():
                    part = Report(**json.loads(result.read_text()))
                    part.stats = Counter(part.stats)
                    total.add(part)
                else:
                    log = Path(f"{folder}/{b}.log").read_text().splitlines()
                    last = next(
                        (line for line in reversed(log) if line.startswith("  ") and line.endswith("managed")), "?"
                    )
                    total.different[f"bucket {b}"] = f"ended with {process.returncode} in{last}\n" + "\n".join(
                        log[-40:]
                    )
                for name in list(total.different)[shown:]:
                    print(f"DIFFERENT {name}: {total.different[name]}")
                shown = len(total.different)
                print(f"{BUCKETS - len(waiting) - len(running)}/{BUCKETS}: {total.summary()}", flush=True)
    _print_lists(total)
    return int(bool(total.different))


if __name__ == "__main__":
    raise SystemExit(main())
