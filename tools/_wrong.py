"""What a user got wrong: said in one line, exit code 2, no traceback."""

from __future__ import annotations


class Wrong(Exception):
    """The text is the line."""
