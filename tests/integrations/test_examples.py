"""The examples as people start them, on 2 ranks: an evaluation fails on the last one, and training goes on to its last step."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
GIVEN_UP = "failed after 1 try; the fallback is returned, and training goes on"
NOT_EVALUATED = "failed after 1 try; NaN is returned, because no `fallback=` was given, and training goes on"


def run(*command: str) -> str:
    """What a command prints; it has to end well, by itself."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=150)
    finally:
        if process.poll() is None:  # the launcher's ranks lead sessions of their own: it has to end them itself
            process.terminate()
            process.wait(timeout=30)
        if process.stdout is not None:
            process.stdout.close()
    assert process.returncode == 0, output[-6000:]
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "needs", "fault", "said", "last"),
    [
        ("train_ddp.py", "torch", "oom", ["out of memory, rank 1", "common.py"], "step 30:"),
        ("train_deepspeed.py", "deepspeed", "late", ["late, rank 1"], "step 30:"),
        ("train_trainer.py", "transformers", "metric", [GIVEN_UP, "common.py"], "'eval_accuracy'"),
    ],
)
def test_training_survives_an_evaluation(script: str, needs: str, fault: str, said: list[str], last: str) -> None:
    """Started as users start it.

    `last` is what a rank prints in its last step, or of its last evaluation, after the one that failed.
    """
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    output = run(
        sys.executable,
        *TORCHRUN,
        str(EXAMPLES / script),
        "--fault",
        fault,
        "--timeout",
        "10",
    )
    assert "evaluation evaluate() at step 20" in output
    assert all(text in output for text in said), output
    assert last in output.rpartition("evaluation evaluate() at step 20")[2], output


@pytest.mark.slow
@pytest.mark.thorough
def test_the_deepspeed_launcher_starts_it_too() -> None:
    launcher = shutil.which("deepspeed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if launcher is None:
        pytest.skip("DeepSpeed is not installed")
    script = str(EXAMPLES / "train_deepspeed.py")
    output = run(sys.executable, launcher, "--num_accelerators", "2", script, "--fault", "metric", "--timeout", "10")
    assert NOT_EVALUATED in output
    assert "step 30:" in output
