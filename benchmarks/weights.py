"""The channel of weights beside a plain broadcast of gloo: the same tensors to the same processes, in turns.

    python -m benchmarks.weights [--engines 1] [--mb 2048] [--bucket 64] [--rounds 5]

The ratio of medians, and what an empty publish costs. The figures to reach: 1.05 for 2 GiB, 50 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ncclguard import faults
from ncclguard.weights import Receiver, Sender


def compare(port: int, mb: int, bucket: float, rounds: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, size = dist.get_rank(), dist.get_world_size()
    address = f"tcp://127.0.0.1:{port}"
    tensors = {f"layer{n}": torch.randn(4 << 20) for n in range(mb // 16)}  # of 16 MiB
    staging = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    took: dict[str, list[float]] = {"plain": [], "channel": [], "empty": []}
    end = Sender(address, timeout=300, bucket_mb=bucket) if rank == 0 else Receiver(address, engine=f"engine {rank}")
    if isinstance(end, Sender):  # an engine asks to be a member once it waits for a version
        assert end.wait_for(size - 1, within=60)
        published = end.publish({"one": torch.ones(1)}, "first")
        assert published, published
    else:
        first = end.next(timeout=90)
        assert first is not None and len(dict(first)) == 1 and first.commit()
    for round_ in range(rounds):
        for what in ("plain", "channel", "empty"):
            dist.barrier()
            began = time.perf_counter()
            sent = tensors if what != "empty" else {"one": torch.ones(1)}
            if what == "plain":
                for tensor in sent.values():
                    dist.broadcast(tensor, 0)
            elif isinstance(end, Sender):
                published = end.publish(sent, f"{what} {round_}")
                assert published, published
            else:
                update = end.next(timeout=300, into=staging)
                assert update is not None and len(dict(update)) == len(sent) and update.commit()
            dist.barrier()
            took[what].append(time.perf_counter() - began)
    if rank == 0:
        medians = {what: statistics.median(times) for what, times in took.items()}
        faults.report(**medians, ratio=medians["channel"] / medians["plain"])
    end.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--mb", type=int, default=2048)
    parser.add_argument("--bucket", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    port = 20_000 + os.getpid() % 10_000
    arguments = [port, chosen.mb, chosen.bucket, chosen.rounds]
    found = faults.run_ranks(compare, 1 + chosen.engines, args=arguments, timeout=900).check()[0].reports
    print(
        f"{chosen.mb} MiB to {chosen.engines} engines: plain {found['plain']:.3f} s, channel {found['channel']:.3f} s, "
        f"ratio {found['ratio']:.2f}; an empty publish {1e3 * found['empty']:.0f} ms"
    )


if __name__ == "__main__":
    main()
