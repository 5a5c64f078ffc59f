"""Lines of memmgr among those of the program."""

from __future__ import annotations

import sys


def say(*lines: str) -> None:
    """Prints each line on stderr, after "memmgr: ". A progress bar of tqdm is cleared for them and drawn again below."""
    if not lines:
        return
    text = "\n".join("memmgr: " + line for line in lines)
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None:
        print(text, file=sys.stderr, flush=True)
    else:
        tqdm.write(text, file=sys.stderr)
