"""Stacks, call sites and exceptions as text: right place, bounded length, from another thread, cheap to import."""

from __future__ import annotations

import linecache
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path

import ncclguard.integrations
import numpy
import pytest
import torch

from ncclguard.frames import frames_from
from ncclguard.incident import stacks
from ncclguard.incident.stacks import describe_exception, frame_text, main_thread_stack
from ncclguard_explain import language

HERE = "test_stacks.py"


def load_as_library(source: str, name: str) -> dict[str, object]:
    """Run ``source`` as if it were a file of the library, so that its frames count as the library's."""
    filename = str(Path(stacks.__file__).parent.parent / name)
    namespace: dict[str, object] = {"__name__": f"ncclguard.{name}"}
    exec(compile(textwrap.dedent(source), filename, "exec"), namespace)  # noqa: S102 - frames as the library would have them
    return namespace


def test_stack_of_the_main_thread_is_outermost_first_and_ends_where_it_is() -> None:
    def inner() -> tuple[str, ...]:
        return main_thread_stack()  # the marked line

    lines = inner()
    assert HERE in lines[-2] and lines[-2].endswith("in inner: return main_thread_stack()"), "without the comment"
    assert "in test_stack_of_the_main_thread" in lines[-3]
    assert "in main_thread_stack" in lines[-1] and lines[-1].endswith("3 frames of ncclguard")


def test_stack_is_read_from_another_thread_while_the_main_thread_is_in_a_native_call() -> None:
    seen: list[tuple[str, ...]] = []

    def watch() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            stack = main_thread_stack()
            if "torch.mm" in stack[-1]:
                seen.append(stack)
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    matrix = torch.ones(1500, 1500)
    while watcher.is_alive():
        torch.mm(matrix, matrix)
    watcher.join()
    assert seen and f"{HERE}:" in seen[0][-1] and "in test_stack_is_read_from" in seen[0][-1]


def test_the_evidence_package_and_the_integrations_are_the_librarys_too() -> None:
    assert stacks.is_own_file(language.__file__)
    # An editable install has them in a folder beside the package.
    assert stacks.is_own_file(ncclguard.integrations.__file__)


def test_frames_of_the_library_are_one_line() -> None:
    library = load_as_library(
        """
        def safe_thing(work): return engine(work)
        def engine(work): return wait(work)
        def wait(work): return work()
        """,
        "collectives.py",
    )
    lines: tuple[str, ...] = library["safe_thing"](lambda: main_thread_stack())  # type: ignore[operator]
    assert lines[-3] == "ncclguard/collectives.py:2 in safe_thing: 3 frames of ncclguard"
    assert "in <lambda>" in lines[-2]
    assert sum("ncclguard" in line.split(" in ")[0] for line in lines[-4:]) == 2


def test_what_the_library_adds_to_a_stack_is_said_in_chinese_and_nothing_else() -> None:
    own, left_out = "ncclguard/collectives.py:2 in all_reduce: {}", "... {} further out ..."
    program = "train.py:7 in step: print('3 frames of ncclguard')  # 2 lines further out"
    lines = [own.format("1 frame of ncclguard"), own.format("9 frames of ncclguard"), left_out.format("1 line")]
    lines += [left_out.format("33 lines"), program]
    assert [*map(frame_text, lines)] == lines
    language.choose("zh")
    try:
        *ours, last = map(frame_text, lines)
    finally:
        language.choose(None)
    assert last == program
    assert ours[1] == "ncclguard/collectives.py:2 in all_reduce：ncclguard 内部 9 帧"
    assert not [line for line in ours if re.search("frame|line", line)]


def test_deep_recursion_keeps_the_innermost_frames() -> None:
    def dive(depth: int) -> tuple[str, ...]:
        return dive(depth - 1) if depth else main_thread_stack(limit=10)

    lines = dive(300)
    assert len(lines) == 10
    assert lines[0].startswith("... ") and lines[0].endswith(" lines further out ...")
    assert all("in dive" in line for line in lines[1:-1])


