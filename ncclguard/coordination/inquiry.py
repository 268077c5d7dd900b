"""Looking into calls that take long, without ending them: an early mismatch check, and who is awaited and where it is.

Nothing here is a promise. The first rank that has waited a second in an operation publishes its fingerprint; the others
compare theirs, so that a mismatch is known in seconds although a further rank has not come and the opening round cannot
pass. That first rank also asks, when the warning is due, and is the only one to log what the answers say.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ncclguard.coordination.group_state import GroupState, OpenCall
from ncclguard.coordination.liveness import Neighbours, Sight, silent_cause
from ncclguard.coordination.store import AgreementStore, HighWaterMarks
from ncclguard.incident.stacks import innermost_of_program
from ncclguard.protocol import codec
from ncclguard.protocol.decision import Operation, Phase, Report, TroubleKind
from ncclguard_explain.cause import WORD, Cause
from ncclguard_explain.language import joined, told, tr
from ncclguard_explain.ranks import SHOWN_GROUPS, Hosts, ranks_text

log = logging.getLogger("ncclguard")

#: Seconds after which an open call publishes its fingerprint.
PUBLISH_AFTER = 1.0
#: Seconds that members have to answer a question before they are called silent.
ANSWER_WITHIN = 2.0


@dataclass(frozen=True, slots=True)
class Patience:
    """The seconds that a call may take until its ranks are asked who is awaited, and until a silent one ends it."""

    warn_after: float
    stuck_timeout: float | None


class Surroundings(Protocol):
    """The parts of the monitor that an inquiry needs."""

    neighbours: Neighbours

    def wake(self) -> None: ...
    def states(self) -> Sequence[GroupState]: ...
    def state(self, key: str, members: tuple[int, ...]) -> GroupState: ...
    def describe(self, state: GroupState, report: Report) -> Report: ...
    def post(self, entry: dict[str, object]) -> None: ...
    def patience(self, state: GroupState) -> Patience: ...


@dataclass(kw_only=True)
class Question:
    """A question of one rank to the members of a group, and what they have said so far.

    The answers have one key for each asker and rank, which the asker empties when it has read it: with stacks in them,
    those of all the questions of a long job would fill the store.
    """

    asker: str
    number: int
    asked: float
    before: int = 0  # answers to earlier questions
    sought: bool = False  # the processes of those that did not answer are being looked for
    answers: dict[int, Report] = field(default_factory=dict)

    def entry(self, state: GroupState, rank: int, store: AgreementStore) -> dict[str, object]:
        """Return what to post for the others, by `rank`."""
        self.before = store.count(f"answers/{self.asker}")
        members = list(state.member.members)
        return {
            "kind": "question", "to": self.asker, "id": self.number, "group": state.key, "members": members, "by": rank,
        }  # fmt: skip

    def silent(self, ranks: Iterable[int], now: float, store: AgreementStore) -> list[int] | None:
        """Take in the answers that have come; those of `ranks` that gave none in time, None while there is time."""
        missing = [rank for rank in ranks if rank not in self.answers]
        in_time = now - self.asked < ANSWER_WITHIN
        if in_time and store.count(f"answers/{self.asker}") - self.before < len(missing):
            return None
        keys = {f"answer/{self.asker}/{rank}": rank for rank in missing}
        for key, text in store.read_many(list(keys)).items():
            number, _, report = text.partition(" ")
            if number == str(self.number):
                self.answers[keys[key]] = codec.loads_report(report)
        missing = [rank for rank in missing if rank not in self.answers]
        if missing and in_time:
            return None
        for rank in self.answers:
            store.put(f"answer/{self.asker}/{rank}", "")
        return missing


def answer(store: AgreementStore, entry: Mapping[str, object], rank: int, report: Report) -> None:
    """Answer the question that was posted.

    The count is acknowledged, and what stands before it on this connection with it.
    """
    store.put(f"answer/{entry['to']}/{rank}", f"{entry['id']} {codec.dumps(report)}")
    store.count(f"answers/{entry['to']}", 1)


@dataclass(kw_only=True)
class _Inquiry(Question):
    state: GroupState
    generation: int
    operation: Operation
    call: OpenCall


class Inquiries:
    """The monitor's questions, and its answers to those of others."""

    def __init__(self, rank: int, surroundings: Surroundings, period: float) -> None:
        self._rank = rank
        self._period = period  # seconds between two steps while a call is open
        self._around = surroundings
        self._published: dict[str, tuple[int, int, bool]] = {}  # state -> generation, sequence, am I the one who asks
        self._marks = HighWaterMarks()
        self._question: _Inquiry | None = None
        self._asked = 0
        self._wanted = 0  # how often somebody has wanted to know who is awaited, and the last that was looked up
        self._looked_up = 0
        self._awaited: list[dict[str, Any]] = []
        self._changed = threading.Condition()

    @property
    def busy(self) -> bool:
        return self._question is not None

    def awaited(self, seconds: float) -> list[dict[str, Any]] | None:
        """Return the result of each group's last inquiry, of operations that have not ended here; by any other thread.

        The monitor looks it up in its next step; None where that did not come within `seconds`. Each entry has the
        `group`, its `generation` and `sequence`, the `text` of the call, the `lines` of the warning, and which rank
        asked (`by`) when its own call was `age` seconds old.
        """
        with self._changed:
            self._wanted += 1
            mine = self._wanted
            self._around.wake()
            done = self._changed.wait_for(lambda: self._looked_up >= mine, timeout=seconds)
            return list(self._awaited) if done else None

    def _look_up(self, store: AgreementStore) -> None:
        with self._changed:
            wanted = self._wanted
        if wanted == self._looked_up:
            return
        states = {f"{state.key}/awaited": state for state in self._around.states() if state.guarded}
        found = []
        for key, text in store.read_many(list(states)).items() if states else ():
            said, member = json.loads(text), states[key].member
            if said["generation"] == member.generation and said["sequence"] > member.completed:
                found.append(said)
        with self._changed:
            self._awaited, self._looked_up = found, wanted
            self._changed.notify_all()

    def step(self, now: float, store: AgreementStore) -> None:
        """Publish and compare fingerprints, ask when it is time, and log what the answers add up to."""
        self._look_up(store)
        for state in self._around.states():
            self._publish(state, now, store)
        if self._question is not None:
            self._collect(self._question, now, store)
            return
        for state in self._around.states():
            self._ask_if_due(state, now, store)

    def answer(self, store: AgreementStore, entry: dict[str, object], members: tuple[int, ...]) -> None:
        """Say where this rank is in the operation that is asked about."""
        state = self._around.state(str(entry["group"]), members)
        report = self._around.describe(state, state.glance())
        answer(store, entry, self._rank, report)

    def _publish(self, state: GroupState, now: float, store: AgreementStore) -> None:
        with state.condition:
            call, operation, generation = state.call, state.member.operation, state.member.generation
            if call is None or operation is None or state.member.frozen or now - call.entered < PUBLISH_AFTER:
                return
        if self._published.get(state.key, (-1, -1, False))[:2] == (generation, operation.sequence):
            return
        mine: list[int | str] = [operation.fingerprint, self._rank, operation.text]
        key = f"{state.key}/open"
        if store.left_to_another(key, self._period):
            return
        first = self._marks.enter(store, key, (generation, operation.sequence), mine)
        self._published[state.key] = (generation, operation.sequence, first is not None and first[1] == self._rank)
        if first is not None and first[0] != operation.fingerprint:
            _, rank, text = first
            why = f"rank {rank} is in {text}, rank {self._rank} in {operation.text}"
            state.trouble(generation, TroubleKind.MISMATCH, why)

    def _ask_if_due(self, state: GroupState, now: float, store: AgreementStore) -> None:
        with state.condition:
            call, operation, generation = state.call, state.member.operation, state.member.generation
            if call is None or operation is None or state.member.frozen:
                return
        if self._published.get(state.key) != (generation, operation.sequence, True):
            return
        age, patience = now - call.entered, self._around.patience(state)
        due = patience.warn_after if call.warned < patience.warn_after else 2 * call.warned
        if patience.stuck_timeout is not None and call.warned < patience.stuck_timeout:
            due = min(due, patience.stuck_timeout)
        if age < due:
            return
        call.warned = age
        self._asked += 1
        self._question = _Inquiry(
            asker=str(self._rank),
            number=self._asked,
            asked=now,
            state=state,
            generation=generation,
            operation=operation,
            call=call,
        )
        self._around.post(self._question.entry(state, self._rank, store))

    def _collect(self, question: _Inquiry, now: float, store: AgreementStore) -> None:
        with question.state.condition:
            participants = question.state.member.participants
            over = question.state.member.operation != question.operation
        if over:
            self._question = None
            return
        silent = question.silent(participants, now, store)
        if silent is None:
            return
        if silent and not question.sought:
            question.sought = True
            self._around.neighbours.seek(silent, now)
            return
        self._question = None
        self._conclude(question, silent, now, store)

    def _conclude(self, question: _Inquiry, silent: list[int], now: float, store: AgreementStore) -> None:
        participants = question.state.member.participants
        age, stuck_timeout = now - question.call.entered, self._around.patience(question.state).stuck_timeout
        sequence = question.operation.sequence
        absent = {rank: r for rank, r in question.answers.items() if r.phase_at(sequence) is Phase.NONE}
        sights = {rank: self._around.neighbours.look(rank) for rank in silent}
        stuck = [rank for rank, (sight, _) in sights.items() if silent_cause(sight) is Cause.STUCK]
        hosts = Hosts({rank: str(r.details.get("host", "")) for rank, r in question.answers.items()}, participants)
        lines = [*not_come(absent, hosts), *not_answering(sights, hosts)]
        if stuck and stuck_timeout is not None and age >= stuck_timeout:
            why = tr(
                "{ranks} did not answer for {age:.0f} s (stuck_timeout {stuck_timeout:g} s)",
                ranks=ranks_text(stuck),
                age=age,
                stuck_timeout=stuck_timeout,
            )
            question.state.trouble(question.generation, TroubleKind.STUCK, why)
        if not lines:
            lines.append(ALL_ENTERED)
        said = {
            "group": question.state.key, "generation": question.generation, "sequence": sequence, "by": self._rank,
            "text": question.call.text, "age": round(age, 1), "lines": lines,
        }  # fmt: skip
        store.put(f"{question.state.key}/awaited", json.dumps(said))
        text = told(
            "{operation} has been waiting for {age:.0f} s (deadline in {left:.0f} s): {details}",
            operation=question.call.text,
            age=age,
            left=question.call.deadline - now,
            details=joined("; ", lines),
        )
        log.warning("ncclguard: %s", text)


