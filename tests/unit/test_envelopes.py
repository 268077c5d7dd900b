"""Envelopes of messages for receives from any source: each is read once, whoever is late, and the store does not fill."""

from __future__ import annotations

from typing import Any

from torch.distributed import HashStore

from ncclguard.coordination.envelopes import ROOM, Box, Envelope, Envelopes
from ncclguard.coordination.store import AgreementStore

BOX = Box("any/0:cpu:backend:any>0", (1, 2))


def test_each_envelope_is_read_once_and_the_store_holds_a_few() -> None:
    raw: Any = HashStore()
    store, awaited, counted = AgreementStore(raw), set[int](), 0
    for number in range(40):
        told = [Envelope(1, number, 5), Envelope(2, number, 0)]
        for envelope in told:
            BOX.put(store, envelope)
        found, counted = BOX.read(store, awaited, counted)
        assert found == told and not awaited
    assert raw.num_keys() <= ROOM * len(BOX.senders) + 1 + 1  # the count, and a key of HashStore's own


def test_a_sender_that_is_killed_as_it_tells_keeps_nobody_else_waiting() -> None:
    """It had counted its envelope, and not written it; one that is only slow is read later."""
    store, awaited, counted = AgreementStore(HashStore()), set[int](), 0
    store.count(f"{BOX.name}/sent", 1)
    BOX.put(store, Envelope(2, 0, 0))
    found, counted = BOX.read(store, awaited, counted)
    assert found == [Envelope(2, 0, 0)] and awaited == {1}
    store.put(f"{BOX.name}/envelope/1", "1 1 0 0")
    assert BOX.read(store, awaited, counted) == ([Envelope(1, 0, 0)], 2) and not awaited
    store.count(f"{BOX.name}/sent", 1)
    for number in range(ROOM * len(BOX.senders)):
        BOX.put(store, Envelope(2, number, 0))
    assert 3 not in awaited and len(BOX.read(store, awaited, 2)[0]) == ROOM * len(BOX.senders) and not awaited


def test_a_message_under_way_is_told_once_whenever_its_receiver_asks() -> None:
    """Before the send, during it, or never."""
    store, posted, envelopes = AgreementStore(HashStore()), list[dict[str, object]](), Envelopes(lambda: None)
    with envelopes.sending(BOX, Envelope(1, 0, 0)):
        pass
    with envelopes.sending(BOX, Envelope(1, 1, 0)):
        envelopes.hear(BOX.name)
        envelopes.step(store, posted.append, {})
        envelopes.step(store, posted.append, {})
    with envelopes.sending(BOX, Envelope(1, 2, 7)):
        envelopes.step(store, posted.append, {})
    assert BOX.read(store, set(), 0) == ([Envelope(1, 1, 0), Envelope(1, 2, 7)], 2)
    assert posted == []


def test_only_a_receive_has_the_job_told_and_the_store_read() -> None:
    store, posted, envelopes = AgreementStore(HashStore()), list[dict[str, object]](), Envelopes(lambda: None)
    BOX.put(store, Envelope(2, 0, 0))
    envelopes.step(store, posted.append, {})
    assert not envelopes.busy and posted == []
    for _ in range(2):
        with envelopes.reading(BOX):
            assert envelopes.busy
            envelopes.step(store, posted.append, {})
    assert posted == [{"kind": "receives", "box": BOX.name, "members": [1, 2]}]
    assert envelopes.new(BOX, 0.0) == [Envelope(2, 0, 0)] and envelopes.new(BOX, 0.0) == []
