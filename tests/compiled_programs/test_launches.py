"""Compiled graphs under a budget, launch by launch: the bits of the plain compiled run, and a floor that is one launch's. Launches
whose thread waits without the GIL, and buffers that C++ has written to unseen.
"""

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch
from pager.planned import settled
from threads import (
    in_threads,
    one_thread,  # noqa: F401  a fixture
)

import memmgr
from memmgr.native import binding
from memmgr.readers import extensions, inductor

from .programs import PROGRAMS, Training, bits

pytestmark = [
    # The warning comes from torch's own modules, which inductor imports.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # Dynamo looks at a tensor's gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("error:memmgr"),
    pytest.mark.usefixtures("one_thread"),
]


def budget(limit: int, policy: str = "auto", **options: Any) -> Callable[[], Any]:
    return functools.partial(memmgr.budget, f"{limit}B", policy=policy, quiet=True, **options)


def measured(run: Callable[[Callable[[], Any]], Any]) -> dict[str, Any]:
    """The figures of a run with room for all."""
    mm = memmgr.budget(None, quiet=True)
    run(lambda: mm)
    return mm.stats()


def run_in(training: Training, policy: str, limit: int, **options: Any) -> tuple[str, dict[str, Any]]:
    """The bits and the figures of a run in the budget. The policy `evict` keeps results that have no recipe, so its budget grows
    from error to error until it is large enough."""
    while True:
        mm = budget(limit, policy, **options)()
        try:
            got = training.run(lambda mm=mm: mm)
        except memmgr.BudgetError as error:
            if policy != "evict":
                raise
            limit = max(int(1.1 * limit), error.enough_bytes or 0)
        else:
            assert mm.stats()["resident_bytes.peak"] <= limit
            return got, mm.stats()


SHARES = (0.75, 0.5, 0.35)
LEAST = (0.35,)  # most leaves
# Compiling takes 6 s to 20 s of a processor where Inductor's cache on disk is empty. The first one runs in each budget, too.
CASES = [
    pytest.param("convolutions", LEAST, id="convolutions-least"),
    *(pytest.param(name, SHARES, id=name, marks=pytest.mark.slow) for name in PROGRAMS),
]


