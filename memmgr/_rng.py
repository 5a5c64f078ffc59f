"""Random numbers that come out the same twice (rule 4)."""

from __future__ import annotations

import threading
from typing import Any

import torch

# Noting a generator's state and drawing from it is one critical section among managed threads, and so is swapping the
# state for a replay. A re-entrant lock: a replay may happen inside a draw that made room for itself.
lock = threading.RLock()


def generator_for(
    op_takes_generator: bool, kwargs: dict[str, Any], args: tuple[Any, ...], device: torch.device
) -> torch.Generator:
    """The generator that a seeded op will draw from."""
    if op_takes_generator:
        explicit = kwargs.get("generator")
        if explicit is None:
            explicit = next((a for a in args if isinstance(a, torch.Generator)), None)
        if explicit is not None:
            return explicit
    return default_generator(device)


def default_generator(device: torch.device) -> torch.Generator:
    """The one that ops on this device draw from. A device whose module has none draws from the CPU's."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = torch.get_device_module(device.type)
    generators = getattr(module, "default_generators", ())
    if generators:
        number: int | None = device.index
        return generators[module.current_device() if number is None else number]  # type: ignore[no-any-return]
    if device.type == "mps":
        return module._get_default_mps_generator()  # type: ignore[no-any-return]
    return torch.default_generator


class Drawn:
    """Where a seeded op began to draw: its generator and the state before (CPU: 5 KB; CUDA: seed and offset)."""

    __slots__ = ("after", "generator", "state")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.state: Any
        if generator.device.type == "cuda":
            self.state = (generator.initial_seed(), generator.get_offset())
        else:
            self.state = generator.get_state()

    def private(self) -> torch.Generator:
        """A generator of its own in that state: for ops that take one, nothing global is touched."""
        twin = torch.Generator(device=self.generator.device)
        self.restore(twin)
        return twin

    def restore(self, generator: torch.Generator) -> None:
        """That generator goes on from here."""
        if isinstance(self.state, tuple):
            generator.manual_seed(self.state[0])
            generator.set_offset(self.state[1])
        else:
            generator.set_state(self.state)

    def put_back(self) -> None:
        """Its generator goes on from here: what was drawn since counts as not drawn."""
        self.restore(self.generator)
