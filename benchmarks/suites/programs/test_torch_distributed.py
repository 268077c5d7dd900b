"""torch's own tests of a backend (`torch.testing._internal.distributed.distributed_test`), with forked ranks.

torch starts each rank as a new process, which imports torch anew for each of 285 tests; a fork has it already.
"""

from __future__ import annotations

import torch.multiprocessing as mp
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class TestForked(TestDistBackend, DistributedTest._DistTestBase):
    """All tests of the module."""

    def setUp(self) -> None:
        """Start the ranks; the test itself waits for them."""
        super().setUp()
        self._start_processes(mp.get_context("fork").Process)


del TestDistBackend  # it has no tests, and pytest would look for them
