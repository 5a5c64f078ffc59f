"""Checks that the docs are right: every block of shell is run, marked Python is run, and every command that is named
exists.

A block that is not run has the reason in a comment before it, `<!-- not run: reason -->`. Python is run with the names
of `GIVEN` for its page. In the shell blocks train.py is a small training, and 12345 is a process that trains meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import forkserver
import pytest
from test_examples import EXAMPLES, commands_of

import memmgr
import memmgr.integrations
from memmgr.observe.figures import FIGURES
from memmgr.tools import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOT_INSTALLED = {"house", "studies"}
"""Folders of tools/ that are for a checkout alone."""
REPORTS = sorted(DOCS.glob("reports/*.md"))  # of their date: their commands need not run any more
PAGES = sorted({*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"} - set(REPORTS))
TRAIN = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(2)))
x = torch.randn(1024, 64)
for _ in range(5):
    model(x).square().mean().backward()
    with torch.no_grad():  # torch.optim would import its compiler, which takes as long as torch
        for p in model.parameters():
            p -= 0.1 * p.grad
    model.zero_grad()
"""
LONG = """
import sys, time, torch, memmgr
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)))
x = torch.randn(1024, 64)
with memmgr.budget("6MB", quiet=True):
    print("open", flush=True)
    while True:
        model(x).square().mean().backward()
        time.sleep(0.5)  # others use the cores
"""

MODEL = """
import torch

def make_step():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(1)))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(256, 256)  # few ops: plans take the time
    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 256, "max_position_embeddings": 4096,
}  # fmt: skip
# The launcher's variables of a rank.
OF_TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


# The names that the Python of a page takes as given.
GIVEN = {
    "README.md": """
import torch
layer = torch.nn.Linear(8, 8)
model, loader = layer, [torch.randn(4, 8) for _ in range(3)]
def train(model, loader):
    for batch in loader:
        model(batch).square().mean().backward()
""",
    "docs/frameworks.md": """
import contextlib
from types import SimpleNamespace
import torch
model = torch.nn.Linear(8, 1)
model.forward = lambda x, **_: {"loss": torch.nn.functional.linear(x, model.weight).square().mean()}
with contextlib.suppress(ImportError):
    from transformers import TrainingArguments
    args = TrainingArguments("runs", max_steps=2, report_to=[], use_cpu=True)
data = [{"x": torch.randn(8)} for _ in range(8)]
with contextlib.suppress(ImportError):
    import lightning
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)
        def training_step(self, x):
            return self.layer(x).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    module, loader = Module(), torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4)
loss, step, said = torch.ones(()), 3, []
def logger(name):  # of that method; tests/watch/test_loggers.py has the packages' own
    return SimpleNamespace(**{name: lambda *_, **__: said.append(name)})
writer, accelerator, trainer = logger("add_scalar"), logger("log"), SimpleNamespace(logger=logger("log_metrics"))
writer.add_custom_scalars = writer.add_text = lambda *values: None
wandb, mlflow = SimpleNamespace(run=logger("log")), logger("log_metrics")
""",
    "docs/policies.md": "import memmgr",
    "docs/develop/planner.md": """
