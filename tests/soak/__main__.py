"""Random guarded operations with random faults on real ranks, judged from outside: ``python -m tests.soak --seed 1``.

``--minutes 60 --ranks 64`` goes on for an hour; ``--hosts 8 --ranks 32`` has the ranks on network namespaces, of which
one is cut off at times, that of the store too, but for less than the limit then.

Everything is derived from the seed: what each round calls, on which data, which fault strikes whom and when. The ranks
do as the plan of the round says and report what they were told, with checksums of what is in their tensors. The parent
process makes the faults, computes every expected result from the seed by itself, and judges: one verdict on all ranks,
the right name, the right bits, in time, nobody dead that was not killed, nothing written after a call has returned, and
a group that works again afterwards. Only moments differ from run to run, so a round that failed may pass when repeated.

A call may take its limit and 2 s, as documented, and 1 s for a machine with work of its own; to that comes what was
measured in the round: how long the kernel let the calling thread wait for a core, and four times the longest delay that
a thread of this process had in waking up, because a verdict goes through the threads of several processes.

A rank that no fault has struck may be called late only where the limit is short and it was late by its own measure: it
called at least 0.4 of the limit after the first rank, the time included that one of its threads waited for a core. Where
that was half a second or more, it may be called stuck: so long its monitor could not answer.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ncclguard import faults
from ncclguard.faults.hosts import run_tool
from tests.soak.judge import Pulse, judge
from tests.soak.plan import MANY, Plan, plan_of
from tests.soak.ranks import be_a_rank

#: Rounds of one job, unless a kill ends it before.
ROUNDS_OF_A_JOB: Final = 20


def strike(
    plan: Plan, job: faults.Job, folder: Path, ready: Mapping[int, dict[str, Any]], hosts: faults.Hosts | None
) -> None:
    """Let the round begin, and make its fault."""
    number = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}.get(plan.fault)
    if number is not None and plan.delay < 0:
        job.send_signal(plan.victim, number)
    if plan.fault == "cut":
        assert hosts is not None
        hosts.partition(hosts.names[plan.victim])
    start = time.monotonic() + (0.1 if len(ready) <= MANY else 0.5)
    (folder / "part").write_text(repr(start))
    os.replace(folder / "part", folder / f"start{plan.number}")
    time.sleep(max(0.0, start + plan.delay - time.monotonic()))
    if number is not None and plan.delay >= 0:
        job.send_signal(plan.victim, number)
    if plan.fault == "stop":
        time.sleep(plan.seconds)
        job.send_signal(plan.victim, signal.SIGCONT)
    elif plan.fault == "cut":
        assert hosts is not None
        time.sleep(plan.seconds)
        hosts.heal()
    elif plan.fault == "reset":
        faults.reset_connections(job.pid(plan.victim), keep_ports=ready[plan.victim]["keep"])
    elif plan.fault == "half":
        there: list[str] = []
        if hosts is not None:
            there = ["ip", "netns", "exec", hosts.namespace(hosts.names[plan.victim * plan.hosts // len(ready)])]
        for host, port, other, remote in ready[plan.victim]["own"]:
            run_tool([*there, "ss", "-K", "-H", "-n", "-t", "src", f"{host}:{port}", "dst", f"{other}:{remote}"])


def run(
    seed: int,
    rounds: int,
    ranks: int,
    first: int = 0,
    env: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
    hosts: int = 0,
    minutes: float = math.inf,
) -> list[str]:
    """Run the rounds, as many as begin within some minutes; returns what was wrong, a line each.

    After a round that went wrong the next one has a new job.
    """
    failures: list[str] = []
    number, end, until = first, first + rounds, time.monotonic() + 60 * minutes
    while number < end and time.monotonic() < until:
        plans: list[Plan] = []
        while len(plans) < min(ROUNDS_OF_A_JOB, end - number) and not (plans and plans[-1].ends_job):
            plans.append(plan_of(seed, number + len(plans), ranks, hosts))
        done, wrong = one_job(seed, plans, ranks, env, say, until)
        at = plans[done - 1].number
        if wrong:
            again = f"python -m tests.soak --seed {seed} --first {number} --rounds {done} --ranks {ranks}"
            again += f" --hosts {hosts}" if hosts else ""
            failures += [f"seed {seed}, {plans[done - 1]}", *(f"  {line}" for line in wrong), f"  again: {again}"]
        number = at + 1
    return failures


def one_job(
    seed: int, plans: list[Plan], ranks: int, env: Mapping[str, str] | None, say: Callable[[str], None], until: float
) -> tuple[int, list[str]]:
    """How many rounds have been run until then, and what was wrong with the last one or with how the ranks ended."""
    folder, pulse, done = Path(tempfile.mkdtemp(prefix="ncclguard-soak-")), Pulse(), 0
    args = [seed, plans[0].number, plans[-1].number + 1, str(folder), plans[0].hosts]
    limit = 120.0 + (90.0 + 2 * ranks) * len(plans)
    live = list(range(ranks))
    try:
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(faults.Hosts(plans[0].hosts)) if plans[0].hosts else None
            job = stack.enter_context(
                faults.start_ranks(be_a_rank, ranks, args=args, env=env, timeout=limit, hosts=hosts, launcher="fork")
            )
            for plan in plans:
                if done and time.monotonic() > until:
                    return done, []
                done += 1
                ready = job.wait_for(f"ready{plan.number}", live, seconds=90 + 2 * ranks)
                pulse.worst = 0.0
                strike(plan, job, folder, ready, hosts)
                if plan.fault == "kill":
                    live.remove(plan.victim)
                found = job.wait_for(f"done{plan.number}", live, seconds=90 + plan.seconds)
                wrong = judge(seed, plan, ranks, found, pulse.worst)
                ends_ = [outcome_of(found[live[-1]]["calls"][index]) for index in range(len(plan.calls))]
                say(f"{plan} -> {', '.join(ends_)}{' WRONG' if wrong else ''}")
                if wrong:
                    return done, wrong
            result = job.wait(30)
        dead = [rank for rank in result if not rank.ok and (rank.rank in live or rank.end != "SIGKILL")]
        return done, [f"rank {rank.rank} ended with {rank.end}:\n{rank.output[-4000:]}" for rank in dead]
    except faults.RanksFailed as error:
        return max(1, done), [str(error)]
    finally:
        pulse.close()
        shutil.rmtree(folder, ignore_errors=True)


def outcome_of(one: Mapping[str, Any]) -> str:
    if one["ok"]:
        return f"ok in {one['seconds']:.2f} s" + (f", {one['attempts']} tries" if one["attempts"] > 1 else "")
    return f"{one.get('cause')} {one['culprits']} in {one['seconds']:.2f} s"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="default: 100, or as many as there is time for")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no round after so many")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=0, help="network namespaces for the ranks, which it has to divide")
    parser.add_argument("--first", type=int, default=0, help="the first round, to repeat one that failed")
    chosen = parser.parse_args(arguments)
    if chosen.ranks < 2:
        parser.error("--ranks has to be 2 or more")
    if chosen.hosts and (chosen.hosts < 3 or chosen.ranks % chosen.hosts):
        parser.error("--hosts has to be 3 or more, with equally many of the --ranks each")
    missing = needs() or (chosen.hosts and faults.namespaces_available())
    if missing:
        parser.error(missing)
    rounds = chosen.rounds or (100 if math.isinf(chosen.minutes) else sys.maxsize)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    failures = run(chosen.seed, rounds, chosen.ranks, chosen.first, say=say, hosts=chosen.hosts, minutes=chosen.minutes)
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(failures) if failures else f"{len(lines)} rounds of seed {chosen.seed}: nothing wrong")
    return 1 if failures else 0


def needs() -> str:
    """Why a soak cannot be run here; empty where it can."""
    if os.geteuid() != 0:
        return "resetting the connections of other processes needs root"
    return "" if shutil.which("ss") else "ss is not installed; install the system package iproute2"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
