"""The interface for users, apart from sizes and errors: the figures, the one line at the end, the environment."""

import functools
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch
from threads import in_threads

import memmgr
from memmgr.config import conf, variables
from memmgr.native import binding

from .outside import watch

PROMISED = {
    "budget_bytes",
    "resident_bytes.current",
    "resident_bytes.peak",
    "fixed_bytes.peak",
    "floor_bytes",
    "unmanaged_peak_bytes",
    "evictions",
    "recomputes",
    "recompute_seconds",
    "offloads",
    "offload_bytes",
    "reloads",
    "reload_bytes",
    "prefetch_hits",
    "stall_seconds",
    "passes",
}


def _train() -> None:
    w = torch.randn(256, 256, requires_grad=True)
    for _ in range(2):
        (w @ w).tanh().exp().sum().backward()


def test_stats_are_flat_and_have_what_was_promised() -> None:
    with memmgr.budget("1GB", quiet=True) as mm:
        _train()
        assert mm.stats().keys() == memmgr.stats().keys() >= PROMISED
    stats = mm.stats()
    assert stats.keys() >= PROMISED and memmgr.stats() == stats
    assert all(type(value) in (int, float) for value in stats.values()), "it is not flat"
    assert stats["passes"] == 2 and stats["budget_bytes"] == 10**9
    assert 0 < stats["floor_bytes"] <= stats["unmanaged_peak_bytes"]
    stats["passes"] = 7  # a copy
    assert mm.stats()["passes"] == 2


def test_steps_are_counted_and_not_their_micro_batches() -> None:
    w = torch.randn(8, 8, requires_grad=True)
    one, other = torch.optim.SGD([w], lr=0.1), torch.optim.SGD([w], lr=0.1)
    with memmgr.budget("1GB", quiet=True) as mm:
        for _ in range(3):
            for _ in range(4):
                (w @ w).sum().backward()
            one.step()
        other.step()
    one.step()
    assert (mm.stats()["steps"], mm.stats()["passes"]) == (3, 12)


def test_the_signature() -> None:
    parameters = inspect.signature(memmgr.budget).parameters
    public = [name for name in parameters if not name.startswith("_")]
    assert public[:7] == ["limit", "device", "host", "disk", "policy", "verify", "quiet"]
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "limit")
    assert parameters["policy"].default == "auto" and parameters["verify"].default is False


@pytest.mark.parametrize("quiet", [False, True])
def test_one_line_at_the_end(quiet: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with memmgr.budget("1GB", quiet=quiet):
        _train()
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line]
    assert out == "" and len(lines) == (0 if quiet else 1), (out, err)
    if not quiet:
        assert lines[0].startswith("memmgr: peak ") and "1 GB" in lines[0] and "2 passes" in lines[0]


def test_another_thread_cannot_open_a_second_one() -> None:
    found: list[BaseException] = []

    def enter() -> None:
        try:
            memmgr.budget("2GB", quiet=True).__enter__()
        except RuntimeError as error:
            found.append(error)

    with memmgr.budget("1GB", quiet=True) as mm:
        in_threads(lambda _: enter(), range(1))
        _train()
    assert len(found) == 1 and "do not nest" in str(found[0]) and not isinstance(found[0], torch.OutOfMemoryError)
    assert mm.stats()["budget_bytes"] == 10**9 and mm.stats()["passes"] == 2
    assert "concurrent" in (memmgr.budget.__doc__ or "")


SPEC = {"model": "gpt", "sizes": {"layers": 2, "width": 128, "context": 128, "batch": 8}, "steps": 2}


@functools.cache
def _unlimited() -> tuple[int, list[str]]:
    """The bytes that it needs, and its losses without memmgr."""
    needed = watch(SPEC | {"how": "measure", "inside": True}).stats["unmanaged_peak_bytes"]
    return int(needed), watch(SPEC | {"how": "plain"}).result["losses"]


