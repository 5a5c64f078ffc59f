"""Gives the user's script another batch size, without a change of the script. Runs in the child process."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
from types import ModuleType
from typing import Any

from memmgr.readers.patches import Patches
from memmgr.tools.tune.job import Batch, Result

_SETTABLE = re.compile(r"--[a-z][\w-]*|[A-Z][A-Z0-9_]+")
TRAINERS_NAME = "per_device_train_batch_size"


class BatchSetter:
    """Sets the batch size, and records in `result` where it was set and which sizes the script asked for.

    `batch`: the way, and the size. `source`: the script's text, "" of a module.
    """

    def __init__(self, batch: Batch, result: Result, source: str) -> None:
        self._batch = batch
        self._result = result
        self._source = source
        self._patches = Patches()

    def arguments(self, words: list[str]) -> list[str]:
        """The script's arguments with the option set."""
        batch = self._batch
        if batch.how != "option":
            return words
        if batch.size is not None:
            self._result.applied.append("option")
        return with_option(words, batch.name, batch.size)

    def install(self) -> None:
        """Before the script begins."""
        batch = self._batch
        if batch.how == "call" and batch.size is not None:
            _function(batch.name)(batch.size)
            self._result.applied.append("call")
        if batch.how == "name" and batch.size is not None and batch.name in self._source:
            os.environ[batch.name] = str(batch.size)
            if f'"{batch.name}"' in self._source or f"'{batch.name}'" in self._source:
                self._result.applied.append("variable")
        if batch.how == "auto" or batch.name == TRAINERS_NAME:
            self._patches.when_imported("transformers.training_args", self._in_arguments)
        if batch.how == "auto":
            self._patches.when_imported("torch.utils.data.dataloader", self._in_loader)
        if batch.how == "name":
            for library in ("lightning.pytorch", "pytorch_lightning"):
                self._patches.when_imported(f"{library}.trainer.trainer", self._in_lightning)

    def edit(self, source: str, path: str) -> Any:
        """The script's syntax tree, with the number that is assigned to the name replaced."""
        tree = ast.parse(source, path)
        if self._batch.how == "name" and self._batch.size is not None:
            for node in assignments(tree, self._batch.name):
                node.value = ast.copy_location(ast.Constant(self._batch.size), node)
                self._result.applied.append("assignment")
        return tree

    # -- libraries --

    def _in_arguments(self, module: ModuleType) -> None:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def post_init(arguments: Any) -> None:
                self._result.batches["trainer"] = int(getattr(arguments, TRAINERS_NAME))
                if self._batch.size is not None:
                    setattr(arguments, TRAINERS_NAME, self._batch.size)
                    self._result.applied.append("trainer")
                original(arguments)

            return post_init

        self._patches.wrap(module.TrainingArguments, "__post_init__", make)

    def _in_loader(self, module: ModuleType) -> None:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def init(loader: Any, dataset: Any, batch_size: int | None = 1, *more: Any, **options: Any) -> None:
                if isinstance(batch_size, int) and options.get("batch_sampler") is None:
                    batch_size = self._of_loader(dataset, batch_size)
                original(loader, dataset, batch_size, *more, **options)

            return init

        self._patches.wrap(module.DataLoader, "__init__", make)

    def _of_loader(self, dataset: Any, asked: int) -> int:
        if "trainer" in self._result.batches:
            self._result.samples = self._result.samples or _length(dataset)  # the first is the training's
            return asked
        first = self._result.batches.setdefault("loader", asked)
        if asked != first:
            return asked  # the loader of an evaluation, most likely
        if "loader" not in self._result.applied:
            self._result.samples = _length(dataset)
        if self._batch.size is None:
            return asked
        self._result.applied.append("loader")
        return self._batch.size

    def _in_lightning(self, module: ModuleType) -> None:
        from importlib import import_module

        parsing = f"{module.__name__.rpartition('.trainer.')[0]}.utilities.parsing"

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def fit(trainer: Any, model: Any, *more: Any, **options: Any) -> Any:
                words = import_module(parsing)
                data = options.get("datamodule") or next(
                    (one for one in more if hasattr(one, "train_dataloader")), None
                )
                for owner in filter(None, (model, data)):
                    if not hasattr(owner, self._batch.name) and self._batch.name not in getattr(owner, "hparams", {}):
                        continue
                    self._result.batches["lightning"] = int(words.lightning_getattr(owner, self._batch.name))
                    if self._batch.size is not None:
                        words.lightning_setattr(owner, self._batch.name, self._batch.size)
                        self._result.applied.append("lightning")
                return original(trainer, model, *more, **options)

            return fit

        self._patches.wrap(module.Trainer, "fit", make)


def with_option(words: list[str], option: str, size: int | None) -> list[str]:
    """The words with `option` set to `size`: in its place, or at the end."""
    if size is None:
        return list(words)
    found = list(words)
    for place, word in enumerate(found):
        if word == option and place + 1 < len(found):
            found[place + 1] = str(size)
            return found
        if word.startswith(f"{option}="):
            found[place] = f"{option}={size}"
            return found
    return [*found, option, str(size)]


def option_of(words: list[str], option: str) -> int | None:
    """The option's value in the words; None: it is not there, or no number."""
    for place, word in enumerate(words):
        value = words[place + 1] if word == option and place + 1 < len(words) else word.removeprefix(f"{option}=")
        if (word == option or value != word) and value.isdecimal():
            return int(value)
    return None


def settable(source: str) -> list[str]:
    """Names that the script assigns a whole number to, and its strings that look like an option or an environment variable."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _SETTABLE.fullmatch(node.value):
            found.append(node.value)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and assigned(source, node.id) is not None:
            found.append(node.id)
    return found


def assignments(tree: ast.Module, name: str) -> list[ast.Assign | ast.AnnAssign]:
    """Assignments of a whole number to a plain name, wherever in the script."""
    found: list[ast.Assign | ast.AnnAssign] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if named and isinstance(node.value, ast.Constant) and type(node.value.value) is int:
            found.append(node)
    return found


def assigned(source: str, name: str) -> int | None:
    """The whole number that the script assigns to the name; None: it assigns none."""
    found = [node.value.value for node in assignments(ast.parse(source), name) if isinstance(node.value, ast.Constant)]
    return int(str(found[0])) if found else None


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:  # an endless one
        return None


def _function(what: str) -> Any:
    path, _, name = what.rpartition(":")
    spec = importlib.util.spec_from_file_location("_memmgr_tune_batch", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
