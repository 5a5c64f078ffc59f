"""`memmgr run`: the script is run as python would run it, and its bits are the same."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forkserver
import pytest
from job.ranks import one_launcher

from memmgr.observe.advice import advice, own_checkpointing
from memmgr.tools.common import as_python
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.verbs import run as verb
from memmgr.tools.view.run_state import read_log

TRAIN = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, as scripts do
import torch
torch.manual_seed(0)
blocks = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)]
model = torch.nn.Sequential(*blocks)
x = torch.randn(1024, 64)
for _ in range(4):
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():  # torch.optim would import its compiler, which takes as long as torch
        for p in model.parameters():
            p -= 0.1 * p.grad
    model.zero_grad()
import hashlib
bits = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
sys.stdout.write(f"bits {bits}\\n")  # in one piece: ranks write at the same time
"""
LOOK = """
import sys, pickle, inspect, os
class Thing: pass
print(sys.argv, sys.path[0], __name__, os.path.abspath(__file__), sys.modules["__main__"].Thing is Thing, pickle.loads(pickle.dumps(Thing())).__class__ is Thing)
print(__spec__ is None or __spec__.name, __package__, __builtins__ is not None, inspect.getsourcefile(Thing))
"""


def python(*words: str, cwd: Path, start: Any = forkserver.run, **more: Any) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = start(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=100, **more
    )
    return done


def memmgr(*words: str, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """The command, as its entry point starts it."""
    start = "import sys; sys.argv[0] = 'memmgr'; from memmgr.tools.cli import main; sys.exit(main())"
    return python("-c", start, *words, cwd=cwd, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "look.py").write_text(LOOK)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "__main__.py").write_text(LOOK)
    (tmp_path / "pack" / "look.py").write_text(LOOK)
    return tmp_path


@pytest.fixture(scope="module")
def plain_bits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The training's bits without memmgr."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "train.py").write_text(TRAIN)
    return _bits(python("train.py", cwd=folder))


def _bits(done: subprocess.CompletedProcess[str]) -> str:
    found = re.search(r"^bits (\w+)$", done.stdout, re.MULTILINE)
    assert found, done.stderr
    return found[1]


def test_the_same_bits_in_less_memory_and_the_next_command(folder: Path, plain_bits: str) -> None:
    done = memmgr("run", "--budget", "8MB", "train.py", cwd=folder)
    assert done.returncode == 0 and _bits(done) == plain_bits, done.stderr
    assert re.search(r"memmgr: peak [\d.]+ MB of 8 MB \(1\d\.\d MB unmanaged\); 4 passes", done.stderr), done.stderr
    assert "11" not in done.stdout.replace(_bits(done), "")
    shown = re.search(r"^memmgr: to look closer:  memmgr (.*)$", done.stderr, re.MULTILINE)
    assert shown, done.stderr
    again = memmgr(*shlex.split(shown[1]), cwd=folder)
    assert again.returncode == 0 and _bits(again) == plain_bits and (folder / "train.jsonl").is_file()
    assert "memmgr report " in again.stderr and "train.jsonl" in again.stderr


def test_a_summary_as_json_has_the_same_keys_for_each_run(folder: Path) -> None:
    (folder / "idle.py").write_text("print('nothing to train')\n")
    (folder / "fails.py").write_text(TRAIN.replace("import hashlib", "raise ValueError('no')"))
    found = {}
    for name, budget in (("train", "8MB"), ("idle", "none"), ("fails", "none")):
        words = ["--fail-on-leak", "--quiet", "--json", f"{name}.json", "--budget", budget, f"{name}.py"]
        done = memmgr("run", *words, cwd=folder)
        assert done.returncode == (name == "fails"), done.stderr
        found[name] = json.loads((folder / f"{name}.json").read_text())
    trained, idle, failed = found.values()
    assert set(trained) == set(idle) == set(failed) and set(trained["stats"]) == set(idle["stats"])
    assert trained["stats"]["passes"] == 4 and trained["budget"] == "8MB" and trained["stats"]["budget_bytes"] == 8e6
    assert trained["slowdown_at_least"] >= 1 and trained["error"] is None and trained["advice"]
    assert trained["leaks"] == idle["leaks"] == []
    assert trained["floor_bytes"] == trained["stats"]["floor_bytes"] > 0
    assert set(idle["stats"].values()) == {None} and idle["lost"] is None and idle["budget"] is None
    assert failed["error"] == "ValueError: no" and failed["stats"]["budget_bytes"] is None
    assert failed["stats"]["passes"] == 4 and failed["slowdown_at_least"] is None


