"""`python -m ncclguard.bench` on real ranks: its table, its exit codes, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.bench import measure as timed_loop
from ncclguard.bench.__main__ import main
from ncclguard.bench.measure import WORKLOADS, Control, measure, plan_for, shape_for, variants_for
from ncclguard.bench.results import BenchResult

if TYPE_CHECKING:
    from typing_extensions import Self

pytestmark = pytest.mark.usefixtures("preforked_programs")

LIMIT = 100.0  # seconds after which a run here has hung
ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    argv = [sys.executable, "-m", "ncclguard.bench", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT, check=False)


class Running:
    """A bench in the background and its rank processes; on leaving the block nothing of it is alive."""

    def __init__(self, *arguments: str, ranks: int = 2, program: Sequence[str] = ("-m", "ncclguard.bench")) -> None:
        argv = [sys.executable, *program, *arguments]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        self.ranks: list[psutil.Process] = []
        self._count = ranks

    def __enter__(self) -> Self:
        end = time.monotonic() + LIMIT
        while len(self.ranks) < self._count:
            if time.monotonic() > end:
                self.__exit__()
                raise AssertionError("the ranks did not start")
            time.sleep(0.05)
            self.ranks = sorted(self._ranks(), key=lambda child: child.pid)
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.process, *self.ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _ranks(self) -> Iterator[psutil.Process]:
        """Yield the ranks; a bench that is a fork has the server of its own forks for a child, too."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "RANK" in child.environ():
                    yield child

    def wait_for_line(self, part: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if part in line:
                return
        raise AssertionError(f"no line with {part!r}")

    def end(self) -> tuple[int, str]:
        """The exit code and the rest of the output; AssertionError when a rank outlives the bench."""
        rest, _ = self.process.communicate(timeout=LIMIT)
        _, alive = psutil.wait_procs(self.ranks, timeout=LIMIT)
        assert not alive
        return self.process.returncode, rest


def test_the_main_job_prints_its_table_and_writes_its_files(tmp_path: Path) -> None:
    """Two gloo ranks, two sizes: a row per variant, no wrong element, exit code 0, JSON and PNG. Started as users start it."""
    result = bench(
        "--numel", "7", "1MiB", "--seconds", "0.5",
        "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png"),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    rows = [line for line in lines if not line.startswith("#")]
    assert len(rows) == 6
    assert lines[0].startswith("# ncclguard ")
    assert f"torch {torch.__version__}" in lines[0]
    assert lines[-1].startswith("# OK: 2 sizes")
    assert "\x1b" not in result.stdout
    found = BenchResult.model_validate_json((tmp_path / "r.json").read_text())
    assert found.ok
    assert found.environment.backend == "gloo"
    assert [size.nbytes for size in found.sizes] == [28, 2**20]
    for size in found.sizes:
        for variant in size.variants:
            assert variant.wrong == 0
            assert variant.checked == variant.calls * size.numel * 2
            assert variant.seconds_p99 >= variant.seconds_p50 >= variant.seconds_min > 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def all_operations() -> None:
    """Every operation with every variant and two element types, checked, in one job."""
    dist.init_process_group("gloo")
    control = Control(60.0)
    found: dict[str, Any] = {}
    for op, workload in WORKLOADS.items():
        for dtype in (torch.float32, torch.bfloat16):
            shape = shape_for(op, 0 if op == "barrier" else 10_001, dtype, dist.get_world_size())
            plan = plan_for(shape.nbytes, 3, iters=6, warmup=1, seconds=1.0)
            work = workload(shape, plan.slots, dist.get_rank(), torch.device("cpu"), 60.0)
            samples, interrupted = measure(work, variants_for(op, (False, True)), plan, control)
            found[f"{op} {dtype}"] = [
                [name, each.wrong, each.checked, sum(map(len, each.durations)), interrupted]
                for name, each in samples.items()
            ]
    faults.report(found=found)
    dist.destroy_process_group()


def test_every_operation_is_right_on_three_ranks() -> None:
    """No wrong element in any variant; 6 calls each; as many elements checked as the result has."""
    found = faults.run_ranks(all_operations, 3, timeout=LIMIT).values("found")
    assert sorted(found) == [0, 1, 2]
    for rows in found[0].values():
        assert len(rows) >= 2
    for rank in found.values():
        for name, rows in rank.items():
            op = name.split()[0]
            numel = {"barrier": 0, "all_gather": 10_002, "reduce_scatter": 3_334}.get(op, 10_001)
            for _, wrong, checked, calls, interrupted in rows:
                assert (wrong, checked, calls, interrupted) == (0, 6 * numel, 6, False), (name, rows)


def sabotaged(how: str) -> None:
    """The bench in a world where rank 1's all_reduce goes wrong."""
    real_plain, real_guarded = dist.all_reduce, ng.safe_all_reduce
    rank = int(os.environ["RANK"])

    class Plain:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, tensor: torch.Tensor, *of_the_bench: Any, **own_group: Any) -> None:
            real_plain(tensor, *of_the_bench, **own_group)
            if how == "wrong elements" and rank == 1 and not own_group:
                tensor[-1] += 1

    def guarded(tensor: torch.Tensor, **keywords: Any) -> ng.Outcome:
        if how == "wrong elements":
            return real_guarded(tensor.clone(), **keywords)  # the result never reaches the caller's tensor
        if how == "guarded fails" and rank == 1:
            raise RuntimeError("out of paper")
        return real_guarded(tensor, **keywords)

    setattr(timed_loop, "dist", Plain())  # noqa: B010 - mypy: a module attribute of another type
    timed_loop.ng.safe_all_reduce = guarded
    faults.report(code=main(["--numel", "1000", "--iters", "10", "--warmup", "0", "--timeout", "20"]))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("wrong elements", "# WRONG: "),
        ("guarded fails", "# FAILED: "),
    ],
)
def test_what_is_wrong_is_the_verdict_and_the_exit_code(how: str, says: str) -> None:
    """Plain wrong in one element on one rank and guarded in all, or a rank that raises: exit code 1 on every rank."""
    result = faults.run_ranks(sabotaged, 2, args=[how], timeout=LIMIT)
    assert result.values("code") == {0: 1, 1: 1}, result
    verdict = next(line for line in result[0].output.splitlines() if line.startswith(says))
    if how == "wrong elements":
        # 10 calls: 1 element on rank 1 by plain, all 1,000 elements on both ranks by two guarded variants
        assert verdict.startswith("# WRONG: 40,010 elements in 3 rows, first in plain at 1,000 elements")


