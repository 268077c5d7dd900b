"""The name of a guarded group, as store keys, operation ids and incidents carry it: made here and read here only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class GroupKey:
    """One guarded group: the `process_group` by its name in torch, the kind of `device`, and a digest of its members.

    `queue`: empty for `safe_*`; "backend" for the collectives of the backend "ncclguard", and "backend:0>1" for its
    messages from rank 0 to rank 1. `life`: how many groups of the same name there were before.

    >>> str(GroupKey.of("0", "cpu", (0, 1)))
    '0:cpu:c4a31b5e'
    >>> GroupKey.parse("0:cpu:backend:c4a31b5e.2").queue
    'backend'
    """

    process_group: str
    device: str
    queue: str
    members: str
    life: int = 0

    @classmethod
    def of(cls, process_group: str, device: str, ranks: tuple[int, ...], queue: str = "", life: int = 0) -> GroupKey:
        """The key of a group with these global ranks."""
        members = hashlib.blake2b(repr(ranks).encode(), digest_size=4).hexdigest()
        return cls(process_group, device, queue, members, life)

    @classmethod
    @lru_cache(maxsize=1024)
    def parse(cls, text: str) -> GroupKey:
        """Read what `str` made; any other text, such as the key of `watch`, is the process group's name."""
        parts = text.split(":")
        if len(parts) < 3:
            return cls(text, "", "", "")
        members, _, life = parts[-1].partition(".")
        return cls(parts[0], parts[1], ":".join(parts[2:-1]), members, int(life or 0))

    def __str__(self) -> str:
        parts = [self.short, self.members] if self.members else [self.short]
        return ":".join(parts) + (f".{self.life}" if self.life else "")

    @property
    def short(self) -> str:
        """The key for people, without the digest of the members: "0:cpu"."""
        return ":".join(part for part in (self.process_group, self.device, self.queue) if part)
