"""Run a command on each node of a Ray cluster: `python -m ncclguard.hang.ray_nodes ADDRESS SECONDS WORD...`.

It prints a JSON object a node, each on a line. It is a process of its own, as connecting to a cluster that does not
answer can block for good, and is ended by who has started it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

#: Ray's reasons for which a node is gone that a running job does not miss: it was ended by its operator, or idle.
_MEANT = (1, 4)


def ask(command: Sequence[str], within: float) -> tuple[int, str, str]:
    """Run a command on this node, and return its exit code and what it printed."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                          timeout=within, check=False)  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def main(address: str, within: float, command: Sequence[str]) -> None:
    """Ask all nodes at the same time, and print what each has answered."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    nodes = ray.nodes()
    here = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    asked = {}
    for node in nodes:
        if node["Alive"]:
            # It needs nothing that a job may have taken: neither processors nor devices.
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(ask).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
            asked[task.remote(command, within)] = node
        elif node.get("DeathReason") not in _MEANT and node["NodeManagerAddress"] not in here:
            print(json.dumps({"node": _name(node), "dead": node.get("DeathReasonMessage") or ""}))
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=within)
    for answer, node in asked.items():
        told: dict[str, object] = {"node": _name(node)}
        if answer in answered:
            try:
                told["code"], told["out"], told["err"] = ray.get(answer)
            except Exception as error:  # noqa: BLE001 - Ray has a class of its own for each way in which a task can fail
                told["failed"] = str(getattr(error, "cause", None) or error).strip() or repr(error)
        print(json.dumps(told))


def _name(node: dict[str, str]) -> str:
    return node.get("NodeManagerHostname") or node["NodeManagerAddress"]


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
