"""Ranks that processes announce in lines of one form, whatever its words: proofs only where all of them are there, once each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ncclguard_explain import Report

Explain = Callable[..., Report]
KILLED = "May  4 03:20:40 n1 kernel: Out of memory: Killed process 4{:02d} (python) total-vm:188231120kB, anon-rss:1kB"
#: In words of programs that no one has seen.
FORMS = {
    "bracket": "(Actor pid=4{0:02d}, ip=10.0.0.1) [global_rank {0}] Before building the model, {1} GB",
    "call": "n1[4{0:02d}]: Trainer(rank={0}/4, cuda={0}) ready",
    "sentence": "pid 4{0:02d} comes up as worker rank {0} on n1",
    "environment": "# OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_SIZE=4 (from /proc/4{0:02d}/environ)",
    "local": "world_size=4, up: pid=4{0:02d} LOCAL_RANK={0}",
}


def announced(form: str, ranks: range | list[int] = range(4)) -> list[str]:
    return [form.format(rank, 5 + rank % 2) for rank in ranks]


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_a_process_is_the_rank_that_it_announces(explain_lines: Explain, form: str) -> None:
    assert explain_lines([*announced(form), "step 7 loss 2.1", KILLED.format(2)]).culprits == (2,)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(announced(FORMS["sentence"], [0, 1, 3, 4]), id="one rank does not announce itself"),
        pytest.param([*announced(FORMS["sentence"]), FORMS["sentence"].format(2, 5).replace("402", "409")], id="twice"),
        pytest.param([*announced(FORMS["sentence"]), FORMS["sentence"].format(3, 5).replace("403", "402")], id="two ranks"),
        pytest.param([*announced(FORMS["sentence"]), "world_size=8"], id="fewer than the job has"),
        pytest.param([*announced(FORMS["sentence"]), "[rank6]: step 7"], id="a higher rank is seen"),
        pytest.param(announced(FORMS["sentence"].replace("worker rank", "tp rank")), id="a rank in a group"),
        pytest.param(announced(FORMS["sentence"].replace("worker rank", "node_rank")), id="a node's rank"),
        pytest.param(announced(FORMS["local"].replace("world_size=4, ", "")), id="local, and no size of the job"),
        pytest.param(announced("pid 4{0:02d} waits for rank {0}"), id="another process's rank"),
    ],
)  # fmt: skip
def test_what_is_no_whole_list_of_ranks_proves_nothing(explain_lines: Explain, lines: list[str]) -> None:
    assert explain_lines([*lines, "step 7 loss 2.1", KILLED.format(2)]).culprits == ()


LABELLED = ["[{0}] | env PMIX_RANK={0} on x1", "[{0}] RuntimeError: oneCCL: wait: ofi_poll failed, peer disconnected"]
LOST = "[2]   what():  level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"


def test_a_number_in_front_of_each_line_is_a_rank_where_lines_say_so(explain_lines: Explain) -> None:
    first = [LABELLED[0].format(rank) for rank in range(4)]
    others = [LABELLED[1].format(rank) for rank in (0, 1, 3)]
    assert explain_lines([*first, LOST, *others, "x1: rank 0 exited with code 1"]).culprits == (2,)
    assert explain_lines([*first[:3], first[3].replace("RANK=3", "RANK=7"), LOST, *others]).culprits == ()


def test_a_traceback_that_ray_hands_on_is_of_the_process_that_it_names(explain_lines: Explain) -> None:
    raised = [
        "Traceback (most recent call last):",
        '  File "/opt/trainer.py", line 42, in main',
        "    output = ray.get(output)",
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::Worker.update() (pid=402, ip=10.0.0.1, actor_id=3c0b, repr=<Worker>)",
        '  File "/opt/actor.py", line 482, in update',
        "    loss.backward()",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB.",
    ]
    assert explain_lines([*announced(FORMS["bracket"]), *raised]).culprits == (2,)


def test_deepspeeds_launchers_tell_the_first_rank_of_each_node(explain_lines: Explain) -> None:
    lines = [f"n{node}: [2023-05-04 02:10:09,101] [INFO] [launch.py:149:main] nnodes=2, num_local_procs=2, node_rank={node}" for node in range(2)]  # fmt: skip
    lines += [
        f"n{node}: [2023-05-04 02:10:10,000] [INFO] [launch.py:229:main] process 4{node}{local} spawned with command: ['python', 't.py', '--local_rank={local}']"
        for node in range(2)
        for local in range(2)
    ]
    killed = KILLED.replace("4{:02d}", "411")
    assert explain_lines([*lines, killed]).culprits == (3,)
    assert explain_lines([lines[0].replace("procs=2", "procs=4"), *lines[1:], killed]).culprits == ()


NO_RUN = {
    "a build of an image": "#14 41.22   RuntimeError: The NVSHMEM_DIR is not set and no nvshmem found",
    "a rule for alerts": '    annotations: {summary: "GPU has fallen off the bus on {{ $labels.Hostname }}"}',
    "a cell of a notebook": "Cell In[14], line 3\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
}


@pytest.mark.parametrize("text", NO_RUN.values(), ids=list(NO_RUN))
def test_what_is_no_run_of_a_job_is_no_incident(explain_lines: Explain, text: str) -> None:
    assert not explain_lines(text.splitlines()).incident


def test_a_request_that_an_engine_refuses_is_survived(explain_lines: Explain) -> None:
    served = [
        "(APIServer pid=1) ERROR 04-01 10:04:00 [serving_chat.py:320] ValueError: This model's maximum context length is 32768 tokens.",
        "(APIServer pid=1) INFO 04-01 10:05:00 [loggers.py:257] Engine 000: Avg generation throughput: 911.0 tokens/s, Running: 12 reqs, Waiting: 0 reqs",
        '(APIServer pid=1) INFO:     10.0.0.9:1 - "POST /v1/completions HTTP/1.1" 200 OK',
    ]
    assert not explain_lines(served).incident
    assert not explain_lines(served[:1]).incident, "it is the client's fault"
    assert explain_lines([served[0].replace("ValueError", "RuntimeError")]).incident


def test_values_that_are_no_numbers_do_not_convict_the_program(explain_lines: Explain) -> None:
    report = explain_lines(
        ["[rank5]: RuntimeError: Rank 5, node n7, device 5, iteration 61: Unexpected result inf (message='found inf in local grad norm for bucket #3')"]
    )  # fmt: skip
    assert (report.culprits, report.decision) == ((5,), "unknown")


def test_a_crash_that_faulthandler_tells_is_the_end_of_its_rank(explain_lines: Explain) -> None:
    placed = [f"(TrainController pid=33) - (ip=10.0.0.{rank // 2}, pid=188{rank % 2}) world_rank={rank}, local_rank={rank % 2}, node_rank={rank // 2}" for rank in range(4)]  # fmt: skip
    crash = [
        "(RayTrainWorker pid=1881, ip=10.0.0.1) Fatal Python error: {}",
        "(RayTrainWorker pid=1881, ip=10.0.0.1) ",
        "(RayTrainWorker pid=1881, ip=10.0.0.1) Current thread 0x00007f01 (most recent call first):",
        '(RayTrainWorker pid=1881, ip=10.0.0.1)   File "/opt/reader.py", line 175 in get_batch',
    ]
    for words, named in (("Bus error", (3,)), ("Segmentation fault", (3,)), ("Aborted", ())):
        assert explain_lines([*placed, crash[0].format(words), *crash[1:]]).culprits == named, words


@pytest.mark.parametrize("urls", [1, 2])
def test_a_place_in_one_of_several_engines_behind_a_router_is_no_rank(explain_lines: Explain, urls: int) -> None:
    workers = ", ".join(f'"http://10.0.0.{number}:30000"' for number in range(urls))
    raised = [
        "[2026-06-30 12:44:01 TP3] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "sglang/srt/mem_cache/radix_cache.py", line 488, in dec_lock_ref',
        "AttributeError: 'NoneType' object has no attribute 'lock_ref'",
    ]
    report = explain_lines([f"sgl_router: policy=cache_aware workers=[{workers}]", *raised])
    assert report.culprits == ((3,) if urls == 1 else ())


def test_an_end_that_nobody_claims_is_of_the_rank_of_which_the_kernel_tells_a_crash(explain_lines: Explain) -> None:
    lines = [
        *announced(FORMS["sentence"]),
        "[99120.4121] python3[402]: segfault at 18 ip 00007f2a11 sp 00007ffd error 4 in libdecord.so[7f2a10+3a]",
        "[2026-02-20 09:00:03,100] [ERROR] [launch.py:325:sigkill_handler] ['python3', 't.py', '--local_rank=3'] exits with return code = -11",
    ]
    assert explain_lines(lines).culprits == (2,)
    assert explain_lines([*lines, lines[-2].replace("402", "401")]).culprits == ()


def test_the_first_container_in_paddles_list_is_not_named_for_it(explain_lines: Explain) -> None:
    failed = "Container rank {} status failed cmd ['python', 't.py'] code {} log log/workerlog.{}"
    for rank, code, named in ((0, 1, ()), (0, -9, (0,))):
        assert explain_lines(["global_step: 7, loss: 2.1", failed.format(rank, code, rank)]).culprits == named


def test_a_node_that_ray_gives_back_is_no_incident(explain_lines: Explain) -> None:
    gone = "(raylet) The node with node id: 44ab and address: 10.1.1.12 and node name: 10.1.1.12 has been marked dead because it was drained: {}."
    ended = "(TrainController pid=771) RunState: FINISHED, rank=0, world_size=32"
    assert not explain_lines([ended, gone.format("idle termination. This is an expected termination")]).incident
    assert explain_lines([ended, gone.format("the detector has missed too many heartbeats from it")]).incident
