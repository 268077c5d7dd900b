"""The command line of the bench: sizes as people write them, and all options as one frozen record."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import NoReturn

import torch

from ncclguard.arguments import positive_seconds, whole_from
from ncclguard.errors import GuardConfigError
from ncclguard_explain.command_line import Parser, described
from ncclguard_explain.language import received, speaking_to, told, tr

_LARGEST = 2**62  # bytes; above it torch's own 64-bit sizes end
_MOST = 1000  # sizes of a sweep: each takes seconds
_NUMBER = re.compile(r"^\s*(?P<number>[0-9][0-9_]*(?:\.[0-9_]+)?(?:[eE][+]?[0-9]{1,3})?)\s*(?P<unit>[A-Za-z]*)\s*$")
_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


@dataclass(frozen=True, slots=True)
class Size:
    """A number of elements, or a number of bytes when the text had a unit.

    Example:
        >>> parse_size("1.5GiB").numel(element_size=4)
        402653184
        >>> parse_size("5e8").numel(element_size=4)
        500000000
    """

    value: Decimal
    is_bytes: bool
    text: str

    def numel(self, element_size: int) -> int:
        """Number of elements of `element_size` bytes; bytes are rounded down to whole elements.

        Raises:
            ValueError: fewer than one element, or more than 2**62 bytes.
        """
        count = int(self.value) // element_size if self.is_bytes else int(self.value)
        if count < 1:
            raise ValueError(
                told(
                    "{text} is less than one element of {count} bytes; ask for at least one.",
                    text=repr(self.text),
                    count=element_size,
                )
            )
        if count * element_size > _LARGEST:
            raise ValueError(told("{text} is more than 2**62 bytes; ask for less.", text=repr(self.text)))
        return count


def parse_size(text: str) -> Size:
    """Read one size: a plain number counts elements, a number with `B`, `MB`, `GiB` and so on counts bytes.

    Raises:
        ValueError: not a size, or not a whole number of elements.
    """
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(
            told(
                "{text} is not a size; write elements as 5e8 or 500_000_000, bytes as 1.5GiB or 64MB.", text=repr(text)
            )
        )
    value = Decimal(match["number"].replace("_", ""))
    unit = match["unit"].lower()
    if unit:
        if unit not in _UNITS:
            hint = f"; write {match['number']}{unit.upper()}iB for bytes" if unit in ("k", "m", "g", "t") else ""
            raise ValueError(f"{text!r}: unknown unit {match['unit']!r}{hint}; units are B, KB to TB and KiB to TiB.")
        return Size(value * _UNITS[unit], True, text.strip())
    if value != value.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number of elements; write for instance {int(value)}, or add a unit.")
    return Size(value, False, text.strip())


def sweep(first: int, last: int, factor: float) -> tuple[int, ...]:
    """Numbers of elements from `first` up to `last`, each `factor` times the one before.

    Raises:
        ValueError: `last` below `first`, a factor that does not grow, or one that gives more than 1,000 sizes.

    Example:
        >>> sweep(1, 1000, 10)
        (1, 10, 100, 1000)
    """
    if last < first:
        raise ValueError(f"--max ({last}) is below --min ({first}); swap them.")
    if not 1 < factor < float("inf"):
        raise ValueError(f"--factor must be above 1, it is {factor:g}; take for instance 2 or 10.")
    sizes = [first]
    while (following := max(sizes[-1] + 1, int(min(sizes[-1] * factor, last + 1)))) <= last:
        if len(sizes) == _MOST:
            raise ValueError(
                f"--factor {factor:.10g} makes more than {_MOST:,} sizes of {first} to {last}; take a larger one."
            )
        sizes.append(following)
    return tuple(sizes)


OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier")
FAULTS = ("late", "kill", "stop", "mismatch", "reset")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.int8,
        torch.uint8,
    )
}
DEFAULT_NUMELS = (1, 10_000, 1_000_000, 100_000_000)  # latency, small, middle, and one that is cut into pieces
FAULT_NUMEL = 1_000_000
RESET_NUMEL = 100_000_000  # long enough on loopback to break its connections half-way
EXIT_CODES = {
    0: "nothing was wrong",
    1: "a result was wrong, a call failed, or a file could not be written",
    2: "the request cannot be met; nothing was started",
    130: "Ctrl-C; what was measured until then is printed",
}
EXAMPLES = {
    "ncclguard bench": "four sizes of all_reduce, with as many ranks as there are GPUs, else 2",
    "ncclguard bench --numel 5e8 --ranks 4 --json figures.json": "one size, and every figure in a file",
    "ncclguard bench --min 1KiB --max 1GiB --factor 4 --plot sweep.png": "a sweep, drawn",
    "ncclguard bench --fault kill --ranks 4": "kill a rank and see what the guard says",
    "torchrun --nnodes 2 ... -m ncclguard.bench --op all_gather": "in the world of a launcher",
}
LIMITS = {"late": 5.0, "stop": 5.0}  # seconds; short, because these faults end only at the deadline


class BenchError(GuardConfigError):
    """The bench cannot do what was asked; nothing was started, allocated or written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All options of one run of the bench.

    `numels` are whole-operation sizes in elements, as nccl-tests counts them: the larger of the send and the
    receive side. `seconds` is the time to spend on each size when `iters` is None. `timeout` bounds one call.
    """

    op: str
    dtype: str
    numels: tuple[int, ...]
    iters: int | None
    warmup: int | None
    seconds: float
    timeout: float
    atomics: tuple[bool, ...]
    rounds: bool
    ranks: int | None
    backend: str | None
    json_path: Path | None
    plot_path: Path | None
    fault: str | None
    fault_rank: int | None

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def element_size(self) -> int:
        return self.torch_dtype.itemsize


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        said = received(message.removesuffix("."))
        with speaking_to(sys.stderr):
            text = told("{text}. `python -m ncclguard.bench --help` lists every option.", text=said)
        raise BenchError(text)


def _size(text: str) -> Size:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, with every option and its default in its help text."""
    parser = _Parser(
        prog="ncclguard bench",
        description="Compare plain torch.distributed collectives with guarded ones, side by side in one run, and check "
        "every element of every result. Sizes: 5e8 or 500_000_000 count elements; 1.5GiB or 64MB count bytes.",
    )
    sizes = parser.add_argument_group(tr("sizes", "help"))
    sizes.add_argument(
        "--numel",
        type=_size,
        nargs="+",
        action="extend",
        metavar="SIZE",
        help=tr("one or more sizes (default: {some})", "help", some=", ".join(f"{n:_}" for n in DEFAULT_NUMELS)),
    )
    sizes.add_argument("--min", type=_size, metavar="SIZE", help="first size of a sweep; needs --max")
    sizes.add_argument("--max", type=_size, metavar="SIZE", help="last size of a sweep; needs --min")
    sizes.add_argument("--factor", type=float, help="growth from one size of the sweep to the next (default: 10)")

    what = parser.add_argument_group(tr("what is measured", "help"))
    what.add_argument("--op", choices=OPERATIONS, default="all_reduce", help="the collective (default: all_reduce)")
    what.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="element type (default: float32)")
    what.add_argument(
        "--atomic",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="only the guarded call that keeps (or does not keep) a copy of its input (default: both)",
    )
    what.add_argument(
        "--rounds",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the guarded group checks before each operation that all ranks call the same (default: --rounds)",
    )
    what.add_argument(
        "--iters", type=whole_from(1), metavar="N", help="timed calls per variant and size (default: by time)"
    )
    what.add_argument(
        "--warmup", type=whole_from(0), metavar="N", help="untimed cycles per size (default: 1 to 3, by size)"
    )
    what.add_argument(
        "--seconds", type=positive_seconds, help="time for each size without --iters (default: 3; one size: 10)"
    )
    what.add_argument(
        "--timeout", type=positive_seconds, help="limit for one call, in seconds (default: 300; --fault late, stop: 5)"
    )

    where = parser.add_argument_group(tr("where", "help"))
    where.add_argument(
        "--ranks",
        type=whole_from(1),
        metavar="N",
        help="ranks to start when no launcher did (default: one per GPU, without a GPU 2; with --fault 4)",
    )
    where.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl where there are GPUs, else gloo")

    output = parser.add_argument_group(tr("output", "help"))
    output.add_argument("--json", type=Path, metavar="FILE", help="write every figure here; never overwrites a file")
    output.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw bus bandwidth and ratio over size (matplotlib)"
    )

    fault = parser.add_argument_group(tr("rehearsal", "help"))
    fault.add_argument("--fault", choices=FAULTS, help="make one rank misbehave and show what the guard says and does")
    fault.add_argument("--rank", type=whole_from(0), metavar="R", help="the rank that misbehaves (default: 2)")
    return described(parser, EXAMPLES, EXIT_CODES)


