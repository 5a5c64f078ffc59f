"""Scenarios of the tests of this folder, each in a process of its own. A function returns a value that JSON can carry."""

from __future__ import annotations

import copy
import ctypes
import gc
import hashlib
import io
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from budget import models
from driver import build, device_abi
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from memdev import Handles, prompt_ops, start

DEVICE = "memdev"
STEPS = 3

Case = tuple[nn.Module, list[Tensor], Callable[..., Tensor]]


def mlp() -> Case:
    """Linear, GELU, layer norm, cross entropy."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 10))
    return model, [torch.randn(8, 16), torch.randint(10, (8,))], lambda m, x, y: F.cross_entropy(m(x), y)


def gpt(width: int = 32, context: int = 16, batch: int = 4) -> Case:
    """The demo's GPT, tiny: embeddings, attention, dropout."""
    config = models._gpt.GPTConfig(layers=2, heads=2, width=width, context=context, dropout=0.1)
    tokens, targets = torch.randint(256, (batch, context)), torch.randint(256, (batch, context))
    return models._gpt.GPT(config), [tokens, targets], lambda m, x, y: m(x, y)


def convnet(width: int = 4, blocks: int = 1, batch: int = 4) -> Case:
    """The demo's residual convnet, tiny: batch norm, whose statistics move in a hidden write."""
    images, labels = torch.randn(batch, 3, 16, 16), torch.randint(10, (batch,))
    return models._convnet.ConvNet(width=width, stages=2, blocks=blocks), [images, labels], lambda m, x, y: m(x, y)


def pooled() -> Case:
    """Strided convolution, max pooling, dropout."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(72, 10)),
    )
    images, labels = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    return model, [images, labels], lambda m, x, y: F.cross_entropy(m(x), y)


def _train(make: Callable[[], Case], device: str, **options: Any) -> str:
    """A digest of the losses and of all that training leaves behind."""
    torch.manual_seed(0)
    model, batch, loss_of = make()
    model.to(device)
    batch = [t.to(device) for t in batch]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    losses = []
    with sdpa_kernel(SDPBackend.MATH):  # the CPU has a fused kernel that other devices do not
        for _ in range(STEPS):
            loss = loss_of(model, *batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())  # nothing waits for the device before the end
    sha = hashlib.sha256(str([loss.item().hex() for loss in losses]).encode())
    states = [t for state in optimizer.state_dict()["state"].values() for t in state.values()]
    for tensor in [*model.parameters(), *model.buffers(), *states]:
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    sha.update(torch.get_rng_state().numpy().tobytes())
    return sha.hexdigest()


def train(mode: str, seed: int, devices: list[str]) -> dict[str, Any]:
    """Every model on every device of ``devices``; digests, and which ops made the program wait."""
    handles = start(mode, seed)
    result: dict[str, Any] = {}
    for make in (mlp, gpt, convnet, pooled):
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True})[: 3 if make is mlp else 1]:
            name = f"{make.__name__} {next(iter(options))}={next(iter(options.values()))}"
            result[name] = {device: _train(make, device, **options) for device in devices}
    torch.accelerator.synchronize()
    return {"digests": result, "prompt_ops": prompt_ops(), "launches": handles.lib.memdev_launches()}


# ---- asynchrony --------------------------------------------------------------------------------------------------


def settle() -> None:
    """Frees dead tensors, and the memory that finished work holds."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.zeros(1, device=DEVICE).add_(1)  # the next launch frees it
    torch.accelerator.synchronize()


def outstanding(handles: Handles, what: bytes) -> int:
    """How many there are now; see fake_outstanding."""
    ask = handles.fake.fake_outstanding
    ask.restype = ctypes.c_uint64
    return int(ask(what))


def page_locked(handles: Handles) -> int:
    """Ranges of page-locked memory, without the one that each device keeps for the results of the core's kernels."""
    calls = handles.fake.fake_call_count
    calls.restype = ctypes.c_uint64
    return outstanding(handles, b"host") - int(calls(b"cuModuleLoadData"))


def queued(handles: Handles) -> int:
    """Tasks that have not run."""
    return outstanding(handles, b"work")


def lateness(handles: Handles) -> dict[str, Any]:
    """Nothing runs before a wait, and backward is launched by a thread of its own."""
    w = torch.ones(4, 4).to(DEVICE).requires_grad_()
    torch.accelerator.synchronize()
    at_rest = queued(handles)
    seen = {}
    w.register_hook(lambda grad: seen.update(thread=threading.get_ident(), waiting=queued(handles)))
    loss = (w @ w).relu().sum()
    forward = queued(handles)
    loss.backward()
    backward = queued(handles)
    other = torch.Stream(device=DEVICE)
    other.synchronize()
    untouched = queued(handles)
    value = loss.item()  # waits for the forward and for work queued since
    return {
        "at_rest": at_rest,
        "forward": forward,
        "hook": seen["waiting"],
        "backward": backward,
        "after_another_stream": untouched,
        "after_item": queued(handles),
        "value": value,
        "gradient": w.grad.cpu().tolist(),
        "own_thread": seen["thread"] != threading.get_ident(),
    }


