"""A plugin of pytest for DeepSpeed's tests on CPUs: the DeepSpeed that is installed, without compiled operators.

A checkout's conftest would find the checkout's own. An operator is compiled by the first rank that wants it. Where that
is ended meanwhile a lock stays, for which every later job waits without a limit. The one for shared memory carries
messages beside the process group; torch's Adam does the same as the fused one. Of a CPU the tests ask for a device that
torch does not know ("0"), and give its number to DistributedDataParallel, which takes none there. Ranks are forked from
a process that has imported already what takes each of them ten seconds.
"""

from typing import Any

import deepspeed
import deepspeed.ops.adam
import torch
import torch._dynamo
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.nn.parallel import DistributedDataParallel


def adam(parameters: Any, adam_w_mode: bool = True, **options: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer for the arguments of DeepSpeed's."""
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(parameters, **options)


class OnCpu(DistributedDataParallel):
    def __init__(
        self, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> None:
        super().__init__(module, **options)


torch.nn.parallel.DistributedDataParallel = OnCpu
CPU_Accelerator.current_device = lambda self: "cpu"
torch.multiprocessing.set_forkserver_preload([__name__])
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.ops.adam.FusedAdam = adam
