"""Receives from any source: whose message is next, or that none can come or has come in time."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final

from ncclguard.coordination import incidents
from ncclguard.coordination.envelopes import Box, Envelope
from ncclguard.coordination.monitor import Monitor
from ncclguard.errors import GuardError, error_for
from ncclguard.outcome import of_incident
from ncclguard.protocol.decision import PRECEDENCE
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import Message, tr

#: Seconds between two looks at what has come, the first and the longest.
LOOK_FIRST, LOOK_LONGEST = 0.001, 0.02
#: Seconds that one look of the monitor may take before this thread looks at the time again.
SLICE: Final = 0.1


class Waiting:
    """The messages of one group that wait for this rank; used by one thread at a time.

    `received(source)`: how many messages from there this rank has received, or begun to; None while a receive from that
    rank is pending, which comes first.
    """

    def __init__(self, box: Box, received: Callable[[int], int | None]) -> None:
        self._box = box
        self._received = received
        self._waiting: defaultdict[int, deque[Envelope]] = defaultdict(deque)
        self._called_off = ""

    def call_off(self, why: str) -> None:
        """End the wait in progress; any thread."""
        self._called_off = why

    def next(self, monitor: Monitor, text: str, tag: int, deadline: float) -> int:
        """Wait until a message with this tag is there and return its source.

        Raises the typed error of a receive that no message has come for by its deadline, or that none can come for.
        """
        started, pause, self._called_off = time.monotonic(), LOOK_FIRST, ""
        envelopes = monitor.envelopes
        with envelopes.reading(self._box):
            while True:
                departed = envelopes.departed
                for envelope in envelopes.new(self._box, SLICE):
                    self._waiting[envelope.source].append(envelope)
                source = self._source(tag)
                if source is not None:
                    return source
                if self._called_off:
                    raise GuardError(f"{text} was called off: {self._called_off}")
                if all(rank in departed for rank in self._box.senders):
                    causes = {rank: departed[rank].cause for rank in self._box.senders}
                    why = tr("all ranks that could have sent a message have left")
                    raise self._error(monitor, text, causes, why, started)
                if time.monotonic() >= deadline or monitor.unavailable:
                    why = tr("no rank has sent a message with tag {tag}", tag=tag)
                    raise self._error(monitor, text, {}, monitor.unavailable or why, started)
                time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
                pause = min(2 * pause, LOOK_LONGEST)

    def _source(self, tag: int) -> int | None:
        """Return a rank whose next message is announced and has this tag."""
        for source, waiting in self._waiting.items():
            received = self._received(source)
            if received is None:
                continue
            while waiting and waiting[0].number < received:
                waiting.popleft()  # by a receive that named its source
            if waiting and waiting[0].number == received and waiting[0].tag == tag:
                return source
        return None

    def _error(
        self, monitor: Monitor, text: str, causes: dict[int, Cause], why: str | Message, started: float
    ) -> Exception:
        state = monitor.state(self._box.name, tuple(sorted((*self._box.senders, monitor.rank))))
        cause = min(causes.values(), key=PRECEDENCE.index, default=Cause.UNKNOWN)
        incident = incidents.alone(state, "recv", text, 0, cause, causes, why, expired=not causes)
        return error_for(of_incident(incident, time.monotonic() - started, torn=False))
