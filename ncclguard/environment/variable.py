"""What the catalogue knows of one environment variable, and how a value is checked against it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from ncclguard.environment.versions import Versions, within


class Reader(str, Enum):
    """Who reads a variable; decides which version counts."""

    TORCH = "torch"  # every build
    TORCH_NCCL = "torch with NCCL"  # CUDA builds: ProcessGroupNCCL
    GLOO = "gloo"  # comes with every torch
    NCCL = "NCCL"
    DEEPSPEED = "DeepSpeed"
    NOTHING = "nothing"


class Kind(str, Enum):
    """What a value has to look like."""

    TEXT = "text"
    BOOL = "boolean"
    INTEGER = "integer"
    CHOICE = "one of"


# getCvarBool of torch (torch/csrc/distributed/c10d/Utils.hpp) takes these, whatever the case, and raises on others.
TRUE_WORDS = frozenset({"y", "yes", "1", "t", "true"})
FALSE_WORDS = frozenset({"n", "no", "0", "f", "false"})


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable.

    ``since`` and ``until`` are versions of the reader, both inclusive; ``until=None`` means that the newest known one
    still reads it. ``default`` is what holds when the variable is absent. ``read_at`` is the moment from which on a
    change has no effect. ``replaced_by`` names the variable that took its place (it is then a deprecated alias from
    ``deprecated_since`` on), ``instead`` says what to use where nothing reads the name. ``not_by_nccl2``: torch 2.15's
    nccl2 does not heed it (tried there).
    """

    name: str
    reader: Reader
    sentence: str
    source: str
    since: str | None = None
    until: str | None = None
    default: str = ""
    unit: str = ""
    kind: Kind = Kind.TEXT
    choices: tuple[str, ...] = ()
    low: int | None = None
    high: int | None = None
    read_at: str = "init_process_group"
    replaced_by: str | None = None
    deprecated_since: str | None = None
    instead: str | None = None
    differs_per_host: bool = False
    not_by_nccl2: bool = False

    def version_of_reader(self, versions: Versions) -> str | None:
        """The installed version that counts for this variable; None when it is unknown."""
        if self.reader is Reader.NCCL:
            return versions.nccl_for_names
        if self.reader in (Reader.TORCH, Reader.TORCH_NCCL, Reader.GLOO):
            return versions.torch
        return None

    def is_read(self, versions: Versions) -> bool | None:
        """Whether the installed versions read the name; None when that is not known."""
        if self.reader is Reader.NOTHING or (self.not_by_nccl2 and versions.nccl2):
            return False
        version = self.version_of_reader(versions)
        if version is None:
            return None
        return within(version, self.since, self.until)

    def is_deprecated(self, versions: Versions) -> bool:
        """Whether the installed version reads the name only as an alias of ``replaced_by``."""
        if self.replaced_by is None:
            return False
        version = self.version_of_reader(versions)
        return version is not None and within(version, self.deprecated_since, None)

    def fault_of(self, value: str) -> str | None:
        """What is wrong with a value, as the rest of a sentence that begins with the name; None when nothing is.

        >>> Variable("X", Reader.TORCH, "", "", kind=Kind.BOOL).fault_of("maybe")
        'takes 1/0, true/false, yes/no, t/f or y/n'
        """
        if self.kind is Kind.BOOL and value.lower() not in TRUE_WORDS | FALSE_WORDS:
            return "takes 1/0, true/false, yes/no, t/f or y/n"
        if self.kind is Kind.CHOICE and value.upper() not in self.choices:
            return f"takes one of {', '.join(self.choices)}"
        if self.kind is Kind.INTEGER:
            return self._fault_of_integer(value)
        return None

    def _fault_of_integer(self, value: str) -> str | None:
        wanted = "a whole number" + (f" of {self.unit}" if self.unit else "")
        if re.fullmatch(r"\s*[+-]?\d+\s*", value) is None:
            return f"takes {wanted}"
        number = int(value)
        if self.low is not None and number < self.low:
            return f"takes {wanted} of at least {self.low}"
        if self.high is not None and number > self.high:
            return f"takes {wanted} of at most {self.high}"
        return None

    @property
    def allowed(self) -> str:
        """What values are taken, in words."""
        if self.kind is Kind.CHOICE:
            return ", ".join(self.choices)
        if self.kind is Kind.INTEGER and (self.low is not None or self.high is not None):
            low = "" if self.low is None else str(self.low)
            high = "" if self.high is None else str(self.high)
            return f"{low}..{high}"
        return str(self.kind.value)
