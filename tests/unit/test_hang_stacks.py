"""Where a rank stands, by the frames that py-spy has read."""

from __future__ import annotations

import json

import pytest

from ncclguard.hang.stacks import Frame, Kind, Place, Thread, classify, parse, place_of

TORCH = "/opt/venv/lib/python3.11/site-packages/torch/"
STANDARD = "/usr/lib/python3.11/"
RAY = "/opt/venv/lib/python3.11/site-packages/ray/"
RAY_CONTEXT = RAY + "train/v2/_internal/execution/context.py"
ACTOR = (
    Frame("main_loop", RAY + "_private/worker.py", 1069),
    Frame("actor_method_executor", RAY + "_private/function_manager.py", 740),
    Frame("_resume_span", RAY + "util/tracing/tracing_helper.py", 487),
)
C10D = TORCH + "distributed/distributed_c10d.py"
LOGGER = TORCH + "distributed/c10d_logger.py"
MAIN = Frame("main", "/home/me/train.py", 7)
WRAPPER = Frame("wrapper", LOGGER, 83, (("args", "(<Tensor at 0x1>)"), ("kwargs", "{}")))


def wrapper(args: str, kwargs: str) -> Frame:
    return Frame("wrapper", LOGGER, 83, (("args", args), ("kwargs", kwargs)))


def placed(*inner: Frame, line: str = "") -> Place:
    return classify((MAIN, *inner), False, lambda file, number: line)


