"""Checks of `compatibility.py`: a small training with each framework, plain or under a budget, and its final state. A
check is a function of a `Scope` that returns all values that must have the same bits. It imports its framework itself.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memmgr

ROOT = Path(__file__).resolve().parents[2]


class Scope:
    """Where a check trains: nowhere in particular, or in a budget.

    Args:
        limit: of the budget; `"plain"` for none at all, None for one without a limit.
    """

    def __init__(self, limit: int | str | None) -> None:
        self.limit = limit

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if self.limit == "plain":
            yield
            return
        with memmgr.budget(self.limit, quiet=True):
            yield

    def callbacks(self, name: str) -> list[Any]:
        """The same for a framework that has a callback of ours."""
        import memmgr.integrations as integrations

        return [] if self.limit == "plain" else [getattr(integrations, name)(self.limit, quiet=True)]


Left = Iterable[torch.Tensor | float]


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        title: its subject.
        packages: those that have to be installed, and whose versions are shown.
        ranks: processes that it needs, over gloo.
        variables: of its environment.
    """

    title: str
    run: Callable[[Scope], Left]
    packages: tuple[str, ...] = ()
    ranks: int = 1
    variables: dict[str, str] = field(default_factory=dict)


CHECKS: dict[str, Check] = {}


def check(title: str, *packages: str, **more: Any) -> Callable[[Callable[[Scope], Left]], Callable[[Scope], Left]]:
    """Puts a function into the table."""

    def noted(run: Callable[[Scope], Left]) -> Callable[[Scope], Left]:
        CHECKS[run.__name__] = Check(title, run, packages, **more)
        return run

    return noted


# ---- a model and a loop, for checks without their own
# ------------------------------------------------------------------


def mlp(width: int = 64) -> nn.Sequential:
    """Blocks that save more than they hold."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
            for _ in range(4)
        )
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """One parameter at a time: the floor is lower."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def train(
    scope: Scope,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    batches: Iterable[torch.Tensor] | None = None,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
) -> Left:
    """Some steps; losses and parameters."""
    optimizer = optimizer or adamw(model)
    losses = []
    with scope():
        for x in [torch.randn(512, 64) for _ in range(4)] if batches is None else batches:
            loss = (model(x) - x).square().mean()
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        del loss
    return [*losses, *model.parameters()]


def texts(count: int = 32) -> list[dict[str, torch.Tensor]]:
    """Token ids for a causal language model."""
    return [{"input_ids": row, "labels": row} for row in torch.randint(128, (count, 64))]


def gpt2() -> Any:
    """A small one that needs no download."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=64, vocab_size=128, n_positions=64, use_cache=False))


def fit(scope: Scope, model: Any, **changed: Any) -> Left:
    """transformers' Trainer over it."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "max_steps": 3,
            "per_device_train_batch_size": 8,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
        }
        args = TrainingArguments(folder, save_strategy="no", disable_tqdm=True, **{**settings, **changed})
        trainer = Trainer(model, args, train_dataset=texts(), callbacks=scope.callbacks("MemmgrCallback"))
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return [*losses, *model.parameters()]


# ---- the checks --------------------------------------------------------------------------------------------------------


@check("transformers' `Trainer`, with the callback", "transformers", "accelerate")
def trainer(scope: Scope) -> Left:
    return fit(scope, gpt2(), gradient_accumulation_steps=2)


@check("LoRA, with the callback", "peft", "transformers")
def lora(scope: Scope) -> Left:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return fit(scope, get_peft_model(gpt2(), config))


@check("accelerate", "accelerate")
def accelerate(scope: Scope) -> Left:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = mlp()
    model, optimizer = accelerator.prepare(model, adamw(model))
    return train(scope, model, optimizer, backward=accelerator.backward)


@check("Lightning, with the callback", "lightning")
def lightning(scope: Scope) -> Left:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = mlp(), []

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = (self.model(batch) - batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

    module = Module()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    callbacks = scope.callbacks("MemmgrLightningCallback")
    loader = torch.utils.data.DataLoader(torch.randn(2048, 64), batch_size=512)
    pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **quiet).fit(module, loader)
    return [*module.losses, *module.parameters()]


