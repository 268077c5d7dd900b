"""A plugin of pytest for torch's tests of pipelines between ranks: CPUs with gloo, and each test is a job of its own.

They want GPUs and NCCL, though nothing in them is about either, and their class keeps the ranks for all of its tests:
the first that fails or hangs would take the others with it. Up to torch 2.7 the ranks also came from the file's own
`main`, where pytest does not come.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils


class JobPerTest(common_distributed.MultiProcessTestCase):
    """torch's class for tests with a job each, in the place of the one with a job for all."""

    world_size = int(os.environ["WORLD_SIZE"])
    rank = 0

    def __init_subclass__(cls) -> None:
        """Replace what a class of tests says of its ranks and their devices."""
        theirs = cls.__dict__.get("setUpClass")

        def set_up(cls: Any) -> None:
            # It ends with the accelerator's device of this rank; before that one class asks for more checks of torch.
            with contextlib.suppress(ZeroDivisionError, AttributeError):
                theirs.__get__(None, cls)()
            cls.device = torch.device("cpu")

        if theirs is not None:
            cls.setUpClass = classmethod(set_up)  # type: ignore[assignment,method-assign]
        cls.device, cls.world_size = torch.device("cpu"), JobPerTest.world_size  # type: ignore[attr-defined]

    def setUp(self) -> None:
        """Start the ranks; the test itself waits for them."""
        super().setUp()
        self._spawn_processes()

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """Make the group of one rank, and run the test."""
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        common_utils.set_rng_seed(0)
        super().run_test(test_name, parent_pipe)


def whatever_is_there(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Stand for the decorators that skip a test where there are no GPUs."""
    return lambda test: test


common_utils.skip_but_pass_in_sandcastle_if = whatever_is_there
for name in ("requires_nccl", "requires_accelerator_dist_backend", "skip_if_lt_x_gpu"):
    setattr(common_distributed, name, whatever_is_there)
for name in ("MultiProcContinousTest", "MultiProcContinuousTest"):  # torch 2.8 has spelt it anew
    setattr(common_distributed, name, JobPerTest)
