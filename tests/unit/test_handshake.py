"""The session's nonce: all ranks get rank 0's of this life, never one that an earlier life left in the store."""

from __future__ import annotations

from torch.distributed import HashStore

from ncclguard.coordination.store import AgreementStore, Handshake


def agree(store: HashStore, ranks: range, order: list[int]) -> dict[int, str | None]:
    shakes = {rank: Handshake(AgreementStore(store), rank, len(ranks)) for rank in ranks}
    for _ in range(6):
        for rank in order:
            shakes[rank].step()
    return {rank: shake.nonce for rank, shake in shakes.items()}


def test_all_ranks_agree_on_rank_0s_nonce_in_any_order() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        nonces = agree(HashStore(), range(3), order)
        assert len(set(nonces.values())) == 1
        assert nonces[0]


def test_a_second_life_over_the_same_store_never_believes_the_first_ones_nonce() -> None:
    """The others start before rank 0, so everything they can read at first is stale."""
    store = HashStore()
    first = agree(store, range(3), [0, 1, 2])
    early = {rank: Handshake(AgreementStore(store), rank, 3) for rank in (1, 2)}
    for _ in range(3):
        for shake in early.values():
            assert not shake.step()
    zero = Handshake(AgreementStore(store), 0, 3)
    for _ in range(4):
        zero.step()
        for shake in early.values():
            shake.step()
    assert {shake.nonce for shake in early.values()} == {zero.nonce}
    assert zero.nonce != first[0]


def test_a_rank_that_never_comes_leaves_rank_0_waiting_and_the_others_served() -> None:
    store = HashStore()
    zero, one = Handshake(AgreementStore(store), 0, 3), Handshake(AgreementStore(store), 1, 3)
    for _ in range(4):
        finished = zero.step()
        one.step()
    assert one.nonce == zero.nonce is not None
    assert not finished
