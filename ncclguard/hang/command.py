"""`ncclguard hang`: the command line."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pwd
import re
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence, Set as AbstractSet
from pathlib import Path

from ncclguard.arguments import assignment, positive_seconds, whole_from
from ncclguard.hang.hosts import ask, ask_ray, call_here, kubectl_hosts, slurm_hosts, ssh_hosts
from ncclguard.hang.launches import Launches
from ncclguard.hang.looks import NO_RIGHT, Lines, Look, find_spy, helper_places, is_doubtful, look, observe
from ncclguard.hang.names import names_of
from ncclguard.hang.processes import (
    LOOPBACK,
    Job,
    Process,
    ancestors,
    find_jobs,
    hidden_ranks,
    read_processes,
    with_late,
    with_ranks,
    without,
    without_servers,
)
from ncclguard.hang.report import (
    EndedRow,
    HangReport,
    HostTrouble,
    JobReport,
    NothingToReport,
    RankRow,
    judged,
    text_of,
)
from ncclguard.hang.sockets import groups_of_calls, tcp_sockets
from ncclguard.hang.stacks import Kind
from ncclguard_explain.command_line import Parser, Tell, described, progress
from ncclguard_explain.language import Message, say, speaking_to, told, tr

NAMED, UNUSABLE, NOBODY = 1, 2, 3
EXIT_CODES = {
    0: "jobs were found and looked at; with --exit-code: none of them stands",
    NAMED: "with --exit-code: a rank is named",
    UNUSABLE: "no job was found, or an input cannot be used, or the report cannot be written",
    NOBODY: "with --exit-code: a job stands, and nobody can be named",
}
EXAMPLES = {
    "ncclguard hang": "on a host of the job that hangs",
    "ncclguard hang --exit-code --json hang.json": "for a script",
    "ncclguard hang --slurm 42": "on all nodes of a job of Slurm",
    "ncclguard hang --kubectl 'job-name=train -n training'": "in all pods with these labels",
    "ncclguard hang --ssh gpu-01,gpu-02": "on these hosts",
    "ncclguard hang --ray": "on all nodes of the Ray cluster that this host belongs to",
    "ncclguard hang --watch 60": "each minute, until the job has stopped moving",
    "ncclguard hang --collect /shared/job-42": "on each host of a job, as in srun --overlap --ntasks-per-node=1",
    "ncclguard hang /shared/job-42": "then once: one verdict for all hosts",
}
#: Seconds between the first two looks, and from the first to the last one, before a rank is named that has not ended.
BETWEEN = 1.0
SECONDS = 2.5
LAST = 2
_OF_A_PROCESS = re.compile(r" \(\d+\)")
#: How many processes that a named rank has started are looked at, and in which places it waits for them.
HELPERS = 4
_FOR_HELPERS = (Kind.LOADER, Kind.CHILD)


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    made = Parser(
        prog="ncclguard hang",
        description="Find the ranks of the jobs that run on this host, look at each twice, a second apart, and say which "
        "rank holds up its job and where it stands. Nothing has to be prepared in the job, and nothing stops or signals it.",
    )
    made.add_argument("paths", nargs="*", metavar="PATH", help="what --collect has written: a folder, or files")
    made.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - for stdout, which then holds nothing else"
    )
    made.add_argument(
        "--pid",
        type=whole_from(1),
        action="append",
        metavar="PID",
        help="look only at the jobs of this rank or launcher; again for more",
    )
    made.add_argument(
        "--environ",
        type=assignment,
        metavar="NAME=VALUE",
        help="look only at ranks that were started with this variable",
    )
    where = made.add_mutually_exclusive_group()
    where.add_argument("--slurm", metavar="JOBID", help="look on all nodes of a job of Slurm, by srun --overlap")
    where.add_argument("--kubectl", metavar="SELECTOR",
                       help="look in all pods with these labels, by kubectl exec; options of kubectl may follow them")  # fmt: skip
    where.add_argument("--ssh", metavar="HOSTS", help="look on these hosts, with commas between them")
    where.add_argument("--ray", metavar="ADDRESS", nargs="?", const="auto",
                       help="look on all nodes of a Ray cluster, by a task on each; without ADDRESS of this host's cluster")  # fmt: skip
    made.add_argument("--call", metavar="COMMAND",
                      help="how ncclguard is called on the other hosts; in pods `ncclguard`, else as this one was")  # fmt: skip
    made.add_argument("--watch", type=positive_seconds, metavar="SECONDS",
                      help="look again every so many seconds, and report once a job stands where it stood before")  # fmt: skip
    made.add_argument("--exit-code", action="store_true", help="return what was found as exit code, for scripts")
    made.add_argument(
        "--collect", metavar="DIR", help="write what is seen on this host to a file in DIR, for a report on all hosts"
    )
    made.add_argument("--seconds", type=positive_seconds, default=SECONDS, metavar="S",
                      help=tr("how long ranks have to stand still before one is named ({seconds:g} by default)", "help", seconds=SECONDS))  # fmt: skip
    return described(made, EXAMPLES, EXIT_CODES)


def look_here(
    seconds: float = SECONDS, tell: Tell | None = None, pids_of: AbstractSet[int] | None = None, variable: str = ""
) -> HangReport:
    """Look at the jobs of this host, for up to some seconds, and return the report.

    `pids_of` chooses jobs by ranks or launchers, `variable` by one that they were started with, as NAME=VALUE.

    Raises:
        NothingToReport: no job of this user runs here.
    """
    tell = tell or (lambda text: None)
    tell(told("looking for ranks"))
    processes = read_processes()
    jobs = find_jobs(processes)
    if pids_of is not None:
        jobs = [job for job in jobs if pids_of & _around(job, processes)]
        if not jobs:
            numbers = ", ".join(map(str, sorted(pids_of)))
            refusal = tr(
                "no rank of a job: {numbers}. `ncclguard hang` alone shows all jobs of this host", numbers=numbers
            )
            raise NothingToReport(refusal)
    if variable:
        there = len(jobs)
        jobs = [job for job in jobs if _has(job, variable, processes)]
        if there and not jobs:
            raise NothingToReport(
                tr(
                    "of {count} jobs here none has {variable}. `ncclguard hang` alone shows all",
                    count=there,
                    variable=variable,
                )
            )
    if not jobs:
        raise NothingToReport(_no_job([process.uid for process in hidden_ranks(processes)]))
    pids = [member.process.pid for job in jobs for member in job.members]
    spy, lines = find_spy(), Lines()
    looks: dict[int, list[Look]] = {pid: [] for pid in pids}
    started = time.monotonic()
    report = None
    launches = Launches(member.process.environ or {} for job in jobs for member in job.members)
    unsure = False
    for number, after in enumerate((0.0, BETWEEN, seconds, 2 * seconds)):
        if number > LAST and not unsure:
            break
        tell(told("look {number} at {count} ranks", number=number + 1, count=len(pids)))
        time.sleep(max(started + after - time.monotonic(), 0.0))
        for pid, one in look(pids, spy, lines).items():
            looks[pid].append(one)
        if number == 0:
            servers = {pid for pid, own in looks.items() if _stands_in(own[-1], Kind.MANAGER)}
            jobs = [without_servers(job, servers) for job in jobs]
        jobs = [_with_ranks(job, looks) for job in jobs]
        unsure = any(_is_missed(own) or is_doubtful(own) for own in looks.values())
        if number > LAST:
            looks = {pid: _from_first_place(own) for pid, own in looks.items()}
        if number:
            if gone := {pid for pid, own in looks.items() if _is_gone(own[-1])}:
                processes = read_processes()
                jobs = [without(job, gone, processes) for job in jobs]
            if number == LAST:  # a launcher may be slow to start them all
                jobs = with_late(jobs, find_jobs(read_processes()))
            if any(_stands_in(own[-1], Kind.DEVICE) for own in looks.values()):
                launches.ask()
            report = _report(jobs, looks, spy, launches)
            sure = all(not job.stands or _is_certain(job) for job in report.jobs)
            if sure and not launches.uneven and not unsure:
                break
    assert report is not None
    return _with_helpers(report, jobs, spy, lines)


def _with_ranks(job: Job, looks: Mapping[int, Sequence[Look]]) -> Job:
    if not job.counted:
        return job
    last = {one.process.pid: looks[one.process.pid][-1] for one in job.members}
    places = {pid: one.place for pid, one in last.items() if one.place is not None and one.place.world}
    groups = {pid: place.group for pid, place in places.items() if place.group is not None}
    return with_ranks(job, groups, {pid: one.rank for pid, one in last.items() if one.rank is not None})


def _has(job: Job, variable: str, processes: Mapping[int, Process]) -> bool:
    """Tell whether a rank, or what has started it, has a variable: titles are written over those of the rank itself."""
    name, _, value = variable.partition("=")
    around = [processes[pid] for pid in _around(job, processes) if pid in processes]
    return any((one.environ or {}).get(name) == value for one in around)


def _is_certain(job: JobReport) -> bool:
    """Tell whether two looks are enough: the named ranks have ended, with exit codes."""
    codes = {row.rank: row.exit_code for row in job.ended}
    return bool(job.culprits) and all(codes.get(rank) is not None for rank in job.culprits)


def _is_missed(own: Sequence[Look]) -> bool:
    """Tell whether the first or the last look at a rank found no place of it, as py-spy may on a busy host."""
    seen = [one.place is not None for one in own]
    return any(seen) and not (seen[0] and seen[-1]) and not _is_gone(own[-1])


def _from_first_place(own: Sequence[Look]) -> list[Look]:
    return list(itertools.dropwhile(lambda one: one.place is None, own)) or list(own)


def _is_gone(last: Look) -> bool:
    """Tell whether a process has ended, or is only what a rank that has ended had started."""
    ended = last.counters is None or last.counters.state in "ZX"
    return ended or _stands_in(last, Kind.WORKER, Kind.MANAGER)


def _stands_in(last: Look, *kinds: Kind) -> bool:
    return last.place is not None and last.place.kind in kinds


def _around(job: Job, processes: Mapping[int, Process]) -> set[int]:
    """Return the ranks of a job, what has started them, and what they have started."""
    return {
        pid
        for member in job.members
        for pid in (member.process.pid, *member.helpers, *ancestors(member.process, processes))
    }


def _with_helpers(report: HangReport, jobs: Sequence[Job], spy: str | None, lines: Lines) -> HangReport:
    """Return the report with where the processes stand that a named rank waits for: its data loader's, say."""
    made = []
    for told_of, job in zip(report.jobs, jobs, strict=True):
        notes = list(told_of.notes)
        waits = {row.rank for row in told_of.ranks if row.rank in told_of.culprits and row.kind in _FOR_HELPERS}
        for member in job.members if spy is not None else ():
            if member.rank in waits:
                notes += [
                    tr(
                        "process {pid}, which {ranks} started, is at {place}",
                        pid=pid,
                        ranks=names_of([member.rank]),
                        place=at,
                    )
                    for pid, at in helper_places(member.helpers[:HELPERS], spy or "", lines)
                ]
        made.append(told_of.model_copy(update={"notes": tuple(notes)}))
    return report.model_copy(update={"jobs": tuple(made)})


