"""`MEMMGR_BUDGET` and `MEMMGR_CONF`: how they are read, and how a script ends when they are wrong. Torch is not
imported here: the command line reads the variables, too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NoReturn

from .did_you_mean import meant
from .sizes import parse_budget

KEYS = (
    "policy",
    "disk",
    "disk_size",
    "host",
    "device",
    "allocator",
    "log",
    "verify",
    "prefetch",
    "lines",
    "quiet",
    "strict",
    "trace",
    "trace_pass",
    "silent_seconds",
)
"""Those that a user may set; `placement` is our own tests'."""
ALLOCATORS = ("auto", "native")
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_LENIENT = "MEMMGR_CONF=strict:off trains without a budget"


class Refused(SystemExit):
    """The variables cannot be read: the process ends with code 2. The line that says why has been printed.

    Raised inside `import torch`, which would make a chain of two tracebacks of any other exception.
    """


def pairs_of(text: str) -> Iterator[tuple[str, str]]:
    """The keys and values of `MEMMGR_CONF`, as they stand there.

    Raises `ValueError`: a pair without a colon, or JSON that is none.
    """
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"MEMMGR_CONF: not JSON: {error}") from None
        for key, value in found.items():
            yield str(key), str(value)
        return
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, colon, value = part.partition(":")
        if not colon:
            raise ValueError(f"MEMMGR_CONF: {part!r} is not key:value; keys are {', '.join(KEYS)}")
        yield key.strip(), value.strip()


def _flag(key: str, value: str) -> bool:
    if value.lower() not in _YES + _NO:
        raise ValueError(f"MEMMGR_CONF: {key}:{value} is neither on nor off")
    return value.lower() in _YES


def _number(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"MEMMGR_CONF: {key}:{value} is not a whole number") from None


def _seconds(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"MEMMGR_CONF: {key}:{value} is not a number of seconds") from None


def _unknown(key: str) -> ValueError:
    near = meant(key.replace("-", "_"), KEYS)
    return ValueError(
        f"MEMMGR_CONF: unknown key {key!r}{near or ';'} {'Keys' if near else 'keys'} are {', '.join(KEYS)}"
    )


def parse_conf(text: str) -> dict[str, Any]:
    """`policy:dtr,disk:/nvme` as keyword arguments of `budget`; a JSON object says the same.

    `strict` is none of them: unless it is off, a budget that cannot be had is an error and not an unmanaged training.
    Raises `ValueError`: an unknown key, a pair without a colon, or a malformed value; the text names the accepted ones.
    """
    found: dict[str, Any] = {}
    folder, size = None, None
    for key, value in pairs_of(text):
        if key == "allocator" and value not in ALLOCATORS:
            raise ValueError(
                f"MEMMGR_CONF: allocator:{value} is none of {', '.join(ALLOCATORS)}{meant(value, ALLOCATORS)}"
            )
        if key in ("policy", "device", "allocator", "host", "log", "trace"):
            found[key] = value
        elif key == "trace_pass":
            found[key] = _number(key, value)
        elif key == "silent_seconds":
            found[key] = _seconds(key, value)
        elif key == "placement":
            found["_placement"] = value
        elif key == "disk":
            folder = value
        elif key == "disk_size":
            size = value
        elif key in ("verify", "prefetch", "lines", "quiet", "strict"):
            found[key] = _flag(key, value)
        else:
            raise _unknown(key)
    if size and is_off(folder):
        raise ValueError(f"MEMMGR_CONF: disk_size:{size} is of no disk: disk is {folder}")
    if folder is not None or size is not None:
        found["disk"] = False if is_off(folder) else (folder, size) if size else folder
    return found


def is_off(disk: object) -> bool:
    """Is this no disk tier, rather than a folder?"""
    return disk is False or (isinstance(disk, str) and disk.strip().lower() in ("none", *_NO))


DEVICES = (
    "cpu",
    "cuda",
    "fpga",
    "hip",
    "hpu",
    "ipu",
    "maia",
    "meta",
    "mps",
    "mtia",
    "privateuseone",
    "vulkan",
    "xla",
    "xpu",
)
"""Torch's names, without torch. Most cannot have a budget, which is another error."""


def no_device(name: str, what: str) -> ValueError:
    """The error of a device that torch does not know."""
    return ValueError(f"{what}: {name!r} is no device; expected cpu, cuda or cuda:1{meant(name, ('cpu', 'cuda'))}")


