"""The incident: one record of a failed operation, the same on every rank that could agree; as data and as text.

It stays small in a job of thousands, because every rank reads it. In a job of a few hundred ranks nothing is left out,
but other threads when they are many. In larger ones, what tells the most comes first: one stack for all culprits that
have the same, then the culprits' other threads, then where the other ranks wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, field_validator

from ncclguard.incident.stacks import frame_text, innermost_of_program
from ncclguard_explain.cause import ADVICE_ENDED_NEVERTHELESS, MEANING, SEE_LOST, WORD, Cause
from ncclguard_explain.language import Message, joined, read, said, say, told, tr
from ncclguard_explain.ranks import FEW_RANKS, SHOWN_GROUPS, Hosts, called, duration, ranks_text, runs

#: Bytes that all readers of an incident read together, and the least and the most that one incident says of single
#: ranks, as JSON.
ALL_READERS: Final = 128 << 20
ONE_INCIDENT: Final = (64 << 10, 384 << 10)
#: Bytes of the ranks' last operations together, which one rank reads for the report.
HISTORIES: Final = 2 << 20
#: Sides of a mismatch, and different places in which ranks wait, that an incident keeps apart.
PLACES: Final = 64
TEXT: Final = 200
#: Bytes of the hosts that an incident tells beside the ranks' own reports: enough for 2,000 hosts of eight ranks.
HOSTS_BYTES: Final = 96 << 10
#: Characters of a host's name (HOST_NAME_MAX of Linux).
HOST_NAME: Final = 64

Sides = tuple[tuple[str, tuple[int, ...]], ...]


def bounded(reports: Iterable[RankReport], culprits: Collection[int]) -> tuple[RankReport, ...]:
    """Return the reports, in order of rank, each with as much as there is room for; every rank has one."""
    ranks = sorted(reports, key=lambda report: report.rank)
    least, most = ONE_INCIDENT
    left = min(max(ALL_READERS // max(len(ranks), 1), least), most)
    found: dict[int, RankReport] = {}
    blamed = [report for report in ranks if report.rank in culprits]
    if len(blamed) > SHOWN_GROUPS:
        blamed = _once_each(blamed)
    for report in sorted(blamed, key=lambda report: not report.stack):
        alone = report.model_copy(update={"threads": ()})
        size = _size(alone)
        found[report.rank] = alone if size <= left else _short(report)
        left -= size if size <= left else 0
    for report in blamed:
        size = _size(report) - _size(found[report.rank])
        if report.threads and found[report.rank].stack == report.stack and size <= left:
            found[report.rank] = report
            left -= size
    places: set[tuple[str | None, str | None]] = set()
    for report in ranks:
        if report.rank not in culprits:
            size = _size(report)
            found[report.rank] = report if size <= left else _place_only(report, places)
            left -= size if size <= left else 0
    return tuple(found[report.rank] for report in ranks)


def sides(found: Sequence[tuple[str, tuple[int, ...]]]) -> Sides:
    """The largest sides of a mismatch; they come in order of size."""
    return tuple((text[:TEXT], ranks) for text, ranks in found[:PLACES])


def _once_each(blamed: Sequence[RankReport]) -> list[RankReport]:
    """Keep of culprits at the same place of the program only the first's stack; the others name that rank."""
    seen: dict[tuple[str, ...], int] = {}
    found = []
    for report in blamed:
        first = seen.setdefault(report.stack, report.rank) if report.stack else report.rank
        if first != report.rank:
            note = "; ".join(filter(None, (report.note, tr("its stack is that of rank {rank}", rank=first))))
            report = report.model_copy(update={"stack": (), "threads": (), "note": note})
        found.append(report)
    return found


def _short(report: RankReport) -> RankReport:
    """A culprit for which there is no room: what it is to blame for."""
    return RankReport(rank=report.rank, cause=report.cause, state=report.state, sequence=report.sequence)