from memmgr.policies.trace import Op, OpKind, Storage, Trace
ops = [Op("input", 0.0, (), (0,), OpKind.CONSTANT), *(Op(f"op{k}", 1.0, (k - 1,), (k,)) for k in range(1, 9))]
trace = Trace(tuple(ops), tuple(Storage(f"{k}.0", 10, k, min(k + 1, 8) + 1) for k in range(9)))
budget_bytes = 40
""",
}
GENERATED = "docs/api.md"  # signatures, and the examples of docstrings, which their own tests run


@dataclass(frozen=True)
class Block:
    """One fenced block: where, its language, the comment before it, and its text."""

    page: str
    number: int
    language: str
    said: str
    text: str


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        pattern = r"(?:<!--\s*((?:(?!-->)[\s\S])*?)\s*-->\n)?^```(\w*)\n([\s\S]*?)^```$"
        for match in re.finditer(pattern, text, re.MULTILINE):
            number = text.count("\n", 0, match.start(2)) + 1
            found.append(Block(_name(page), number, match[2], match[1] or "", match[3]))
    return found


COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:memmgr|make|python|pip|torchrun) ")


def is_shell(block: Block) -> bool:
    """By its language, or because every line is a command (drawings have no language either)."""
    if block.language in ("sh", "bash", "console", "shell"):
        return True
    return not block.language and all(COMMAND.match(line) for line in block.text.splitlines())


OF_EXAMPLES = {command for path in EXAMPLES for command in commands_of(path)}  # which its tests run
SHELL = [block for block in blocks() if is_shell(block)]


def make_targets() -> set[str]:
    """The targets of our own Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str], int]]:
    """A folder with train.py, an environment with our commands, and a process that trains."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "train.py").write_text(TRAIN)
    (folder / "model.py").write_text(MODEL)
    (folder / "llama-7b").mkdir()
    (folder / "llama-7b" / "config.json").write_text(json.dumps(LLAMA))
    (folder / "home" / ".local/share/bash-completion/completions").mkdir(parents=True)
    targets = "".join(f".PHONY: {name}\n{name}:\n\t@true\n" for name in sorted(make_targets()))
    (folder / "Makefile").write_text(targets)  # the targets take too long for a test; only their names are checked
    with tempfile.TemporaryDirectory(prefix="mm") as runtime, contextlib.ExitStack() as resources:
        path = f"{resources.enter_context(forkserver.commands(Path(runtime)))}{os.pathsep}{Path(sys.executable).parent}"
        path += f"{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": runtime, "COLUMNS": "80", "LINES": "24"}
        env["PYTHONSAFEPATH"] = "1"  # the folder ./memmgr must not shadow the installed package
        env["OMP_NUM_THREADS"] = "1"
        training = forkserver.Popen(
            [sys.executable, "-c", LONG], stdout=subprocess.PIPE, text=True, env={**env, **OF_TWO}
        )
        assert training.stdout is not None and training.stdout.readline() == "open\n"
        try:
            yield folder, env, training.pid
        finally:
            training.kill()
            training.communicate()


_have_run: set[tuple[Path, str, str]] = set()


def _runs(command: str, folder: Path, env: dict[str, str]) -> None:
    """Once in the folder, on however many pages it is."""
    once = folder, command, env.get("RANK", "")
    if once not in _have_run:
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        _have_run.add(once)


# Blocks that take longest, by their first words. The tests of the verb run it with the same options, another block runs a near
# copy, and the words of all commands are parsed below.
SLOW = {
    "memmgr plan --device rtx4090 --budget 20GB",  # 19 s: plan/test_plan_verb.py
    "memmgr simulate FILE --policy plan --ratio 0.5",  # 9 s: plan/test_simulate_verb.py; docs/policies.md has a table of all
    "memmgr trace --out pass.trace train.py",  # 8 s: the same
    "memmgr doctor --quick --json --disk .",  # 6 s: docs/quickstart.md, watch/test_doctor.py
}


def _marks(block: Block) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] * block.text.startswith(tuple(SLOW))


def test_blocks_that_are_slow_exist() -> None:
    assert sum(bool(_marks(block)) for block in SHELL) == len(SLOW)


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=_marks(block), id=f"{block.page}:{block.number}") for block in SHELL]
)
def test_shell(block: Block, place: tuple[Path, dict[str, str], int]) -> None:
    if block.said.startswith("not run:"):
        assert len(block.said) > len("not run: "), "without a reason"
        return
    folder, env, pid = place
    for line in block.text.splitlines():
        command = line.partition("  #")[0].strip().replace("12345", str(pid)).replace("~/", "home/")
        if not command or command in OF_EXAMPLES:
            continue
        if command.startswith(("memmgr tune", "git clone ADDRESS")):
            continue  # runs the script many times: test_tune.py does, and the words are parsed below. A release has the address
        if "FILE" in command:  # a trace that the reader has
            command = f"test -f FILE || memmgr trace --out FILE --budget 8MB train.py; {command}"
        if "run.rank0.jsonl" in command:
            for rank in "01":
                _runs("memmgr run --log run.jsonl train.py", folder, {**env, **OF_TWO, "RANK": rank})
        if command.startswith("memmgr top") and "--once" not in command:
            command += " --once"  # it would watch for ever
        if "--policy all" in command:
            command += " --solver-seconds 0.3"  # with the best that they have found by then
        _runs(command, folder, env)


WHOLE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:memmgr (?:run|trace)|python) [^`]*train\.py[^`]*)`")


def test_whole_commands_in_running_text(place: tuple[Path, dict[str, str], int]) -> None:
    folder, env, _ = place
    commands = {match[1] for page in PAGES for match in WHOLE.finditer(page.read_text())}
    assert len(commands) >= 3, commands
    for command in sorted(commands):
        _runs(command, folder, env)


def test_no_block_of_commands_is_passed_over() -> None:
    """A block without a language is either commands or a drawing, not some of both."""
    for block in blocks():
        if not block.language and not is_shell(block):
            commands = [line for line in block.text.splitlines() if COMMAND.match(line)]
            assert not commands, f"{block.page}:{block.number}: {commands}"
    pages = {block.page for block in SHELL}
    users = {f"docs/{name}.md" for name in ("quickstart", "tuning", "errors", "distributed", "when_it_does_not_help")}
    assert users | {"README.md", "docs/develop/planner.md"} <= pages


SHOWN = [block for block in blocks() if block.language == "python" and block.page != GENERATED]


def test_at_most_six_blocks_are_not_run() -> None:
    assert len([block for block in blocks() if block.said.startswith("not run:")]) <= 6
    assert {block.page for block in SHOWN} >= set(GIVEN)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(False, id="ours"),
        # It imports five packages, 16 s; tests/watch trains with each callback and writes to each logger.
        pytest.param(True, id="frameworks", marks=pytest.mark.slow),
    ],
)
def test_python(others: bool, place: tuple[Path, dict[str, str], int]) -> None:
    """Each as a module of its own, all in one process; those with frameworks, which warn as they like, in another."""
    folder, env, pid = place
    if others:
        for package in ("accelerate", "lightning", "tensorboard", "transformers", "wandb"):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"the package {package} is not installed")
    marked = [block for block in SHOWN if (block.page == "docs/frameworks.md") == others]
    script = "import sys\nsys.argv = ['docs', sys.argv[1]]\n"
    for block in marked:
        text = block.text.replace('if line["type"] == "end":', 'if line["type"] in ("end", "sample"):')  # it runs on
        text = text.replace("in range(60):", "in range(1):")  # README's script
        script += "names = {'__name__': '__docs__'}\n"
        for code in (GIVEN.get(block.page, ""), text):
            script += f"exec(compile({code!r}, {f'{block.page}:{block.number}'!r}, 'exec'), names)\n"
    (folder / "blocks.py").write_text(script)
    command = [sys.executable, *([] if others else ["-W", "error::UserWarning"]), "blocks.py", str(pid)]
    done = forkserver.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _named() -> list[tuple[str, str]]:
    """Commands of ours, in blocks and in running text."""
    found = []
    for page in PAGES:
        for match in re.finditer(r"^(memmgr [^`\n]+)$|`(memmgr [^`\n]+)`", page.read_text(), re.MULTILINE):
            found.append((_name(page), (match[1] or match[2]).partition("  #")[0].strip()))
    return found


def test_every_command_that_is_named_exists() -> None:
    verbs = {verb: module for verb, module, _ in cli.VERBS}
    named = _named()
    assert len(named) > 20
    for page, command in named:
        words = shlex.split(command)[1:]
        assert words[0] in verbs, f"{page}: {command}"
        parser = argparse.ArgumentParser()
        importlib.import_module(verbs[words[0]]).add_arguments(parser)
        script = next((i for i, word in enumerate(words) if word.endswith(".py") or word == "-m"), len(words))
        known = {option for action in parser._actions for option in action.option_strings}
        for word in words[1:script]:
            assert not word.startswith("--") or word.partition("=")[0] in known, f"{page}: {command}: {word}"


LINK = re.compile(r"\]\(([^)\s]+)\)")


def _links(page: Path) -> list[tuple[Path, str]]:
    """The links of a page inside the repository: the file or folder, and the part behind the `#`."""
    text = re.sub(r"^```[\s\S]*?^```$", "", page.read_text(), flags=re.MULTILINE)
    found = []
    for target in LINK.findall(text):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            found.append(((page.parent / path).resolve() if path else page, anchor))
    return found


def _anchors(page: Path) -> set[str]:
    """The anchors of its headings, as the usual renderers make them."""
    text = re.sub(r"^```[\s\S]*?^```$", "", page.read_text(), flags=re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, *REPORTS]:
        for target, anchor in _links(page):
            assert target.exists(), f"{_name(page)}: {target}"
            assert not anchor or anchor in _anchors(target), f"{_name(page)}: {target.name}#{anchor}"


def test_every_page_is_reachable_from_the_index() -> None:
    met, todo = set(), [DOCS / "README.md"]
    while todo:
        page = todo.pop()
        if page not in met and page.suffix == ".md" and page.is_relative_to(DOCS):
            met.add(page)
            todo += [target for target, _ in _links(page)]
    # A report that `make gpu-check` has just written is on no page yet.
    lost = {page for page in DOCS.rglob("*.md") if page not in met and not page.name.startswith("gpu-check-")}
    assert not lost, lost
    shown = {target for page in [*PAGES, *REPORTS] for target, _ in _links(page)}
    assert {*DOCS.glob("pictures/*")} <= shown, "a picture that no page shows"
    assert {DOCS / "README.md", DOCS / "glossary.md"} <= {target for target, _ in _links(ROOT / "README.md")}


# ---- the README ------------------------------------------------------------------------------------------------------

README = (ROOT / "README.md").read_text()


def _sentences(text: str) -> Iterator[str]:
    """The sentences of paragraphs, items and cells, without code and the targets of links."""
    text = re.sub(r"^```[\s\S]*?^```$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("|", "\n\n")
    for paragraph in re.split(r"\n\s*\n|\n(?=[-#])", text):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(paragraph.split()))


def test_the_readme_is_short_and_so_are_its_sentences() -> None:
    assert README.count("\n") < 130 and max(map(len, README.splitlines())) < 200
    long = [
        s for s in _sentences(README) if "·" not in s and len(re.findall(r"\S*\w\S*", re.sub(r"`[^`]*`", "x", s))) > 25
    ]
    assert not long  # the list of pages is no sentence


def test_the_readme_says_first_what_it_is_and_where_it_runs() -> None:
    first = README.splitlines()[:12]
    assert any("slow on a GPU" in line for line in first) and any(line.startswith("**Status**") for line in first)
    assert any("(docs/reports/2026-11-28-first-light.md)" in line for line in first), "how slow, and what has not run"
    assert re.findall(r"^## (.*)$", README, re.MULTILINE) == [
        "A first budget",
        "What it costs",
        "What it does",
        "Works with, and does not",
        "When it does not help",
        "Documents",
    ]


def test_the_first_screen_has_two_commands_and_what_they_take() -> None:
    screen = README.partition("\n## ")[0]
    (block,) = re.findall(r"^```sh\n([\s\S]*?)^```", screen, re.MULTILINE)
    assert re.findall(r"^(make \w+) .*minutes", block, re.MULTILINE) == ["make demo", "make test"]
    assert screen.count("\n") < 20 and "|" not in screen


def test_the_first_budget_is_three_lines_and_a_command_and_comes_before_any_figures() -> None:
    first = README.partition("## A first budget")[2].partition("\n## ")[0]
    script, python = re.findall(r"^```python\n([\s\S]*?)^```", first, re.MULTILINE)
    assert "memmgr" not in script, "a script as it is"
    assert len([line for line in python.splitlines() if line.strip()]) == 3 and "memmgr.budget(" in python
    assert re.search(r"^memmgr run --budget \w+ train\.py", first, re.MULTILINE) and "|" not in first


def test_the_readme_has_one_table_of_four_rows_and_one_picture() -> None:
    costs = README.partition("## What it costs")[2].partition("\n## ")[0]
    (table,) = re.findall(r"(?:^\|.*\n)+", costs, re.MULTILINE)
    assert re.findall(r"^\| (\d+ %) ", table, re.MULTILINE) == ["100 %", "75 %", "50 %", "35 %"]
    assert README.count("![") == costs.count("![") == 1 and "checkpointing takes" in costs
    assert len(re.findall(r"(?:^\|.*\n)+", README, re.MULTILINE)) == 2, "the other says what works"


CPU_TORCH = 'pip install "torch{}" --index-url https://download.pytorch.org/whl/cpu'


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_command_of_the_cpus_torch_is_beside_what_is_installed_without_it(page: str) -> None:
    """Without the range a newer torch would be replaced by PyPI's, with CUDA."""
    text = (ROOT / page).read_text()
    (project,) = re.findall(r'"torch(>=[^"]*)"', (ROOT / "pyproject.toml").read_text())
    at = text.index(CPU_TORCH.format(project))
    beside = " ".join(text[max(0, at - 400) : at + 400].split())
    assert re.search(r"[Ww]here there is no torch it installs PyPI's, with CUDA \(gigabytes\)", beside)


