"""What the ranks of one host share of what they have read of the job's store: requests, late news, and all that may go wrong with a file."""

from __future__ import annotations

import errno
import os
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from ncclguard.coordination import (
    group_state as state_module,
    host_page,
    monitor as monitor_module,
    revocation as revocation_module,
    store as store_module,
)
from ncclguard.coordination.group_state import OpenCall
from ncclguard.coordination.host_page import SIZE, HostPage, SharedFile, open_page
from ncclguard.coordination.inquiry import Patience
from ncclguard.coordination.liveness import Identity, Sight
from ncclguard.coordination.monitor import Monitor, MonitorSettings
from ncclguard.coordination.store import AgreementStore, Entries
from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Operation, TroubleKind, Verdict
from ncclguard.protocol.timing import Timing
from tests.protocol.test_scale import KnownLiveness

GROUP = "group:cpu:0"


class LocalMemory:
    """Memory for several pages of one process: for models of a host."""

    def __init__(self) -> None:
        self._bytes = bytearray(SIZE)

    def read(self, at: int, size: int) -> bytes:
        return bytes(self._bytes[at : at + size])

    def write(self, at: int, data: bytes) -> None:
        self._bytes[at : at + len(data)] = data

    def hide(self) -> None: ...

    def close(self) -> None: ...


class Counting:
    """A connection to a real store that counts its requests."""

    def __init__(self, store: object, requests: Counter[int], rank: int) -> None:
        self._store, self._requests, self._rank = store, requests, rank

    def __getattr__(self, name: str) -> object:
        self._requests[self._rank] += 1
        return getattr(self._store, name)


class OneHost(KnownLiveness):
    """All ranks on one host; counts how often one of them looks at another's process."""

    def __init__(self, rank: int, killed: set[int], looks: Counter[int]) -> None:
        super().__init__(rank, killed)
        self.identity = Identity(rank, "host", "host", pid=1000 + rank, start_ticks=1, port=None)
        self._looks = looks

    def look(self, peer: Identity) -> tuple[Sight, str]:
        self._looks[self.identity.rank] += 1
        return super().look(peer)


