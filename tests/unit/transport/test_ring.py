"""What rings and chains carry: every collective, every dtype, every length, by socket and by memory, bit by bit."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from ncclguard.transport import ring as module
from ncclguard.transport.base import Disagreement, TransportError
from ncclguard.transport.streams import StreamCommunicator

from .stream_ranks import FIRST, communicators, finish, on_all

SIZES = [1, 2, 3, 4, 5, 8]
#: Elements around the ends of segments and blocks, with segments of 64 bytes.
LENGTHS = [1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 100, 257]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT", 64)
    monkeypatch.setattr(module, "DIRECT_FROM", 16)


def values(index: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * index + numel)
    if dtype.is_floating_point:
        return (torch.randn(numel, generator=generator) * 100).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 5, (numel,), generator=generator).to(dtype)


@pytest.mark.parametrize("direct", [True, False], ids=["memory", "socket"])
@pytest.mark.parametrize("size", SIZES)
def test_every_collective_moves_every_length(size: int, direct: bool) -> None:
    def run(index: int, communicator: StreamCommunicator) -> list[str]:
        wrong = []

        def compare(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
            if not torch.equal(found, wanted):
                wrong.append(f"{what} of {numel}: {found} is not {wanted}")

        for numel in LENGTHS:
            whole = [values(peer, numel, torch.int64) for peer in range(size)]
            total, root = torch.stack(whole).sum(0), numel % size
            tensor = whole[index].clone()
            finish(communicator.all_reduce(tensor, ReduceOp.SUM))
            compare("all_reduce", tensor, total)
            tensor = whole[index].clone()
            finish(communicator.broadcast(tensor, root))
            compare("broadcast", tensor, whole[root])
            outputs = [torch.zeros_like(tensor) for _ in range(size)]
            finish(communicator.all_gather(outputs, whole[index]))
            compare("all_gather", torch.stack(outputs), torch.stack(whole))
            output = torch.zeros_like(tensor)
            finish(communicator.reduce_scatter(output, [part + index for part in whole], ReduceOp.SUM))
            compare("reduce_scatter", output, size * whole[index] + sum(range(size)))
            tensor = whole[index].clone()
            finish(communicator.reduce(tensor, root, ReduceOp.MAX))
            if index == root:
                compare("reduce", tensor, torch.stack(whole).amax(0))
            mine = [bytes_of(part) for part in whole]
            parts = [torch.zeros_like(part) for part in mine] if index == root else []
            finish(communicator.gather(mine[index], parts, root))
            if parts:
                compare("gather", torch.stack(parts), torch.stack(mine))
            received = torch.zeros_like(mine[0])
            finish(communicator.scatter(received, mine if index == root else [], root))
            compare("scatter", received, mine[index])
            # Of every rank another length to every other.
            sent = [
                torch.full((8 * (index + 2 * peer) % (numel + 1),), index, dtype=torch.uint8) for peer in range(size)
            ]
            sizes = [8 * (peer + 2 * index) % (numel + 1) for peer in range(size)]
            came = torch.zeros(sum(sizes), dtype=torch.uint8)
            finish(communicator.all_to_all(came, sizes, sent))
            for peer, part in enumerate(came.split(sizes)):
                compare("all_to_all", part, torch.full_like(part, peer))
            lengths = [(peer * numel) % 50 for peer in range(size)]
            pending, uneven = communicator.all_gather_uneven(
                lengths, torch.full((lengths[index],), index, dtype=torch.uint8)
            )
            finish(pending)
            for peer, part in enumerate(uneven):
                compare("all_gather_uneven", part, torch.full((lengths[peer],), peer, dtype=torch.uint8))
        return wrong

    with communicators(size, direct) as ranks:
        for wrong in on_all(ranks, run):
            assert wrong == []
        if size > 1:
            assert all(link.reads is direct for one in ranks for link in one._links.peers.values())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().view(torch.uint8)


OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)
BY_TORCH = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_reduce_op_means_is_what_torch_means_at_every_length(dtype: torch.dtype) -> None:
    """Also by votes, which take another way: the payload of an exchange is combined by the same functions."""
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 65504.0]

    def sample(index: int, numel: int) -> torch.Tensor:
        tensor = values(index, numel, dtype)
        if dtype.is_floating_point:
            for at in range(min(numel, 14)):
                tensor[at] = special[(at * (index + 1)) % 7]
        return tensor

    def run(index: int, communicator: StreamCommunicator) -> dict[str, list[int]]:
        found = {}
        for numel in (1, 5, 100):
            for op in OPS:
                if dtype.is_floating_point and op in OPS[4:]:
                    continue
                tensor = sample(index, numel)
                finish(communicator.all_reduce(tensor, op))
                vote = communicator.agree(1, sample(index, numel))
                finish(vote)
                by_vote = torch.frombuffer(bytearray(vote.reduced(dtype, op.name)), dtype=dtype)
                wanted = sample(0, numel)
                combine = BY_TORCH[module_wire(op, dtype)]
                for peer in range(1, 3):
                    wanted = combine(wanted, sample(peer, numel))
                for result in (tensor, by_vote):
                    torch.testing.assert_close(result, wanted, equal_nan=True, rtol=3e-2, atol=1)
                    if op in (ReduceOp.MIN, ReduceOp.MAX):
                        assert torch.equal(torch.isnan(result.double()), torch.isnan(wanted.double()))
                found[f"{op} {numel}"] = [*bytes_of(tensor).tolist(), *bytes_of(by_vote).tolist()]
        return found

    with communicators(3) as ranks:
        found = on_all(ranks, run)
        assert found[0] == found[1] == found[2]  # the same bits, NaN and signed zeros as well
        assert found == on_all(ranks, run)  # and the next time


def module_wire(op: ReduceOp.RedOpType, dtype: torch.dtype) -> ReduceOp.RedOpType:
    if dtype == torch.bool:
        return {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}.get(op, op)
    return op


@pytest.mark.parametrize("direct", [True, False], ids=["memory", "socket"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_byte_is_saved_once_before_it_is_overwritten(size: int, direct: bool) -> None:
    def run(index: int, communicator: StreamCommunicator) -> None:
        for numel in LENGTHS:
            tensor = values(index, numel)
            before, saved = bytes_of(tensor), torch.zeros(4 * numel, dtype=torch.uint8)
            copy, covered = torch.zeros_like(before), tensor.view(torch.uint8)

            def save(start: int, stop: int) -> None:
                copy[start:stop] = covered[start:stop]  # noqa: B023 - called before the next turn
                saved[start:stop] += 1  # noqa: B023

            finish(communicator.all_reduce(tensor, ReduceOp.SUM, save))
            assert saved.unique().tolist() == [1]
            assert torch.equal(copy, before)
            saved.zero_()
            before = bytes_of(tensor := values(index, numel))
            covered = tensor.view(torch.uint8)
            finish(communicator.broadcast(tensor, 1, save))
            assert saved.unique().tolist() == [int(index != 1)]
            if index != 1:
                assert torch.equal(copy, before)

    with communicators(size, direct) as ranks:
        on_all(ranks, run)


@pytest.mark.parametrize("direct", [True, False], ids=["memory", "socket"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_in_another_operation_is_found_out_before_a_byte_lands(size: int, direct: bool) -> None:
    def run(index: int, communicator: StreamCommunicator) -> tuple[str, bool]:
        odd = index == 1
        communicator.mark = 4 if odd else 3
        tensor = values(index, 500)
        before, touched = tensor.clone(), []
        pending = communicator.all_reduce(tensor, ReduceOp.SUM, lambda start, stop: touched.append((start, stop)))
        try:
            finish(pending)
        except Disagreement as error:
            assert str(error) == f"rank {FIRST + (index - 1) % size} is in another operation"
            communicator.stop()
            return "differs", not touched and torch.equal(tensor, before)
        except TransportError:
            communicator.stop()
            return "broken", True
        return "complete", False

    with communicators(size, direct) as ranks:
        found = on_all(ranks, run)
    assert all(untouched for _, untouched in found)
    assert found[1][0] == "differs" or found[2 % size][0] == "differs"
    assert not [what for what, _ in found if what == "complete"]


@pytest.mark.parametrize("direct", [True, False], ids=["memory", "socket"])
def test_that_all_are_in_it_is_known_once_something_of_all_has_come(direct: bool) -> None:
    def run(index: int, communicator: StreamCommunicator) -> float:
        if index == 2:
            time.sleep(3)
        begun = time.monotonic()
        pending = communicator.all_reduce(values(index, 500), ReduceOp.SUM)
        finish(pending)
        return pending.met - begun

    with communicators(4, direct) as ranks:
        waited = on_all(ranks, run)
    assert all(seconds > 2.5 for index, seconds in enumerate(waited) if index != 2)
    assert 0.0 < waited[2] < 2.5


def test_nothing_moves_while_nobody_waits_and_a_stop_ends_all_that_is_under_way() -> None:
    with communicators(2) as (one, other):
        tensor, late = values(0, 5000), values(1, 5000)
        before = tensor.clone()
        pending = one.all_reduce(tensor, ReduceOp.SUM)
        assert not pending.wait(0.05)
        theirs = other.all_reduce(late, ReduceOp.SUM)
        assert not theirs.wait(0.05)
        assert torch.equal(tensor, before)  # whatever has arrived lies in the socket
        other.stop()
        with pytest.raises(TransportError, match="stopped on this rank"):
            finish(theirs)
        with pytest.raises(TransportError, match=f"the connection with rank {FIRST + 1} broke") as broken:
            finish(pending)
        assert broken.value.peer == FIRST + 1
        assert one.quiet(0.0)
        with pytest.raises(TransportError, match="was stopped"):
            other.all_reduce(late, ReduceOp.SUM)


def test_a_peer_whose_memory_is_gone_is_an_error_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int, address: int, view: memoryview) -> None:
        raise OSError(14, "Bad address")

    with communicators(2) as (one, other):
        tensors = [values(0, 500), values(1, 500)]
        pending = [one.all_reduce(tensors[0], ReduceOp.SUM), other.all_reduce(tensors[1], ReduceOp.SUM)]
        assert not pending[1].wait(0.0)
        monkeypatch.setattr(module, "read_process", gone)
        with pytest.raises(TransportError, match=f"rank {FIRST + 1} has left the operation"):
            finish(pending[0])


@pytest.mark.parametrize("direct", [True, False], ids=["memory", "socket"])
def test_a_peer_that_trickles_does_not_hold_a_wait_beyond_its_slice(direct: bool) -> None:
    """Another kind of peer: bytes one by one, of which the first eight are the mark."""
    with communicators(2, direct) as (one, other):
        link = other._links[0]
        pending = one.all_reduce(values(0, 100_000), ReduceOp.SUM)
        stream = (one.mark + 1).to_bytes(8, "little") + bytes(40)
        for byte in stream[:15]:  # the rest would be an address, where the memory is read
            link.socket.send(bytes([byte]))
            start = time.monotonic()
            assert not pending.wait(0.01)
            assert time.monotonic() - start < 5.0


@pytest.mark.slow
def test_full_socket_buffers_do_not_stall_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT", 1 << 16)

    def run(index: int, communicator: StreamCommunicator) -> float:
        for link in communicator._links.peers.values():
            link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        tensor = torch.full((200_000,), float(index))
        finish(communicator.all_reduce(tensor, ReduceOp.SUM))
        return float(tensor.sum())

    with communicators(3, direct=False) as ranks:
        assert on_all(ranks, run) == [600_000.0] * 3


def test_segments_and_blocks_cover_a_tensor_once() -> None:
    for numel in (1, 5, 48, 49, 1000):
        for size in (1, 2, 3, 7):
            cut = module._Cut(numel, size, 4)
            parts = [cut.part(block, chunk) for block in range(cut.blocks) for chunk in range(size)]
            covered: list[Any] = [at for start, stop in parts for at in range(start, stop)]
            assert covered == list(range(numel))
            assert all(4 * (stop - start) <= module.SEGMENT for start, stop in parts)
    assert module._segments(0, 1) == []
    order = list(module._order(4, 3))
    assert sorted(order) == [(block, step) for block in range(4) for step in range(3)]
    assert all(order.index((block, step)) < order.index((block, step + 1)) for block in range(4) for step in range(2))
