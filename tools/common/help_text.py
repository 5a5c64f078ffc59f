"""The help of a verb in the width of the terminal: `--help` has its whole docstring, `-h` the first sentence and the examples."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

WIDEST = 100
"""Longer lines are hard to read."""


class Help(argparse.Action):
    """`-h` fits one screen, `--help` says all."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=argparse.SUPPRESS)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Prints it, and ends the process."""
        if option == "-h" and parser.description is not None:
            first, *rest = parser.description.strip().split("\n\n")
            first = re.sub(r"[.:]\s.*", ".", first, flags=re.DOTALL)
            parser.description = "\n\n".join([first, *filter(_is_drawn, rest)])
            parser._optionals.title = f"options ({parser.prog} --help explains more)"
            for group in parser._action_groups[2:]:
                parser._optionals._group_actions += group._group_actions
            del parser._action_groups[2:]
        parser.print_help()
        parser.exit()


def _is_drawn(paragraph: str) -> bool:
    return any(line.startswith(" ") for line in paragraph.splitlines())


class HelpText(argparse.HelpFormatter):
    """Paragraphs are filled. A line that begins with a blank, such as an example, stays as it is. The usage alone has the
    words without an option: the list would repeat them.
    """

    def __init__(self, prog: str) -> None:
        columns = min(WIDEST, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=25, width=max(40, columns))

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """Required words and `[options]`: the list below has the rest."""
        if usage is None:
            required = [action for action in actions if action.option_strings and action.required]
            words = [f"{one.option_strings[-1]} {one.metavar}" for one in required]
            places = [action for action in actions if not action.option_strings]
            words += [self._format_args(one, self._get_default_metavar_for_positional(one)) for one in places]
            usage = " ".join(["%(prog)s [options]", *words])
        super().add_usage(usage, actions, groups, prefix)

    def add_arguments(self, actions: Any) -> None:
        """The options among them."""
        super().add_arguments([action for action in actions if action.option_strings])

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for paragraph in text.strip().split("\n\n"):
            lines = paragraph.splitlines()
            filled.append(paragraph if _is_drawn(paragraph) else textwrap.fill(" ".join(lines), width))
        return "\n\n".join(filled) + "\n"
