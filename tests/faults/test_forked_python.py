"""Programs that tests start with the stand-in for the interpreter do and say what they do and say with the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ncclguard import faults
from ncclguard.faults.janitor import process_state

LIMIT = 90.0
SCRIPT = """
import atexit, os, sys
atexit.register(lambda: print("at exit of", __name__))
print(sys.argv, os.path.basename(__file__), os.path.realpath(sys.path[0]), os.getcwd(), os.environ.get("MINE"), os.umask(0), sys.stdin.read())
def fails():
    raise ValueError("nothing here")
fails()
"""
SAYS_ITS_PID = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    "arguments",
    [
        ["script.py", "-x", "an argument"],
        ["-u", "script.py"],
        ["-m", "script", "1"],
        ["-m", "json.tool"],
        ["-m", "no.such.module"],
        ["no_such_script.py"],
        ["-c", "import sys; print(sys.argv, sys.path[0]); sys.exit('in words')", "1"],
        ["-c", "raise SystemExit(7)"],
        ["-c", "raise KeyboardInterrupt"],
        ["-c", "import os, signal; print('lost'); os.kill(os.getpid(), signal.SIGKILL)"],
        ["-c", "import os; print('fl', flush=True); os.abort()"],
        ["-c", "1 +"],
        ["-c", "import threading; threading.Timer(0.1, print, ['from a thread']).start()"],
        ["-X", "dev", "-c", "import sys; print(sys.flags.dev_mode)"],
    ],
    ids=str,
)
def test_output_and_end_are_those_of_the_real_interpreter(
    arguments: list[str], tmp_path: Path, forked_python: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"MINE": "set", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = [
        subprocess.run(
            [python, *arguments],
            cwd=tmp_path,
            env=env,
            input="[1]",
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        for python in (sys.executable, forked_python)
    ]
    real, forked = ((each.returncode, each.stdout, each.stderr.replace(forked_python, sys.executable)) for each in done)
    assert forked == real


def test_it_is_forked_with_torch_imported_and_so_is_what_it_starts(forked_python: str) -> None:
    program = "import sys; print(sys.executable, 'torch' in sys.modules)"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}], check=True)"
    done = subprocess.run([forked_python, "-c", nested], capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout == f"{forked_python} True\n"


def test_a_variable_that_torch_reads_at_its_import_makes_it_the_real_interpreter(forked_python: str) -> None:
    program = "import sys; print(sys.executable, 'torch' in sys.modules)"
    env = os.environ | {"TORCH_CPP_LOG_LEVEL": "INFO"}
    done = subprocess.run(
        [forked_python, "-c", program], env=env, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stdout == f"{sys.executable} False\n"


def test_descriptors_have_the_same_numbers(forked_python: str) -> None:
    reader, writer = os.pipe()
    program = f"import os; os.write({writer}, b'through it'); print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    done = [
        subprocess.run([python, "-c", program], pass_fds=[writer], stdout=subprocess.PIPE, timeout=LIMIT, check=True)
        for python in (sys.executable, forked_python)
    ]
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == b"through it" * 2
    assert done[0].stdout == done[1].stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGABRT])
def test_a_signal_ends_the_program_and_the_end_is_by_that_signal(number: signal.Signals, forked_python: str) -> None:
    with subprocess.Popen(
        [forked_python, "-c", SAYS_ITS_PID], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(timeout=LIMIT) == -number
    end = time.monotonic() + LIMIT
    while process_state(pid) not in ("", "Z"):
        assert time.monotonic() < end, f"process {pid} was left behind"
        time.sleep(0.01)


@pytest.mark.skipif(faults.namespaces_available() is not None, reason=str(faults.namespaces_available()))
def test_in_the_network_namespace_hostname_and_mounts_of_who_starts_it(forked_python: str) -> None:
    program = "import socket; print(socket.gethostname(), socket.gethostbyname('host1'), len(open('/proc/net/dev').readlines()))"
    with faults.Hosts(2) as hosts:
        said = [hosts.run("host1", [python, "-c", program]) for python in (sys.executable, forked_python)]
    assert said[0] == said[1]
    assert said[1].startswith("host1 10.77.1.2 ")
