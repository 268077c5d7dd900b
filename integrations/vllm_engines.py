"""Several vLLM engines as one client of its weight transfer: what one of them does fails and holds up nobody else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from ncclguard.weights import Published, Sender
from ncclguard.weights.sender import Tensors
from ncclguard_explain.language import told

log = logging.getLogger("ncclguard")

#: Seconds in which an engine that had failed has to answer, before each update.
_ANSWERS_WITHIN = 5.0


class Engines:
    """The clients of vLLM, by engine. One that fails, or does not answer in `timeout`, is in `failed` until it is back.

    `update_weights` returns at once, since the weights are to be sent meanwhile.
    """

    def __init__(self, clients: Mapping[str, Any], timeout: float = 60.0) -> None:
        self.clients, self.timeout = dict(clients), timeout
        self.failed: dict[str, str] = {}
        self._init_info: dict[str, Any] = {}
        self._updating: dict[str, Future[None]] = {}

    @property
    def live(self) -> tuple[str, ...]:
        """The engines that have not failed."""
        return tuple(name for name in self.clients if name not in self.failed)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have all come to the channel."""
        self._init_info, self.failed = init_info, {}
        self._init(self.live, self.timeout)

    def take_back(self) -> None:
        """Have those that failed come to it again, if they answer now."""
        failed, self.failed = self.failed, {}
        self._init(failed, min(_ANSWERS_WITHIN, self.timeout))

    def start_weight_update(self) -> None:
        self.each("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._updating = {name: self._call(name, "update_weights", update_info) for name in self.live}

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.each("finish_weight_update", *([] if weight_version is None else [weight_version]))

    def each(self, method: str, *args: Any) -> None:
        """Have all that have not failed do something."""
        self._settle({name: self._call(name, method, *args) for name in self.live})

    def send(
        self, sender: Sender, tensors: Tensors, version: int, join_within: float, weight_version: str | None = None
    ) -> Published:
        """Update all that have not failed; returns which may serve it, and why others not. RuntimeError for none."""
        self.start_weight_update()
        self.update_weights({"version": version})
        expected = self.live
        came = sender.wait_for(expected, join_within)
        published = sender.publish(tensors, version, expected)
        late = told("it has not come to the update in {seconds:g} s", seconds=join_within)
        left_out = {**{name: late for name in expected if name not in came}, **published.left_out}
        self.fail(left_out)
        self._settle({name: call for name, call in self._updating.items() if name not in left_out})
        if published:
            self.finish_weight_update(weight_version)
        have = tuple(name for name in published.engines if name not in self.failed)
        if not have:
            raise RuntimeError("\n".join([str(published), *(f"{name}: {why}" for name, why in self.failed.items())]))
        return replace(published, engines=have, left_out={**self.failed, **published.left_out})

    def fail(self, reasons: Mapping[str, object]) -> None:
        """Leave engines out."""
        for name, why in reasons.items():
            self.failed[name] = str(getattr(why, "summary", why)) or type(why).__name__
            log.warning("%s", told("ncclguard: {name} is left out: {why}", name=name, why=self.failed[name]))

    def _init(self, names: Iterable[str], limit: float) -> None:
        method = "init_weight_transfer_engine"
        self._settle({name: self._call(name, method, {**self._init_info, "engine": name}) for name in names}, limit)

    def _call(self, name: str, method: str, *args: Any) -> Future[None]:
        """Call an engine in a thread of its own, which ends with the process where the engine does not answer."""
        future: Future[None] = Future()

        def calls() -> None:
            try:
                future.set_result(getattr(self.clients[name], method)(*args))
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)

        threading.Thread(target=calls, name=f"ncclguard-{name}", daemon=True).start()
        return future

    def _settle(self, calls: Mapping[str, Future[None]], limit: float | None = None) -> None:
        limit = self.timeout if limit is None else limit
        wait(calls.values(), limit)
        late = TimeoutError(told("it has not answered in {seconds:g} s", seconds=limit))
        errors = {name: call.exception() if call.done() else late for name, call in calls.items()}
        self.fail({name: error for name, error in errors.items() if error is not None})
