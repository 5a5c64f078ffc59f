"""The known variables `MEMMGR_...`.

An unknown one is a spelling mistake: the script would train without the setting, and without a message. Torch is not
imported here, and this file is only imported if there is such a variable.
"""

from __future__ import annotations

import os

VARIABLES = frozenset(
    "MEMMGR_BUDGET MEMMGR_CACHE MEMMGR_CONF MEMMGR_CUDA_MEMORY MEMMGR_CUDA_PAGE MEMMGR_DEBUG MEMMGR_DISK MEMMGR_INSTALL "
    "MEMMGR_TELEMETRY MEMMGR_TIER_DIRECT".split()
)
"""Those that a user may set."""
VALUES = {
    **dict.fromkeys(("MEMMGR_DEBUG", "MEMMGR_INSTALL", "MEMMGR_TELEMETRY", "MEMMGR_TIER_DIRECT"), ("0", "1")),
    "MEMMGR_CUDA_MEMORY": ("mapped", "plain"),
}
"""The accepted values of some variables; any other value would have no effect, and no message."""
OF_TESTS = frozenset(
    "MEMMGR_CORE_LIB MEMMGR_DRIVER MEMMGR_OPS_SHARD MEMMGR_PAGER_SMALL MEMMGR_SHARED MEMMGR_SOAK_SECONDS MEMMGR_SOAK_SEED "
    "MEMMGR_TEST_ALL_OPS".split()
)
"""Those of our own tests and benchmarks: known, and never shown."""

said = False
"""Errors in the variables were reported, or will be."""


def unknown() -> dict[str, bool]:
    """A sentence about each unknown variable or value, and whether a known one is close to it."""
    found = {}
    for name, values in VALUES.items():
        value = os.environ.get(name) or values[0]  # empty: as if it were not set
        if value not in values:
            found[f"{name}={value!r} is none of {', '.join(values)}"] = True
    for name in sorted(os.environ):
        if name.startswith("MEMMGR_") and name not in VARIABLES | OF_TESTS:
            near = _near(name)
            rest = f":{near}" if near else "; those there are: " + ", ".join(sorted(VARIABLES))
            found[f"{name} is not a variable of memmgr{rest}"] = bool(near)
    return found


def _near(name: str) -> str:
    from .did_you_mean import meant  # which loads more than a start needs

    return meant(name, VARIABLES, 0.8).replace("'", "").removeprefix(";")


def refuse_unknown() -> None:
    """Ends the process where a variable is misspelt; with `strict:off`, and where it may be another program's, it is a warning.

    Raises `Refused`: `strict` is on.
    """
    global said
    found = {} if said else unknown()
    said = True
    if not found:
        return
    from .conf import refuse_or_warn

    misspelt = [line for line, near in found.items() if near]
    if misspelt:
        refuse_or_warn("; ".join(misspelt))
    others = [line for line in found if line not in misspelt]
    if others:
        from memmgr.common.say import warn

        warn("; ".join(others))
