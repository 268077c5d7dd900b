"""What an installed ncclguard must be able to do: `python scripts/smoke.py` starts two ranks of itself under torchrun.

Two guarded collectives succeed; in a third rank 1 comes too late, is named on both ranks, and leaves its page, which
needs the templates of the package; the fourth works again. It is run where only the installed package is imported, by
`scripts/wheel` and `scripts/matrix`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: Seconds for the two ranks together, most of which torch takes for its import.
LIMIT = 600


def main() -> int:
    """Start the ranks in an empty folder and return their launcher's exit code."""
    with tempfile.TemporaryDirectory(prefix="ncclguard-smoke-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        environment = {**os.environ, "NCCLGUARD_REPORT_DIR": folder, "OMP_NUM_THREADS": "1"}
        launcher = subprocess.Popen(command, cwd=folder, env=environment)
        try:
            code = launcher.wait(LIMIT)
        except subprocess.TimeoutExpired:
            print(f"smoke: two ranks did not end within {LIMIT} s", file=sys.stderr)
            code = 1
            launcher.terminate()  # torchrun ends its ranks, which have sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(60)
        finally:
            launcher.kill()
            launcher.wait()
        pages = list(Path(folder).glob("incident-*.html"))
    if code == 0 and len(pages) != 1:
        print(f"smoke: one incident must leave one page, and there are {len(pages)}", file=sys.stderr)
        return 1
    return code


def run_rank() -> None:
    """One rank's part. Raises AssertionError where the guard does not do what it promises."""
    import torch
    import torch.distributed as dist

    import ncclguard as ng

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tensor = torch.full((1000,), float(rank + 1))
    assert ng.safe_all_reduce(tensor) and bool((tensor == 3.0).all())
    assert ng.safe_barrier()
    if rank == 1:
        time.sleep(4.0)
    kept = torch.ones(1000)
    outcome = ng.safe_all_reduce(kept, timeout=1.5)
    assert not outcome and outcome.cause is ng.Cause.LATE and outcome.culprits == (1,), outcome
    assert bool((kept == 1.0).all())
    assert ng.safe_barrier()
    dist.destroy_process_group()
    if rank == 0:
        versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}, ncclguard {ng.__version__}"
        print(f"smoke: passed with {versions} of {Path(ng.__file__).parent}", flush=True)


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        run_rank()
    else:
        sys.exit(main())
