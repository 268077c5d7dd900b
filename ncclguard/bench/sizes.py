"""Sizes as people write them: `5e8`, `500_000_000`, `1.5GiB`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

_LARGEST = 2**62  # bytes; above it torch's own 64-bit sizes end
_MOST = 1000  # sizes of a sweep: each takes seconds
_NUMBER = re.compile(r"^\s*(?P<number>[0-9][0-9_]*(?:\.[0-9_]+)?(?:[eE][+]?[0-9]{1,3})?)\s*(?P<unit>[A-Za-z]*)\s*$")
_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


@dataclass(frozen=True, slots=True)
class Size:
    """A number of elements, or a number of bytes when the text had a unit.

    Example:
        >>> parse_size("1.5GiB").numel(element_size=4)
        402653184
        >>> parse_size("5e8").numel(element_size=4)
        500000000
    """

    value: Decimal
    is_bytes: bool
    text: str

    def numel(self, element_size: int) -> int:
        """Number of elements of `element_size` bytes; bytes are rounded down to whole elements.

        Raises:
            ValueError: fewer than one element, or more than 2**62 bytes.
        """
        count = int(self.value) // element_size if self.is_bytes else int(self.value)
        if count < 1:
            raise ValueError(f"{self.text!r} is less than one element of {element_size} bytes; ask for at least one.")
        if count * element_size > _LARGEST:
            raise ValueError(f"{self.text!r} is more than 2**62 bytes; ask for less.")
        return count


def parse_size(text: str) -> Size:
    """Read one size: a plain number counts elements, a number with `B`, `MB`, `GiB` and so on counts bytes.

    Raises:
        ValueError: not a size, or not a whole number of elements.
    """
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write elements as 5e8 or 500_000_000, bytes as 1.5GiB or 64MB.")
    value = Decimal(match["number"].replace("_", ""))
    unit = match["unit"].lower()
    if unit:
        if unit not in _UNITS:
            hint = f"; write {match['number']}{unit.upper()}iB for bytes" if unit in ("k", "m", "g", "t") else ""
            raise ValueError(f"{text!r}: unknown unit {match['unit']!r}{hint}; units are B, KB to TB and KiB to TiB.")
        return Size(value * _UNITS[unit], True, text.strip())
    if value != value.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number of elements; write for instance {int(value)}, or add a unit.")
    return Size(value, False, text.strip())


def sweep(first: int, last: int, factor: float) -> tuple[int, ...]:
    """Numbers of elements from `first` up to `last`, each `factor` times the one before.

    Raises:
        ValueError: `last` below `first`, a factor that does not grow, or one that gives more than 1,000 sizes.

    Example:
        >>> sweep(1, 1000, 10)
        (1, 10, 100, 1000)
    """
    if last < first:
        raise ValueError(f"--max ({last}) is below --min ({first}); swap them.")
    if not 1 < factor < float("inf"):
        raise ValueError(f"--factor must be above 1, it is {factor:g}; take for instance 2 or 10.")
    sizes = [first]
    while (following := max(sizes[-1] + 1, int(min(sizes[-1] * factor, last + 1)))) <= last:
        if len(sizes) == _MOST:
            raise ValueError(
                f"--factor {factor:.10g} makes more than {_MOST:,} sizes of {first} to {last}; take a larger one."
            )
        sizes.append(following)
    return tuple(sizes)
