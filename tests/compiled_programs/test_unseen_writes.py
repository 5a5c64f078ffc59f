"""Launches whose thread waits without the GIL, and buffers that C++ has written to unseen."""

import ctypes
import sys

import forkserver
import pytest
import torch
from threads import one_thread  # noqa: F401  a fixture

import memmgr

from .test_launches import pytestmark  # noqa: F401  marks of this module, too

ROWS, WIDTH = 512, 64  # 128 KiB: above the size from which a storage leaves

# The kernel's number is -1, so that its reader asks for Python's error. The second tensor is a subclass: its check asks Python.
ABSENT = f"""
import torch, memmgr
from memmgr.native import binding
class Own(torch.nn.Parameter): pass
x = torch.ones({ROWS}, {WIDTH})
{{setting}}
compiled(x, 5), compiled(x, 7)
want = compiled(x, -1).detach()
with memmgr.budget("100MB", policy="offload", quiet=True):
    y = x * 1
    assert binding.load().take_away(y, 1) > 0
    assert torch.equal(compiled(y, -1), want)
"""


@pytest.mark.parametrize(
    "setting",
    [
        f"w = torch.nn.Parameter(torch.ones({WIDTH})); compiled = torch.compile(lambda x, n: (x * w + n).sin(), dynamic=True)",
        # compiling costs ten seconds of a processor in each process
        pytest.param(
            f"w = Own(torch.ones({WIDTH})); f = torch.compile(lambda x, w: (x * w).sin()); compiled = lambda x, n: f(x, w)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_launch_reads_its_arguments_with_the_gil(setting: str) -> None:
    """A tensor of the launch is absent, so the thread waits without the GIL until it is back."""
    forkserver.run([sys.executable, "-W", "ignore", "-c", ABSENT.format(setting=setting)], check=True)


def test_a_buffer_that_foreign_code_has_written_to_is_not_new() -> None:
    """The compiled graph returns it as it was allocated. Code that asks for its address in C++ announces no write."""
    weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
    address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    )

    @torch.compile(dynamic=False)
    def make(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(ROWS, WIDTH), x * weight

    @torch.compile(dynamic=False)
    def use(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y[: ROWS // 4].copy_((x * weight)[: ROWS // 4].detach())
        return (x * weight).sin()

    with memmgr.budget("100MB", quiet=True):
        x = torch.randn(ROWS, WIDTH)
        y, _ = make(x)
        ctypes.memset(address_of(y), 0x3F, y.nbytes)
        use(x, y)
        assert y[ROWS // 4 :].view(torch.int32).eq(0x3F3F3F3F).all()