def check_file(name: str, option: str) -> None:
    """Checks that a file of this name can be made.

    Raises `ValueError`: it is a folder, or in a folder that does not exist. `option`: name of the argument or option,
    for the message.
    """
    path = os.path.expanduser(name)
    if not name:
        raise ValueError(f"{option}: the file's name is empty")
    if os.path.isdir(path):
        raise ValueError(f"{option}: {name!r} is a folder; name a file in it")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ValueError(f"{option}: the folder of {name!r} does not exist")


def check_folder(folder: str, what: str) -> None:
    """Refuses a folder in which no file can be made: for a tier, before anything is trained.

    Raises `ValueError`: the text begins with `what`.
    """
    if not os.path.isdir(folder):
        raise ValueError(f"{what}: {folder!r} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{what}: no file can be made in {folder!r}: {error.strerror}") from None


def local_ranks() -> int:
    """How many ranks of this job a launcher has started on this host, this one included."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def is_strict(text: str) -> bool:
    """Tells if `MEMMGR_CONF` asks for errors, as it does by default. `strict:off` counts even if the rest of it is
    wrong.
    """
    if text.lstrip().startswith("{"):
        try:
            pairs = list(pairs_of(text))
        except ValueError:
            return True
    else:
        pairs = [(key.strip(), value.strip()) for key, _, value in (part.partition(":") for part in text.split(","))]
    return not any(key == "strict" and value.lower() in _NO for key, value in pairs)


def check_limit(text: str) -> None:
    """Checks `MEMMGR_BUDGET`. Raises `ValueError`: the text begins with the variable's name."""
    parse_budget(text, whole=1 << 60, what="MEMMGR_BUDGET")


def check_conf() -> None:
    """Checks `MEMMGR_CONF` when no budget is set: some of its keys count without one. A folder is not
    checked, since the variable may be set on machines that lack it.

    Raises `Refused`: `strict` is on.
    """
    try:
        found = parse_conf(os.environ.get("MEMMGR_CONF", ""))
        if "policy" in found:
            from memmgr.policies import parse_policy

            parse_policy(found["policy"])
    except ValueError as error:
        refuse_or_warn("MEMMGR_CONF: " + str(error).removeprefix("MEMMGR_CONF: "))


def warn_if_wrong() -> None:
    """A line where MEMMGR_CONF or MEMMGR_DISK makes no sense, at a program's `import memmgr` without a budget, which would refuse
    them.

    None from the command, which looks at the variables itself, nor from processes that a program starts from Python
    (`multiprocessing`), which have its variables. Where torch is there it has checked MEMMGR_CONF (`check_conf`).
    """
    if os.path.basename(getattr(sys, "argv", [""])[0]) in ("memmgr", "-m"):
        return
    wrong = []
    try:
        parse_conf("" if "torch" in sys.modules else os.environ.get("MEMMGR_CONF", ""))
    except ValueError as error:
        wrong.append("MEMMGR_CONF: " + str(error).removeprefix("MEMMGR_CONF: "))
    folder = os.environ.get("MEMMGR_DISK")
    if folder and not os.path.isdir(folder):
        wrong.append(f"MEMMGR_DISK: {folder!r} is not a folder")
    parent = getattr(sys.modules.get("multiprocessing.process"), "parent_process", lambda: None)()
    if wrong and parent is None:
        from memmgr.common.say import say

        say("; ".join(wrong))


def refuse_or_warn(why: str) -> None:
    """Ends the process where a variable makes no sense; with `strict:off` it is a warning.

    Raises `Refused`: `strict` is on.
    """
    if is_strict(os.environ.get("MEMMGR_CONF", "")):
        refuse(f"{why} (MEMMGR_CONF=strict:off makes this a warning)")
    from memmgr.common.say import warn

    warn(why)


def give_up(error: Exception) -> None:
    """The budget of the environment cannot be had: ends the process, or warns where `strict` is off.

    Raises `Refused`: `strict` is on.
    """
    why = " ".join(str(error).split())
    if is_strict(os.environ.get("MEMMGR_CONF", "")):
        refuse(f"{why} ({_LENIENT})")
    from memmgr.common.say import warn

    warn(f"MEMMGR_BUDGET is ignored: {why}")


def refuse(why: str) -> NoReturn:
    """Ends the process with one line and code 2. Raises `Refused`: always."""
    print(f"memmgr: {why}", file=sys.stderr, flush=True)
    raise Refused(2)
