"""What monitoring and the exchange of statistics add to one operation.

    python benchmarks/monitoring_cost.py [--ranks 2] [--rounds 300]

First the parts that need no other rank: least of many short runs, in one process. Then a job on gloo whose ranks
all-reduce one element in two groups in turn, one without the exchange and one with it in every 100th operation, as is
the default: there it also costs a vote with 472 bytes and a closing round. `--rounds 0` leaves the job out.
"""

from __future__ import annotations

import argparse
import os
import statistics as stdlib
import time
import timeit
from collections.abc import Callable

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import events, faults
from ncclguard.bench.results import ratio
from ncclguard.config import STATISTICS_EVERY, GuardConfig
from ncclguard.coordination.group_state import OpenCall
from ncclguard.engine.call import Call
from ncclguard.engine.outcomes import success
from ncclguard.metrics import statistics
from ncclguard.metrics.exchange import Exchange, decide
from ncclguard.metrics.registry import RecordingListener
from ncclguard.metrics.statistics import combine
from ncclguard.protocol.decision import Operation
from ncclguard.protocol.group_key import GroupKey

WARM_UP = 3  # rounds


def least(function: Callable[[], object], number: int = 100, repeat: int = 2000) -> float:
    """Microseconds of one call in the best of `repeat` runs; other load only adds."""
    return min(timeit.repeat(function, number=number, repeat=repeat)) / number * 1e6


def in_turn(rounds: int) -> None:
    """One rank: each round has as many operations as lie between two exchanges in
    either group, in an order that alternates.
    """
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    groups = {}
    for every in (0, STATISTICS_EVERY):
        ng.configure(statistics_every=every)  # holds for the guarded group that the next operation makes
        groups[every] = dist.new_group()
        ng.safe_barrier(groups[every]).raise_if_failed()
    tensor = torch.ones(1)
    times: dict[int, list[list[float]]] = {every: [] for every in groups}
    for index in range(rounds + WARM_UP):
        for every in sorted(groups, reverse=index % 2 == 1):
            taken = []
            for _ in range(STATISTICS_EVERY):
                tensor.fill_(1)
                started = time.perf_counter()
                ng.safe_all_reduce(tensor, group=groups[every])
                taken.append(time.perf_counter() - started)
                if tensor.item() != dist.get_world_size():
                    raise AssertionError(f"{tensor.item()} is not the sum")
            times[every].append(taken)
    if dist.get_rank() == 0:
        faults.report(without=times[0][WARM_UP:], exchanging=times[STATISTICS_EVERY][WARM_UP:])
    dist.destroy_process_group()


def print_job(ranks: int, rounds: int) -> None:
    """Run the job and print what rank 0 has measured."""
    reports = faults.run_ranks(in_turn, ranks, args=[rounds], timeout=1800).check()[0].reports
    without, exchanging = ([sum(taken) for taken in reports[name]] for name in ("without", "exchanging"))
    compared = ratio(exchanging, without)
    # The barrier that made the guarded group was the first operation of the group.
    carrying = [taken[STATISTICS_EVERY - 2] for taken in reports["exchanging"]]
    others = [one for taken in reports["exchanging"] for one in taken[: STATISTICS_EVERY - 2]]
    print(
        f"torch {torch.__version__}, gloo, {ranks} ranks on one host with {os.cpu_count()} cores, all-reduce of 1 element"
    )
    print(
        f"with the exchange / without: median {compared.median:.4f}, quartiles {compared.low:.4f} to {compared.high:.4f}, of "
        f"{compared.cycles} rounds of {STATISTICS_EVERY} operations; {stdlib.median(without) / STATISTICS_EVERY * 1e6:.1f} us an operation without"
    )
    print(
        f"an operation that carries it {stdlib.median(carrying) * 1e6:.1f} us, the others {stdlib.median(others) * 1e6:.1f} us"
    )


def print_parts() -> None:
    """One line for each part that needs no other rank."""
    now = time.monotonic()
    key = GroupKey.of("0", "cpu", (0, 1))
    group, text = str(key), "all_reduce(float32[1], SUM)"
    call = OpenCall(text, now - 1e-4, now + 600, 0, sequence=5, opened=now)
    outcome = success(group, Call("all_reduce", 1, 4, True, Operation(0, 7, text)), call, 1, 1)
    listener = RecordingListener("job", lambda record: None)
    exchange = Exchange(key, GuardConfig())

    def off() -> None:
        for one in events.listeners:
            one.call_started(group, call)
        if call.exchange:
            raise AssertionError
        for one in events.listeners:
            one.call_ended(group, call, outcome)

    def observed() -> None:
        listener.call_started(group, call)
        listener.call_ended(group, call, outcome)

    print(f"each operation, nothing on     {least(off):8.2f} us")
    print(f"each operation, monitoring     {least(observed):8.2f} us")
    print(f"each operation, statistics     {least(lambda: exchange.call_ended(group, call, outcome)):8.2f} us")
    data = statistics.encode(exchange._mine(call))
    for ranks in (2, 8, 64, 1000):
        repeat = max(5, 2000 // ranks)

        def conclude(ranks: int = ranks) -> None:
            statistics.encode(exchange._mine(call))
            gathered = combine([data] * ranks)
            exchange._stragglers.add(tuple(range(ranks)), gathered, f"{group}/100")
            decide(gathered, exchange._bounds)

        cost = least(conclude, 10 if ranks < 100 else 1, repeat)
        print(
            f"one exchange of {ranks:4} ranks    {cost:8.1f} us, {cost / STATISTICS_EVERY:8.2f} us an operation of {STATISTICS_EVERY}"
        )


def main() -> None:
    """Print the parts, then the job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=300, help="of 100 operations in each group; 0: no job")
    given = parser.parse_args()
    print_parts()
    if given.rounds:
        print_job(given.ranks, given.rounds)


if __name__ == "__main__":
    main()
