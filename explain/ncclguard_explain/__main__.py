"""The `ncclguard-explain` command, for where ncclguard itself is not installed; also `python -m ncclguard_explain`."""

from __future__ import annotations

import sys

from ncclguard_explain import command
from ncclguard_explain.command_line import run_command


def main() -> int:
    """Run `explain` on the arguments of this process and return its exit code."""
    return run_command(lambda: command.main(program="ncclguard-explain"))


if __name__ == "__main__":
    sys.exit(main())
