"""Where all ranks come together before and after a try: one guarded exchange of objects, with an agreed verdict."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ncclguard.collectives import safe_all_gather_object, safe_broadcast_object_list
from ncclguard.config import current_config
from ncclguard.errors import CollectiveFailed
from ncclguard.evaluation.results import Meeting, Met, NotMet
from ncclguard.outcome import Cause, Outcome

log = logging.getLogger("ncclguard")

#: How often ranks go back to the end of a try because another one was still inside, in a collective that met theirs.
REPEATS = 16
#: Such a verdict says that not everybody was here yet; everybody will come, because the one inside has failed with it.
_STILL_INSIDE = (Cause.DIVERGED, Cause.FAILED)


def gather(value: Any, ranks: int, name: str, timeout: float, group: dist.ProcessGroup | None, repeat: bool) -> Meeting:
    """Exchange one picklable object with all ranks; with `repeat`, wait for those whose try has only just failed.

    `timeout` in seconds for each round. Never raises for a failed communication.
    """

    def once() -> tuple[Outcome, tuple[Any, ...]]:
        slots: list[Any] = [None] * ranks
        outcome = safe_all_gather_object(slots, value, group, timeout=timeout, name=name, on_lost="fail")
        return outcome, tuple(slots)

    return _meet(once, repeat)


def tell(value: Any, source: int, name: str, timeout: float, group: dist.ProcessGroup | None) -> Meeting:
    """Give all ranks the object of global rank `source`; the others wait for it here."""

    def once() -> tuple[Outcome, tuple[Any, ...]]:
        slots = [value]
        outcome = safe_broadcast_object_list(slots, source, group, timeout=timeout, name=name, on_lost="fail")
        return outcome, tuple(slots)

    return _meet(once, repeat=True)


def _meet(once: Callable[[], tuple[Outcome, tuple[Any, ...]]], repeat: bool) -> Meeting:
    for _ in range(REPEATS if repeat else 1):
        outcome, values = _outcome_of(once)
        if outcome.ok:
            return Met(values)
        gone = _gone(outcome)
        if gone or not outcome.agreed or outcome.cause not in _STILL_INSIDE:
            break
    return NotMet(
        outcome.cause or Cause.UNKNOWN,
        outcome.culprits,
        agreed=outcome.agreed,
        gone=gone,
        report=str(outcome.incident or ""),
        error=outcome.error,
    )


def _outcome_of(once: Callable[[], tuple[Outcome, tuple[Any, ...]]]) -> tuple[Outcome, tuple[Any, ...]]:
    """The outcome of this exchange, also where failures are raised, and never an older one that nobody looked at."""
    while True:
        try:
            return once()
        except CollectiveFailed as error:
            if current_config().on_failure == "raise":
                return error.outcome, ()
            # A failure that the evaluation ignored, raised by the next call on the group; each is raised once.
            log.warning("ncclguard: the evaluation did not look at a failed outcome: %s", error)


def _gone(outcome: Outcome) -> bool:
    """Whether a culprit's process has ended, rather than only its try."""
    if outcome.cause in (Cause.LOST, Cause.EXITED):
        return True
    ranks = outcome.incident.ranks if outcome.incident is not None else ()
    return any(report.rank in outcome.culprits and report.state == "departed" for report in ranks)