def waits(handles: Handles) -> dict[str, list[float]]:
    """A consumer on one stream of a tensor that a producer makes on another, with each kind of wait and with none."""
    result = {}
    for how in ("none", "stream", "event", "synchronize"):
        a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
        with a:
            x = torch.full((4,), 2.0, device=DEVICE)
            y = x * 3
        if how == "stream":
            b.wait_stream(a)
        elif how == "event":
            b.wait_event(a.record_event())
        elif how == "synchronize":
            a.synchronize()
        with b:
            result[how] = (y + 1).cpu().tolist()
    return result


def freed_early(handles: Handles) -> dict[str, list[float]]:
    """A block is freed, and used anew on its home stream, while another stream still has to read it."""
    result = {}
    home, reader = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
    for how in ("forgotten", "recorded"):
        x = torch.full((4,), 2.0, device=DEVICE)
        reader.wait_stream(home)
        with reader:
            y = x + 1
        if how == "recorded":
            x.record_stream(reader)
        address = x.data_ptr()
        del x
        z = torch.full((4,), 7.0, device=DEVICE)
        assert z.data_ptr() == address, "the block was not used again: this shows nothing"
        home.synchronize()
        assert z.cpu().tolist() == [7.0] * 4
        with reader:
            result[how] = y.cpu().tolist()
    return result


def copies(handles: Handles) -> dict[str, Any]:
    """When copies read and write host memory."""
    result: dict[str, Any] = {}
    host = torch.zeros(4)
    x = torch.full((4,), 5.0, device=DEVICE)
    host.copy_(x, non_blocking=True)
    result["to host, not waited for"] = host.tolist()
    torch.accelerator.synchronize()
    result["to host, waited for"] = host.tolist()
    result["to host, blocking"] = torch.full((4,), 6.0, device=DEVICE).cpu().tolist()

    pageable = torch.ones(4)
    y = pageable.to(DEVICE, non_blocking=True)
    pageable.fill_(9)
    result["from pageable memory"] = y.cpu().tolist()

    page_locked = torch.ones(4).pin_memory()
    result["is_pinned"] = page_locked.is_pinned() and not pageable.is_pinned()
    z = page_locked.to(DEVICE, non_blocking=True)
    page_locked.fill_(9)  # a mistake: the copy has not run
    result["from page-locked memory, too early"] = z.cpu().tolist()
    z = page_locked.to(DEVICE)
    page_locked.fill_(3)
    result["from page-locked memory, blocking"] = z.cpu().tolist()

    z = torch.full((4,), 8.0).pin_memory().to(DEVICE, non_blocking=True)  # the source's last name is gone
    result["from page-locked memory that was freed"] = z.cpu().tolist()
    torch.zeros(1, device=DEVICE)
    torch.accelerator.synchronize()
    torch.zeros(1, device=DEVICE).add_(1)  # the next launch frees the memory of finished work
    del page_locked
    result["page-locked ranges left"] = outstanding(handles, b"host")
    return result


def events(handles: Handles) -> dict[str, Any]:
    """Events of torch's generic kind."""
    stream = torch.Stream(device=DEVICE)
    event = torch.Event(device=DEVICE)
    result: dict[str, Any] = {"never recorded": event.query()}
    with stream:
        x = torch.ones(4, device=DEVICE)
        event.record(stream)
        inside = torch.accelerator.current_stream() == stream
    result["queued"] = event.query()
    event.synchronize()
    result["waited for"] = event.query()
    result["stream idle"] = stream.query()
    result["current inside"] = inside
    result["current outside"] = torch.accelerator.current_stream() == stream
    result["ids differ"] = stream.stream_id != torch.Stream(device=DEVICE).stream_id
    del x
    return result


def together() -> dict[str, Any]:
    """The scenarios that can share a process, in late mode."""
    handles = start("late")
    parts = (lateness, waits, freed_early, copies, events, features, hooks)
    return {part.__name__: part(handles) for part in parts}


# ---- tensors -----------------------------------------------------------------------------------------------------