def test_long_source_lines_are_shortened() -> None:
    code = "def go(f):\n    return f() or '" + "x" * 1000 + "'"
    namespace: dict[str, object] = {}
    exec(compile(code, "long.py", "exec"), namespace)  # noqa: S102
    linecache.cache["long.py"] = (len(code), None, code.splitlines(True), "long.py")
    lines: tuple[str, ...] = namespace["go"](main_thread_stack)  # type: ignore[operator]
    line = next(line for line in lines if line.split(":")[0].endswith("long.py"))
    assert len(line) < stacks.SOURCE_LENGTH + 40 and line.endswith("...")


def test_call_site_is_the_first_frame_outside_the_library() -> None:
    library = load_as_library(
        """
        from threading import get_ident
        from ncclguard.incident.stacks import call_site_of
        def safe_thing(): return engine()
        def engine(): return call_site_of(get_ident())
        """,
        "collectives.py",
    )

    def step() -> str:
        return library["safe_thing"]()  # type: ignore[operator,no-any-return]

    line = step.__code__.co_firstlineno + 1
    assert step().endswith(f"{HERE}:{line} in step")


def test_call_site_of_the_bench_is_the_bench() -> None:
    bench = load_as_library(
        """
        from threading import get_ident
        from ncclguard.incident.stacks import call_site_of
        def run(): return call_site_of(get_ident())
        """,
        "bench/job.py",
    )
    assert bench["run"]() == "ncclguard/bench/job.py:4 in run"  # type: ignore[operator]


def test_call_site_of_a_thread_that_runs_only_the_library_is_the_main_threads() -> None:
    library = load_as_library(
        """
        from threading import get_ident
        from ncclguard.incident.stacks import call_site_of
        def go(out): out.append(call_site_of(get_ident()))
        """,
        "collectives.py",
    )
    out: list[str] = []
    thread = threading.Thread(target=library["go"], args=(out,))  # type: ignore[arg-type]
    thread.start()
    thread.join()
    assert "test_stacks.py" in out[0]


def test_call_site_is_not_what_torch_is_in_below_the_program() -> None:
    """As a hook of DistributedDataParallel: the library is called by torch, and torch by the program."""
    library = load_as_library(
        """
        from threading import get_ident
        from ncclguard.incident.stacks import call_site_of
        def hook(module, inputs): found.append(call_site_of(get_ident()))
        found = []
        """,
        "process_group/group.py",
    )
    model = torch.nn.Linear(1, 1)
    model.register_forward_pre_hook(library["hook"])  # type: ignore[arg-type]

    def step() -> None:
        model(torch.ones(1))

    step()
    assert library["found"][0].endswith(f"{HERE}:{step.__code__.co_firstlineno + 1} in step")  # type: ignore[index]


def test_the_drills_own_threads_are_not_the_programs() -> None:
    wait, names = threading.Event(), ("worker", "ncclguard drill slow:2")
    threads = [threading.Thread(target=wait.wait, name=name) for name in names]
    for thread in threads:
        thread.start()
    found = [name for name, _ in stacks.other_threads(limit=1000) if name in names]
    wait.set()
    for thread in threads:
        thread.join()
    assert found == ["worker"]


def test_exception_is_placed_at_the_innermost_frame_of_the_program() -> None:
    def step() -> None:
        torch.ones(2) @ torch.ones(3)

    def helper() -> None:
        numpy.broadcast_shapes((2, 3), (4, 5))  # raises inside numpy

    with pytest.raises(RuntimeError) as caught:
        step()
    assert f"{HERE}:{step.__code__.co_firstlineno + 1} in step: " in describe_exception(caught.value)
    assert describe_exception(caught.value).startswith("RuntimeError at ")
    with pytest.raises(ValueError) as numpy_caught:
        helper()
    assert traceback.extract_tb(numpy_caught.tb)[-1].filename.find("numpy") > 0
    assert "in helper: " in describe_exception(numpy_caught.value)