@pytest.mark.parametrize(
    ("conf", "moved"),
    [
        ("policy:dtr,quiet:1", "evictions"),
        pytest.param("policy:offload,quiet:1", "offloads", marks=pytest.mark.slow),  # the next one, without a host tier
        ("policy:offload,host:1MB,quiet:1", "offloads"),
    ],
)
def test_the_rest_by_the_environment(conf: str, moved: str, tmp_path: Path) -> None:
    """An unmodified script, policy and disk named outside of it."""
    needed, losses = _unlimited()
    environment = {"MEMMGR_BUDGET": str(int(0.7 * needed)), "MEMMGR_CONF": f"{conf},disk:{tmp_path}"}
    seen = watch(SPEC | {"how": "environment"}, environment)
    assert seen.result["error"] is None and seen.result["losses"] == losses
    other = {"evictions": "offloads", "offloads": "evictions"}[moved]
    assert seen.stats[moved] > 0 and seen.stats[other] == 0
    assert list(tmp_path.iterdir()) == [], "the tier's file has a name"


BAD_VARIABLES = [
    ({"MEMMGR_BUDGET": "12XB"}, "12GB"),
    ({"MEMMGR_BUDGET": "12"}, "was 12GB meant"),
    ({"MEMMGR_BUDGET": ""}, "none"),
    ({"MEMMGR_BUDGET": "ned*0.6"}, "did you mean 'need*0.6'?"),
    ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "policy:best"}, "the usual ones are 'auto'"),
    ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "polcy:dtr"}, "did you mean 'policy'?"),
    (
        {"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "zebra:1"},
        "verify, prefetch, lines, quiet, strict, trace, trace_pass, silent_seconds",
    ),
    ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "offload"}, "not key:value"),
    ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "{policy"}, "not JSON"),
    ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "strict:perhaps"}, "neither on nor off"),
    ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "trace_pass:two"}, "not a whole number"),
    ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "silent_seconds:long"}, "not a number of seconds"),
    ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "silent_seconds:0.1"}, "neither 0 (never) nor"),
    ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "disk:/nowhere/at/all"}, "folder"),
    ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "disk:/proc"}, "disk: no file can be made in '/proc'"),
    ({"MEMMGR_BUDGET": "1GB", "MEMMGR_DISK": "/nowhere/at/all"}, "MEMMGR_DISK: '/nowhere/at/all' is not a folder"),
    ({"MEMMGR_CONF": "alocator:native"}, "did you mean 'allocator'?"),
    ({"MEMMGR_CONF": "allocator:natve"}, "did you mean 'native'?"),
    ({"MEMMGR_CONF": "policy:evct"}, "did you mean 'evict'?"),
]


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("MEMMGR_CONF", "nonsense=1", "MEMMGR_CONF: 'nonsense=1' is not key:value; keys are policy, "),
        ("MEMMGR_CONF", "polcy:dtr", "MEMMGR_CONF: unknown key 'polcy'; did you mean 'policy'?"),
        ("MEMMGR_DISK", "/nowhere/at/all", "MEMMGR_DISK: '/nowhere/at/all' is not a folder"),
        ("MEMMGR_CONF", "policy:dtr", ""),
        ("MEMMGR_DISK", "/tmp", ""),
    ],
)
def test_an_import_without_a_budget_says_which_variable_is_wrong_in_one_line(
    variable: str, value: str, says: str
) -> None:
    done = subprocess.run(  # without torch
        [sys.executable, "-c", "import memmgr, sys; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        env={**os.environ, variable: value},
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert len(done.stderr.splitlines()) == bool(says) and says in done.stderr, done.stderr


def _import_torch(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return forkserver.run(
        [sys.executable, "-W", "always", "-c", "import torch; print(torch.ones(2).sum().item())"],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=120,
    )


@pytest.mark.parametrize(("variables", "says"), BAD_VARIABLES, ids=[repr(v) for v, _ in BAD_VARIABLES])
def test_a_bad_variable_is_one_line_before_anything_is_trained(variables: dict[str, str], says: str) -> None:
    done = _import_torch(variables)
    assert done.returncode == 2 and done.stdout == "", (done.stdout, done.stderr)
    assert len(done.stderr.splitlines()) == 1 and says in done.stderr, done.stderr
    assert done.stderr.startswith("memmgr: MEMMGR_") and "strict:off" in done.stderr


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"MEMMGR_BUDGET": "12XB", "MEMMGR_CONF": "strict:off"}, "12GB"),
        ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "polcy:dtr,strict:off"}, "did you mean 'policy'?"),
        ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": '{"polcy": "dtr", "strict": false}'}, "did you mean 'policy'?"),
        ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "strict:off,disk:/nowhere/at/all"}, "folder"),
        ({"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": "strict:off,device:meta"}, "cannot be kept"),
        ({"MEMMGR_CONF": "alocator:native,strict:off"}, "did you mean 'allocator'?"),
    ],
)
def test_with_strict_off_it_is_one_warning_and_import_torch_goes_on(variables: dict[str, str], says: str) -> None:
    done = _import_torch(variables)
    assert done.returncode == 0 and done.stdout == "2.0\n", done.stderr
    assert done.stderr.count("memmgr: MEMMGR_") == 1 and says in done.stderr, done.stderr