def test_a_leak_is_in_the_summary_as_json(folder: Path) -> None:
    leaking = TRAIN.replace("range(4):\n    loss", "range(9):\n    y = model(x)\n    kept.append(y)\n    loss")
    leaking = leaking.replace("model(x).square()", "y.square()").replace("torch.manual_seed(0)", "kept = []")
    (folder / "leaks.py").write_text(leaking)
    done = memmgr("run", "--fail-on-leak", "--json", "run.json", "--budget", "12MB", "leaks.py", cwd=folder)
    assert done.returncode == 3, done.stderr
    assert re.search(
        r"^memmgr run: a leak: .* made at leaks\.py:\d+ .*; --fail-on-leak: the exit code is 3$", done.stderr, re.M
    )
    told = re.findall(r"^memmgr: a leak: .*$", done.stderr, re.MULTILINE)  # while it runs, and in the summary
    assert len(told) == 2 and all("kept in the list `kept` of leaks.py; " in line for line in told), done.stderr
    unlimited = memmgr("run", "leaks.py", cwd=folder).stderr
    assert "an end of the leak: more budget only delays it" in unlimited and "to train in less" not in unlimited, (
        unlimited
    )
    (leak,) = json.loads((folder / "run.json").read_text())["leaks"]
    line = 1 + leaking.splitlines().index("    y = model(x)")
    assert (leak["file"], leak["line"], leak["ops"]) == ("leaks.py", line, ["aten::addmm"])
    assert (leak["bytes_per_step"], leak["since_step"]) == (1024 * 64 * 4, 1)
    assert leak["kept"] == "in the list `kept` of leaks.py"


@pytest.mark.parametrize("conf", ["", "quiet:on"])
@pytest.mark.parametrize("budget", ["400kB", "2MB", "2MiB"])
def test_too_small_a_budget_of_the_variable_ends_with_the_command_that_works(
    folder: Path, plain_bits: str, budget: str, conf: str
) -> None:
    """400 kB is less than the parameters, so that budget does not even open."""
    variables = {**os.environ, "MEMMGR_BUDGET": budget, "MEMMGR_CONF": conf}
    done = python("train.py", cwd=folder, env=variables)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "BudgetError" in done.stderr
    if conf:
        assert "Next:" not in done.stderr
        return
    named = re.fullmatch(r"memmgr: the budget was too small\. Next:  MEMMGR_BUDGET=(\S+) (\S+) train\.py", last)
    assert named and named[2] == sys.executable, done.stderr
    assert f"budget of {named[1]}" in re.sub(r"(?<=\d) (?=[kMG])", "", done.stderr)
    again = python("train.py", cwd=folder, env={**os.environ, "MEMMGR_BUDGET": named[1]})
    assert again.returncode == 0 and _bits(again) == plain_bits and "Next:" not in again.stderr, again.stderr


def test_the_first_op_is_not_taken_for_what_its_kernel_does(folder: Path, plain_bits: str) -> None:
    """The budget opens while addmm saves its inputs; the copy that its kernel makes then is not its recipe."""
    conf = {"MEMMGR_BUDGET": "8MB", "MEMMGR_CONF": "policy:torture,verify:1"}
    done = python("train.py", cwd=folder, env={**os.environ, **conf})
    assert done.returncode == 0 and _bits(done) == plain_bits, done.stderr


def test_under_a_profiler_a_call_of_a_module_opens_it(folder: Path, plain_bits: str) -> None:
    done = python("-m", "cProfile", "train.py", cwd=folder, env={**os.environ, "MEMMGR_BUDGET": "8MB"})
    assert _bits(done) == plain_bits and re.search("peak .* of 8 MB", done.stderr), done.stderr


WITHOUT_MODULES = (
    "import torch\nw = torch.ones(1000, requires_grad=True)\nw.exp().sum().backward()\nprint('bits', w.grad.sum())\n"
)


