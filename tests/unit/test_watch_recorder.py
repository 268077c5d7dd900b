"""What `watch` takes out of a flight recorder, from entries as torch 2.13 writes them; without processes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ncclguard import torch_compat
from ncclguard.torch_compat import groups
from ncclguard.watch import recorder

LENGTHS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def entry(
    name: str, number: int, *, p2p: bool = False, sizes: Any = ((6,),), types: Any = ("Float",)
) -> dict[str, Any]:
    return {
        "process_group": ["0", "default"],
        "profiling_name": f"nccl:{name}",
        "collective_seq_id": number,
        "is_p2p": p2p,
        "time_created_ns": 1,
        "input_sizes": [list(size) for size in sizes],
        "input_dtypes": list(types),
    }


def fingerprint(name: str, **facts: Any) -> int:
    return recorder._pending("0:nccl", (0, 1), entry(name, 7, **facts), "nccl").fingerprint


@pytest.mark.parametrize(
    ("version", "given", "kept"),
    [
        ((2, 7), {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ((2, 8), {}, {"TORCH_FR_BUFFER_SIZE": "2000"}),
        ((2, 10), {"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_FR_BUFFER_SIZE": "0"}),
        ((2, 10), {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}),
        ((2, 11), {}, {}),
    ],
)
def test_the_flight_recorder_is_switched_on_where_torch_has_it_off(
    version: tuple[int, int], given: dict[str, str], kept: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in LENGTHS} | given
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(groups, "VERSION", version)
    torch_compat.switch_recorders_on()
    assert {name: value for name, value in environ.items() if name in LENGTHS} == kept


def test_messages_that_were_issued_together_are_no_collective() -> None:
    """The entry that ends them has the number of the collective before, and does not say that it is of messages."""
    messages = [entry("send 0->1", 3, p2p=True), entry("recv 0<-1", 3, p2p=True), entry("coalesced", 3, sizes=())]
    together = [entry("all_gather_into_tensor_coalesced", 4), entry("coalesced", 4, sizes=())]
    found, begun = recorder._by_group([entry("all_reduce", 3), *messages, *together])
    assert begun == {}
    assert [(one["profiling_name"], one["collective_seq_id"]) for one in found["0"]] == [
        ("nccl:all_reduce", 3),
        ("nccl:all_gather_into_tensor_coalesced", 4),
        ("nccl:coalesced", 4),
    ]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, ""),
        ({"state": "scheduled"}, ""),
        ({"state": "started"}, "recv 1<-0(group 0)"),
        ({"state": "started", "retired": True}, ""),
        ({"state": "completed"}, ""),
    ],
)
def test_a_message_that_the_device_waits_in_is_told(how: dict[str, Any], said: str) -> None:
    _, begun = recorder._by_group([entry("all_reduce", 3), entry("recv 1<-0", 3, p2p=True) | how])
    assert begun.get("0", "") == said


def test_of_messages_that_were_issued_together_the_entry_behind_them_tells() -> None:
    messages = [entry("send 0->1", 3, p2p=True), entry("recv 0<-1", 3, p2p=True)]
    _, begun = recorder._by_group([*messages, entry("coalesced", 3, sizes=()) | {"state": "started"}])
    assert begun == {"0": "batch_isend_irecv(group 0)"}


RING = [
    entry("all_reduce", 3) | {"p2p_seq_id": 1, "state": "completed", "retired": True},
    *(entry(name, 3, p2p=True) | {"p2p_seq_id": 2, "state": "scheduled"} for name in ("send 0->1", "recv 0<-1")),
]


@pytest.mark.parametrize(
    ("what", "started"),
    [
        # Its parts stay "scheduled" for good; then the collective behind it is what the device is in.
        ([entry("coalesced", 3) | {"p2p_seq_id": 2, "retired": True}, entry("all_reduce", 4)], ["all_reduce"]),
        ([entry("coalesced", 3) | {"p2p_seq_id": 2}, entry("all_reduce", 4)], ["coalesced"]),
        (
            [entry("coalesced", 3) | {"p2p_seq_id": 2, "retired": True}, *(entry(n, 4) for n in ("part", "whole"))],
            ["part", "whole"],
        ),
    ],
)
def test_what_a_device_is_in_is_the_first_call_that_has_not_ended(what: list[Any], started: list[str]) -> None:
    entries = [{"p2p_seq_id": 2, "state": "scheduled"} | one for one in (*RING, *what)]
    asked: list[int] = []
    recorder._find_started(recorder._calls(entries)["0"], lambda issued: not asked.append(issued))  # type: ignore[func-returns-value]
    assert [recorder._name(one) for one in entries if one["state"] == "started"] == started
    assert len(asked) == 1

    entries = [{"p2p_seq_id": 2, "state": "scheduled"} | one for one in (*RING, *what)]
    recorder._find_started(recorder._calls(entries)["0"], lambda _: False)
    assert not [one for one in entries if one["state"] == "started"]


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    "shown", [{"state": "scheduled"}, {"state": "completed"}, {"state": "completed", "retired": True}]
)
def test_the_parts_of_a_collective_end_with_the_whole_whatever_they_show(ended: bool, shown: dict[str, Any]) -> None:
    parts = [entry("_broadcast_oop", 4) | {"p2p_seq_id": 0} | shown for _ in range(2)]
    whole = entry("ALLGATHER_coalesced", 4) | {"p2p_seq_id": 0, "state": "completed" if ended else "scheduled"}
    recorder._calls([*parts, whole])
    assert [torch_compat.recorded_end(one) for one in (*parts, whole)] == [ended] * 3


@pytest.mark.parametrize("name", ["all_reduce", "_all_gather_base", "_reduce_scatter_base", "all_gather"])
def test_sizes_and_dtypes_are_compared_where_they_have_to_be_alike(name: str) -> None:
    assert fingerprint(name) == fingerprint(name)
    assert fingerprint(name) != fingerprint(name, sizes=((7,),))
    assert fingerprint(name) != fingerprint(name, types=("Int",))


def test_sizes_of_an_all_to_all_may_differ_and_dtypes_may_not() -> None:
    assert fingerprint("all_to_all") == fingerprint("all_to_all", sizes=((7,),))
    assert fingerprint("all_to_all") != fingerprint("all_to_all", types=("Int",))


def test_calls_that_were_issued_together_are_compared_as_one_and_only_where_all_of_them_are_known() -> None:
    """A recorder that forgets its oldest entries has the end of a call only, and one at work the beginning."""
    parts = [entry("allreduce_coalesced", 4), entry("allreduce_coalesced", 4, sizes=[[7]]), entry("coalesced", 4)]
    around = [entry("all_reduce", 3), *parts, entry("all_reduce", 5), entry("all_reduce", 6)]

    def calls(entries: list[dict[str, Any]], kind: str = "nccl", since: int = 0) -> recorder.Calls:
        return recorder.Calls("0:nccl", (0, 1), entries, kind, since=since)

    whole, cut = calls(around), calls(around[2:])
    assert (whole.fingerprint(3), whole.fingerprint(6), cut.fingerprint(4)) == (0, 0, 0)
    assert whole.fingerprint(4) not in (0, cut.fingerprint(5))
    assert whole.fingerprint(5) == cut.fingerprint(5) == fingerprint("all_reduce")
    assert (whole.last, calls(around, "gloo").last, calls([]).last) == (5, 6, 0)
    earlier = [entry("broadcast", number) for number in (1, 2, 3)]  # an earlier group's, and 1 was issued in parts
    later = [entry("all_reduce", number) | {"time_created_ns": 7} for number in (1, 2, 3, 4)]
    of_both = calls([*earlier, *later], "gloo", since=5)
    assert [of_both.fingerprint(number) != 0 for number in (1, 2, 3, 4)] == [False, True, True, True]
    assert of_both.fingerprint(2) == fingerprint("all_reduce")
    assert calls(earlier, "gloo", since=5).last == 0
    forgetful = recorder.Calls("0:nccl", (0, 1), [entry("coalesced", 1), *later[1:]], "gloo", whole=False)
    assert [forgetful.fingerprint(number) != 0 for number in (1, 2)] == [False, True]  # it closes forgotten messages
    together = whole.pending(4)
    assert together is not None and together.fingerprint == whole.fingerprint(4) != fingerprint("allreduce_coalesced")
    assert whole.pending(7) is None


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        (("all_gather", [[6]]), ("_all_gather_base", [[2, 3]]), True),
        (("reduce_scatter", [[2], [2], [2]]), ("_reduce_scatter_base", [[6]]), True),
        (("reduce_scatter", [[2], [2], [3]]), ("_reduce_scatter_base", [[6]]), False),
        (("all_gather", [[6]]), ("_all_gather_base", [[7]]), False),
        (("all_gather", [[6]]), ("all_reduce", [[6]]), False),
        (("all_reduce_barrier", [[1]]), ("all_reduce", [[1]]), False),
    ],
)
def test_two_functions_for_one_operation_fit_each_other(
    one: tuple[str, Any], other: tuple[str, Any], fits: bool
) -> None:
    """A list of tensors, or one tensor of all: NCCL and gloo do the same."""
    marks = [fingerprint(name, sizes=sizes) for name, sizes in (one, other)]
    assert (marks[0] == marks[1]) is fits


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        (("all_to_all", [[0, 8]], ["Float"]), ("all_to_all", [[4, 8]], ["BFloat16"]), True),
        (("gather", [[4]], ["Float"]), ("gather", [[4]], ["Int"]), True),
        (("all_reduce", [[0]], ["Float"]), ("all_reduce", [[0]], ["Int"]), True),
        (("all_reduce", [[1]], ["Float"]), ("all_reduce", [[1]], ["Int"]), False),
        (("all_reduce", [[0]], ["Float"]), ("all_reduce", [[1]], ["Float"]), False),
        (("all_to_all", [[0, 8]], ["Float"]), ("all_gather", [[0, 8]], ["Float"]), False),
    ],
)
def test_of_what_has_ended_the_dtype_of_an_empty_part_is_not_compared(one: Any, other: Any, fits: bool) -> None:
    """A rank without tokens gives whatever is empty, and takes part in a mixture of experts all the same."""
    calls = [
        recorder.Calls("0:gloo", (0, 1), [entry(name, 1, sizes=sizes, types=types)], "gloo")
        for name, sizes, types in (one, other)
    ]
    assert (calls[0].fingerprint(1) == calls[1].fingerprint(1)) is fits
