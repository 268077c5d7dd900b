"""``nccl_timeout_handler`` around raw collectives on real gloo ranks that wait for a rank which does not come.

One job of three ranks runs all the cases of timeout_handler_cases.py, so that the ranks are started once; every test
looks at what ranks 0 and 1, which wait for rank 2, reported of its case.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from ncclguard import faults

pytestmark = pytest.mark.usefixtures("own_processes")

CASES = Path(__file__).with_name("timeout_handler_cases.py")
ENDED_BY = 15.0  # seconds: long before the groups' own timeout, long after any limit used here


@pytest.fixture(scope="module")
def unrecorded() -> faults.JobResult:
    variables = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_FR_BUFFER_SIZE": "0"}
    return faults.run_ranks(f"{CASES}:unrecorded_program", 2, env=variables, timeout=100).check()


@pytest.fixture(scope="module")
def job() -> faults.JobResult:
    variables = {"TORCH_FR_BUFFER_SIZE": "2000"}  # off by default before torch 2.11
    return faults.run_ranks(f"{CASES}:rank_program", 3, env=variables, timeout=280)


@pytest.fixture(params=[0, 1], ids=["rank0", "rank1"])
def said(request: pytest.FixtureRequest, job: faults.JobResult) -> dict[str, Any]:
    """What one of the two waiting ranks reported."""
    assert not job.timed_out, str(job)
    return job[request.param].reports


def ended_by_the_handler(case: dict[str, Any], limit: float) -> bool:
    """Whether the case ended with CollectiveTimeout, long before the group's own timeout, and says what it has to."""
    text = case["text"]
    return (
        case["ended"] == "CollectiveTimeout"
        and limit <= case["seconds"] < ENDED_BY
        and f"limit of {limit:g} s" in text
        and "timeout" in text
    )


def stopped(case: dict[str, Any]) -> bool:
    """Whether the text says that the group is lost and what to do."""
    return "process group" in case["text"] and "unusable from now on" in case["text"] and "safe_" in case["text"]


def test_all_ranks_exit_normally(job: faults.JobResult) -> None:
    job.check()


def test_plain_alarm_around_a_collective_comes_only_with_the_groups_own_timeout(said: dict[str, Any]) -> None:
    assert said["plain_alarm"]["seconds"] >= said["plain_timeout"] - 0.5


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("all_reduce", 0.5),
        ("timedelta_of_a_large_tensor", 0.2),
        ("recv", 0.3),
        ("monitored_barrier", 0.3),
        ("wait_of_a_work", 0.3),
        ("another_thread", 0.3),
        ("no_group_named", 0.3),
        ("no_group_named_and_no_record", 0.3),
    ],
)
def test_call_that_waits_for_a_missing_rank_is_ended_at_the_limit(
    said: dict[str, Any], name: str, limit: float
) -> None:
    case = said[name]
    assert ended_by_the_handler(case, limit) and stopped(case) and case["torn"], case
    assert case["cause"] == "RuntimeError"


def test_the_group_is_unusable_afterwards_as_the_error_says(said: dict[str, Any]) -> None:
    again = said["all_reduce"]["again"]  # "reset" where a peer had sent into a connection that was already closed here
    assert "clos" in again or "Connection reset" in again


def test_limit_in_another_thread_ends_that_threads_call_alone(said: dict[str, Any]) -> None:
    assert ended_by_the_handler(said["two_threads"]["inner"], 0.3)
    assert said["two_threads"]["ended"] == "returned"


def test_inner_block_does_not_extend_the_outer(said: dict[str, Any]) -> None:
    assert ended_by_the_handler(said["nested"]["inner"], 1.0)
    assert said["nested"]["outer"]["ended"] == "returned"


def test_operation_that_completes_in_time_is_a_success_and_its_group_lives(said: dict[str, Any]) -> None:
    assert said["in_time"]["ended"] == said["in_time"]["works"] == "returned"


def test_group_without_operation_in_flight_survives_an_interrupted_sleep(said: dict[str, Any]) -> None:
    """Where nobody can tell whether something is in flight, it is stopped, and the error says so."""
    case = said["sleeping"]
    assert ended_by_the_handler(case, 0.3), case
    assert (
        case["works"] == said["recorded"] == ("no process group was stopped" in case["text"]) == (not stopped(case))
    ), case


