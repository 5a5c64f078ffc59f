"""Rule 9 for uses of tensors outside of ops: saving, sharing, other layouts, scripts, writes to storages."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memmgr
from memmgr.native import binding as native
from memmgr.readers import captures
from memmgr.readers.patches import Patches
from memmgr.readers.raw import RawReaders


@pytest.fixture
def pager() -> Iterator[native.Pager]:
    with memmgr.budget("1GB", quiet=True, verify=True):
        yield native.load()


def _numbers() -> torch.Tensor:
    return torch.arange(4096, dtype=torch.float32) * 1.5


def _away(pager: native.Pager, tensor: torch.Tensor) -> torch.Tensor:
    assert pager.take_away(tensor, 1) > 0
    return tensor


def _nothing_is_pinned(pager: native.Pager) -> None:
    gc.collect()
    pager.drain()
    assert not [cell for cell in pager.cells() if cell["pins"] and not cell["small"]]


STORAGE_WRITES: dict[str, Callable[[torch.UntypedStorage], Any]] = {
    "fill_": lambda s: s.fill_(0),
    "[]=": lambda s: s.__setitem__(5, 77),
    "[:]=": lambda s: s.__setitem__(slice(0, 16), 3),
    "copy_": lambda s: s.copy_(torch.UntypedStorage(s.nbytes()).fill_(1)),
    "byteswap": lambda s: s.byteswap(torch.float32),
}


@pytest.mark.parametrize("name", STORAGE_WRITES)
def test_a_write_to_a_storage_counts(pager: native.Pager, name: str) -> None:
    """An evicted tensor has the old bytes, later ones the new, and the tier's old copy is not used for them."""
    plain = _numbers()
    STORAGE_WRITES[name](plain.untyped_storage())
    x = _numbers() + 0
    y = x * nn.Parameter(torch.ones(4096))
    assert pager.take_away(y, 0) > 0
    _away(pager, x)
    STORAGE_WRITES[name](x.untyped_storage())
    _away(pager, x)
    assert torch.equal(y.detach(), _numbers())
    assert torch.equal(x.view(torch.int32), plain.view(torch.int32))
    _nothing_is_pinned(pager)


def test_a_compiled_graph_writes_only_the_inputs_that_torch_lists(pager: native.Pager) -> None:
    """The graph is not paged. A write voids the copy in the tier."""
    read, written, constant = tensors = [_away(pager, _numbers() + 0) for _ in range(3)]
    readers = RawReaders(pager, Patches(), SimpleNamespace(paged=lambda graph: False))  # type: ignore[arg-type]
    graph = SimpleNamespace(mutated_input_idxs=[1, 5], constants={"constant": constant})
    seen = []

    def compiled(graph: Any, inputs: list[torch.Tensor]) -> str:
        seen.extend(pager.describe(tensor) for tensor in tensors)
        return "result"

    assert readers._unpaged_graph(compiled)(graph, [read, written]) == "result"
    assert all(cell and cell["residency"] == "resident" and cell["pins"] > 0 for cell in seen) and len(seen) == 3
    assert [cell["clean"] for cell in map(pager.describe, tensors) if cell] == [True, False, True]
    _nothing_is_pinned(pager)


def test_a_typed_storage_writes(pager: native.Pager) -> None:
    x = _away(pager, _numbers() + 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x.storage()[7] = 100.0
        assert x.storage()[7] == 100.0
    assert x[7].item() == 100.0


def test_an_optimizer_and_its_states(pager: native.Pager) -> None:
    model = nn.Linear(64, 64)
    opt = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    opt.step()
    want = [state["exp_avg"].clone() for state in opt.state.values()]
    for state in opt.state.values():
        pager.take_away(state["exp_avg"], 1)
    found = copy.deepcopy(opt.state_dict())["state"]
    for state in opt.state.values():
        pager.take_away(state["exp_avg"], 1)
    again = copy.deepcopy(opt)
    for i, w in enumerate(want):
        assert torch.equal(found[i]["exp_avg"], w)
    for state, w in zip(again.state.values(), want, strict=True):
        assert torch.equal(state["exp_avg"], w)
    _nothing_is_pinned(pager)


@pytest.fixture
def tied_model() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=128, n_layer=6, n_head=4, n_positions=64, vocab_size=2000)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def test_save_pretrained_of_a_model_larger_than_the_budget(tied_model: Any, tmp_path: Path, large_only: None) -> None:
    """Its finders of shared tensors compare addresses: no two look shared, the tied ones do, and nothing stays pinned."""
    want = {k: v.clone() for k, v in tied_model.state_dict().items()}
    size = sum(p.numel() * 4 for p in tied_model.parameters())
    pager = native.load()
    with memmgr.budget(int(size * 0.6), quiet=True):
        tied_model.save_pretrained(tmp_path)
        assert pager.stats()["escaped_bytes"] == 0, memmgr.stats()["escaped"]
        _nothing_is_pinned(pager)
    found = type(tied_model).from_pretrained(tmp_path)
    assert found.lm_head.weight is found.transformer.wte.weight
    for k, v in found.state_dict().items():
        assert torch.equal(v, want[k]), k


def test_safetensors_files_of_a_model_larger_than_the_budget(
    tmp_path: Path, large_only: None, beyond: Callable[[str], int]
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    tied = nn.ModuleDict({"a": model, "b": model[0]})
    want = {k: v.clone() for k, v in model.state_dict().items()}
    pager = native.load()
    with memmgr.budget(beyond("1.3MB"), quiet=True):
        safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
        safetensors.save_model(tied, str(tmp_path / "tied.safetensors"))
        assert pager.stats()["escaped_bytes"] == 0
        _nothing_is_pinned(pager)
        for p in model.parameters():
            p.data.zero_()
        safetensors.load_model(tied, str(tmp_path / "tied.safetensors"))
        found = model.state_dict()
        assert all(torch.equal(found[k], v) for k, v in want.items())
        _nothing_is_pinned(pager)
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[k], v) for k, v in want.items())


