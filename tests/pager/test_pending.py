"""Slices of optimizers' steps that wait until a thread needs them: no program sees a difference (rule 14)."""

import _thread
import copy
import ctypes
import functools
import gc
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exactness.harness import bits
from threads import in_threads
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import memmgr
from memmgr.native import binding as native

from .raw_reads import READS
from .test_slices import FUSED, OPTIMIZERS

WIDTH, DEPTH = 96, 8
LIMIT = "500kB"
"""Parameters, gradients and AdamW's states take 1.2 MB."""


class Training(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model(torch.randn(16, WIDTH, generator=generator)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameter(self) -> torch.Tensor:
        return next(self.model.parameters())

    def states(self) -> dict[str, torch.Tensor]:
        return self.optimizer.state[self.parameter()]


def begun(make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, steps: int = 2, **how: Any) -> Training:
    """Training of some steps, whose last may wait."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    made = Training(model, make(model.parameters(), **(how or {"fused": True})))
    for i in range(steps):
        made.step(i)
    return made


def waiting(run: Callable[[], Any]) -> tuple[Any, int]:
    """Its result, and how many slices it has made wait."""
    before = native.load().stats()["pending_slices"]
    return run(), native.load().stats()["pending_slices"] - before


def same_with_slices(run: Callable[[], list[Any]], limit: int, least: int = 1) -> list[Any]:
    """The result of the run, which is the same with and without slices that wait; at least so many do."""
    want = run()
    with memmgr.budget(limit, quiet=True):
        got, slices = waiting(run)
    assert slices >= least and got == want
    return want


@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training(name: str, way: str, beyond: Callable[[str], int]) -> None:
    """Parameters, states and gradients after six steps, one of them without gradients for half of the parameters."""
    if way == "fused" and name not in FUSED:
        pytest.skip("torch has no fused one")

    def run() -> list[Any]:
        made = begun(OPTIMIZERS[name], steps=3, **{way: True})
        for layer in (m for m in list(made.model)[::4] if isinstance(m, nn.Linear)):
            layer.requires_grad_(False)
        made.step(3)
        made.model.requires_grad_(True)
        for i in range(4, 6):
            made.step(i)
        kept = [*made.model.parameters(), *(v for s in made.optimizer.state.values() for v in s.values())]
        return [bits(t) for t in kept]

    same_with_slices(
        run, beyond(LIMIT), least=name not in ("SGD", "Adafactor")
    )  # lists with holes: no momenta, no columns


def _address(t: torch.Tensor) -> Any:
    return torch.tensor(list((ctypes.c_float * 64).from_address(t.data_ptr())))


def _in_a_thread(t: torch.Tensor) -> Any:
    found: list[Any] = []
    in_threads(lambda _: found.append(t.detach().clone()), range(1))
    return found[0]


def _compiled(t: torch.Tensor) -> Any:
    return torch.compile(lambda x: x * 2 + 1)(t.detach())


def _forked(t: torch.Tensor) -> Any:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, t.detach().double().sum().numpy().tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        return torch.from_numpy(np.frombuffer(pipe.read()).copy())


def _shared(t: torch.Tensor) -> Any:
    return t.detach().share_memory_().clone()


def _flushed(t: torch.Tensor) -> Any:
    """The step is as it was called, not as it is read."""
    torch.set_flush_denormal(True)
    try:
        return t.detach().clone()
    finally:
        torch.set_flush_denormal(False)


def _gathered(t: torch.Tensor) -> torch.Tensor:
    """By a backend that is asked itself, without its group."""
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        backend = dist.ProcessGroupGloo(store, 0, 1, options)
        found = torch.empty_like(t)
        backend.allgather([[found]], [t.detach()]).wait()
    return found


READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: lambda t, read=read: read(t.detach()) for name, read in READS.items() if name != "sparse"},
    "an op": lambda t: t.detach() * 1,
    "a view": lambda t: t.detach().flatten()[1:5].clone(),
    "numbers": lambda t: torch.tensor([t.detach().flatten()[1], t.detach().flatten()[70]]),
    "a truth": lambda t: torch.tensor([t.detach().flatten()[1] > 0, bool(t.detach().flatten()[1] > 0)]),
    "a backend": _gathered,
    "numpy": lambda t: torch.from_numpy(t.detach().numpy().copy()),
    "a buffer": lambda t: torch.from_numpy(np.from_dlpack(t.detach()).copy()),
    "dlpack": lambda t: torch.from_dlpack(t.detach()).clone(),
    "an address": _address,
    "a thread": _in_a_thread,
    "compiled": _compiled,
    "a fork": _forked,
    "shared": _shared,
    "inference mode": torch.inference_mode()(lambda t: t * 1),
    "vmap": lambda t: torch.vmap(lambda row: row * 2)(t.detach().reshape(-1, 8)),
    "autocast": torch.autocast("cpu")(lambda t: (part := t.detach().flatten()[:64].reshape(8, 8)) @ part),
    "flushing": _flushed,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("name", READERS)
def test_a_reader_sees_the_step(name: str, beyond: Callable[[str], int]) -> None:
    """Parameters, large and small, and states, read by all ways that there are."""
    if name == "compiled":
        READERS[name](torch.zeros(WIDTH, WIDTH))  # compiled now: inductor's own time is not of interest

    def read() -> tuple[list[Any], int]:
        made, slices = waiting(begun)
        last = list(made.model)[-2]
        read = READERS[name]
        found = [read(last.weight), read(made.states()["exp_avg"]), read(list(made.model)[2].bias)]
        return [bits(f) if isinstance(f, torch.Tensor) else f for f in found], slices

    want, none = read()
    with memmgr.budget(beyond(LIMIT), quiet=True):
        got, slices = read()
    assert not none and slices > 0, "nothing waited, so nothing was tested"
    assert got == want


def _new_data(made: Training) -> None:
    made.parameter().data = made.parameter().data * 0.5


WRITERS: dict[str, Callable[[Training], Any]] = {
    "of a parameter": lambda made: made.parameter().data.mul_(0.5),
    "through a view": lambda made: made.parameter().detach()[3:5].fill_(2.0),
    "data=": _new_data,
    "copy_": lambda made: nn.init.constant_(list(made.model)[4].weight, 3.0),
    "of a state": lambda made: made.states()["exp_avg"].zero_(),
    "of a storage": lambda made: made.parameter().untyped_storage().fill_(0),
    "of the step": lambda made: made.states()["step"].fill_(1.0),
    "of numpy": lambda made: made.parameter().detach().numpy().__setitem__((0, 0), 5.0),
    "load_state_dict": lambda made: made.model.load_state_dict({k: v * 2 for k, v in made.model.state_dict().items()}),
    "of a setting": lambda made: made.optimizer.param_groups[0].update(lr=0.5),
    "of the states": lambda made: made.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict())),
    "no states": lambda made: made.optimizer.state.clear(),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.rule(14)
def test_a_write_comes_after_the_step(name: str, beyond: Callable[[str], int]) -> None:
    def run() -> list[Any]:
        made = begun()
        WRITERS[name](made)
        made.step(7)
        return [bits(p) for p in made.model.parameters()]

    same_with_slices(run, beyond(LIMIT))


def test_a_write_to_a_gradient_comes_after_the_step(beyond: Callable[[str], int]) -> None:
    """`zero_grad(set_to_none=False)`, and gradients that are summed over two passes."""

    def run() -> list[Any]:
        made = begun(steps=0)
        for i in range(4):
            made.model(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(i))).square().mean().backward()
            made.optimizer.step()
            if i != 2:
                made.optimizer.zero_grad(set_to_none=False)
        return [bits(t) for p in made.model.parameters() for t in (p, p.grad)]

    same_with_slices(run, beyond(LIMIT))


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_a_graph_from_before_the_step(way: str, beyond: Callable[[str], int]) -> None:
    """As in plain torch: a saved tensor has been changed, which a fused step does not report."""

    def run() -> list[Any]:
        made = begun(**{way: True})
        loss = made.model(torch.randn(16, WIDTH)).square().mean()
        loss.backward(retain_graph=True)
        made.optimizer.step()
        if way == "foreach":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
        return [bits(p.grad) for p in made.model.parameters()]

    same_with_slices(run, beyond(LIMIT))


def test_hooks_see_the_step(beyond: Callable[[str], int]) -> None:
    def run() -> list[Any]:
        seen: list[Any] = []
        made = begun(steps=0)
        made.optimizer.register_step_post_hook(lambda *_: seen.append(bits(made.parameter())))
        averaged = torch.optim.swa_utils.AveragedModel(made.model)
        for i in range(3):
            made.step(i)
            averaged.update_parameters(made.model)
        return [*seen, *(bits(p) for p in averaged.parameters())]

    same_with_slices(run, beyond(LIMIT))


def test_the_end_of_the_budget(beyond: Callable[[str], int]) -> None:
    """In order, and by an exception."""
    want = [bits(p) for p in begun().model.parameters()]
    for error in (None, ValueError):
        try:
            with memmgr.budget(beyond(LIMIT), quiet=True):
                made, slices = waiting(begun)
                if error is not None:
                    raise error
        except ValueError:
            pass
        assert slices > 0 and [bits(p) for p in made.model.parameters()] == want
        del made


def _bytes_of_cells() -> int:
    return sum(cell["nbytes"] for cell in native.load().cells())


def test_a_model_that_has_gone_takes_nothing(beyond: Callable[[str], int]) -> None:
    """One after the other in one budget, as in a search for hyperparameters."""
    with memmgr.budget(beyond(LIMIT), quiet=True):
        older = _bytes_of_cells()
        slices = 0
        for _ in range(4):
            made, more = waiting(begun)
            gone = weakref.ref(made.parameter())
            del made
            gc.collect()
            assert gone() is None
            slices += more
        assert slices > 0
        for _ in range(2):  # slices that the first leaves end with the second
            x = nn.Parameter(torch.ones(4))
            (x * 2).sum().backward()
            del x
        gc.collect()
        native.load().drain()
        left = _bytes_of_cells() - older
    assert left < 100_000, f"{left:,} bytes are held for a step that nobody will see"


def test_what_fails_fails_where_it_is_needed(beyond: Callable[[str], int]) -> None:
    """And once: a step that has failed in its middle is not done again."""
    calls: list[int] = []

    def broken() -> None:
        calls.append(1)
        raise ValueError("broken")

    with memmgr.budget(beyond(LIMIT), quiet=True):
        t = torch.zeros(4096)
        assert native.load().add_pending(broken, [t.data])
        for again in (False, True):
            if again:
                assert float(t.sum()) == 0
            else:
                with pytest.raises(ValueError, match="broken"):
                    t.sum()
    assert calls == [1]


def test_an_interrupt_comes_after_the_slice(beyond: Callable[[str], int]) -> None:
    """A program that saves its state when Ctrl-C comes: the slice is whole, and the interrupt is raised in its reader."""
    handler = signal.getsignal(signal.SIGINT)
    with memmgr.budget(beyond(LIMIT), quiet=True):
        t = torch.zeros(4096)

        def step(data: torch.Tensor) -> None:
            data.add_(1)
            signal.raise_signal(signal.SIGINT)
            for _ in range(100):  # Python looks for signals where a loop goes round
                data.add_(1)

        assert native.load().add_pending(functools.partial(step, t.data), [t.data])
        with pytest.raises(KeyboardInterrupt):
            t.sum()
        assert float(t[0]) == 101
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_slice_is_not_compiled(beyond: Callable[[str], int]) -> None:
    """In a frame that Dynamo has given up on, called functions are compiled; a step is not, as in plain torch."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    def run() -> list[Any]:
        made = begun(steps=0, foreach=True)

        def forward(x: torch.Tensor) -> torch.Tensor:
            for layer in made.model:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

        compiled = torch.compile(forward, backend=backend)
        for i in range(3):
            compiled(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(i))).square().mean().backward()
            made.optimizer.step()
            made.optimizer.zero_grad()
        return [bits(p) for p in made.model.parameters()]

    want, plain = run(), [*graphs]
    torch._dynamo.reset()
    graphs.clear()
    with memmgr.budget(beyond(LIMIT), quiet=True):
        got, slices = waiting(run)
    assert slices > 0 and got == want and graphs == plain


def test_a_slice_that_ends_while_torch_exports(monkeypatch: pytest.MonkeyPatch, beyond: Callable[[str], int]) -> None:
    """It reads parameters under a flag by which optimizers compute with tensors instead of numbers."""
    want = [bits(p) for p in begun(foreach=True).model.parameters()]
    with memmgr.budget(beyond(LIMIT), quiet=True):
        made, slices = waiting(lambda: begun(foreach=True))
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
        got = [bits(p) for p in made.model.parameters()]
        assert torch.compiler.is_compiling() is True
    assert slices > 0 and got == want


def test_a_step_that_cannot_be_fails_in_its_call(beyond: Callable[[str], int]) -> None:
    """A state of another shape, as a checkpoint of another model leaves it."""
    with memmgr.budget(beyond(LIMIT), quiet=True):
        made = begun(foreach=True)
        made.model(torch.randn(16, WIDTH)).square().mean().backward()
        made.states()["exp_avg"] = torch.zeros(3)
        with pytest.raises(RuntimeError, match="must match the size"):
            made.optimizer.step()


def test_what_was_handed_out_does_not_wait(beyond: Callable[[str], int]) -> None:
    """A reader with an address reads without an op."""
    want = begun().parameter().detach().clone()
    with memmgr.budget(beyond(LIMIT), quiet=True):
        made = begun(steps=0)
        seen = made.parameter().detach().numpy()
        made.step(0)
        made.step(1)
        assert np.array_equal(seen, want.numpy())


def test_what_is_pinned_does_not_wait(beyond: Callable[[str], int]) -> None:
    """`memmgr.pin` is for addresses that no reader has handed out."""
    with memmgr.budget(beyond(LIMIT), quiet=True):
        t = torch.zeros(4096)
        with memmgr.pin(t):
            assert not native.load().add_pending(lambda: None, [t.data])
        assert native.load().add_pending(lambda: None, [t.data])


class _Counting(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return op(*args, **(kwargs or {}))


class _Watching(TorchFunctionMode):
    def __torch_function__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta", "ignore:Sparse invariant checks"
)  # the latter: 2.11
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_of_a_parameter(layout: torch.layout, beyond: Callable[[str], int]) -> None:
    """Its values are the parameter's bytes, and it is made before the step."""

    def run() -> list[Any]:
        made = begun()
        values, at = made.parameter().detach().flatten(), torch.arange(WIDTH * WIDTH)
        if layout is torch.sparse_coo:
            sparse = torch.sparse_coo_tensor(at[None], values, check_invariants=False)
        else:
            sparse = torch.sparse_csr_tensor(
                torch.tensor([0, len(at)]), at, values, (1, len(at)), check_invariants=False
            )
        made.step(2)
        return [bits(sparse.to_dense()), bits(made.parameter())]

    want = same_with_slices(run, beyond("800kB"))
    assert want[0].data == want[1].data, "the values are a copy, so nothing is tested"


def test_slices_that_have_waited_do_so_where_nothing_is_away(beyond: Callable[[str], int]) -> None:
    """A plan may have all states there. A step that then waited for nothing was another sequence, with a plan of its own."""
    with memmgr.budget(beyond(LIMIT), quiet=True):
        made = begun()
        native.load().set_limit(beyond("2MB"))
        for i in range(2):
            made.step(i)
        assert native.load().stats()["absent_cells"] == 0
        assert waiting(lambda: made.step(2))[1] > 0


def test_a_mode_sees_the_step_in_its_block(beyond: Callable[[str], int]) -> None:
    with memmgr.budget(beyond(LIMIT), quiet=True):
        made = begun()
        for mode in (_Counting(), _Watching()):
            made.model(torch.randn(16, WIDTH)).square().mean().backward()
            before = native.load().stats()["pending_slices"]
            with mode:
                made.optimizer.step()
            assert native.load().stats()["pending_slices"] == before
            assert not isinstance(mode, _Counting) or mode.ops > 0
        with torch.device("cpu"):
            assert waiting(lambda: made.step(3))[1] > 0


def test_a_custom_op_that_knows_of_a_parameter(beyond: Callable[[str], int]) -> None:
    """It reads one, and writes to a tensor, that are not among its arguments: in a compiled region, too."""
    known: dict[str, torch.Tensor] = {}

    @torch.library.custom_op("memmgr_pending::knowing", mutates_args=())
    def knowing(x: torch.Tensor) -> torch.Tensor:
        known["count"].add_(1)
        return x * known["weight"].detach().sum()

    def run(in_region: bool) -> list[Any]:
        made = begun()
        known.update(weight=made.parameter(), count=torch.zeros(WIDTH, WIDTH))
        found = []
        for i in range(3):
            x = torch.ones(4)
            region = native.load().pin([x], region=True) if in_region else None
            found.append(bits(knowing(x)))
            del region
            made.step(i)
        return [*found, bits(known["count"])]

    try:
        want = run(False)
        for in_region in (False, True):
            with memmgr.budget(beyond(LIMIT), quiet=True):
                got, slices = waiting(functools.partial(run, in_region))
                known.clear()
            assert slices > 0 and got == want
    finally:
        known.clear()


def _broken(data: torch.Tensor) -> tuple[Callable[[], None], list[torch.Tensor]]:
    def run() -> None:
        raise ValueError(f"broken: {data.shape}")

    return run, [data]


def test_what_fails_where_nobody_can_be_told(beyond: Callable[[str], int]) -> None:
    """Before a fork, and at the first op of a thread that was not seen: the op that needs the result gets the error,
    and the rest is done."""

    def fork() -> None:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)

    def unseen() -> None:
        ended = threading.Event()
        _thread.start_new_thread(lambda: (torch.ones(3) * 2, ended.set()), ())
        assert ended.wait(60)

    for call in (fork, unseen):
        with memmgr.budget(beyond(LIMIT), quiet=True):
            tensors = [torch.zeros(4096) for _ in range(3)]
            assert native.load().add_pending(*_broken(tensors[0].data))
            for t in tensors[1:]:
                assert native.load().add_pending(functools.partial(t.data.fill_, 1), [t.data])
            call()
            with pytest.raises(ValueError, match="broken"):
                tensors[0].sum()
            assert [float(t.sum()) for t in tensors] == [0, 4096, 4096]


