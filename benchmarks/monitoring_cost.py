"""What monitoring and the exchange of statistics add to one operation: least of many short runs, in one process.

    python benchmarks/monitoring_cost.py

The exchange itself also costs its operation one vote with 440 bytes and, for a small one, a closing round.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

from ncclguard.agreement.seat import OpenCall
from ncclguard.config import GuardConfig
from ncclguard.guard import Request
from ncclguard.metrics import hook, statistics
from ncclguard.metrics.adjust import decide
from ncclguard.metrics.combined import combine
from ncclguard.metrics.exchange import Exchange
from ncclguard.metrics.observer import RecordingObserver

EVERY = 200


def least(function: Callable[[], object], number: int = 100, repeat: int = 2000) -> float:
    """Microseconds of one call in the best of `repeat` runs; other load only adds."""
    return min(timeit.repeat(function, number=number, repeat=repeat)) / number * 1e6


def main() -> None:
    """Print one line for each part."""
    now = time.monotonic()
    call = OpenCall("all_reduce(float32[1], SUM)", now - 1e-4, now + 600, 0, sequence=5, opened=now)
    request = Request("all_reduce", call.text, 1, 3, False, True, 1, 4)
    observer = RecordingObserver("job", lambda record: None)
    exchange = Exchange("0:cpu:ab12", GuardConfig(statistics_every=EVERY))

    def off() -> None:
        if hook.observer is not None:
            raise AssertionError
        if call.exchange:
            raise AssertionError

    def observed() -> None:
        observer.succeeded("0:cpu:ab12", "all_reduce", 4, 1e-4, 5e-5, 1)

    print(f"each operation, nothing on     {least(off):8.2f} us")
    print(f"each operation, monitoring     {least(observed):8.2f} us")
    print(f"each operation, statistics     {least(lambda: exchange.completed(request, call, 1, 1, 1e-4)):8.2f} us")
    data = statistics.encode(exchange._mine(call))
    for ranks in (2, 8, 64, 1000):
        repeat = max(5, 2000 // ranks)

        def conclude(ranks: int = ranks) -> None:
            statistics.encode(exchange._mine(call))
            gathered = combine([data] * ranks)
            exchange._stragglers.add(tuple(range(ranks)), gathered, "0:cpu:ab12/200")
            decide(gathered, exchange._bounds)

        cost = least(conclude, 10 if ranks < 100 else 1, repeat)
        print(f"one exchange of {ranks:4} ranks    {cost:8.1f} us, {cost / EVERY:8.2f} us an operation of {EVERY}")


if __name__ == "__main__":
    main()