QUESTIONS = {
    "compile": "torch.compile",
    "DDP": "DDP",
    "GPU": "GPU",
    "remove": "remove it",
    "host tier": "host tier",
    "files": "files go",
    "cost": "slower",
    "checkpointing": "compare to checkpointing",
    "bug": "report a bug",
    "contribute": "contribute",
}


@pytest.mark.parametrize("subject", QUESTIONS)
def test_a_question_of_a_newcomer_has_a_heading_and_a_page_that_says_more(subject: str) -> None:
    parts = re.split(r"^### ", (DOCS / "faq.md").read_text(), flags=re.MULTILINE)
    (answer,) = [part for part in parts[1:] if QUESTIONS[subject] in part.partition("\n")[0]]
    assert len(answer.split()) < 130 and ("](" in answer or "`" in answer)


def test_one_page_says_where_to_report_a_problem_and_all_others_agree() -> None:
    """There is no tracker before a release: the texts are true of any copy."""
    page = (DOCS / "troubleshooting.md").read_text().partition("## Report a problem")[2].partition("\n## ")[0]
    security, form = ((ROOT / ".github" / name).read_text() for name in ("SECURITY.md", "ISSUE_TEMPLATE/bug.md"))
    for text in (page, security):
        words = " ".join(text.split())
        assert "`pip show --verbose memmgr` names" in words and "names none is no release" in words
    (wanted,) = re.findall(r"`(memmgr doctor[^`]*)`", page)
    assert re.findall(r"`(memmgr doctor[^`]*)`", form) == [wanted]
    contributing = (ROOT / "CONTRIBUTING.md").read_text().partition("## Report a problem")[2]
    for text in (README, contributing, (DOCS / "faq.md").read_text()):
        assert "troubleshooting.md#report-a-problem)" in text
    assert "memmgr doctor" not in contributing