def _place_only(report: RankReport, places: set[tuple[str | None, str | None]]) -> RankReport:
    """A rank not to blame, without room: how far it got, and where it waits, unless that is one of too many places."""
    place = report.operation and report.operation[:TEXT], report.call_site and report.call_site[:TEXT]
    if len(places) < PLACES:
        places.add(place)
    operation, call_site = place if place in places else (None, None)
    age = None if report.age is None else round(report.age, 1)
    return RankReport(
        rank=report.rank,
        cause=report.cause,
        state=report.state,
        sequence=report.sequence,
        operation=operation,
        age=age,
        call_site=call_site,
    )


def _size(report: RankReport) -> int:
    return len(report.model_dump_json(exclude_defaults=True))


#: Raised with every change of a field's name or meaning.
SCHEMA_VERSION = 1
#: Frames of a culprit's stack that are shown, the innermost, beside the program's own innermost; all are in the JSON.
SHOWN_FRAMES = 8
#: How the note of a culprit begins that is at the same place as another one, whose number follows.
SAME_STACK = "its stack is that of rank "

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}

State = Literal["none", "running", "ready", "done", "silent", "departed"]


def encodable(text: str) -> str:
    """File names and messages may hold bytes that are no text; JSON cannot."""
    return text.encode("utf-8", "backslashreplace").decode()


Text = Annotated[str, BeforeValidator(lambda value: encodable(value) if isinstance(value, str) else value)]


class RankReport(BaseModel, frozen=True, extra="forbid"):
    """One rank at the moment the operation was given up.

    `operation`: what the rank is in, or last was in; `age`: seconds in it; `call_site`: where the program called it;
    `entered`: of a culprit, the guarded calls that its process had begun by then, in all groups;
    `peer`: the rank at the other end of the connection that broke on this one; `stack`: the frames,
    outermost first, of the thread that made its last call here, named `thread`, or of the main one where that is None;
    `threads`: name and frames of other threads, for culprits; `steps`: the optimizer steps that its process had made
    since its first guarded call, or `watch()`. None and "" stand for what is not known.
    `state` is how far the rank got in the operation: none (not entered), running, ready (own data complete), done; or
    silent (no answer), departed (gone, or left).
    """

    rank: int
    host: Text = ""
    pid: int = 0
    cause: Cause | None = None
    state: State
    sequence: int = 0
    entered: int | None = None
    operation: Text | None = None
    age: float | None = None
    call_site: Text | None = None
    exception: Text | None = None
    peer: int | None = None
    stack: tuple[Text, ...] = ()
    thread: Text | None = None
    threads: tuple[tuple[Text, tuple[Text, ...]], ...] = ()
    note: Text | None = None
    steps: int | None = None

    @property
    def place(self) -> str:
        """Host and pid, as far as they are known."""
        parts: list[str] = [tr("host {host}", host=self.host)] if self.host else []
        return say(joined(", ", [*parts, f"pid {self.pid}"] if self.pid else parts))

    @property
    def inside(self) -> bool:
        """Return whether it waits in the operation; one that does not reports its last."""
        return self.state in ("running", "ready")


class MembershipChange(BaseModel, frozen=True, extra="forbid"):
    """The change of the job after a loss: it went on without ranks, or ranks came back.

    `ranks`: global ranks that were lost, or are back; `participants`: how many take part from then on; `seconds`: what
    it cost, from the beginning of the step that was struck to the beginning of the one without them, or, where ranks
    came back, those in which the others stood. `step`: the first step with ranks that are back, None where not known.

    >>> print(MembershipChange(kind="went on", ranks=(3,), participants=7, seconds=1.84))
    went on without rank 3 after 1.8 s
    >>> print(MembershipChange(kind="rejoined", ranks=(3,), participants=8, seconds=4.06, step=1204))
    rank 3 rejoined at step 1,204, 4.1 s
    """

    kind: Literal["went on", "rejoined"]
    ranks: tuple[int, ...]
    participants: int
    seconds: float
    step: int | None = None

    @property
    def text(self) -> Message:
        """In words, which can be said in another language."""
        ranks, time = ranks_text(self.ranks), f"{self.seconds:.1f} s"
        if self.kind == "went on":
            return tr("went on without {ranks} after {time}", ranks=ranks, time=time)
        if self.step is None:
            return tr("{ranks} rejoined, {time}", ranks=ranks, time=time)
        return tr("{ranks} rejoined at step {step}, {time}", ranks=ranks, step=f"{self.step:,}", time=time)

    def __str__(self) -> str:
        return str(self.text)


