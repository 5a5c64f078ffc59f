"""Four rooms at the top level, one package when installed."""

from __future__ import annotations

import ast
import importlib
import importlib.resources
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path

import pytest

from memmgr.config import variables

ROOT = Path(__file__).parents[2]
FOR_A_CHECKOUT = {"house", "studies"}
"""Folders of tools/ that are not installed: their files are run by their paths."""


def installed(room: str) -> list[Path]:
    """The Python files of a room that are part of the package."""
    return [file for file in sorted((ROOT / room).rglob("*.py")) if not FOR_A_CHECKOUT & set(file.parent.parts)]


def _project() -> dict[str, dict[str, object]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def test_the_library_and_the_pagers_sources_are_inside_the_package() -> None:
    package = importlib.resources.files("memmgr")
    assert package.joinpath("libmemmgr_core.so").is_file()
    assert package.joinpath("_include", "memmgr", "core.h").is_file()
    assert package.joinpath("_pager_src", "pager.cpp").is_file()
    assert package.joinpath("_pager_src", "pools", "pool.h").is_file()
    assert package.joinpath("_pager_src", "base", "locks.def").is_file()
    assert package.joinpath("_include", "memmgr", "plugin.h").is_file()
    assert package.joinpath("_cuda_src", "plugin.cpp").is_file()
    assert package.joinpath("_cuda_src", "meter.cpp").is_file()


def test_the_rooms_are_one_package() -> None:
    import memmgr.policies
    import memmgr.tools

    assert Path(memmgr.tools.__path__[0]).samefile(ROOT / "tools")
    assert Path(memmgr.policies.__path__[0]).samefile(ROOT / "policies")


def test_a_wheel_leaves_out_what_is_for_a_checkout() -> None:
    left_out = _project()["tool"]["scikit-build"]["wheel"]["exclude"]
    found = {path.relative_to(ROOT) for path in (ROOT / "tools").rglob("*") if path.name in FOR_A_CHECKOUT}
    assert {f"memmgr/{folder}/**" for folder in found} <= set(left_out) and len(found) == len(FOR_A_CHECKOUT)


def test_every_file_of_a_room_is_a_module_of_the_package() -> None:
    """Folders without an `__init__` would be left out by mypy and, by some installers, of the wheel."""
    seen = 0
    for room in ("policies", "tools"):
        for file in installed(room):
            folder = file.parent.relative_to(ROOT)
            assert (file.parent / "__init__.py").is_file(), folder
            if room == "policies":  # those of tools are run as well as imported
                name = ".".join(("memmgr", *folder.parts, *(() if file.stem == "__init__" else (file.stem,))))
                module = importlib.import_module(name)
                assert module.__file__ is not None and Path(module.__file__).samefile(file), name
                seen += 1
    assert seen >= 30


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of each import from memmgr, `memmgr.folder.file` or `memmgr.name`. Those that only types need are free
    (`if TYPE_CHECKING`)."""
    tree = ast.parse(file.read_text())
    free = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typed = {id(inner) for node in free for inner in ast.walk(node)}
    package = ".".join(file.relative_to(ROOT).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and id(node) not in typed:
            assert node.level < 2, "siblings are imported with one dot, other folders by their whole name"
            of = ".".join(filter(None, (package if node.level else "", node.module)))
            names = [f"{of}.{alias.name}" for alias in node.names]
        else:
            names = []
        yield from ((node.lineno, name) for name in names if name.startswith("memmgr."))


TOOLS = {
    "common": set(),
    "view": {"common"},
    "bench": {"common", "view"},
    "gpu": {"bench"},
    "verbs": {"common", "view", "bench", "gpu"},
}


@pytest.mark.parametrize("folder", TOOLS)
def test_folders_of_tools_import_downwards(folder: str) -> None:
    files = sorted((ROOT / "tools" / folder).glob("*.py"))
    assert len(files) > 5
    for file in files:
        for line, name in imported(file):
            room, other = (*name.split("."), "")[1:3]
            assert room != "tools" or other not in TOOLS.keys() - TOOLS[folder] - {folder}, (
                f"{file.name}:{line}: {name}"
            )


OPEN_TO_TOOLS = {"policies", "tools", "config", "telemetry", "observe"}
ALSO_OPEN = {
    "verbs/doctor.py": ("native", "checks the libraries of the installation"),
    "gpu/train.py": ("native", "reads the counters of the core, and sets the pager's clock on the driver's double"),
    "tune/batch_size.py": ("readers", "wraps functions of libraries once they are imported, as the readers do"),
    "tune/child.py": ("readers", "wraps the function that runs a backward in a process that has no budget"),
    "verbs/run.py": ("_environ", "calls the entry point where torch was imported before the variables were set"),
}
"""By file: a further folder that it may import, and the reason."""


def test_tools_import_the_public_names_and_three_folders() -> None:
    import memmgr

    needed = set()
    for file in installed("tools"):
        where = str(file.relative_to(ROOT / "tools"))
        for line, name in imported(file):
            top = name.split(".")[1]
            if top in OPEN_TO_TOOLS or top in memmgr.__all__:
                continue
            assert ALSO_OPEN.get(where, ("",))[0] == top, f"{where}:{line}: {name}"
            needed.add(where)
    assert needed == set(ALSO_OPEN)


FOLDERS = {
    "common": set(),
    "config": {"common"},
    "native": {"common", "config"},
    "readers": {"common", "config", "native"},
    "observe": {"common", "config", "native", "readers"},
    "telemetry": {"common", "observe"},
    "distributed": {"common", "observe", "readers"},
    "runtime": {"common", "config", "native", "readers", "observe", "telemetry", "distributed"},
    "api": {"common", "config", "native", "observe", "runtime"},
    "integrations": {"api", "common", "config", "observe"},
    "": {"api", "common", "config", "native", "readers"},
}
"""The folders of memmgr, and those that each imports: all of them stand above it. The last one is the package itself."""


def test_folders_of_memmgr_import_downwards() -> None:
    used: dict[str, set[str]] = {folder: set() for folder in FOLDERS}
    for file in sorted((ROOT / "memmgr").rglob("*.py")):
        own = ".".join(file.relative_to(ROOT / "memmgr").parent.parts)
        above = [folder for folder in FOLDERS if folder][: list(FOLDERS).index(own)]
        for line, name in imported(file):
            folder = name.split(".")[1]
            if folder not in (own, "policies", "tools"):
                assert folder in above, f"{own}/{file.name}:{line} imports {name}"
                used[own].add(folder)
    assert used == FOLDERS


def test_plain_folders_hold_the_modules() -> None:
    """Three files stand at the top, each an entrance: `import memmgr`, `python -m memmgr`, torch's entry point."""
    package = ROOT / "memmgr"
    assert {file.name for file in package.glob("*.py")} == {"__init__.py", "__main__.py", "_environ.py"}
    assert all((package / folder / "__init__.py").is_file() for folder in FOLDERS)


@pytest.mark.parametrize("folder", ["config", "telemetry", "observe"])
def test_a_folder_that_tools_import_loads_nothing_by_itself(folder: str) -> None:
    """The command line answers before torch is imported."""
    assert not list(imported(ROOT / "memmgr" / folder / "__init__.py"))
    code = f"import memmgr.{folder}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


def test_the_pager_names_no_function_of_memmgr() -> None:
    """They are passed to it: a name in C++ would not be renamed with the function."""
    for source in sorted((ROOT / "allocator" / "pager").rglob("*.cpp")):
        assert not re.search(r'"memmgr\.[\w.]+", *"\w+"', source.read_text()), source


def test_every_variable_that_the_code_reads_is_known_and_has_a_row() -> None:
    files = [path for room in ("memmgr", "tools", "tests") for path in ROOT.glob(f"{room}/**/*.py")]
    files += [path for suffix in ("cpp", "h") for path in ROOT.glob(f"allocator/**/*.{suffix}")]
    done = "\n".join(path.read_text() for path in files)
    read = set(re.findall(r"""(?:environ(?:\.get\(|\[)|getenv\(|VARIABLE = )"(MEMMGR_[A-Z_]+)""", done))
    assert "MEMMGR_CUDA_MEMORY" in read  # read through a name of ours
    known = variables.VARIABLES | variables.OF_TESTS
    assert read == known, read ^ known
    page = (ROOT / "docs" / "variables.md").read_text()
    assert set(re.findall(r"^\| `(MEMMGR_[A-Z_]+)` \|", page, re.MULTILINE)) == variables.VARIABLES


def test_the_linter_knows_the_files_in_folders() -> None:
    """The room's one dot would be taken for a second copy where the exception for it does not reach."""
    pytest.importorskip("ruff")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID", "policies"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    listed = subprocess.run([*command, "--show-files"], cwd=ROOT, capture_output=True, text=True)
    assert len(re.findall(r"policies/\w+/\w+\.py$", listed.stdout, re.MULTILINE)) >= 30


def test_a_new_folder_is_installed_anew() -> None:
    """An editable install keeps a table of where modules lay: one that moved would not be found until it is made again."""
    said = re.search(r"^\$\(VENV\)/\.package:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert said is not None and "policies/*/__init__.py" in said[1]


def test_what_the_image_is_made_of_reaches_its_builder() -> None:
    """`.dockerignore` names the files that are let through; an image is seldom built."""
    first, *others = re.findall(r"^[^#\n].*", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert first == "*"
    let_through = {line[1:] for line in others if line.startswith("!")}
    assert all((ROOT / name).exists() for name in let_through)
    project, build, wheel = _project()["project"], _project()["build-system"], _project()["tool"]["scikit-build"]
    needed = {
        "pyproject.toml",
        "Makefile",
        "README.md",
        *project["license-files"],
        *(path.split("/")[0] for path in build["backend-path"]),
    }
    needed |= {wheel["cmake"]["source-dir"], *wheel["wheel"]["packages"].values()}
    needed |= set(re.findall(r"^COPY (\w+) ", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert {"allocator", "memmgr", "examples"} <= needed <= let_through


def test_the_version_is_said_once() -> None:
    import memmgr

    assert memmgr.__version__ == _project()["project"]["version"]


@pytest.mark.parametrize("statement", ["import policies", "from tools import cli", "from policies.filters import x"])
def test_the_linter_refuses_a_second_copy_of_a_module(statement: str) -> None:
    pytest.importorskip("ruff")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--stdin-filename", "tests/x.py", "-"],
        input=statement + "\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "TID251" in done.stdout


def test_the_metadata_has_the_licence() -> None:
    """As an expression (PEP 639), which pip 26.3 shows, and 23.2 does not."""
    found = metadata("memmgr")
    assert (found["License-Expression"], found["License-File"]) == ("Apache-2.0", "LICENSE")


def test_help_has_every_target_in_a_group() -> None:
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    shown = re.findall(r"^  ([a-z-]+) ", said, re.MULTILINE)
    assert sorted(shown) == sorted(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert re.findall(r"^[a-z].*:$", said, re.MULTILINE) == ["try it:", "work on it:", "check it:", "release it:"]


def test_no_test_module_is_the_second_copy() -> None:
    """The linter prevents a second copy; it would show here, from any source."""
    for name in ("policies", "tools"):
        module = sys.modules.get(name)
        assert module is None or not (getattr(module, "__file__", None) or "").startswith(str(ROOT / name))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "house"))


def test_an_address_makes_the_links_of_the_readme_absolute(scripts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    release = importlib.import_module("release")
    assert release.readme() == (ROOT / "README.md").read_text(), "nothing is filled in yet"
    filled = {"author": "A. Uthor", "email": "", "address": "https://host/us/memmgr/"}
    monkeypatch.setattr(release, "settings", lambda: filled)
    text = release.dynamic_metadata("readme")["text"]
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 20 and all(re.match(r"https://|#", link) for link in links), links
    assert "(https://host/us/memmgr/raw/main/docs/pictures/demo.png)" in text
    assert "git clone https://host/us/memmgr/ memmgr" in text and "ADDRESS" not in text
    assert "README.md: `git clone ADDRESS` waits for the address" in release.missing()
    assert "(https://host/us/memmgr/blob/main/docs/benchmarks.md#on-a-gpu)" in text
    assert release.dynamic_metadata("authors") == [{"name": "A. Uthor"}]
    assert release.dynamic_metadata("urls")["Homepage"] == "https://host/us/memmgr"


def test_a_release_is_refused_while_something_is_missing(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "CITATION.cff", "CHANGELOG.md", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tools" / "house", tmp_path / "tools" / "house")
    emptied = re.sub(
        r'^(author|email|address) = ".*"', r'\1 = ""', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE
    )
    (tmp_path / "pyproject.toml").write_text(emptied)
    (tmp_path / "tools" / "house" / "wheels.py").write_text("print('wheels are made')\n")
    command = ["make", "-C", tmp_path, "release", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "author is empty" in done.stdout and "wheels are made" not in done.stdout
    (tmp_path / "tools" / "house" / "release.py").write_text("")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "wheels are made" in done.stdout, done.stderr


def test_versions_of_a_release_agree(scripts: None) -> None:
    release = importlib.import_module("release")
    assert not [line for line in release.missing() if "version" in line]


def test_links_out_of_the_pages_lead_somewhere_in_the_site(scripts: None) -> None:
    site = importlib.import_module("docs_site")
    text = (
        "[a](../README.md#what-it-does) [b](faq.md) ![c](pictures/x.png)\n```\n[d](../README.md)\n```\n[e](../Makefile)"
    )
    assert site.turned(text, "docs/planning.md") == (
        "[a](readme.md#what-it-does) [b](faq.md) ![c](pictures/x.png)\n```\n[d](../README.md)\n```\ne"
    )
    assert (
        site.turned("[a](../../README.md) [b](rules.md)", "docs/develop/pager.md") == "[a](../readme.md) [b](rules.md)"
    )
    assert site.turned("[a](docs/faq.md) [b](docs/)", "README.md").startswith("[a](faq.md)")
