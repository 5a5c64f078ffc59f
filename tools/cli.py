"""The command `memmgr`: one verb per file, each with `add_arguments`, `run` and a docstring that is its help.

Slow modules are imported in `main`, where an interrupt prints a line and no traceback.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

TYPE_CHECKING = False  # instead of typing's: importing typing takes long
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

# Verb, module, one line. A module is imported when its verb is called: `memmgr --help` has no use for torch's tools.
VERBS: tuple[tuple[str, str, str], ...] = (
    ("run", "memmgr.tools.verbs.run", "run a training script under a budget, unmodified"),
    ("top", "memmgr.tools.verbs.top", "watch running trainings: memory, its cost, and its holders"),
    ("report", "memmgr.tools.verbs.report", "one HTML page about a finished run, from its log"),
    ("doctor", "memmgr.tools.verbs.doctor", "check which parts work here, with a remedy for the others"),
    ("demo", "memmgr.tools.verbs.demo", "train a GPT in less memory, and compare the bits"),
    ("trace", "memmgr.tools.verbs.trace", "record one pass of a training script, for simulate"),
    ("simulate", "memmgr.tools.verbs.simulate", "run a policy over a recorded pass: the cost of a budget"),
    ("plan", "memmgr.tools.verbs.plan", "predict the effect of a budget on a step, before any training"),
    ("tune", "memmgr.tools.verbs.tune", "find the budget, or the batch, of a training script by trying"),
    ("bench", "memmgr.tools.bench.verb", "compare systems that save memory: time, peaks and bits"),
    ("gpu-check", "memmgr.tools.verbs.gpu_check", "check this machine's GPU: bits, step times, peaks, risks"),
    ("clean", "memmgr.tools.verbs.clean", "remove compiled libraries, and files of killed processes"),
    ("completion", "memmgr.tools.verbs.completion", "a script for TAB completion in bash, zsh or fish"),
)

_BEGIN = """Train under a byte budget: less memory, the same bits in every parameter.

begin with:
  memmgr run train.py      run a script and measure its memory; the last line of
                           the output is the command that needs less of it
  memmgr tune train.py     find a budget that costs little time
  memmgr top               watch a training from another terminal
  memmgr report run.jsonl  make a page of a log of memmgr run --log run.jsonl
  memmgr doctor --quick    find out why something does not work"""

ELSEWHERE: dict[str, str] = {
    word: place
    for words, place in (
        (
            "explain holders leak leaks memory",
            "memmgr.explain() in the program names the holders of the memory and the leaks; so do memmgr top while it runs, and "
            "memmgr report on a log of memmgr run --log",
        ),
        (
            "stats summary",
            "memmgr.stats() in the program has all figures; memmgr run --json FILE writes them at the end",
        ),
        ("live monitor ps watch", "memmgr top watches running trainings"),
        ("remove uninstall", "memmgr clean removes compiled libraries; then pip uninstall memmgr"),
    )
    for word in words.split()
}
"""The answer to a word that is no verb: the place that has it."""


def overview(*, with_verb: bool = True, short: bool = False) -> argparse.ArgumentParser:
    """The command itself, without the options of its verbs.

    `with_verb`: False leaves room for them. `short`: the help does not list the verbs.
    """
    from argparse import SUPPRESS, RawDescriptionHelpFormatter

    from memmgr.tools.common.usage_error import Parser

    lines = "\n".join(f"  {verb:<12}{line}" for verb, _, line in VERBS)
    parser = Parser(
        prog="memmgr",
        description=_BEGIN,
        usage="memmgr VERB [options]",
        epilog="memmgr --help lists all verbs."
        if short
        else f"verbs:\n{lines}\n\nmemmgr VERB -h lists a verb's options.",
        formatter_class=RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=SUPPRESS)
    parser.add_argument("--version", action="version", version=f"memmgr {_version()}", help=SUPPRESS)
    if with_verb:
        parser.add_argument("verb", choices=[verb for verb, _, _ in VERBS], metavar="VERB", help=SUPPRESS)
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("memmgr")
    except PackageNotFoundError:
        return "(not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Args:
        argv: without the program's name; None takes the process's own.

    Returns:
        The exit code: 0 when all that the verb promises held.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(words)
    except KeyboardInterrupt:
        verb = next((f" {verb}" for verb, _, _ in VERBS if verb in words[:1]), "")
        print(f"memmgr{verb}: interrupted", file=sys.stderr)
        return 130  # as a shell says it
    except BrokenPipeError:  # `memmgr ... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  it lives as long as the process
        return 0


def _main(words: Sequence[str]) -> int:
    from memmgr.tools.common.usage_error import UsageError

    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words:
        overview(short=True).print_help()
        return 2
    command = overview()
    if words[0] in ELSEWHERE:
        command.error(f"there is no verb {words[0]}: {ELSEWHERE[words[0]]}")
    if words[0].endswith(".py") or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        command.error(f"a verb is missing: memmgr run {' '.join(words)}")
    verb = command.parse_args(words[:1]).verb
    try:
        return _run(verb, words[1:])
    except UsageError as error:
        print(f"memmgr {verb}: {error}", file=sys.stderr)
        return 2


def _run(verb: str, words: Sequence[str]) -> int:
    """Imports the verb, which may take seconds, reads its words and runs it."""
    import tempfile

    from memmgr.config import variables
    from memmgr.tools.common.help_text import Help, HelpText
    from memmgr.tools.common.interrupts import ends_at_once
    from memmgr.tools.common.usage_error import Parser

    if verb not in ("run", "trace", "doctor"):
        os.environ.pop("MEMMGR_BUDGET", None)  # of a script: the other verbs train nothing of the user's
    variables.said = verb == "doctor"  # it lists misspelt ones among the rest
    with ends_at_once(verb):  # some imports treat an interrupt as their own error
        module = import_module({name: path for name, path, _ in VERBS}[verb])
    parser = Parser(prog=f"memmgr {verb}", description=module.__doc__, formatter_class=HelpText, add_help=False)
    parser.add_argument("-h", "--help", action=Help)
    module.add_arguments(parser)
    args = parser.parse_args(words)
    try:
        tempfile.gettempdir()  # a container's disk may be read-only; torch's own optimizers end without one
    except FileNotFoundError as error:
        print(f"memmgr {verb}: {error.strerror}: mount one there, or name one in TMPDIR", file=sys.stderr)
        return 2
    return int(module.run(args))


if __name__ == "__main__":
    sys.exit(main())
