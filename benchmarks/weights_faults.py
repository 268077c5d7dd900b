"""Strike an engine, the trainer or the store of a channel of weights at each moment, and check all that is promised:

    python -m benchmarks.weights_faults --seeds 20 [--who engine sender store] [--fault kill ...] [--moment vote ...]
        [--beside 3] [--first-seed N] [--write FILE]

Each run is a trainer that publishes four versions, an engine of one worker and one of two, and `ncclguard store` in a
process of its own. One of them is struck once, in version 1 (in version 0 where the moment is the making of the group):
killed, stopped for longer than the limit, late, delayed by less than the limit, or in disagreement. Checked are:

- every process ends, and `publish` within its limit and 2 s,
- whoever is left out is the struck engine, for the right cause, and nobody is where it was only delayed,
- a worker that serves a version has exactly its values, and `publish` has named its engine for that version,
- where the trainer or the store is struck, all workers have the version or none has,
- where the store is, nobody is left out; what is on no engine says that the store does not answer; and of a store that
  was stopped for as long as one `publish` takes, one version at most,
- the engine that was not struck has the last version, and a struck one that lives has it too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from ncclguard import faults
from ncclguard.weights import Receiver, Sender
from ncclguard.weights.receiver import Update

#: Seconds of a `publish` in which somebody is struck, of which the first of three tries has a third; and of the others.
LIMIT: Final = 9.0
UNHURRIED: Final = 60.0
VERSIONS: Final = 4
WORKERS: Final = {1: ("A", 0, 1), 2: ("B", 0, 2), 3: ("B", 1, 2)}
#: Elements of each of three tensors, which make a bucket each.
LARGE: Final = 1 << 20

#: By who is struck, the moments; those with a timer strike while the thread is in a call, so they cannot be late.
MOMENTS: Final = {
    "engine": ("handshake", "idle", "announced", "first", "between", "vote", "committed"),
    "sender": ("handshake", "gather", "vote", "idle"),
}
TIMED: Final = {"engine": ("handshaking", "bytes", "voting"), "sender": ("handshaking", "bytes", "voting")}
DISAGREEMENTS: Final = ("shape", "digest", "refuses", "raises")
CAUSES: Final = {
    "kill": {"lost"},
    "stop": {"stuck"},
    "late": {"late", "stuck"},
    "shape": {"diverged"},
    "raises": {"failed", "exited"},
}


def cells() -> Iterator[tuple[str, str, str]]:
    """Yield who is struck, at which moment, and how."""
    for who in ("engine", "sender"):
        yield from itertools.product([who], MOMENTS[who], ("kill", "stop", "late", "delay"))
        yield from itertools.product([who], TIMED[who], ("kill", "stop"))
    yield from itertools.product(["engine"], ["disagreement"], DISAGREEMENTS)
    yield from itertools.product(["store"], ["any"], ("kill", "stop"))


# ---------------------------------------------------------------------- the processes


def weights(version: int) -> dict[str, torch.Tensor]:
    large = {f"layer{n}.weight": torch.full((LARGE,), float(version + n)) for n in range(3)}
    return {**large, "bias": torch.full((7,), version, dtype=torch.bfloat16), "steps": torch.tensor(version)}


class Strike:
    """The strike of this process, which comes to pass once; `seconds`: how long after its moment, where it is timed."""

    def __init__(self, moment: str, fault: str, seconds: float) -> None:
        self.moment, self.fault, self.seconds = moment, fault, seconds

    def at(self, moment: str) -> None:
        """Be struck here, if this is the moment; `bytes` and the like: a little later, whatever is done then."""
        if moment != self.moment:
            return
        self.moment = ""
        if moment in TIMED["engine"]:
            threading.Timer(self.seconds, self._strike).start()
        else:
            self._strike()

    def _strike(self) -> None:
        faults.report(struck=True)
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "stop":
            subprocess.Popen(["sh", "-c", f"sleep {LIMIT}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep({"late": LIMIT / 3 + 2, "delay": 0.7}[self.fault])


def first(owner: Any, name: str, call: Callable[[], None]) -> None:
    """Have `call` called before each call of the method."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **named: Any) -> Any:
        call()
        return original(*args, **named)

    setattr(owner, name, wrapped)


