"""What the guard needs to know of a call besides how it is carried out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ncclguard.agreement.decision import NOBODY, Operation


@dataclass(frozen=True, slots=True)
class Request:
    """One kind of call, as the guard needs it."""

    op: str
    text: str
    fingerprint: int
    max_attempts: int
    shrink: bool
    atomic: bool | str
    numel: int
    nbytes: int
    needs: int = NOBODY

    def operation(self, closing: bool) -> Operation:
        """The agreement's view of it; its sequence number is assigned when it enters."""
        return _operation(self.fingerprint, self.text, closing, self.shrink, self.needs, self.max_attempts)


@lru_cache(maxsize=4096)
def _operation(fingerprint: int, text: str, closing: bool, shrink: bool, needs: int, max_attempts: int) -> Operation:
    """Programs make the same few calls over and over."""
    return Operation(0, fingerprint, text, closing, shrink, needs, max_attempts)