def test_what_fails_at_the_end_of_a_budget(beyond: Callable[[str], int]) -> None:
    """The rest is done all the same, and nothing of it waits for the next budget."""

    tensors = [torch.zeros(4096) for _ in range(4)]
    with pytest.raises(ValueError, match="broken"), memmgr.budget(beyond(LIMIT), quiet=True):
        for t in tensors:
            added = functools.partial(t.data.add_, 1)
            assert native.load().add_pending(*(_broken(t.data) if t is tensors[1] else (added, [t.data])))
    assert [float(t[0]) for t in tensors] == [1, 0, 1, 1]
    with memmgr.budget(beyond(LIMIT), quiet=True):
        assert [float(t[0]) for t in tensors] == [1, 0, 1, 1]
        native.load().let_slices_wait(False)  # as when it ends: another thread may be in the middle of a step
        assert not native.load().add_pending(lambda: None, [tensors[0].data])


def test_threads_that_step_the_same_parameters(beyond: Callable[[str], int]) -> None:
    """Hogwild: the values of the parameters are not determined, but no step is lost."""
    with memmgr.budget(beyond(LIMIT), quiet=True):
        made = begun()
        optimizers = [torch.optim.AdamW(made.model.parameters(), fused=True) for _ in range(3)]

        def train(optimizer: torch.optim.Optimizer) -> None:
            for _ in range(12):
                made.model(torch.randn(16, WIDTH)).square().mean().backward()
                optimizer.step()

        in_threads(train, optimizers)
        assert {float(o.state[p]["step"]) for o in optimizers for p in made.model.parameters()} == {12.0}


