"""torch's own tests of a backend (`torch.testing._internal.distributed.distributed_test`), with forked ranks.

torch starts each rank as a new process, which imports torch anew for each of 285 tests; a fork has it already.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class TestForked(TestDistBackend, DistributedTest._DistTestBase):
    """All tests of the module."""

    def setUp(self) -> None:
        """Start the ranks; the test itself waits for them."""
        super().setUp()
        self.file_name = str(Path(os.environ["TEMP_DIR"], "met"))
        self._spawn_processes()  # the recorder has them forked

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **more: Any) -> None:
        """Be one rank: also of a server's forks, whose environment is older than the test's folder."""
        os.environ["TEMP_DIR"] = str(Path(file_name).parent)
        super()._run(rank, test_name, file_name, parent_pipe, **more)


del TestDistBackend  # it has no tests, and pytest would look for them
