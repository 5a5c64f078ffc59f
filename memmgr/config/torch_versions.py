"""The releases of torch that memmgr is made for. Torch is not imported here."""

from __future__ import annotations

import re

OLDEST, NEWEST = (2, 11), (2, 15)


def unfit(version: str) -> str:
    """Why a budget cannot be had with this release, and which to install; empty where one can."""
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if OLDEST <= number <= NEWEST:
        return ""
    (oldest, low), (newest, high) = OLDEST, NEWEST
    return (
        f"this version is made for torch {oldest}.{low} to {newest}.{high}, not for {version}: "
        f"pip install 'torch>={oldest}.{low},<{newest}.{high + 1}'"
    )
