"""The command line: verbs, help, exit codes."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import memmgr
from memmgr.policies import DIRECTORS, FILTERS, POLICIES
from memmgr.policies.published.systems import PUBLISHED
from memmgr.tools import cli
from memmgr.tools.common import policy_option


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert all(verb in shown and line in shown for verb, _, line in cli.VERBS)


@pytest.mark.parametrize("verb", [verb for verb, _, _ in cli.VERBS])
def test_a_verb_is_one_file_whose_docstring_is_its_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module({name: path for name, path, _ in cli.VERBS}[verb])
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--help"] if verb != "run" else ["help", verb])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(part.split()) in shown for part in module.__doc__.split("\n\n"))


def test_without_a_verb_it_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    assert re.findall(r"^  memmgr (\w+)", shown, re.MULTILINE) == ["run", "tune", "top", "report", "doctor"]
    assert "memmgr --help lists all verbs" in shown and "verbs:" not in shown


def test_an_unknown_verb_is_told_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["dmeo"])
    assert end.value.code == 2
    assert "demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("dmeo", "demo"),
        ("repot run.jsonl", "report"),
        ("run --buget 3GB train.py", "--budget"),
        ("run --budjet=3GB train.py --lr 1", "--budget"),
        ("trace --ot x.trace train.py", "--out"),
        ("top --intervl 3", "--interval"),
        ("report --format perfeto run.jsonl", "perfetto"),
        ("run --policy evcit train.py", "evict"),
        ("rnu train.py", "run"),
        ("plan --device rtx409 model.py:make_step", "rtx4090"),
        ("completion bsh", "bash"),
    ],
)
def test_what_is_almost_right_is_asked_about(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(words.split())
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    said = capsys.readouterr().err
    assert code == 2 and f"; did you mean {meant!r}?" in said.splitlines()[-1], said


@pytest.mark.parametrize(
    "words",
    [
        "xyzzy",
        "run --xyzzy 3GB train.py",
        "run --foo train.py",  # with its dashes it would be near to --log
        "report --format xyzzy run.jsonl",
    ],
)
def test_what_is_like_nothing_is_not(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words.split())
    assert end.value.code == 2 and "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["run", "trace", "simulate", "demo"])
def test_policy_help_names_all_policies(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--policy", "help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert set(re.findall(r"\w+", shown)) >= {
        *POLICIES,
        *FILTERS,
        *DIRECTORS,
        *(PUBLISHED if verb == "simulate" else ()),
    }
    described = {line.split()[0] for line in policy_option.listing().splitlines() if re.match(r"  \w+ +\w", line)}
    assert described >= {*POLICIES} - {"nothing"}


def test_the_help_says_where_to_begin_before_it_lists_the_verbs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and len(shown.splitlines()) <= 40
    begin = shown.partition("begin with:\n")[2].partition("\n\n")[0].splitlines()
    assert begin[0].startswith("  memmgr run train.py ")
    assert shown.index("begin with:") < shown.index("verbs:")
    assert {line.split()[1] for line in begin if "memmgr" in line} <= {verb for verb, _, _ in cli.VERBS}


@pytest.mark.parametrize("line", ["train.py --lr 3e-4", "--budget 12GB train.py"])
def test_a_script_without_a_verb_is_told_the_verb(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    said = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and said[1:] == [f"memmgr: error: a verb is missing: memmgr run {line}"]


@pytest.mark.parametrize("line", ["bench --turns x", "tune --passes x train.py", "simulate --link x"])
def test_a_word_in_place_of_a_number_is_told(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert end.value.code == 2 and capsys.readouterr().err.endswith(f"argument {line.split()[1]}: 'x' is no number\n")


@pytest.mark.parametrize("word", sorted(cli.ELSEWHERE))
def test_a_word_that_is_no_verb_is_told_the_place_that_has_it(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([word, "train.py"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and said.startswith(f"memmgr: error: there is no verb {word}: memmgr")
    assert "did you mean" not in said
    for verb in re.findall(r"memmgr (\w[\w-]*)", said):
        assert verb in {name for name, _, _ in cli.VERBS}
    for function in re.findall(r"memmgr\.(\w+)\(\)", said):
        assert function in memmgr.__all__


def test_holders_and_leaks_are_in_explain_top_and_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("explain", "leaks"):
        with pytest.raises(SystemExit):
            cli.main([word])
        said = capsys.readouterr().err
        assert "memmgr.explain()" in said and "memmgr top" in said and "memmgr report" in said


@pytest.mark.parametrize(
    "words",
    [
        "run gone.x",
        "trace --out x.trace gone.x",
        "tune gone.x",
        "simulate gone.x",
        "report gone.x",
        "plan gone.py:make_step",
        "plan --device gone.json model.py:make_step",
        "doctor --explain gone.x",
        "doctor --measure here.json --step gone.py:make_step",
    ],
)
def test_a_missing_file_has_one_wording(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("def make_step(): pass\n")
    assert cli.main(words.split()) == 2
    name = re.search(r"gone\.\w+", words)
    assert name is not None
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"memmgr {words.split()[0]}: cannot read {name[0]}: No such file or directory"


def test_simulate_says_that_a_file_is_wrong_before_it_asks_for_a_budget(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.jsonl").write_text('{"type":"hello"}\n')
    (tmp_path / "some.trace").write_text("nothing\n")
    for name, says in (("run.jsonl", "is a run's log, for memmgr report"), ("some.trace", "memmgr trace has recorded")):
        assert cli.main(["simulate", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert says in said and "a budget is needed" not in said


@pytest.mark.parametrize("verb", [verb for verb, _, _ in cli.VERBS])
def test_short_help_fits_a_small_terminal_and_has_all_options(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = []
    for option, most in (("-h", 24), ("--help", 44)):
        with pytest.raises(SystemExit) as end:
            cli.main([verb, option])
        shown = capsys.readouterr().out
        lines = shown.splitlines()
        assert end.value.code == 0 and len(lines) <= most
        assert not [line for line in lines if len(line) > 80]
        assert f"    memmgr {verb}" in shown, "an example"
        options.append(set(re.findall(r"^  (-[\w-]+)", shown, re.MULTILINE)))
    assert options[0] == options[1]


# Each is wrong in a way that the verb itself has to see.
WRONG = [
    "run --ratio 101% train.py",
    "run --policy nonsense train.py",
    "run missing.py",
    "top 0",
    "report missing.jsonl",
    "doctor --step model.py",
    "doctor --explain missing.jsonl",
    "doctor --step missing.py:make --measure here.json",
    "demo --policy nonsense",
    "trace --out x.trace --pass 0 train.py",
    "simulate missing.trace --ratio 101%",
    "simulate missing.trace --ratio 60% --policy nonsense",
    "plan missing.py:make_step",
    "plan --device nonsense model.py:make_step",
    "plan model.py:nonsense",
    "tune missing.py",
    "tune --slowdown 0.5 model.py",
    "bench --models nonsense",
    "bench --budgets nonsense",
    "gpu-check --seconds 0",
    "clean nonsense",
    "completion nonsense",
]


def test_wrong_words_are_answered_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("raise SystemExit('it was executed')\ndef make_step(): pass\n")
    script = """
