"""The numbers that commands take, as types of argparse: a wrong one is refused in one sentence, with exit code 2."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Final

from ncclguard_explain.language import told

#: torch counts time limits in whole milliseconds, and takes 0 for none at all.
SHORTEST: Final = 0.001
#: Seconds, about 31 years; C++ clocks count nanoseconds in 64 bits and overflow not far above.
LONGEST: Final = 1e9


def positive_seconds(text: str) -> float:
    """Return the seconds of a limit or a period.

    >>> positive_seconds("2.5")
    2.5
    """
    return _time(text, SHORTEST)


def seconds_or_zero(text: str) -> float:
    """Return the seconds of a wait that may also be none at all."""
    return _time(text, 0.0)


def _time(text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= LONGEST:  # nan is neither
        wrong = told("{value} is no number of seconds from {least:g} to 1e9", value=repr(text), least=least)
        raise ArgumentTypeError(wrong)
    return value


def whole_from(least: int) -> Callable[[str], int]:
    """Return the type of a whole number from `least`.

    >>> whole_from(0)("-1")
    Traceback (most recent call last):
    ...
    argparse.ArgumentTypeError: '-1' is no whole number from 0
    """

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise ArgumentTypeError(told("{value} is no whole number from {least}", value=repr(text), least=least))
        return value

    return read


def assignment(text: str) -> str:
    """Return `NAME=VALUE` as it is.

    >>> assignment("RUN")
    Traceback (most recent call last):
    ...
    argparse.ArgumentTypeError: 'RUN' is no NAME=VALUE, such as RUN=7
    """
    if not text.partition("=")[0] or "=" not in text:
        raise ArgumentTypeError(told("{value} is no NAME=VALUE, such as RUN=7", value=repr(text)))
    return text
