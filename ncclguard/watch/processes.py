"""The processes of this host's other ranks: a wait that ends the moment one of them does."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

from ncclguard.coordination.liveness import Identity, Sight, look_here
from ncclguard.incident.host_processes import process_state


class Processes:
    """Used by one thread, except `wake`. Costs nothing while all live: the kernel ends the wait (pidfd_open(2))."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._bell, select.POLLIN)
        self._peers: dict[int, Identity] = {}
        self._descriptors: dict[int, int] = {}  # pidfd -> rank
        self._polled: set[int] = set()  # ranks of which there is no descriptor
        self._ended: set[int] = set()

    def learn(self, peers: Iterable[Identity]) -> None:
        """Watch these ranks' processes too."""
        for peer in peers:
            if peer.rank in self._peers:
                continue
            self._peers[peer.rank] = peer
            try:
                descriptor = os.pidfd_open(peer.pid)
            except (OSError, AttributeError):  # gone already, or an old kernel: looked at with every wait
                self._polled.add(peer.rank)
                continue
            state = process_state(peer.pid)
            if state is None or state[1] != peer.start_ticks:  # the pid belongs to a later process
                os.close(descriptor)
                self._polled.add(peer.rank)
                continue
            self._descriptors[descriptor] = peer.rank
            self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> list[tuple[int, str]]:
        """Return ranks whose process has ended, with the evidence; earlier than `seconds`
        when one does, or after `wake`.
        """
        events = self._poll.poll(max(seconds, 0.0) * 1000)
        found = []
        for descriptor, _ in events:
            if descriptor == self._bell:
                self._quieten()
                continue
            rank = self._descriptors.pop(descriptor)
            self._poll.unregister(descriptor)
            os.close(descriptor)
            if rank not in self._ended:
                self._ended.add(rank)
                found.append((rank, self._evidence(rank)))
        for rank in sorted(self._polled - self._ended):
            sight, evidence = look_here(self._peers[rank])
            if sight is Sight.GONE:
                self._ended.add(rank)
                found.append((rank, evidence))
        return found

    def wake(self) -> None:
        """End the wait; any thread."""
        try:
            os.eventfd_write(self._bell, 1)
        except OSError:  # closed meanwhile
            return

    def close(self) -> None:
        """Release the descriptors; not while a thread waits."""
        for descriptor in (self._bell, *self._descriptors):
            os.close(descriptor)
        self._descriptors.clear()

    def _quieten(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return

    def _evidence(self, rank: int) -> str:
        peer = self._peers[rank]
        text = f"process {peer.pid} of rank {rank} on {peer.host} has ended"
        how = exit_status(peer.pid)
        return f"{text}: {how}" if how else text


def exit_status(pid: int) -> str:
    """How a process ended, while its parent has not collected it yet; empty when that cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return ""
    fields = text[text.rindex(b")") + 2 :].split()
    if fields[0] not in (b"Z", b"X") or len(fields) < 50:
        return ""
    status = int(fields[49])  # field 52 of proc(5), 0 to those who may not see it
    if os.WIFSIGNALED(status):
        import signal

        try:
            return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        except ValueError:
            return f"killed by signal {os.WTERMSIG(status)}"
    return f"exit code {os.WEXITSTATUS(status)}" if status else ""
