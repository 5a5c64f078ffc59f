"""transformers' common tests of models (`ModelTesterMixin`), as its sources on PyPI bring them, on ten tiny models.

The sources have no tests of single models, so the testers are here: a configuration of two layers and inputs for it.
"""

import sys
import unittest
from types import ModuleType
from typing import Any

import torch
import transformers

# Two mixins that the sources on PyPI lack, with the modules that they test.
for _name, _mixin in (
    ("exporters.test_export", "ExportTesterMixin"),
    ("generation.test_utils", "GenerationTesterMixin"),
):
    _package = _name.partition(".")[0]
    sys.modules.setdefault(f"tests.{_package}", ModuleType(f"tests.{_package}"))
    _module = ModuleType(f"tests.{_name}")
    setattr(_module, _mixin, type(_mixin, (), {}))
    sys.modules[f"tests.{_name}"] = _module

from tests.test_modeling_common import ModelTesterMixin  # noqa: E402

BATCH, LENGTH, VOCABULARY, WIDTH = 2, 7, 99, 32
USUAL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 37, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER = {**USUAL, "num_key_value_heads": 2, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "Bert": ("BertConfig", USUAL, ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")),
    "Electra": ("ElectraConfig", {**USUAL, "embedding_size": WIDTH}, ("ElectraModel", "ElectraForMaskedLM")),
    "GPT2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2},
        ("GPT2Model", "GPT2LMHeadModel"),
    ),
    "Llama": ("LlamaConfig", DECODER, ("LlamaModel", "LlamaForCausalLM")),
    "Qwen3": ("Qwen3Config", DECODER, ("Qwen3Model", "Qwen3ForCausalLM")),
    "Gemma2": ("Gemma2Config", {**DECODER, "query_pre_attn_scalar": 8}, ("Gemma2Model", "Gemma2ForCausalLM")),
    "Mixtral": (
        "MixtralConfig",
        {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        ("MixtralModel", "MixtralForCausalLM"),
    ),
    "T5": (
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
        ("T5Model", "T5ForConditionalGeneration"),
    ),
    "ViT": (
        "ViTConfig",
        {**{k: v for k, v in USUAL.items() if "token" not in k and k not in ("vocab_size", "max_position_embeddings")}, "image_size": 30, "patch_size": 6},
        ("ViTModel", "ViTForImageClassification"),
    ),
    "Mamba": (
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0},
        ("MambaModel", "MambaForCausalLM"),
    ),
}  # fmt: skip


class Tester:
    """The attributes of a model that the common tests read."""

    def __init__(self, name: str) -> None:
        self.kind, self.settings, _ = MODELS[name]
        self.name = name
        self.batch_size, self.num_hidden_layers, self.num_attention_heads, self.hidden_size = BATCH, 2, 4, WIDTH
        self.seq_length = 26 if name == "ViT" else LENGTH
        self.encoder_seq_length = self.decoder_seq_length = self.seq_length
        self.is_training, self.image_size, self.patch_size, self.num_labels = True, 30, 6, 3

    def get_config(self) -> Any:
        return getattr(transformers, self.kind)(**self.settings)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        if self.name == "ViT":
            return self.get_config(), {"pixel_values": torch.rand(BATCH, 3, 30, 30)}
        inputs = {"input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH))}
        if self.name != "Mamba":
            inputs["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
        if self.name == "T5":
            inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
            inputs["decoder_attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
        return self.get_config(), inputs


def _class(name: str) -> type:
    def set_up(self: Any) -> None:
        self.model_tester = Tester(name)

    classes = tuple(getattr(transformers, cls) for cls in MODELS[name][2])
    members = {
        "setUp": set_up,
        "all_model_classes": classes,
        "is_encoder_decoder": name == "T5",
        "has_attentions": name != "Mamba",
        "test_resize_embeddings": name != "ViT",
        "__module__": __name__,
    }
    return type(f"Test{name}", (ModelTesterMixin, unittest.TestCase), members)


globals().update({f"Test{name}": _class(name) for name in MODELS})
del ModelTesterMixin
