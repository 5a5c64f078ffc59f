"""Compiled functions under a budget: the same graphs and bits (rule 15), and errors that name the model and a budget that works."""

import contextlib
import gc
import importlib
import re
import sys
from collections.abc import Callable

import forkserver
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import memmgr
from memmgr.readers import inductor

# The warning comes from torch's own modules, which inductor imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)
        )
        self.blocks = torch.nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def compiled(backend: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = torch.compile(Stack(), backend=backend, dynamic=False)
    x = torch.randn(2048, 64)

    def once() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    once()  # compiling is none of a budget's business
    return once


@pytest.fixture(scope="module")
def step() -> Callable[[], None]:
    return compiled("inductor")  # whose graphs allocate outside of ops


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run as with a release of torch whose kernels take their arguments in another way."""
    monkeypatch.setattr(inductor, "_BINDING", ("another way",))


def needs_no_more_than_it_says(step: Callable[[], None], limit: str) -> str:
    with pytest.raises(memmgr.BudgetError) as caught, memmgr.budget(limit, quiet=True):
        for _ in range(3):
            step()
    error = caught.value
    assert f"the budget of {limit.replace('MB', ' MB')} is spent" in str(error) and "bytes is spent" not in str(error)
    assert error.__cause__ is None and error.__context__ is None, "a chain of two tracebacks"
    with memmgr.budget(error.enough_bytes, quiet=True) as mm:
        for _ in range(3):
            step()
    assert error.enough_bytes <= 1.5 * mm.stats()["floor_bytes"]
    return " ".join((str(error), *error.details))


@pytest.mark.filterwarnings("ignore:memmgr. a compiled graph is not paged:RuntimeWarning")
@pytest.mark.parametrize("limit", ["3MB", "12MB"])
def test_a_graph_that_is_not_paged_names_the_model_and_a_budget_that_works(
    limit: str, step: Callable[[], None], pinned: None
) -> None:
    assert "inside a compiled Stack" in needs_no_more_than_it_says(step, limit)


def test_a_graph_that_is_not_paged_warns_once_a_budget(step: Callable[[], None], pinned: None) -> None:
    with (
        memmgr.budget("30MB", quiet=True),
        pytest.warns(RuntimeWarning, match=f"not paged.*torch {re.escape(torch.__version__)} binds") as told,
    ):
        step()
        step()
    assert len(told) == 1


@pytest.mark.filterwarnings("ignore:memmgr. a compiled graph is not paged:RuntimeWarning")
def test_the_summary_names_graphs_that_ran_as_a_whole(
    step: Callable[[], None], pinned: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of the four blocks makes 2 MB, which the backward is given with parameters and gradients."""
    with memmgr.budget("60MB"):
        step()
        step()
    lines = [line for line in capfd.readouterr().err.splitlines() if "as a whole" in line]
    assert len(lines) == 2
    forward, backward = lines
    assert re.match(
        r"memmgr: 1 compiled graph of Stack ran as a whole \(torch \S+ binds kernels in another way\): ", forward
    )
    kept = re.search(r"it kept at least ([0-9.]+) MB in memory", backward)
    assert kept is not None and 8 < float(kept[1]) < 60


def test_a_paged_graph_is_not_named(step: Callable[[], None]) -> None:
    """Between two launches everything in it may be evicted, so compiling is not why there is no room."""
    assert "compiled" not in needs_no_more_than_it_says(step, "3MB")


def test_outside_of_its_graph_it_is_not_named(step: Callable[[], None]) -> None:
    with pytest.raises(memmgr.BudgetError) as caught, memmgr.budget("30MB", quiet=True):
        step()
        torch.empty(10**8)
    assert "compiled" not in str(caught.value)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backend_that_runs_op_by_op_is_paged_and_not_named(backend: str) -> None:
    """Compiling is not why there is no room. Of AOTAutograd's forward, which runs without gradients, a whole step is named, too."""
    step = compiled(backend)
    with (
        pytest.raises(memmgr.BudgetError, match="should do for a whole step") as caught,
        memmgr.budget("3MB", quiet=True),
    ):
        step()
    assert "compiled" not in str(caught.value)
    with memmgr.budget(caught.value.enough_bytes, quiet=True):
        for _ in range(2):
            step()
    assert caught.value.enough_bytes < 8_000_000, "as much as if it were not compiled"


def test_a_graph_with_sizes_that_are_symbols() -> None:
    """Ops that only look at sizes are asked for fake tensors', too, and those have none yet."""
    dropped = torch.compile(lambda x: F.dropout(x.sin(), 0.1, True), backend="aot_eager", dynamic=True)

    def both() -> list[torch.Tensor]:
        torch.manual_seed(0)
        found = []
        for batch in (5, 9):
            x = torch.randn(batch, 64, requires_grad=True)
            dropped(x).sum().backward()
            found.append(x.grad)
        return found

    with memmgr.budget("100MB", quiet=True):
        managed = both()
    assert all(torch.equal(x, y) for x, y in zip(managed, both(), strict=True))


@pytest.mark.parametrize("policy", ["auto", pytest.param("offload", marks=pytest.mark.slow)])  # auto offloads, too
@pytest.mark.rule(15)
def test_a_step_that_is_compiled_as_a_whole(policy: str, beyond: Callable[[str], int]) -> None:
    """The hook at the end of its backward is in a frame that Dynamo compiles, too, and it changed the graph of the update."""

    def train() -> tuple[list[torch.Tensor], dict[str, int]]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        net = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

        compiled = torch.compile(step, backend="eager")
        for _ in range(6):
            compiled(torch.randn(64, 64), torch.randint(8, (64,)))
        return list(net.parameters()), dict(counters["graph_break"])

    want, breaks = train()
    with memmgr.budget(beyond("160kB"), policy=policy, quiet=True) as mm:
        managed, broke = train()
    assert mm.stats()["reclaims"] and broke == breaks
    assert all(torch.equal(x, y) for x, y in zip(managed, want, strict=True))


def test_an_error_in_a_compiled_update_is_all_that_is_said(
    beyond: Callable[[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Its graph was called once more for the error's text, with a list that it had emptied, and torch printed where it failed."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))
    update = torch.compile(torch.optim.Adam(net.parameters(), lr=torch.tensor(1e-2)).step, backend="aot_eager")
    with pytest.raises(memmgr.BudgetError), memmgr.budget(beyond("320kB"), policy="evict", disk=False, quiet=True):
        for _ in range(4):
            F.cross_entropy(net(torch.randn(64, 64)), torch.randint(8, (64,))).backward()
            update()
            net.zero_grad()
    assert capfd.readouterr().err == ""


def test_none_opens_inside_of_a_compiled_function() -> None:
    """Its return takes the budget from the thread: plain ops read absent tensors."""

    @torch.compiler.disable
    def opens() -> None:
        memmgr.budget("100MB", quiet=True).__enter__()

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        opens()
        return y.cos()

    with pytest.raises(RuntimeError, match="memmgr: a budget cannot be opened inside of a compiled function"):
        compiled(torch.randn(8))
    opened = torch.compiler.disable(lambda: memmgr.budget("100MB", quiet=True))
    with opened():
        assert torch.ones(8).sum() == 8


@pytest.mark.parametrize("static", [True, False])
def test_tensors_that_a_compiler_has_left_have_no_memory(static: bool) -> None:
    """After an error in tracing some of AOTAutograd's functional tensors live on. Their sizes may be symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def outside() -> float:
        with memmgr.budget("100MB", quiet=True) as mm:
            assert torch.ones(8).sum() == 8
            return mm.stats()["outside_bytes"]

    before = outside()
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(512, 512), static_shapes=static)
    left = torch._to_functional_tensor(fake)  # type: ignore[attr-defined]
    assert type(left) is torch.Tensor and outside() == before


BEFORE = """
import contextlib
import sys
import torch
import memmgr
from torch._dynamo.utils import counters

torch.manual_seed(0)
net = torch.nn.Linear(64, 8)
step = torch.compile(net, backend="eager")
for batch in (64, 32):  # of one size, and of any
    step(torch.randn(batch, 64)).sum().backward()
with memmgr.budget("1GB", quiet=True) if sys.argv[1] == "with" else contextlib.nullcontext():
    for batch in (64, 40, 77):
        step(torch.randn(batch, 64)).sum().backward()
print(counters["stats"]["unique_graphs"], net.weight.grad.sum().item())
"""


def test_what_was_compiled_before_the_first_budget_is_not_compiled_again() -> None:
    """Dynamo's guards look at the thread's dispatch keys: there was one more in the budget, and a graph of one size for it."""
    told = [
        forkserver.run([sys.executable, "-c", BEFORE, how], capture_output=True, text=True, check=True).stdout
        for how in ("with", "without")
    ]
    assert told[0] == told[1] and told[0].startswith("2 ")


class Kernel:
    """A compiled graph whose kernel finds no room, and makes an error of its own of that or of something else."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __call__(self, inputs: list[torch.Tensor]) -> None:
        for size in self.sizes:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch._C._dynamo.guards._empty_strided_cpu((size,), (1,), torch.float32)
        raise RuntimeError("API call failed at c.cpp, line 73")


@pytest.mark.filterwarnings("ignore:memmgr. a compiled graph is not paged:RuntimeWarning")
def test_a_kernel_that_does_not_say_that_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `cpp_wrapper`, or in flex attention: the error named neither memory nor a budget, and none caught it."""
    compiled, x = torch.compile(lambda x: x.sin() + 1, backend="inductor"), torch.ones(8)
    graphs = importlib.import_module("torch._inductor.output_code").CompiledFxGraph
    before = [o for o in gc.get_objects() if type(o) is graphs]  # held, so that none of their addresses is used again
    compiled(x)
    (graph,) = (o for o in gc.get_objects() if type(o) is graphs and all(o is not old for old in before))
    with memmgr.budget("3MB", quiet=True):
        monkeypatch.setattr(graph, "current_callable", Kernel(10**7))
        with pytest.raises(memmgr.BudgetError) as spent:
            compiled(x)
        assert "the budget of 3 MB is spent" in str(spent.value)
        assert any("This is inside a compiled graph" in said for said in spent.value.details)
        assert "line 73" in str(spent.value.__cause__)
        monkeypatch.setattr(graph, "current_callable", Kernel(10**3))
        with pytest.raises(RuntimeError, match="API call failed") as caught:  # and nothing of the one before
            compiled(x)
    assert not isinstance(caught.value, memmgr.BudgetError)
