"""The exchange of votes and payloads between several ranks, here threads of one process with real connections."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest
import torch

from ncclguard.transport import votes
from ncclguard.transport.base import TransportError
from ncclguard.transport.votes import HEADER, Exchange, slot_nbytes

from .stream_ranks import exchanges, finish, on_all


def numbers(data: bytes, dtype: torch.dtype = torch.float32) -> list[float]:
    found: list[float] = torch.frombuffer(bytearray(data), dtype=dtype).tolist()
    return found


@pytest.mark.parametrize("star", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13])
def test_every_rank_sees_every_vote_and_every_payload_in_the_order_of_the_group(size: int, star: bool) -> None:
    def run(index: int, exchange: Exchange) -> object:
        seen = []
        for turn in range(5):
            exchange.start(turn, torch.tensor([float(index), turn]))
            finish(exchange)
            seen.append([exchange.agreed, [numbers(exchange.payload(place)) for place in range(size)]])
        return seen

    with exchanges(size, star) as all_ranks:
        expected = [[True, [[float(peer), turn] for peer in range(size)]] for turn in range(5)]
        assert on_all(all_ranks, run) == [expected] * size


@pytest.mark.parametrize("star", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("what", ["vote", "length"])
def test_a_rank_that_differs_is_found_out_by_those_that_hear_from_it_and_nobody_agrees(
    size: int, what: str, star: bool
) -> None:
    """The rank that finds out stops, as the guard does; the others learn of it by that, and none completes."""

    def run(index: int, exchange: Exchange) -> str:
        odd = index == size - 1
        vote = 8 if odd and what == "vote" else 7
        payload = torch.ones(3 if odd and what == "length" else 5_000 // size)
        exchange.start(vote, payload)
        try:
            finish(exchange)
        except TransportError:
            found = "broken"
        else:
            found = "agreed" if exchange.agreed else "differs"
        if found != "agreed":
            exchange._links.stop()
        return found

    with exchanges(size, star) as all_ranks:
        found = on_all(all_ranks, run)
    assert "agreed" not in found
    assert "differs" in found


def test_after_ranks_have_differed_there_is_no_further_exchange() -> None:
    with exchanges(2) as (one, other):
        one.start(1, None)
        other.start(2, None)
        other.wait(0.0)  # sends
        finish(one)
        assert not one.agreed
        with pytest.raises(TransportError, match="did not complete"):
            one.start(3, None)


def test_a_slot_that_many_ranks_share_gets_smaller_and_stays_aligned() -> None:
    sizes = [1, 2, 64, 65, 1000, 2048, 10_000]
    slots = [slot_nbytes(size) for size in sizes]
    assert slots == sorted(slots, reverse=True)
    assert all(slot >= HEADER and slot % HEADER == 0 for slot in slots)
    assert all(slot * size <= 256 << 10 for slot, size in zip(slots, sizes, strict=True) if slot > HEADER)


@pytest.mark.slow
@pytest.mark.parametrize("star", [False, True])
def test_a_message_larger_than_the_sockets_hold_arrives_in_parts(star: bool) -> None:
    """The buffers are made tiny, so that neither side can send all of a hop at once."""
    length = 8192

    def run(index: int, exchange: Exchange) -> object:
        for link in exchange._links.peers.values():
            link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        results = []
        for turn in range(3):
            exchange.start(turn, torch.full((length,), index, dtype=torch.uint8))
            finish(exchange)
            results.append([sum(exchange.payload(place)) for place in range(5)])
        return results

    with exchanges(5, star) as all_ranks:
        assert on_all(all_ranks, run) == [[[peer * length for peer in range(5)]] * 3] * 5


def test_waiting_for_a_late_rank_ends_with_the_slice_and_can_go_on() -> None:
    with exchanges(2) as (early, late):
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


@pytest.mark.parametrize("late", [0, 2])
def test_in_a_star_nobody_completes_before_the_last_rank_has_come(late: int) -> None:
    """Be it the one in the middle, or another."""
    with exchanges(3, star=True) as ranks:
        early = [rank for index, rank in enumerate(ranks) if index != late]
        for rank in early:
            rank.start(1, torch.ones(4))
        for _ in range(2):
            assert on_all(early, lambda _, rank: rank.wait(0.05)) == [False, False]
        ranks[late].start(1, torch.ones(4))
        on_all(ranks, lambda _, rank: finish(rank))
        assert [numbers(rank.reduced(torch.float32, "SUM")) for rank in ranks] == [[3.0] * 4] * 3


@pytest.mark.parametrize("gone", [0, 2])
def test_in_a_star_a_rank_that_stops_is_noticed_by_the_first_and_the_first_by_all(gone: int) -> None:
    def run(index: int, exchange: Exchange) -> int | None:
        if index == gone:
            exchange._links.stop()
            return None
        try:
            exchange.start(1, None)
            finish(exchange)
        except TransportError as error:
            exchange._links.stop()
            return error.peer
        raise AssertionError("the exchange has completed without a rank")

    with exchanges(3, star=True) as ranks:
        found = on_all(ranks, run)
    assert found == ([None, 10, 10] if gone == 0 else [12, 10, None])


def test_stop_ends_a_wait_at_once_and_the_peer_fails_naming_the_rank() -> None:
    with exchanges(2) as (stopped, peer):
        caught: list[TransportError] = []
        stopped.start(1, None)

        def wait() -> None:
            try:
                finish(stopped)
            except TransportError as error:
                caught.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        stopped._links.stop()
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
    with exchanges(2) as (one, _):
        one.start(1, None)
        with pytest.raises(TransportError, match="did not complete"):
            one.start(2, None)


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        ("SUM", torch.float32, [9, 12]),
        ("SUM", torch.bfloat16, [9, 12]),
        ("PRODUCT", torch.int64, [15, 48]),
        ("MIN", torch.int32, [1, 2]),
        ("MAX", torch.float64, [5, 6]),
        ("BAND", torch.uint8, [1, 0]),
        ("BOR", torch.int8, [7, 6]),
        ("BXOR", torch.int64, [7, 0]),
    ],
)
def test_payloads_are_combined_and_left_as_they_are(op: str, dtype: torch.dtype, expected: list[int]) -> None:
    rows = [torch.tensor(values, dtype=dtype) for values in ([1, 2], [3, 4], [5, 6])]

    def run(index: int, exchange: Exchange) -> object:
        exchange.start(1, rows[index])
        finish(exchange)
        combined = numbers(exchange.reduced(dtype, op), dtype)
        payloads = [numbers(exchange.payload(place), dtype) for place in range(3)]
        return combined, payloads, numbers(exchange.reduced(dtype, op), dtype)

    with exchanges(3) as all_ranks:
        assert on_all(all_ranks, run) == [(expected, [row.tolist() for row in rows], expected)] * 3


@pytest.mark.parametrize("star", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_payloads_are_combined_with_the_same_bits_on_every_rank(size: int, star: bool) -> None:
    """Where the order matters: sums that round, NaN of other bits, zeros of both signs."""
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, 4, generator=generator) * 10.0 ** torch.arange(-4, 4, 2)
    values[::2, 3] *= 0.0  # with both signs
    values[size // 2 :, 2] = torch.tensor([0x7FC00001 + size], dtype=torch.int32).view(torch.float32)

    def run(index: int, exchange: Exchange) -> object:
        found = []
        for op in ("SUM", "MIN", "MAX", "PRODUCT"):
            exchange.start(1, values[index])
            finish(exchange)
            found.append(numbers(exchange.reduced(torch.float32, op), torch.int32))
        return found

    with exchanges(size, star) as all_ranks:
        results = on_all(all_ranks, run)
        assert results == [results[0]] * size
        exact = values.double().sum(0)[:2]
        summed = torch.tensor(results[0][0], dtype=torch.int32).view(torch.float32).double()[:2]  # type: ignore[index]
        torch.testing.assert_close(summed, exact, rtol=1e-4, atol=1e-8)


def test_payloads_are_read_inside_and_outside_of_inference_mode() -> None:
    with exchanges(1) as (exchange,):
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                exchange.start(1, torch.tensor([1.0, 2.0]))
                assert numbers(exchange.reduced(torch.float32, "SUM")) == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_few_numbers_are_added_as_torch_adds_them_at_the_ends_of_their_range_too(dtype: torch.dtype) -> None:
    """They are added as Python's numbers, whose range is that of float64."""
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4
    inf, nan = float("inf"), float("nan")
    cases = [[largest, largest, 0.0], [-largest, -largest, 1.0], [inf, -inf, 0.0], [nan, 1.0, 2.0], [-0.0, -0.0, -0.0]]
    cases += [[smallest, smallest, -smallest], [inf, largest, 0.0], [0.5, 0.25, 0.125]]

    def run(index: int, exchange: Exchange) -> object:
        found = []
        for case in cases:
            exchange.start(1, torch.tensor([case[index]], dtype=dtype))
            finish(exchange)
            found.append(exchange.reduced(dtype, "SUM"))
        return found

    with exchanges(3) as all_ranks:
        results = on_all(all_ranks, run)
    assert results == [results[0]] * 3
    sums = torch.frombuffer(bytearray(b"".join(results[0])), dtype=dtype)  # type: ignore[arg-type]
    wanted = torch.stack([torch.tensor(case, dtype=dtype).sum() for case in cases])
    torch.testing.assert_close(sums, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(sums[4:5]), torch.tensor([True]))


def test_the_time_of_a_wait_runs_while_another_thread_uses_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    with exchanges(2, False) as all_ranks:
        exchange = all_ranks[0].start(1, None)

        class Used:
            def acquire(self, timeout: float) -> bool:
                nonlocal now
                now += 0.75 * timeout
                return True

            def release(self) -> None:
                pass

        ends: list[float] = []
        monkeypatch.setattr(exchange, "_move", lambda end: bool(ends.append(end)))
        monkeypatch.setattr(exchange._links, "using", Used())
        monkeypatch.setattr(votes, "time", SimpleNamespace(monotonic=lambda: now))
        assert not exchange.wait(4.0)
        assert (ends, now) == ([104.0], 103.0)
