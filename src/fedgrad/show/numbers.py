"""Formats numbers, counts and bytes for people: all formatting rules are here."""

import math


def number(value: float | None) -> str:
    """Format with three or four significant digits: 0.8312, 12.4, 3,120, 1.2e-7."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size and (size < 1e-4 or size >= 1e7):
        leading, _, power = f"{value:.2e}".partition("e")
        return f"{leading}e{int(power)}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    digits = 4 if size < 1 else 3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0
    return f"{value:,.{digits}f}"


def short(value: float) -> str:
    """Format as `number` does, without trailing zeros: 0.9."""
    words = number(value)
    return words.rstrip("0").rstrip(".") if "." in words and "e" not in words else words


def tick(value: float) -> str:
    """Format a round number for an axis, in few characters: 0.25, 20,000, 1e6, 2.5e-5."""
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:,.6g}"
    leading, _, power = f"{value:.5e}".partition("e")
    return f"{leading.rstrip('0').rstrip('.')}e{int(power)}"


def percent(part: float | None) -> str:
    """Format a fraction as a percentage: `69.1 %`."""
    return number(part) if part is None or not math.isfinite(part) else f"{100 * part:.1f} %"


def price(value: float) -> str:
    """Format in full, so that prices can be compared: 13,306,968, or 2.50."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.2f}"


def memory(bytes: float) -> str:
    """Format a number of bytes: `2.4 kB`."""
    value, unit = _scaled(round(bytes), ("B", "kB", "MB", "GB", "TB"))
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def count(number: float) -> str:
    """Format a large count roughly: 950, 12.0k, 340M."""
    value, unit = _scaled(number, ("", "k", "M", "G", "T"))
    return f"{value:.0f}{unit}" if value >= 100 or not unit else f"{value:.1f}{unit}"


def duration(seconds: float) -> str:
    """Format a duration: `0.04 s`, `0.4 s`, `12 s`, `3 min 20 s`, `1 h 5 min`."""
    if seconds < 0.1:
        return f"{max(seconds, 0.01):.2f} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def plural(number: int, word: str) -> str:
    """Format a count with its noun: `1 round`, `2 rounds`."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def _scaled(value: float, units: tuple[str, ...]) -> tuple[float, str]:
    for unit in units[:-1]:
        if value < 1000:
            return value, unit
        value /= 1000
    return value, units[-1]
