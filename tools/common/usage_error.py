"""Mistakes of the user: one line, exit code 2, no traceback, and a suggestion if the word is almost right."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from memmgr.config.did_you_mean import meant


class UsageError(Exception):
    """The text is the line."""


def cannot_read(path: str | Path, error: OSError) -> UsageError:
    """The line about a file of the user's that is missing, a folder, or not readable."""
    return UsageError(f"cannot read {path}: {error.strerror or error}")


def check_readable(path: Path) -> None:
    """Raises `UsageError`: the file cannot be opened."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise cannot_read(path, error) from None


class Parser(argparse.ArgumentParser):
    """Reads a command line; options, verbs and choices that are almost ones are asked about."""

    _given: Sequence[str] = ()

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """As argparse's own."""
        self._given = args
        found = super().parse_args(args, namespace)
        rest = getattr(found, "arguments", None)  # a script's; argparse takes a "--" before them for its own
        if rest is not None and [found.script, "--", *rest] == list(args[-len(rest) - 2 :]):
            found.arguments = ["--", *rest]
        return found

    def error(self, message: str) -> NoReturn:
        """As argparse's own, with a suggestion."""
        # A script's own arguments are never missing.
        message = re.sub(r"^(the following arguments are required: .*), arguments$", r"\1", message)
        message = re.sub(r"invalid (int|float) value: (.*)", r"\2 is no number", message)
        if missing := re.fullmatch(r"argument (.*): expected one argument", message):
            message += self._negative(missing[1].split("/"))
        super().error(message + self._meant(message))

    def _negative(self, options: Sequence[str]) -> str:
        """A size below nothing, which argparse takes for an option."""
        pairs = zip(self._given, self._given[1:], strict=False)
        return next(
            (
                f"; {word!r} is less than nothing"
                for option, word in pairs
                if option in options and re.match(r"-[0-9.]", word)
            ),
            "",
        )

    def _meant(self, message: str) -> str:
        if chosen := re.search(r"invalid choice: '([^']+)'", message):
            return meant(chosen[1], {str(one) for action in self._actions for one in action.choices or ()})
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        _, unrecognized, rest = message.partition("unrecognized arguments: ")
        # Something that is required is missing, perhaps because it was misspelt.
        words: Iterable[str] = rest.split() if unrecognized else self._given
        names = (word.partition("=")[0] for word in words if word.startswith("--"))
        known = [option.removeprefix("--") for option in options]
        near = (meant(name.removeprefix("--"), known) for name in names if name not in options)
        return next(filter(None, near), "").replace("mean '", "mean '--")
