"""Suggestions for misspelt words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

LEAST_PART = 3
"""Parts of at most so many letters stand in too many names."""


def meant(word: str, known: Iterable[str], cutoff: float = 0.7, *, parts: bool = False) -> str:
    """`; did you mean 'budget'?`, to go behind an error; nothing where no word is near. Case does not matter.

    `cutoff`: how like it a word has to be, from 0 to 1 (difflib's ratio): more, where all have a beginning in common. `parts`: a
    name that shares a part with the word is near, too: for names without a part in common.
    """
    word, names = word.lower(), {one.lower(): one for one in known}
    near = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    near = near or [name for name in names if sorted(name) == sorted(word)]  # two letters of a short one are exchanged
    for is_near in (_is_within, _has_a_part_of) if parts else ():
        near = near or [name for name in names if is_near(name, word)]
    return f"; did you mean {' or '.join(repr(names[name]) for name in near[:2])}?" if near else ""


def _is_within(name: str, word: str) -> bool:
    """Tells if the name is in the word, apart from signs: `a100-80` is in `a100 80gb`, and `l4` is not in `l40`."""
    return bool(re.search(re.escape(_plain(name)) + r"(?!\d)", _plain(word)))


def _has_a_part_of(name: str, word: str) -> bool:
    """Tells if a part between the word's signs is in the name: one of `a100-sxm4` is in `a100-80`."""
    return any(len(part) > LEAST_PART and part in _plain(name) for part in re.split(r"[^a-z0-9]+", word))


def _plain(word: str) -> str:
    return "".join(filter(str.isalnum, word))