class Incident(BaseModel, frozen=True, extra="forbid"):
    """The record of a failure; `timeout` in seconds, `ranks` in order of rank, `culprits` sorted global ranks.

    `sides` is filled when ranks diverged: what was called, and by which ranks, the largest side first. `device` is the
    GPU's name where it is an emulated one, else None. `hosts` is filled in a job of more than 64 ranks: names, and
    those of their ranks whose own report does not say the host, such as "0-7,12". `decided_after`: seconds from the
    revoke to the verdict, on the rank that decided; None where nothing was agreed. `afterwards`: what became of the
    job, as far as it is known; a report is written before that, and again then. `repeats`: the incident that reported
    the same fault first, where its ranks have begun no guarded call since; such an incident has no report of its own.
    `further`: what of this library would make more of such a failure the next time, empty for nothing. `str()` is for
    people, `to_json()` for programs. Raises pydantic.ValidationError, a ValueError, for fields that cannot be.

    >>> incident = Incident(
    ...     id="0-17.0", op="barrier", op_id="0/17", group="0", generation=0, cause=Cause.LATE, culprits=(2,),
    ...     deadline_expired=True, agreed=True, attempts=1, participants=(0, 1, 2),
    ...     summary="barrier() failed after 300 s: rank 2 late.", advice="See what rank 2 did instead.",
    ... )
    >>> Incident.from_json(incident.to_json()) == incident
    True
    """

    schema_version: int = SCHEMA_VERSION
    id: str
    op: Text
    op_id: str
    group: Text
    generation: int
    cause: Cause
    culprits: tuple[int, ...]
    deadline_expired: bool
    timeout: float | None = None
    agreed: bool
    attempts: int
    participants: tuple[int, ...]
    ranks: tuple[RankReport, ...] = ()
    summary: Text
    advice: Text
    sides: tuple[tuple[Text, tuple[int, ...]], ...] = ()
    torn: bool = False
    device: Text | None = None
    hosts: tuple[tuple[Text, Text], ...] = ()
    decided_after: float | None = None
    afterwards: tuple[MembershipChange, ...] = ()
    repeats: str | None = None
    further: Text = ""

    @field_validator("schema_version")
    @classmethod
    def _readable(cls, version: int) -> int:
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"the incident has schema version {version}, this ncclguard reads {SCHEMA_VERSION}: read it with the "
                "version of ncclguard that wrote it"
            )
        return version

    @field_validator("culprits")
    @classmethod
    def _sorted(cls, culprits: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(culprits)))

    @field_validator("ranks")
    @classmethod
    def _in_order(cls, ranks: tuple[RankReport, ...]) -> tuple[RankReport, ...]:
        return tuple(sorted(ranks, key=lambda report: report.rank))

    def to_json(self) -> str:
        """Serialise; `from_json` gives an equal incident back."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Incident:
        """Read what `to_json` wrote. Raises pydantic.ValidationError, a ValueError, for anything else."""
        return cls.model_validate_json(text)

    def placed(self) -> Hosts:
        """Return which rank is on which host, as far as the ranks said or others knew."""
        found = {rank: host for host, ranks in self.hosts for rank in _ranks_of(ranks)}
        found |= {report.rank: report.host for report in self.ranks if report.host}
        return Hosts(found, {*self.participants, *(report.rank for report in self.ranks)})

    def __str__(self) -> str:
        return as_text(self)

    def followed_by(self, changes: Sequence[MembershipChange]) -> Incident:
        """Return the incident with what became of the job, and advice that fits a job that has gone on."""
        survived = {rank for change in changes if change.kind == "went on" for rank in change.ranks}
        told = self.model_copy(update={"afterwards": tuple(changes)})
        if self.cause is not Cause.LOST or not set(self.culprits) <= survived:
            return told
        advice = tr("The others go on without it. {advice}", advice=SEE_LOST)
        return told.model_copy(update={"advice": advice, "further": ""})


def unsaid_hosts(hosts: Mapping[int, str], reports: Sequence[RankReport]) -> tuple[tuple[str, str], ...]:
    """The `hosts` of an incident: those that the reports do not say themselves, in a job of many ranks.

    >>> reports = [RankReport(rank=rank, state="none") for rank in range(80)]
    >>> unsaid_hosts({rank: f"node{rank // 40}" for rank in range(80)}, reports)
    (('node0', '0-39'), ('node1', '40-79'))
    """
    if len(reports) <= FEW_RANKS:
        return ()
    ranks: dict[str, list[int]] = {}
    for report in reports:
        host = hosts.get(report.rank, "")
        if host and not report.host:
            ranks.setdefault(host[:HOST_NAME], []).append(report.rank)
    found, left = [], HOSTS_BYTES
    for host, here in ranks.items():
        text = ",".join(runs([str(rank) for rank in here]))
        left -= len(host) + len(text)
        if left < 0:
            break
        found.append((host, text))
    return tuple(found)


def _ranks_of(text: str) -> Iterable[int]:
    """The ranks that `unsaid_hosts` wrote; none from a text of another kind, which came from another process."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal() and int(last or first) - int(first) < 1 << 20:
            yield from range(int(first), int(last or first) + 1)


