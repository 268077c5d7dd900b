"""What the tests with frameworks need before their ranks start."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ncclguard.faults import fork
from tests import preforked
from tests.ports import free_port


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    """Ranks are forks of a process that has imported the frameworks which are installed; those of other folders are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("ACCELERATE_USE_CPU", "true")
        fork.preload(("tests.integrations.preloaded",))
        yield


@pytest.fixture(scope="module", autouse=True)
def preforked_programs() -> Iterator[None]:
    """The programs that these tests start are forks too, and have transformers; not DeepSpeed, whose import is looked for."""
    with preforked.programs("accelerate", "transformers.trainer"):
        yield


@pytest.fixture
def free_ports() -> list[int]:
    """Three ports of this host."""
    return [free_port() for _ in range(3)]


@pytest.fixture
def own_store(free_ports: list[int]) -> Iterator[str]:
    """The address of a store in a process of its own."""
    address = f"127.0.0.1:{free_ports[2]}"
    command = [sys.executable, "-m", "ncclguard", "store", "--listen", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "listening" in process.stdout.readline()
        yield f"tcp://{address}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
