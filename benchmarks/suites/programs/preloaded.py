"""torch's rig and tests of a backend in the server whose forks are the ranks, which need not import them anew.

The import asks how many GPUs there are, which makes CUDA unusable in every fork, and is told so by WORLD_SIZE instead.
"""

from __future__ import annotations

import importlib
import os

import torch

counted = torch._C._cuda_getDeviceCount
torch._C._cuda_getDeviceCount = lambda: int(os.environ["WORLD_SIZE"])
try:
    importlib.import_module("torch.testing._internal.distributed.distributed_test")
finally:
    torch._C._cuda_getDeviceCount = counted
