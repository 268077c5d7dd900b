"""A failed evaluation reaches real sinks: an offline W&B run and a TensorBoard event file."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import ncclguard as ng
from ncclguard.evaluation import NOT_EVALUATED


def fail(sink: Any) -> None:
    """One evaluation that is given up, with its metrics going to the sink."""

    @ng.resilient_evaluate(monitor=sink, max_attempts=2)
    def evaluate(step: int) -> None:
        raise OSError("the data could not be read")

    assert evaluate(step=7) is NOT_EVALUATED


def test_tensorboard(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package's own dependencies
        pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(str(tmp_path))
    fail(writer)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/evaluation_failed")] == [(7, 1.0)]
    assert [event.value for event in events.Scalars("eval/evaluation_attempts")] == [2.0]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wandb = pytest.importorskip("wandb", reason="W&B is not installed")
        for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
            monkeypatch.setenv(name, value)
        run = wandb.init(project="drill", dir=tmp_path, mode="offline")
        run.log({"loss": 0.5}, step=9)  # W&B takes nothing for an earlier step after this
        run.log({"loss": 0.4})
        fail(run)
        summary = dict(run.summary)
        run.finish()
        wandb.teardown()  # waits for the process that writes the file
    assert summary["eval/evaluation_failed"] == 1.0
    assert summary["eval/evaluation_attempts"] == 2.0
    assert summary["loss"] == 0.4
    (file,) = tmp_path.rglob("*.wandb")
    deadline = time.monotonic() + 60
    while b"eval/evaluation_failed" not in file.read_bytes():
        assert time.monotonic() < deadline, file.read_bytes()
        time.sleep(0.1)
