"""Lines of memmgr among those of the program."""

from __future__ import annotations

import sys


def say(*lines: str) -> None:
    """Prints each line on stderr, after "memmgr: ". A progress bar of tqdm is cleared for them and drawn again below."""
    if not lines:
        return
    text = "\n".join("memmgr: " + line for line in lines)
    # Programs put a function without `write` in the place of the class, to have no bars.
    write = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "write", None)
    if write is None:
        print(text, file=sys.stderr, flush=True)
    else:
        write(text, file=sys.stderr)