def _report(jobs: Sequence[Job], looks: dict[int, list[Look]], spy: str | None, launches: Launches) -> HangReport:
    host = socket.gethostname()
    reports = []
    for job in jobs:
        rows = []
        seconds = 0.0
        for member in job.members:
            own = looks[member.process.pid]
            seen = observe(own)
            seconds = max(seconds, own[-1].when - own[0].when)
            place = seen.place
            told = {} if place is None else {name: getattr(place, name) for name in place.__dataclass_fields__}
            rows.append(
                RankRow(rank=member.rank, host=host, pid=member.process.pid, state=seen.state, motion=seen.motion,
                        trouble=seen.trouble, gloo=seen.gloo, watched=any(one.watched for one in own), **told)
            )  # fmt: skip
        rows = _with_members(rows, job)
        ended = [EndedRow(rank=one.rank, host=host, exit_code=one.code) for one in job.ended]
        notes = [*job.notes, *_limits(rows, spy)]
        if any(row.kind is Kind.DEVICE for row in rows):
            notes += launches.troubles
        pids = {row.pid for row in rows}
        uneven = [one for one in launches.standing if pids & set(one.pids)]
        reports.append(judged(job.name, job.world_size, rows, ended, seconds, notes, uneven, job.counted))
    return HangReport(hosts=(host,), jobs=tuple(reports))


