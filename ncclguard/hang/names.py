"""The ranks of a job in words: by their numbers, or by their processes where these tell no rank."""

from __future__ import annotations

from collections.abc import Iterable

from ncclguard_explain.language import Message, tr
from ncclguard_explain.ranks import SHOWN_GROUPS, ranks_text


class Pid(int):
    """The number of a process that stands for its rank, which is not known."""


def names_of(ranks: Iterable[int]) -> Message:
    """Return ranks for people.

    >>> names_of([0, 1, 2]), names_of([Pid(4711)]), names_of([Pid(4711), Pid(4712)])
    ('ranks 0-2', 'process 4711', 'processes 4711, 4712')
    """
    numbers = sorted(set(ranks))
    if not any(isinstance(number, Pid) for number in numbers):
        return ranks_text(numbers)
    if len(numbers) == 1:
        return tr("process {pid}", pid=int(numbers[0]))
    some = ", ".join(str(int(number)) for number in numbers[: 2 * SHOWN_GROUPS])
    if len(numbers) > 2 * SHOWN_GROUPS:
        return tr("processes {some}, ... ({count} in all)", some=some, count=len(numbers))
    return tr("processes {some}", some=some)
