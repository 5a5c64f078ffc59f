"""How the optional packages are installed."""

from __future__ import annotations

import importlib.metadata
import re
import shlex


def pip_line(extra: str) -> str:
    """The command that installs the packages of an extra, by their names: `memmgr[extra]` in a checkout would compile memmgr."""
    try:
        wanted = importlib.metadata.requires("memmgr") or []
    except importlib.metadata.PackageNotFoundError:  # the sources are imported as they lie
        wanted = []
    found = [re.match(r"([\w.-]+)(.*); .*extra == ['\"](\w+)['\"]", requirement) for requirement in wanted]
    named = [shlex.quote(match[1] + match[2]) for match in found if match is not None and match[3] == extra]
    return f"pip install {' '.join(named)}" if named else f"pip install '.[{extra}]' in memmgr's checkout"
