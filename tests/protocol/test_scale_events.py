"""Ten events in a job of 256 ranks, over the model of `scale.py`: one verdict, the right names, in time.

`python -m tests.protocol.scale` shows the same for 16,384 ranks; here what Python computes takes no time in the model,
so that each run is the same.
"""

from __future__ import annotations

import logging

import pytest

from tests.protocol.scale import EVENTS, World, observe

RANKS = 256
#: Requests to the store of a rank from the fault to its verdict, on average and at most: those of a few seconds in which
#: it looks 20 times a second, for its host when it is its turn. And how much of the store's host's time ranks may take
#: that only wait.
MEAN, MOST, BUSY = 50, 150, 0.2
#: Values that a rank other than the coordinator reads many at a time: entries of the log and a portion of the
#: departures, never something of every rank.
READ = 96


@pytest.mark.parametrize("event", EVENTS)
def test_every_rank_that_reaches_the_store_has_the_one_verdict_with_the_right_names_in_time(
    event: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "ncclguard")
    world = World(RANKS, monkeypatch)
    found = observe(world, event, world.join(handshake=event == "late"))
    assert found.verdicts == min(1, found.should)
    assert found.agreed == found.should
    assert found.alone + found.ended + found.agreed == len(world.calls) - len(world.stopped & set(world.calls))
    assert found.right, found.culprits
    assert found.last <= found.bound
    assert found.mean <= MEAN
    assert found.most <= MOST
    assert found.busy <= BUSY
    assert found.read <= READ
