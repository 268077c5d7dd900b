"""`watch`: one call that has every collective of the process observed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from ncclguard import torch_compat
from ncclguard.config import seconds
from ncclguard.engine import runtime
from ncclguard.errors import GuardError
from ncclguard.incident.model import Incident
from ncclguard.watch.watcher import Settings, Watcher

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("ncclguard")


class Watch:
    """What `watch` returns: the incidents so far, and `stop`; also a context manager that stops at its end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watcher: Watcher | None = None

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every incident that this process knows of, the oldest first."""
        return tuple(self._settings.incidents)

    @property
    def active(self) -> bool:
        """Whether collectives are observed at present: between ``init_process_group`` and ``destroy_process_group``."""
        return self._watcher is not None and self._watcher.running

    def stop(self) -> None:
        """Observe no more; safe to call twice."""
        global _current
        if _current is self:
            _current = None
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()

    def _start(self) -> None:
        """Begin with the default process group that is initialised now."""
        if dist.get_world_size() < 2:
            return
        current = runtime.current()
        if current.watcher is not None:
            current.watcher.close()
        self._watcher = current.watcher = Watcher(
            current.monitor, dist.get_rank(), dist.get_world_size(), self._settings
        )
        self._watcher.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


_current: Watch | None = None
_lock = threading.Lock()


def watch(
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float | timedelta | None = None,
    on_hang: Literal["report", "abort"] = "report",
    on_incident: Callable[[Incident], None] | None = None,
) -> Watch:
    """Observe every collective of this process, also those of DDP, FSDP, DeepSpeed and
    Accelerate, until one does not progress.

    When a collective has not progressed for `timeout` (seconds or timedelta; None: phase, then ``NCCLGUARD_TIMEOUT``,
    then by its size), or at once when a rank it needs died, raised or left, or called another collective, the ranks
    agree on who is to blame and the incident is reported as for a guarded call, and given to `on_incident` on every
    rank, in a thread of the library. ``on_hang="abort"`` then also ends the job's collectives with an error, for good,
    so that a launcher can restart it. `group`: escalate only what is pending on this group; None: on all of them.

    Call it on every rank, before or after ``init_process_group``; a second call replaces the first. With one rank it
    does nothing. A rank that did not call it, but imported ncclguard, still answers. Raises ValueError for a time or
    `on_hang` that cannot be, TypeError for a time that is none.

    >>> import ncclguard as ng
    >>> ng.watch(timeout=120, on_hang="abort").incidents
    ()
    """
    global _current
    if on_hang not in ("report", "abort"):
        raise ValueError(f'on_hang must be "report" or "abort", not {on_hang!r}: give one of them')
    settings = Settings(seconds(timeout, "timeout"), on_hang == "abort", on_incident, group)
    with _lock:
        if _current is not None:
            _current.stop()
        _current = handle = Watch(settings)
        runtime.install()
        torch_compat.on_init(_begin)
        if dist.is_available() and dist.is_initialized():
            try:
                handle._start()
            except (GuardError, RuntimeError) as error:
                log.warning("ncclguard: watch() could not start, so hangs are not reported here: %s", error)
    return handle


def _begin() -> None:
    """After every init_process_group."""
    handle = _current
    if handle is not None:
        handle._start()