def publishes(address: str, name: str, who: str, moment: str, strike: Strike) -> None:
    sent: list[Any] = []
    faults.report(sent=sent)
    with Sender(address, name=name, timeout=UNHURRIED, bucket_mb=4.0) as sender:
        first(sender, "_open_group", lambda: (strike.at("handshake"), strike.at("handshaking")))
        first(sender, "_vote", lambda: sent and (strike.at("vote"), strike.at("voting")))
        sender.wait_for(2, within=UNHURRIED)
        if who == "engine" and moment in ("handshake", "handshaking"):
            sender._timeout = LIMIT
        for version in range(VERSIONS):
            state = weights(version)

            def gathered(
                state: dict[str, torch.Tensor] = state, version: int = version
            ) -> Iterator[tuple[str, torch.Tensor]]:
                for number, item in enumerate(state.items()):
                    if (version, number) == (1, 1):
                        strike.at("gather")
                        strike.at("bytes")
                    yield item

            if version == VERSIONS - 1 and who != "store":
                sender.wait_for(2, within=2.0 if who == "engine" and strike.fault == "kill" else 2 * LIMIT)
            published = sender.publish(gathered, version)
            sender._timeout = LIMIT
            left_out = {engine: str(getattr(why, "cause", why)) for engine, why in published.left_out.items()}
            sent.append([bool(published), published.engines, left_out, published.seconds, published.reason])
            faults.report(sent=sent)
            time.sleep(0.5)
            if version == 0:
                strike.at("idle")


def serves(address: str, name: str, strike: Strike, waits: float) -> None:
    engine, worker, workers = WORKERS[int(os.environ["RANK"])]
    served: list[Any] = []
    faults.report(served=served)
    with Receiver(address, name=name, engine=engine, worker=worker, workers=workers) as receiver:
        first(receiver, "_open_group", lambda: (strike.at("handshake"), strike.at("handshaking")))
        while True:
            if receiver.version == 0:
                strike.at("idle")
            update = receiver.next(timeout=UNHURRIED if receiver.version is None else waits)
            if update is None:
                break
            if update.version == 1:
                strike.at("announced")
                if strike.moment == "disagreement" and disagrees(strike, receiver, update):
                    continue
            staged = {}
            for number, (key, tensor) in enumerate(update):
                staged[key] = tensor
                if update.version == 1 and number < 2:
                    strike.at(("first", "between")[number])
                    strike.at("bytes")
            if update.version == 1:
                strike.at("vote")
                strike.at("voting")
            if update.commit():
                assert isinstance(update.version, int)
                right = weights(update.version)
                equal = staged.keys() == right.keys() and all(torch.equal(staged[key], right[key]) for key in right)
                served.append([update.version, equal])
                faults.report(served=served)
                if update.version == 1:
                    strike.at("committed")
                if update.version == VERSIONS - 1:
                    break


def disagrees(strike: Strike, receiver: Receiver, update: Update) -> bool:
    """Disagree with version 1 once; return whether that ends the update."""
    how, strike.moment = strike.fault, ""
    faults.report(struck=True)
    if how == "shape":
        altered = receiver._is_altered
        receiver._is_altered = lambda: setattr(receiver, "_is_altered", altered) is None  # type: ignore[method-assign]
    elif how == "digest":
        update._digest._hash.update(b"another byte")
    elif how == "refuses":
        update.refuse("size mismatch for bias")
    else:
        update.abandon(RuntimeError("size mismatch for bias"))
        return True
    return False


def channel(address: str, name: str, who: str, moment: str, fault: str, struck: int, seconds: float) -> None:
    """One process of a run."""
    rank = int(os.environ["RANK"])
    own = Strike(moment, fault, seconds) if rank == struck else Strike("", fault, 0.0)
    if rank == 0:
        publishes(address, name, who, moment, own)
    else:
        gone = (who, fault) == ("sender", "kill") or who == "store"
        serves(address, name, own, LIMIT + 2 if gone else 4 * LIMIT)


# ---------------------------------------------------------------------- a run


def one_run(who: str, moment: str, fault: str, seed: int) -> dict[str, Any]:
    """Run, and check; the result says what did not hold, if anything."""
    draw = random.Random(f"{who} {moment} {fault} {seed}")
    struck = {"engine": draw.choice((1, 2, 3)), "sender": 0, "store": -1}[who]
    port = draw.randrange(20000, 30000)
    address = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "ncclguard", "store", "--listen", address]
    result: dict[str, Any] = {"who": who, "moment": moment, "fault": fault, "seed": seed, "struck": struck}
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None and "listening" in store.stdout.readline()
        try:
            args = [f"tcp://{address}", "weights", who, moment, fault, struck, draw.uniform(0.0, 0.03)]
            with faults.start_ranks(channel, 4, args=args, timeout=150) as job:
                if who == "store":
                    job.wait_for("sent", [0], seconds=60)
                    while not job.reports(0)["sent"]:
                        time.sleep(0.02)
                    time.sleep(draw.uniform(0.0, 1.5))
                    store.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
                    result["struck_at"] = len(job.reports(0)["sent"])
                    if fault == "stop":
                        threading.Timer(LIMIT, lambda: store.send_signal(signal.SIGCONT)).start()
                ended = job.wait()
        finally:
            store.send_signal(signal.SIGCONT)
            store.kill()
    reports = [rank.reports for rank in ended]
    result["seconds"] = round(time.monotonic() - began, 1)
    result["sent"] = reports[0].get("sent", [])
    result["served"] = [reports[rank].get("served", []) for rank in WORKERS]
    allowed = CAUSES.get(fault, set()) | ({"unknown"} if moment.startswith("handshak") else set())  # it never came
    wrong = list(faulty(who, fault, struck, allowed, reports, result["sent"], result["served"]))
    if ended.timed_out or ended.left_running:
        wrong.append(f"did not end: {ended.still_running or ended.left_running}")
    result["ok"] = not wrong
    if wrong:
        result["what"] = "; ".join(wrong)
        result["output"] = str(ended)
    return result


