"""An Inductor for memdev that writes modules as it does for CUDA: each kernel is an object that a module makes by
`async_compile.triton` and queues by `run(..., stream=)`, buffers come from a C function, and inputs of another alignment
are copied. The kernels are those that Inductor writes in C++ for the CPU, on raw addresses."""

import ast
import ctypes
import re
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from . import device

_PARAMETERS = re.compile(r'extern "C"\s+void\s+kernel\(([^)]*)\)')


class Kernel:
    """The double of torch's CachingAutotuner, with the parts that a module's code and memmgr use. Its first launch tries a
    second variant of the kernel on copies of the tensors that are written.

    Args:
        types: of the C++ arguments.
        source: in C++.
    """

    def __init__(self, types: list[str], source: str) -> None:
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        found = _PARAMETERS.search(source)
        assert found
        names = [part.split()[-1].lstrip("*") for part in found[1].split(",")]
        kinds = dict(zip(names, types, strict=True))
        # A number that was compiled in is an argument, a size of blocks is none.
        self.triton_meta = {
            "signature": {name: "*fp32" if kind.endswith("*") else "i64" for name, kind in kinds.items()}
            | {"XBLOCK": "constexpr"}
        }
        self.custom_kernel = False
        self.mutated_arg_names = [name for name, kind in kinds.items() if "*" in kind and "const" not in kind]
        module = CppPythonBindingsCodeCache.load_pybinding(types, source).__self__
        self._function = ctypes.cast(ctypes.CDLL(module.__file__).kernel, ctypes.c_void_p)
        self._names = names
        self._tuned = False

    def run(self, *args: Any, stream: int) -> None:
        assert stream == get_raw_stream(0)
        if not self._tuned:
            self._tuned = True
            copies = [
                value.clone() if name in self.mutated_arg_names else value
                for name, value in zip(self._names, args, strict=True)
            ]
            torch.empty(1 << 14, device="memdev").zero_()  # as torch clears the device's cache
            self._launch(copies)
        self._launch(args)

    def _launch(self, args: Sequence[Any]) -> None:
        assert device.handles is not None
        words, nbytes = [], 0
        for value in args:
            if isinstance(value, torch.Tensor):
                assert value.device.type == "memdev"
                words.append(value.data_ptr())
                nbytes += value.numel() * value.element_size()
            else:
                words.append(value)
        array = (ctypes.c_int64 * len(words))(*words)
        device.handles.lib.memdev_launch(self._function, len(words), array, ctypes.c_uint64(nbytes))


def get_raw_stream(index: int) -> int:
    return torch.accelerator.current_stream(index).stream_id


def install() -> None:
    """Registers memdev with Dynamo and Inductor, for the rest of this process."""
    # The first warning comes from torch's own modules, which Inductor imports; the other from Dynamo's look at a gradient.
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
    from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
    from torch._inductor import async_compile, compile_fx
    from torch._inductor.codegen.common import (
        DeviceOpOverrides,
        register_backend_for_device,
        register_device_op_overrides,
    )
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.scheduler import BaseScheduling, Scheduler

    assert device.handles is not None
    empty_strided = ctypes.PYFUNCTYPE(ctypes.py_object)(("memdev_empty_strided", device.handles.lib))
    globals()["empty_strided_memdev"] = empty_strided()

    class Interface(DeviceInterface):
        class Worker:
            @staticmethod
            def set_device(index: int) -> None:
                torch.accelerator.set_device_index(index)

            @staticmethod
            def current_device() -> int:
                return torch.accelerator.current_device_index()

            @staticmethod
            def get_device_properties(where: object = None) -> SimpleNamespace:
                return SimpleNamespace(multi_processor_count=1, major=0, minor=0, warp_size=1)

        @staticmethod
        def current_device() -> int:
            return torch.accelerator.current_device_index()

        @staticmethod
        def set_device(index: int) -> None:
            torch.accelerator.set_device_index(index)

        @staticmethod
        def device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def synchronize(where: object = None) -> None:
            torch.accelerator.synchronize()

        @staticmethod
        def get_raw_stream(index: int) -> int:
            return get_raw_stream(index)

        @staticmethod
        def get_compute_capability(where: object = None) -> int:
            return 0

    class Overrides(DeviceOpOverrides):
        def import_get_raw_stream_as(self, name: str) -> str:
            return f"from memdev.inductor import get_raw_stream as {name}"

        def set_device(self, device_idx: int) -> str:
            return f"torch.accelerator.set_device_index({device_idx})"

        def synchronize(self) -> str:
            return "torch.accelerator.synchronize()"

        def device_guard(self, device_idx: int) -> str:
            return f"torch.accelerator.device_index({device_idx})"

    class Wrapper(PythonWrapperCodegen):
        @staticmethod
        def create(*args: Any, **kwargs: Any) -> Any:
            return Wrapper()

        def write_header(self) -> None:
            super().write_header()
            self.header.splice("from memdev.inductor import empty_strided_memdev")

        def define_kernel(self, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> None:
            call = ast.parse(kernel_body.strip(), mode="eval").body
            assert isinstance(call, ast.Call)
            types, source = (ast.literal_eval(each) for each in call.args[:2])
            text = repr(f"{types}\n{source}")
            super().define_kernel(
                kernel_name, f"async_compile.triton({kernel_name!r}, {text}, device_str='memdev')", *args, **kwargs
            )

        def _generate_kernel_call_helper(
            self, kernel_name: str, call_args: Any, *, device: Any = None, **_: Any
        ) -> None:
            stream = PythonWrapperCodegen.write_get_raw_stream(self, 0, "")
            arguments = ", ".join(self.prepare_triton_kernel_call(call_args))
            self.writeline(f"{kernel_name}.run({arguments}, stream={stream})")

        def make_allocation(
            self, name: str, device: Any, dtype: Any, shape: Any, stride: Any, *args: Any, **kw: Any
        ) -> str:
            made = super().make_allocation(name, device, dtype, shape, stride, *args, **kw)
            return re.sub(
                r"empty_strided\((.*), device='memdev', dtype=([\w.]+)\)", r"empty_strided_memdev(\1, \2)", made
            )

    class Scheduling(BaseScheduling):
        def __init__(self, scheduler: Any) -> None:
            super().__init__(scheduler)
            self._cpp = CppScheduling(scheduler)

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("_") or name in ("scheduler", "__class__"):
                return super().__getattribute__(name)
            return getattr(super().__getattribute__("_cpp"), name)

    def triton(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Kernel:
        assert device_str == "memdev"
        first, _, source = source_code.partition("\n")
        return Kernel(ast.literal_eval(first), source)

    def inputs_to_check(inputs: Any, static: Any) -> list[int]:
        return [
            i
            for i, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and value.device.type == "memdev" and i not in static
        ]

    register_interface_for_device("memdev", Interface)
    register_device_op_overrides("memdev", Overrides())
    register_backend_for_device("memdev", Scheduling, Wrapper)
    torch._inductor.config.cpp.simdlen = 1  # vectors are for the device that is called "cpu"
    # Loops of C++ kernels have other groups than Triton's, by which these fusions go.
    Scheduler._try_reindex_pointwise_for_reduction = lambda self, one, other: False
    Scheduler.shared_data_after_reordering_loop = lambda self, one, other: -1
    async_compile.AsyncCompile.triton = triton
    compile_fx.get_input_idxs_to_check = inputs_to_check