def same_as_cpu() -> list[str]:
    """Views, in-place ops, out=, resizing, indexing, data-dependent sizes: the differences from the CPU."""
    start("random", 3)

    def views(device: str) -> list[Tensor]:
        x = torch.arange(24.0).reshape(2, 3, 4).to(device)
        y = x.transpose(0, 2)[1:, :, ::2]
        y.mul_(2)
        x[0, :, 1] += 5
        x.unfold(2, 2, 1).sum(-1)
        c = torch.view_as_complex(x[..., :2])
        c.conj_physical_()
        parts = x.split([1, 2], dim=1)
        return [x, y.contiguous(), c.conj() * 2, torch.view_as_real(c), parts[1].clone(), x.unbind(0)[1] + 1]

    def writes(device: str) -> list[Tensor]:
        x, out = torch.ones(3, 4).to(device), torch.empty(0).to(device)
        torch.add(x, 1, out=out)
        torch.mm(x, x.t(), out=out.resize_(3, 3))
        x.index_put_((torch.tensor([0, 2]).to(device),), torch.tensor(4.0).to(device))
        x[torch.tensor([True, False, True]).to(device)] = 7
        torch._foreach_add_([x, out], 1.0)
        x.clamp_(max=torch.tensor(6.0))  # a scalar from the CPU
        return [x, out]

    def resizing(device: str) -> list[Tensor]:
        x = torch.arange(6.0).to(device)
        kept = x.clone()
        kept.resize_(8)[6:] = 0
        shared = torch.empty(0).to(device).set_(x.untyped_storage(), 2, (2,), (1,))
        shared.add_(10)
        storage = x.clone().untyped_storage()
        other = torch.empty(0, device=device).set_(storage, 0, (6,), (1,))
        storage.resize_(0)
        storage.resize_(24)
        other.copy_(x)
        y = torch.zeros(2).to(device)
        y.data = x
        z = torch.zeros(3).to(device).set_()
        return [x, kept, other, y, z]

    def sized_by_data(device: str) -> list[Tensor]:
        x = torch.tensor([3, 0, 1, 3, 0]).to(device)
        return [x.nonzero(), x.unique(), x[x > 0], torch.tensor(x.max().item()), torch.tensor(torch.equal(x, x))]

    def drawn(device: str) -> list[Tensor]:
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(5)
        x = torch.empty(5, device=device).uniform_()
        kept = torch.empty(4).to(device).bernoulli_(0.5, generator=generator)
        picked = torch.multinomial(torch.ones(6).to(device), 3)
        return [
            x,
            kept,
            picked,
            torch.randn(3, device=device),
            torch.randperm(5, device=device),
            torch.randint(9, (4,), device=device),
        ]

    def optional(device: str) -> list[Tensor]:
        x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        y = F.batch_norm(x, None, None, training=True)
        out, _ = torch.nn.functional.embedding(torch.tensor([[1, 0]]).to(device), x[0]).max(0)
        y.sum().backward()
        return [y.detach(), x.grad, out.detach(), torch.cat([x, y]).detach(), torch.where(x > 0, x, y).detach()]

    wrong = []
    for work in (views, writes, resizing, sized_by_data, drawn, optional):
        want, got = work("cpu"), [t.cpu() for t in work(DEVICE)]
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            if a.dtype != b.dtype or a.shape != b.shape or a.tolist() != b.tolist():
                wrong.append(f"{work.__name__}[{i}]: {a} is {b}")
    return wrong


