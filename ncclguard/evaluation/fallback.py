"""The result of an evaluation that was given up, where the program has not chosen one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NoReturn

from ncclguard.spelling import no_attribute
from ncclguard_explain.language import told


class NotEvaluated(float):
    """The result of an evaluation that was given up, where the program has no `fallback=`: NaN, however it is read.

    It is a float, it unpacks into the two figures of the original recipe, loss and accuracy, and each item of it is
    NaN. No comparison with it is true, so that it is no best result; it is false, as no other NaN is.

    >>> from ncclguard.evaluation import NOT_EVALUATED
    >>> loss, accuracy = NOT_EVALUATED
    >>> loss, accuracy < 0.9, NOT_EVALUATED["eval_loss"], bool(NOT_EVALUATED), f"{NOT_EVALUATED:.3f}"
    (nan, False, nan, False, 'nan')
    """

    __slots__ = ()

    def __iter__(self) -> Iterator[float]:
        return iter((math.nan, math.nan))

    def __getitem__(self, item: object) -> float:
        return math.nan

    def __bool__(self) -> bool:
        return False

    if not TYPE_CHECKING:  # a type checker is to see that there is no such attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Tell of `fallback` where the program takes this for the dictionary or object that it evaluates to."""
            hint = told("the evaluation was given up: give resilient_evaluate a `fallback=` that looks like its result")
            raise no_attribute(self, name, "" if name.startswith("__") else hint)

    def __reduce__(self) -> str:
        return "NOT_EVALUATED"  # the same object in each process


NOT_EVALUATED: Final = NotEvaluated("nan")
