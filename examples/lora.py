"""transformers' Trainer with LoRA adapters: a callback, and nothing else changes.

    pip install '.[trainer]' peft
    python examples/lora.py --budget 80MB

The model is made here, so that nothing is downloaded; put `AutoModelForCausalLM.from_pretrained(...)` in its place.
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from memmgr.integrations import MemmgrCallback

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="80MB")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--width", type=int, default=256)
args = parser.parse_args()

torch.manual_seed(0)
base = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=args.width, n_layer=4, n_head=4, n_positions=128))
model = get_peft_model(base, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))
tokens = torch.randint(1000, (64, 128))
data = [{"input_ids": row, "labels": row} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            folder, max_steps=args.steps, per_device_train_batch_size=8, report_to=[], logging_steps=1, use_cpu=True
        ),
        train_dataset=data,
        callbacks=[MemmgrCallback(args.budget)],
    )
    trainer.train()
