"""What a process sees of its peers, on real processes: killed, zombie, stopped, reused pid, forked child, closed port."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from ncclguard.coordination import liveness as liveness_module
from ncclguard.coordination.liveness import (
    PROBE_AGAIN,
    PROBE_LIMIT,
    PROBES,
    RETURNED_FOR,
    Identity,
    Liveness,
    Sight,
    host_key,
    silent_cause,
)
from ncclguard.incident.stacks import process_state
from ncclguard_explain.cause import Cause

pytestmark = pytest.mark.processes

LIMIT = 20.0  # seconds, for what must happen at some time

# Without torch, which it does not need: so it starts 30 times as fast.
PEER = """
import sys
from ncclguard.coordination.liveness import Liveness
assert "torch" not in sys.modules
liveness = Liveness(rank=1, advertise_address="127.0.0.1")
print(liveness.identity.to_json(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def me() -> Iterator[Liveness]:
    liveness = Liveness(rank=0, advertise_address="127.0.0.1")
    yield liveness
    liveness.close()


@contextmanager
def peer_process(program: str = PEER) -> Iterator[tuple[subprocess.Popen[str], Identity]]:
    """A process with a Liveness of its own, and the identity that it published."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield process, Identity.from_json(process.stdout.readline())
    finally:
        with suppress(ProcessLookupError):  # the test has ended it already
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT)


def elsewhere(identity: Identity) -> Identity:
    """The same process as if it ran on another host, so that only its port can be looked at."""
    return dataclasses.replace(identity, host="elsewhere", host_key="another host")


def until(look: Callable[[], tuple[Sight, str]], wanted: Sight) -> str:
    """Look again until ``wanted`` is seen; fails after LIMIT seconds with what was seen instead."""
    deadline = time.monotonic() + LIMIT
    while True:
        sight, evidence = look()
        if sight is wanted:
            return evidence
        assert time.monotonic() < deadline, f"saw {sight}: {evidence}; expected {wanted}"
        time.sleep(0.02)


def test_a_running_process_is_running(me: Liveness) -> None:
    with peer_process() as (_, identity):
        sight, evidence = me.look(identity)
    assert sight is Sight.RUNNING
    assert str(identity.pid) in evidence


def test_a_killed_and_collected_process_is_gone(me: Liveness) -> None:
    with peer_process() as (process, identity):
        process.kill()
        process.wait(timeout=LIMIT)
        sight, evidence = me.look(identity)
    assert sight is Sight.GONE
    assert "does not exist any more" in evidence


def test_a_killed_process_that_nobody_collected_is_gone_although_its_pid_exists(me: Liveness) -> None:
    with peer_process() as (_, identity):
        os.kill(identity.pid, signal.SIGKILL)
        evidence = until(lambda: me.look(identity), Sight.GONE)
        os.kill(identity.pid, 0)  # still there, as a zombie
    assert evidence.endswith("has ended: killed by SIGKILL")


def test_a_stopped_process_is_stopped_until_it_continues(me: Liveness) -> None:
    with peer_process() as (_, identity):
        os.kill(identity.pid, signal.SIGSTOP)
        until(lambda: me.look(identity), Sight.STOPPED)
        os.kill(identity.pid, signal.SIGCONT)
        until(lambda: me.look(identity), Sight.RUNNING)


def test_a_reused_pid_is_gone_and_not_taken_for_the_peer(me: Liveness) -> None:
    with peer_process() as (_, identity):
        earlier = dataclasses.replace(identity, start_ticks=identity.start_ticks - 1)
        sight, evidence = me.look(earlier)
    assert sight is Sight.GONE
    assert "started later" in evidence


def test_a_process_name_with_parentheses_and_spaces_does_not_shift_the_fields() -> None:
    program = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0)\n" + PEER
    with peer_process(program) as (_, identity):
        with open(f"/proc/{identity.pid}/comm") as file:
            assert file.read() == "a) R 1 (b\n"
        state = process_state(identity.pid)
    assert state is not None
    assert state[1] == identity.start_ticks


def test_the_host_key_tells_hostname_network_namespace_and_pid_namespace() -> None:
    key = host_key()
    assert socket.gethostname() in key
    assert os.readlink("/proc/self/ns/net") in key
    assert os.readlink("/proc/self/ns/pid") in key


def test_an_open_port_shows_a_process_on_another_host(me: Liveness) -> None:
    with peer_process() as (_, identity):
        assert "answers" in until(lambda: me.look(elsewhere(identity)), Sight.PRESENT)


def test_a_stopped_process_on_another_host_still_is_present(me: Liveness) -> None:
    with peer_process() as (_, identity):
        os.kill(identity.pid, signal.SIGSTOP)
        until(lambda: me.look(elsewhere(identity)), Sight.PRESENT)


def test_a_port_that_was_reached_and_then_refuses_means_gone_for_good(me: Liveness) -> None:
    with peer_process() as (process, identity):
        peer = elsewhere(identity)
        me.befriend(peer)
        until(lambda: me.look(peer), Sight.PRESENT)
        process.kill()
        assert "answered before" in until(lambda: me.look(peer), Sight.GONE)
        assert identity.port is not None
        with socket.create_server(identity.port):  # another process that is given the port is not the peer
            time.sleep(1.2 * PROBE_AGAIN)
            assert me.look(peer)[0] is Sight.GONE


def test_a_port_that_refuses_and_was_never_reached_is_unknown(me: Liveness) -> None:
    with peer_process() as (process, identity):
        process.kill()
        process.wait(timeout=LIMIT)
        deadline = time.monotonic() + 2.5 * PROBE_AGAIN  # over several probes
        while time.monotonic() < deadline:
            sight, evidence = me.look(elsewhere(identity))
            assert sight is Sight.UNKNOWN
            time.sleep(0.05)
    assert "never reached before" in evidence


def test_a_silent_port_is_unknown_and_no_look_blocks(me: Liveness) -> None:
    """A full queue drops connections without an answer, as a partition does; a hundred looks return at once."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        queued = [socket.socket() for _ in range(4)]
        for one in queued:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        peer = dataclasses.replace(elsewhere(me.identity), port=full.getsockname())
        longest = 0.0
        evidence = ""
        deadline = time.monotonic() + LIMIT
        while "did not answer within" not in evidence and time.monotonic() < deadline:
            before = time.monotonic()
            sight, evidence = me.look(peer)
            longest = max(longest, time.monotonic() - before)
            assert sight is Sight.UNKNOWN
            time.sleep(0.01)
        for one in queued:
            one.close()
    assert "did not answer within" in evidence
    assert longest < PROBE_AGAIN / 2  # far above the 20 ms it may wait, far below the probe's own limit


def test_a_host_that_comes_back_is_not_called_stuck_although_its_process_can_be_seen_again(
    me: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks may not have come to answer: their own connections take as long again to recover."""
    ahead = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    monkeypatch.setattr(liveness_module, "time", clock)
    with socket.socket() as port, contextlib.ExitStack() as stack:
        port.bind(("127.0.0.1", 0))
        port.listen(0)
        for _ in range(4):
            queued = stack.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(port.getsockname())
        peer = dataclasses.replace(elsewhere(me.identity), port=port.getsockname())
        me.seek([peer], clock.monotonic())
        ahead += PROBE_LIMIT
        assert me.look(peer)[0] is Sight.UNKNOWN
        port.listen(64)  # from here on there is room for whoever comes
        ahead += PROBE_AGAIN
        evidence = until(lambda: me.look(peer), Sight.RETURNED)
        assert "answers, and did not" in evidence
        assert silent_cause(Sight.RETURNED) is Cause.UNKNOWN
        ahead += RETURNED_FOR
        until(lambda: me.look(peer), Sight.PRESENT)
    assert silent_cause(Sight.PRESENT) is Cause.STUCK


def test_a_first_packet_that_had_to_be_sent_again_shows_that_a_host_was_away(me: Liveness) -> None:
    """The network comes back while the first probe is under way: the kernel's second try, a second later, is answered."""
    with socket.socket() as port, contextlib.ExitStack() as stack:
        port.bind(("127.0.0.1", 0))
        port.listen(0)
        for _ in range(4):
            queued = stack.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(port.getsockname())
        with socket.socket() as probe:
            probe.setblocking(False)
            probe.connect_ex(port.getsockname())
            port.listen(64)
            assert select.select([], [probe], [], LIMIT)[1]
            assert liveness_module._was_sent_again(probe)
        with socket.create_connection(port.getsockname()) as straight:
            assert not liveness_module._was_sent_again(straight)


def test_many_ports_are_reached_for_at_once_but_not_all_and_no_connection_is_left(
    me: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks about them again: `drain`, which every step of the monitor calls, ends what has had its time."""
    ahead = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    monkeypatch.setattr(liveness_module, "time", clock)
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            queued = stack.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(full.getsockname())
        port = full.getsockname()
        peers = [dataclasses.replace(elsewhere(me.identity), rank=rank, port=port) for rank in range(1, PROBES + 45)]
        since = clock.monotonic()
        me.seek(peers, since)
        me.seek(peers, since)
        assert len(me._under_way) == PROBES
        ahead += PROBE_LIMIT
        me.drain()
        assert not me._under_way
        me.seek(peers, since)
        assert len(me._under_way) == 44  # those that had to wait, and none twice
        ahead += PROBE_LIMIT
        me.drain()
    assert all(probe.connection is None for probe in me._probes.values())
    assert {probe.answer[0] for probe in me._probes.values() if probe.answer} == {Sight.UNKNOWN}


def test_ports_that_were_reached_for_have_answered_when_they_are_looked_at(me: Liveness) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        peers = [
            dataclasses.replace(elsewhere(me.identity), rank=rank, port=server.getsockname()) for rank in range(1, 40)
        ]
        me.seek(peers, time.monotonic())
        assert {me.look(peer)[0] for peer in peers} == {Sight.PRESENT}


def test_a_peer_without_a_port_is_unknown(me: Liveness) -> None:
    sight, evidence = me.look(dataclasses.replace(elsewhere(me.identity), port=None))
    assert sight is Sight.UNKNOWN
    assert "could not open a port" in evidence


def test_draining_empties_the_queue_and_never_blocks(me: Liveness) -> None:
    me.drain()
    assert me.identity.port is not None
    with socket.create_connection(me.identity.port, timeout=LIMIT) as caller:
        caller.settimeout(LIMIT)
        deadline = time.monotonic() + LIMIT
        caller.setblocking(False)
        while time.monotonic() < deadline:
            me.drain()
            try:
                assert caller.recv(1) == b""  # collected and closed
                break
            except BlockingIOError:
                time.sleep(0.01)
        else:
            pytest.fail("the connection was not collected")


def test_a_forked_child_keeps_nothing_open_so_the_port_shuts_with_the_rank(me: Liveness) -> None:
    program = PEER.replace(
        "sys.stdin", "import os, time\nif os.fork() == 0:\n    time.sleep(60); os._exit(0)\nsys.stdin"
    )
    with peer_process(program) as (process, identity):
        peer = elsewhere(identity)
        until(lambda: me.look(peer), Sight.PRESENT)
        time.sleep(0.2)  # the child is past its fork hooks
        process.kill()
        until(lambda: me.look(peer), Sight.GONE)


def test_a_started_program_does_not_inherit_the_port(me: Liveness) -> None:
    program = PEER.replace(
        "sys.stdin", "import subprocess\nsubprocess.Popen(['sleep', '60'], close_fds=False)\nsys.stdin"
    )
    with peer_process(program) as (process, identity):
        peer = elsewhere(identity)
        until(lambda: me.look(peer), Sight.PRESENT)
        process.kill()
        until(lambda: me.look(peer), Sight.GONE)


def test_closing_makes_this_process_look_gone_to_its_peers_and_can_be_repeated(me: Liveness) -> None:
    other = Liveness(rank=1, advertise_address="127.0.0.1")
    peer = elsewhere(other.identity)
    until(lambda: me.look(peer), Sight.PRESENT)
    other.close()
    other.close()
    other.drain()
    until(lambda: me.look(peer), Sight.GONE)


def test_an_advertised_address_that_is_not_local_is_published_as_given() -> None:
    """Behind address translation the port listens on all addresses and is published under the one that peers use."""
    liveness = Liveness(rank=0, advertise_address="192.0.2.7")
    try:
        assert liveness.identity.port is not None
        assert liveness.identity.port[0] == "192.0.2.7"
        with socket.create_connection(("127.0.0.1", liveness.identity.port[1]), timeout=LIMIT):
            pass
    finally:
        liveness.close()


def test_the_address_is_the_one_from_which_the_master_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    liveness = Liveness(rank=0)
    liveness.close()
    assert liveness.identity.port is not None
    assert liveness.identity.port[0] == "127.0.0.1"


def test_an_identity_survives_json(me: Liveness) -> None:
    assert Identity.from_json(me.identity.to_json()) == me.identity
    without = dataclasses.replace(me.identity, port=None)
    assert Identity.from_json(without.to_json()) == without


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rank": "x"}', "null"])
def test_what_is_no_identity_is_refused_with_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="is no identity of a rank"):
        Identity.from_json(text)
