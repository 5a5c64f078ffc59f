"""Byte sizes as people write them, and seconds as they read them."""

from __future__ import annotations

import difflib
import math
import re
import string
from dataclasses import dataclass

UNLIMITED = 2**64 - 1
"""A budget that is none, in bytes: as the core has it (`MM_UNLIMITED`)."""

LARGEST = 2**63 - 1
"""The largest size, in bytes: no machine has addresses for more."""

SMALL_BYTES = 64 << 10
"""Smaller storages are counted and never paged: evicting and restoring one costs more than the room that it makes."""

_UNITS: dict[str, int] = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTPE", start=1):
    _UNITS[_letter] = _UNITS[_letter + "B"] = 1000**_power
    _UNITS[_letter + "I"] = _UNITS[_letter + "IB"] = 1024**_power

NO_LIMIT = '"none" (no limit)'

SMALLEST_BARE = 2**16
"""A number without a unit below this is taken for one that lost its unit: nothing that torch does fits into less."""

_DECIMAL = (("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_BINARY = (("EiB", 2.0**60), ("PiB", 2.0**50), ("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def _accepted(whole: int | None, *more: str) -> str:
    """The accepted forms; a percentage only where it has a meaning."""
    found = ['"12GB" (10^9)', '"12GiB" (2^30)', "a number of bytes"]
    found += [] if whole is None else ['"80%"']
    *others, last = [*found, *more]
    return f"{', '.join(others)} or {last}"


class SizeError(ValueError):
    """Not a size. The text ends with the accepted forms; `why` is the text without them."""

    def __init__(self, why: str, accepted: str) -> None:
        super().__init__(f"{why}; expected {accepted}")
        self.why = why


def parse_size(
    value: int | float | str, *, whole: int | None = None, what: str = "budget", more: tuple[str, ...] = ()
) -> int:
    """Bytes from an int or a string.

    A string is NUMBER [blank] UNIT, or a percentage. NUMBER has digits, with at most one point, and may have an exponent
    (`1e3`); `_` is ignored. UNIT is missing
    or "B", or one of K, M, G, T, P, E: alone or with "B" for powers of 1000, with "I" or "IB" for powers of 1024. Case does not
    matter. `is_binary` tells if a text has a unit of 1024.

    Args:
        value: one of the forms of `_accepted`.
        whole: the bytes that a percentage refers to; None where percentages make no sense.
        `what`: the name of the setting, for the error.
        more: other forms that the caller accepts, for the error.

    Returns:
        Bytes, from 1 to `LARGEST`.

    Raises:
        SizeError: not a size, not positive, or too large; the text shows the accepted forms.
        ValueError: not a size, and the text has a guess: at one that is misspelt, or at a forgotten unit.
        TypeError: not an int or a string.
    """
    accepted = _accepted(whole, *more)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{what}: expected {accepted}; got {value!r}")
    if isinstance(value, int | float):
        if value != value or value <= 0 or value == float("inf"):
            raise SizeError(f"{what}: {value!r} is not a positive size", accepted)
        if isinstance(value, float) and not value.is_integer():
            raise SizeError(f"{what}: {value!r} is not a whole number of bytes", accepted)
        _refuse_bare(value, what)
        return _checked(int(value), value, what, accepted)
    text = value.strip().replace("_", "")
    if not text:
        raise SizeError(f"{what}: {value!r} is empty", accepted)
    match = re.fullmatch(r"(-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z%]*)", text)
    if not match:
        raise _unreadable(f"{what}: cannot read {value!r} as a size", text, accepted)
    number, unit = float(match[1]), match[2]
    if unit == "%":
        if whole is None:
            raise SizeError(f"{what}: a percentage makes no sense here", accepted)
        if not 0 < number <= 100:
            raise SizeError(f"{what}: {value!r} is not between 0 % and 100 %", accepted)
        return max(1, int(whole * number / 100))
    factor = _UNITS.get(unit.upper())
    if factor is None:
        raise _unreadable(f"{what}: unknown unit {unit!r} in {value!r}", text, accepted)
    # A float may be infinite.
    size = int(match[1]) if not unit and match[1].isdigit() else int(min(number * factor, 2.0 * LARGEST))
    if size <= 0:
        raise SizeError(f"{what}: {value!r} is not a positive size", accepted)
    if not unit:
        _refuse_bare(number, what)
    return _checked(size, value, what, accepted)


def _checked(size: int, given: object, what: str, accepted: str) -> int:
    if size > LARGEST:
        raise SizeError(f"{what}: {given!r} is more than any machine has ({show_size(LARGEST)} at most)", accepted)
    return size


def _unreadable(why: str, text: str, accepted: str) -> ValueError:
    """The error of a text that is no size: with a guess (`12 gigs`, `1,5GB`), or with the accepted forms."""
    # A comma before three digits may stand between thousands.
    near = re.match(r"([0-9]+(?:\.[0-9]+|,[0-9]{1,2})?)\s*([kmgtp])", text.lower())
    if near is None:
        return SizeError(why, accepted)
    return ValueError(f"{why}; was {near[1].replace(',', '.')}{near[2].upper()}B meant?")


def _refuse_bare(number: float, what: str) -> None:
    if number < SMALLEST_BARE:
        meant = f"{number:g}GB" if number < 1000 else f"{number:g}MB"
        raise ValueError(
            f"{what}: {number:g} without a unit is {number:g} bytes; was {meant} meant? (If not: {number:g}B.)"
        )


def is_none(value: object) -> bool:
    """`None`, `"none"`."""
    return value is None or (isinstance(value, str) and value.strip().lower() == "none")


def parse_limit(
    value: int | float | str | None,
    *,
    whole: int | None = None,
    what: str = "budget",
    more: tuple[str, ...] = (NO_LIMIT,),
) -> int:
    """As `parse_size`, of a limit: `None`, `"none"` and `UNLIMITED` are no limit.

    Returns bytes; `UNLIMITED` for no limit. Raises `ValueError`, `TypeError`: as `parse_size`.
    """
    if value is None or is_none(value) or value == UNLIMITED:
        return UNLIMITED
    return parse_size(value, whole=whole, what=what, more=more)


def parse_host(value: int | str, what: str = "host") -> int:
    """As `parse_size`, for host memory of offloaded tensors: `"none"` is 0."""
    return 0 if is_none(value) else parse_size(value, what=what, more=('"none" (no host memory)',))


@dataclass(frozen=True)
class Need:
    """A budget that is known once the run has been measured."""

    share: float | None  # of the run's need; None: the knee of the budget's cost (`"auto"`)

    def __str__(self) -> str:
        return "auto" if self.share is None else f"{100 * self.share:.4g} % of the need"


@dataclass(frozen=True)
class Room:
    """A budget that is known when it opens: all memory that is free on the device then (`"device"`)."""

    def __str__(self) -> str:
        return "the free memory of the device"


MOST_SHARE = 2.0
"""The largest share of the need: a larger one is a percentage without its sign."""

_OF_A_RUN = (
    '"need*60%" (of what the run needs)',
    '"auto"',
    '"device" (all that is free)',
    NO_LIMIT,
)
_WORDS = ("auto", "need", "none", "device")


def parse_budget(
    value: int | float | str | None, *, whole: int | None = None, what: str = "budget"
) -> int | Need | Room:
    """As `parse_limit`, of a budget, which may depend on the run (`"need*60%"`, `"need*0.6"`, `"auto"`) or on the free
    memory of the device (`"device"`).

    Raises `ValueError`, `TypeError`: as `parse_limit`, and a malformed share of the need. If a right form is near, the
    text suggests it instead of showing all forms.
    """
    text = value.strip().lower() if isinstance(value, str) else ""
    if text == "auto":
        return Need(None)
    if text == "device":
        return Room()
    share = need_share(text)
    if share is None:
        try:
            return parse_limit(value, whole=whole, what=what, more=_OF_A_RUN)
        except SizeError as error:
            guess = _meant(text)
            raise (ValueError(error.why + guess) if guess else error) from None
    return _need(share, value, what)


def parse_share(text: str, what: str = "--ratio") -> Need:
    """A share of the need by itself: `60%`, `0.6`, at most all of it. Raises `ValueError`: it is none."""
    share = need_share(f"need*{text}")
    if share is None:
        raise ValueError(f"{what}: {text!r} is no share of what the run needs; expected 60% or 0.6")
    need = _need(share, text, what)
    if share > 1:
        raise ValueError(f"{what}: {text!r} is more than the run needs; expected at most 100%")
    return need


def _need(share: float, given: object, what: str) -> Need:
    if not share > 0:
        raise ValueError(f"{what}: {given!r} is nothing; expected a share of what the run needs, 60% for example")
    if share > MOST_SHARE:
        raise ValueError(f"{what}: {given!r} is {share:g} times what the run needs; was {share:g}% of it meant?")
    return Need(share)


def _meant(text: str) -> str:
    """A suggestion for a misspelt limit, or ""."""
    word = text[: len(text) - len(text.lstrip(string.ascii_lowercase))]
    near = ["need"] if "need" in text else difflib.get_close_matches(word, _WORDS, n=1, cutoff=0.7)
    if not near:
        return ""
    number = re.search(r"([0-9]*\.?[0-9]+)\s*(%?)", text)
    sign = "%" if number and (number[2] or float(number[1]) > MOST_SHARE) else ""
    meant = near[0] if near[0] != "need" else f"need*{number[1] + sign if number else '60%'}"
    return f"; did you mean {meant!r}?"


def need_share(text: str) -> float | None:
    """The share that `need*0.6` or `need*60%` names; None: it is not of that form."""
    match = re.fullmatch(r"need(?:\s*\*\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(%?))?", text.strip().lower())
    if not match:
        return None
    return 1.0 if match[1] is None else float(match[1]) / (100.0 if match[2] else 1.0)


def is_binary(value: object) -> bool:
    """Did the user write powers of two ("12GiB")? Then errors speak in them, too."""
    return isinstance(value, str) and re.fullmatch(r"[^A-Za-z]*[kKmMgGtTpP][iI][bB]?\s*", value) is not None


def show_size(size: float, *, binary: bool = False) -> str:
    """Three significant digits in powers of ten, `1.62 GB`, or of two, `1.51 GiB`."""
    for unit, factor in _BINARY if binary else _DECIMAL:
        if abs(size) >= 0.9995 * factor:  # a size that would be shown as a thousand of the next smaller unit
            shown = size / factor
            # From a thousand on (there are 1024 KiB to a MiB) all digits, not "1.02e+03".
            return f"{shown:.3g} {unit}" if abs(shown) < 999.5 else f"{shown:.0f} {unit}"
    return f"{size:.0f} B"


def round_up(size: int, *, binary: bool = False) -> int:
    """The next size that `show_size` shows without rounding down, so that the shown size is enough when it is typed."""
    unit = next((factor for _, factor in (_BINARY if binary else _DECIMAL) if size >= 0.9995 * factor), 1)
    digit = 1.0
    while size / unit >= 1000 * digit:
        digit *= 10
    while digit > 0.01 and size / unit < 100 * digit:
        digit /= 10
    step = unit * digit
    return math.ceil(math.ceil(size / step) * step)


def show_floor(size: int, *, binary: bool = False) -> str:
    """A floor, or another least size, as it is shown everywhere: never less than it is."""
    return show_size(round_up(size, binary=binary), binary=binary)


def show_seconds(seconds: float) -> str:
    """`850 us`, `12.3 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`; `1 us` for all that is shorter."""
    if seconds <= 0:
        return "0"
    if seconds < 0.9995e-3:
        return f"{max(seconds * 1e6, 1):.0f} us"
    if seconds < 0.9995:  # not 1e+03 ms
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
