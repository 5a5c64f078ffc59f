"""The help of a verb: its docstring in the width of the terminal."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import Any

WIDEST = 100
"""Longer lines are hard to read."""


class HelpText(argparse.HelpFormatter):
    """Paragraphs are filled. A line that begins with a blank, such as an example, stays as it is."""

    def __init__(self, prog: str) -> None:
        columns = min(WIDEST, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=22, width=max(40, columns))

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """Required words and `[options]`: the list below has the rest."""
        if usage is None:
            required = [action for action in actions if action.option_strings and action.required]
            words = [f"{one.option_strings[-1]} {one.metavar}" for one in required]
            places = [action for action in actions if not action.option_strings]
            words += [self._format_args(one, self._get_default_metavar_for_positional(one)) for one in places]
            usage = " ".join(["%(prog)s [options]", *words])
        super().add_usage(usage, actions, groups, prefix)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for paragraph in text.strip().split("\n\n"):
            lines = paragraph.splitlines()
            drawn = any(line.startswith(" ") for line in lines)
            filled.append(paragraph if drawn else textwrap.fill(" ".join(lines), width))
        return "\n\n".join(filled) + "\n"
