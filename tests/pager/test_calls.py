"""Plans without a backward: a call of the model is the period, and the next one's weights come back by its order."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memmgr
from memmgr import _budget
from memmgr.native import pager

pytestmark = pytest.mark.filterwarnings("error:memmgr")

WIDTH, LAYERS = 256, 12
CALL = nn.Module.__call__


@pytest.fixture(autouse=True)
def _sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tensors count, and what ops take hangs on what they are, not on what else the machine does."""
    monkeypatch.setenv("MEMMGR_PAGER_SMALL", "16384")
    native = pager.load()
    native.count_ticks(3000)
    yield
    native.count_ticks(0)


class Decoder(nn.Module):
    """Layers of the same class as what is in them, and a cache that is longer after every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.GELU())) for _ in range(LAYERS)
        )
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if len(self.cache) <= i:
                self.cache.append(torch.zeros(32, WIDTH))
            self.cache[i] = torch.cat([self.cache[i], x])
            x = x + torch.softmax(x @ self.cache[i].T, -1) @ self.cache[i]
        return x / x.norm()


def weights() -> int:
    return sum(p.nbytes for p in Decoder().parameters())


def plans() -> None:
    """The plan that is being made is there."""
    runtime: Any = _budget.current()
    runtime.plans.close()


def generated(model: nn.Module, calls: int, each: Callable[[], None] = lambda: None) -> list[Tensor]:
    x = torch.ones(1, WIDTH)
    made = []
    with torch.no_grad():
        for _ in range(calls):
            x = model(x)
            made.append(x.clone())
            each()
    return made


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().eval()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_call_of_the_model_is_a_period() -> None:
    plain = generated(decoder(), 12)
    model = decoder()
    figures = []
    with memmgr.budget(weights() // 2, quiet=True) as mm:

        def each() -> None:
            plans()
            figures.append(mm.stats())

        made = generated(model, 12, each)
    assert same(made, plain)
    last = figures[-1]
    assert last["plans"] >= 1 and last["planned_passes"] >= 5
    assert last["resident_bytes.peak"] <= last["budget_bytes"]
    assert last["reads_ahead"] - figures[-2]["reads_ahead"] >= LAYERS // 4
    assert last["passes"] == 12
    assert "__call__" not in vars(Decoder)


def test_weights_that_stay_are_not_scanned() -> None:
    """Malloc's own order lets go of what comes next; the plan keeps what fits and streams the rest."""

    def read(**options: Any) -> int:
        model, figures = decoder(), []
        with memmgr.budget(int(weights() * 0.7), quiet=True, **options) as mm:

            def each() -> None:
                plans()
                figures.append(mm.stats()["reload_bytes"])

            generated(model, 10, each)
        return figures[-1] - figures[-2]

    assert read() < 0.8 * read(_plan=False)


