"""Getting it onto a machine: wheels, a machine without a compiler, homes that cannot be written, extras that are missing."""

from __future__ import annotations

import io
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import forkserver
import pytest
import torch

from memmgr.config import torch_versions
from memmgr.config.extras import pip_line
from memmgr.native import binding, build, cache
from memmgr.tools.verbs import doctor

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def test_without_a_compiler_it_ends_in_a_sentence_of_ours(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    ninja = shutil.which("ninja", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if cmake is None or ninja is None:
        pytest.skip("no cmake or no ninja")
    empty = tmp_path / "bin"
    empty.mkdir()
    variables = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX")}
    done = subprocess.run(
        [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-S", ROOT / "allocator", "-B", tmp_path / "build"],
        capture_output=True,
        text=True,
        env={**variables, "PATH": str(empty)},
        timeout=120,
    )
    said = " ".join(done.stderr.split())
    assert done.returncode != 0 and "memmgr cannot be built without a C++20 compiler" in said, said
    assert "apt install g++" in said and "CMAKE_CXX_COMPILER" not in said, said


@pytest.mark.parametrize(
    ("hook", "variables", "said"),
    [
        ("get_requires_for_build_wheel", {}, "there is none on the PATH"),
        ("get_requires_for_build_editable", {"CXX": "g++-99 -m64"}, "CXX=g++-99 is none"),
        ("get_requires_for_build_wheel", {"CXX": "sh"}, ""),  # any named program that exists; CMake tries it
        ("get_requires_for_build_wheel", {"CMAKE_ARGS": "-DCMAKE_CXX_COMPILER=/opt/g++"}, ""),
        ("get_requires_for_build_sdist", {}, ""),
    ],
)
def test_pip_is_told_of_a_missing_compiler_in_one_line_before_cmake_begins(
    hook: str, variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    """pip runs the hook in a process, and shows its output."""
    pytest.importorskip("scikit_build_core.build")
    if "CXX" in variables and not said:
        (tmp_path / "sh").symlink_to("/bin/sh")
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "CMAKE_ARGS", "SKBUILD_CMAKE_ARGS")}
    environment |= {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT / "tools" / "house"), **variables}
    code = f"import build_backend; build_backend.{hook}()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT
    )
    assert done.returncode == bool(said), done.stderr
    assert done.stderr.count("\n") == bool(said)
    assert not said or done.stderr.startswith(f"memmgr cannot be built without a C++20 compiler, and {said}. Install ")


def test_a_budget_without_a_compiler_is_one_error_with_both_ways_out(tmp_path: Path) -> None:
    """The doctor says it before."""
    code = """
import memmgr
from memmgr.tools.verbs import doctor
found = {finding.name: finding for finding in doctor._native()}
print(found["compiler"].mark, found["allocator"].mark, found["allocator"].text)
try:
    with memmgr.budget("1GB", device="cpu"):
        print("opened")
except RuntimeError as error:
    print(error)
assert memmgr.stats() == {}
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "MEMMGR_BUDGET")}
    environment |= {"PATH": str(tmp_path), "MEMMGR_CACHE": str(tmp_path / "cache")}
    done = forkserver.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    doctors, opening = done.stdout.splitlines()
    ways = rf"for torch {re.escape(torch.__version__)}: install one such as g\+\+ .*, or a wheel of memmgr that carries"
    assert re.match(f"weaker NO no budget can be opened: no C.. compiler was found to make the pager {ways}", doctors)
    assert re.match(f"memmgr: no C.. compiler was found to make the pager {ways}", opening)


def test_a_wheel_that_carries_the_library_needs_no_compiler(tmp_path: Path) -> None:
    library = Path(binding.load().__file__)  # type: ignore[attr-defined]
    shutil.copy(library, tmp_path / f"{library.parent.name}.so")
    code = """