def came(reports: Collection[RankReport]) -> bool:
    """Return whether ranks that are late have come after all, when it was too late for the others."""
    return bool(reports) and all(report.cause is Cause.LATE and report.inside for report in reports)


def meaning_of(cause: Cause, reports: Collection[RankReport]) -> Message:
    """Return the meaning of a cause, for the ranks that it is the cause of."""
    if came(reports):
        return tr("alive, and it came to this operation far behind the others")
    return MEANING[cause]


def view_of_one(incident: Incident) -> Message:
    """Return why an incident is the view of one rank."""
    if incident.advice == ADVICE_ENDED_NEVERTHELESS:
        return tr("this was found when all ranks had left, so nobody could be asked")
    return tr("this is the view of one rank: it could not agree with the others")


def as_text(incident: Incident, evidence: Sequence[str] = ()) -> str:
    """Return the incident as several lines, in the language of this process.

    Control characters that came from other programs' messages are escaped. `evidence` is what other witnesses say, for
    the report.
    """
    blamed, placed = frozenset(incident.culprits), incident.placed()
    culprits = [report for report in incident.ranks if report.rank in blamed]
    meaning = meaning_of(incident.cause, [report for report in culprits if report.cause is incident.cause])
    cause = told("cause: {cause}, {meaning}", cause=both(incident.cause), meaning=meaning)
    lines = [f"ncclguard incident {incident.id}: {read(incident.summary)}", f"  {cause}"]
    groups = alike(culprits) if placed.told else [[report] for report in culprits]
    if len(groups) > SHOWN_GROUPS:
        groups.sort(key=lambda group: not (group[0].stack or group[0].exception))
    for group in groups[:SHOWN_GROUPS]:
        lines += _culprit(group, placed)
    rest = [report for group in groups[SHOWN_GROUPS:] for report in group]
    repeated = [report.rank for report in rest if _same_stack(report) is not None]
    if repeated:
        same = told("and {ranks}, each at the same place as a rank above: see to_json()", ranks=placed.text(repeated))
        lines.append(f"  {same}")
    if len(rest) > len(repeated):
        others = placed.text({report.rank for report in rest} - {*repeated})
        lines.append(f"  {told('and {ranks}: see to_json()', ranks=others)}")
    unreported = sorted(blamed - {report.rank for report in culprits})
    if unreported:
        lines.append(f"  {told('{ranks}: nothing more is known', ranks=placed.text(unreported))}")
    lines += _sides(incident.sides, placed)
    lines += _waiting([report for report in incident.ranks if report.rank not in blamed], placed)
    if incident.cause is Cause.DIVERGED:
        lines += _ended(report for report in incident.ranks if report.rank not in blamed)
    lines.append(f"  {told('time: {figures}', figures=_time(incident))}")
    steps = optimizer_steps(incident)
    if steps is not None:
        lines.append(f"  {said(steps)}")
    lines += [f"  {told('then: {change}', change=change.text)}" for change in incident.afterwards]
    if incident.torn:
        lines.append(f"  {told('the tensor is torn: it holds neither its input nor the result')}")
    if not incident.agreed:
        lines.append(f"  {say(view_of_one(incident))}")
    if incident.device is not None:
        lines.append(f"  {told('device: {device}', device=incident.device)}")
    lines += [f"  {_indented(line)}" for line in evidence]
    lines.append(f"  {what_to_do(read(incident.advice))}")
    if incident.further:
        lines.append(f"  {told('next time: {advice}', advice=read(incident.further))}")
    about = told(
        "(operation {op_id}, group {group}, generation {generation})",
        op_id=incident.op_id,
        group=incident.group,
        generation=incident.generation,
    )
    lines.append(f"  {about}")
    return "\n".join(lines).translate(_CONTROL)


