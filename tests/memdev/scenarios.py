"""Scenarios of the tests of this folder, each in a process of its own. A function returns a value that JSON can carry."""

import ctypes
import gc
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from budget import models
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def autocast(handles: Handles) -> list[str]:
    """tools/gpu/train.py uses it in simulations. Types of a product, and of an op that needs the range."""
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        low = nn.Linear(4, 4).to(DEVICE)(torch.ones(8, 4, device=DEVICE))
        return [str(low.dtype), str(low.exp().dtype)]


def together() -> dict[str, Any]:
    """The scenarios that can share a process, in late mode."""
    handles = start("late")
    parts = (lateness, waits, freed_early, copies, autocast)
    return {part.__name__: part(handles) for part in parts}


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
