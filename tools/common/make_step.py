"""The subject of a plan: a function of a user's file that makes a step, or a model from the config of transformers in a
folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memmgr.tools.common.step_file import is_model_folder, step_function
from memmgr.tools.common.usage_error import UsageError

Step = Callable[[], object]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def maker(args: argparse.Namespace) -> Callable[[], Step]:
    """The function that makes the step. It has not been called yet, but the user's file has run.

    Raises `UsageError`: there is no such function, file or folder. `args`: `what`, and for a folder `batch`,
    `sequence`, `optimizer`, `dtype`, `checkpointing`.
    """
    folder = Path(args.what)
    if is_model_folder(folder):
        return lambda: _language_model(folder, args)
    return from_file(args.what)


def from_file(what: str) -> Callable[[], Step]:
    """The function that FILE.py:FUNCTION names; the file has run.

    Raises `UsageError`: there is no such file or function.
    """
    path, name = step_function(what)
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` would
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        raise UsageError(f"{path} has no function {name!r}")
    needed = [
        p.name for p in inspect.signature(make).parameters.values() if p.default is p.empty and p.kind not in _REST
    ]
    if needed:
        raise UsageError(f"{path}: {name}() needs {', '.join(needed)}; a function without parameters makes the step")
    made: Callable[[], Step] = make
    return made


def _language_model(folder: Path, args: argparse.Namespace) -> Step:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UsageError("a folder with a config needs the package transformers: pip install transformers") from None
    auto: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        config.use_cache = False
        model = auto.from_config(config, dtype=DTYPES[args.dtype])
    except Exception as error:  # any error of transformers about the folder's contents
        said = " ".join(str(error).split())
        raise UsageError(f"{folder} has no language model's config: {said[:200]}") from None
    most = getattr(config, "max_position_embeddings", None) or 2048
    sequence = min(2048, most) if args.sequence is None else args.sequence
    learned = {module.num_embeddings for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    if sequence > most and most in learned:
        raise UsageError(f"--sequence: {sequence} tokens, and the model of {folder} has {most} positions")
    model.train()
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    tokens = torch.zeros(args.batch, sequence, dtype=torch.int64)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