def test_computation_after_a_collective_that_completed_costs_no_group(said: dict[str, Any]) -> None:
    case = said["computing"]
    assert case["computed"][0] > 2.0, case
    assert case["ended"] == "returned", case
    assert case["works"] or not said["recorded"], case  # where nobody recorded the collective, it may have been stopped


def test_group_that_hangs_is_found_and_the_others_live(said: dict[str, Any]) -> None:
    assert said["no_group_named"]["default_lives"] == said["recorded"], said["no_group_named"]


def test_a_group_that_a_peer_has_broken_ends_no_later_block_of_another_one(said: dict[str, Any]) -> None:
    assert said["broken_by_a_peer"]["ended"] in ("RuntimeError", "CollectiveTimeout")
    assert said["broken_by_a_peer"]["later"]["ended"] == "returned", said["broken_by_a_peer"]["later"]


def test_operation_in_flight_does_not_outlive_the_python_code_that_polls_it(
    said: dict[str, Any], job: faults.JobResult
) -> None:
    assert said["polling_unguarded"]["written_after"], "without the handler the late rank completes it"
    case = said["polling"]
    assert ended_by_the_handler(case, 0.3) and stopped(case), case
    assert not case["written_after"]
    assert "late_polling" in job[2].reports, "the late rank is told by its own call"


def test_raw_call_after_a_guarded_one_that_used_up_the_limit_is_ended_at_once(said: dict[str, Any]) -> None:
    case = said["after_an_engine_section"]
    assert case["slept"] == [0.8], "Python code after it is left alone"
    assert ended_by_the_handler(case, 0.2) and stopped(case), case


def test_guarded_operation_is_neither_interrupted_nor_its_group_stopped(said: dict[str, Any]) -> None:
    case = said["engine_section_alone"]
    assert (case["ended"], case["works"]) == ("returned", True), case


def test_exception_of_the_programs_own_passes_and_the_lost_group_is_logged(
    said: dict[str, Any], job: faults.JobResult
) -> None:
    assert said["own_exception"]["ended"] == "KeyError" and "mine" in said["own_exception"]["text"]
    assert all("KeyError was raised inside it" in job[rank].output for rank in (0, 1))


def test_forked_child_never_stops_the_parents_group(said: dict[str, Any]) -> None:
    assert said["forked_child"] == {"child": 0, "works": True}


def test_handler_and_timer_of_the_program_are_as_before(said: dict[str, Any]) -> None:
    assert said["timer"] == [0.0, 0.0]
    assert said["handler"] in (str(signal.SIG_DFL), repr(signal.SIG_DFL))


def test_wait_in_the_check_of_detail_mode_is_ended_at_the_limit(unrecorded: faults.JobResult) -> None:
    case = unrecorded[0].reports["checked"]
    assert ended_by_the_handler(case, 0.3) and stopped(case), case


def test_group_of_which_nobody_can_tell_whether_it_is_idle_is_stopped(unrecorded: faults.JobResult) -> None:
    """Flight recorder off: an operation in flight must not go on, and the error says that the group is lost."""
    for case in unrecorded.values("sleeping").values():
        assert ended_by_the_handler(case, 0.3) and stopped(case), case


def test_a_rank_that_comes_when_the_others_have_given_up_names_itself_before_it_calls_anything() -> None:
    result = faults.run_ranks(f"{CASES}:late_program", 3, timeout=60).check()
    for rank in (0, 1):
        ((cause, culprits, torn, text),) = result[rank].reports["told"]
        assert (cause, culprits, torn) == ("unknown", [], True)
        assert "limit of 3 s passed" in text
    late = result[2].reports["told"]
    assert len(late) == 2
    for cause, culprits, torn, text in late:
        assert (cause, culprits, torn) == ("late", [2], False)
        assert "rank 2, this one, was late: it had not called collective 2 of the group" in text
        assert "timeout" in text
    assert result.values("other") == dict.fromkeys(range(3), 3.0)
