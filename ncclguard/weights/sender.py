"""The trainer's end of a channel: which engines are members, and one version after another to all of them."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ncclguard.collectives import safe_all_gather_object, safe_broadcast_object_list
from ncclguard.config import seconds
from ncclguard.coordination.store import AgreementStore
from ncclguard.engine.call import Time
from ncclguard.errors import CollectiveFailed, GuardConfigError, GuardError
from ncclguard.faults import drill_job
from ncclguard.incident.model import Incident
from ncclguard.metrics.records import ChannelStatus
from ncclguard.metrics.registry import MAX_CULPRITS, OTHER
from ncclguard.torch_compat import Store
from ncclguard.weights.board import Ask, Board, News, asks_of, connected, write_news
from ncclguard.weights.buckets import Digest, bucketed, device_of
from ncclguard.weights.end import ChannelEnd
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import told, tr

log = logging.getLogger("ncclguard")

#: Nonces of those left out that the news repeat.
_REMEMBERED = 1000
#: Part of a try's limit from which on a silence of the store is why engines have not come.
_SILENT = 0.25
#: Tensors by name; called anew for each try, where an engine was left out in the middle of one.
Tensors = Mapping[str, torch.Tensor] | Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class Published:
    """The fate of a version: true where enough engines have all of it, and may serve it.

    `engines`: those that have it, with the same digest. `left_out`: by engine, the incident or the reason for which it
    is no member any more. `joined`: those that were not members before. `seconds`: what it took. `reason`: why it is on
    no engine where that is no engine's doing, such as a store that does not answer.
    """

    version: str | int
    engines: tuple[str, ...] = ()
    left_out: Mapping[str, Incident | str] = field(default_factory=dict)
    joined: tuple[str, ...] = ()
    seconds: float = 0.0
    digest: str = ""
    reason: str = ""

    def __bool__(self) -> bool:
        return bool(self.digest)

    def __str__(self) -> str:
        if self:
            text = told(
                "version {version} is on {engines} after {seconds:.3g} s",
                version=self.version,
                engines=", ".join(self.engines),
                seconds=self.seconds,
            )
        else:
            text = told(
                "version {version} is on no engine after {seconds:.3g} s", version=self.version, seconds=self.seconds
            )
        reasons = [f"\n{name}: {getattr(why, 'summary', why)}" for name, why in self.left_out.items()]
        return text + (f"\n{self.reason}" if self.reason else "") + "".join(reasons)


class Sender(ChannelEnd):
    """Sends versions of weights to all engines that have joined; used by one process, in one thread.

    `address`: as for `ncclguard.join`. `timeout`: seconds or timedelta in which a `publish` ends, and 2 s for the last
    verdict. `min_engines`: fewer are no success. `retries`: how often a version is sent again without an engine that
    was left out, each try with an equal share of the time that is left. `bucket_mb`: what goes in one collective.
    `device`: "cpu", over sockets and shared memory, or "cuda", over NCCL; the engines get the tensors there.

    Raises GuardConfigError, TypeError or ValueError for arguments that cannot be, GuardError where no store answers.

    >>> import torch
    >>> sender = Sender(torch.distributed.HashStore(), timeout=10)
    >>> print(sender.publish({"layer.weight": torch.ones(2)}, version=1).engines)
    ()
    >>> sender.close()
    """

    def __init__(
        self,
        address: str | Store,
        *,
        name: str = "weights",
        timeout: Time = 120.0,
        min_engines: int = 1,
        retries: int = 2,
        bucket_mb: float = 64.0,
        device: str = "cpu",
    ) -> None:
        limit = seconds(timeout, "timeout")
        if limit is None or min_engines < 1 or retries < 0 or bucket_mb <= 0 or device not in ("cpu", "cuda"):
            text = told(
                "Sender takes a timeout in seconds, min_engines of at least 1, retries of at least 0, bucket_mb above 0, and "
                'the device "cpu" or "cuda": correct these'
            )
            raise GuardConfigError(text)
        super().__init__(connected(address, name, limit, sends=True), name, "trainer")
        self._timeout, self._min_engines, self._retries = limit, min_engines, retries
        self._bucket, self._device = int(bucket_mb * (1 << 20)), device_of(device)
        self._asked: dict[str, dict[int, Ask]] = {}  # by engine and worker; `changed` guards it
        self._left_out: deque[str] = deque(maxlen=_REMEMBERED)  # by nonce
        self._served: tuple[str, ...] = ()  # the engines that have the last version that was published
        self._times_left_out: Counter[str] = Counter()  # by engine
        self._members: tuple[Ask, ...] = ()  # of the group, in order of their ranks from 1
        self._news = News(secrets.token_hex(6), device=device)
        self._written: News | None = None  # the last ones that the store has acknowledged, or that others came after
        self._asks = asks_of(self._news.sender)
        self._board = Board(self._store, self._look, self._renewed)
        self._tell(self._news)
        self._show()

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that are members, or will be with the next version, by name."""
        with self._board.changed:
            return tuple(sorted(name for name, asked in self._asked.items() if _is_whole(asked)))

    def wait_for(self, engines: int | Collection[str], within: Time = 600.0) -> tuple[str, ...]:
        """Wait until so many engines, or those of these names, have asked to be members, or for so long.

        Returns the names of all that have.
        """

        def have_asked() -> bool:
            return len(self.engines) >= engines if isinstance(engines, int) else set(engines) <= set(self.engines)

        self._board.wait_for(have_asked, time.monotonic() + (seconds(within, "within") or 0.0))
        return self.engines

    def publish(self, tensors: Tensors, version: str | int, engines: Collection[str] | None = None) -> Published:
        """Send a version to all engines; what an engine does fails nothing but its own place.

        `tensors`: a mapping such as a state dict, or a function that returns names and tensors, which is called again
        for each try. `engines`: the names of those that are to have it, where not all are. Raises TypeError or
        ValueError for what cannot be sent, and whatever the function raises.
        """
        if not isinstance(tensors, Mapping) and not callable(tensors):
            text = told(
                "tensors must be a mapping or a function that returns names and tensors, not {kind}: they may have to be sent "
                "again",
                kind=type(tensors).__name__,
            )
            raise TypeError(text)
        if isinstance(tensors, Mapping) and not tensors:
            raise ValueError(told("tensors has none: give what the engines are to have, such as model.state_dict()"))
        published = self._publish(tensors, version, engines)
        drill_job.channel_event(
            "published", version=version, engines=published.engines, seconds=published.seconds, limit=self._timeout,
            left_out={name: _as_words(why) for name, why in published.left_out.items()},
        )  # fmt: skip
        return published

    def _publish(self, tensors: Tensors, version: str | int, engines: Collection[str] | None) -> Published:
        began = time.monotonic()
        until = began + self._timeout
        left_out: dict[str, Incident | str] = {}
        reason = ""
        for left in range(self._retries + 1, 0, -1):
            members = tuple(ask for ask in self._whole() if engines is None or ask.engine in engines)
            if len({ask.engine for ask in members}) < self._min_engines or (now := time.monotonic()) >= until:
                break
            try:
                self._begin(members, version, (until - now) / left, until)
                digest = self._send(tensors, until)
                wrong = self._vote(digest, until)
            except GuardError as error:  # of a member that has not come to the group, or in a collective
                failed = error if isinstance(error, CollectiveFailed) else error.__cause__
                # A try for which a silence before it has left little time says as little of them as one with a silence.
                hurried = self._news.limit < self._timeout / (self._retries + 1) / 2
                silent = self._board.silence(began if hurried else now)
                if isinstance(failed, CollectiveFailed) and silent < _SILENT * self._news.limit:
                    self._leave_out(failed, left_out)
                    reason = ""
                    continue
                # Engines could not hear of the version, nor say that they had given it up: whatever was found of them,
                # their going or not coming included, may be the store's doing. One that is gone is so in the next try.
                reason = _silence(silent) if isinstance(failed, CollectiveFailed) else str(error)
                self._drop_group()
                log.warning(
                    "ncclguard: %s",
                    told("version {number} of the weights could not be sent: {why}", "log", number=version, why=reason),
                )
                continue
            except BaseException:
                self._drop_group()  # the engines hear of it at once
                raise
            if not wrong:
                have = tuple(sorted({ask.engine for ask in members}))
                joined = tuple(name for name in have if name not in self._served)
                self._served = have
                left_out = {name: why for name, why in left_out.items() if name not in have}  # it is back
                self._count(version, took := time.monotonic() - began)
                return Published(version, have, left_out, joined, took, digest)
            left_out |= wrong
            self._forget(wrong)
        self._served = ()
        self._failed += 1
        self._tell(replace(self._news, members=(), left_out=tuple(self._left_out)))  # who was left out asks anew
        return Published(version, (), left_out, (), time.monotonic() - began, reason=reason)

    def _status(self) -> ChannelStatus:
        asked = self.engines
        with self._board.changed:
            served, left_out = self._served, dict(self._times_left_out)
        stale = tuple(name for name in asked if name not in served)
        return replace(super()._status(), engines=served, stale=stale, left_out=left_out)

    def close(self) -> None:
        """End the channel; the engines keep the version that they have."""
        super().close()

    # ------------------------------------------------------------------ the members

    def _look(self, store: AgreementStore) -> None:
        """Enter who has asked; in the board's thread."""
        read = [Ask.from_json(text) for text in self._asks.new(store)]
        found = [ask for ask in read if ask.nonce not in self._left_out]  # which a list that is read again still has
        with self._board.changed:
            for ask in found:
                if not ask.workers:
                    known = self._asked.get(ask.engine, {}).get(ask.worker)
                    if known is not None and known.nonce == ask.nonce:
                        del self._asked[ask.engine]
                    continue
                asked = self._asked.setdefault(ask.engine, {})
                if any(other.workers != ask.workers for other in asked.values()):
                    asked.clear()  # it was started anew in another size
                asked[ask.worker] = ask

    def _renewed(self, store: AgreementStore) -> None:
        """Say and read everything again: another store may be there; in the board's thread."""
        self._asks = asks_of(self._news.sender)
        write_news(store, self._news)

    def _whole(self) -> tuple[Ask, ...]:
        """Return the workers of the engines all of whose workers have asked, in order."""
        with self._board.changed:
            engines = sorted(self._asked.items())
            return tuple(asked[worker] for _, asked in engines if _is_whole(asked) for worker in sorted(asked))

    def _forget(self, engines: Iterable[str]) -> None:
        """Have the workers of these engines ask anew, but for those that have done so already."""
        members = {ask.nonce for ask in self._members}
        with self._board.changed:
            for engine in engines:
                known = engine in self._times_left_out or len(self._times_left_out) < MAX_CULPRITS
                self._times_left_out[engine if known else OTHER] += 1
                gone = [ask for ask in self._asked.get(engine, {}).values() if ask.nonce in members]
                for ask in gone:
                    del self._asked[engine][ask.worker]
                    self._left_out.append(ask.nonce)

    def _leave_out(self, error: CollectiveFailed, left_out: dict[str, Incident | str]) -> None:
        """Take the engines of the culprits out; where this process is one, or nobody is, all stay."""
        members, incident = self._members, self._first_fault() or error.outcome.incident
        ranks = set(error.outcome.culprits if incident is None else incident.culprits)
        if incident is not None and incident.cause is Cause.DIVERGED:
            ranks = _others_than_sender(incident) or ranks
        engines = {members[rank - 1].engine for rank in ranks if 0 < rank <= len(members)}
        for engine in engines:
            left_out[engine] = incident if incident is not None else str(error)
        log.warning(
            "ncclguard: %s",
            told(
                "the weights are sent again without {engines}: {why}",
                "log",
                engines=", ".join(sorted(engines)) or tr("nobody"),
                why=error,
            ),
        )
        self._forget(engines)
        self._drop_group()

    def _tell(self, news: News) -> None:
        def write(store: AgreementStore) -> None:
            if news is self._news:  # else nobody is to begin what has been given up before the store answered
                write_news(store, news)
            with self._board.changed:
                self._written = news
                self._board.changed.notify_all()

        self._news = news
        self._board.post(write)

    # ------------------------------------------------------------------ one try

    def _begin(self, members: tuple[Ask, ...], version: str | int, limit: float, until: float) -> None:
        """Tell the members what comes, and meet them in a group that has them all and nobody else.

        The time of the members begins when the store has the news. Raises GuardError where it does not take them.
        """
        began = time.monotonic()
        epoch = self._news.epoch
        if not self._has_group() or members != self._members:
            self._drop_group()
            epoch += 1
        nonces = tuple(ask.nonce for ask in members)
        self._tell(
            replace(
                self._news, number=self._news.number + 1, version=version, epoch=epoch, members=nonces, limit=limit,
                left_out=tuple(self._left_out),
            )
        )  # fmt: skip
        self._members, news = members, self._news
        if not self._board.wait_for(lambda: self._written is news, until):
            raise GuardError(_silence(time.monotonic() - began))
        if self._group is None:
            self._open_group(news, 0, "trainer", until)

    def _remaining(self, until: float) -> float:
        return max(0.001, min(self._news.limit, until - time.monotonic()))

    def _send(self, tensors: Tensors, until: float) -> str:
        """Send all tensors, a bucket in flight while the next one is made; returns their digest."""
        source = tensors.items() if isinstance(tensors, Mapping) else tensors()
        group, digest, works = self._group, Digest(), list[Any]()
        assert group is not None
        for header, parts in bucketed(source, self._bucket, self._device):
            safe_broadcast_object_list([header], 0, group, timeout=self._remaining(until)).raise_if_failed()
            for work in works:
                work.wait()
            group.set_timeout(timedelta(seconds=self._remaining(until)))
            works = [dist.broadcast(part, 0, group=group, async_op=True) for part in parts]
            digest.add(header, parts)
        for work in works:
            work.wait()
        safe_broadcast_object_list([None], 0, group, timeout=self._remaining(until)).raise_if_failed()
        return digest.text()

    def _vote(self, digest: str, until: float) -> dict[str, str]:
        """Return why engines do not take the version; empty where all do."""
        votes: list[Any] = [None] * (1 + len(self._members))
        safe_all_gather_object(votes, (digest, ""), self._group, timeout=self._remaining(until)).raise_if_failed()
        wrong: dict[str, str] = {}
        for ask, (theirs, refused) in zip(self._members, votes[1:], strict=True):
            if refused:
                wrong[ask.engine] = told("worker {worker} refused it: {reason}", worker=ask.worker, reason=refused)
            elif theirs != digest:
                wrong[ask.engine] = told("worker {worker} has other bytes than were sent", worker=ask.worker)
        return wrong


def _silence(seconds: float) -> str:
    return told(
        "the store of the weights has not answered for {seconds:.3g} s: look whether its process is stopped or has ended",
        seconds=seconds,
    )


def _others_than_sender(incident: Incident) -> set[int]:
    """Return who called something else than the sender, whose bytes they are to have: however many agree on it."""
    if not any(0 in ranks for _, ranks in incident.sides):
        return set()
    return {rank for _, ranks in incident.sides if 0 not in ranks for rank in ranks}


def _as_words(why: Incident | str) -> tuple[str, str]:
    """Return the cause, if there is one, and a sentence."""
    return ("", why) if isinstance(why, str) else (str(why.cause), why.summary)


def _is_whole(asked: Mapping[int, Ask]) -> bool:
    return bool(asked) and len(asked) == next(iter(asked.values())).workers
