"""Rules 3, 4 and 9 for C++ extensions: pybind11 functions, custom ops, autograd functions, unannounced writes."""

from __future__ import annotations

import copy
import ctypes
import importlib.machinery
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forkserver
import pytest
import torch
from threads import in_threads
from torch import nn

import memmgr
from memmgr.native import binding as native
from memmgr.readers import extensions
from memmgr.readers.patches import Patches

from .extension import library as extension_library

N = 1 << 18  # a megabyte
LIMIT = "3.6MB"  # for three such tensors


@pytest.fixture(scope="module")
def library() -> Path:
    return extension_library()


@pytest.fixture(scope="module")
def extension(library: Path) -> Any:
    """Loaded before any budget, as torch's own loader of extensions does: `sys.modules` does not know it."""
    spec = importlib.util.spec_from_file_location("memmgr_test_extension", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


made_before: list[Callable[[torch.Tensor], float]] = []


@pytest.fixture
def pager(extension: Any, large_only: None, beyond: Callable[[str], int]) -> Iterator[native.Pager]:
    made_before[:] = [extension.makes_sum()]
    with memmgr.budget(beyond(LIMIT), quiet=True, verify=True):
        yield native.load()


def _number() -> torch.Tensor:
    """Whose bytes are the first to leave: it was touched longest ago. Two others fill the budget."""
    t = torch.ones(N) + 0
    for _ in range(2):
        others.append(torch.zeros(N) + 1)
        others[-1].add_(1)
    return t


def _bound_to_an_absent(t: torch.Tensor) -> Any:
    bound = torch.classes.memmgr_test.Bound(t)
    native.load().take_away(t, 1)
    return bound


others: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def _others() -> Iterator[None]:
    yield
    others.clear()


def _in_thread(call: Callable[[], Any]) -> Any:
    result: list[Any] = []
    in_threads(lambda _: result.append(call()), range(1))
    return result[0]


READS: dict[str, Callable[[Any, torch.Tensor], float]] = {
    "const": lambda e, t: e.sum_const(t),
    "mutable": lambda e, t: e.sum_mutable(t),
    "without the GIL": lambda e, t: e.sum_released(t),
    "in containers": lambda e, t: e.sum_list([], named={"t": t}),
    "in a thread": lambda e, t: _in_thread(lambda: e.sum_const(t)),
    "held by an object": lambda e, t: e.Holder(t).total(),
    "by what a function has made": lambda e, t: e.makes_sum()(t),
    "by one of several that it has made": lambda e, t: e.makes_sums()[1](t),
    "by what was made before the budget": lambda e, t: made_before[0](t),
    "custom op": lambda e, t: torch.ops.memmgr_test.sum(t).item(),
    "composite custom op": lambda e, t: torch.ops.memmgr_test.composite(t).item(),
    "autograd function": lambda e, t: torch.ops.memmgr_test.square(t).sum().item(),
    "TorchBind method": lambda e, t: torch.classes.memmgr_test.Bound(torch.ones(1)).sum(t),
    "TorchBind copy": lambda e, t: copy.deepcopy(_bound_to_an_absent(t)).seen(),
    "TorchBind constructor": lambda e, t: torch.classes.memmgr_test.Bound(t).seen(),
}


@pytest.mark.parametrize("away", [False, True], ids=["there", "away"])
@pytest.mark.parametrize("name", READS)
def test_what_it_reads_stays_while_it_allocates(extension: Any, pager: native.Pager, name: str, away: bool) -> None:
    t = _number()
    if away:
        pager.take_away(t, 1)
        info = pager.describe(t)
        assert info is not None
        assert info["residency"] != "resident"
    assert READS[name](extension, t) == N
    info = pager.describe(t)
    assert info is not None
    assert info["pins"] == 0
    assert not info["escaped"]
    left = sum(pager.stats()[how] for how in ("offloads", "evictions", "packed"))
    assert left > 0, "nobody had to leave, so nothing was tested"


def test_what_it_has_kept_stays_while_it_is_pinned(extension: Any, pager: native.Pager) -> None:
    """It is no argument, so the user declares it."""
    t = _number()
    bound = torch.classes.memmgr_test.Bound(t)
    with memmgr.pin(t):
        others.append(torch.ones(N) + 0)
        assert bound.sum_kept() == N
        assert pager.take_away(t, 1) == 0
    assert pager.take_away(t, 1) > 0
    pinned = memmgr.pin(t)
    assert torch.equal(t, torch.ones(N)) and pager.take_away(t, 1) == 0
    pinned.release()
    pinned.release()
    assert pager.take_away(t, 1) > 0


def test_an_op_reads_what_it_has_kept_after_a_step_that_waits(extension: Any, pager: native.Pager) -> None:
    """In the dispatcher, and in a compiled region."""
    op = torch.ops.memmgr_test.sum_of_kept
    for in_region in (False, True):
        t, x = torch.zeros(1000), torch.zeros(4)
        op(t, True)
        assert pager.add_pending(lambda data=t.data: data.fill_(1), [t.data])
        region = pager.pin([x], region=True) if in_region else None
        assert op(x, False).item() == 1000
        del region


ENDED = """
import gc, importlib.util, sys, torch, memmgr
from memmgr.native import binding

with memmgr.budget("1GB", quiet=True):
    libraries = [torch.library.Library(f"ended{i}", "DEF") for i in range(40)]
    for i, library in enumerate(libraries):
        library.define("op(Tensor t, bool keep) -> Tensor")
        library.impl("op", lambda t, keep: t.clone(), "CPU")
        getattr(torch.ops, f"ended{i}").op(torch.randn(50_000), True)
    for library in libraries:
        library._destroy()
    del library
    libraries.clear()
    gc.collect()
spec = importlib.util.spec_from_file_location("memmgr_test_extension", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
op = torch.ops.memmgr_test.sum_of_kept
with memmgr.budget("1GB", quiet=True):
    t, x = torch.zeros(1000), torch.zeros(4)
    op(t, True)
    assert binding.load().add_pending(lambda data=t.data: data.fill_(1), [t.data])
    assert op(x, False).item() == 1000
"""


def test_an_opening_looks_once_through_all_objects(
    extension: Any, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes as long as all else in it."""
    looks: list[Any] = []
    pager = native.load()
    objects_of = pager.objects_of
    monkeypatch.setattr(pager, "objects_of", lambda *what: looks.append(what) or objects_of(*what))
    with memmgr.budget("1GB", quiet=True):
        [(_, libraries)] = looks
    assert [Path(path).name for path in libraries if "extension" in path] == [library.name]


def test_an_op_is_not_taken_for_one_that_has_ended(library: Path, tmp_path: Path) -> None:
    """Its handle may have the other's address, and was then believed to be Python's, which keeps no addresses. Where torch
    puts a new op is malloc's choice: of a script in a file it was where one had ended."""
    script = tmp_path / "ended.py"
    script.write_text(ENDED)
    done = forkserver.run([sys.executable, str(script), str(library)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_pin_outside_of_a_budget_is_nothing() -> None:
    with memmgr.pin(torch.ones(N)):
        pass


def test_a_pin_that_outlives_its_budget(large_only: None) -> None:
    t = torch.ones(N) + 0
    with memmgr.budget("1GB", quiet=True):
        pinned = memmgr.pin(t)
    assert torch.equal(t, torch.ones(N))
    pinned.release()
    assert torch.equal(t + 1, torch.full((N,), 2.0))
    with memmgr.budget("1GB", quiet=True):
        assert native.load().take_away(t, 1) > 0
        assert torch.equal(t, torch.ones(N))


def test_a_library_of_ops_that_was_loaded_before(library: Path) -> None:
    """It has no module, so nothing else shows that there are ops above the kernel."""
    script = """
import sys, torch, memmgr
torch.ops.load_library(sys.argv[1])
n = 1 << 18
with memmgr.budget("4.6MB", quiet=True):
    for _ in range(3):
        t = torch.ones(n) + 0
        keep = [torch.zeros(n) + 1 for _ in range(2)]
        for k in keep:
            k.add_(1)
        assert torch.ops.memmgr_test.composite(t).item() == n
        x = torch.full((n,), 3.0, requires_grad=True)
        y = torch.ops.memmgr_test.square(x)
        keep = [torch.zeros(n) + 1 for _ in range(2)]
        y.sum().backward()
        assert torch.equal(x.grad, torch.full((n,), 6.0))
"""
    done = forkserver.run([sys.executable, "-c", script, str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


WRITES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "function": lambda e, t: e.fill(t, value=7.0),
    "custom op": lambda e, t: torch.ops.memmgr_test.fill(t, 7.0),
    "in a thread": lambda e, t: _in_thread(lambda: e.fill(t, 7.0)),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_counts(extension: Any, pager: native.Pager, name: str) -> None:
    """Clean zeros that are absent: they are restored, the tier's copy is void, and tensors made from them are kept."""
    t = torch.zeros(N)
    y = t * nn.Parameter(torch.ones(1))
    pager.take_away(y, 0)
    pager.take_away(t, 1)
    WRITES[name](extension, t)
    pager.take_away(t, 1)
    assert torch.equal(t, torch.full((N,), 7.0))
    assert not y.any()


def test_a_write_between_two_ops_inside(extension: Any, pager: native.Pager) -> None:
    """No recipe is noted inside: its input changes without an op."""
    t = _number().requires_grad_()
    before = extension.write_between(t)
    pager.take_away(before, 0)
    assert torch.equal(before.detach(), torch.full((N,), 2.0))
    assert torch.equal(t.detach(), torch.full((N,), 5.0))


def test_what_it_makes_stays_until_it_returns(extension: Any, pager: native.Pager) -> None:
    others.append(torch.ones(N) + 0)
    made = extension.own_zeros(N)
    assert torch.equal(made, torch.full((N,), 3.0))
    assert pager.take_away(made, 1) > 0
    assert torch.equal(made, torch.full((N,), 3.0))


def test_a_backward_that_is_written_in_cpp(extension: Any, large_only: None, beyond: Callable[[str], int]) -> None:
    pager = native.load()
    with memmgr.budget(beyond("4.6MB"), quiet=True, verify=True):
        _backward(pager)


def _backward(pager: native.Pager) -> None:
    x = torch.full((N,), 3.0, requires_grad=True)
    y = torch.ops.memmgr_test.square(x)
    gradient = torch.full((N,), 0.5)
    pager.take_away(x, 1)
    pager.take_away(gradient, 1)
    y.backward(gradient)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((N,), 3.0))


@pytest.mark.parametrize("of", ["a parameter", "a parameter, before the budget", "what an op has made"])
def test_a_hook_that_cpp_has_registered(extension: Any, large_only: None, of: str) -> None:
    pager = native.load()
    tried: list[int] = []

    def let_go(gradient: torch.Tensor) -> None:
        tried.append(pager.take_away(gradient, 1))
        torch.full((N,), -1.0)  # where it was, if it has left

    x = torch.rand(N, requires_grad=True)
    if "before" in of:
        extension.hook(x, let_go)
    for _ in range(2):
        with memmgr.budget("1GB", quiet=True):
            y = x * 2
            if "before" not in of:
                extension.hook(x if of == "a parameter" else y, let_go)
            (y * y).sum().backward()
    assert set(tried) == {0} and len(tried) == (3 if of == "a parameter" else 2)


def test_functions_that_are_made_all_the_time_end(extension: Any, pager: native.Pager) -> None:
    t = torch.ones(8)
    for _ in range(2000):
        made = extension.makes_sum()
        assert made(t) == 8
    ended = weakref.ref(made)
    del made
    assert ended() is None


def test_its_errors_are_its_own(extension: Any, pager: native.Pager) -> None:
    t = _number()
    with pytest.raises(RuntimeError, match="as it should"):
        extension.fails(t)
    info = pager.describe(t)
    assert info is not None
    assert info["pins"] == 0


def test_an_extension_that_is_imported_later(library: Path, pager: native.Pager) -> None:
    spec = importlib.util.spec_from_file_location("memmgr_test_extension", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    t = _number()
    assert module.sum_const(t) == N


def test_a_module_without_functions_that_loads_a_library_of_ops_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a module may be Cython's. A kernel of Inductor's brings no such library, and no search."""
    loaded: list[str] = []
    guarded: list[list[str]] = []
    pager: Any = SimpleNamespace(
        libraries_that_use_torch=lambda: [*loaded],
        objects_of=lambda types, libraries: [],
        guard=lambda functions, libraries: guarded.append(libraries),
        watch_foreign_calls=lambda: None,
    )
    monkeypatch.setattr(extensions, "registers", lambda path: "ops" in path)
    seen = extensions.Extensions(pager, Patches())
    module: Any = SimpleNamespace(__file__="/x/module" + importlib.machinery.EXTENSION_SUFFIXES[0])
    for brings, searches in (("/x/kernel.so", 0), ("/x/libops.so", 1), ("/x/kernel2.so", 1), ("/x/libops2.so", 2)):
        seen._after(lambda loader, module, brings=brings: loaded.append(brings))(None, module)
        assert len(guarded) == searches, brings
    assert guarded[-1] == ["/x/libops.so", "/x/libops2.so"]


def test_a_package_of_inductor_is_foreign(pager: native.Pager) -> None:
    """Compiling one takes half a minute, so only this is checked: its calls are guarded already."""
    loader = vars(torch._C._aoti.AOTIModelPackageLoader)
    functions = [loader[name].__func__ for name in ("run", "boxed_run")]
    assert pager.guard(functions, pager.libraries_that_use_torch()) == 0
    pager.unguard_all()
    assert pager.guard(functions, pager.libraries_that_use_torch()) == 2


def test_functions_are_as_they_were(extension: Any) -> None:
    t = torch.ones(N)
    for _ in range(2):
        with memmgr.budget("1GB", quiet=True):
            assert extension.sum_const(t) == N
        assert extension.sum_const(t) == N
        assert not native.load().describe(t)


watched = pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_cdata") or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="torch tells of such writes from 2.13 on",
)


@pytest.fixture
def poke(library: Path) -> Callable[[torch.Tensor, int, float], None]:
    function = ctypes.CDLL(str(library)).memmgr_test_poke
    function.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_float]
    return lambda t, index, value: function(t.untyped_storage()._cdata, index, value)


@watched
def test_a_write_while_somebody_else_has_a_pin(pager: native.Pager, poke: Callable[..., None]) -> None:
    x = torch.ones(N) + 0
    y = x * nn.Parameter(torch.ones(1))
    pager.take_away(y, 0)
    pin = pager.pin([x], held=True)  # as a collective in flight has it
    poke(x, 3, 9.0)
    assert torch.equal(y.detach(), torch.ones(N))
    assert pager.stats()["foreign_writes"] == 1
    del pin
    info = pager.describe(x)
    assert info is not None
    assert info["escaped"]


@watched
def test_a_write_to_a_small_cell_after_an_op(pager: native.Pager, poke: Callable[..., None]) -> None:
    """Small cells are watched again after an op has used up the watch."""
    small, large = torch.ones(64), torch.rand(N // 64, 64) + 0
    w = nn.Parameter(torch.ones(1))
    first = large[0, 5].clone()
    y = large * w * small  # names it: a cell from here on
    small.add_(1)  # an op that writes: the watch fires inside it
    z = large * w + small
    assert pager.take_away(z, 0) > 0
    info = pager.describe(z)
    assert info is not None
    assert info["residency"] == "evicted"
    poke(small, 5, 100.0)
    assert z[0, 5] == first + 2
    assert y[0, 5] == first
    assert small[5].item() == 100.0
