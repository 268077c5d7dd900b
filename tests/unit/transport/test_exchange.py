"""The exchange of votes and payloads between several ranks, here threads of one process with real connections."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch.distributed import HashStore, ReduceOp, Store

from ncclguard.transport.base import TransportError
from ncclguard.transport.exchange import HEADER, Exchange, connect, slot_nbytes


@contextmanager
def ranks(size: int, store: Store | None = None) -> Iterator[list[Exchange]]:
    """An exchange for each of `size` ranks; global ranks are 10, 11, ..."""
    keys = HashStore() if store is None else store
    end = time.monotonic() + 20
    numbers = range(10, 10 + size)
    with ThreadPoolExecutor(size) as pool:
        exchanges = list(pool.map(lambda index: connect(keys, "127.0.0.1", numbers, index, end), range(size)))
    try:
        yield exchanges
    finally:
        for exchange in exchanges:
            exchange.stop()
            exchange.close()


def on_all(exchanges: list[Exchange], run: Callable[[int, Exchange], object]) -> list[object]:
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(run, range(len(exchanges)), exchanges))


def finish(exchange: Exchange, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not exchange.wait(0.05):
        assert time.monotonic() < end


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13])
def test_every_rank_sees_every_vote_and_every_payload_in_the_order_of_the_group(size: int) -> None:
    def run(index: int, exchange: Exchange) -> object:
        seen = []
        for turn in range(5):
            exchange.start(turn, torch.tensor([float(index), turn]))
            finish(exchange)
            rows = exchange.rows(torch.float32, 2)
            seen.append([exchange.agreed, [row.tolist() for row in rows]])
        exchange.start(7 if index == size - 1 else 8, None)
        finish(exchange)
        seen.append(exchange.agreed)
        return seen

    with ranks(size) as exchanges:
        expected = [[True, [[float(peer), turn] for peer in range(size)]] for turn in range(5)]
        assert on_all(exchanges, run) == [[*expected, size == 1]] * size


def test_a_slot_that_many_ranks_share_gets_smaller_and_stays_aligned() -> None:
    sizes = [1, 2, 64, 65, 1000, 2048, 10_000]
    slots = [slot_nbytes(size) for size in sizes]
    assert slots[:3] == [512, 512, 512]
    assert slots == sorted(slots, reverse=True)
    assert all(slot >= HEADER and slot % HEADER == 0 for slot in slots)
    assert slot_nbytes(2048) * 1024 <= 16384


def test_a_message_larger_than_the_sockets_hold_arrives_in_parts() -> None:
    """The buffers are made tiny, so that neither side can send all of a hop at once."""

    def run(index: int, exchange: Exchange) -> object:
        for each in exchange._sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        results = []
        for turn in range(20):
            exchange.start(turn, torch.full((exchange.payload_nbytes,), index, dtype=torch.uint8))
            finish(exchange)
            results.append([int(row.sum()) for row in exchange.rows(torch.uint8, exchange.payload_nbytes)])
        return results

    with ranks(16) as exchanges:
        wanted = [peer * exchanges[0].payload_nbytes for peer in range(16)]
        assert on_all(exchanges, run) == [[wanted] * 20] * 16


def test_waiting_for_a_late_rank_ends_with_the_slice_and_can_go_on() -> None:
    with ranks(2) as (early, late):
        early.start(1, None)
        assert not early.wait(0.0)
        assert not early.wait(0.05)
        with pytest.raises(RuntimeError, match="not over"):
            _ = early.agreed
        late.start(1, None)
        finish(late)
        finish(early)
        assert early.agreed
        assert late.agreed


def test_stop_ends_a_wait_at_once_and_the_peer_fails_naming_the_rank() -> None:
    with ranks(2) as (stopped, peer):
        caught: list[TransportError] = []
        stopped.start(1, None)

        def wait() -> None:
            try:
                finish(stopped)
            except TransportError as error:
                caught.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        stopped.stop()
        waiting.join(10)
        assert not waiting.is_alive()
        assert "stopped on this rank" in str(caught[0])
        with pytest.raises(TransportError, match="was stopped"):
            stopped.start(2, None)

        def go_on() -> None:
            for vote in (1, 2):  # the first vote may have been sent before the stop
                peer.start(vote, None)
                finish(peer)

        with pytest.raises(TransportError, match="broke") as failed:
            go_on()
        assert failed.value.peer == 10


def test_an_exchange_that_was_not_waited_for_cannot_be_followed_by_another() -> None:
    with ranks(2) as (one, _):
        one.start(1, None)
        with pytest.raises(TransportError, match="did not complete"):
            one.start(2, None)


def test_strangers_at_the_port_are_sent_away() -> None:
    """They come first: one says nothing that makes sense, one leaves at once, one has the wrong token."""

    class Watched(HashStore):
        def get(self, key: str) -> bytes:
            at = json.loads(super().get(key))
            for words in (b"GET / HTTP/1.1\r\n\r\n" * 3, b"", os.urandom(24)):
                with socket.create_connection((at["host"], at["port"]), timeout=5) as stranger:
                    stranger.sendall(words)
            return json.dumps(at).encode()

    def run(index: int, exchange: Exchange) -> object:
        exchange.start(5, torch.tensor([index], dtype=torch.int64))
        finish(exchange)
        return [int(row) for row in exchange.rows(torch.int64, 1)]

    with ranks(2, Watched()) as exchanges:
        assert on_all(exchanges, run) == [[0, 1]] * 2


def test_a_peer_that_does_not_come_is_an_error_in_time() -> None:
    keys = HashStore()
    keys.set("exchange/1", json.dumps({"host": "127.0.0.1", "port": 1, "token": "00" * 16}))
    start = time.monotonic()
    with pytest.raises(TransportError, match="could not be connected"):
        connect(keys, "127.0.0.1", (0, 1), 0, time.monotonic() + 0.5)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        (ReduceOp.SUM, torch.float32, [9, 12]),
        (ReduceOp.SUM, torch.bfloat16, [9, 12]),
        (ReduceOp.PRODUCT, torch.int64, [15, 48]),
        (ReduceOp.MIN, torch.int32, [1, 2]),
        (ReduceOp.MAX, torch.float64, [5, 6]),
        (ReduceOp.BAND, torch.uint8, [1, 0]),
        (ReduceOp.BOR, torch.int8, [7, 6]),
        (ReduceOp.BXOR, torch.int64, [7, 0]),
    ],
)
def test_payloads_are_combined_and_left_as_they_are(
    op: ReduceOp.RedOpType, dtype: torch.dtype, expected: list[int]
) -> None:
    rows = [torch.tensor(values, dtype=dtype) for values in ([1, 2], [3, 4], [5, 6])]

    def run(index: int, exchange: Exchange) -> object:
        exchange.start(1, rows[index])
        finish(exchange)
        combined = exchange.reduced(dtype, 2, op).tolist()
        return combined, exchange.rows(dtype, 2).tolist(), exchange.reduced(dtype, 2, op).tolist()

    with ranks(3) as exchanges:
        assert on_all(exchanges, run) == [(expected, [row.tolist() for row in rows], expected)] * 3


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_payloads_are_combined_with_the_same_bits_on_every_rank(size: int) -> None:
    """Where the order matters: sums that round, NaN of other bits, zeros of both signs."""
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, 4, generator=generator) * 10.0 ** torch.arange(-4, 4, 2)
    values[::2, 3] *= 0.0  # with both signs
    values[size // 2 :, 2] = torch.tensor([0x7FC00001 + size], dtype=torch.int32).view(torch.float32)

    def run(index: int, exchange: Exchange) -> object:
        found = []
        for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
            exchange.start(1, values[index])
            finish(exchange)
            found.append(exchange.reduced(torch.float32, 4, op).view(torch.int32).tolist())
        return found

    with ranks(size) as exchanges:
        results = on_all(exchanges, run)
        assert results == [results[0]] * size
        exact = values.double().sum(0)[:2]
        summed = torch.tensor(results[0][0], dtype=torch.int32).view(torch.float32).double()[:2]  # type: ignore[index]
        torch.testing.assert_close(summed, exact, rtol=1e-4, atol=1e-8)


def test_payloads_are_read_inside_and_outside_of_inference_mode() -> None:
    with ranks(1) as (exchange,):
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                exchange.start(1, torch.tensor([1.0, 2.0]))
                assert exchange.reduced(torch.float32, 2, ReduceOp.SUM).tolist() == [1.0, 2.0]