def test_small_tensors_do_not_wait(monkeypatch: pytest.MonkeyPatch, beyond: Callable[[str], int]) -> None:
    """They are never evicted, so code that reads one sees the step when it is done, also through references from before
    the budget."""
    monkeypatch.setenv("MEMMGR_PAGER_SMALL", "1000")  # a bias has 384 bytes
    want = bits(list(begun().model)[-2].bias)
    made = begun(steps=0)
    seen = list(made.model)[-2].bias.detach().numpy()
    with memmgr.budget(beyond(LIMIT), quiet=True):
        _, slices = waiting(lambda: [made.step(i) for i in range(2)])
        assert slices > 0 and bits(torch.from_numpy(seen.copy())) == want


def test_threads_meet_at_one_slice(beyond: Callable[[str], int]) -> None:
    """Four read tensors that one of them has to make; a waiting thread does not hold the GIL."""
    want = [bits(p) for p in begun().model.parameters()]
    for _ in range(5):
        with memmgr.budget(beyond(LIMIT), quiet=True):
            made, slices = waiting(begun)
            barrier = threading.Barrier(4)
            found: list[list[Any]] = []

            def read(made: Training = made, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                found.append([bits(p.detach() * 1) for p in made.model.parameters()])

            in_threads(lambda _: read(), range(4))
        assert slices > 0 and len(found) == 4 and all(f == want for f in found)
        del made


def test_what_all_fits_does_not_wait() -> None:
    """No tensor of the step is absent, so nothing would be gained; gradients would live longer."""
    with memmgr.budget("1GB", quiet=True):
        native.load().set_slice_bytes(1000)
        _, slices = waiting(begun)
    assert slices == 0


def test_saved_while_training_goes_on(beyond: Callable[[str], int], tmp_path: Path) -> None:
    """Checkpoint and resume, in plain torch and in a budget: the same file's contents, the same training after it."""

    def run(name: str) -> list[Any]:
        made = begun()
        torch.save({"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict()}, tmp_path / name)
        made.step(5)
        saved = torch.load(tmp_path / name)
        again = begun(steps=0)
        again.model.load_state_dict(saved["model"])
        again.optimizer.load_state_dict(saved["optimizer"])
        again.step(5)
        pairs = zip(made.model.parameters(), again.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        return [bits(t) for t in (*saved["model"].values(), *again.model.parameters())]

    want = run("plain")
    with memmgr.budget(beyond(LIMIT), quiet=True):
        got, slices = waiting(lambda: run("managed"))
    assert slices > 0 and got == want
