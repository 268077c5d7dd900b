"""A real gloo all-reduce over a given interface, in a process of its own, so that nothing of it can hang the doctor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta

_SECONDS = 8.0


def run_probe(interface: str, rank: int, world_size: int, address: str, port: int, seconds: float) -> str | None:
    """None when the all-reduce gave the right sum, else why not, in one line; ends after ``seconds`` at the latest."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": interface}
    command = [sys.executable, "-m", __name__, str(rank), str(world_size), address, str(port)]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"did not end within {seconds:g} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else f"exit code {done.returncode}"


def main(argv: list[str]) -> int:
    """The process: one rank of a gloo group whose store rank 0 hosts."""
    import torch
    import torch.distributed as dist

    from ncclguard._torch_stores import TCPStore

    rank, world_size, address, port = int(argv[0]), int(argv[1]), argv[2], int(argv[3])
    limit = timedelta(seconds=_SECONDS)
    store = TCPStore(address, port, world_size, rank == 0, limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    tensor = torch.full((1 << 18,), float(rank + 1))
    dist.all_reduce(tensor)
    expected = world_size * (world_size + 1) / 2
    if tensor[-1].item() != expected:
        print(f"the sum is {tensor[-1].item()}, not {expected}", file=sys.stderr)
        return 1
    dist.barrier()
    store.add("done", 1)
    if rank == 0:  # the others' last request must find the store's host alive
        while store.add("done", 0) < world_size:
            time.sleep(0.01)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
