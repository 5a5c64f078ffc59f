"""Scenarios of compiled graphs in budgets of the device, launch by launch (inductor.py), each in a process of its own."""

import warnings
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from . import inductor
from .graphs import _all_leaves, _capture
from .managed import _digest, _left, _start
from .scenarios import DEVICE

import memmgr  # isort: skip
from memmgr.readers import captures  # isort: skip
from memmgr.readers import inductor as readers  # isort: skip

STEPS = 3
WIDTH, BATCH = 32, 256
SHARE = 0.6  # of the peak


class Block(nn.Module):
    """A perceptron with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.1, self.training))


class Training:
    """A model that is compiled once and trained again and again from the same state."""

    def __init__(self, blocks: int = 3) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(blocks))).to(DEVICE)
        self.before = {name: value.cpu() for name, value in self.model.state_dict().items()}
        self.data = torch.randn(BATCH * WIDTH + 1)
        self.compiled = torch.compile(self.model)

    def batch(self, offset: int) -> Tensor:
        return self.data.to(DEVICE)[offset : offset + BATCH * WIDTH].view(BATCH, WIDTH)

    def run(self, offset: int = 0) -> str:
        """The bits of the losses and parameters. `offset`: of the batch in its storage; an odd one is not aligned."""
        torch.manual_seed(1)
        self.model.load_state_dict(self.before)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        x, losses = self.batch(offset), []
        for _ in range(STEPS):
            loss = self.compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return _digest([*losses, *self.model.parameters()])


def trains(mode: str, seed: int, policies: list[str], more: bool = False) -> dict[str, Any]:
    """A training in budgets of each policy. `more`: also in torture with input that is not aligned, and without recipes of
    launches."""
    handles = _start(mode, seed)
    inductor.install()
    training = Training()
    plain = {offset: training.run(offset) for offset in (0, 1)}
    with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
        free = training.run()
    need, floor = mm.stats()["unmanaged_peak_bytes"], mm.stats()["floor_bytes"]
    runs = {}

    def run(name: str, policy: str, share: float = SHARE, offset: int = 0) -> None:
        with memmgr.budget(int(need * share), device=DEVICE, policy=policy, quiet=True) as mm:
            digest = training.run(offset)
        runs[name] = {"same": digest == plain[offset], **mm.stats()}

    for policy in policies:
        run(policy, policy, 0.9 if policy == "evict" else SHARE)  # a few results have no recipe
    if more:
        run("unaligned", "torture", offset=1)
        read = readers.read_triton
        with mock.patch.object(readers, "read_triton", lambda *args: read(*args)._replace(repeats=False)):
            run("no recipes", "torture")
    return {"same": free == plain[0], "need": need, "floor": floor, "runs": runs, "left": _left(handles)}


def captured(mode: str, seed: int) -> dict[str, Any]:
    """A compiled inference, captured as a graph and replayed after everything has left that may."""
    _start(mode, seed)
    inductor.install()
    training = Training(1)
    model, module = training.model.eval(), torch.get_device_module(DEVICE)

    def run() -> tuple[str, str]:
        x = training.batch(0)
        stream = torch.Stream(DEVICE)
        stream.wait_stream(torch.accelerator.current_stream())
        graph = module.Graph()
        with torch.no_grad(), stream:
            for _ in range(2):
                want = training.compiled(x).clone()
            with _capture(graph):
                got = training.compiled(x)
        torch.accelerator.current_stream().wait_stream(stream)
        _all_leaves()
        junk = [
            torch.full((n,), float("nan"), device=DEVICE) for n in (128, WIDTH, 4 * WIDTH * WIDTH, BATCH * WIDTH) * 8
        ]
        graph.replay()
        del junk
        return _digest([want]), _digest([got])

    model.requires_grad_(False)
    plain = run()
    with memmgr.budget(None, device=DEVICE, quiet=True):
        managed = run()
    with (
        mock.patch.object(captures, "graph_classes", lambda device: []),
        memmgr.budget(None, device=DEVICE, quiet=True),
    ):
        unaware = run()
    return {"plain": plain, "managed": managed, "unaware": unaware}


def refused(mode: str, seed: int) -> dict[str, Any]:
    """A module with a kernel whose arguments cannot be read: the graph keeps its inputs in memory."""
    _start(mode, seed)
    inductor.install()
    training = Training(1)
    want = training.run()

    def described(kernel: Any, source: str) -> Any:
        kernel.triton_meta["signature"]["x_desc"] = "tensordesc<fp32[16, 16]>"
        return read(kernel, source)

    read = readers.read_triton
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(readers, "read_triton", described),
        memmgr.budget(None, device=DEVICE, quiet=True),
    ):
        warnings.simplefilter("always")
        got = training.run()
    seen = [str(each.message) for each in caught if "memmgr" in str(each.message)]
    return {"same": got == want, "warnings": seen}
