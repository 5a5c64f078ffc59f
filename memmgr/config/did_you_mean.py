"""Suggestions for misspelt words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(word: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    """`; did you mean 'budget'?`, to go behind an error; nothing where no word is near. Case does not matter.

    `cutoff`: how like it a word has to be, from 0 to 1 (difflib's ratio): more, where all have a beginning in common.
    """
    word, names = word.lower(), {one.lower(): one for one in known}
    near = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    near = near or [name for name in names if sorted(name) == sorted(word)]  # two letters of a short one are exchanged
    return f"; did you mean {names[near[0]]!r}?" if near else ""