def test_a_training_has_periods_of_its_own() -> None:
    """The first call has gradients: nothing looks at calls any more."""
    model = decoder()
    with memmgr.budget(weights() // 2, quiet=True) as mm:
        model(torch.ones(1, WIDTH)).sum().backward()
        assert torch.nn.Module.__call__ is CALL
        assert "__call__" not in vars(Decoder)
        model.cache.clear()
        generated(model, 2)
    assert mm.stats()["passes"] == 1


def test_validation_before_a_training() -> None:
    def run() -> tuple[list[Tensor], list[Tensor]]:
        model = decoder()
        made = generated(model, 5)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(6):
            model.cache.clear()
            model(torch.ones(1, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.cache.clear()
        return made, [p.detach().clone() for p in model.parameters()]

    plain = run()
    with memmgr.budget(2 * weights(), quiet=True) as mm:
        managed = run()
    assert all(same(a, b) for a, b in zip(plain, managed, strict=True))
    assert mm.stats()["passes"] == 5 + 6


def test_a_budget_that_opens_inside_of_a_call() -> None:
    """As `memmgr run` does at the first call of a module: what is called next is a part of it."""
    model = decoder()
    plain = generated(decoder(), 8)
    budget = memmgr.budget(weights() // 2, quiet=True)
    handle = model.register_forward_pre_hook(lambda *_: None if budget_open else enter())
    budget_open = False

    def enter() -> None:
        nonlocal budget_open
        budget_open = True
        budget.__enter__()

    made = generated(model, 8)
    assert "__call__" in vars(Decoder) and "__call__" not in vars(nn.Linear)
    assert "__call__" not in vars(nn.Sequential)
    budget.__exit__(None, None, None)
    handle.remove()
    assert same(made, plain)
    assert "__call__" not in vars(Decoder)


def test_what_is_called_can_be_copied_and_saved() -> None:
    model = decoder()
    with memmgr.budget(weights() // 2, quiet=True):
        made = generated(model, 4)
        model.cache.clear()
        again = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        del model
        assert same(generated(again, 4), made)
    file.seek(0)
    assert same(generated(torch.load(file, weights_only=False), 4), made)


def test_a_call_that_fails_is_no_period() -> None:
    model = decoder()
    with memmgr.budget(weights() // 2, quiet=True):
        made = generated(model, 3)
        for _ in range(3):
            with torch.no_grad(), pytest.raises(RuntimeError, match="shapes"):
                model(torch.ones(1, WIDTH + 1))
        made += generated(model, 3)
    model = decoder()
    assert same(made, generated(model, 3) + generated(model, 3))


class Encoder(nn.Module):
    """Another model, called once before the other's loop."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def test_several_models_and_what_prepares_their_input() -> None:
    """As in a pipeline: a transform without weights, called with gradients on; one model once; another in a loop."""

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        encoder = Encoder()
        nn.Identity()(torch.ones(3))
        model = decoder()
        with torch.no_grad():
            x = encoder(torch.ones(1, WIDTH))
            x = encoder(x)
            made = [x]
            for _ in range(10):
                made.append(model(made[-1]))
                plans() if _budget.current() is not None else None
        return made

    plain = run()
    with memmgr.budget(weights() // 2, quiet=True) as mm:
        made = run()
        assert mm.stats()["planned_passes"] >= 4
        assert "__call__" in vars(Encoder) and "__call__" in vars(Decoder) and "__call__" not in vars(nn.Linear)
    assert same(made, plain)
    assert "__call__" not in vars(Encoder)
    assert torch.nn.Module.__call__ is CALL


def test_threads_that_call_the_same_model() -> None:
    """Their ops are mixed up, so there is no order to plan; no call is told of it."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    x = torch.ones(1, WIDTH)
    with torch.no_grad():
        plain = model(x)
    wrong: list[Any] = []

    def serve() -> None:
        try:
            with torch.no_grad():
                wrong.extend([None] * sum(not torch.equal(model(x), plain) for _ in range(20)))
        except BaseException as error:
            wrong.append(error)

    with memmgr.budget(weights() // 2, quiet=True):
        threads = [threading.Thread(target=serve) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_what_is_compiled_runs_through_a_call_that_is_told() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x = torch.ones(1, WIDTH)

    @torch.compile(fullgraph=True, backend="eager")
    def twice(x: Tensor) -> Tensor:
        return model(model(x))  # type: ignore[no-any-return]

    with torch.no_grad(), memmgr.budget("64MB", quiet=True):
        plain = model(model(model(x)))
        assert "__call__" in vars(nn.Sequential)
        assert torch.equal(model(twice(x)), plain)
        assert torch.equal(torch.compile(model, backend="eager")(model(model(x))), plain)


def test_what_was_compiled_before() -> None:
    """No warning of ours or of torch's, and the same numbers."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    compiled, x = torch.compile(model, backend="eager"), torch.ones(1, WIDTH)
    with torch.no_grad():
        plain = model(x)
        with memmgr.budget("64MB", quiet=True):
            assert torch.equal(compiled(x), plain)
            assert torch.equal(compiled(x), plain)
            traced = torch.fx.symbolic_trace(model)  # which has a `Module.__call__` of its own meanwhile
            assert torch.equal(traced(x), plain)
            assert torch.equal(model(x), plain)
    assert torch.nn.Module.__call__ is CALL
    assert torch.equal(model(x), plain)