def _with_members(rows: Sequence[RankRow], job: Job) -> list[RankRow]:
    """Return the rows with the members of their groups, where what was read agrees with the ranks of the job."""
    size = job.world_size
    wrong = any(row.group[1] > size or (row.world and row.group != (row.rank, size)) for row in rows if row.group)
    if wrong and not job.counted:
        return [row.model_copy(update={"group": None}) for row in rows]
    inside = [row for row in rows if row.kind in (Kind.COLLECTIVE, Kind.BACKWARD)]
    known = {row.rank: row.group for row in inside if row.group or (row.kind is Kind.BACKWARD and row.gloo)}
    if not inside or job.counted or len(rows) < size:
        return list(rows)
    found, groups = groups_of_calls({row.rank: row.pid for row in rows}, known, tcp_sockets())
    if {len(members) for members in groups} == {size}:  # then DDP is of all ranks too
        found |= {
            row.rank: next(iter(groups)) for row in inside if row.of_ddp and row.gloo and row.kind is Kind.COLLECTIVE
        }
    return [
        row.model_copy(update={"members": tuple(sorted(members))}) if (members := found.get(row.rank)) else row
        for row in rows
    ]


def _limits(rows: Sequence[RankRow], spy: str | None) -> list[Message]:
    """Return what could not be seen and how to see it, a sentence each."""
    if spy is None:
        return [
            tr(
                "Without py-spy no stack can be read, only whether a process runs, is stopped or has ended: pip install py-spy (or ncclguard[hang])."
            )
        ]
    if any(str(row.trouble) == str(NO_RIGHT) for row in rows):
        return [
            tr(
                "This user may not read the memory of these processes: run it as root, or allow it (kernel.yama.ptrace_scope=0; in a container the capability SYS_PTRACE)."
            )
        ]
    return []


