"""The Python side: the module ``torch.memdev``, and the handles on both libraries."""

import atexit
import ctypes
import os
import time
import types
from pathlib import Path

import torch
from driver.build import fake_driver

from .build import library

# The fake driver's modes; see tests/driver/fake_driver.cpp.
MODES = ("prompt", "random", "late", "threaded", "timed")


class Handles:
    """The libraries that `start` loaded.

    Attributes:
        lib: memdev (`memdev_*`).
        fake: the double of libcuda (`fake_*`, `cu*`).
        driver_path: of the latter, for `mm_driver_load`.
    """

    lib: ctypes.CDLL
    fake: ctypes.CDLL
    driver_path: Path


handles: Handles | None = None


def start(
    mode: str = "late",
    seed: int = 0,
    devices: int = 1,
    memory_bytes: int = 1 << 30,
    poison: bool = True,
    hollow: bool = False,
) -> Handles:
    """Registers the device for the rest of this process, which should therefore be a test's own.

    torch computes with one thread from then on: a kernel's bits must not depend on the thread that runs it.

    Args:
        mode: when queued work runs (`MODES`).
        seed: of the order.
        devices: how many.
        memory_bytes: of each.
        poison: new memory is filled with 0xFF in stream order, freed memory of memdev's own allocator too.
        hollow: kernels and large copies take their virtual time and do nothing, in the mode `timed`: memory is never
            touched, so that a training of any size runs in a few hundred megabytes. All data is zero.
    """
    global handles
    assert handles is None, "a process has one such device"
    assert mode in MODES and not (hollow and mode != "timed")
    os.environ.update(
        FAKE_DRIVER_MODE=mode,
        FAKE_DRIVER_SEED=str(seed),
        FAKE_DRIVER_DEVICES=str(devices),
        FAKE_DRIVER_MEMORY=str(memory_bytes),
    )
    torch.set_num_threads(1)
    made = Handles()
    made.driver_path = fake_driver()
    made.fake = ctypes.CDLL(str(made.driver_path))
    made.lib = lib = ctypes.CDLL(str(library()))
    lib.memdev_start.restype = ctypes.c_char_p
    lib.memdev_prompt_ops.restype = ctypes.c_char_p
    lib.memdev_launches.restype = ctypes.c_uint64
    torch.utils.rename_privateuse1_backend("memdev")
    problem = lib.memdev_start(str(made.driver_path).encode())
    assert not problem, problem.decode()
    lib.memdev_set_poison(int(poison and not hollow))
    lib.memdev_set_timed(int(mode == "timed"), int(hollow))
    made.fake.fake_set_hollow(int(hollow))
    torch._register_device_module("memdev", _module(made))
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(_close, lib)
    handles = made
    return made


def _close(lib: ctypes.CDLL) -> None:
    lib.memdev_close()
    # After a backward the autograd thread still lets go of its graph, for which it wants the GIL: if the interpreter ends
    # meanwhile, the process aborts. There is nothing to wait for; a moment without the GIL lets it finish.
    time.sleep(0.05)


def prompt_ops() -> dict[str, int]:
    """The ops that could not be launched late, and how often: seeded ones, and those whose result's size is data."""
    assert handles is not None
    lines = handles.lib.memdev_prompt_ops().decode().splitlines()
    return {name: int(count) for name, count in (line.rsplit(" ", 1) for line in lines)}


def _mem_get_info(made: Handles) -> tuple[int, int]:
    """(free, total), of all devices together, which is the device where there is one."""
    made.fake.fake_outstanding.restype = ctypes.c_uint64
    total = int(os.environ["FAKE_DRIVER_MEMORY"])
    return total - int(made.fake.fake_outstanding(b"bytes")), total


def _graphs(made: Handles) -> type:
    """``torch.memdev.Graph``. Its memory is its own for good."""
    fake = made.fake

    def here() -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.accelerator.current_stream().stream_id)

    class Graph:
        def capture_begin(self) -> None:
            torch.accelerator.synchronize()
            self._stream = here()
            fake.fake_set_capturing(self._stream, 1)
            made.lib.memdev_capture(1)

        def capture_end(self) -> None:
            made.lib.memdev_capture(-1)
            fake.fake_set_capturing(self._stream, 0)
            self._number = fake.fake_keep_graph(self._stream)

        def replay(self) -> None:
            fake.fake_launch(self._number, here())

    return Graph


def _is_capturing(made: Handles) -> bool:
    status, context = ctypes.c_int(), ctypes.c_void_p()
    # As a runtime does before each of its calls.
    assert made.fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.accelerator.current_device_index()) == 0
    assert made.fake.cuCtxSetCurrent(context) == 0
    stream = ctypes.c_void_p(torch.accelerator.current_stream().stream_id)
    assert made.fake.cuStreamIsCapturing(stream, ctypes.byref(status)) == 0
    return status.value != 0


def _module(made: Handles) -> types.ModuleType:
    """``torch.memdev``. Random numbers come from the CPU's default generator, so that one's state is kept."""
    module = types.ModuleType("torch.memdev")
    accelerator = torch.accelerator

    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.random.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        torch.random.set_rng_state(state)

    names = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": made.lib.memdev_device_count,
        "current_device": accelerator.current_device_index,
        "set_device": accelerator.set_device_index,
        "current_stream": accelerator.current_stream,
        "set_stream": accelerator.set_stream,
        "synchronize": accelerator.synchronize,
        "mem_get_info": lambda device=0: _mem_get_info(made),
        "empty_cache": made.lib.memdev_empty_cache,
        "device": lambda device: accelerator.device_index(torch._utils._get_device_index(device, optional=True)),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": lambda seed: None,  # torch.manual_seed has seeded the generator already
        "manual_seed_all": lambda seed: None,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "Stream": lambda *args, **kwargs: torch.Stream(*args, device=kwargs.pop("device", "memdev"), **kwargs),
        "Event": lambda *args, **kwargs: torch.Event(device="memdev", **kwargs),
        "Graph": _graphs(made),
        "is_current_stream_capturing": lambda: _is_capturing(made),
        "stream": lambda stream: stream,  # torch.Stream is its own context
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module