import sys
from pathlib import Path
import memmgr
from memmgr.native import binding
binding.prebuilt = lambda name: Path(sys.argv[1]) / f"{name}.so"
with memmgr.budget("1GB", device="cpu", quiet=True):
    print("opened")
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "MEMMGR_BUDGET")}
    environment |= {"PATH": str(tmp_path / "nothing"), "MEMMGR_CACHE": str(tmp_path / "cache")}
    done = forkserver.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout == "opened\n", done.stderr
    assert "compiling" not in done.stderr


def test_a_wheel_never_lacks_the_pager(tmp_path: Path) -> None:
    """Where no Python has torch, `.venv` gets one first: without the library each machine would need a compiler."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    says = ["make", "-n", "-C", tmp_path, "wheel", f"PYTHON={sys.executable}"]
    for pythons, made, named in (
        ("", True, tmp_path / ".venv" / "bin" / "python"),
        (sys.executable, False, sys.executable),
    ):
        done = subprocess.run([*says, f"WITH={pythons}"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        (packs,) = re.findall(
            r"prebuilt\.py build/wheel/raw/\*\.whl build/wheel/with *(.*)$", done.stdout, re.MULTILINE
        )
        assert packs == str(named), done.stdout
        assert ("make wheel: no Python here has torch, psutil and numpy" in done.stdout) == made
        assert bool(re.search(r"pip install .*-e \.$", done.stdout, re.MULTILINE)) == made
    prebuilt = [sys.executable, str(ROOT / "tools" / "house" / "prebuilt.py"), "x.whl", str(tmp_path)]
    done = subprocess.run(prebuilt, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "WHEEL FOLDER PYTHON ..." in done.stderr


@pytest.mark.slow
def test_the_wheel(tmp_path: Path) -> None:
    """Needs a network: the packages that build it are fetched."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist", ".*_cache"))
    command = ["make", "-C", tree, "wheel", f"PYTHON={sys.executable}"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    release = f"torch {torch.__version__}, Python {sys.version_info[0]}.{sys.version_info[1]}"
    assert f"the wheel needs no compiler with {release}. With another release it compiles" in said
    (wheel,) = (tree / "dist").glob("*.whl")
    assert re.search(r"-py3-none-manylinux_2_\d+_x86_64\.whl$", wheel.name), wheel.name
    assert not (tree / ".venv").exists(), "the packages of the tests were fetched"
    target = tmp_path / "there"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    assert (target / "memmgr" / "libmemmgr_core.so").is_file()
    environment = {**os.environ, "PYTHONPATH": str(target), "PATH": "", "MEMMGR_CACHE": str(tmp_path / "cache")}
    code = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]  # the checkout's