def faulty(
    who: str,
    fault: str,
    struck: int,
    causes: set[str],
    reports: list[dict[str, Any]],
    sent: list[Any],
    served: list[list[Any]],
) -> Iterator[str]:
    """Yield what does not hold."""
    if who != "store" and not reports[struck].get("struck"):
        yield "nothing was struck"
    own = WORKERS[struck][0] if struck > 0 else ""
    for version, (published, _, left_out, seconds, reason) in enumerate(sent):
        if seconds > (UNHURRIED if version == 0 else LIMIT) + (3 if who == "store" else 2):
            yield f"publishing version {version} took {seconds:.1f} s"
        if who == "store" and not published and "store" not in reason:
            yield f"version {version} is on no engine: {reason or 'without a reason'}"
        for engine, why in left_out.items():
            if who == "store" or engine != own:
                yield f"version {version} left out {engine}: {why}"
            elif fault in CAUSES and why not in causes:
                yield f"version {version} left out {engine} as {why}"
            elif fault == "delay":
                yield f"version {version} left out {engine}, which was not late: {why}"
    if (who, fault) == ("store", "stop") and sum(not one[0] for one in sent) > 1:
        yield "another version is on no engine after the store went on"
    if own and fault != "delay" and not any(own in one[2] for one in sent):
        yield f"{own} was never left out"
    for worker, versions in zip(WORKERS, served, strict=True):
        for version, equal in versions:
            if not equal:
                yield f"rank {worker} serves other values than those of version {version}"
            elif version >= len(sent):
                if not (who == "sender" and fault == "kill" and version == len(sent)):
                    yield f"rank {worker} serves version {version}, which was never published"
            elif WORKERS[worker][0] not in sent[version][1]:
                yield f"rank {worker} serves version {version}, of which the trainer does not know"
    if who != "engine" and len({json.dumps(versions) for versions in served}) != 1:
        yield f"some have a version and some do not: {served}"
    if who == "engine" or (who == "sender" and fault != "kill"):
        if len(sent) < VERSIONS:
            yield f"the trainer ended after {len(sent)} versions"
        for worker, versions in zip(WORKERS, served, strict=True):
            dead = fault == "kill" and WORKERS[worker][0] == own
            if not dead and (not versions or versions[-1][0] != VERSIONS - 1):
                yield f"rank {worker} does not have the last version: {versions}"


def main() -> None:
    """Run the campaign, print a line for each run that does not hold, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--who", nargs="+", choices=("engine", "sender", "store"))
    parser.add_argument("--moment", nargs="+")
    parser.add_argument("--fault", nargs="+")
    parser.add_argument("--beside", type=int, default=3, help="runs at the same time; most of one is waiting")
    parser.add_argument("--write", default="", help="a JSON file for the results")
    given = parser.parse_args()
    chosen = [
        (*cell, seed)
        for seed in range(given.first_seed, given.first_seed + given.seeds)
        for cell in cells()
        if all(
            not only or part in only for part, only in zip(cell, (given.who, given.moment, given.fault), strict=True)
        )
    ]
    results: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")  # each with a server of forks of its own
    with concurrent.futures.ProcessPoolExecutor(given.beside, mp_context=spawn) as pool:
        for run in concurrent.futures.as_completed([pool.submit(one_run, *cell) for cell in chosen]):
            result = run.result()
            results.append(result)
            if not result["ok"]:
                where = ", ".join(str(result[key]) for key in ("who", "moment", "fault", "seed"))
                print(f"{where}: FAILED: {result['what']}; load {os.getloadavg()[0]:.0f}", flush=True)
            if given.write:
                Path(given.write).write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))
    bad = sum(not result["ok"] for result in results)
    counts = Counter(result["who"] for result in results)
    each = ", ".join(f"{count} with the {who} struck" for who, count in counts.items())
    print(
        f"{len(results) - bad} of {len(results)} runs held ({each}), {len(set(map(tuple, (c[:3] for c in chosen))))} cells"
    )
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
