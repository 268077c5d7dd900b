"""`python -m ncclguard.bench`: measure in the world a launcher gave, or start ranks on this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ncclguard.bench.arguments import EXIT_CODES, BenchError, build_parser, parse_arguments
from ncclguard.bench.job import objection, run_rank
from ncclguard.bench.ranks import STALL_GRACE, Supervisor, World, choose_backend, choose_ranks, detect
from ncclguard.bench.rehearsal import check_fault, run_fault
from ncclguard_explain.command_line import run_command

__all__ = ["EXIT_CODES", "build_parser", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code: 0 nothing wrong, 1 something wrong, 2 refused, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        settings = parse_arguments(arguments)
        world = detect(os.environ)
        backend = choose_backend(settings.backend)
        ranks = world.size if world is not None else choose_ranks(settings.ranks, backend, settings.fault is not None)
        if settings.ranks is not None and settings.ranks != ranks:
            raise BenchError(f"--ranks {settings.ranks}: the launcher started {ranks}; leave --ranks away.")
        check_fault(settings, ranks, None if world is None else world.launcher)
        if world is not None:
            if settings.fault is not None:
                return run_fault(settings, world)
            return run_rank(settings, world, arguments)
        refused = objection(settings, World(0, ranks, 0, ranks, "the bench"), None) if backend == "gloo" else None
        if refused is not None:
            raise BenchError(refused)
        spare = settings.fault_rank if settings.fault == "kill" else None
        return Supervisor(arguments, ranks, settings.timeout + STALL_GRACE, spare).run()
    except KeyboardInterrupt:
        return 130
    except BenchError as error:
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":  # once for the job
            print(f"ncclguard bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run_command(main))