def _no_job(owners: Sequence[int]) -> Message:
    if owners:
        uid = owners[0]
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            name = str(uid)
        return tr(
            "ranks of {name} run here ({count} of them), and may not be looked at from here: look as {name}; in a container that needs the capability SYS_PTRACE",
            name=name,
            count=len(owners),
        )
    return tr(
        "no job runs here: no process has a rank and a world size in its environment. Run it on a host of the job, and inside of its container"
    )


def collect(report: HangReport, folder: Path) -> Path:
    """Write what was seen on this host into a folder that all hosts share, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{report.hosts[0]}-{os.getpid()}.json"
    part = file.with_suffix(".part")
    part.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    part.replace(file)
    return file


def merged(paths: Sequence[Path]) -> HangReport:
    """Return one report of what was collected on several hosts.

    Raises:
        NothingToReport: there is nothing to read, or a file is not what `--collect` writes.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if not files:
        text = tr(
            "{place}: nothing has been collected there: `ncclguard hang --collect DIR` on each host",
            place=str(paths[0]),
        )
        raise NothingToReport(text)
    reports = []
    for file in files:
        try:
            reports.append(HangReport.model_validate(json.loads(file.read_text(encoding="utf-8"))))
        except OSError as error:
            refusal = tr("{place}: cannot be read: {error}", place=str(file), error=error.strerror)
            raise NothingToReport(refusal) from error
        except ValueError as error:
            raise NothingToReport(tr("{place}: not what `ncclguard hang --collect` writes", place=str(file))) from error
    return together(reports)


def together(reports: Sequence[HangReport]) -> HangReport:
    """Return one report of those of several hosts, with one verdict on each job."""
    parts: dict[tuple[str, int, tuple[str, ...]], list[JobReport]] = {}
    for report in reports:
        for job in report.jobs:
            # Jobs of two hosts, though they have one name: this has a loopback address, or a process of the host.
            own = job.name.partition(":")[0] in LOOPBACK or job.counted or _OF_A_PROCESS.search(job.name)
            parts.setdefault((job.name, job.world_size, report.hosts if own else ()), []).append(job)
    jobs = []
    for (name, size, _), same in parts.items():
        rows = {row.rank: row for job in same for row in job.ranks}
        ended = {row.rank: row for job in same for row in job.ended}
        notes = dict.fromkeys(note for job in same for note in job.notes)
        communicators = {one.hash: one for job in same for one in job.communicators}
        jobs.append(judged(name, size, list(rows.values()), list(ended.values()),
                           min(job.seconds for job in same), list(notes), list(communicators.values()),
                           any(job.counted for job in same)))  # fmt: skip
    hosts = dict.fromkeys(host for report in reports for host in report.hosts)
    silent = tuple(one for report in reports for one in report.silent)
    return HangReport(hosts=tuple(hosts), jobs=tuple(jobs), silent=silent)