class Host:
    """The monitors of one host's ranks, each with its own connection to a TCPStore, over a clock that is turned by hand."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch, *, shared: bool = True) -> None:
        self.now = 1000.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        for module in (store_module, state_module, monitor_module):
            monkeypatch.setattr(module, "time", clock)
        self.size = size
        self.requests: Counter[int] = Counter()
        self.looks: Counter[int] = Counter()
        self.killed: set[int] = set()
        self.stopped: set[int] = set()
        self.memory = LocalMemory()
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores = [server] + [TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(size - 1)]
        self.monitors = [self._monitor(rank, shared) for rank in range(size)]
        self.states = [monitor.state(GROUP, tuple(range(size))) for monitor in self.monitors]
        self._due = dict.fromkeys(range(size), self.now)
        self.run(3.0)
        assert all(monitor.session_ready.is_set() for monitor in self.monitors)

    def _monitor(self, rank: int, shared: bool) -> Monitor:
        settings = MonitorSettings(
            Timing(),
            lambda group: Patience(30.0, None),
            describe=lambda group, report: report,
            summarise=lambda *_: "",
            open_page=lambda session: HostPage(self.memory) if shared else None,
        )
        store = AgreementStore(Counting(self._stores[rank], self.requests, rank))  # type: ignore[arg-type]
        liveness = OneHost(rank, self.killed, self.looks)
        return Monitor(store, rank, self.size, liveness, settings)  # type: ignore[arg-type]

    def run(self, seconds: float) -> None:
        """Each monitor looks when it would by itself, and a little later than that."""
        end = self.now + seconds
        while True:
            rank = min(self._due, key=lambda rank: self._due[rank])
            if self._due[rank] > end:
                break
            self.now = max(self.now, self._due[rank])
            if rank not in self.killed and rank not in self.stopped:
                self.monitors[rank]._step(self.now)
            self._due[rank] = self.now + self.monitors[rank]._interval() + 0.0001 * (1 + rank * 0.618034 % 1)
        self.now = end

    def enter(self, ranks: range, timeout: float) -> None:
        for rank in ranks:
            self.states[rank].member.enter(Operation(0, 7, "all_reduce(1)", True))
            self.states[rank].wait_in(OpenCall("all_reduce(1)", self.now, self.now + timeout, thread=0))

    def verdicts(self) -> set[Verdict]:
        decided = [state.decided for rank, state in enumerate(self.states) if rank not in self.killed | self.stopped]
        return {found[1] for found in decided if found is not None}


def waiting(size: int, monkeypatch: pytest.MonkeyPatch, *, shared: bool = True) -> tuple[int, int]:
    """Requests at the store, and looks at processes, in three seconds in which all but the last rank wait for it."""
    with monkeypatch.context() as patch:
        host = Host(size, patch, shared=shared)
        host.enter(range(size - 1), 60.0)
        host.run(2.0)  # what each rank publishes once is over
        host.requests.clear()
        host.looks.clear()
        host.run(3.0)
        return host.requests.total(), host.looks.total()


def test_what_a_host_asks_of_the_store_while_its_ranks_wait_does_not_grow_with_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, _ = waiting(2, monkeypatch)
    eight, looks = waiting(8, monkeypatch)
    many, more = waiting(16, monkeypatch)
    assert eight <= 1.1 * alone and many <= 1.1 * alone, (alone, eight, many)
    assert waiting(8, monkeypatch, shared=False)[0] > 5 * eight
    assert more < 4 * looks  # one rank looks at 15 others, not each of 16


def test_the_rank_that_asks_may_be_stopped_or_killed_and_the_others_have_the_news_a_period_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(6, monkeypatch)
    host.enter(range(5), 60.0)
    host.run(2.0)
    for _ in range(2):
        host.requests.clear()
        host.run(1.0)
        speaker = max(range(5), key=lambda rank: host.requests[rank])
        host.stopped.add(speaker)
        HostPage(host.memory).claim(host.monitors[speaker]._store._key("events"), host.now)  # it was asking
        left = next(rank for rank in range(5) if rank not in host.stopped)
        host.monitors[left].post({"kind": "question", "members": []})
        host.run(2.5 * Timing().period)
        live = [host.monitors[rank] for rank in range(5) if rank not in host.stopped]
        assert {monitor._events._counted for monitor in live} == {len(host.stopped)}


@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_the_verdict_on_the_rank_that_asked_for_all_is_agreed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(6, monkeypatch)
    host.enter(range(6), 4.0)
    host.run(2.0)
    host.requests.clear()
    host.run(1.0)
    speaker = max(range(6), key=lambda rank: host.requests[rank])
    (host.stopped if fault == "stopped" else host.killed).add(speaker)
    if fault == "stopped":
        host.run(1.0)
        for rank in set(range(6)) - {speaker}:
            host.states[rank].trouble(0, TroubleKind.DEADLINE, "not complete")
    host.run(Timing().grace if fault == "stopped" else 0.5)
    (verdict,) = host.verdicts()
    assert verdict.culprits == ((speaker, Cause.STUCK if fault == "stopped" else Cause.LOST),)


# ---------------------------------------------------------------------- one page


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(store_module, "time", types.SimpleNamespace(monotonic=lambda: self.now))


def ranks(number: int, store: object, memory: LocalMemory, requests: Counter[int]) -> list[AgreementStore]:
    found = [AgreementStore(Counting(store, requests, rank)) for rank in range(number)]  # type: ignore[arg-type]
    for one in found:
        one.connection.page = HostPage(memory)
    return found


def test_a_value_is_read_from_the_store_once_for_a_host_and_its_absence_once_in_a_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, requests = Clock(monkeypatch), Counter[int]()
    store = HashStore()
    first, second, third = ranks(3, store, LocalMemory(), requests)
    assert first.find("verdict", 0.05) is None
    clock.now += 0.02
    assert second.find("verdict", 0.05) is None and requests[1] == 0
    third.first("verdict", "it" * 5000)
    assert second.find("verdict") == "it" * 5000  # who has heard that it is there asks at once
    requests.clear()
    assert [one.find("verdict", 0.05) for one in (first, second, third)] == ["it" * 5000] * 3
    assert not requests


def test_a_text_that_was_overwritten_or_is_too_long_is_read_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    first, second = ranks(2, HashStore(), LocalMemory(), Counter())
    values = {f"event/{number}": os.urandom(host_page.TEXTS // 24).hex() for number in range(15)}
    values["long"] = os.urandom(host_page.LONGEST_TEXT).hex()
    for key, value in values.items():
        first.first(key, value)
    for _ in range(2):
        for reader in (first, second):
            assert reader.find_many([*values]) == values
            assert {key: reader.find(key) for key in values} == values


def test_two_ranks_that_write_at_once_leave_nothing_wrong_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any mixture of two records, or of two texts, reads as not known."""
    page, other, mixed = LocalMemory(), LocalMemory(), LocalMemory()
    HostPage(page).publish("events", 100.0, 3, b"one" * 50)
    HostPage(other).publish("events", 101.0, 4, b"two" * 50)
    known = {HostPage(memory).look("events") for memory in (page, other)}
    for cut in cuts(page, other):
        mixed.write(0, page.read(0, cut) + other.read(cut, host_page.SIZE - cut))
        found = HostPage(mixed).look("events")
        assert found is None or found in known or (found.text is None and found.value in (3, 4))


def cuts(page: LocalMemory, other: LocalMemory) -> Iterator[int]:
    """Where the two differ."""
    one, two = (memory.read(0, host_page.SIZE) for memory in (page, other))
    yield from (at for at in range(host_page.SIZE) if one[at] != two[at] and at % 3 == 0)


def test_more_keys_than_a_page_has_room_for_push_each_other_out_and_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    first, second = ranks(2, HashStore(), LocalMemory(), Counter())
    for number in range(3 * host_page.SLOTS):
        first.count(f"counter {number}", number)
        clock.now += 0.001
        assert first.recent(f"counter {number}", 1.0) == number
    assert [second.recent(f"counter {number}", 10.0) for number in range(3 * host_page.SLOTS)] == [
        *range(3 * host_page.SLOTS)
    ]