def _double(queue: Any, done: Any) -> None:
    t = queue.get()
    t.mul_(2)
    done.put(float(t.sum()))


def test_a_queue_shares_the_bytes(pager: native.Pager) -> None:
    """The child writes to its argument: the address is shared, and tensors made before keep their bytes."""
    import torch.multiprocessing as mp

    context = mp.get_context("fork")
    queue, done = context.Queue(), context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fork beside threads, from Python 3.12 on
        child = context.Process(target=_double, args=(queue, done))
        child.start()
    x = _numbers() + 0
    y = x * nn.Parameter(torch.ones(4096))
    assert pager.take_away(y, 0) > 0
    _away(pager, x)
    queue.put(x)
    assert done.get(timeout=60) == float(_numbers().sum() * 2)
    child.join(60)
    assert torch.equal(x, _numbers() * 2)
    assert torch.equal(y.detach(), _numbers())
    assert pager.take_away(x) == 0


def _nested(t: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        nested = torch.nested.as_nested_tensor([t[:1024].view(16, 64), t[1024:1536].view(8, 64)])
    return (nested * 2).to_padded_tensor(0.0)


def _jagged(t: torch.Tensor) -> torch.Tensor:
    jagged = torch.nested.nested_tensor_from_jagged(t.view(64, 64), torch.tensor([0, 10, 64]))
    return (jagged * 2).values()


def _loop(t: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(t)
    for i in range(3):
        total = total + t.sin() * i
    return total


def _scripted(t: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.jit.script(_loop)(t)
    return result


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nested": _nested,
    "jagged": _jagged,
    "csr": lambda t: t.view(64, 64).to_sparse_csr().matmul(torch.ones(64, 64)),
    "coo": lambda t: t.view(64, 64).to_sparse().coalesce().mul(2).to_dense(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.5, 3, torch.quint8).dequantize(),
    "quantized by channel": lambda t: (
        torch.quantize_per_channel(t.view(64, 64), torch.full((64,), 0.5), torch.zeros(64), 0, torch.qint8)
        .int_repr()
        .float()
    ),
    "mkldnn": lambda t: (t.view(64, 64).to_mkldnn() + t.view(64, 64).to_mkldnn()).to_dense(),
    "script": _scripted,
    "complex": lambda t: torch.view_as_real(torch.view_as_complex(t.view(2048, 2)).conj() * 2j),
    "__dlpack__": lambda t: torch.from_dlpack(t) * 2,
    "to_dlpack": lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t)) * 2,
    "numpy": lambda t: torch.from_numpy(t.numpy() * 2),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # prototypes, deprecated and in beta
@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts(name: str) -> None:
    """The same with everything leaving after every op."""
    want = LAYOUTS[name](_numbers())
    with memmgr.budget("1GB", policy="torture", quiet=True) as mm:
        found = LAYOUTS[name](_numbers() + 0)
        assert torch.equal(found, want)
        assert mm.stats()["offloads"] + mm.stats()["evictions"] > 0


def test_a_graph_object_that_was_never_captured_keeps_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.cuda.CUDAGraph: it has a pool once a capture has ended."""

    class Graph:
        captured = False

        def pool(self) -> tuple[int, int]:
            if not self.captured:
                raise RuntimeError("without a preceding successful capture")
            return 0, 1

    monkeypatch.setattr(captures, "graph_classes", lambda device: [Graph])
    graph, device = Graph(), torch.device("cpu")
    assert not captures.captured_earlier([graph, object()], device)
    graph.captured = True
    assert captures.captured_earlier([object(), graph], device)


def test_reads_while_the_budget_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may read an absent tensor until all are restored."""
    pager, tensor = native.load(), torch.arange(4096.0)
    close, read = pager.close, []

    def reads_and_closes() -> None:
        assert pager.take_away(tensor, 1) > 0
        read.append(pickle.loads(pickle.dumps(tensor)))
        close()

    monkeypatch.setattr(pager, "close", reads_and_closes)
    with memmgr.budget("1GB", quiet=True):
        tensor.add_(1)
    assert torch.equal(read[0], torch.arange(4096.0) + 1)


def test_two_that_wait_for_the_same_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finder asks all others, and would ask itself through the other."""
    (tmp_path / "memmgr_late.py").write_text("number = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    first, second = Patches(), Patches()
    for patches in (first, second):
        patches.when_imported("memmgr_late", lambda module: setattr(module, "number", module.number * 10))
    try:
        assert importlib.import_module("memmgr_late").number == 100
    finally:
        sys.modules.pop("memmgr_late", None)
        first.undo()
        second.undo()


def test_saved_tensors_that_may_be_changed_are_compared(pager: native.Pager) -> None:
    """allow_mutation_on_saved_tensors tells by its address which saved tensor is about to change."""

    def gradient(leave: bool) -> torch.Tensor:
        w = nn.Parameter(_numbers() / 4096)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            h = w.sin()
            y = h.exp()
            z = y * h
            if leave:
                for tensor in (h, y):
                    _away(pager, tensor)
            y.mul_(2)
            h.zero_()
            (z + y).sum().backward()
        assert w.grad is not None
        return w.grad

    leaving = gradient(True)
    assert memmgr.stats()["escapes"] == 0
    assert torch.equal(leaving, gradient(False))
    _nothing_is_pinned(pager)
