"""Which changes a checksum sees: each of one number for certain, whatever the dtype, the strides and the length."""

from __future__ import annotations

import hashlib
import pickle
import random

import pytest
import torch

import ncclguard as ng
from ncclguard import checksum as module
from ncclguard.checksum import WORDS, checksum

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def of(tensor: torch.Tensor, first: int = 0, last: int | None = None) -> list[int]:
    return checksum(tensor, first, last).tolist()  # type: ignore[no-any-return]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bytes that the dtype may have."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype).view(shape)


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    raw = tensor.view(-1).view(torch.uint8)
    raw[place * tensor.element_size() + bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (WORDS // 2 + 3,), (3, WORDS)])
def test_each_bit_of_some_elements_is_seen(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(shape, dtype)
    before, rng = of(tensor), random.Random(1)
    bits = [0] if dtype is torch.bool else list(range(8 * dtype.itemsize))
    for place in {0, tensor.numel() - 1, rng.randrange(tensor.numel())}:
        for bit in bits if tensor.numel() < 100 else rng.sample(bits, min(2, len(bits))):
            flip(tensor, place, bit)
            assert of(tensor) != before, (place, bit)
            flip(tensor, place, bit)
    assert of(tensor) == before


def test_no_change_of_both_halves_of_a_number_of_eight_bytes_can_cancel() -> None:
    """a*x + b*y = 0 (mod 2^64) in both sums, with x and y below 2^32, needs 2^33 to divide a1*b2 - a2*b1."""
    weights = module._weights(torch.device("cpu"))
    assert weights.shape == (2, WORDS) and bool((weights % 2 == 1).all())
    low, high = weights[:, 0::2], weights[:, 1::2]
    assert bool(((low[0] * high[1] - low[1] * high[0]) % (1 << 33) != 0).all())
    assert len({int(word) for word in weights.flatten()}) == weights.numel()


@pytest.mark.parametrize("seed", range(20))
def test_two_numbers_in_each_others_place_or_both_without_their_sign_are_seen(seed: int) -> None:
    rng, tensor = random.Random(seed), torch.randn(3 * WORDS + 17)
    one, other = rng.sample(range(tensor.numel()), 2)
    swapped, negated = tensor.clone(), tensor.clone()
    swapped[one], swapped[other] = tensor[other], tensor[one]
    negated[[one, other]] *= -1
    assert len({tuple(of(each)) for each in (tensor, swapped, negated)}) == 3
    rows = tensor[: 3 * WORDS].view(3, WORDS)
    assert of(rows) != of(rows[[1, 0, 2]])


def test_bits_count_and_not_values() -> None:
    nan = torch.tensor([float("nan")])
    assert of(nan) == of(nan.clone())
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))
    other = nan.clone()
    flip(other, 0, 3)
    assert bool(other.isnan()) and of(other) != of(nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64], ids=str)
def test_the_order_of_elements_counts_and_not_how_they_lie_in_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WORDS", 8)
    module._weights.cache_clear()
    whole = filled((6, 5, 7), dtype)
    for view in (whole.transpose(0, 2), whole[::2], whole[:, 1:3], whole.flip(1), whole[..., 3], whole[1:].mT,
                 whole.view(-1)[1:], whole[0, 0, 0].expand(3, 4)):  # fmt: skip
        assert of(view) == of(view.clone(memory_format=torch.contiguous_format))
        assert of(view, 2, 9) == of(view.flatten()[2:9])
    if dtype.is_complex:
        assert of(whole.conj()) == of(whole.conj().resolve_conj()) != of(whole)
    monkeypatch.undo()
    module._weights.cache_clear()