def test_exception_of_torch_carries_its_module() -> None:
    text = describe_exception(torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"))
    assert text.startswith("torch.") and text.endswith("OutOfMemoryError: CUDA out of memory.")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError(), "ValueError"),
        (ValueError("\n\n  second \n third"), "ValueError: second"),
        (Unprintable(), f"{__name__}.Unprintable: (its text could not be built: ValueError)"),
    ],
)
def test_exception_without_a_traceback(error: BaseException, text: str) -> None:
    assert describe_exception(error) == text


def test_a_huge_message_is_bounded() -> None:
    text = describe_exception(ValueError("x" * 10_000_000))
    assert len(text) == stacks.EXCEPTION_LENGTH and text.endswith("...")


@pytest.mark.processes
def test_importing_it_does_not_import_torch() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(stacks.__file__).parent)!r}); import stacks; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_source_lines_that_cannot_be_read_are_left_out_after_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage may be what holds the job up; a named pipe without a writer stands for it."""
    file = tmp_path / "program.py"
    os.mkfifo(file)
    namespace: dict[str, object] = {}
    exec(compile("def go(f):\n    return f()", str(file), "exec"), namespace)  # noqa: S102
    monkeypatch.setattr(stacks, "_reader", None)
    readers = []
    try:
        for _ in range(2):
            lines: tuple[str, ...] = namespace["go"](main_thread_stack)  # type: ignore[operator]
            assert any(line.endswith("program.py:2 in go") for line in lines)
            readers.append(stacks._reader)
        assert readers[0] is not None and readers[0].is_alive()
        assert readers[1] is readers[0]  # nobody waits twice
    finally:
        writer = os.open(file, os.O_RDWR | os.O_NONBLOCK)  # lets the reader open it, and closing it lets it end
        while stacks._reader is not None and stacks._reader.is_alive():
            os.write(writer, b"\n")
            os.close(writer)
            stacks._reader.join(0.1)
            writer = os.open(file, os.O_RDWR | os.O_NONBLOCK)
        os.close(writer)


def test_source_lines_of_code_that_torch_has_generated() -> None:
    """Their files are no files, and their names begin as those of others that have no source."""
    seen: list[tuple[str, ...]] = []

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return hook(x)

    def hook(x: torch.Tensor) -> torch.Tensor:
        seen.append(main_thread_stack())
        return x

    graph = torch.fx.Graph()
    graph.output(graph.call_function(hook, (graph.placeholder("x"),)))
    torch.fx.GraphModule(Module(), graph)(torch.ones(1))
    assert any(line.startswith("<eval_with_key>") and "in forward: hook" in line for line in seen[0]), seen[0]


def test_of_a_deep_stack_the_programs_innermost_line_is_kept() -> None:
    """A recursion in a library is deeper than the lines that are sent."""
    names: dict[str, object] = {}
    source = "def deep(n, last):\n    return deep(n - 1, last) if n else last()\n"
    exec(compile(source, str(Path(torch.__file__).with_name("recursion.py")), "exec"), names)  # noqa: S102 - as a library
    deep = names["deep"]
    lines = deep(20, lambda: stacks._lines(stacks._spots(frames_from(sys._getframe().f_back)), 8))  # type: ignore[operator]
    assert len(lines) == 8
    assert f"{HERE}:" in lines[0] and "in test_of_a_deep_stack" in lines[0]
    assert re.fullmatch(r"\.\.\. \d+ lines further out \.\.\.", lines[1])
    assert all("recursion.py" in line for line in lines[2:])


@pytest.mark.processes
def test_packages_of_another_environment_are_not_the_program(tmp_path: Path) -> None:
    """A path file or PYTHONPATH takes torch from there; the place of a call is still the user's line."""
    packages = tmp_path / "lib" / "site-packages"
    code = (
        "from ncclguard.incident.stacks import _is_packages, _is_programs\n"
        f"print([_is_programs({str(packages)!r} + name) for name in ('/torch/x.py', '/other.py')],"
        f" _is_packages({str(packages)!r} + '/torch/x.py'), _is_programs({str(tmp_path)!r} + '/train.py'))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(packages)])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environ
    )
    assert done.stdout == "[False, False] False True\n", done
