"""Hugging Face's Trainer with a compiled model under a budget: each kernel that torch.compile made is paged like an op.

    python examples/compiled.py --budget 40MB
    memmgr run --budget 40MB examples/compiled.py --budget none     # or without a line of memmgr in the script

The losses are those of the compiled run without a budget, to the last digit. With several threads the compiled run has
other last digits from run to run by itself: Inductor's kernels add gradients of embeddings in any order. So one thread
computes here. It needs transformers, accelerate, and a C++ compiler for torch.compile.
"""

import argparse
import contextlib
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import memmgr

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="40MB", help='as in memmgr.budget; "none" only measures')
parser.add_argument("--steps", type=int, default=6)
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
shape = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)
model = LlamaForCausalLM(shape)
texts = torch.randint(0, 512, (64, 128))


def batch(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.stack(rows), "labels": torch.stack(rows)}


with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        folder,
        torch_compile=True,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(model, options, train_dataset=list(texts), data_collator=batch)
    with contextlib.nullcontext() if args.budget == "none" else memmgr.budget(args.budget):
        trainer.train()
print(*(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