SAID = "MEMMGR_BUGET is not a variable of memmgr: did you mean MEMMGR_BUDGET?"
DOORS = {
    "torch": ([], "import torch", {}),
    "memmgr, then torch": ([], "import memmgr, torch", {}),
    "memmgr alone": ([], "import memmgr\nmemmgr.budget", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    "memmgr run": (["-m", "memmgr", "run"], "", {}),
    "memmgr trace": (["-m", "memmgr", "trace", "--out", "t.jsonl"], "", {}),
}


# Lenient, the doors other than torch's and the one without a training are slow: the warning is the same function's at all.
@pytest.mark.parametrize(
    ("door", "strict"),
    [
        pytest.param(door, strict, marks=[pytest.mark.slow] * (not strict and door not in ("torch", "memmgr trace")))
        for door in DOORS
        for strict in (True, False)
    ],
)
def test_a_misspelt_variable_ends_it_before_anything_is_trained(door: str, strict: bool, tmp_path: Path) -> None:
    words, code, variables = DOORS[door]
    script = tmp_path / "train.py"
    script.write_text(f"{code}\nprint('went on')\n")
    # Otherwise torch comes second, or it warns, too.
    run = forkserver.run if door == "torch" or (strict and words) else subprocess.run
    done = run(
        [sys.executable, "-W", "always", *words, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **variables, "MEMMGR_BUGET": "1GB", "MEMMGR_CONF": "" if strict else "strict:off"},
        timeout=120,
    )
    if strict:
        assert (done.returncode, done.stdout) == (2, ""), (done.stdout, done.stderr)
        assert done.stderr == f"memmgr: {SAID} (MEMMGR_CONF=strict:off makes this a warning)\n"
    else:
        no_trace = door == "memmgr trace"  # nothing is trained
        assert (done.returncode, done.stdout) == (int(no_trace), "went on\n"), (done.stdout, done.stderr)
        assert done.stderr.count(SAID) == 1 and "UserWarning" in done.stderr, done.stderr


def test_a_variable_that_may_be_anothers_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memmgr.config.variables.said", False)
    monkeypatch.setenv("MEMMGR_OF_ANOTHER_TOOL", "1")
    with pytest.warns(
        UserWarning, match="MEMMGR_OF_ANOTHER_TOOL is not a variable of memmgr; those there are: MEMMGR_BUDGET"
    ):
        variables.refuse_unknown()


def test_a_value_that_would_change_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("memmgr.config.variables.said", False)
    monkeypatch.setenv("MEMMGR_TELEMETRY", "off")
    monkeypatch.setenv("MEMMGR_CUDA_MEMORY", "")
    with pytest.raises(SystemExit):
        variables.refuse_unknown()
    assert "MEMMGR_TELEMETRY='off' is none of 0, 1 (" in capsys.readouterr().err


def test_json_says_no_as_json_does() -> None:
    assert conf.parse_conf('{"disk": false}') == {"disk": False}
    with pytest.raises(ValueError, match="not JSON"):
        conf.parse_conf('{"disk": ' + "[" * 100_000)


TRAIN = "import torch, memmgr\nprint('begun')\nmemmgr.budget('1GB', quiet=True).__enter__()\ntorch.ones(4, requires_grad=True).exp().sum().backward()\nprint('trained')"


@pytest.mark.parametrize(("more", "code"), [("", 1), (",strict:off", 0)])
def test_a_budget_that_cannot_be_opened(more: str, code: int) -> None:
    """That another is open only the first saved tensor finds out."""
    variables = {"MEMMGR_BUDGET": "1GB", "MEMMGR_CONF": f"quiet:1{more}"}
    done = forkserver.run(
        [sys.executable, "-W", "always", "-c", TRAIN],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=120,
    )
    assert done.returncode == code and ("trained" in done.stdout) == (code == 0), done.stderr
    assert done.stderr.count("cannot be opened") == 1 and "Traceback" not in done.stderr, done.stderr
    if code:
        assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("memmgr: the budget cannot be opened: ")


def test_memory_of_others_is_counted_once_there_is_room_for_it() -> None:
    """A storage that no op has made, as `dcp.async_save` makes them, while another thread takes all memory that becomes free."""
    size, stop = 1 << 16, threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            _ = [torch.ones(size // 4) for _ in range(60)]

    with memmgr.budget(40 * size, quiet=True) as mm:
        thread = threading.Thread(target=allocate)
        thread.start()
        try:
            for _ in range(300):
                made = torch.empty(0).set_(torch.UntypedStorage(size))  # type: ignore[call-overload]
                made.fill_(1).add(1)
        finally:
            stop.set()
            thread.join()
        figures = mm.stats()
    assert figures["adopted_bytes"] == 300 * size
    assert figures["resident_bytes.peak"] <= figures["budget_bytes"]


IN_A_GENERATOR = """
import torch, memmgr

def steps():
    with memmgr.budget("1GB", quiet=True):
        while True:
            yield torch.ones(100_000).sum()

found = steps()
print(next(found).item())
"""


def test_a_budget_in_a_generator_that_nobody_ends_closes_with_the_interpreter() -> None:
    """Python ends the generator where it has taken the lists of finders away; then the destructors of torch's libraries run."""
    done = subprocess.run([sys.executable, "-c", IN_A_GENERATOR], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "100000.0\n", "")


BEFORE_IT_IS_OPEN = """
import memmgr
from memmgr.runtime import session

session.is_capturing = lambda device: True
memmgr.budget("1GB").__enter__()
"""


def test_what_keeps_the_first_budget_of_a_process_from_opening_is_said() -> None:
    """Nothing has figures yet, and closing asks for some."""
    done = forkserver.run([sys.executable, "-c", BEFORE_IT_IS_OPEN], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1] == "RuntimeError: memmgr: a budget cannot be opened while a graph is captured"
    assert "KeyError" not in done.stderr


FROZEN = """
import gc, torch, memmgr

held = [torch.randn(1 << 20) for _ in range(4)]
want = [t.sum().item() for t in held]
gc.freeze()
with memmgr.budget("8MB", quiet=True) as mm:
    assert mm.stats()["adopted_bytes"] == 4 << 22
    assert [t.sum().item() for t in held] == want
    assert mm.stats()["resident_bytes.peak"] <= 8_000_000
"""


def test_what_gc_has_frozen_counts() -> None:
    """No search of Python's finds it then, and twice the budget was in memory."""
    done = forkserver.run([sys.executable, "-c", FROZEN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


GARBAGE = """
import gc, torch, memmgr

gc.disable()
whole = []
gc.callbacks.append(lambda phase, info: whole.append(phase) if phase == "start" and info["generation"] == 2 else None)
held = [torch.randn(1 << 20) for _ in range(3)]
for _ in range(5):
    cycle = [torch.randn(1 << 20)]
    cycle.append(cycle)
    del cycle
    with memmgr.budget("16MB", quiet=True) as mm:
        assert mm.stats()["resident_bytes.current"] < 13 << 20
assert len(whole) == 1, whole

old = [torch.randn(1 << 18) for _ in range(24)]
old.append(old)
gc.collect()
del old, held
try:
    with memmgr.budget("16MB", quiet=True, policy="evict", disk=False) as mm:
        assert mm.stats()["resident_bytes.current"] < 1 << 20
except memmgr.BudgetError:
    raise SystemExit("garbage was in the way")
"""


def test_garbage_does_not_count_and_a_whole_collection_is_rare() -> None:
    """It takes a tenth of a second: too much for a loop that opens a budget for each batch."""
    done = forkserver.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_budget_that_is_opened_again_looks_once_through_all_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some processes have half a million objects. Where the model is new to it, it looks again at its end."""
    native = binding.load()
    looks: list[tuple[type, ...]] = []
    objects_of = native.objects_of
    monkeypatch.setattr(native, "objects_of", lambda types, *more: looks.append(types) or objects_of(types, *more))
    x = torch.randn(64, 512)
    models = []
    for _ in range(3):
        with memmgr.budget("1GB", quiet=True) as mm:
            models = models or [torch.nn.Linear(512, 512)]
            models[0](x).sum().backward()
            models[0].zero_grad()
        assert mm.stats()["resident_bytes.parameters"] == 512 * 513 * 4
    assert len(looks) == 2 + 1 + 1


WRONG = [
    ("disk", 5, "(folder, size)"),
    ("disk", (5, "1GB"), "(folder, size)"),
    ("disk", ("/tmp",), "(folder, size)"),
    ("disk", ("/tmp", None, 3), "(folder, size)"),
    ("host", (), "12GB"),
    ("log", 5, "the name of a file"),
    ("trace", ["run"], "the name of a file"),
    ("trace_pass", "2", "the number of a pass"),
    ("trace_pass", 1.5, "the number of a pass"),
    ("silent_seconds", "5", "a number of seconds"),
    ("silent_seconds", True, "a number of seconds"),
    ("device", 1.5, "torch.device"),
    ("policy", 5, "auto"),
    ("allocator", 5, "native"),
    ("verify", 1, "True or False"),
]


@pytest.mark.parametrize(("name", "value", "form"), WRONG)
def test_a_wrong_type_is_told_with_the_argument_and_its_forms(name: str, value: Any, form: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        memmgr.budget("1GB", **{"device": "cpu", name: value})
    text = str(caught.value)
    assert name in text and form in text and "\n" not in text, text


def test_what_is_no_tensor_and_no_function_is_told() -> None:
    wrong: Any = 3
    with pytest.raises(TypeError, match=r"memmgr\.manage takes a dense tensor; got 'int'"):
        memmgr.manage(wrong)
    with pytest.raises(TypeError, match=r"a budget decorates a function; got 3"):
        memmgr.budget("1GB")(wrong)


@pytest.mark.parametrize("thing", ["x", 3, None, ["x"], {"a": 1}])
def test_a_pin_of_no_tensor_is_refused(thing: Any) -> None:
    """A number ended the process."""
    with memmgr.budget("1GB", device="cpu", quiet=True), pytest.raises(TypeError, match="takes tensors, modules, and"):
        memmgr.pin(thing)
    with pytest.raises(TypeError):
        memmgr.pin(thing)


def test_a_pin_takes_modules_and_collections() -> None:
    model, table = torch.nn.Linear(256, 256), torch.randn(256, 256)
    with memmgr.budget("1GB", device="cpu", quiet=True):
        before = memmgr.stats()["pinned_cells"]
        with memmgr.pin(model, {"tables": [table]}):
            assert memmgr.stats()["pinned_cells"] - before >= 2  # a bias is small
        assert memmgr.stats()["pinned_cells"] == before


def test_rows_of_an_explanation_are_a_number() -> None:
    for top in ("x", 1.5, -1):
        with pytest.raises(TypeError, match="top: expected a number of rows"):
            memmgr.explain(top)  # type: ignore[arg-type]
