"""Sinks by name, by object or by function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from ncclguard.metrics.records import Record
from ncclguard.metrics.sinks.base import CallableSink, Sink

log = logging.getLogger("ncclguard")

SinkLike = str | Sink | Callable[[Record], object]
#: Name -> what has to be installed, "" for nothing.
PACKAGES = {
    "log": "",
    "jsonl": "",
    "prometheus": "prometheus-client",
    "wandb": "wandb",
    "tensorboard": "tensorboard",
}


def make_sinks(wanted: Iterable[SinkLike], rank: int) -> list[Sink]:
    """The sinks that can be had; one that cannot is logged. Raises TypeError or
    ValueError for what is no sink at all.
    """
    made: list[Sink] = []
    for one in wanted:
        if not isinstance(one, str):
            made.append(_given(one))
            continue
        name, _, detail = one.partition(":")
        _check(one, name, detail)
        try:
            made.append(_named(name, detail, rank))
        except Exception as error:  # noqa: BLE001 - a missing package, a port that is taken, a folder that cannot be written, ...
            package = PACKAGES[name] if isinstance(error, ImportError) else ""
            advice = f"install it with: pip install {package}" if package else "the job goes on without this sink"
            log.warning("ncclguard: monitoring goes without %r (%s: %s); %s", one, type(error).__name__, error, advice)
    return made


def _given(one: Any) -> Sink:
    if callable(getattr(one, "write", None)) and callable(getattr(one, "close", None)):
        sink: Sink = one
        return sink
    if callable(one):
        return CallableSink(one)
    raise TypeError(
        f"a sink must be a name, a function of a record or an object with write(record) and close(), not {type(one).__name__}"
    )


def _check(text: str, name: str, detail: str) -> None:
    if name not in PACKAGES:
        raise ValueError(f"there is no sink {text!r}: use one of {', '.join(PACKAGES)}, an object or a function")
    if name == "jsonl" and not detail:
        raise ValueError("the sink 'jsonl' needs a path: write 'jsonl:guard-{rank}.jsonl'")
    if name == "prometheus" and detail and not (detail.isdecimal() and int(detail) < 65536):
        raise ValueError(f"the sink {text!r} needs a port, 0 to 65535: write for example 'prometheus:9400'")


def _named(name: str, detail: str, rank: int) -> Sink:
    if name == "jsonl":
        from ncclguard.metrics.sinks.jsonl import JsonlSink

        return JsonlSink(detail, rank=rank)
    if name == "prometheus":
        from ncclguard.metrics.sinks.prometheus import PrometheusSink

        return PrometheusSink(int(detail) if detail else None)
    if name == "wandb":
        from ncclguard.metrics.sinks.wandb import WandbSink

        return WandbSink(**({"project": detail} if detail else {}))
    if name == "tensorboard":
        from ncclguard.metrics.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(detail or None, rank=rank)
    from ncclguard.metrics.sinks.text import LogSink

    return LogSink()
