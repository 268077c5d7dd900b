"""The hosts of a job, each of which is asked to look at its own ranks: by srun, `kubectl exec`, ssh or Ray."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from ncclguard.hang.report import HangReport, HostTrouble, NothingToReport
from ncclguard_explain.language import Message, tr

#: Seconds for a list of hosts, and for an answer beyond the seconds that a host looks at its ranks.
LIST_WITHIN: Final = 30.0
ANSWER_WITHIN: Final = 30.0
AT_ONCE: Final = 64
_PODS: Final = 'jsonpath={range .items[*]}{.metadata.name}{" "}{.status.phase}{"\\n"}{end}'


@dataclass(frozen=True, slots=True)
class Host:
    """A host or pod, and the command that has it look; `trouble` says why it cannot be asked."""

    name: str
    command: tuple[str, ...]
    trouble: Message | str = ""


def slurm_hosts(job: str, call: Sequence[str]) -> list[Host]:
    """Return the nodes of a running job of Slurm; `call` is how ncclguard is called there.

    Raises:
        NothingToReport: Slurm knows no such job, or it does not run.
    """
    nodes = _listed(["squeue", "--noheader", f"--jobs={job}", "--format=%N"])
    if not nodes:
        raise NothingToReport(tr("Slurm job {job} has no nodes: it does not run", job=job))
    step = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", "--input=none", "--quiet"]
    only = ["--environ", f"SLURM_JOB_ID={job}"]  # a node may have ranks of other jobs
    names = [name for part in nodes for name in _listed(["scontrol", "show", "hostnames", part])]
    return [Host(name, (*step, f"--nodelist={name}", *call, *only)) for name in names]


def kubectl_hosts(selector: str, call: Sequence[str]) -> list[Host]:
    """Return the pods that a label selector chooses; words after it are options of kubectl, such as `-n training`.

    Raises:
        NothingToReport: kubectl cannot list pods, or there are none.
    """
    labels, *options = shlex.split(selector) or [""]
    rows = [row.split(" ") for row in _listed(["kubectl", "get", "pods", "-l", labels, *options, "-o", _PODS])]
    if not rows:
        raise NothingToReport(tr("no pod has the labels {labels}", labels=selector))
    return [
        Host(name, ("kubectl", "exec", name, *options, "--", *call),
             "" if phase == "Running" else tr("the pod is {phase}", phase=phase))
        for name, phase in rows
    ]  # fmt: skip


def ssh_hosts(names: str, call: Sequence[str]) -> list[Host]:
    """Return hosts by their names, with commas between them."""
    way = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--")
    return [Host(name, (*way, name, shlex.join(call))) for name in names.split(",") if name]


def call_here() -> list[str]:
    """Return how this ncclguard is called, as a host calls it that has the same files."""
    return [sys.executable, "-m", "ncclguard"]


def _listed(command: Sequence[str], within: float = LIST_WITHIN, program: str = "") -> list[str]:
    """Return the lines that a command prints."""
    program = program or command[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within, check=False)
    except subprocess.TimeoutExpired as error:
        text = tr("{program} did not answer within {seconds:.0f} s", program=program, seconds=within)
        raise NothingToReport(text) from error
    except OSError as error:
        text = tr("{program} cannot be started: {error}", program=program, error=error.strerror)
        raise NothingToReport(text) from error
    if done.returncode:
        raise NothingToReport(tr("{program}: {said}", program=program, said=_last(done.stderr)))
    return [line for line in done.stdout.splitlines() if line.strip()]


def ask(hosts: Iterable[Host], seconds: float) -> tuple[list[HangReport], list[HostTrouble]]:
    """Have all hosts look at the same time, and return what they report, and which of them do not, and why."""
    hosts = list(hosts)
    with ThreadPoolExecutor(max(min(AT_ONCE, len(hosts)), 1)) as pool:
        return _sorted(pool.map(lambda host: _answer(host, seconds + ANSWER_WITHIN), hosts))


def ask_ray(address: str, call: Sequence[str], seconds: float) -> tuple[list[HangReport], list[HostTrouble]]:
    """Return the same of all nodes of a Ray cluster, by one task on each of them.

    Raises:
        NothingToReport: the cluster cannot be reached, or there is no Ray here.
    """
    within = seconds + ANSWER_WITHIN
    command = [sys.executable, "-m", "ncclguard.hang.ray_nodes", address, f"{within:g}", *call]
    rows = _listed(command, LIST_WITHIN + within, "Ray")
    return _sorted(_of_node(json.loads(row), within) for row in rows if row.startswith('{"node": '))


def _of_node(told: dict[str, Any], within: float) -> HangReport | HostTrouble:
    if "out" in told:
        return _report_of(told["node"], told["code"], told["out"], told["err"])
    if "dead" in told:
        return HostTrouble(host=told["node"], trouble=tr("its node of Ray is dead: {said}", said=told["dead"][:200]))
    late = tr("did not answer within {seconds:.0f} s", seconds=within)
    return HostTrouble(host=told["node"], trouble=_last(told.get("failed", "")) or late)


def _sorted(answers: Iterable[HangReport | HostTrouble]) -> tuple[list[HangReport], list[HostTrouble]]:
    answers = list(answers)
    reports = [answer for answer in answers if isinstance(answer, HangReport)]
    return reports, [answer for answer in answers if isinstance(answer, HostTrouble)]


def _answer(host: Host, within: float) -> HangReport | HostTrouble:
    if host.trouble:
        return HostTrouble(host=host.name, trouble=host.trouble)
    try:
        done = subprocess.run(host.command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                              timeout=within, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return HostTrouble(host=host.name, trouble=tr("did not answer within {seconds:.0f} s", seconds=within))
    except OSError as error:
        program = host.command[0]
        said = tr("{program} cannot be started: {error}", program=program, error=error.strerror)
        return HostTrouble(host=host.name, trouble=said)
    return _report_of(host.name, done.returncode, done.stdout, done.stderr)


def _report_of(host: str, code: int, out: str, err: str) -> HangReport | HostTrouble:
    try:  # what a login shell prints stands before it
        return HangReport.model_validate_json(out[max(out.find("{"), 0) :])
    except ValueError:
        return HostTrouble(host=host, trouble=_last(err) or tr("ended with exit code {code}", code=code))


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ncclguard hang: ")[:200] if lines else ""
