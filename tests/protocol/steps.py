"""What a single step of a rank does to a state of the model, and the numbers that stand for its values."""

from __future__ import annotations

from dataclasses import dataclass

from ncclguard.protocol.decision import Phase, Report, Verdict
from tests.protocol.process import IN_CALL, Broken, Call, Driver, Label, Process, Step, mask
from tests.protocol.shared import Shared, put, returned

State = tuple[int, ...]
#: Faults that cost one of the budget each.
FAULTS = ("crash", "stop", "reset", "deadline", "raise", "exit", "give up")


@dataclass(frozen=True)
class Job:
    """What is explored: one program per rank, how many faults of which kinds."""

    programs: tuple[tuple[Call, ...], ...]
    faults: int
    kinds: tuple[str, ...] = FAULTS
    odd: int = 0  # ranks whose program differs, as a bit mask: they may be named for it
    reduced: bool = True

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(len(self.programs)))


class Info:
    """What choosing the next step needs of a process, once computed."""

    __slots__ = (
        "alive",
        "at",
        "attempt",
        "completed",
        "due",
        "frozen",
        "generation",
        "group",
        "in_call",
        "index",
        "lengths",
        "over",
        "participants",
        "sequence",
        "troubled",
    )  # fmt: skip

    def __init__(self, process: Process, driver: Driver) -> None:
        member = process.member
        self.at = process.at
        self.alive = process.at not in ("end", "dead")
        self.in_call = process.at in IN_CALL
        self.frozen = member.frozen
        self.troubled = member.trouble is not None
        self.generation = member.generation
        self.attempt = driver.channel(process.generation)
        self.lengths = {generation: len(labels) for generation, labels in process.logs}
        self.index = self.lengths.get(self.attempt, 0)
        self.group = process.group
        self.over = process.call >= len(driver.program)
        self.participants = member.participants
        self.sequence = member.operation.sequence if member.operation is not None else 0
        self.completed = member.completed
        self.due = self.sequence or member.next_sequence  # the operation whose result is returned here next


