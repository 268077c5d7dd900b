"""What a request of each kind takes the host of a TCPStore: the costs that `tests/protocol/scale.py` reckons with.

    python benchmarks/store_requests.py [--clients 3] [--connections 8] [--seconds 1] [--cycles 3] [--idle 100]

One process is the store; `clients` others keep `connections` connections each busy with requests of one kind, one after
the other on each, while `idle` further connections are open and silent. Kinds take turns, in every cycle. What counts
is the processor time of the store's process for each request, which other load on the machine changes little; a million
divided by it is what one core of the host could answer a second. Beside it stand the requests that came through, and
how long one took its client, which the load changes much.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

KEYS = 256  # of one request for many: `coordination/store.py`
VALUE = "x" * 1500  # about a report
LARGE = "x" * 100_000  # a verdict on thousands of ranks
PREFIX = "default_pg/0//ncclguard/0123456789ab/group:cpu:0/0"  # as long as the keys of a job
MANY = [f"{PREFIX}/report/{rank}" for rank in range(KEYS)]

Request = Callable[[dist.TCPStore, int, str], object]
#: Requests of one kind; the number tells those of one connection apart, the text the connections.
KINDS: dict[str, Request] = {
    "add": lambda store, number, who: store.add(f"{PREFIX}/events", 0),
    "check": lambda store, number, who: store.check([f"{PREFIX}/verdict"]),
    "get, 1.5 KB": lambda store, number, who: store.get(MANY[number % KEYS]),
    "get, 100 KB": lambda store, number, who: store.get(f"{PREFIX}/large"),
    "compare_set, new key, 1.5 KB": lambda store, number, who: store.compare_set(f"{PREFIX}/{who}/{number}", "", VALUE),
    f"check, {KEYS} keys": lambda store, number, who: store.check(MANY),
    f"multi_get, {KEYS} keys, 1.5 KB each": lambda store, number, who: store.multi_get(MANY),
}


def serve(pipe: Connection) -> None:
    """The store: answers each message with its port, then with its processor seconds since the start."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    for key in MANY:
        store.set(key, VALUE)
    store.set(f"{PREFIX}/large", LARGE)
    pipe.send(store.port)
    while pipe.recv():
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(used.ru_utime + used.ru_stime)


def connect(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))


def keep_busy(request: Request, store: dist.TCPStore, who: str, end: float, counts: list[int], index: int) -> None:
    while time.monotonic() < end:
        request(store, counts[index], who)
        counts[index] += 1


def load(port: int, connections: int, client: int, pipe: Connection) -> None:
    """One client process: for each (kind, seconds, cycle) it is sent, how many requests were answered."""

    stores = [connect(port) for _ in range(connections)]
    pipe.send(True)
    while (task := pipe.recv()) is not None:
        kind, seconds, cycle = task
        counts, end = [0] * connections, time.monotonic() + seconds
        threads = [
            threading.Thread(
                target=keep_busy, args=(KINDS[kind], stores[index], f"{cycle}/{client}/{index}", end, counts, index)
            )
            for index in range(connections)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pipe.send(sum(counts))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--connections", type=int, default=8, help="of each client")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--idle", type=int, default=100, help="connections that are open and silent")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")

    def start(target: Callable[..., None], *given: object) -> Connection:
        ours, theirs = context.Pipe()
        context.Process(target=target, args=(*given, theirs), daemon=True).start()
        return ours

    server = start(serve)
    port = server.recv()
    clients = [start(load, port, options.connections, client) for client in range(options.clients)]
    for pipe in clients:
        pipe.recv()
    silent = [connect(port) for _ in range(options.idle)]  # answered once: the server looks up names when it accepts

    def processor_seconds() -> float:
        server.send(True)
        return float(server.recv())

    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for cycle in range(options.cycles):
        for kind in KINDS if cycle % 2 else reversed(KINDS):
            before, began = processor_seconds(), time.monotonic()
            for pipe in clients:
                pipe.send((kind, options.seconds, cycle))
            requests = sum(pipe.recv() for pipe in clients)
            taken, passed = processor_seconds() - before, time.monotonic() - began
            found[kind].append((taken / requests * 1e6, requests / passed))
    outstanding = options.clients * options.connections
    print(f"torch {torch.__version__}, {platform.platform()}, {outstanding} connections busy, {len(silent)} silent")
    heads = f"{'request':<38}{'processor us':>13}{'lowest':>8}{'highest':>8}{'one core, a second':>20}"
    print(f"{heads}{'came through':>14}{'a client, us':>14}")
    result = {}
    for kind, cycles in found.items():
        costs = [cost for cost, _ in cycles]
        cost, rate = statistics.median(costs), statistics.median(rate for _, rate in cycles)
        result[kind] = {"processor_us": cost, "lowest": min(costs), "highest": max(costs), "a_second": rate}
        line = f"{kind:<38}{cost:>13.1f}{min(costs):>8.1f}{max(costs):>8.1f}{1e6 / cost:>20,.0f}"
        print(f"{line}{rate:>14,.0f}{outstanding / rate * 1e6:>14,.0f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"torch": torch.__version__, "requests": result}, indent=1) + "\n")
    for pipe in clients:
        pipe.send(None)
    server.send(False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
