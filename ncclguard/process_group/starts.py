"""Events that tell whether a device has come to what its host has issued, for the judge of what stands still.

torch's flight recorder tells it with TORCH_NCCL_ENABLE_TIMING=1, whose events keep streams from running beside each
other: a step of FSDP2 that takes 144 ms on "nccl" took 163 ms with it (H200, two ranks under MPS, torch 2.11). The
events here have no timing.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final

import torch

from ncclguard import torch_compat

#: About as many launches as a stream takes before it holds the host, so as many calls as a host can be ahead.
CAPACITY: Final = 1024

#: Captures of the program with collectives in them: who aborts a communicator waits for their end.
captures: Final = torch_compat.Captures()


class Marks:
    """Events on the callers' streams, one before each of the last calls on a communicator.

    What NCCL does for a call begins no earlier than when its event is reached. Calls are found by the time at which the
    recorder has them as issued, by the clock of `time.time_ns`: its numbers are not known before a call, count
    collectives and messages apart, and are not counted for a call that torch refuses.
    """

    def __init__(self, device: torch.device, capacity: int = CAPACITY) -> None:
        self._device = device
        self._missing = capacity  # events that were not needed yet
        self._marks: deque[tuple[int, torch.Event]] = deque()

    def mark(self) -> None:
        """Mark the current stream of the device for the call that comes; in the thread that issues it."""
        if captures.note():
            return  # the recorder has nothing of a capture, and an event in one may not be asked
        if self._missing > 0:
            self._missing -= 1
            event = torch.Event(device=self._device)
        else:
            _, event = self._marks.popleft()
        event.record()
        self._marks.append((time.time_ns(), event))

    def reached(self, issued: int) -> bool:
        """Return whether the device has come to the call issued at this time; also where it is not known any more.

        For the watcher's thread. Who cannot know says yes: a rank whose device has not come to a collective in which
        another one waits is named.
        """
        mark = max((mark for mark in self._marks.copy() if mark[0] <= issued), key=lambda mark: mark[0], default=None)
        if mark is None:
            return True
        torch_compat.leave_captures_alone()
        try:
            with torch.cuda.device(self._device):  # else this thread's first call is one to the first device
                reached = bool(mark[1].query())
        except RuntimeError:  # an error of the device, which the program meets too
            return True
        return reached or mark[0] < self._marks[0][0]  # was used again meanwhile
