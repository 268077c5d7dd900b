"""The words in which torch's backends say that a collective broke, from torch 2.6 to 2.15.

C++ raises plain RuntimeErrors in many places, so that the text has to tell. Sources: gloo's and ProcessGroupNCCL's
messages as they came out of torch 2.6, 2.13 and 2.15, gloo and NCCL (on an emulated GPU).
"""

from __future__ import annotations

import re
from typing import Final

import torch.distributed as dist

_BROKEN: Final = re.compile(
    r"/gloo/|Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting \d+ms for"
    r"|Application timeout caused pair closure|ProcessGroup(NCCL|Gloo)|NCCL (error|communicator was aborted)"
    r"|nccl(Remote|System)Error|DistBackendError"
    # nccl2 raises a plain RuntimeError: "NCCL Broadcast failed in all_gather: ..." (torch 2.15)
    r"|NCCL \w+ failed|NCCL operation timed out|failed to pass monitoredBarrier|remote process exited or there was a network error"
)


def broken_collective(text: str) -> bool:
    """Whether an exception's text is that of a collective whose transport broke or was stopped."""
    return _BROKEN.search(text) is not None


def from_collective(error: BaseException) -> bool:
    """Whether torch's C++ raised `error` for a collective: a DistError, or a RuntimeError in a backend's words."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and broken_collective(str(error))