def look_there(arguments: argparse.Namespace, seconds: float, tell: Tell) -> HangReport:
    """Have the hosts look that `--slurm`, `--kubectl`, `--ssh` or `--ray` mean, and return one report.

    Raises:
        NothingToReport: there are no such hosts, or none of them has seen a rank.
    """
    call = shlex.split(arguments.call) if arguments.call else call_here()
    look = ["hang", "--json", "-", "--seconds", f"{seconds:g}"]
    look += ["--environ", arguments.environ] if arguments.environ else []
    if arguments.ray:
        tell(told("the nodes of the Ray cluster look at their ranks"))
        return _of_hosts(*ask_ray(arguments.ray, [*call, *look], seconds))
    if arguments.slurm:
        hosts = slurm_hosts(arguments.slurm, [*call, *look])
    elif arguments.kubectl:
        hosts = kubectl_hosts(arguments.kubectl, [*(call if arguments.call else ["ncclguard"]), *look])
    else:
        hosts = ssh_hosts(arguments.ssh, [*call, *look])
    tell(told("{count} hosts look at their ranks", count=len(hosts)))
    return _of_hosts(*ask(hosts, seconds))


def _of_hosts(reports: Sequence[HangReport], silent: Sequence[HostTrouble]) -> HangReport:
    if not reports:
        first = silent[0] if silent else None
        text = tr(
            "none of {count} hosts has seen a rank; {host}: {trouble}",
            count=len(silent),
            host=first.host if first else "",
            trouble=first.trouble if first else "",
        )
        raise NothingToReport(text)
    return together(reports).model_copy(update={"silent": tuple(silent)})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    elsewhere = arguments.slurm or arguments.kubectl or arguments.ssh or arguments.ray
    if elsewhere and arguments.pid:
        parser.error(tr("--pid is a process of this host: it cannot be given with --slurm, --kubectl, --ssh or --ray"))
    if arguments.paths and (elsewhere or arguments.watch is not None):
        parser.error(tr("what was collected is not looked at again: give either PATH, or where to look"))
    try:
        return _run(arguments)
    except NothingToReport as error:
        print(f"ncclguard hang: {say(error.args[0])}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"ncclguard hang: {told('cannot write the report: {error}', error=error)}", file=sys.stderr)
    return UNUSABLE


def _look(arguments: argparse.Namespace) -> HangReport:
    if arguments.paths:
        return merged([Path(path) for path in arguments.paths])
    seconds = max(arguments.seconds, BETWEEN)
    with progress(told("looking for ranks")) as tell:
        if arguments.slurm or arguments.kubectl or arguments.ssh or arguments.ray:
            return look_there(arguments, seconds, tell)
        return look_here(seconds, tell, set(arguments.pid) if arguments.pid else None, arguments.environ or "")


def _watch(arguments: argparse.Namespace) -> HangReport | None:
    """Look again and again until a job has stopped moving, and return that report; None once no job runs any more."""
    before = _look(arguments)
    while not any(_is_certain(job) for job in before.jobs):
        time.sleep(arguments.watch)
        try:
            now = _look(arguments)
        except NothingToReport:
            return None
        stood = {(job.name, job.groups) for job in before.jobs if job.stands}
        if any(job.stands and (job.name, job.groups) in stood for job in now.jobs):
            return now
        before = now
    return before


def _run(arguments: argparse.Namespace) -> int:
    if arguments.watch is not None:
        report = _watch(arguments)
        if report is None:
            print(f"ncclguard hang: {told('the job has ended, or has left this host')}", file=sys.stderr)
            return 0
    else:
        report = _look(arguments)
    with speaking_to(sys.stdout):
        if arguments.collect is not None:
            file = collect(report, Path(arguments.collect))
            print(
                told("{count} ranks of this host are in {place}", count=_ranks(report), place=str(file)),
                file=sys.stderr,
            )
        if arguments.json is not None:
            text = report.model_dump_json(indent=2) + "\n"
            if arguments.json == "-":
                sys.stdout.write(text)
            else:
                Path(arguments.json).write_text(text, encoding="utf-8")
        if arguments.json != "-" and arguments.collect is None:
            for line in text_of(report):
                print(line)
    if not arguments.exit_code:
        return 0
    if any(job.culprits for job in report.jobs):
        return NAMED
    return NOBODY if any(job.stands and not job.awaited for job in report.jobs) else 0


def _ranks(report: HangReport) -> int:
    return sum(len(job.ranks) for job in report.jobs)