@check("`torch.compile`, inductor")
def compiled(scope: Scope) -> Left:
    model = nn.Sequential(*(torch.compile(block) for block in mlp()))
    return train(scope, model)


@check("`DistributedDataParallel`, gloo, 2 ranks", ranks=2)
def ddp(scope: Scope) -> Left:
    from torch.nn.parallel import DistributedDataParallel

    return train(scope, DistributedDataParallel(mlp(), bucket_cap_mb=1))


@check("FSDP2, gloo, 2 ranks", ranks=2)
def fsdp2(scope: Scope) -> Left:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = mlp(), init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    left = train(scope, model)
    return [x.to_local() if hasattr(x, "to_local") else x for x in left]


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """Made in a worker."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index)).square() * 1e-6


@check("`DataLoader`, 2 forked workers")
def workers(scope: Scope) -> Left:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=512, num_workers=2)
    return train(scope, mlp(), batches=loader)


@check("`torch.func`: gradients per sample")
def functional(scope: Scope) -> Left:
    from torch.func import functional_call, grad, vmap

    model, x = mlp().eval(), torch.randn(16, 64)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return functional_call(model, values, (row,)).square().mean()

    with scope():
        for _ in range(3):
            each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
            parameters = {name: p - 0.1 * each[name].mean(0) for name, p in parameters.items()}
        del each
    return list(parameters.values())


@check("torchao: `AdamW8bit`", "torchao")
def torchao(scope: Scope) -> Left:
    from torchao.optim import AdamW8bit

    model = mlp()
    return train(scope, model, AdamW8bit(model.parameters(), lr=1e-3))


@check("bitsandbytes: `AdamW8bit`", "bitsandbytes")
def bitsandbytes(scope: Scope) -> Left:
    from bitsandbytes.optim import AdamW8bit

    model = mlp()
    return train(scope, model, AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=1024))


@check("transformers: `Adafactor`", "transformers")
def hf_adafactor(scope: Scope) -> Left:
    from transformers.optimization import Adafactor

    model = mlp()
    return train(scope, model, Adafactor(model.parameters()))


@check("CAME", "came-pytorch")
def came(scope: Scope) -> Left:
    from came_pytorch import CAME

    model = mlp()
    return train(scope, model, CAME(model.parameters(), lr=2e-4, weight_decay=1e-2))


@check("diffusers: a UNet", "diffusers")
def diffusers(scope: Scope) -> Left:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x, torch.arange(len(x))).sample

    return train(scope, Noise(), batches=[torch.randn(4, 3, 16, 16) for _ in range(3)])


@check("safetensors: saved and loaded inside the budget", "safetensors")
def safetensors(scope: Scope) -> Left:
    from safetensors.torch import load_file, save_file

    model = mlp()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        batches = [torch.randn(512, 64) for _ in range(4)]
        optimizer = adamw(model)
        with scope():
            for x in batches:
                (model(x) - x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                save_file(model.state_dict(), path)
                model.load_state_dict(load_file(path))
    return list(model.parameters())


@check("a notebook's cells, in IPython", "ipython")
def notebook(scope: Scope) -> Left:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.push({"mlp": mlp, "adamw": adamw, "scope": scope})
    cells = (
        "import torch\nmodel = mlp(); optimizer = adamw(model); x = torch.randn(512, 64); losses = []",
        "def step():\n    loss = (model(x) - x).square().mean()\n    loss.backward()\n    return loss.item()",
        "with scope():\n    for _ in range(4):\n        losses.append(step())\n        optimizer.step()\n"
        "        optimizer.zero_grad()",
    )
    for cell in cells:
        shell.run_cell(cell, silent=True).raise_error()
    left = [*shell.user_ns["losses"], *(p.detach().clone() for p in shell.user_ns["model"].parameters())]
    shell.reset(new_session=False)
    return left
