"""When CUDA's allocator is put in place, and why not: the order of imports, on a torch without CUDA and with a faked one."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forkserver
import pytest
import torch

import memmgr
from memmgr.native import cuda as allocator
from memmgr.native import device as devices
from memmgr.native.build import NotBuiltError, include_folder, package_sources


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torch as it is on a machine with a GPU, before CUDA is initialised; nothing is built."""
    monkeypatch.setattr(allocator, "_library", None)
    monkeypatch.setattr(allocator, "_why", None)
    monkeypatch.setattr(allocator, "_torchs", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(allocator, "_has_device", lambda: True)
    monkeypatch.delenv(allocator.INSTALL_VARIABLE, raising=False)
    monkeypatch.delenv(allocator.DRIVER_VARIABLE, raising=False)
    monkeypatch.setattr(allocator, "build", lambda: pytest.fail("was built"))
    return monkeypatch


class Library:
    """The compiled allocator's answers."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.there, self.asked = refuses, False, []
        self.mm_cuda_in_place = lambda: int(self.there)
        self.doors: list[Any] = []

    def mm_cuda_native(self, driver: Any, *_: Any) -> int:
        self.doors.append(driver)
        return 4096

    def mm_cuda_install(self, *arguments: Any) -> int:
        self.asked.append(arguments[:2])
        self.there = not self.refuses
        if self.refuses:
            arguments[2].value = b"another one"
        return -1 if self.refuses else 0


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda m: m.setattr(torch.version, "cuda", None), "no CUDA"),
        (lambda m: m.delattr(torch._C, "_cuda_getAllocatorBackend"), "no CUDA"),
        (lambda m: m.setattr(torch.cuda, "_is_in_bad_fork", lambda: True), "forked child"),
        (lambda m: m.setattr(allocator, "_has_device", lambda: False), "no GPU"),
        (lambda m: m.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "cudaMallocAsync"), "cudaMallocAsync"),
        (lambda m: m.setattr(sys, "orig_argv", ["python", "/x/torch/_inductor/compile_worker/__main__.py"]), "worker"),
        (
            lambda m: m.setitem(
                sys.modules, "torch.utils.data._utils.worker", SimpleNamespace(get_worker_info=lambda: object())
            ),
            "worker",
        ),
        (lambda m: m.setenv("MEMMGR_CUDA_MEMORY", "some"), "none of mapped, plain"),
        (lambda m: m.setenv("MEMMGR_CUDA_PAGE", "16MiB"), "'16MiB' is not a number of bytes"),
    ],
)
def test_why_not(cuda: pytest.MonkeyPatch, change: Any, says: str) -> None:
    change(cuda)
    assert says in (allocator.install() or "")
    assert not allocator.in_place()
    for device in ("cuda", "cuda:1"):
        with pytest.raises(RuntimeError, match=f"^memmgr: a budget on 'cuda' cannot be kept: .*{says}") as refused:
            memmgr.budget("1GB", device=device)
        assert type(refused.value) is RuntimeError


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.setenv("MEMMGR_INSTALL", "0"),
        lambda m: m.setenv("MEMMGR_CONF", "quiet:1,allocator:native"),
    ],
)
def test_torchs_own_allocator_stays_and_serves_where_it_is_wanted(cuda: pytest.MonkeyPatch, change: Any) -> None:
    """`import memmgr` builds nothing then; a budget puts a door in front of it."""
    change(cuda)
    cuda.setattr(torch.accelerator, "is_available", lambda: True)
    cuda.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert allocator.install() == allocator.LEFT
    library = Library()
    cuda.setattr(allocator, "build", lambda: Path("x.so"))
    cuda.setattr(allocator, "_load", lambda path: library)
    for kind in ("auto", "native"):
        assert memmgr.budget("1GB", allocator=kind)._device == torch.device("cuda")
    assert (library.asked, library.doors) == ([], [None])
    assert allocator.address() == 4096 and not allocator.in_place()


def test_a_budget_takes_over_where_cuda_is_in_use(cuda: pytest.MonkeyPatch) -> None:
    """`import memmgr` builds nothing then. While a graph is captured the budget is refused."""
    library, capturing = Library(), True
    cuda.setattr(torch.cuda, "is_initialized", lambda: True)
    cuda.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert allocator.install() == allocator.IN_USE
    cuda.setattr(allocator, "build", lambda: Path("x.so"))
    cuda.setattr(allocator, "_load", lambda path: library)
    assert allocator.manage() == allocator.CAPTURING
    capturing = False
    assert allocator.install() == allocator.IN_USE and not library.asked
    assert allocator.manage() is None and allocator.in_place()
    assert (library.asked, library.doors) == ([(None, 0)], [])


def test_torchs_own_allocator_cannot_come_back(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(allocator, "build", lambda: Path("x.so"))
    cuda.setattr(allocator, "_load", lambda path: Library())
    assert allocator.install() is None
    with pytest.raises(RuntimeError, match="there already: MEMMGR_CONF=allocator:native"):
        memmgr.budget("1GB", device="cuda", allocator="native")
    with pytest.raises(ValueError, match="allocator: 'mine' is none of auto, native"):
        memmgr.budget("1GB", allocator="mine")


@pytest.mark.parametrize("memory, number", [(None, 0), ("mapped", 0), ("PLAIN", 1)])
def test_it_is_put_in_place_once(cuda: pytest.MonkeyPatch, memory: str | None, number: int) -> None:
    library, built = Library(), []
    cuda.setattr(allocator, "build", lambda: built.append(1) or Path("x.so"))
    cuda.setattr(allocator, "_load", lambda path: library)
    if memory:
        cuda.setenv("MEMMGR_CUDA_MEMORY", memory)
    assert allocator.install() is None
    assert allocator.install() is None
    assert allocator.in_place()
    assert (built, library.asked) == ([1], [(None, number)])
    assert devices.resolve("cuda:1") == torch.device("cuda:1")
    assert devices.resolve("cuda") == devices.resolve(None) == torch.device("cuda")  # CUDA was not asked for a number
    library.there = False
    assert "another allocator" in (allocator.install() or "")


def test_a_refusal_is_told(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(allocator, "build", lambda: Path("x.so"))
    cuda.setattr(allocator, "_load", lambda path: Library(refuses=True))
    assert allocator.install() == "another one"
    assert not allocator.in_place()


@pytest.mark.parametrize("error", [NotBuiltError("no compiler"), OSError("no such symbol"), RuntimeError("broken")])
def test_an_import_never_fails(cuda: pytest.MonkeyPatch, error: Exception) -> None:
    def build() -> Path:
        raise error

    cuda.setattr(allocator, "build", build)
    assert str(error) in (allocator.install() or "")


@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_a_hidden_device_is_none(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert not allocator._has_device()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert allocator._has_device()


@pytest.mark.parametrize("counted, there", [(0, False), (2, True), (-1, True)])
def test_nvml_says_whether_there_is_a_device(monkeypatch: pytest.MonkeyPatch, counted: int, there: bool) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: counted)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert allocator._has_device() is there
    monkeypatch.setattr("os.path.exists", lambda path: False)
    assert not allocator._has_device()


def _headers(folder: Path, release: int, whole: bool = True) -> Path:
    (folder / "crt").mkdir(parents=True)
    (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {release}\n")
    if whole:
        (folder / "crt" / "host_config.h").write_text("")
    return folder


def test_headers_have_to_be_whole_and_of_torchs_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    folders: list[Path] = []
    monkeypatch.setattr(allocator, "header_folders", lambda: folders)
    with pytest.raises(NotBuiltError, match=r"not found.*pip install nvidia-cuda-runtime"):
        allocator.find_headers()
    folders.append(_headers(tmp_path / "old", 12080))
    with pytest.raises(NotBuiltError, match="another release than torch"):
        allocator.find_headers()
    folders.append(_headers(tmp_path / "half", 13000, whole=False))
    assert allocator.find_headers() == [
        tmp_path / "half",
        tmp_path / "old",
    ]  # of the latter, the ones that identify the compiler
    del folders[0]
    with pytest.raises(NotBuiltError, match="not found"):
        allocator.find_headers()
    folders.append(_headers(tmp_path / "whole", 13000))
    assert allocator.find_headers() == [tmp_path / "whole"]


def test_headers_are_looked_for_beside_torch_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    found = [str(folder) for folder in allocator.header_folders()]
    assert found[0].endswith("nvidia/cu13/include")
    assert found.index("/opt/cuda/include") < found.index("/usr/local/cuda/include")


def test_the_sources_travel_with_the_package() -> None:
    sources = package_sources("cuda", "plugin.cpp")
    assert (include_folder(sources) / "memmgr" / "plugin.h").is_file()


ASKED = "import memmgr; print('asked' if 'memmgr.native.cuda' in sys.modules else 'not asked')"
WITH_CUDA = "torch.version.cuda = '13.0'; torch.backends.cuda.is_built = lambda: True; "


def _python(code: str, start: Any = subprocess.run, **variables: str) -> list[str]:
    """The lines that the program prints. `start`: `forkserver.run` where the program imports torch before anything else."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MEMMGR_")}
    done = start(
        [sys.executable, "-P", "-c", "import sys; " + code], env={**clean, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_torch_alone_leaves_nothing_of_ours_and_without_cuda_nothing_is_loaded_for_it() -> None:
    """One interpreter answers for the modules, the allocator and the version, where torch comes first."""
    code = "import torch; print([m for m in sys.modules if m.split('.')[0] == 'memmgr']); " + ASKED
    modules, asked, version = _python(code + "; print(memmgr.__version__)")
    assert (modules, version) == ("[]", memmgr.__version__)
    assert asked == "not asked" or torch.version.cuda is not None


def test_a_script_that_imports_memmgr_after_torch_has_asked() -> None:
    assert _python("import torch; " + WITH_CUDA + ASKED, MEMMGR_INSTALL="0") == ["asked"]


def test_a_script_that_imports_memmgr_before_torch_has_asked() -> None:
    code = (
        "import memmgr; memmgr._install = lambda: print('asked'); import torch; print(sys.modules['memmgr'] is memmgr)"
    )
    assert _python(code) == ["asked", "True"]


def test_without_cuda_nothing_is_loaded_for_it_where_memmgr_comes_first() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    assert _python("import memmgr, torch; " + ASKED) == ["not asked"]


def test_a_budget_in_the_environment_asks_before_the_script_begins() -> None:
    code = "import memmgr; memmgr._install = lambda: print('asked'); import torch; print('memmgr.api.autostart' in sys.modules)"
    assert _python(code, MEMMGR_BUDGET="1GB") == ["asked", "True"]


AGAIN = """
import importlib
import sys
import torch
import memmgr

importlib.reload(memmgr)
with memmgr.budget("1GB", quiet=True):
    assert torch.ones(10**5).sum() == 10**5
importlib.reload(memmgr)
for name in [name for name in sys.modules if name.partition(".")[0] == "memmgr"]:
    del sys.modules[name]
import memmgr
assert torch.ones(3).sum() == 3
"""


def test_it_may_be_imported_again() -> None:
    """Torch takes one kernel for the pager's key, and ends the process where it is offered another."""
    assert _python(AGAIN, start=forkserver.run) == []