class Steps:
    """Every step of a rank is computed once by the production code and remembered by number."""

    driver_class: type[Driver] = Driver

    def __init__(self, job: Job) -> None:
        self.job = job
        self.members = job.members
        self.everybody = mask(self.members)
        self.drivers = [self.driver_class(rank, self.members, job.programs[rank]) for rank in self.members]
        self.processes: list[Process] = []
        self.infos: list[Info] = []
        self._process_ids: dict[Process, int] = {}
        self.shareds: list[Shared] = []
        self._shared_ids: dict[Shared, int] = {}
        self.reports: list[Report] = []
        self._report_ids: dict[object, int] = {}
        self.verdicts: list[Verdict] = []
        self._verdict_ids: dict[object, int] = {}
        self._steps: dict[tuple[object, ...], tuple[int, Step]] = {}

    def start(self) -> State:
        processes = [self.process_id(driver.start(), rank) for rank, driver in enumerate(self.drivers)]
        return (*processes, self.shared_id(Shared(self.job.faults, reports=(-1,) * len(self.members))))

    def describe(self, state: State) -> str:
        """For people: the state behind the numbers."""
        lines = [
            f"  rank {rank}: {self.processes[state[rank]]._replace(snapshot=None)} {self.processes[state[rank]].member}"
            for rank in self.members
        ]  # type: ignore[arg-type]
        return "\n".join([*lines, f"  {self.shareds[state[-1]]}"])

    def _own(self, state: State, rank: int, name: str, *arguments: object, shared: Shared | None = None) -> State:
        """A step of one rank's caller."""
        if shared is None:
            shared = self.shareds[state[-1]]
        number, step = self._step(state[rank], rank, name, *arguments)
        if step.revoke and self.infos[number].generation == shared.top:
            shared = shared._replace(revoked=True)
        if step.result is not None:
            shared = returned(shared, rank, step.result)
            if step.result.ok and step.result.closing:
                self._check_closed(state, rank, step.result.sequence)
        after = [*state[:-1]]
        after[rank] = number
        return self._tidy(after, shared)

    def _check_closed(self, state: State, rank: int, sequence: int) -> None:
        """DONE anywhere means READY everywhere."""
        for other in self.processes[state[rank]].group:
            process = self.processes[state[other]]
            member = process.member
            if process.at in ("dead", "end") or member.generation > self.processes[state[rank]].generation:
                continue  # gone, or bound by a verdict, which `_write` has checked
            operation = member.operation
            ready = operation is not None and operation.sequence == sequence and member.phase is Phase.READY
            if not ready and member.completed < sequence:
                raise Broken(f"rank {rank} is DONE with operation {sequence}, rank {other} not READY: {member}")

    def _hear(self, state: State, rank: int) -> State:
        shared = self.shareds[state[-1]]
        number, step = self._step(state[rank], rank, "hear")
        assert step.report is not None
        reports = list(shared.reports)
        reports[rank] = self.report_id(step.report)
        shared = shared._replace(reports=tuple(reports))
        return self._shown(state, rank, number, step, shared)

    def _adopt(self, state: State, rank: int) -> State:
        shared = self.shareds[state[-1]]
        info = self.infos[state[rank]]
        verdict = self._verdict_for(shared, rank, info.generation)
        donated = dict(shared.results).get(info.sequence, 0)
        number, step = self._step(state[rank], rank, "adopt", verdict, donated)
        if step.revoke and self.infos[number].generation == shared.top:
            shared = shared._replace(revoked=True)
        if step.result is not None:
            shared = returned(shared, rank, step.result)
        after = [*state[:-1]]
        after[rank] = number
        return self._tidy(after, shared)

    def _verdict_for(self, shared: Shared, rank: int, generation: int) -> int:
        return dict(shared.verdicts)[generation]

    def _end(self, state: State, rank: int, shared: Shared) -> State:
        number, step = self._step(state[rank], rank, "end")
        return self._shown(state, rank, number, step, shared)

    def _crash(self, state: State, rank: int, infos: list[Info], shared: Shared) -> State:
        info = infos[rank]
        if info.at == "close" and self._may_pass(infos, info):
            _, step = self._step(state[rank], rank, "passed", self._same(state, info))
            if step.result is not None:  # it may have returned just before
                shared = returned(shared, rank, step.result)
        number, step = self._step(state[rank], rank, "crash")
        return self._shown(state, rank, number, step, shared)

    def _may_pass(self, infos: list[Info], info: Info) -> bool:
        """Whether everybody has sent what this rank waits in."""
        attempt, index = info.attempt, info.index
        return all(infos[other].lengths.get(attempt, 0) >= index for other in info.group)

    def _same(self, state: State, info: Info) -> bool:
        labels: set[Label] = {self.processes[state[other]].log(info.attempt)[info.index - 1] for other in info.group}
        if len({label[0] for label in labels}) > 1:
            raise Broken(f"a round met data: {labels}")
        return len(labels) == 1

    def _shown(self, state: State, rank: int, number: int, step: Step, shared: Shared) -> State:
        if step.donation is not None:
            sequence, total = step.donation
            # Overwrites: after a shrink the operation is done again, and a donor that is gone may have left the first result.
            shared = shared._replace(results=put(shared.results, sequence, total))
        after = [*state[:-1]]
        after[rank] = number
        return self._tidy(after, shared)

    def _step(self, number: int, rank: int, name: str, *arguments: object) -> tuple[int, Step]:
        key = (number, name, *arguments)
        known = self._steps.get(key)
        if known is None:
            process = self.processes[number]
            if name == "adopt":
                verdict, donated = arguments
                assert isinstance(verdict, int)
                arguments = (self.verdicts[verdict], donated)
            step = getattr(self.drivers[rank], name)(process, *arguments)
            known = self._steps[key] = (self.process_id(step.process, rank), step)
        return known

    def _tidy(self, numbers: list[int], shared: Shared) -> State:
        """Forget what nobody can read any more: sent collectives and verdicts of generations that everybody has left."""
        oldest = min((self.infos[n].generation for n in numbers if self.infos[n].alive), default=shared.top)
        if shared.verdicts and shared.verdicts[0][0] < oldest:
            shared = shared._replace(verdicts=tuple(pair for pair in shared.verdicts if pair[0] >= oldest))
        if shared.records or shared.results:
            due = min((self.infos[n].due for n in numbers if self.infos[n].alive), default=1 << 30)
            if (shared.records and shared.records[0][0] < due) or (shared.results and shared.results[0][0] < due):
                shared = shared._replace(
                    records=tuple(pair for pair in shared.records if pair[0] >= due),
                    results=tuple(pair for pair in shared.results if pair[0] >= due),
                )
        for rank, number in enumerate(numbers):
            if any(generation < oldest for generation in self.infos[number].lengths):
                numbers[rank] = self._pruned(number, rank, oldest)
        return (*numbers, self.shared_id(shared))

    def _pruned(self, number: int, rank: int, oldest: int) -> int:
        key = (number, "prune", oldest)
        known = self._steps.get(key)
        if known is None:
            process = self.processes[number]
            process = process._replace(logs=tuple(pair for pair in process.logs if pair[0] >= oldest))
            known = self._steps[key] = (self.process_id(process, rank), Step(process))
        return known[0]

    # ------------------------------------------------------------------ numbers for values

    def process_id(self, process: Process, rank: int) -> int:
        number = self._process_ids.get(process)
        if number is None:
            number = self._process_ids[process] = len(self.processes)
            self.processes.append(process)
            self.infos.append(Info(process, self.drivers[rank]))
        return number

    def shared_id(self, shared: Shared) -> int:
        number = self._shared_ids.get(shared)
        if number is None:
            number = self._shared_ids[shared] = len(self.shareds)
            self.shareds.append(shared)
        return number

    def report_id(self, report: Report) -> int:
        key = (
            report.rank, report.generation, report.done, report.operation, report.phase, report.first_incomplete,
            report.restorable_from, report.attempt, report.trouble,
        )  # fmt: skip
        number = self._report_ids.get(key)
        if number is None:
            number = self._report_ids[key] = len(self.reports)
            self.reports.append(report)
        return number

    def verdict_id(self, verdict: Verdict) -> int:
        number = self._verdict_ids.get(verdict)
        if number is None:
            number = self._verdict_ids[verdict] = len(self.verdicts)
            self.verdicts.append(verdict)
        return number