def test_under_a_profiler_without_modules_it_is_not_managed_and_says_so(folder: Path) -> None:
    """Only the interpreter's profile hook says when the op that saves the first tensor is over, and the profiler has it."""
    (folder / "plain.py").write_text(WITHOUT_MODULES)
    variables = {**os.environ, "MEMMGR_BUDGET": "8MB", "MEMMGR_CONF": "strict:off"}
    done = python("-m", "profile", "plain.py", cwd=folder, env=variables)
    assert done.returncode == 0 and "a profiler runs in this thread" in done.stderr
    done = python("-m", "profile", "plain.py", cwd=folder, env={**os.environ, "MEMMGR_BUDGET": "8MB"})
    assert done.returncode == 1 and not re.search("^bits ", done.stdout, re.MULTILINE)
    assert done.stderr.startswith("memmgr: the budget cannot be opened: a profiler runs in this thread"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_inference_opens_it(folder: Path) -> None:
    (folder / "infer.py").write_text(
        "import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))\n"
        "with torch.no_grad(): print('bits', model(torch.ones(64, 512)).sum().item())\n"
    )
    plain = python("infer.py", cwd=folder)
    done = python("infer.py", cwd=folder, env={**os.environ, "MEMMGR_BUDGET": "8MB"})
    assert done.stdout == plain.stdout and re.search("peak .* of 8 MB", done.stderr), done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["look.py", "a", "-x", "--budget", "3"],
        ["look.py", "--", "-x", "--", "a"],
        ["./look.py"],
        ["pack", "b"],
        ["-m", "pack", "c"],
        ["-m", "pack", "--", "c"],
        ["-m", "pack.look"],
    ],
)
def test_it_sees_what_it_would_see_under_python(folder: Path, words: list[str]) -> None:
    plain = python(*words, cwd=folder, start=subprocess.run)
    done = memmgr("run", "--quiet", "--budget", "1GB", *words, cwd=folder, start=subprocess.run)
    assert plain.returncode == 0 and (done.returncode, done.stdout) == (0, plain.stdout), done.stderr


def test_an_interrupted_run_says_what_it_did(folder: Path) -> None:
    """The interrupt's own end came before the budget's: no summary, no end of the log, a socket that stays."""
    (folder / "interrupted.py").write_text(TRAIN + "raise KeyboardInterrupt\n")
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    words = "run", "--budget", "8MB", "--log", "interrupted.jsonl", "interrupted.py"
    done = memmgr(*words, cwd=folder, env=env, start=subprocess.run)
    assert done.returncode == -signal.SIGINT
    assert re.search("peak .* of 8 MB", done.stderr) and "memmgr report interrupted.jsonl" in done.stderr, done.stderr
    assert '"type":"end"' in (folder / "interrupted.jsonl").read_text().splitlines()[-1]
    assert not [path for path in runtime.rglob("*") if path.is_socket()]


