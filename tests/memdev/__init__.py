"""memdev: torch tensors on a double of the CUDA driver, for tests of GPU behaviour without a GPU.

`start` makes "memdev" a torch device (PrivateUse1, so once per process, which `child` therefore starts for each scenario).
Backward runs on autograd's own thread, streams and events are the driver's (`torch.Stream.stream_id` is the CUstream), and
a kernel runs when its stream gets to it, on raw pointers: it keeps nothing alive. Memory comes from
``c10::GetAllocator(kPrivateUse1)``, asked anew each time: another allocator is installed with
``c10::SetAllocator(kPrivateUse1, it, 255)``. All new memory is filled with 0xFF in stream order (NaN; an index out of range).

In the mode `timed` the driver has virtual time, and a table of figures (driver/virtual_time.h) gives each kernel the time
of its bytes and its arithmetic. Hollow kernels do nothing else, so that models of any size train.

Known limitations: kernels see the process-wide numeric switches of the moment in which they run. Ops whose results' sizes
are data, and seeded ones that need data (`prompt_ops`), make the program wait, where CUDA would not always. Random numbers
come from the CPU's default generator. No sparse layouts, no fused attention, no LSTM or GRU cells (torch wants fused
kernels of its own for them), no `torch.compile`, and nothing of ``torch.accelerator.memory_*`` with memdev's own
allocator.
"""

from .device import MODES, Handles, prompt_ops, start

__all__ = ["MODES", "Handles", "prompt_ops", "start"]