def features(handles: Handles) -> dict[str, Any]:
    """Features that training scripts use in addition to ops."""
    result: dict[str, Any] = {}
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.GELU()).to(DEVICE)

    def gradient(run: Callable[[Tensor], Tensor]) -> list[float]:
        torch.manual_seed(3)
        x = torch.ones(8, 4, device=DEVICE, requires_grad=True)
        run(x).sum().backward()
        return x.grad.cpu().flatten().tolist()

    plain = gradient(model)
    for reentrant in (True, False):
        result[f"checkpoint {reentrant}"] = gradient(lambda x: checkpoint(model, x, use_reentrant=reentrant)) == plain
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        low = model(torch.ones(8, 4, device=DEVICE))
        result["autocast"] = [str(low.dtype), str(low.exp().dtype)]
    file = io.BytesIO()
    torch.save(copy.deepcopy(model).state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)["0.weight"]
    result["saved and loaded"] = [str(loaded.device), loaded.tolist() == model[0].weight.tolist()]
    q = torch.randn(2, 2, 8, 16)
    attended = F.scaled_dot_product_attention(*[q.to(DEVICE)] * 3, is_causal=True).cpu()
    with sdpa_kernel(SDPBackend.MATH):
        result["attention by the math path"] = torch.equal(
            attended, F.scaled_dot_product_attention(q, q, q, is_causal=True)
        )
    with torch.device(DEVICE):
        result["default device"] = str(nn.Linear(2, 2)(torch.ones(1, 2)).device)
    with torch.random.fork_rng(device_type=DEVICE):
        torch.rand(3, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of fork beside threads
        child = os.fork()
    if child == 0:
        model = loaded = low = None  # frees the child's tensors on the device
        os._exit(0)
    result["forked child"] = os.waitpid(child, 0)[1]
    return result


def refusals() -> dict[str, str]:
    """Calls that are refused, and the texts of their errors."""
    start("late", memory_bytes=1 << 20)
    x = torch.ones(4, 4, device=DEVICE)
    attempts: dict[str, Callable[[], object]] = {
        "sizes": lambda: x @ torch.ones(3, 3, device=DEVICE),
        "devices": lambda: x + torch.ones(4, 4),
        "writes to the CPU": lambda: torch.ones(4, 4).add_(x),
        "memory": lambda: torch.empty(1 << 20, device=DEVICE),
        "released": lambda: released() + 1,
        "small storage": lambda: (
            torch.empty(0, device=DEVICE).set_(small.untyped_storage(), 0, (4, 4), (4, 1)).as_strided((99,), (1,))
        ),
        "numpy": x.numpy,
    }
    small = torch.ones(16, device=DEVICE)

    def released() -> Tensor:
        t = torch.ones(8, device=DEVICE)
        t.untyped_storage().resize_(0)
        return t

    result = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            result[name] = "nothing"
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
    torch.accelerator.synchronize()
    result["after"] = str((x + 1).sum().item())
    return result


def fails_late() -> None:
    """An index out of range: only the kernel finds it, and by then no call can raise it."""
    start("late")
    F.embedding(torch.tensor([7]).to(DEVICE), torch.ones(3, 2).to(DEVICE))
    print("launched", flush=True)
    torch.accelerator.synchronize()


def two_devices() -> dict[str, Any]:
    """Each device has its own memory, streams and current stream; copies between them are ordered on both sides."""
    start("late", devices=2)
    x = torch.full((4,), 2.0, device="memdev:0")
    y = (x * 3).to("memdev:1")
    with torch.accelerator.device_index(1):
        here = torch.empty(1, device=DEVICE).device.index
    x.fill_(0)  # after the copy, in order
    return {
        "count": torch.accelerator.device_count(),
        "current inside": here,
        "y": (y + 1).cpu().tolist(),
        "x": x.cpu().tolist(),
        "devices": [x.device.index, y.device.index],
    }


def hooks(handles: Handles) -> dict[str, Any]:
    """Guarantees to another allocator: record_stream is forwarded, and each allocation is filled with poison."""
    calls: list[tuple[int, int, int]] = []
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    hook = kind(lambda p, device, stream: calls.append((p, device, stream or 0)))
    handles.lib.memdev_set_record_stream(hook)
    x = torch.ones(8, device=DEVICE)
    stream = torch.Stream(device=DEVICE)
    x[2:].record_stream(stream)
    fresh = torch.empty(3, device=DEVICE)
    return {
        "calls": calls,
        "wanted": [(x.data_ptr(), 0, stream.stream_id)],
        "fresh": [str(value) for value in fresh.cpu().tolist()],
        "accelerator": str(torch.accelerator.current_accelerator()),
    }


def on_the_core(mode: str, seed: int, leave_out: str = "") -> dict[str, Any]:
    """Two models, each on a stream of its own and never waiting for the other, on memory of `mm_device_*`.

    A block that one frees is given to the other, so only the allocator's waits keep them apart.
    """
    warnings.simplefilter("ignore")  # autograd remarks that a model was not made on the stream that it is trained on
    handles = start(mode, seed)
    handles.path = handles.driver_path
    core = device_abi.load(build.core_with_mutations())
    device = device_abi.Device(core, handles, budget=3 << 20)
    addresses = [ctypes.cast(getattr(core, f"mm_device_{name}"), ctypes.c_void_p) for name in ("alloc", "free", "used")]
    handles.lib.memdev_use_core(0, ctypes.c_void_p(device.handle), *addresses)
    if leave_out:
        assert core.mm_test_leave_out(leave_out.encode()) == 0, leave_out
    runs = []
    for number in range(2):
        torch.manual_seed(number)
        model, batch, loss_of = convnet()
        model.to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append((torch.Stream(device=DEVICE), model, [t.to(DEVICE) for t in batch], loss_of, optimizer))
    torch.accelerator.synchronize()
    losses = []
    for _ in range(3):
        for stream, model, batch, loss_of, optimizer in runs:
            with stream:
                loss = loss_of(model, *batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
    torch.accelerator.synchronize()
    sha = hashlib.sha256(str([loss.item().hex() for loss in losses]).encode())
    for _, model, *_ in runs:
        for tensor in [*model.parameters(), *model.buffers()]:
            sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return {
        "digest": sha.hexdigest(),
        "cross_reuses": device.stats.cross_reuses,
        "driver_errors": device.stats.driver_errors,
        "wrong": device.check(),
    }