PLACES = [
    ((WRAPPER, Frame("all_reduce", C10D, 3252)), "", Kind.COLLECTIVE, "all_reduce"),
    ((WRAPPER, Frame("barrier", C10D, 5356), Frame("wait", "/home/me/backend.py", 69)), "", Kind.COLLECTIVE, "barrier"),
    ((Frame("recv", C10D, 2799),), "", Kind.P2P, "recv"),
    ((Frame("init_process_group", C10D, 1), Frame("_create_c10d_store", TORCH + "distributed/rendezvous.py", 2)), "",
     Kind.SETUP, "init_process_group"),
    ((Frame("backward", TORCH + "_tensor.py", 1), Frame("_engine_run_backward", TORCH + "autograd/graph.py", 2)), "",
     Kind.BACKWARD, "backward"),
    # Who pickles its object has not come to the exchange: its own code, or that of Python in C, may take any time.
    ((WRAPPER, Frame("all_gather_object", C10D, 3502), Frame("_object_to_tensor", C10D, 3407),
      Frame("__reduce__", "/home/me/data.py", 4)), "    time.sleep(60)", Kind.SLEEP, ""),
    ((WRAPPER, Frame("broadcast_object_list", C10D, 3502), Frame("_tensor_to_object", C10D, 3427)),
     "    return _unpickler(io.BytesIO(buf)).load()", Kind.PYTHON, ""),
    ((), "    work.wait()", Kind.COLLECTIVE, "wait"),
    ((), "    store.get('ready')", Kind.STORE, "store"),
    ((), "    dist.distributed_c10d._get_default_store().wait(['done'], hour)", Kind.STORE, "store"),
    ((), "    name = input('prompt> ')", Kind.IDLE, ""),
    ((Frame("accept", STANDARD + "socket.py", 294),), "", Kind.IDLE, ""),
    ((), "    time.sleep(5)", Kind.SLEEP, ""),
    ((), "    with self._lock:", Kind.LOCK, ""),
    ((), "    loss.item()", Kind.DEVICE, ""),
    ((), "    data = file.read()", Kind.FILE, ""),
    ((), "    x = compute(x)", Kind.PYTHON, ""),
    ((), "    request = self.socket.recv_multipart()", Kind.IDLE, ""),
    ((), "    request = self.input_queue.get()", Kind.IDLE, ""),
    ((Frame("get", STANDARD + "queue.py", 171), Frame("wait", STANDARD + "threading.py", 327)), "", Kind.IDLE, ""),
    ((Frame("recv", STANDARD + "multiprocessing/connection.py", 250),), "", Kind.IDLE, ""),
    ((Frame("run_forever", STANDARD + "asyncio/base_events.py", 607), Frame("select", STANDARD + "selectors.py", 468)), "",
     Kind.IDLE, ""),
    ((Frame("serve_forever", STANDARD + "socketserver.py", 233), Frame("select", STANDARD + "selectors.py", 415)), "",
     Kind.IDLE, ""),
    ((Frame("wait", "/opt/venv/lib/python3.11/site-packages/grpc/_common.py", 156), Frame("wait", STANDARD + "threading.py", 331)),
     "", Kind.IDLE, ""),
    ((Frame("worker_busy_loop", "/opt/venv/lib/python3.11/site-packages/vllm/v1/executor/multiproc_executor.py", 1),
      Frame("acquire_read", "/opt/venv/lib/python3.11/site-packages/vllm/distributed/device_communicators/shm_broadcast.py", 5)),
     "", Kind.IDLE, ""),
    ((Frame("main_loop", "/opt/venv/lib/python3.11/site-packages/ray/_private/worker.py", 1),), "", Kind.IDLE, ""),
    ((Frame("put", STANDARD + "queue.py", 140), Frame("wait", STANDARD + "threading.py", 327)), "", Kind.LOCK, ""),
    ((Frame("map", STANDARD + "multiprocessing/pool.py", 367), Frame("get", STANDARD + "multiprocessing/pool.py", 768),
      Frame("wait", STANDARD + "multiprocessing/pool.py", 765), Frame("wait", STANDARD + "threading.py", 629),
      Frame("wait", STANDARD + "threading.py", 327)), "", Kind.CHILD, ""),
    ((Frame("interaction", STANDARD + "pdb.py", 433), Frame("_cmdloop", STANDARD + "pdb.py", 397),
      Frame("cmdloop", STANDARD + "cmd.py", 126)), "line = input(self.prompt)", Kind.DEBUGGER, ""),
    ((Frame("_runscript", STANDARD + "pdb.py", 1657), Frame("run", STANDARD + "bdb.py", 597), MAIN), "    time.sleep(60)",
     Kind.SLEEP, ""),
    ((*ACTOR, Frame("step", "/home/me/train.py", 4)), "    time.sleep(60)", Kind.SLEEP, ""),
    ((*ACTOR, Frame("step", "/home/me/train.py", 4), Frame("get_objects", RAY + "_private/worker.py", 1007)), "", Kind.IDLE, ""),
    ((Frame("report", RAY_CONTEXT, 517), Frame("_wait_then_report", RAY_CONTEXT, 397), Frame("put", STANDARD + "queue.py", 140),
      Frame("wait", STANDARD + "threading.py", 327)), "", Kind.COLLECTIVE, "ray.train.report"),
    ((Frame("_sync_checkpoint_dir_name_across_ranks", RAY_CONTEXT, 254), Frame("get_objects", RAY + "_private/worker.py", 1007)),
     "", Kind.COLLECTIVE, "ray.train.report"),
    ((Frame("barrier", RAY + "train/v2/_internal/execution/collective_impl.py", 23),
      Frame("get_objects", RAY + "_private/worker.py", 1007)), "", Kind.COLLECTIVE, "barrier"),
    ((Frame("_wait_all_workers", TORCH + "distributed/rpc/api.py", 1),), "", Kind.IDLE, ""),
    ((Frame("serve_forever", STANDARD + "multiprocessing/managers.py", 1), Frame("wait", STANDARD + "threading.py", 331)), "",
     Kind.MANAGER, ""),
    ((Frame("wait", STANDARD + "threading.py", 327),), "", Kind.IDLE, ""),
    ((Frame("result", STANDARD + "concurrent/futures/_base.py", 451), Frame("wait", STANDARD + "threading.py", 327)), "",
     Kind.IDLE, ""),
    ((Frame("wait", STANDARD + "multiprocessing/synchronize.py", 268),), "", Kind.IDLE, ""),
    ((Frame("join", STANDARD + "threading.py", 1112), Frame("_wait_for_tstate_lock", STANDARD + "threading.py", 1132)), "",
     Kind.LOCK, ""),
    ((Frame("handle_one_request", STANDARD + "http/server.py", 392), Frame("readinto", STANDARD + "socket.py", 706)), "",
     Kind.IDLE, ""),
    ((Frame("create_connection", STANDARD + "socket.py", 827),), "", Kind.NETWORK, ""),
    ((), "    events = epoll.poll()", Kind.IDLE, ""),
    ((Frame("rpc_sync", TORCH + "distributed/rpc/api.py", 842, (("to", '"worker1"'),)),), "", Kind.RPC, 'rpc_sync("worker1")'),
    ((Frame("init_rpc", TORCH + "distributed/rpc/__init__.py", 190),), "", Kind.SETUP, "init_rpc"),
    ((Frame("get_data", TORCH + "utils/data/dataloader.py", 3), Frame("select", STANDARD + "selectors.py", 415)), "",
     Kind.LOADER, ""),
    ((Frame("_jit_compile", TORCH + "utils/cpp_extension.py", 2400), Frame("wait", TORCH + "utils/file_baton.py", 53)), "",
     Kind.LOCK, ""),  # an extension's lock file, which may be stale
    ((Frame("wait", "/opt/venv/lib/python3.11/site-packages/deepspeed/runtime/zero/partition_parameters.py", 765),
      Frame("wrapped_fn", "/opt/venv/lib/python3.11/site-packages/deepspeed/utils/nvtx.py", 33)), "return func(*args, **kwargs)",
     Kind.COLLECTIVE, "wait"),
    ((Frame("_worker_loop", TORCH + "utils/data/_utils/worker.py", 3),), "", Kind.WORKER, ""),
    ((Frame("_try_wait", STANDARD + "subprocess.py", 1),), "", Kind.CHILD, ""),
    ((Frame("urlopen", STANDARD + "urllib/request.py", 1), Frame("readinto", STANDARD + "socket.py", 2)), "", Kind.NETWORK, ""),
    ((Frame("_shutdown", STANDARD + "threading.py", 1590),), "", Kind.EXIT, "_shutdown"),
    ((Frame("destroy_process_group", C10D, 2),), "", Kind.EXIT, "destroy_process_group"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("inner", "line", "kind", "op"), PLACES, ids=[f"{kind}-{n}" for n, (_, _, kind, _) in enumerate(PLACES)]
)
def test_the_kind_of_a_place(inner: tuple[Frame, ...], line: str, kind: Kind, op: str) -> None:
    place = placed(*inner, line=line)
    assert (place.kind, place.op) == (kind, op)


def test_the_programs_own_frames_stand_before_torchs_function() -> None:
    assert placed(WRAPPER, Frame("all_reduce", C10D, 3252)).stack == ("train.py:7 main", "all_reduce")
    assert placed(line="work.wait()").stack == ("train.py:7 main", "wait")
    assert placed(line="time.sleep(1)").stack == ("train.py:7 main",)


GROUPS = [
    (wrapper("(<Tensor at 0x1>)", "{}"), (), True),
    (wrapper("(<Tensor at 0x1>)", '{"group": <torch._C._distributed_c10d.ProcessGroup at 0x2>}'), (), False),
    (wrapper("(<Tensor at 0x1>, <torch._C._distributed_c10d.ProcessGroup at 0x2>)", "{}"), (), False),
    (wrapper("([<Tensor at 0x1>, <Tensor at 0x1>, ...", "{}"), (), False),
    (wrapper("([<Tensor at 0x1>, ...", "{}"), (("group", "None"),), True),
]


@pytest.mark.parametrize(("around", "arguments", "world"), GROUPS)
def test_a_call_is_for_all_ranks_where_it_was_given_no_group(
    around: Frame, arguments: tuple[tuple[str, str], ...], world: bool
) -> None:
    assert placed(around, Frame("all_reduce", C10D, 3252, arguments)).world is world


@pytest.mark.parametrize(
    ("args", "kwargs", "world"),
    [("()", "{}", True), ("([0, 1])", "{}", False), ("()", '{"ranks": [0, 1]}', False), ("(range(0, 2))", "{}", False),
     ("(...)", "{}", False)],
)  # fmt: skip
def test_a_new_group_waits_for_its_members_alone(args: str, kwargs: str, world: bool) -> None:
    place = placed(wrapper(args, kwargs), Frame("new_group", C10D, 5600))
    assert (place.kind, place.op, place.world) == (Kind.SETUP, "new_group", world)


def test_the_peer_of_a_receive() -> None:
    place = placed(Frame("recv", C10D, 2799, (("src", "3"), ("group", "None"))))
    assert (place.peer, place.world) == (3, True)


def test_a_rank_that_trains_in_a_thread_stands_where_that_thread_stands() -> None:
    main = Thread(10, "MainThread", False, (MAIN, Frame("join", STANDARD + "threading.py", 1112)))
    trains = Thread(12, "train", False, (MAIN, Frame("barrier", C10D, 5356)))
    found = place_of([trains, main], 10, lambda file, line: "")
    assert found is not None
    assert (found[0].op, found[1]) == ("barrier", 12)


RUNNERS = [
    Frame("_run_target", RAY + "train/v2/_internal/execution/worker_group/thread_runner.py", 37),
    Frame("run", RAY + "air/_internal/util.py", 88),
]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_worker_of_ray_train_stands_where_its_thread_stands_that_trains(runner: Frame) -> None:
    """The main thread waits for Ray meanwhile."""
    main = Thread(
        10, "MainThread", False, (Frame("<module>", RAY + "_private/workers/default_worker.py", 323), *ACTOR[:1])
    )
    begin = Frame("_bootstrap", STANDARD + "threading.py", 1002)
    monitor = Thread(11, "MonitoringThread", False, (begin, Frame("_monitor_target", runner.file, 72)))
    trains = Thread(12, "TrainingThread", False, (begin, runner, PAUSE))
    found = place_of([main, monitor, trains], 10, lambda file, line: "time.sleep(9)" if line == 30 else "")
    assert found is not None
    assert (found[0].kind, found[1]) == (Kind.SLEEP, 12)


def test_a_report_of_ray_train_has_its_number_in_the_stack_so_that_the_next_one_is_another() -> None:
    report = Frame("report", RAY_CONTEXT, 474, (("report_call_index", "6"),))
    place = placed(report, Frame("_sync_checkpoint_dir_name_across_ranks", RAY_CONTEXT, 254))
    assert (place.stack[-1], place.world) == ("ray.train.report 6", True)


PAUSE = Frame("pause", "/home/me/train.py", 30)
MODULE = Frame("<module>", "/home/me/train.py", 9)
IDLE = (
    Frame("_wait_all_workers", TORCH + "distributed/rpc/api.py", 320),
    Frame("wait", STANDARD + "threading.py", 327),
)
FUTURE = (Frame("result", STANDARD + "concurrent/futures/_base.py", 451), Frame("wait", STANDARD + "threading.py", 327))
ANSWER = Frame("_run_function", TORCH + "distributed/rpc/internal.py", 200)
WORKER = (
    Frame("_worker", STANDARD + "concurrent/futures/thread.py", 83),
    Frame("run", STANDARD + "concurrent/futures/thread.py", 58),
)
THREADS = {
    "an RPC that it answers": (IDLE, [(ANSWER, PAUSE)], Kind.SLEEP),
    "the work of the future that it waits for": (FUTURE, [(*WORKER, PAUSE)], Kind.SLEEP),
    "a pool without work": (FUTURE, [(WORKER[0], Frame("get", STANDARD + "queue.py", 1))], Kind.IDLE),
    "a thread that serves": (
        (Frame("join", STANDARD + "threading.py", 1112),), [(Frame("accept", STANDARD + "socket.py", 294),)], Kind.IDLE,
    ),
    "a thread that it waits for": ((Frame("join", STANDARD + "threading.py", 1112),), [(PAUSE,)], Kind.LOCK),
}  # fmt: skip


@pytest.mark.parametrize("case", THREADS)
def test_a_rank_that_waits_for_a_thread_stands_where_that_one_stands(case: str) -> None:
    inner, others, kind = THREADS[case]
    threads = [Thread(10, "MainThread", False, (MODULE, *inner))]
    threads += [Thread(11 + n, "", False, frames) for n, frames in enumerate(others)]
    found = place_of(threads, 10, lambda file, line: "time.sleep(9)" if line == 30 else "")
    assert found is not None
    assert (found[0].kind, found[0].serves) == (kind, "RPC" in case)


def test_a_rank_stands_where_the_thread_stands_that_keeps_the_gil() -> None:
    threads = [Thread(10, "MainThread", False, (MODULE, *IDLE)), Thread(11, "", True, (PAUSE,))]
    found = place_of(threads, 10, lambda file, line: "")
    assert found is not None
    assert (found[0].stack[-1], found[0].holds_gil, found[1]) == (str(PAUSE), True, 11)


@pytest.mark.parametrize("name", ["ncclguard-watch", "ncclguard-callbacks"])
def test_a_thread_of_this_library_is_where_a_rank_stands_only_while_it_calls_the_program(name: str) -> None:
    """It takes the GIL for a moment, in which the main thread sleeps on; a callback may hang with it."""
    threads = [Thread(10, "MainThread", False, (MODULE, *IDLE)), Thread(11, name, True, (PAUSE,))]
    found = place_of(threads, 10, lambda file, line: "")
    assert found is not None
    assert found[1] == (11 if name == "ncclguard-callbacks" else 10)


def test_a_rank_that_waits_for_a_lock_does_so_beside_the_threads_of_this_library_too() -> None:
    """They wait for messages, and no request that the program serves comes to them."""
    main = Thread(10, "MainThread", False, (MODULE, PAUSE))
    for name, kind in (("ncclguard-watch", Kind.LOCK), ("server", Kind.IDLE)):
        found = place_of([main, Thread(11, name, False, IDLE)], 10, lambda file, line: "lock.acquire()")
        assert found is not None
        assert found[0].kind is kind


@pytest.mark.parametrize("frames", [(), (Frame("bye", "/home/me/train.py", 30),)])
def test_a_program_without_a_beginning_is_at_its_end(frames: tuple[Frame, ...]) -> None:
    found = place_of([Thread(10, "MainThread", False, frames)], 10, lambda file, line: "time.sleep(9)")
    assert found is not None
    assert found[0].kind is Kind.EXIT


def test_what_py_spy_prints_is_read_and_nothing_but_a_rank_of_the_programs_own() -> None:
    local = {"name": "group", "addr": 1, "arg": True, "repr": "None"}
    group = {"name": "group", "addr": 4096, "arg": True, "repr": "<torch._C._distributed_c10d.ProcessGroup at 0x1000>"}
    secret = {"name": "args", "addr": 1, "arg": True, "repr": '"password"'}
    number = {"name": "rank", "addr": 1, "arg": True, "repr": "3"}
    index = {"name": "report_call_index", "addr": 1, "arg": False, "repr": "6"}
    frames = [
        {"name": "TrainContext.report", "filename": RAY_CONTEXT, "line": 474, "locals": [secret, index]},
        {
            "name": "all_reduce",
            "filename": C10D,
            "module": None,
            "short_filename": None,
            "line": 3252,
            "locals": [local],
        },
        {"name": "irecv", "filename": C10D, "line": 2750, "locals": [group]},
        {"name": "Trainer.fit", "filename": "/home/me/train.py", "line": 7, "locals": [secret, number]},
    ]
    text = json.dumps([{"pid": 10, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 10, "active": False,
                        "owns_gil": True, "frames": frames}])  # fmt: skip
    (thread,) = parse(text)
    assert (thread.tid, thread.holds_gil) == (10, True)
    assert [str(frame) for frame in thread.frames] == [
        "train.py:7 fit", "torch/distributed/distributed_c10d.py:2750 irecv", "torch/distributed/distributed_c10d.py:3252 all_reduce",
        "ray/train/v2/_internal/execution/context.py:474 report",
    ]  # fmt: skip
    assert thread.frames[-1].arguments == (("report_call_index", "6"),)
    assert [dict(frame.arguments).get("group") for frame in thread.frames] == [None, group["repr"], "None", None]
    assert [(frame.arguments == (), frame.group, frame.rank) for frame in thread.frames] == [
        (True, 0, 3), (False, 4096, None), (False, 0, None), (False, 0, None)
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"frames": 3}]', "Error"])
def test_what_is_no_output_of_py_spy_is_refused(text: str) -> None:
    if text == "{}":
        assert parse(text) == []
    else:
        with pytest.raises(ValueError):
            parse(text)
