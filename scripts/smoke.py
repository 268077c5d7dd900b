"""What an installed ncclguard must be able to do: `python scripts/smoke.py [--tour docs/tour.md]`.

Two ranks of this file start under torchrun. Two guarded collectives succeed; in a third rank 1 comes too late, is named
on both ranks, and leaves its page, which needs the templates of the package; the fourth works again. Then come the
commands of the tour, as they stand on its page, after the step that installs. It is run where only the installed
package is imported, by `scripts/wheel` and `scripts/matrix`; tests/distributed/test_tour.py runs the whole page.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: Seconds for the two ranks together, most of which torch takes for its import; and for all of the tour.
LIMIT, TOUR = 400, 600
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def main() -> int:
    """Start the ranks in an empty folder, take the tour in another, and return 0 when both went right."""
    parser = argparse.ArgumentParser(prog="scripts/smoke.py", description="Use the ncclguard that is installed.")
    parser.add_argument("--tour", type=Path, metavar="PAGE", help="run the commands of this page too: docs/tour.md")
    options = parser.parse_args()
    if code := run_ranks():
        return code
    if options.tour is not None:
        with tempfile.TemporaryDirectory(prefix="ncclguard-tour-") as folder:
            try:
                run_tour(options.tour.read_text(encoding="utf-8"), Path(folder), installed=True)
            except AssertionError as error:
                print(f"smoke: the tour: {error}", file=sys.stderr)
                return 1
        print("smoke: the tour ran and printed what its page shows", flush=True)
    return 0


def run_tour(page: str, folder: Path, installed: bool = False) -> None:
    """Run all commands of the page in one bash; AssertionError when one fails, or a line that it shows is not printed.

    Where the package is `installed`, the first block, which installs it from a clone, is left out.
    """
    blocks = BLOCK.findall(page)
    assert len(blocks) > 8, f"the page has {len(blocks)} blocks"
    script = "".join(text for kind, text in blocks[installed:] if kind == "sh")
    # The programs of the environment that runs this come first, so that `python3` is one that the project takes.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    bash = subprocess.Popen(
        ["bash", "-e"],
        cwd=folder,
        env={**os.environ, "PATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = bash.communicate(script, timeout=TOUR)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"its commands did not end within {TOUR} s") from None
    finally:
        if bash.poll() is None:
            os.killpg(bash.pid, signal.SIGTERM)  # torchrun's ranks lead sessions of their own: it ends them
            bash.wait(timeout=30)
    assert bash.returncode == 0, f"a command ended with {bash.returncode}:\n{output}"
    lines = [line for kind, text in blocks if kind == "text" for line in text.splitlines()]
    missing = [line for line in lines if not said(line, output)]
    assert not missing, f"{missing}\nwere not printed:\n{output}"
    assert list(folder.rglob("ncclguard-incidents/*.html")), "no incident left a page"


def said(expected: str, output: str) -> bool:
    """Return whether that was printed, with anything where the page has `...`; ranks may end each other's lines."""
    return re.search(re.escape(expected.strip()).replace(r"\.\.\.", ".*"), output) is not None


def run_ranks() -> int:
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