@pytest.mark.parametrize("verb, option", [("run", "--log"), ("trace", "--out")])
def test_the_script_is_not_written_over(folder: Path, verb: str, option: str) -> None:
    text = (folder / "train.py").read_text()
    done = memmgr(verb, option, "train.py", "./train.py", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"memmgr {verb}: {option}: train.py is what is read; name another file\n"
    assert (folder / "train.py").read_text() == text


ENDS = [
    ("import sys; sys.exit(7)", 7),
    ("import sys; sys.exit()", 0),
    ("import sys; sys.exit('no good')", 1),
    ("raise SystemExit(None)", 0),
    ("raise KeyError('gone')", 1),
    ("def f():\n    1 / 0\nf()", 1),
    ("import os; os._exit(5)", 5),
    ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ("raise KeyboardInterrupt", -signal.SIGINT),
    ("import sys; sys.excepthook = lambda *a: print('mine', a[0].__name__); raise ValueError", 1),
    ("def f(:", 1),
    ("import atexit; atexit.register(print, 'late')", 0),
]


@pytest.mark.parametrize(("program", "code"), ENDS)
def test_it_ends_as_it_would_end_under_python(tmp_path: Path, program: str, code: int) -> None:
    (tmp_path / "ends.py").write_text(program)
    plain = python("ends.py", cwd=tmp_path, start=subprocess.run)
    done = memmgr("run", "--quiet", "ends.py", cwd=tmp_path, start=subprocess.run)
    assert plain.returncode == code
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert [line.strip() for line in done.stderr.splitlines()] == [line.strip() for line in plain.stderr.splitlines()]


def test_an_error_names_a_budget_that_works(folder: Path) -> None:
    done = memmgr("run", "--budget", "3MB", "train.py", cwd=folder)
    assert done.returncode == 1 and "BudgetError" in done.stderr and "tools/verbs/run.py" not in done.stderr
    shown = re.findall(r"^memmgr:   memmgr (run --budget .*)$", done.stderr, re.MULTILINE)
    assert len(shown) == 1 and shown[0].endswith("train.py")
    again = memmgr(*shlex.split(shown[0]), cwd=folder)
    assert again.returncode == 0 and "bits" in again.stdout, (shown, again.stderr)


def test_children_have_the_budget_and_who_only_launches_them_says_nothing(folder: Path, plain_bits: str) -> None:
    (folder / "launch.py").write_text("import subprocess, sys; sys.exit(subprocess.call([sys.executable, 'train.py']))")
    done = memmgr("run", "--budget", "8MB", "--policy", "evict", "launch.py", cwd=folder)
    assert done.returncode == 0 and _bits(done) == plain_bits
    assert done.stderr.count("of 8 MB") == 1 and "in this process" not in done.stderr
    assert all(line.startswith("memmgr: ") for line in done.stderr.splitlines()), done.stderr


def test_a_script_that_trains_nothing_says_so(folder: Path) -> None:
    (folder / "idle.py").write_text("import subprocess; subprocess.run(['true'])")
    done = memmgr("run", "--budget", "8MB", "idle.py", cwd=folder)
    assert done.returncode == 0 and "nothing was saved for backward in this process" in done.stderr


def test_a_budget_after_the_script_is_the_scripts_and_is_noted(folder: Path) -> None:
    (folder / "idle.py").write_text("import sys; print(sys.argv[1:])")
    done = memmgr("run", "idle.py", "--budget", "8MB", cwd=folder)
    assert done.stdout == "['--budget', '8MB']\n"
    assert (
        "--budget stands after idle.py" in done.stderr
        and "come before the script: --budget SIZE idle.py" in done.stderr
    )
    assert "stands after" not in memmgr("run", "--budget", "8MB", "idle.py", "--budget", "1", cwd=folder).stderr


LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]


@pytest.mark.slow  # three interpreters import torch; job/test_launch.py starts an unmodified script by torchrun
def test_under_torchrun(folder: Path, plain_bits: str) -> None:
    """Two processes; their communication is tested in tests/job/test_matrix.py."""
    words = ["-m", "memmgr.tools.cli", "run", "--budget", "9MB", "--write-log", "run.jsonl", "train.py"]
    with one_launcher():
        done = python(*LAUNCH, *words, cwd=folder)
    assert done.returncode == 0 and re.findall("^bits (.*)$", done.stdout, re.MULTILINE) == [plain_bits] * 2, (
        done.stderr
    )
    assert "memmgr[0]: " in done.stderr and "memmgr[1]: " not in done.stderr
    assert sorted(path.name for path in folder.glob("*.jsonl")) == ["run.rank0.jsonl", "run.rank1.jsonl"]


@pytest.mark.slow
def test_around_torchrun(folder: Path, plain_bits: str) -> None:
    with one_launcher():
        done = memmgr("run", "--budget", "9MB", "--log", "run.jsonl", *LAUNCH, "train.py", cwd=folder)
    assert done.returncode == 0 and re.findall("^bits (.*)$", done.stdout, re.MULTILINE) == [plain_bits] * 2, (
        done.stderr
    )
    assert sorted(path.name for path in folder.glob("*.jsonl")) == ["run.rank0.jsonl", "run.rank1.jsonl"]