import memmgr
memmgr.budget('1GB', quiet=True).__enter__()
print(memmgr.__file__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert done.returncode == 0 and done.stdout.startswith(str(target)), done.stderr


@pytest.mark.parametrize("variables", [{}, {"MEMMGR_BUDGET": "1GB"}], ids=["import", "variable"])
def test_in_a_checkout_it_says_that_the_sources_hide_what_is_installed(variables: dict[str, str]) -> None:
    """A script in the folder that `pip install .` was run in finds ./memmgr first, without its other rooms."""
    code = "import sys; sys.modules['memmgr.policies'] = None; import torch; import memmgr; memmgr.budget"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMMGR_")} | variables
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == (2 if variables else 1)
    assert "this memmgr is a folder of its sources" in done.stderr.splitlines()[-1], done.stderr
    assert "python -P" in done.stderr and "During handling" not in done.stderr


def test_what_the_package_says_of_itself() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert {"Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.13"} <= set(
        project["classifiers"]
    )
    extras = project["optional-dependencies"]
    (everything,) = extras["all"]
    assert set(re.search(r"\[(.*)\]", everything)[1].split(",")) == set(extras) - {"all", "test", "dev", "docs"}  # type: ignore[index]


def test_python_m_memmgr(tmp_path: Path) -> None:
    done = forkserver.run(
        [sys.executable, "-m", "memmgr", "--version"], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 0 and done.stdout.startswith("memmgr "), done.stderr


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [
        ("MemmgrCallback", "transformers", "trainer"),
        ("MemmgrCollector", "prometheus_client", "prometheus"),
        ("MemmgrLightningCallback", "lightning", "lightning"),
        ("MemmgrTracker", "accelerate", "trainer"),
    ],
)
def test_a_missing_extra_is_named_with_its_pip_line(name: str, missing: str, extra: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = sys.modules['pytorch_lightning'] = None\nfrom memmgr.integrations import {name}"
    done = forkserver.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"needs {missing}: {pip_line(extra)}"), done.stderr


def test_every_pip_line_names_an_extra_that_there_is() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    for folder in ("memmgr", "tools", "docs"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".md"):
                named = re.findall(r"(?:memmgr|\.)\[([a-z]+)\]['\"]|pip_line\(.([a-z]+).\)", path.read_text())
                assert {one or other for one, other in named} <= extras, path


(_MAJOR, _LOW), (_, _HIGH) = torch_versions.OLDEST, torch_versions.NEWEST
RANGE = f"{_MAJOR}.{_LOW} to {_MAJOR}.{_HIGH}"
WANTED = f">={_MAJOR}.{_LOW},<{_MAJOR}.{_HIGH + 1}"


@pytest.mark.parametrize(
    "release", [f"{_MAJOR}.{_LOW - 1}.1", f"{_MAJOR}.{_HIGH + 1}.0+cu132", f"{_MAJOR + 1}.0.0a0+git"]
)
def test_a_torch_that_it_is_not_made_for_is_one_sentence(release: str, tmp_path: Path) -> None:
    """`pip install torch` may install a newer release than the pager knows."""
    code = f"""
import torch, memmgr
torch.__version__ = {release!r}
try:
    memmgr.budget("1GB", device="cpu").__enter__()
except RuntimeError as error:
    print(error)
"""
    environment = {**os.environ, "MEMMGR_CACHE": str(tmp_path)}
    done = forkserver.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout == (
        f"memmgr: this version is made for torch {RANGE}, not for {release}: pip install 'torch{WANTED}'\n"
    ), done.stderr


def test_the_releases_of_torch_are_those_that_pip_installs() -> None:
    assert torch_versions.OLDEST[0] == torch_versions.NEWEST[0], "the range of minor releases has no end"
    with (ROOT / "pyproject.toml").open("rb") as file:
        (wanted,) = [one for one in tomllib.load(file)["project"]["dependencies"] if one.startswith("torch")]
    assert wanted == f"torch{WANTED}"
    assert f'"torch{WANTED}"' in (ROOT / "Makefile").read_text()
    assert f"- pytorch {WANTED}\n" in (ROOT / "tools" / "house" / "conda" / "meta.yaml").read_text()
    assert torch_versions.unfit(torch.__version__) == ""


def test_pages_and_the_makefile_name_the_supported_releases_of_torch() -> None:
    """Each range of releases of torch on a page is this one; the reports keep those of their day."""
    named = {
        path.relative_to(ROOT).as_posix(): re.findall(rf"\b{_MAJOR}\.\d\d to {_MAJOR}\.\d\d\b", path.read_text())
        for path in (
            ROOT / "Makefile",
            ROOT / "README.md",
            *(ROOT / "docs").glob("*.md"),
            *(ROOT / "docs").glob("develop/*.md"),
        )
    }
    assert {path: found for path, found in named.items() if set(found) - {RANGE}} == {}
    pages = ("Makefile", "README.md", "docs/errors.md", "docs/quickstart.md", "docs/troubleshooting.md")
    assert [page for page in pages if not named[page]] == []


# ---- the cache of compiled libraries ---------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, and a folder for temporary files, of this test alone."""
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def _close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system that is mounted read-only; to root a mode means nothing."""
    access, mkdir = os.access, Path.mkdir

    def inside(path: object) -> bool:
        return Path(str(path)).is_relative_to(folder)

    def refuse(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if inside(self) and not (exist_ok and self.is_dir()):
            raise OSError(30, "Read-only file system", str(self))
        mkdir(self, mode, parents, exist_ok)

    monkeypatch.setattr(os, "access", lambda path, mode: not (inside(path) and mode & os.W_OK) and access(path, mode))
    monkeypatch.setattr(Path, "mkdir", refuse)


def test_the_users_cache_folder(home: Path) -> None:
    assert cache.folder() == (home / ".cache" / "memmgr", None)
    assert cache.place("a", "b.so") == home / ".cache" / "memmgr" / "a" / "b.so"


def test_a_home_that_cannot_be_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = home / ".cache" / "memmgr" / "old" / "b.so"
    made.parent.mkdir(parents=True)
    made.touch()
    _close(home, monkeypatch)
    folder, why = cache.folder()
    assert folder == home.parent / "tmp" / f"memmgr-cache-{os.getuid()}" and "cannot be written" in (why or "")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "libraries are loaded from it"
    assert cache.place("new", "b.so") == folder / "new" / "b.so"
    assert cache.place("old", "b.so") == made, "what is there already is used"


def test_no_home_at_all(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    folder, why = cache.folder()
    assert folder.parent == home.parent / "tmp" and why == "this user has no home"


def test_a_temporary_folder_that_others_may_write_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = home.parent / "tmp" / f"memmgr-cache-{os.getuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    _close(home, monkeypatch)
    assert cache.folder()[0] != theirs


def test_the_folder_that_the_user_names_is_the_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(home / "mine"))
    _close(home, monkeypatch)
    assert cache.folder() == (home / "mine", None)
    with pytest.raises(build.NotBuiltError, match=r"mine.* cannot be written .*MEMMGR_CACHE"):
        build.compile_library(Path("x.cpp"), cache.place("a", "b.so"), [], [], "x")


def test_the_doctor_names_the_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binding.load()
    found = {finding.name: finding for finding in doctor._native()}
    assert "MEMMGR_CACHE" in found["allocator"].text and "cache" not in found
    monkeypatch.setattr(cache, "_is_writable", lambda folder: folder.parent == home.parent / "tmp")
    found = {finding.name: finding for finding in doctor._native()}
    assert found["cache"].mark == "weaker" and "MEMMGR_CACHE" in found["cache"].advice


def test_a_budget_opens_where_the_home_cannot_be_written(tmp_path: Path) -> None:
    """A file system that no user can write to, root neither; a library compiled elsewhere is copied, to save a minute."""
    made = Path(binding.load().__file__)
    folder = tmp_path / f"memmgr-cache-{os.getuid()}"
    folder.mkdir(mode=0o700)
    shutil.copytree(made.parent, folder / made.parent.name)
    code = """
import memmgr, torch
from memmgr.tools.verbs import doctor
with memmgr.budget("1GB", device="cpu", quiet=True) as mm:
    torch.ones(8).sum()
print(mm.stats()["budget_bytes"], {finding.name: finding for finding in doctor._native()}["cache"].text)
"""
    left_out = (cache.VARIABLE, "XDG_CACHE_HOME", "MEMMGR_BUDGET", "XDG_RUNTIME_DIR")
    environment = {k: v for k, v in os.environ.items() if k not in left_out} | {
        "HOME": "/proc",
        "TMPDIR": str(tmp_path),
    }
    done = forkserver.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1000000000 /proc/.cache/memmgr cannot be written, so "), done.stdout
    assert str(folder) in done.stdout and "compiling" not in done.stderr, done.stderr


# ---- compiling says so -----------------------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [False, True])
def test_compiling_says_so_at_once_and_how_long_it_took(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    with cache.said("the pager", Path("/somewhere")):
        assert shown.getvalue().startswith("memmgr: compiling the pager, once")
    said = shown.getvalue()
    assert "kept in /somewhere" in said
    assert re.search(r"\d s\s*$", said) and ("\r" in said) == terminal and said.count("\n") == (1 if terminal else 2)


def test_a_compiler_that_fails_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with pytest.raises(ValueError), cache.said("the pager", Path("/somewhere")):
        raise ValueError
    assert shown.getvalue().endswith("\n")
