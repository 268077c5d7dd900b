"""A plugin of pytest for DeepSpeed's tests: the DeepSpeed that is installed, without the operators that it compiles.

A checkout's conftest would find the checkout's own. An operator is compiled by the first rank that wants it. Where that
is ended meanwhile a lock stays, for which every later job waits without a limit. The one for shared memory carries
messages beside the process group; torch's Adam does the same as the fused one. Ranks are forked from
a process that has imported already what takes each of them ten seconds.
"""

from typing import Any

import deepspeed
import deepspeed.ops.adam
import torch
import torch._dynamo


def adam(parameters: Any, adam_w_mode: bool = True, **options: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer for the arguments of DeepSpeed's."""
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(parameters, **options)


torch.multiprocessing.set_forkserver_preload([__name__])
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.ops.adam.FusedAdam = adam