def parse_arguments(argv: Sequence[str]) -> Settings:
    """Read the command line.

    Raises:
        BenchError: the arguments contradict each other or are out of range; the text says what to change.
        SystemExit: after `--help`.
    """
    found = build_parser().parse_args(list(argv))
    if found.fault is None and found.rank is not None:
        raise BenchError("--rank names the rank that misbehaves and needs --fault; the number of ranks is --ranks.")
    if found.fault is not None:
        _check_fault(found)
    numels = _numels(found)
    seconds = found.seconds or (10.0 if len(numels) == 1 else 3.0)
    return Settings(
        op=found.op,
        dtype=found.dtype,
        numels=numels,
        iters=found.iters,
        warmup=found.warmup,
        seconds=seconds,
        timeout=found.timeout or (300.0 if found.fault is None else LIMITS.get(found.fault, 60.0)),
        atomics=(False, True) if found.atomic is None else (bool(found.atomic),),
        rounds=found.rounds,
        ranks=found.ranks,
        backend=found.backend,
        json_path=found.json,
        plot_path=found.plot,
        fault=found.fault,
        fault_rank=None if found.fault is None else (2 if found.rank is None else found.rank),
    )


def _check_fault(found: argparse.Namespace) -> None:
    if found.op != "all_reduce":
        raise BenchError(f"--fault rehearses an all_reduce, not {found.op}; leave --op away.")
    for name in ("json", "plot", "iters", "warmup", "seconds"):
        if getattr(found, name) is not None:
            raise BenchError(f"--fault measures nothing, so --{name} does not go with it; leave one of them away.")
    if found.atomic is False:
        raise BenchError(
            "--fault shows that the tensors stay as they were, which needs their copy; leave --no-atomic away."
        )
    if (found.numel is not None and len(found.numel) > 1) or found.min is not None:
        raise BenchError("--fault runs at one size; give one --numel.")


def _numels(found: argparse.Namespace) -> tuple[int, ...]:
    element_size = DTYPES[found.dtype].itemsize
    if found.op == "barrier":
        if found.numel or found.min or found.max:
            raise BenchError("a barrier moves no elements; leave --numel, --min and --max away.")
        return (0,)
    if found.numel and (found.min or found.max):
        raise BenchError("--numel and --min/--max both choose the sizes; use one of them.")
    if (found.min is None) != (found.max is None):
        raise BenchError("a sweep needs both --min and --max; for one size use --numel.")
    if found.factor is not None and found.min is None:
        raise BenchError("--factor belongs to a sweep; add --min and --max.")
    try:
        if found.numel:
            return tuple(size.numel(element_size) for size in found.numel)
        if found.min:
            first, last = found.min.numel(element_size), found.max.numel(element_size)
            return sweep(first, last, 10.0 if found.factor is None else found.factor)
    except ValueError as error:
        raise BenchError(str(error)) from None
    if found.fault is not None:
        return (RESET_NUMEL if found.fault == "reset" else FAULT_NUMEL,)
    return DEFAULT_NUMELS
