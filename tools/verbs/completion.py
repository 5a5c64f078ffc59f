"""Completion for a shell: verbs, options, names of policies, files and folders. Prints a script; TAB does the rest.

    memmgr completion bash > ~/.local/share/bash-completion/completions/memmgr
    memmgr completion zsh  > "${fpath[1]}/_memmgr"
    memmgr completion fish > ~/.config/fish/completions/memmgr.fish

The script knows this version's words and runs nothing of memmgr: write it again after an upgrade.

Exit code: 0; 2 when the package that writes the script is missing.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from memmgr.config.extras import pip_line
from memmgr.tools.common.usage_error import UsageError

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("shell", choices=SHELLS, help="whose language the script is in")


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    try:
        import shtab
    except ImportError:
        raise UsageError(f"completion needs the package shtab: {pip_line('completion')}") from None
    print(shtab.complete(_whole(), args.shell))
    return 0


def _whole() -> argparse.ArgumentParser:
    """All verbs in one parser. `main` has no such thing: it would import all of them for each."""
    from memmgr.tools import cli

    parser = cli.overview(with_verb=False)
    verbs = parser.add_subparsers()
    for verb, path, line in cli.VERBS:
        one = verbs.add_parser(verb, help=line, description=line)
        import_module(path).add_arguments(one)
        for action in one._actions:
            _say_what_completes(action)
    return parser


def _say_what_completes(action: Any) -> None:
    """Derives completions from each option's own description, so that no verb has to know about shells."""
    import shtab

    from memmgr.policies import FILTERS, POLICIES

    if action.dest == "policy":
        action.choices = sorted({*POLICIES, *FILTERS, "help"})
    elif action.metavar == "FOLDER":
        action.complete = shtab.DIRECTORY
    elif action.type is Path or action.metavar == "FILE" or action.dest in ("script", "arguments"):
        action.complete = shtab.FILE
