"""Imported once, by the process that forks the ranks of these tests: what each rank would otherwise take seconds to import.

To see what a rank still imports, compare `sys.modules` at its start and at its end.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

MODULES = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "accelerate",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # which deepspeed.initialize imports, and with it all of torch._inductor
    "transformers.trainer",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "pytest",
    "rich.panel",
)

for module in MODULES:
    with contextlib.suppress(ModuleNotFoundError):  # a framework that is not installed, or a version of it without this
        importlib.import_module(module)

if "deepspeed" in sys.modules:
    # What DeepSpeed could compile here, which it finds out by running compilers when the first rank asks. One of these it then does
    # compile in deepspeed.init_distributed, in a minute and more, for inference only; a job that is killed meanwhile leaves a lock
    # behind, for which all later jobs wait.
    sys.modules["deepspeed"].ops.__compatible_ops__ = {}
