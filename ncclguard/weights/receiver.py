"""An engine's end of a channel: it asks to be a member, and gets one version after another, whole or not at all."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ncclguard.collectives import safe_all_gather_object, safe_broadcast_object_list
from ncclguard.config import seconds
from ncclguard.coordination.store import AgreementStore
from ncclguard.engine.call import Time
from ncclguard.errors import GuardConfigError, GuardError
from ncclguard.faults import drill_job, injection
from ncclguard.incident.stacks import describe_exception
from ncclguard.torch_compat import Store
from ncclguard.weights.board import MOMENT, Ask, Board, News, asks_of, connected, read_news
from ncclguard.weights.buckets import Arriving, Digest, Header, arriving, device_of
from ncclguard.weights.end import ChannelEnd
from ncclguard_explain.language import told

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("ncclguard")


#: Seconds in which what was in flight ends once its group is given up.
_ENDS_WITHIN = 5.0
#: Seconds after a silence of the store in which the sender says whether what it had said before still holds.
_SETTLES = 0.25


class Update:
    """A version that arrives: iterate over its names and tensors, then `commit`.

    The tensors are the receiver's own. Where the transfer fails, the iteration ends early and `commit` returns False:
    what was staged is to be thrown away, and the version may come again.
    """

    def __init__(
        self, receiver: Receiver, news: News, group: dist.ProcessGroup, into: Mapping[str, torch.Tensor]
    ) -> None:
        self.version = news.version
        self.error: GuardError | None = None  # for which the transfer failed
        self._receiver, self._news, self._group, self._into = receiver, news, group, into
        self._digest, self._refused = Digest(), ""
        self._arrived = self._over = False
        self._began = time.monotonic()
        self._works: list[Any] = []  # in flight
        self._tensors = self._arriving()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._tensors

    def refuse(self, reason: str) -> None:
        """Vote against this version, say because a shape is not that of this engine; then `commit` returns False."""
        self._refused = reason or told("no reason was given")

    def commit(self) -> bool:
        """Return whether all members have this version, whole and equal; then it may be served, and else not."""
        if self._over:
            return False
        for _ in self._tensors:  # what the program did not look at has to arrive too
            pass
        self._over = True
        if not self._arrived:
            return False
        votes: list[Any] = [None] * self._group.size()
        mine = (self._digest.text(), self._refused)
        try:
            safe_all_gather_object(votes, mine, self._group, timeout=self._news.limit).raise_if_failed()
        except GuardError as error:
            self._fail(error)
            return False
        committed = all(digest == votes[0][0] and not refused for digest, refused in votes)
        if committed:
            self._receiver.version = self.version
            self._receiver._count(self.version, time.monotonic() - self._began)
        else:
            self._receiver._failed += 1
        return committed

    def abandon(self, error: BaseException | None = None) -> None:
        """End the transfer on this worker; the others hear of it at once."""
        if not self._over:
            self._over = True
            self._tensors.close()
            text = describe_exception(error) if error is not None else told("it was not committed")
            self._fail(GuardError(text))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abandon(error)

    def _arriving(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        pending: tuple[Header, Arriving, list[Any]] | None = None
        device = device_of(self._news.device)
        try:
            while True:
                said: list[Any] = [None]
                safe_broadcast_object_list(said, 0, self._group, timeout=self._news.limit).raise_if_failed()
                header: Header | None = said[0]
                following = None
                if header is not None:
                    memory = arriving(header, device, self._into)
                    if pending is None and self._receiver._is_altered() and memory.parts:
                        memory.parts[0] = memory.parts[0].new_empty(memory.parts[0].numel() + 1)
                    works = [dist.broadcast(part, 0, group=self._group, async_op=True) for part in memory.parts]
                    self._works += works
                    following = header, memory, works
                if pending is not None:
                    known, arrived, works = pending
                    for work in works:
                        work.wait()
                    del self._works[: len(works)]
                    self._digest.add(known, arrived.parts)
                    yield from arrived.tensors.items()
                if following is None:
                    break
                pending = following
        except GuardError as error:
            self._fail(error)
            return
        except Exception as error:
            self._fail(GuardError(describe_exception(error)))
            raise
        self._arrived = True

    def _fail(self, error: GuardError) -> None:
        self.error, self._over = error, True
        self._receiver._failed += 1
        log.warning(
            "ncclguard: %s",
            told("version {number} of the weights did not arrive: {error}", "log", number=self.version, error=error),
        )
        self._receiver._drop_group()
        for work in self._works:  # whose memory may be the program's
            with contextlib.suppress(Exception):
                work.wait(timedelta(seconds=_ENDS_WITHIN))
        self._works.clear()


class Receiver(ChannelEnd):
    """One worker of an engine, which gets the versions that the trainer sends; used in one thread.

    `address`, `name`: those of the sender. `engine`: its name, the same for all its `workers`, of which this is number
    `worker`: all of them are members, or none is. `timeout`: seconds or timedelta for the store to answer.
    `version` is the last one that was committed, None before the first.

    Raises GuardConfigError or TypeError for arguments that cannot be, GuardError where no store answers.
    """

    def __init__(
        self,
        address: str | Store,
        *,
        name: str = "weights",
        engine: str,
        worker: int = 0,
        workers: int = 1,
        timeout: Time = 300.0,
    ) -> None:
        if not engine or not 0 <= worker < workers:
            text = told(
                "engine is {engine}, worker {worker} of {workers}: give the engine a name, and its workers the numbers 0 to "
                "{last}",
                engine=repr(engine),
                worker=worker,
                workers=workers,
                last=workers - 1,
            )
            raise GuardConfigError(text)
        self.version: str | int | None = None
        label = engine if workers == 1 else f"{engine}, worker {worker}"
        super().__init__(connected(address, name, seconds(timeout, "timeout") or 300.0, sends=False), name, label)
        self._ask = Ask(engine, worker, workers, "")
        self._epoch = ("", 0)  # of that group: its sender and number
        self._update: Update | None = None
        self._last = -1  # number of the news that the board has read
        self._news: News | None = None  # these; `changed` guards them, and what follows
        self._asked = 0  # the number of the ask that stands, 0 for none
        self._listens = False  # whether `next` waits: who does not come to it asks for nothing
        self._begun = 0  # updates
        self._taken = ("", 0)  # the sender and number of the last try that `next` has returned
        injection.for_engines()
        self._board = Board(self._store, self._look, self._renewed)
        drill_job.channel_event("began", engine=engine, worker=worker)
        self._show()

    def next(self, timeout: Time = None, into: Mapping[str, torch.Tensor] | None = None) -> Update | None:
        """Wait for the next version and return it; None when none has come in `timeout`, seconds or timedelta.

        One that has is begun within the sender's limit, also where `timeout` is over meanwhile. A worker that is no
        member, or was left out, asks by itself, and gets what is sent from then on. `into`: memory to stage in, by
        name: a tensor of a megabyte and more arrives there where shape, dtype and device are the same.
        """
        limit = seconds(timeout, "timeout")
        until = float("inf") if limit is None else time.monotonic() + limit
        if self._update is not None:
            self._update.abandon()
            self._update = None
        self._listens = True
        try:
            return self._next(until, into or {})
        finally:
            self._listens = False

    def _next(self, until: float, into: Mapping[str, torch.Tensor]) -> Update | None:
        while self._board.wait_for(self._is_called, min(until, time.monotonic() + 3600.0)) or time.monotonic() < until:
            with self._board.changed:
                news = self._news if self._is_called() else None
                if news is None:
                    continue
                self._taken = (news.sender, news.number)
            try:
                group = self._enter(news)
            except GuardError as error:
                log.warning(
                    "ncclguard: %s",
                    told(
                        "the group for version {number} of the weights was not made: {error}",
                        "log",
                        number=news.version,
                        error=error,
                    ),
                )
                continue
            self._update = Update(self, news, group, into)
            self._begun += 1
            return self._update
        return None

    def close(self) -> None:
        """Leave the channel; the trainer goes on without this engine."""
        with self._board.changed:
            news, leaves = self._news, replace(self._ask, workers=0)
        if news is not None:
            self._board.post(lambda store: asks_of(news.sender).add(store, leaves.to_json()))
        super().close()

    def _is_altered(self) -> bool:
        """Let a fault of a drill strike; return whether it wants another shape here."""
        ask = self._ask
        return injection.before_bucket(ask.engine, ask.worker, self._begun - 1) is not None

    def _is_called(self) -> bool:
        news = self._news
        return (
            news is not None
            and self._taken != (news.sender, news.number)
            and bool(self._ask.nonce)
            and self._ask.nonce in news.members
        )

    def _enter(self, news: News) -> dist.ProcessGroup:
        """Return the group of the news, which is joined if need be."""
        epoch = (news.sender, news.epoch)
        group = self._group
        if group is None or self._epoch != epoch or not self._has_group():
            self._drop_group()
            rank = 1 + news.members.index(self._ask.nonce)
            until = time.monotonic() + news.limit  # the others wait for this worker, however long its caller would
            group = self._open_group(news, rank, self._label, until, wanted=lambda: self._news == news)
            self._epoch = epoch
        group.set_timeout(timedelta(seconds=news.limit))
        return group

    def _look(self, store: AgreementStore) -> None:
        """Read the news, and ask to be a member where this worker is none; in the board's thread."""
        began = time.monotonic()
        last, news = read_news(store, self._last)
        if news is not None and time.monotonic() - began >= MOMENT:
            # The sender may have given that up while the store was silent, and nobody would meet this worker there.
            time.sleep(_SETTLES)
            last, newer = read_news(store, last)
            news = newer or news
        self._last = last
        with self._board.changed:
            before, self._news = self._news, news or self._news
            news = self._news
            if news is None:
                return
            anew = before is None or before.sender != news.sender or self._ask.nonce in news.left_out
            if anew:
                self._asked = 0
            if self._asked or not self._listens:
                return
            ask = self._ask = Ask(self._ask.engine, self._ask.worker, self._ask.workers, secrets.token_hex(6))
        number = asks_of(news.sender).add(store, ask.to_json())
        with self._board.changed:
            self._asked = number

    def _renewed(self, store: AgreementStore) -> None:
        """Read the news again, and ask again where another store is there; in the board's thread."""
        self._last, news = -1, self._news
        if news is not None and self._asked and not asks_of(news.sender).has(store, self._asked, self._ask.to_json()):
            with self._board.changed:
                self._asked = 0
