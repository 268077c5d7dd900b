"""Parts of the program that the ranks run together.

A rank that raised or came to its end there tells those that wait for it.

A rank that leaves the job announces a departure. One that gives up only a *section*, such as an evaluation, goes on
living, and the others may be waiting for it in any group: they are told over the job's log. Nothing is written while
all is well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ncclguard.coordination.group_state import GroupState
from ncclguard.protocol.decision import Trouble, TroubleKind
from ncclguard_explain.language import tr

#: Seconds after which a rank that came to the section's end tells those who may be waiting for it inside; also how
#: long their calls must have waited. The end of a section is reached by all within moments when all is well.
FINISHED_AFTER = 1.0
#: How many names of sections are remembered as ended, so that news of one that is over does not pile up.
REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class News:
    """The word of one rank about a section."""

    rank: int
    kind: TroubleKind  # RAISED, GAVE_UP or FINISHED
    text: str


class Sections:
    """The place of this process in sections; the monitor calls `hear` and `step`, the program the rest."""

    def __init__(self, rank: int, wake: Callable[[], None]) -> None:
        self._rank = rank
        self._wake = wake
        self._lock = threading.Lock()
        self._name = ""  # of the section this process is in
        self._since = 0.0
        self._members: tuple[int, ...] = ()
        self._standing: Trouble | None = None
        #: The thread that has raised the trouble that stands, and the frames it came through.
        self._raised_at: tuple[int, tuple[str, ...]] = (0, ())
        self._unsaid: tuple[float, str, Trouble] | None = None  # when due, section, what to say
        self._news: dict[str, dict[int, News]] = {}

    # ------------------------------------------------------------------ the program

    def enter(self, name: str, members: tuple[int, ...]) -> None:
        """This rank begins a section, named alike on all `members` (global ranks) and unlike any before."""
        with self._lock:
            self._name, self._since, self._members = name, time.monotonic(), members
            self._standing = self._unsaid = None

    def leave(self, raised: str = "", *, follows: bool = False, stack: tuple[str, ...] = ()) -> None:
        """This rank calls nothing of the section any more: it raised what `raised` describes, or finished.

        `follows`: what it raised is the failure of a collective, which may be another rank's fault. `stack`: the frames
        that the exception came through.
        """
        with self._lock:
            name, self._name = self._name, ""
            if not name:
                return
            kind = TroubleKind.FINISHED
            if raised:
                kind = TroubleKind.GAVE_UP if follows else TroubleKind.RAISED
            self._standing = Trouble(kind, raised or tr("it has finished {text}", text=name))
            self._raised_at = threading.get_ident(), stack
            self._unsaid = (time.monotonic() + (0.0 if raised else FINISHED_AFTER), name, self._standing)
        if raised:
            self._wake()

    def settle(self) -> None:
        """All ranks have left the section: nobody can be waiting there for this one."""
        with self._lock:
            self._standing = self._unsaid = None

    # ------------------------------------------------------------------ the monitor

    def standing(self) -> Trouble | None:
        """Why others wait for this rank in vain, for its reports."""
        return self._standing

    def raised_at(self, trouble: Trouble | None) -> tuple[int, tuple[str, ...]]:
        """Return where an exception was raised that is this rank's trouble: the thread, and its frames; none otherwise.

        By the time that the rank is asked it waits for the others elsewhere.
        """
        with self._lock:
            return self._raised_at if trouble is not None and trouble is self._standing else (0, ())

    @property
    def waiting(self) -> bool:
        """Return whether there is something to say, or somebody in the section to be told."""
        return self._unsaid is not None or bool(self._name and self._name in self._news)

    def hear(self, entry: dict[str, object]) -> None:
        """Take in what another rank posted."""
        with self._lock:
            news = News(int(str(entry["rank"])), TroubleKind(str(entry["what"])), str(entry["text"]))
            self._news.setdefault(str(entry["section"]), {})[news.rank] = news
            while len(self._news) > REMEMBERED:
                del self._news[next(iter(self._news))]

    def step(self, now: float, post: Callable[[dict[str, object]], None], states: Iterable[GroupState]) -> None:
        """Say what is due, and end the calls of this rank that wait for one that will not come."""
        with self._lock:
            unsaid = self._unsaid
            if unsaid is not None and now >= unsaid[0]:
                self._unsaid = None
            else:
                unsaid = None
            members = list(self._members)
        if unsaid is not None:
            _, name, trouble = unsaid
            post(
                {
                    "kind": "section",
                    "section": name,
                    "rank": self._rank,
                    "what": trouble.kind.value,
                    "text": trouble.text,
                    "members": members,
                }
            )
        with self._lock:  # kept to the end, so that this rank cannot leave and open a call that is not the section's
            for news in self._news.get(self._name, {}).values() if self._name else ():
                for state in states:
                    self._end_call(state, news, now)

    def _end_call(self, state: GroupState, news: News, now: float) -> None:
        with state.condition:
            call, generation, participants = state.call, state.member.generation, state.member.participants
        if call is None or call.entered < self._since or news.rank == self._rank or news.rank not in participants:
            return
        if news.kind is TroubleKind.FINISHED and now - call.entered < FINISHED_AFTER:
            return
        state.trouble(generation, TroubleKind.TOLD, f"rank {news.rank}: {news.text}")