BAD = [
    (["--budget", "12XB", "train.py"], "unknown unit"),
    (["--budget", "12", "train.py"], "was 12GB meant"),
    (["--budget", "", "train.py"], "is empty"),
    (["--budget", "atuo", "train.py"], "did you mean 'auto'?"),
    (["--ratio", "60GB", "train.py"], "no share of what the run needs"),
    (["--ratio", "60", "train.py"], "was 60% of it meant?"),
    (["--ratio", "60%", "--budget", "1GB", "train.py"], "leave one out"),
    (["--disk-size", "12", "train.py"], "--disk-size"),
    (["--disk", "none", "--disk-size", "5GB", "train.py"], "memmgr run: --disk-size is of no disk: --disk is none\n"),
    (["--budget", "-5GB", "train.py"], "argument --budget: expected one argument; '-5GB' is less than nothing\n"),
    (["--device", "foo", "train.py"], "memmgr run: --device: 'foo' is no device; expected cpu, cuda or cuda:1\n"),
    (["--budget", "12GB"], "the following arguments are required: script\n"),
    (
        ["--ratio", "101%", "train.py"],
        "memmgr run: --ratio: '101%' is more than the run needs; expected at most 100%\n",
    ),
    (["--policy", "nonsense", "train.py"], "policy"),
    (
        ["--device", "cuad", "train.py"],
        "device: 'cuad' is no device; expected cpu, cuda or cuda:1; did you mean 'cuda'?",
    ),
    (["--disk", "/no/such/folder", "train.py"], "not a folder"),
    (["--disk", "/proc", "train.py"], "--disk: no file can be made in '/proc'"),
    (["--log", "no/such/run.jsonl", "train.py"], "does not exist"),
    (["--host", "much", "train.py"], "--host"),
    (["--host", "80%", "train.py"], '--host: a percentage makes no sense here; expected "12GB"'),
    (["missing.py"], "cannot read missing.py: No such file or directory\n"),
    (["trian.py"], "cannot read trian.py: No such file or directory; did you mean 'train.py'?"),
    (["-m", "missing"], "no module named missing"),
    (["-m", "sys"], "no module named sys that can be run"),
    (["pack/__init__.py/x"], "cannot read"),
]


@pytest.mark.parametrize(("words", "says"), BAD)
def test_bad_input_is_one_line_and_two(folder: Path, words: list[str], says: str) -> None:
    done = memmgr("run", *words, cwd=folder)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2  # argparse puts its usage before


def test_a_trace_that_cannot_begin_says_one_thing(folder: Path) -> None:
    done = memmgr("trace", "--out", "x.trace", "--budget", "12", "train.py", cwd=folder)
    assert done.returncode == 2 and "was 12GB meant?" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