@pytest.mark.parametrize(("name", "shares"), CASES)
def test_a_training_has_the_bits_of_the_plain_compiled_one(name: str, shares: tuple[float, ...]) -> None:
    """The budgets follow one another after the first compiled run, one of each policy is too small for any step, and none of them
    compiles anything anew."""
    training = Training(name)
    want = training.run()
    graphs = dict(torch._dynamo.utils.counters["stats"])
    need = measured(training.run)
    peak, least = need["unmanaged_peak_bytes"], int(1.05 * need["floor_bytes"])
    recomputed = 0
    for policy in ("auto", "evict", "offload", "torture"):
        with pytest.raises(memmgr.BudgetError) as error:
            training.run(budget(need["floor_bytes"] // 2, policy))
        assert "inside a compiled" not in str(error.value)
        for share in shares:
            got, stats = run_in(training, policy, max(least, int(share * peak)), verify=policy == "auto")
            assert got == want, (policy, share)
            assert stats["reloads"] > 0 or share > 0.5 or policy == "evict"
            recomputed += stats["rematerializations"]
    assert recomputed > 0
    assert training.run() == want, "without a budget after them"
    assert dict(torch._dynamo.utils.counters["stats"]) == graphs


def layers(rows: int, width: int, count: int) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    made = (layer for _ in range(count) for layer in (torch.nn.Linear(width, width), torch.nn.GELU()))
    return torch.nn.Sequential(*made), torch.randn(rows, width)


def test_inference_has_the_bits_of_the_plain_compiled_one() -> None:
    """In two threads at once, too."""
    model, x = layers(256, 64, 4)
    compiled = torch.compile(model, dynamic=False)

    def run(opened: Callable[[], Any] = contextlib.nullcontext) -> str:
        with torch.no_grad(), opened():
            return bits([compiled(x)])

    want = run()
    floor = measured(run)["floor_bytes"]
    assert run(budget(int(1.05 * floor), "torture")) == want
    found: list[str] = []
    with budget(4 * floor)():
        in_threads(lambda _: found.extend(run() for _ in range(5)), range(2))
    assert found == [want] * 10


def test_the_floor_is_the_working_set_of_the_largest_launch() -> None:
    """A step of 4 layers saves 8 activations. No launch and no op touches more than 3 tensors of that size, and parameters that
    are small beside them."""
    rows, width, count = 2048, 64, 4
    activation, weight = rows * width * 4, width * width * 4
    model, x = layers(rows, width, count)
    compiled = torch.compile(model, dynamic=False)

    def run(opened: Callable[[], Any]) -> list[torch.Tensor]:
        model.zero_grad()
        with opened():
            compiled(x).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    need = measured(run)
    stay = 2 * weight
    assert need["unmanaged_peak_bytes"] > 2 * count * activation
    assert need["floor_bytes"] <= 1.1 * (3 * activation + stay)
    want = bits(run(budget(2 * need["unmanaged_peak_bytes"], "keep")))
    assert bits(run(budget(int(1.05 * need["floor_bytes"]), "offload"))) == want


def test_arguments_of_a_const_type_are_not_written() -> None:
    """The pager knows of a kernel's writes by the types of its arguments alone."""
    training = Training("convolutions")
    training.run(steps=1)
    modules = importlib.import_module("torch._inductor.codecache").PyCodeCache.modules
    checked = 0
    for module in modules:
        source = Path(module.__file__).read_text()
        for name, read_kernel in inductor.kernels_in(source).items():
            kernel, letters = getattr(module, name), read_kernel.args

            def checks(*args: Any, kernel: Any = kernel, letters: str = letters) -> None:
                nonlocal checked
                written = {a.untyped_storage()._cdata for a, kind in zip(args, letters, strict=True) if kind == "w"}
                read = [a for a, kind in zip(args, letters, strict=True) if kind == "r"]
                read = [a for a in read if a.untyped_storage()._cdata not in written]
                before = [bits([torch.empty(0, dtype=torch.uint8).set_(a.untyped_storage())]) for a in read]
                kernel(*args)
                checked += len(read)
                assert before == [bits([torch.empty(0, dtype=torch.uint8).set_(a.untyped_storage())]) for a in read]

            setattr(module, name, checks)
    training.run(steps=1)
    assert checked > 10


@pytest.fixture
def doubling() -> Callable[[torch.Tensor], Any]:
    """A compiled function that writes to its argument, and returns a view of it and another tensor."""

    def double(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.mul_(2)
        return x[1:], x + 1

    compiled = torch.compile(double, dynamic=False)
    compiled(torch.ones(5000))
    return compiled


def test_a_launch_that_writes_begins_a_version(doubling: Callable[[torch.Tensor], Any]) -> None:
    """An evicted result of an op is made of the bytes that its input had before the launch."""
    with memmgr.budget("100MB", quiet=True):
        native = binding.load()
        x = torch.randn(5000)
        kept = x.clone()
        x.add_(0)  # an op makes a cell of it
        for _ in range(2):  # the first one is a trial
            y = x.sin()
        assert native.describe(y)["recipe"]
        assert native.take_away(y, 0) > 0 and native.describe(y)["residency"] == "evicted"
        view, more = doubling(x)
        assert torch.equal(y, kept.sin())
        assert torch.equal(view, 2 * kept[1:]) and torch.equal(more, 2 * kept + 1)


def test_a_result_of_inference_is_never_made_again(doubling: Callable[[torch.Tensor], Any]) -> None:
    with memmgr.budget("100MB", policy="evict", disk=False, quiet=True):
        _, more = doubling(torch.ones(5000))
        native = binding.load()
        assert not native.describe(more)["recipe"] and native.take_away(more, 0) == 0


def test_a_tensor_that_a_launch_reads_stays_clean() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, dynamic=False)
    x = torch.randn(5000)
    want = compiled(x)
    with memmgr.budget("100MB", policy="offload", quiet=True):
        native = binding.load()
        x.add_(0)
        assert native.take_away(x, 1) > 0
        assert torch.equal(compiled(x), want)
        assert native.describe(x)["clean"] and not native.describe(x)["pins"]


def test_a_launch_is_an_op_while_a_budget_is_open() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, dynamic=False)
    x = torch.randn(5000)
    want = compiled(x)
    for _ in range(2):
        with memmgr.budget("100MB", quiet=True) as mm:
            compiled(x)
            assert mm.stats()["ops"] == 1
        assert torch.equal(compiled(x), want)


def test_an_error_of_a_kernel_is_the_programs(doubling: Callable[[torch.Tensor], Any]) -> None:
    """It comes out as it is, and the tensors that the launch was given are not pinned any more."""
    modules = importlib.import_module("torch._inductor.codecache").PyCodeCache.modules
    (kernel,) = (value for name, value in vars(modules[-1]).items() if name.startswith("cpp_fused"))
    with memmgr.budget("100MB", quiet=True):
        x = torch.ones(5000)
        doubling(x)
        with pytest.raises(RuntimeError, match="non-tensor input"):
            kernel(x, *[3] * (len(inductor.kernels_in(Path(modules[-1].__file__).read_text()).popitem()[1].args) - 1))
        assert binding.load().describe(x)["pins"] == 0


@pytest.mark.usefixtures("planned_sizes")
def test_a_period_of_launches_is_planned_and_followed() -> None:
    training = Training("convolutions")
    want = training.run(steps=8)
    need = measured(training.run)
    mm = budget(max(int(1.2 * need["floor_bytes"]), need["unmanaged_peak_bytes"] // 2))()
    names: set[str] = set()

    def each() -> None:
        settled()
        names.update(binding.load().timeline()["names"])

    assert training.run(lambda: mm, steps=8, each=each) == want
    assert mm.stats()["planned_passes"] >= 2
    assert any(name.startswith("inductor::cpp_fused") for name in names)


def test_compiled_kernels_are_no_extensions_whose_functions_are_searched_for() -> None:
    """A search looks at all Python objects, which took 80 ms for each kernel that Inductor loaded."""
    training = Training("convolutions")
    training.run(budget(1 << 30))
    folder = importlib.import_module("torch._inductor.codecache").cache_dir()
    kernels = [path for path in binding.load().libraries_that_use_torch() if path.startswith(folder)]
    assert kernels
    assert not any(extensions.registers(path) for path in kernels)
    assert extensions.registers(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"))


@pytest.fixture
def planned_sizes() -> Iterator[None]:
    native = binding.load()
    native.count_ticks(3000)
    yield
    native.count_ticks(0)


@pytest.mark.slow  # compiling torch's headers takes 15 s of a processor
def test_a_graph_that_is_one_call_of_c_is_pinned_as_a_whole() -> None:
    model, x = layers(256, 64, 2)
    compiled = torch.compile(model, dynamic=False, options={"cpp_wrapper": True})

    def run(opened: Callable[[], Any] = contextlib.nullcontext) -> str:
        with torch.no_grad(), opened():
            return bits([compiled(x)])

    want = run()
    with pytest.warns(RuntimeWarning, match=r"not paged.*it has code made by load_pybinding\(\)"):
        assert run(budget(4 << 20, "torture")) == want


@pytest.mark.slow  # each process imports Inductor, which takes four seconds of a processor, and the first one compiles
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_are_compiled_in_a_budget_and_found_in_the_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process compiles them in its first budget. The second one's modules are loaded and not compiled."""
    training = Training(name)
    want = training.run()
    peak = measured(training.run)["unmanaged_peak_bytes"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    command = [sys.executable, str(Path(__file__).with_name("programs.py")), name]
    command += [f"{policy}:{max(peak // 2, 400_000)}" for policy in ("torture", "auto", "offload")]
    for found_some in (False, True):
        done = forkserver.run(command, capture_output=True, text=True, check=True)
        *found, hits = done.stdout.split()
        assert found == [want] * 3 and (int(hits) > 0) == found_some


ROWS, WIDTH = 512, 64  # 128 KiB: above the size from which a storage leaves

# The kernel's number is -1, so that its reader asks for Python's error. The second tensor is a subclass: its check asks Python.
ABSENT = f"""
import torch, memmgr
from memmgr.native import binding
class Own(torch.nn.Parameter): pass
x = torch.ones({ROWS}, {WIDTH})
{{setting}}
compiled(x, 5), compiled(x, 7)
want = compiled(x, -1).detach()
with memmgr.budget("100MB", policy="offload", quiet=True):
    y = x * 1
    assert binding.load().take_away(y, 1) > 0
    assert torch.equal(compiled(y, -1), want)
"""


@pytest.mark.parametrize(
    "setting",
    [
        f"w = torch.nn.Parameter(torch.ones({WIDTH})); compiled = torch.compile(lambda x, n: (x * w + n).sin(), dynamic=True)",
        # compiling costs ten seconds of a processor in each process
        pytest.param(
            f"w = Own(torch.ones({WIDTH})); f = torch.compile(lambda x, w: (x * w).sin()); compiled = lambda x, n: f(x, w)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_launch_reads_its_arguments_with_the_gil(setting: str) -> None:
    """A tensor of the launch is absent, so the thread waits without the GIL until it is back."""
    forkserver.run([sys.executable, "-W", "ignore", "-c", ABSENT.format(setting=setting)], check=True)


def test_a_buffer_that_foreign_code_has_written_to_is_not_new() -> None:
    """The compiled graph returns it as it was allocated. Code that asks for its address in C++ announces no write."""
    weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
    address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    )

    @torch.compile(dynamic=False)
    def make(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(ROWS, WIDTH), x * weight

    @torch.compile(dynamic=False)
    def use(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y[: ROWS // 4].copy_((x * weight)[: ROWS // 4].detach())
        return (x * weight).sin()

    with memmgr.budget("100MB", quiet=True):
        x = torch.randn(ROWS, WIDTH)
        y, _ = make(x)
        ctypes.memset(address_of(y), 0x3F, y.nbytes)
        use(x, y)
        assert y[ROWS // 4 :].view(torch.int32).eq(0x3F3F3F3F).all()
