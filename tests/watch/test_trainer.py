"""transformers' Trainer with a callback and nothing else: the same losses and parameters as without it."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch

import memmgr
from memmgr.api import budget as budgets

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
peft = pytest.importorskip("peft", reason="the package peft is not installed")
pytest.importorskip("accelerate", reason="the package accelerate is not installed: Trainer needs it")

# peft uses names that transformers has renamed; the old names are those that every supported version has.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    manager = budgets.current()
    if manager is not None:  # of a test that failed; the next one shall not
        manager.close(report=False, failed=True)
        budgets._current = None


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        numbers = torch.randint(0, 128, (count, 64), generator=torch.Generator().manual_seed(1))
        self.items = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in numbers]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return self.items[i]


def _model(lora: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=3, n_head=2, n_embd=64, vocab_size=128, n_positions=64, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    if not lora:
        return model
    return peft.get_peft_model(
        model,
        peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    )


def _trainer(folder: Path, callbacks: list[Any], lora: bool = True, **changed: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "dataloader_pin_memory": False,
    }
    args = transformers.TrainingArguments(**{**settings, **changed})
    trainer = transformers.Trainer(
        model=_model(lora), args=args, train_dataset=Texts(64), eval_dataset=Texts(8), callbacks=callbacks
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


THREE = {"memmgr/peak_gb", "memmgr/recompute_percent", "memmgr/stall_percent"}
Outcome = tuple[list[dict[str, float]], str]


def _run(folder: Path, callbacks: list[Any], resume: str = "", **how: Any) -> Outcome:
    """The logged figures, and the bits at the end. The trainer is freed then: its tensors would count for the next one."""
    trainer = _trainer(folder, callbacks, **how)
    trainer.train(resume_from_checkpoint=str(folder / resume) if resume else None)
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    tensors = [*trainer.model.state_dict().values(), *states]
    bits = b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)
    return trainer.state.log_history, hashlib.sha256(bits).hexdigest()


def _without_ours(outcome: Outcome) -> Outcome:
    """Without times and without our figures."""
    left_out = ("runtime", "per_second", "memmgr/")
    return [{k: v for k, v in row.items() if not any(t in k for t in left_out)} for row in outcome[0]], outcome[1]


def _assert_three_figures_on_lines_of_training_only(history: list[dict[str, float]]) -> None:
    ours = [{name for name in row if name.startswith("memmgr/")} for row in history]
    assert [set(row) for row in ours] == [THREE if "loss" in row else set() for row in history]
    lines = [row for row in history if "loss" in row]
    assert len(lines) == 4 and len(history) > 4
    assert all(row["memmgr/peak_gb"] > 0 for row in lines)
    shares = [(row["memmgr/recompute_percent"], row["memmgr/stall_percent"]) for row in lines]
    assert all(0 <= share <= 100 for pair in shares for share in pair) and any(sum(pair) > 0 for pair in shares)


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*", "ignore:None of the inputs have requires_grad")
# With the Trainer's own checkpointing: the callback does the same, and tests/pager trains checkpointed models.
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lora_with_accumulation_evaluation_save_and_resume(tmp_path: Path, checkpointing: bool) -> None:
    from memmgr.integrations import MemmgrCallback

    how = {"gradient_checkpointing": checkpointing}
    plain = _run(tmp_path / "plain", [], **how)
    measured = MemmgrCallback(None, quiet=True)
    _run(tmp_path / "measured", [measured], **{**how, "max_steps": 2, "save_strategy": "no"})
    need, floor = measured.stats()["unmanaged_peak_bytes"], measured.stats()["floor_bytes"]
    callback = MemmgrCallback(int(floor + 0.4 * (need - floor)), quiet=True)
    managed = _run(tmp_path / "managed", [callback], **how)
    assert callback.stats()["evictions"] + callback.stats()["offloads"] > 0
    assert _without_ours(managed) == _without_ours(plain)
    _assert_three_figures_on_lines_of_training_only(managed[0])
    again = _run(tmp_path / "managed", [callback], resume="checkpoint-2", **how)
    assert _without_ours(again) == _without_ours(_run(tmp_path / "plain", [], resume="checkpoint-2", **how))
    assert again[1] == plain[1] and budgets.current() is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.slow  # each run traces its model anew, 6 s of a processor; tests/compiled_programs trains such models
@pytest.mark.parametrize("lora", [False, True])
def test_a_compiled_model_has_the_bits_of_the_plain_compiled_run(
    tmp_path: Path, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    from memmgr.integrations import MemmgrCallback

    how: dict[str, Any] = {"torch_compile": True, "lora": lora, "eval_strategy": "no", "save_strategy": "no"}
    torch.set_num_threads(1)

    def run(*callbacks: MemmgrCallback) -> tuple[Outcome, int]:
        torch._dynamo.reset()  # it compiles a forward for eight models at most
        counters.clear()
        return _without_ours(_run(tmp_path, list(callbacks), **how)), counters["stats"]["unique_graphs"]

    plain = run()
    assert plain[1] > 0
    measured = MemmgrCallback(None, quiet=True)
    assert run(measured) == plain
    need, floor = measured.stats()["unmanaged_peak_bytes"], measured.stats()["floor_bytes"]
    for policy, share in [
        ("torture", 0.75),
        ("evict", 0.75),
        *itertools.product(("auto", "offload"), (0.75, 0.5, 0.35)),
    ]:
        callback = MemmgrCallback(max(int(share * need), int(1.05 * floor)), policy=policy, quiet=True)
        assert run(callback) == plain, (policy, share)
        assert callback.stats()["evictions"] + callback.stats()["offloads"] > 0


def test_where_ones_own_checkpointing_is_not_needed_the_summary_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from memmgr.integrations import MemmgrCallback

    how: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no", "lora": False}
    for own in (True, False):
        kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if own else {}
        _trainer(tmp_path, [MemmgrCallback("1GB")], **how, **kwargs, gradient_checkpointing=own).train()
        said = [line for line in capsys.readouterr().err.splitlines() if "own checkpointing recomputes" in line]
        assert len(said) == int(own)


def test_auto_find_batch_size_takes_our_error_for_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from memmgr.integrations import MemmgrCallback

    how: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 1, "lora": False}
    measured = MemmgrCallback(None, quiet=True)
    _trainer(tmp_path, [measured], per_device_train_batch_size=32, gradient_accumulation_steps=1, **how).train()
    limit = int(0.9 * measured.stats()["floor_bytes"])  # too little for 32, and enough for a little less
    callback = MemmgrCallback(limit)
    begun: list[int] = []

    class Notes(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            begun.append(state.train_batch_size)

    capsys.readouterr()
    trainer = _trainer(
        tmp_path,
        [callback, Notes()],
        per_device_train_batch_size=32,
        auto_find_batch_size=True,
        gradient_accumulation_steps=1,
        **how,
    )
    trainer.train()
    assert trainer.state.train_batch_size < 32 and trainer.state.global_step == 1
    assert callback.stats()["resident_bytes.peak"] <= limit and budgets.current() is None
    said = capsys.readouterr().err
    assert said.count("memmgr: peak ") == 1, "a summary for each attempt"
    sizes = ", ".join(map(str, begun))
    assert f"memmgr: batch sizes tried: {sizes}; the last one fitted\n" in said and len(begun) > 1
    trainer.args.auto_find_batch_size = False
    trainer.train()
    assert "batch sizes" not in capsys.readouterr().err


def test_a_training_that_fails_can_be_followed_by_another(tmp_path: Path) -> None:
    from memmgr.integrations import MemmgrCallback

    class Fails(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **more: Any) -> None:
            raise KeyError("gone")

    callback = MemmgrCallback("1GB", quiet=True)
    how: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 1}
    with pytest.raises(KeyError):
        _trainer(tmp_path, [callback, Fails()], **how).train()
    assert budgets.current() is not None
    _trainer(tmp_path, [callback], **how).train()
    assert budgets.current() is None and callback.stats()["passes"] == 2
    callback.close()


def test_reporters_behind_the_callback_get_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed (the extra `tensorboard`)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    from memmgr.integrations import MemmgrCallback

    writer = SummaryWriter(str(tmp_path / "events"))
    callbacks = [MemmgrCallback("1GB", quiet=True), TensorBoardCallback(writer)]
    _trainer(tmp_path, callbacks, eval_strategy="no", save_strategy="no", max_steps=2, lora=False).train()
    found = EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert {f"train/{name}" for name in THREE} <= set(found.Tags()["scalars"])


UNDER_RUN = """
import sys, torch, transformers
from memmgr.api import budget as budgets
from memmgr.integrations import MemmgrCallback
transformers.utils.logging.disable_progress_bar()
config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32, use_cache=False)
model = transformers.GPT2LMHeadModel(config)
if "early" in sys.argv:  # the budget of the script is open before the training begins
    model(torch.zeros(1, 4, dtype=torch.long))
