"""What a monitor is given by the process that it works for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ncclguard.agreement.decision import Report
from ncclguard.agreement.inquiry import Patience
from ncclguard.agreement.revocation import Revocation
from ncclguard.agreement.seat import Seat, Summarise
from ncclguard.agreement.timing import Timing
from ncclguard.incident.dumps import Offer
from ncclguard.incident.model import Incident


@dataclass(frozen=True)
class MonitorSettings:
    """`describe` adds to a report what only this process knows, `summarise` writes the incident.

    `patience` is asked anew for each look at a call, because it may change in a running job.
    """

    timing: Timing
    patience: Callable[[Seat], Patience]
    describe: Callable[[Seat, Report], Report]
    summarise: Summarise
    publish: Callable[[Revocation], None] = lambda revocation: None
    publish_alone: Callable[[Incident], None] = lambda incident: None
    offer_stacks: Callable[[int], Offer | None] = lambda thread: None  # given the monitor's own thread