def both(cause: Cause) -> str:
    """The word for a cause and, in another language, the one that data and documents have."""
    word = say(WORD[cause])
    return word if word == cause.value else told("{cause} ({details})", cause=word, details=cause.value)


def what_to_do(advice: str = "") -> str:
    """The line of an incident's text that says what to do; without the advice, how that line begins."""
    return told("what to do: {advice}", advice=advice)


def _time(incident: Incident) -> Message:
    passed = tr("deadline passed") if incident.deadline_expired else tr("deadline not passed")
    if incident.timeout is not None:
        passed = tr("limit {time}, {passed}", time=duration(incident.timeout), passed=passed)
    parts = [passed, tr("tries: {count}", count=incident.attempts)]
    if incident.decided_after is not None:
        parts.append(tr("decided in {time}", time=duration(incident.decided_after)))
    return joined("; ", parts)


def optimizer_steps(incident: Incident) -> Message | None:
    """Return after how many optimizer steps it happened; None where there were none, or that is not known."""
    ranks: dict[int, list[int]] = {}
    for report in incident.ranks:
        if report.steps is not None:
            ranks.setdefault(report.steps, []).append(report.rank)
    if not ranks:
        return None
    *behind, most = sorted(ranks)
    seen = tr("optimizer steps seen: {count}", count=most)
    if not behind or len(behind) > SHOWN_GROUPS:
        return seen
    others = [tr("{ranks}: {count}", ranks=ranks_text(ranks[steps]), count=steps) for steps in behind]
    return tr("{steps} ({others})", steps=seen, others=joined("; ", others))


def _same_stack(report: RankReport) -> int | None:
    """The rank whose stack a report's note says that this rank shares."""
    _, same, first = (report.note or "").partition(SAME_STACK)
    return int(first) if same and first.isdecimal() else None


def alike(reports: Sequence[RankReport]) -> list[list[RankReport]]:
    """Ranks that say the same of themselves, but for their host and process and what others saw of them."""
    stacks = {report.rank: report.stack for report in reports}
    found: dict[tuple[object, ...], list[RankReport]] = {}
    for report in reports:
        same = _same_stack(report)
        stack = report.stack if same is None else stacks.get(same, ())
        key = report.cause, report.state, report.exception, report.operation, report.call_site, stack
        found.setdefault(key, []).append(report)
    return list(found.values())