# ---- the API reference -----------------------------------------------------------------------------------------------


def test_the_api_reference_is_what_the_docstrings_say() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "house" / "api_reference.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_api_reference_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text()
    for name in [*memmgr.__all__, *memmgr.integrations.__all__]:
        assert f"\n## `{name}`\n" in text or name == "__version__", name
    assert "_throttle" not in text and "_placement" not in text, "what is private is shown"


def test_every_figure_has_a_sentence() -> None:
    with memmgr.budget(None, device="cpu", quiet=True) as mm:
        shown = {name for name in mm.stats() if not name.startswith("escapes.")}
    assert shown == {figure.name for figure in FIGURES}


def test_what_a_user_reads_names_no_file_of_the_repository() -> None:
    """An installed package has no docs folder: strings, docstrings and comments, of C++ too, say the sentence itself."""
    for folder in ("memmgr", "policies", "tools", "allocator"):
        files = sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cpp", ".h"))
        for path in (path for path in files if not NOT_INSTALLED & set(path.parent.parts)):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                named = re.search(r"\bdocs/[\w/-]+\.md|\((see )?docs/", line)
                # The report that is written in a checkout is no page that documents link to.
                assert not named or "DATE" in line, f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


HOMES = (
    "",
    "allocator",
    "allocator/include",
    "allocator/pager",
    "allocator/core",
    "memmgr",
    "tools",
    "tests",
    "policies",
    "docs",
)
"""Folders that pages for developers leave out of a file's name."""