REFUSED = [
    (["--device", "meta", "train.py"], "a budget on 'meta' cannot be kept"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=["device"])
def test_a_budget_that_cannot_be_opened_ends_the_script(folder: Path, words: list[str], says: str) -> None:
    """It would train without one, against the user's request."""
    done = memmgr("run", *words, cwd=folder)
    assert done.returncode == 2 and "bits" not in done.stdout, done.stderr
    assert done.stderr.startswith("memmgr: the budget cannot be opened: ") and says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_script_with_a_budget_of_its_own_hears_of_both(folder: Path) -> None:
    """Its user may have set no variable."""
    own = "import memmgr, torch\nwith memmgr.budget('8MB', quiet=True):\n    torch.nn.Linear(8, 8)(torch.ones(8))\n"
    (folder / "own.py").write_text(own)
    done = memmgr("run", "--budget", "9MB", "own.py", cwd=folder)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "the script has opened a budget of its own" in done.stderr and "memmgr run asks for another" in done.stderr
    assert "MEMMGR_BUDGET is set" not in done.stderr


def test_more_on_the_device_than_the_budget_and_a_script_that_tries_again(folder: Path) -> None:
    """As `auto_find_batch_size` does. The second try has the budget too."""
    (folder / "again.py").write_text(
        "import torch\nmodel = torch.nn.Linear(256, 256)\ndef train(rows):\n    x = torch.randn(rows, 256)\n"
        "    for _ in range(2): model(x).square().mean().backward()\nfailed = False\n"
        "try: train(16384)\nexcept torch.OutOfMemoryError: failed = True\nassert failed\ntrain(1024)\n"
    )
    done = memmgr("run", "--budget", "8MB", "again.py", cwd=folder)
    assert done.returncode == 0 and re.search("peak .* of 8 MB", done.stderr), done.stderr
    (folder / "once.py").write_text((folder / "again.py").read_text().partition("failed")[0] + "train(16384)")
    done = memmgr("run", "--budget", "8MB", "once.py", cwd=folder)
    assert done.returncode == 1 and "BudgetError: " in done.stderr and "no budget was opened" not in done.stderr
    assert re.search(r"^memmgr:   memmgr run --budget [\d.]+MB once.py$", done.stderr, re.MULTILINE), done.stderr


def test_a_full_disk_is_answered_with_a_larger_one(folder: Path) -> None:
    words = ("run", "--budget", "6MiB", "--policy", "offload", "--disk", ".")
    done = memmgr(*words, "--disk-size", "1MB", "train.py", cwd=folder)
    assert done.returncode == 1 and "More disk, not more budget" in done.stderr, done.stderr
    assert re.search(r"^memmgr:   memmgr run .*--disk-size [\d.]+MB train.py$", done.stderr, re.MULTILINE), done.stderr


def test_the_next_command_is_in_the_units_of_the_user(folder: Path) -> None:
    done = memmgr("run", "--budget", "3MiB", "train.py", cwd=folder)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert re.search(r"^memmgr:   memmgr run --budget [\d.]+MiB train.py$", done.stderr, re.MULTILINE), done.stderr


def test_none_is_no_limit_and_the_script_may_end_the_process_itself(folder: Path, plain_bits: str) -> None:
    done = memmgr("run", "--budget", "none", "train.py", cwd=folder)
    assert done.returncode == 0 and _bits(done) == plain_bits and "without a limit" in done.stderr
    assert "to train in less:  memmgr run --budget " in done.stderr


@pytest.mark.parametrize("words", [["--ratio", "60%"], ["--budget", "need*0.6"]])
def test_a_share_of_what_the_run_needs(folder: Path, plain_bits: str, words: list[str]) -> None:
    done = memmgr("run", *words, "train.py", cwd=folder)
    assert done.returncode == 0 and _bits(done) == plain_bits, done.stderr
    assert done.stderr.count("the budget is now") == 1 and " 60 % of it" in done.stderr


def test_the_environment_takes_a_share_too(folder: Path, plain_bits: str) -> None:
    variables = {"MEMMGR_BUDGET": "need*60%", "MEMMGR_CONF": "log:run.jsonl"}
    done = python("train.py", cwd=folder, env={**os.environ, **variables})
    assert done.returncode == 0 and _bits(done) == plain_bits, done.stderr
    assert done.stderr.count("the budget is now") == 1
    assert done.stderr.endswith("memmgr: where the time and the memory went:  memmgr report run.jsonl\n")


@pytest.mark.parametrize(
    ("words", "variables", "says"),
    [
        ([], {"MEMMGR_BUDGET": "12XB"}, "memmgr run: MEMMGR_BUDGET: unknown unit"),
        ([], {"MEMMGR_CONF": "polcy:evict"}, "memmgr run: MEMMGR_CONF: unknown key 'polcy'; did you mean 'policy'?"),
        (
            [],
            {"MEMMGR_CONF": "disk:none,disk_size:5GB"},
            "memmgr run: MEMMGR_CONF: disk_size:5GB is of no disk: disk is none",
        ),
        (
            ["--disk-size", "5GB"],
            {"MEMMGR_CONF": "disk:none"},
            "memmgr run: --disk-size is of no disk: MEMMGR_CONF's disk is none",
        ),
        (["--disk", "none"], {"MEMMGR_CONF": "disk_size:5GB"}, "none None none"),
        ([], {"MEMMGR_BUDGET": "8MB", "MEMMGR_CONF": "policy:evict"}, "8MB evict None"),
        (
            ["--budget", "9MB", "--disk", "none"],
            {"MEMMGR_BUDGET": "8MB", "MEMMGR_CONF": "policy:evict"},
            "9MB evict none",
        ),
        (["--policy", "offload"], {"MEMMGR_CONF": '{"policy": "evict", "disk": "."}'}, "none offload ."),
    ],
)
def test_variables_count_where_no_option_says_otherwise(
    folder: Path, words: list[str], variables: dict[str, str], says: str
) -> None:
    (folder / "said.py").write_text(
        "import json, os\nconf = json.loads(os.environ['MEMMGR_CONF'])\n"
        "print(os.environ['MEMMGR_BUDGET'], conf.get('policy'), conf.get('disk'))"
    )
    done = memmgr("run", *words, "said.py", cwd=folder, env={**os.environ, **variables}, start=subprocess.run)
    assert says in (done.stderr if "memmgr run" in says else done.stdout), (done.stdout, done.stderr)
    assert done.returncode == (2 if "memmgr run" in says else 0)


def test_variables_that_a_script_spoils_end_it_with_two(folder: Path) -> None:
    (folder / "spoil.py").write_text("import os\nos.environ['MEMMGR_BUDGET'] = '12XB'\nimport torch\nprint('on')\n")
    done = memmgr("run", "--budget", "8MB", "spoil.py", cwd=folder, start=subprocess.run)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("memmgr: MEMMGR_BUDGET: unknown unit")


def test_options_with_commas_and_spaces_arrive(tmp_path: Path) -> None:
    odd = tmp_path / "a, b:c"
    odd.mkdir()
    (tmp_path / "show.py").write_text(
        "import torch; from memmgr.config import conf; import os; print(conf.parse_conf(os.environ['MEMMGR_CONF']))"
    )
    done = memmgr(
        "run",
        "--quiet",
        "--disk",
        str(odd),
        "--disk-size",
        "1GB",
        "--policy",
        "filter:dtr,director:offload,prefetch:off",
        "show.py",
        cwd=tmp_path,
        env={**os.environ, "MEMMGR_CONF": "policy:evict,placement:window"},  # which an option outranks, and no more
    )
    shown = eval(done.stdout)
    assert shown == {
        "_placement": "window",
        "disk": (str(odd), "1GB"),
        "policy": "filter:dtr,director:offload,prefetch:off",
        "quiet": True,
    }


def test_a_command_line_with_other_options() -> None:
    args = argparse.Namespace(
        budget="1GB",
        policy=None,
        disk=None,
        disk_size=None,
        host=None,
        device=None,
        log=None,
        verify=True,
        module=True,
        script="pack",
        arguments=["a b"],
    )
    assert verb.command(args, log="x y.jsonl") == "memmgr run --budget 1GB --log 'x y.jsonl' --verify -m pack 'a b'"
    assert verb._round_up(3_937_280) == "4.2MB" and verb._round_up(12 * 10**9) == "12.6GB"


def _stats(**changed: float) -> dict[str, Any]:
    base = {
        "budget_bytes": 10**9,
        "resident_bytes.peak": 10**9,
        "unmanaged_peak_bytes": 2 * 10**9,
        "floor_bytes": 5 * 10**8,
        "fixed_bytes.peak": 10**8,
        "recompute_seconds": 1.0,
        "stall_seconds": 0.1,
        "wall_seconds": 10.0,
        "checkpoint_seconds": 0.0,
        "watched_seconds": 10.0,
    }
    return {**base, **changed}


def test_what_the_summary_advises() -> None:
    assert advice(_stats())[0] == "the floor (no smaller budget can work) is about 500 MB"
    assert "+800 MB of budget (1.8 GB)" in advice(_stats())[1]
    own = own_checkpointing(_stats(unmanaged_peak_bytes=5 * 10**8, checkpoint_seconds=2.5))
    assert "own checkpointing recomputes for 25 % of the time while 500 MB of the budget are never used" in own[0]
    assert not own_checkpointing(_stats(unmanaged_peak_bytes=95 * 10**7, checkpoint_seconds=2.5))
    assert any("faster --disk" in line for line in advice(_stats(stall_seconds=4.0)))
    assert any("of the budget are fixed" in line for line in advice(_stats(**{"fixed_bytes.peak": 9 * 10**8})))
    assert advice(_stats(budget_bytes=2**64 - 1)) == [
        "with a budget of 2 GB or more nothing would be evicted; the floor (no smaller budget can work) is about 500 MB"
    ]
    assert advice(_stats(unmanaged_peak_bytes=10**9))[0].startswith("everything fitted; the floor")


def test_no_figure_is_said_twice(folder: Path) -> None:
    """The budget's own line has the figures; the next lines are advice."""
    done = memmgr("run", "--budget", "8MB", "--log", "run.jsonl", "train.py", cwd=folder)
    said = done.stderr.splitlines()
    assert done.returncode == 0 and said[0].startswith("memmgr: peak ")
    assert "of an unlimited run" in said[0] or "too few to tell a slowdown" in said[0], "with how many passes by plan"
    figures = [set(re.findall(r"[\d.]+ [kM]B", line)) for line in said if "would remove" not in line]
    assert figures[0] and not figures[0] & set().union(*figures[1:]), said  # whole figures: "12.8 MB" is not "8 MB"
    assert not [line for line in said[1:] if "of the time" in line or "stalled" in line], said
    assert said[-1].startswith("memmgr: where the time and the memory went:  memmgr report ")


@pytest.mark.parametrize(
    ("ending", "error", "said"),
    [
        ("", "", "ended"),
        ("raise KeyError('gone')", "KeyError", "ended by KeyError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "was interrupted (Ctrl-C)"),
    ],
)
def test_the_log_says_how_it_ended(folder: Path, ending: str, error: str, said: str) -> None:
    (folder / "train.py").write_text(TRAIN + ending)
    done = memmgr("run", "--budget", "8MB", "--log", "run.jsonl", "train.py", cwd=folder)
    assert (done.returncode != 0) is bool(error), done.stderr
    last = json.loads((folder / "run.jsonl").read_text().splitlines()[-1])
    assert last["type"] == "end" and (last["failed"], last["error"]) == (bool(error), error)
    assert read_log(folder / "run.jsonl")[0][-1].ending == said


def test_after_measuring_it_names_a_budget_to_try(folder: Path, plain_bits: str) -> None:
    done = memmgr("run", "train.py", cwd=folder)
    shown = re.search(r"^memmgr: to train in less:  memmgr (run --budget .*)$", done.stderr, re.MULTILINE)
    assert shown, done.stderr
    again = memmgr(*shlex.split(shown[1]), cwd=folder)
    assert again.returncode == 0 and _bits(again) == plain_bits and (folder / "train.jsonl").is_file(), again.stderr


def test_the_scripts_own_checkpointing_is_seen() -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    import memmgr as library

    layer = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    x = torch.randn(512, 64)
    found = []
    for own in (False, True):
        with library.budget("1GB", quiet=True) as mm:
            for _ in range(4):
                y = checkpoint(layer, x, use_reentrant=False) if own else layer(x)
                y.sum().backward()
        found.append(mm.stats()["checkpoint_seconds"])
        assert mm.stats()["watched_seconds"] > found[-1]
    assert found[0] == 0.0 < found[1]


def test_a_wrong_is_an_error_of_its_own() -> None:
    with pytest.raises(UsageError):
        as_python.load(argparse.Namespace(module=True, script="no.such.module"))


OWN = """
import torch, memmgr
model = torch.nn.Linear(64, 64)
x = torch.randn(4096, 64)
{before}
with memmgr.budget("8MB"):
    model(x).square().mean().backward()
print("ended", memmgr.stats()["budget_bytes"])
"""


@pytest.mark.parametrize("before", ["", "model(x)"])
def test_a_run_without_a_budget_gives_way_to_the_scripts_own(tmp_path: Path, before: str) -> None:
    """It only measures. A run that is to write a log, or has a limit, is an error as before."""
    (tmp_path / "train.py").write_text(OWN.format(before=before))
    done = memmgr("run", "train.py", cwd=tmp_path)
    assert done.returncode == 0 and "ended 8000000" in done.stdout, done.stderr
    assert done.stderr.count("memmgr: peak ") == 1 and " of 8 MB " in done.stderr
    refused = memmgr("run", "--budget", "9MB", "train.py", cwd=tmp_path)
    assert (refused.returncode != 0 and "already" in refused.stderr) or "of its own" in refused.stderr


def test_a_run_without_a_budget_gives_way_to_a_callback(tmp_path: Path) -> None:
    code = "from memmgr.api.autostart import budget_of_the_script\nprint(budget_of_the_script())"
    (tmp_path / "train.py").write_text(code)
    assert memmgr("run", "train.py", cwd=tmp_path).stdout.strip() == "None"
    assert "9 MB" in memmgr("run", "--budget", "9MB", "train.py", cwd=tmp_path).stdout
