"""memdev: torch tensors on a double of the CUDA driver, for what must hold on a GPU and be tested without one."""

from .device import MODES, Handles, prompt_ops, start

__all__ = ["MODES", "Handles", "prompt_ops", "start"]
