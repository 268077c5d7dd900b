"""A cluster of Ray with two nodes on this host, and four workers of Ray Train; run by test_hang_ray.py.

`hang_ray_job.py FOLDER` writes the address of the cluster to FOLDER/address, and of each rank FOLDER/ready-RANK before it hangs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

STRUCK = 2


def save_checkpoint() -> None:
    time.sleep(600)


def train(config: dict[str, str]) -> None:
    import torch.distributed as dist

    dist.all_reduce(torch.ones(4))
    Path(config["folder"], f"ready-{dist.get_rank()}").touch()
    if dist.get_rank() == STRUCK:
        save_checkpoint()
    dist.all_reduce(torch.ones(4))


def main(folder: str) -> None:
    options = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    ray.init(address=cluster.address, log_to_driver=False)
    Path(folder, "address").write_text(cluster.address)
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=4, resources_per_worker={"CPU": 0.9}, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=folder),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
