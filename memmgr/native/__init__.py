"""The native half: libraries are found or compiled, loaded, and described by types. Importing this imports torch."""

# Torch's entry point comes back to us for CUDA's allocator, which needs `build`: so torch is there before that is begun.
import torch as _torch  # noqa: F401
