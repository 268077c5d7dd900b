"""A 128-bit checksum of a tensor's bytes, computed on the device that it is on; and states that carry checksums.

The bytes are taken as 32-bit words x, in rows of `WORDS`; each of two sums is of x * w * m modulo 2^64, where w belongs
to the word's place in its row and m to the row, all odd and fixed. So a change

- of one number of up to 8 bytes changes the sum for certain: an odd w cancels no difference of less than 2^32, and for
  the two halves of a longer number no difference cancels in both sums (tests/unit/test_checksum.py goes through all),
- of more numbers, by what does not know the weights, goes unseen with a probability of at most 2^-64, and of about
  2^-126 unless only the highest bits of words change.

It is no protection from somebody who wants a change to go unseen. Bits count: a NaN is equal to itself, and -0.0 is not
equal to 0.0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

import torch

from ncclguard.errors import CorruptState, GuardConfigError
from ncclguard_explain.language import Message, told, tr

#: 32-bit words of a row, for each of which there is a weight: 64 KiB.
WORDS: Final = 1 << 14
#: Rows that are summed at once: so much that products stay in a processor's cache, and enough for a GPU.
_ROWS: Final = {"cpu": 4}
_MANY_ROWS: Final = 256
#: Where `with_checksums` has put them.
KEY: Final = "ncclguard.checksums"


def checksum(tensor: torch.Tensor, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Return the checksum of a dense tensor, or of its elements `first` to `last`: int64[2] on the tensor's device.

    Elements count in row-major order, whatever the strides. Takes memory for a few hundred KiB on the CPU and 64 MiB on
    a GPU, and waits for no device.

    >>> checksum(torch.tensor([0.0])).tolist() == checksum(torch.tensor([-0.0])).tolist()
    False
    """
    with torch.no_grad():
        tensor = tensor.detach()
        last = tensor.numel() if last is None else last
        rows = _ROWS.get(tensor.device.type, _MANY_ROWS)
        step = rows * WORDS * 4 // tensor.element_size()
        sums = [
            part
            for number, begin in enumerate(range(first, last, step))
            for part in _sums(_words(elements(tensor, begin, min(begin + step, last))), number * rows)
        ]
        return sum(sums[1:], sums[0]) if sums else torch.zeros(2, dtype=torch.int64, device=tensor.device)


def obstacle(tensor: torch.Tensor) -> Message | None:
    """Return why a tensor's bytes cannot be read; None if they can."""
    if tensor.is_meta:
        return tr("it is on meta, without memory")
    if torch.nn.parameter.is_lazy(tensor):
        return tr("it is not initialised yet")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return tr("it is not dense")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return tr("a {kind} says nothing of its memory", kind=type(tensor).__name__)
    return None


