"""Measures models from files within a budget: memory as the kernel counts it, time, and bits.

    python tools/bench/studies/loaded.py [--hidden 768] [--layers 12] [--tokens 16] [--steps 4] [--only generate] [--json FILE]

A Llama in float32 lies in shards of safetensors, in the page cache. Every system runs in a process of its own, one after the
other. `generate`: greedy decoding with a budget of a quarter of the weights; the first token, and the rate of the others.
`train`: Hugging Face's Trainer (AdamW) in half of its need without a budget. `lora`: peft's LoRA on the mapped
base, in half of its need.

The memory is the most that the resident set (VmHWM: anonymous memory, and pages of mapped files) grew from the moment
before the model was loaded. It is `ok` within the budget + 64 MB. Bits: the tokens, or the parameters after the last step, are
those of plain.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `make bench` runs with -P


import memmgr
from memmgr.tools.bench.cell import digest_of, forget_peak, memory_of

SPARE = 64_000_000
PROMPT = 8
TINY = "tiny"  # the folder of a model that is run first


@contextlib.contextmanager
def within(limit: int | None) -> Iterator[Callable[[], dict[str, Any]]]:
    """A budget, if there is a limit. Yields a function that returns its figures."""
    if limit is None:
        yield dict
        return
    with memmgr.budget(limit, device="cpu", quiet=True) as mm:
        yield mm.stats


def mapped(folder: str, offload: str, limit: int | None) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def built(folder: str, offload: str, limit: int | None) -> Any:
    """The weights are copied into tensors of torch's own, one file at a time."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    own = model.state_dict()
    with torch.no_grad():
        for shard in sorted(Path(folder).glob("*.safetensors")):
            for name, tensor in load_file(shard).items():
                own[name].copy_(tensor)
    return model


def accelerated(folder: str, offload: str, limit: int | None) -> Any:
    """accelerate keeps as many layers in memory as fit, and reads the others from a folder in every pass."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="auto", max_memory={"cpu": limit}, offload_folder=offload
    )


def generate(load: Callable[..., Any], managed: bool, folder: str, limit: int | None, args: Any) -> dict[str, Any]:
    """Rates of tokens, and the tokens."""
    with tempfile.TemporaryDirectory() as offload, within(limit if managed else None) as stats:
        model = load(folder, offload, limit).eval()
        prompt = torch.arange(3, 3 + PROMPT)[None]
        asked = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
        begun = time.perf_counter()
        model.generate(prompt, max_new_tokens=1, **asked)
        first = time.perf_counter() - begun
        begun = time.perf_counter()
        tokens = model.generate(prompt, max_new_tokens=args.tokens, **asked)
        seconds = time.perf_counter() - begun
        peak, counted = memory_of("VmHWM"), stats()
    return {
        "peak": peak,
        "first_seconds": first,
        "rate": args.tokens / seconds,
        "unit": "tokens/s",
        "bits": str(tokens.tolist()),
        "counted": counted.get("resident_bytes.peak"),
        "need": counted.get("unmanaged_peak_bytes"),
    }


class Batches(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        torch.manual_seed(i)
        tokens = torch.randint(3, 7999, (64,))
        return {"input_ids": tokens, "labels": tokens}


def train(adapter: bool, folder: str, limit: int | None, args: Any) -> dict[str, Any]:
    """Steps of the Trainer, and the parameters after the last."""
    from transformers import Trainer, TrainingArguments, set_seed

    with within(limit) as stats, tempfile.TemporaryDirectory() as output:
        set_seed(0)
        model = mapped(folder, "", limit)
        if adapter:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        about = TrainingArguments(
            output, max_steps=args.steps, per_device_train_batch_size=2, report_to=[], save_strategy="no", use_cpu=True
        )
        begun = time.perf_counter()
        Trainer(model=model, args=about, train_dataset=Batches()).train()
        seconds = time.perf_counter() - begun
        peak, counted = memory_of("VmHWM"), stats()
    return {
        "peak": peak,
        "first_seconds": 0.0,
        "rate": args.steps / seconds,
        "unit": "steps/s",
        "bits": digest_of(model.parameters()),
        "counted": counted.get("resident_bytes.peak"),
        "need": counted.get("unmanaged_peak_bytes"),
    }


Run = Callable[[str, int | None, Any], dict[str, Any]]
GENERATE: dict[str, tuple[Run, bool]] = {
    "plain": (lambda *given: generate(mapped, False, *given), False),
    "memmgr, mapped": (lambda *given: generate(mapped, True, *given), True),
    "memmgr, built in memory": (lambda *given: generate(built, True, *given), True),
    "accelerate, disk": (lambda *given: generate(accelerated, False, *given), True),
}
TRAIN: dict[str, tuple[Run, bool]] = {
    "plain": (lambda *given: train(False, *given), False),
    "memmgr, mapped": (lambda *given: train(False, *given), True),
}
LORA: dict[str, tuple[Run, bool]] = {
    "plain": (lambda *given: train(True, *given), False),
    "memmgr, mapped": (lambda *given: train(True, *given), True),
}
KINDS = {"generate": GENERATE, "train": TRAIN, "lora": LORA}


def child(kind: str, name: str, folder: str, limit: int | None, args: Any, pipe: Connection) -> None:
    """Runs one system, after a tiny model has loaded its imports."""
    torch.set_num_threads(args.threads)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            KINDS[kind][name][0](str(Path(folder) / TINY), limit, args)
            gc.collect()
            there = memory_of("VmRSS")
            forget_peak()
            found = KINDS[kind][name][0](folder, limit, args)
        found["peak"] -= there
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:100]}
    pipe.send(found)


def run(kind: str, name: str, folder: str, limit: int | None, args: Any) -> dict[str, Any]:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(kind, name, folder, limit, args, there))
    process.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        found = {"error": "the process was killed"}
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        weights = 0
        for hidden, layers, path in ((96, 1, Path(folder) / TINY), (args.hidden, args.layers, Path(folder))):
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=8000,
                    hidden_size=hidden,
                    intermediate_size=8 * hidden // 3,
                    num_hidden_layers=layers,
                    num_attention_heads=12,
                    num_key_value_heads=4,
                )
            )
            weights = sum(p.nbytes for p in model.parameters())
            model.save_pretrained(path, max_shard_size="100MB")
            del model
        print(f"{weights / 1e6:.0f} MB of weights, {args.threads} threads")
        for kind, systems in KINDS.items():
            if args.only not in (None, kind):
                continue
            limit = weights // 4
            if kind != "generate":
                need = run(kind, "memmgr, mapped", folder, 1 << 50, args)
                limit = int(need.get("need") or weights) // 2
            plain: dict[str, Any] = {}
            for name, (_, managed) in systems.items():
                found = run(kind, name, folder, limit if managed else None, args)
                plain = plain or found
                row = {"kind": kind, "system": name, "budget": limit if managed else None, **found}
                rows.append(row)
                if "error" in found:
                    print(f"{kind:9} {name:24} {found['error']}", flush=True)
                    continue
                ok = "" if not managed else "ok" if found["peak"] <= limit + SPARE else "OVER"
                budget = f"{limit / 1e6:.0f}" if managed else "no"
                same = "same" if found["bits"] == plain["bits"] else "OTHER"
                print(
                    f"{kind:9} {name:24} budget {budget:>5} MB  peak {found['peak'] / 1e6:6.0f} MB {ok:4}  "
                    f"{found['rate']:7.2f} {found['unit']}, {plain['rate'] / found['rate']:5.2f}x of plain's time  "
                    f"first {found['first_seconds']:5.2f} s  bits {same}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
