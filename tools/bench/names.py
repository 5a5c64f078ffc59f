"""The names that `memmgr bench` takes, without the models and systems themselves, which import torch."""

MODELS = ("GPT", "Llama", "BERT", "ResNet", "U-Net", "DenseNet", "ViT", "LSTM", "TreeLSTM", "GAN")
"""Those of `models.MODELS`."""

SYSTEMS = (
    "unmanaged",
    "checkpoint",
    "selective",
    "save_on_cpu",
    "offload_activations",
    "compile",
    "compile_budget",
    "compiled",
    "auto",
    "online",
    "evict",
    "offload",
    "dtr",
    "capuchin",
    "delta_taco",
    "coop",
    "vdnn",
)
"""Those of `systems.SYSTEMS`."""
