"""Quantities in the notation people use: 1.5B, 300M, 4e20, 20T."""

import math
import re

from completep.errors import UserError

SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18, "z": 1e21}
PATTERN = re.compile(r"([+-]?\d[\d_,]*\.?\d*(?:e[+-]?\d+)?)\s*([a-z]?)", re.I)
FIX = "write it like 300M, 1.5B, 20T or 4e20"


def parse_quantity(text: str, what: str = "quantity") -> float:
    """`1.5B` → 1.5e9. A quantity is positive and finite."""
    match = PATTERN.fullmatch(text.strip())
    number, suffix = match.groups() if match else ("nan", "?")
    if suffix.lower() not in SUFFIXES:
        raise UserError(f"{what}={text!r} is not a quantity", fix=FIX)
    value = float(number.replace(",", "").replace("_", "")) * SUFFIXES[suffix.lower()]
    if not (value > 0 and math.isfinite(value)):
        raise UserError(f"{what}={text!r}: must be above 0 and finite", fix=FIX)
    return value


def parse_number(text: str, what: str = "number") -> float:
    """`2^-8`, `0.004` or `1e-3` → a finite number."""
    base, power, exponent = text.strip().partition("^")
    try:
        value = float(base) ** float(exponent) if power else float(text)
        if isinstance(value, complex) or not math.isfinite(value):
            raise ValueError
    except (ValueError, OverflowError, ZeroDivisionError):
        raise UserError(f"{what}={text!r} is not a number", fix="write it like 2^-8 or 0.004") from None
    return value


def human(value: float, digits: int = 3) -> str:
    """1.5e9 → `1.5B`, for counts that people read."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """7500 → `2 hours`, in the largest unit that fits at least twice."""
    for unit, name in ((86400 * 365, "years"), (86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.0f} {name}"
    return f"{seconds:.0f} s"


def power(value: float) -> str:
    """0.00390625 → `2^-8`; other numbers with three significant digits."""
    if value > 0 and abs(math.log2(value) - round(math.log2(value))) < 1e-9:
        return f"2^{math.log2(value):.0f}"
    return f"{value:.3g}"