def elements(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return elements `first` to `last`, in row-major order, as one dimension; a view of a contiguous tensor."""
    if tensor.is_contiguous():
        return tensor.view(-1)[first:last]
    row = tensor[0].numel()
    begin, end = first // row, (last - 1) // row
    if begin == end:
        return elements(tensor[begin], first - begin * row, last - begin * row)
    whole, behind = -(-first // row), last // row
    parts = [tensor[whole:behind].reshape(-1)]
    if begin < whole:
        parts.insert(0, elements(tensor[begin], first - begin * row, row))
    if behind * row < last:
        parts.append(elements(tensor[behind], 0, last - behind * row))
    return torch.cat(parts)


def bytes_of(flat: torch.Tensor) -> torch.Tensor:
    """Return the bytes of contiguous elements of one dimension, as a view wherever there are such bytes."""
    return flat.resolve_conj().resolve_neg().view(torch.uint8)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return contiguous elements as 32-bit words, with zeros behind the last byte."""
    raw = bytes_of(flat)
    missing = -raw.numel() % 4
    if missing or raw.storage_offset() % 4:
        raw = torch.cat([raw, raw.new_zeros(missing)])
    return raw.view(torch.int32)


def _sums(words: torch.Tensor, row: int) -> Iterator[torch.Tensor]:
    """Yield the two sums of whole rows, the first of which has this number, and of the words behind them.

    In few operations: what a GPU takes for most tensors of a model is less than the host takes to launch them.
    """
    weights = _weights(words.device)
    rows, rest = divmod(words.numel(), WORDS)
    factors = _factors(words.device, 1 << (row + rows).bit_length())
    if rows:
        products = words[: rows * WORDS].view(rows, WORDS) * weights.unsqueeze(1)  # of 64 bits, as the weights
        yield (products.sum(2) * factors[:, row : row + rows]).sum(1)
    if rest:
        yield (words[rows * WORDS :] * weights[:, :rest]).sum(1) * factors[:, row + rows]


@lru_cache(maxsize=64)
def _weights(device: torch.device) -> torch.Tensor:
    """The weights of a row's words: odd int64[2, WORDS], the same in every process and version."""
    return _odd("words", WORDS).to(device)


@lru_cache(maxsize=256)
def _factors(device: torch.device, count: int) -> torch.Tensor:
    """The factors of the first rows: odd int64[2, count]; more of them begin with the same."""
    return _odd("rows", count).to(device)


def _odd(what: str, count: int) -> torch.Tensor:
    drawn = bytearray(hashlib.shake_128(f"ncclguard checksum, {what}".encode()).digest(16 * count))
    return (torch.frombuffer(drawn, dtype=torch.int64).view(count, 2) | 1).t().contiguous()


# ---------------------------------------------------------------------- states that carry checksums


def with_checksums(state: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's state with a checksum of each tensor in it, for `verified`; the tensors are not copied.

    `state`: a dict with tensors in it, in dicts, lists and tuples. Raises TypeError for anything else, GuardConfigError
    for a tensor whose bytes cannot be read, such as a shard: give a full state dict.

    >>> import torch, ncclguard as ng
    >>> saved = ng.with_checksums({"model": torch.nn.Linear(2, 1).state_dict(), "step": 7})
    >>> ng.verified(saved)["step"]
    7
    """
    if not isinstance(state, dict):
        raise TypeError(
            told("state must be a dict with tensors in it, not {kind}: give what you save", kind=type(state).__name__)
        )
    return {**state, KEY: dict(_checksums(state))}


def verified(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state that `with_checksums` was given, if each of its tensors is as it was then, to the last bit.

    Raises CorruptState, with the names of those that are not, that are missing or that were not there; and
    GuardConfigError for a state that carries no checksums.

    >>> import torch, ncclguard as ng
    >>> saved = ng.with_checksums({"weight": torch.zeros(3)})
    >>> saved["weight"][1] = 1e-30
    >>> ng.verified(saved)
    Traceback (most recent call last):
    ncclguard.errors.CorruptState: 1 of 1 tensors are not as they were when their checksums were taken: weight. ...
    """
    said = state.get(KEY)
    if not isinstance(said, dict):
        text = told("the state carries no checksums, so nothing is known of it: save ncclguard.with_checksums(state)")
        raise GuardConfigError(text)
    rest = {key: value for key, value in state.items() if key != KEY}
    found = dict(_checksums(rest))
    names = tuple(name for name in {**said, **found} if said.get(name) != found.get(name))
    if names:
        raise CorruptState(names, len(found))
    return rest


def _checksums(state: Any) -> Iterator[tuple[str, str]]:
    for name, tensor in _tensors("", state):
        why = obstacle(tensor)
        if why:
            text = told("{name} has no checksum: {why}. Give a state of whole tensors", name=name, why=why)
            raise GuardConfigError(text)
        # Type and shape belong to what is saved, and the sum says nothing of zeros at the end.
        yield name, f"{tensor.dtype} {list(tensor.shape)} {hexadecimal(checksum(tensor))}"


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _tensors(f"{name}.{number}" if name else str(number), inner)


def hexadecimal(total: torch.Tensor) -> str:
    """Return a checksum as 32 digits."""
    return "".join(f"{value % (1 << 64):016x}" for value in total.tolist())