def test_news_is_late_by_a_period_at_most_while_another_rank_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, requests = Clock(monkeypatch), Counter[int]()
    first, second = ranks(2, HashStore(), LocalMemory(), requests)
    reader, writer = Entries("events", "event"), Entries("events", "event")
    assert reader.new(second, 0.05) == []
    clock.now += 0.06
    assert first.connection.page is not None
    first.connection.page.claim(first._key("events"), clock.now)  # and is killed before it has the answer
    writer.add(second, "news")
    clock.now += 0.03
    assert reader.new(second, 0.05) == []
    clock.now += 0.03
    assert reader.new(second, 0.05) == ["news"]


def test_what_is_looked_at_rarely_waits_no_longer_for_a_rank_that_died_while_it_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    first, second = ranks(2, HashStore(), LocalMemory(), Counter())
    departures = Entries("departures", "departure")
    departures.add(first, "rank 3 is gone")
    assert first.connection.page is not None
    first.connection.page.claim(first._key("departure/1"), clock.now)  # and is killed before it has the answer
    reader = Entries("departures", "departure")
    assert reader.new(second, 4.0) == []
    clock.now += host_page.CLAIM_HOLDS
    assert reader.new(second, 4.0) == ["rank 3 is gone"]


def test_what_all_ranks_of_a_host_would_do_at_once_one_does_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, requests = Clock(monkeypatch), Counter[int]()
    first, second, third = ranks(3, HashStore(), LocalMemory(), requests)
    assert not first.left_to_another("group/0/revoke", 0.2)  # it goes, and has no answer yet
    assert revocation_module.revoke(second, "group", 0, 1, hold=0.2) is None
    assert requests[1] == 0
    clock.now += 0.2
    assert revocation_module.revoke(second, "group", 0, 1, hold=0.2) == 1  # the first one did not come back
    assert revocation_module.revoke(third, "group", 0, 2, hold=0.2) == 1
    assert requests[2] == 0
    second.tell_host("report/1")
    assert third.written("report/1", 0.1) and requests[2] == 0
    assert not third.written("report/0", 0.1)
    assert not second.written("report/0", 0.1)  # a rank of this host has just asked
    assert requests[2] == 1 and requests[1] == 1


# ---------------------------------------------------------------------- the file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_page, "FOLDERS", (str(tmp_path),))
    return tmp_path


def opened(session: str, host: str = "host", ranks: int = 0) -> HostPage:
    page = open_page(session, host, ranks)
    assert page is not None
    return page


def test_the_ranks_of_a_host_and_session_share_a_file_and_no_others_do(folder: Path) -> None:
    pages = [opened("one"), opened("one"), opened("two"), opened("one", "other host")]
    pages[0].publish("events", 1.0, 5)
    values = [None if known is None else known.value for known in (page.look("events") for page in pages)]
    assert values == [5, 5, None, None]
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    for page in pages:
        page.close()
        page.close()
    assert not [*folder.iterdir()]


def test_the_file_goes_with_the_last_rank_or_loses_its_name_when_all_have_it(folder: Path) -> None:
    first, second = opened("one"), opened("one")
    first.close()
    assert [*folder.iterdir()]
    second.close()
    assert not [*folder.iterdir()]
    first, second = opened("one", ranks=2), opened("one", ranks=2)
    first.opened_by(1)
    assert [*folder.iterdir()]
    second.opened_by(2)
    assert not [*folder.iterdir()]
    first.publish("events", 1.0, 5)
    assert (known := second.look("events")) is not None and known.value == 5


def test_files_of_jobs_that_were_killed_are_removed_and_those_of_others_are_not(folder: Path) -> None:
    dead, living, young = (folder / f"{host_page.PREFIX}{name}" for name in ("dead", "living", "young"))
    for file in (dead, young):
        file.write_bytes(b"")
    held = SharedFile(str(living))
    for file in (dead, living):
        os.utime(file, (1.0, 1.0))
    opened("one").close()
    assert {file.name for file in folder.iterdir()} == {living.name, young.name}
    held.close()


def test_without_memory_that_only_this_user_may_read_a_rank_is_a_host_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = opened("one")
    (file,) = folder.iterdir()
    file.chmod(0o644)
    assert open_page("one", "host") is None
    file.chmod(0o600)
    page.close()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert open_page("one", "host") is None
    (folder / "nothing").touch()
    monkeypatch.setattr(host_page, "FOLDERS", (str(folder / "nothing"), str(folder / "missing"), str(folder)))
    opened("one").close()


def test_a_file_that_is_cut_short_while_it_is_used_ends_the_page_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    store = AgreementStore(HashStore())
    store.connection.page = opened("one")
    store.count("events", 3)
    assert store.recent("events", 1.0) == 3
    (file,) = folder.iterdir()
    os.truncate(file, 10)
    store.count("events", 1)
    assert store.recent("events", 1.0) == 4
    store.count("events", 1)
    assert store.recent("events", 1.0) == 5