def _culprit(group: Sequence[RankReport], placed: Hosts) -> list[str]:
    """The first of ranks that say the same, and who the others are."""
    report = group[0]
    cause = report.cause or Cause.UNKNOWN
    if len(group) > 1:
        who = placed.text(each.rank for each in group)
        head = told("{ranks}: {cause}; the first, rank {rank}:", ranks=who, cause=WORD[cause], rank=report.rank)
    else:
        host = placed.host(report.rank)
        place = report.place or (told("host {host}", host=host) if host else "")
        who = tr("rank {rank} ({place})", rank=report.rank, place=place) if place else ranks_text([report.rank])
        head = told("{ranks}: {cause}", ranks=who, cause=WORD[cause])
    lines = [f"  {head}"]
    if report.exception:
        lines.append(f"    {told('raised {exception}', exception=_indented(report.exception))}")
    if report.note:
        lines.append(f"    {_indented(read(report.note))}")
    if report.operation:
        line = tr("in {operation}", operation=report.operation)
        line = line if report.inside else tr("last was in {operation}", operation=report.operation)
        lines.append(f"    {said(_since(_called(line, report.call_site), report.age if report.inside else None))}")
    if report.stack:
        left_out = len(report.stack) - SHOWN_FRAMES
        shown, own = report.stack[-SHOWN_FRAMES:], innermost_of_program(report.stack)
        if own is not None and own < left_out:
            left_out -= 1
            shown = (report.stack[own] if own == left_out else f"{report.stack[own]} ...", *shown)
        thread = tr("main thread") if report.thread is None else tr("thread {name}", name=repr(report.thread))
        stack = told("{thread}, innermost last:", thread=thread)
        if left_out > 0:
            stack = told("{thread}, innermost last ({count} outer frames left out):", thread=thread, count=left_out)
        lines += [f"    {stack}", *(f"      {_indented(frame_text(frame))}" for frame in shown)]
        if len(report.threads) > 1:
            lines.append(f"    {told('and {count} other threads: see to_json()', count=len(report.threads))}")
        elif report.threads:
            lines.append(f"    {told('and 1 other thread: see to_json()')}")
    elif cause in (Cause.LATE, Cause.DIVERGED) and _same_stack(report) is None:
        lines.append(f"    {told('stack: unknown, the rank sent none')}")
    return lines


def _called(line: Message, call_site: str | None) -> Message:
    return tr("{where}, called at {call_site}", where=line, call_site=call_site) if call_site else line


def _since(line: Message, age: float | None) -> Message:
    return line if age is None else tr("{where}, for {time}", where=line, time=duration(age))


def _sides(sides: Sequence[tuple[str, tuple[int, ...]]], placed: Hosts) -> list[str]:
    lines = [f"  {said(called(placed.text(ranks), text))}" for text, ranks in sides[:SHOWN_GROUPS]]
    if len(sides) > SHOWN_GROUPS:
        lines.append(f"  {told('and {count} further calls: see to_json()', count=len(sides) - SHOWN_GROUPS)}")
    return lines


def _ended(reports: Iterable[RankReport]) -> list[str]:
    """Return how processes have ended that are not to blame: gloo aborts one that is sent more than it expects."""
    ended = [report for report in reports if report.state == "departed" and report.cause is None]
    notes = [report.note for report in ended if report.note and "killed by" in report.note]
    return [f"  {told('ended since: {note}', note=read(note))}" for note in notes[:SHOWN_GROUPS]]


def _waiting(reports: Sequence[RankReport], placed: Hosts) -> list[str]:
    """Return what the ranks that are not to blame were in, and for how long; ranks in the same place share a line."""
    places: dict[tuple[str, str], list[RankReport]] = {}
    for report in reports:
        if report.inside:
            places.setdefault((report.operation or "", report.call_site or ""), []).append(report)
    lines = []
    for (operation, call_site), group in sorted(places.items(), key=lambda item: -len(item[1]))[:SHOWN_GROUPS]:
        ages = [report.age for report in group if report.age is not None]
        waiting = tr("waiting")
        if ages:
            longest = duration(max(ages))
            several = len(group) > 1
            waiting = (
                tr("waiting for up to {time}", time=longest) if several else tr("waiting for {time}", time=longest)
            )
        where = tr("in {operation}", operation=operation or tr("the operation"))
        who = placed.text(report.rank for report in group)
        line = tr("{waiting}: {ranks} {where}", waiting=waiting, ranks=who, where=where)
        if placed.told:
            line = tr("{waiting}: {ranks}, {where}", waiting=waiting, ranks=who, where=where)
        lines.append(f"  {said(_called(line, call_site))}")
    if len(places) > SHOWN_GROUPS:
        more = told("and ranks waiting in {count} further places: see to_json()", count=len(places) - SHOWN_GROUPS)
        lines.append(f"  {more}")
    silent = [report.rank for report in reports if report.state == "silent"]
    if silent:
        lines.append(f"  {told('no answer from {ranks}', ranks=placed.text(silent))}")
    return lines


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n      ")