import sys
from memmgr.tools import cli
for line in sys.argv[1:]:
    try:
        code = cli.main(line.split())
    except SystemExit as end:
        code = end.code
    if code != 2 or "torch" in sys.modules:
        sys.exit(f"{line}: code {code}, torch {'torch' in sys.modules}")
"""
    words = [sys.executable, "-P", "-c", script, *WRONG]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in WRONG} == {verb for verb, _, _ in cli.VERBS}


def test_no_help_shows_what_is_private(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, _, _ in cli.VERBS:
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
    assert not re.findall(r"(?<![\w/.])--?_\w+|_throttle|_placement|_plan\b", capsys.readouterr().out)


def test_without_a_temporary_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a container with a read-only disk."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    assert cli.main(["doctor", "--quick"]) == 2
    assert re.fullmatch("memmgr doctor: No usable temporary directory .* TMPDIR\n", capsys.readouterr().err)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"memmgr {version('memmgr')}"


def test_torchs_entry_point_finds_what_cudas_allocator_needs() -> None:
    """A program that imports our native half first imports torch in its middle, and torch calls us back for CUDA's
    allocator. With a torch for CUDA that found a half-initialised module, and no test could be collected.
    """
    script = """
import memmgr

def install():  # as where torch is built for CUDA
    import memmgr.native.cuda

memmgr._install = install
import memmgr.native.build
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_command_and_the_autoload_hook_are_registered() -> None:
    assert [e.value for e in entry_points(group="console_scripts", name="memmgr")] == ["memmgr.tools.cli:main"]
    assert [e.value for e in entry_points(group="torch.backends", name="memmgr")] == ["memmgr._environ:autoload"]


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "memmgr.tools.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("memmgr ")


INTERRUPTED = """
import sys

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == interrupted:
            raise KeyboardInterrupt

interrupted = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupts())
from memmgr.tools.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["memmgr.tools.common.usage_error", "memmgr.config.variables"])
def test_an_interrupt_while_the_command_is_imported_is_a_line(module: str) -> None:
    """Imports take most of the first 0.3 s of a verb."""
    words = [sys.executable, "-P", "-c", INTERRUPTED, module, "simulate", "--help"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "memmgr simulate: interrupted\n")


def test_the_command_imports_nothing_slow_before_it_can_be_interrupted() -> None:
    """An interrupt before `main` is a traceback of Python's own: there is no time for one."""
    script = """
import importlib.machinery, importlib.util, os, sys  # what the finder of an editable installation imports, and the interpreter itself
before = set(sys.modules)
import memmgr.tools.cli
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["memmgr", "memmgr.tools", "memmgr.tools.cli"]


def test_an_interrupt_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from memmgr.tools.verbs import simulate

    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "run", interrupted)
    assert cli.main(["simulate"]) == 130
    assert capsys.readouterr().err == "memmgr simulate: interrupted\n"
    monkeypatch.setattr(cli, "import_module", interrupted)  # which takes seconds where the verb imports torch
    assert cli.main(["simulate"]) == 130
    assert capsys.readouterr().err == "memmgr simulate: interrupted\n"


def test_clean_removes_our_libraries_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MEMMGR_CACHE may name a folder that has other things, too."""
    monkeypatch.setenv("MEMMGR_CACHE", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "none"))  # which main looks at
    libraries = [tmp_path / f"{kind}-{'0123456789abcdef' * 2:.20}" for kind in ("pager", "cuda")]
    compiling, other = tmp_path / f"pager-{'f' * 20}", tmp_path / "pager-of-mine"
    for folder in (*libraries, compiling, other):
        folder.mkdir()
        (folder / "_pager.so").write_bytes(b"x" * 1500)
    (compiling / "tmp1").mkdir()
    assert cli.main(["clean", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "would remove 2 folders, 3 kB" and shown.count("1.5 kB  ") == 2
    assert all(folder.is_dir() for folder in libraries)
    assert cli.main(["clean"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "removed 2 folders, 3 kB"
    assert sorted(tmp_path.iterdir()) == sorted([compiling, other])
