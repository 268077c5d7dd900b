"""Has other people's fault injection strike the last of three ranks, and says what "ncclguard" tells the others.

    python -m benchmarks.suites.fault_kits [--select TEXT] [--out FILE]

The kits are used as their documentation says: NVRx's `inject_fault` (nvidia-resiliency-ext), and campaigns of
lm-resiliency. Neither is installed here: `pip install nvidia-resiliency-ext lm-resiliency`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults

RANKS: Final = 3
STRUCK: Final = RANKS - 1
LIMIT: Final = 8.0
#: In the words of the "fault pool" of NVRx's skill fault-injection-loop; its faults of GPUs are left out.
NVRX: Final = {
    "SIGKILL": "crash fault", "SEGFAULT": "crash fault", "OS_ABORT": "crash fault",
    "LOCK_GIL": "Python-level hang", "WORKLOAD_EXC": "Python-level hang", "ASYNC_EXC": "Python-level hang",
    "SIGTERM": "signal", "SIGINT": "signal", "SIGSTOP": "signal", "SIGNAL_EXC": "signal",
}  # fmt: skip
#: In the words of lm-resiliency's docs/fault_injection.md: the fault, its target, its parameters, its lifetime.
LM_RESILIENCY: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "weight, single_bitflip": (
        "numerical and state: tensor_corruption",
        {"surface": "weight", "operation": "single_bitflip", "magnitude": "subtle"},
    ),
    "optimizer_state, single_bitflip": (
        "numerical and state: tensor_corruption",
        {"surface": "optimizer_state", "operation": "single_bitflip", "magnitude": "subtle"},
    ),
    "gradient, sign_flip": (
        "numerical and state: tensor_corruption",
        {"surface": "gradient", "operation": "sign_flip"},
    ),
    "compute, delay of 20 s": (
        "performance and liveness: delay",
        {"surface": "compute", "delay_ms": 20000},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What a kit says of a fault, and what the ranks that it did not strike were told."""

    kit: str
    fault: str
    theirs: str
    ours: str

    def __str__(self) -> str:
        return f"| {self.kit} | {self.fault} | {self.theirs} | {self.ours} |"


def struck_by_nvrx(name: str) -> str:
    """All-reduce until NVRx's fault has come; return what this rank was told."""
    from nvidia_resiliency_ext.inprocess.tools import inject_fault as kit

    dist.init_process_group("ncclguard", timeout=datetime.timedelta(seconds=LIMIT))
    dist.barrier()
    kit.inject_fault((kit.Fault[name],), num_faults=1, keep_alive=STRUCK, delay=1.0, seed=1)
    try:
        for _ in range(1000):
            dist.all_reduce(torch.ones(16))
            time.sleep(0.05)
            kit.maybe_raise_workload_exception()
    except ng.CollectiveFailed as error:
        return told(error)
    return "nothing"


def struck_by_campaign(fault: str) -> str:
    """Train with DDP while a campaign of lm-resiliency strikes; compare the replicas, and return what was found."""
    from lm_resiliency import FaultCampaign, enable_fault_injection

    dist.init_process_group("ncclguard", timeout=datetime.timedelta(seconds=LIMIT))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    given = dict(LM_RESILIENCY[fault][1])
    target = {"rank": STRUCK, "module_path": "0", "surface": given.pop("surface")}
    state = target["surface"] in ("weight", "optimizer_state")
    incident = {
        "incident_id": "one",
        "trigger": {"at": [3]},
        "lifetime": {"until": "recovery"} if state else {"matching_calls": 1},
        "faults": [{"fault_id": "one", "type": "delay" if "delay_ms" in given else "tensor_corruption",
                    "target": target, "parameters": given}],
    }  # fmt: skip
    campaign = FaultCampaign.from_dict({"schema_version": 1, "name": "one", "incidents": [incident]})
    enable_fault_injection(trained, optimizer, campaign=campaign)
    try:
        for _ in range(5):
            optimizer.zero_grad()
            trained(torch.ones(4, 8)).sum().backward()
            dist.all_reduce(torch.ones(1))
            optimizer.step()
    except ng.CollectiveFailed as error:
        return told(error)
    except RuntimeError as error:  # out of backward(): the error of a hook is one of these, with the whole text
        named = re.search(r"rank \d+ \w+", str(error))
        return f"RuntimeError of `backward()`: {named.group() if named else error}"
    return f"`check_replicas`: {str(ng.check_replicas(model, optimizer)).partition('; test the GPU')[0]}"


def told(error: ng.CollectiveFailed) -> str:
    """Return the error's type, its cause, and whom it names."""
    ranks = ", ".join(str(culprit) for culprit in sorted(error.outcome.culprits)) or "nobody"
    return f"{type(error).__name__}, {error.outcome.cause}: rank {ranks}"


def row(kit: str, fault: str, theirs: str, program: Any) -> Row:
    """Run a fault, and gather what the ranks that were not struck say."""
    path = os.pathsep.join(filter(None, sys.path))
    result = faults.run_ranks(program, RANKS, args=[fault], env={"PYTHONPATH": path}, timeout=120, launcher="processes")
    found = result.values("returned")
    said = dict.fromkeys(found.get(rank) or last_line(result[rank].output) for rank in range(RANKS) if rank != STRUCK)
    return Row(kit, fault, theirs, "; otherwise ".join(said))


def last_line(output: str) -> str:
    """Return the last line of a rank that returned nothing."""
    return f"`{(output.strip().splitlines() or ['no output'])[-1]}`"


def main() -> int:
    """Run the faults and print the table of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites.fault_kits")
    parser.add_argument("--select", default="", help="only faults whose names have this")
    parser.add_argument("--out", type=Path, help="write FILE too; never overwrites one")
    options = parser.parse_args()
    lines = ["| kit | fault | what the kit calls it | what the other ranks are told |", "|---|---|---|---|"]
    kits = [(f"NVRx {importlib.metadata.version('nvidia-resiliency-ext')}", name, said, struck_by_nvrx)
            for name, said in NVRX.items()]  # fmt: skip
    kits += [(f"lm-resiliency {importlib.metadata.version('lm-resiliency')}", name, said, struck_by_campaign)
             for name, (said, _) in LM_RESILIENCY.items()]  # fmt: skip
    for kit, fault, theirs, program in kits:
        if options.select in fault:
            lines.append(str(row(kit, fault, theirs, program)))
            print(lines[-1], flush=True)
    if options.out is not None:
        with options.out.open("x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
