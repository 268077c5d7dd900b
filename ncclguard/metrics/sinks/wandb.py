"""Metrics for Weights & Biases, through its own client."""

from __future__ import annotations

from typing import Any

from ncclguard.metrics.records import Failure, Record
from ncclguard.metrics.sinks.scalars import scalars
from ncclguard.metrics.sinks.text import line


class WandbSink:
    """Logs to the run given, else to the program's current run, else to one of its own
    made with `init` (keywords of wandb.init).

    In a run of the program's the values join its next `log` call, so its steps stay its own. Raises ImportError without
    wandb.
    """

    name = "wandb"

    def __init__(self, run: Any = None, **init: Any) -> None:
        import wandb

        self._run: Any = run or wandb.run
        self._own = self._run is None
        if self._run is None:
            self._run = wandb.init(**{"project": "ncclguard", **init})

    def write(self, record: Record) -> None:
        if isinstance(record, Failure):
            self._run.summary["ncclguard/last_failure"] = line(record)
        values = scalars(record)
        if values:
            self._run.log(values, commit=self._own)

    def close(self) -> None:
        if self._own:
            self._run.finish()
