"""Byte sizes as people write them."""

from __future__ import annotations

import re

UNLIMITED = 2**64 - 1
"""A budget that is none, in bytes: as the core has it (`MM_UNLIMITED`)."""

_UNITS: dict[str, int] = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[_letter] = _UNITS[_letter + "B"] = 1000**_power
    _UNITS[_letter + "I"] = _UNITS[_letter + "IB"] = 1024**_power

ACCEPTED = 'a number of bytes (12_000_000_000), "12GB" (10^9 bytes each), "12GiB" (2^30 bytes each), "500MB", or "80%"'


def parse_size(value: int | float | str, *, whole: int | None = None, what: str = "budget") -> int:
    """Bytes from an int or a string.

    Args:
        value: `ACCEPTED` says what is understood. Units are bytes: lower-case `b` alone would mean bits and is refused.
        whole: what a percentage is a percentage of, in bytes; None where percentages make no sense.
        what: the name of the thing, for the error.

    Returns:
        Bytes, at least 1.

    Raises:
        ValueError: not a size, or not positive; the text shows what would be accepted.
        TypeError: not an int or a string.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{what}: expected {ACCEPTED}, got {value!r}")
    if isinstance(value, int | float):
        if value != value or value <= 0 or value == float("inf"):
            raise ValueError(f"{what}: expected a positive size, {ACCEPTED}; got {value!r}")
        if isinstance(value, float) and not value.is_integer():
            raise ValueError(f"{what}: {value!r} is not a whole number of bytes; expected {ACCEPTED}")
        return int(value)
    text = value.strip().replace("_", "")
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z%]*)", text)
    if not match:
        raise ValueError(f"{what}: cannot read {value!r} as a size; expected {ACCEPTED}")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        if whole is None:
            raise ValueError(f"{what}: a percentage makes no sense here; expected {ACCEPTED.rsplit(', or', 1)[0]}")
        if not 0 < number <= 100:
            raise ValueError(f"{what}: {value!r} is not between 0 % and 100 %; expected {ACCEPTED}")
        return max(1, int(whole * number / 100))
    if unit.endswith("b") and (len(unit) == 1 or unit[-2] in "kKmMgGtTpPi"):
        raise ValueError(f"{what}: {value!r} reads as bits; sizes are bytes: write {value[:-1]}B. Expected {ACCEPTED}")
    factor = _UNITS.get(unit.upper())
    if factor is None:
        raise ValueError(f"{what}: unknown unit {unit!r} in {value!r}; expected {ACCEPTED}")
    size = int(number * factor)
    if size <= 0:
        raise ValueError(f"{what}: expected a positive size, {ACCEPTED}; got {value!r}")
    return size


def show_size(size: float) -> str:
    """Three significant digits in powers of ten: `1.62 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= 0.9995 * factor:  # what would be shown as a thousand of the next smaller unit
            return f"{size / factor:.3g} {unit}" if abs(size) < 999.5 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} B"