def test_no_copy_of_a_whole_tensor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that is not contiguous, with one row longer than a slice."""
    taken: list[int] = []
    summed = module._words
    monkeypatch.setattr(module, "_words", lambda flat: (taken.append(flat.numel()), summed(flat))[1])
    for tensor in (torch.zeros(40, WORDS), torch.zeros(10 * WORDS, 4).t(), torch.zeros(2, 20 * WORDS)[:, ::2]):
        taken.clear()
        checksum(tensor)
        assert sum(taken) == tensor.numel() and max(taken) <= 4 * WORDS


def test_the_sums_are_those_of_the_definition_and_stay_so() -> None:
    """Checkpoints hold them, so they are the same in all versions."""
    drawn = {
        what: hashlib.shake_128(f"ncclguard checksum, {what}".encode()).digest(16 * WORDS) for what in ("words", "rows")
    }
    count = 2 * WORDS + 5
    totals = [0, 0]
    for place, word in enumerate(range(-7, count - 7)):
        for number in range(2):
            row, column = divmod(place, WORDS)
            weights = [int.from_bytes(drawn[what][16 * at + 8 * number :][:8], "little") | 1
                       for what, at in (("words", column), ("rows", row))]  # fmt: skip
            totals[number] += word * weights[0] * weights[1]
    found = checksum(torch.arange(-7, count - 7, dtype=torch.int32))
    assert [total % (1 << 64) for total in found.tolist()] == [total % (1 << 64) for total in totals]
    assert module.hexadecimal(checksum(torch.arange(100_000, dtype=torch.int32))) == "10de61d8f1901ed47e3882b4aa4c7640"


def test_an_empty_tensor_an_inference_tensor_and_a_parameter_have_sums() -> None:
    assert of(torch.empty(0, 3)) == [0, 0]
    with torch.inference_mode():
        inside = torch.arange(5.0)
    assert of(inside) == of(torch.nn.Parameter(torch.arange(5.0))) == of(torch.arange(5.0))


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(3, device="meta"), "meta"),
        (torch.zeros(3).to_sparse(), "not dense"),
        (torch.nn.parameter.UninitializedParameter(), "not initialised"),
    ],
)
def test_what_has_no_bytes_says_why(tensor: torch.Tensor, why: str) -> None:
    assert why in (module.obstacle(tensor) or "")
    with pytest.raises(ng.GuardConfigError, match=why):
        ng.with_checksums({"weight": tensor})


# ---------------------------------------------------------------------- states that carry checksums


def state() -> dict[str, object]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "list": [torch.zeros(2), 7]}


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_of_a_checkpoint_is_named(seed: int) -> None:
    saved, rng = pickle.loads(pickle.dumps(ng.with_checksums(state()))), random.Random(seed)
    assert ng.verified(saved).keys() == {"model", "optimizer", "step", "list"}
    names = dict(module._tensors("", {key: value for key, value in saved.items() if key != module.KEY}))
    name = rng.choice([name for name in names if names[name].numel()])
    flip(names[name], rng.randrange(names[name].numel()), rng.randrange(8 * names[name].element_size()))
    with pytest.raises(ng.CorruptState) as raised:
        ng.verified(saved)
    assert raised.value.names == (name,)
    assert pickle.loads(pickle.dumps(raised.value)).names == (name,)


def test_a_tensor_that_is_missing_added_or_of_another_shape_is_named() -> None:
    saved = ng.with_checksums({"a": torch.zeros(3), "b": torch.zeros(2, 2), "c": torch.zeros(1)})
    del saved["a"]
    saved["b"], saved["d"] = torch.zeros(4), torch.zeros(1)
    with pytest.raises(ng.CorruptState, match="3 of 3 tensors") as raised:
        ng.verified(saved)
    assert set(raised.value.names) == {"a", "b", "d"}


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(TypeError, match="state must be a dict with tensors in it, not int"):
        ng.with_checksums(5)  # type: ignore[arg-type]


def test_a_state_without_checksums_is_refused() -> None:
    with pytest.raises(ng.GuardConfigError, match="carries no checksums"):
        ng.verified({"a": torch.zeros(3)})