rows = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(8)]
args = transformers.TrainingArguments(sys.argv[1], max_steps=2, logging_steps=1, report_to=[], use_cpu=True,
    disable_tqdm=True, save_strategy="no")
callback = MemmgrCallback("100MB")
for _ in range(2):
    trainer = transformers.Trainer(model, args, train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert budgets.current() is not None, "the script's budget is its own to close"
print("lines", [row["memmgr/peak_gb"] > 0 for row in trainer.state.log_history if "loss" in row])
print("limit", callback.stats()["budget_bytes"])
"""


@pytest.mark.parametrize("early", [[], ["early"]])
def test_inside_memmgr_run_its_budget_counts_and_the_callback_says_so_once(tmp_path: Path, early: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNDER_RUN)
    command = [sys.executable, "-P", "-m", "memmgr", "run", "--budget", "200MB", str(script), str(tmp_path), *early]
    done = forkserver.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = "memmgr: the budget of memmgr run or MEMMGR_BUDGET counts (200MB), not the callback's (100MB)"
    assert done.stderr.count(said) == 1 and done.stderr.count("memmgr: peak ") == 1, done.stderr
    assert "limit 200000000" in done.stdout and "lines [True, True]" in done.stdout


def test_a_wrong_size_is_said_at_once() -> None:
    from memmgr.integrations import MemmgrCallback

    with pytest.raises(ValueError, match="12XB"):
        MemmgrCallback("12XB")
    with pytest.raises(TypeError, match="did you mean 'policy'"):
        MemmgrCallback("12GB", polcy="auto")
    assert issubclass(memmgr.BudgetError, torch.OutOfMemoryError)