def test_a_limit_too_short_for_a_guarded_call_is_no_reason_not_to_start() -> None:
    """1 ms: the plain calls and the bench's own are not bound by it, the guarded one fails, with a verdict and without a traceback."""
    result = bench("--numel", "1000", "--iters", "1", "--timeout", "0.001")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "# FAILED: a guarded all_reduce of 1,000 elements failed" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def a_file_in_the_way(path: str) -> None:
    """Somebody creates the file while the bench measures."""
    real = ng.safe_all_reduce

    def guarded(tensor: torch.Tensor, **keywords: Any) -> ng.Outcome:
        Path(path).touch()
        return real(tensor, **keywords)

    timed_loop.ng.safe_all_reduce = guarded
    faults.report(code=main(["--numel", "1000", "--iters", "2", "--warmup", "0", "--json", path]))


def test_the_verdict_comes_before_the_files(tmp_path: Path) -> None:
    """A file that came in the meantime stays; the measurement has been printed and is not lost."""
    file = tmp_path / "r.json"
    result = faults.run_ranks(a_file_in_the_way, 2, args=[str(file)], timeout=LIMIT)
    assert result.values("code") == {0: 1, 1: 0}, result
    lines = result[0].output.splitlines()
    assert any(line.startswith("# OK: ") for line in lines)
    assert any("could not be written" in line and "r.json" in line for line in lines)
    assert file.read_bytes() == b""


def test_ctrl_c_prints_what_there_is_and_ends_all_ranks() -> None:
    """SIGINT in the second of two sizes, which would take minutes: a verdict line, exit code 130, no process left."""
    with Running("--numel", "10", "3e7", "--iters", "400", "--warmup", "0") as running:
        running.wait_for_line("guarded atomic=True")  # the last row of the first size
        running.process.send_signal(signal.SIGINT)
        code, output = running.end()
        assert code == 130, output
        assert output.splitlines()[-1].startswith("# INTERRUPTED: "), output


def test_a_killed_rank_ends_the_bench_with_a_sentence() -> None:
    """SIGKILL to a rank: exit code 1, the rank and the signal are named, the other rank ends too."""
    with Running("--numel", "1e6", "--iters", "100000", "--timeout", "20") as running:
        running.wait_for_line("#         (B)")
        time.sleep(1.0)
        running.ranks[1].kill()
        code, output = running.end()
        assert code == 1, output
        assert "by signal 9" in output.splitlines()[-1]


def test_ranks_do_not_outlive_the_process_that_started_them() -> None:
    """SIGKILL to the bench itself: its ranks notice and end."""
    with Running("--numel", "1e6", "--iters", "100000", "--timeout", "20") as running:
        running.wait_for_line("#         (B)")
        running.process.kill()
        running.end()


@pytest.mark.thorough
def test_ranks_that_do_not_move_any_more_are_killed() -> None:
    """Both ranks stopped, nothing moves for 40 s: they are killed, the bench says so and returns 1."""
    program = (
        "import sys; from ncclguard.bench.ranks import Supervisor; sys.exit(Supervisor(sys.argv[1:], 2, 40.0).run())"
    )
    with Running("--numel", "1e6", "--iters", "100000", program=["-c", program]) as running:
        running.wait_for_line("#         (B)")
        for rank in running.ranks:
            rank.suspend()
        code, output = running.end()
        assert code == 1, output
        assert "no rank moved for 40 s; killed: ranks 0, 1." in output


def test_under_torchrun_its_world_is_used(tmp_path: Path) -> None:
    """torchrun's three ranks are measured; --ranks with another number is refused by all of them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m"]
    file = tmp_path / "r.json"
    argv = [*launcher, "ncclguard.bench", "--numel", "10", "--iters", "5", "--json", str(file)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    environment = json.loads(file.read_text())["environment"]
    assert (environment["world_size"], environment["launcher"]) == (3, "torchrun")


@pytest.mark.parametrize(
    "fault",
    ["kill", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("mismatch", "late", "stop", "reset"))],
)
def test_a_rehearsed_fault_is_named_and_the_next_call_succeeds(fault: str) -> None:
    """Rank 1 of three misbehaves: every live rank says who and why, the next call is good, exit code 0."""
    limit = ["--timeout", "3"] if fault in ("late", "stop") else []
    numel = "5e7" if fault == "reset" else "1e5"
    result = bench("--fault", fault, "--rank", "1", "--ranks", "3", "--numel", numel, *limit)
    assert result.returncode == 0, result.stdout + result.stderr
    live = [0, 2] if fault == "kill" else [0, 1, 2]
    for rank in live:
        assert f"[rank {rank}] call 2, the fault: " in result.stdout
    assert result.stdout.splitlines()[-1].startswith(f"# OK: all {len(live)} ")
    assert f"succeeded on ranks {', '.join(map(str, live))}." in result.stdout