#: Why nobody is awaited in a call that goes on for long.
ALL_ENTERED = tr("every rank has entered: the transfer itself is slow or stalled")


def not_come(reports: Mapping[int, Report], hosts: Hosts | None = None) -> list[str]:
    """Return where the ranks are that are awaited, a line for each; where they are many, for each place."""
    who = ranks_text if hosts is None else hosts.text
    if len(reports) <= SHOWN_GROUPS:
        return [
            tr("{ranks} has not come: {where}", ranks=who([rank]), where=whereabouts(report))
            for rank, report in sorted(reports.items())
        ]
    places: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        places.setdefault(whereabouts(report), []).append(rank)
    lines = [tr("{ranks} not come, of each: {where}", ranks=who(ranks), where=where) for where, ranks in places.items()]
    if len(lines) <= SHOWN_GROUPS:
        return [*lines]
    return [*lines[:SHOWN_GROUPS], tr("and others at {count} further places", count=len(lines) - SHOWN_GROUPS)]


def not_answering(sights: Mapping[int, tuple[Sight, str]], hosts: Hosts | None = None) -> list[str]:
    """The silent ranks, with what can be seen of each, or of the first of each kind where they are many."""
    who = ranks_text if hosts is None else hosts.text
    if len(sights) <= SHOWN_GROUPS:
        return [
            tr(
                "{ranks} does not answer: {cause} ({evidence})",
                ranks=who([rank]),
                cause=WORD[silent_cause(sight)],
                evidence=evidence,
            )
            for rank, (sight, evidence) in sights.items()
        ]
    kinds: dict[Cause, list[int]] = {}
    for rank, (sight, _) in sights.items():
        kinds.setdefault(silent_cause(sight), []).append(rank)
    return [
        tr(
            "{ranks} do not answer: {cause} ({one}: {evidence})",
            ranks=who(ranks),
            cause=WORD[cause],
            one=ranks_text(ranks[:1]),
            evidence=sights[ranks[0]][1],
        )
        for cause, ranks in kinds.items()
    ]


def whereabouts(report: Report) -> str:
    if report.elsewhere and not report.free_for:
        return tr("it waits in {operation}", operation=report.elsewhere)
    stack = report.details.get("stack")
    if isinstance(stack, (list, tuple)) and stack:
        own = innermost_of_program(stack)
        if own in (None, len(stack) - 1):
            return tr("it is at {place}", place=stack[-1])
        return tr("it is at {own}, in {place}", own=stack[own], place=stack[-1])
    return tr("where it is, is unknown")