@pytest.mark.parametrize("page", [*sorted(DOCS.glob("develop/*.md")), ROOT / "CONTRIBUTING.md"], ids=_name)
def test_files_and_names_in_pages_for_developers_exist(page: Path) -> None:
    """`folder/file.cpp`, and `file.cpp`: `name`, or `name` (`file.cpp`): a move or a rename mends the page."""
    text = re.sub(r"^```[\s\S]*?^```$", "", page.read_text(), flags=re.MULTILINE)
    sources = r"`([\w./-]+\.(?:cpp|h|py|def))`"
    for path in re.findall(sources, text):
        assert "/" not in path or any((ROOT / home / path).is_file() for home in HOMES), path
    pairs = re.findall(sources + r": ?((?:(?:, )?`[\w:.]+(?:\(\))?`)+)", text)
    pairs += [(path, names) for names, path in re.findall(r"(`[\w:.]+(?:\(\))?`) \(" + sources + r"\)", text)]
    for path, names in pairs:
        file = next((ROOT / home / path for home in HOMES if (ROOT / home / path).is_file()), None)
        if file is None:
            continue
        unit = "".join(f.read_text() for f in (file, file.with_suffix(".h"), file.with_suffix(".cpp")) if f.is_file())
        for name in re.findall(r"[\w:.]+", names.replace("()", "")):
            assert re.search(rf"\b{re.split('[.:]+', name)[-1]}\b", unit), f"{path}: {name}"


def test_comments_name_pages_that_there_are() -> None:
    sources = [p for name in ("tests", "tools/bench/studies", "tools/house") for p in (ROOT / name).rglob("*.py")]
    for path in [*sources, ROOT / "CHANGELOG.md"]:
        for named in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text()):
            assert "DATE" in named or (ROOT / named).is_file(), f"{path.relative_to(ROOT)}: {named}"
