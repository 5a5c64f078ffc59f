"""The sources that include torch's headers compile against the installed torch; nothing is linked."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
INCLUDE = Path(torch.__file__).parent / "include"


@pytest.fixture(scope="module")
def checker() -> Any:
    found = importlib.util.spec_from_file_location("check_headers", ROOT / "allocator" / "cuda" / "check_headers.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    if module.compiler() is None:
        pytest.skip("no C++ compiler")
    if module.cuda_headers() is None:
        pytest.skip("no CUDA headers: nvidia-cuda-runtime and nvidia-cuda-crt are in the extra [test]")
    return module


def test_the_allocator_compiles_without_a_warning(checker: Any) -> None:
    assert checker.check(checker.UNITS["CUDA's allocator"], INCLUDE, checker.cuda_headers()) == ""


def test_a_question_that_is_not_answered_would_be_noticed(checker: Any) -> None:
    """The class is instantiated, so a function that torch declares and we leave out is an error, not a surprise on a
    GPU."""
    text = (ROOT / "allocator" / "cuda" / "plugin.cpp").read_text()
    assert "void emptyCache" in text
    changed = ROOT / "build" / "tests" / "left_out.cpp"
    changed.parent.mkdir(parents=True, exist_ok=True)
    changed.write_text(
        text.replace("void emptyCache(c10::MempoolId_t) override", "void emptyCacheNot(c10::MempoolId_t)")
    )
    wrong = checker.check(changed, INCLUDE, checker.cuda_headers(), [f"-I{ROOT / 'allocator' / 'cuda'}"])
    assert "emptyCache" in wrong or "abstract" in wrong


# Features that C++17 lacks, as far as one was used by mistake: torch 2.11 is compiled with that, later ones with C++20.
CXX20 = re.compile(
    r"std::(erase_if|erase\(|span\b|ranges|bit_|popcount|count[lr]_|has_single_bit|midpoint|ssize|jthread|source_location|format\b)"
    r"|\b(consteval|constinit|requires|co_await|co_yield|char8_t)\b|<=>|\.(contains|starts_with|ends_with)\("
    r"|#include <(span|ranges|bit|concepts|format|source_location)>"
    r"|(static_assert\(|constexpr [^;{]*=[^;{]*)\s*!?std::(is_sorted|equal|find\w*|count\w*|(all|any|none)_of|max_element|min_element)\("
)


@pytest.mark.parametrize("room", ["pager", "cuda"])
def test_what_faces_torch_is_cxx17(room: str) -> None:
    sources = [file for file in (ROOT / "allocator" / room).rglob("*") if file.suffix in (".cpp", ".h")]
    assert len(sources) > 3
    for file in sources:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            assert not CXX20.search(line.split("//")[0]), f"{file.name}:{number}: {line.strip()}"


def test_an_algorithm_in_a_constant_is_found() -> None:
    """The standard's algorithms are constant expressions from C++20 on; elsewhere they are C++17."""
    assert CXX20.search("static_assert(std::is_sorted(std::begin(kFacts), std::end(kFacts)));")
    assert CXX20.search("constexpr bool kSorted = std::is_sorted(kFacts, kFacts + kLocks);")
    assert not CXX20.search("const bool sorted = std::is_sorted(all.begin(), all.end());")


@pytest.mark.slow  # half a minute of processor time, and the words are looked for above
def test_the_pager_compiles_as_torch_2_11_would_compile_it(checker: Any) -> None:
    """The installed torch's headers, with the standard of a release before 2.12."""
    assert checker.check(checker.UNITS["pager"], INCLUDE, checker.cuda_headers(), standard="c++17") == ""


def test_the_releases_are_told_apart(checker: Any) -> None:
    assert checker.torch_version(INCLUDE) == tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_the_script_checks_the_installed_torch() -> None:
    script = ROOT / "allocator" / "cuda" / "check_headers.py"
    done = subprocess.run([sys.executable, str(script), str(ROOT)], capture_output=True, text=True)
    assert done.returncode != 0
    assert "no headers of torch" in done.stderr or "needs a C++ compiler" in done.stderr
