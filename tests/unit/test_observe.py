"""The start of `ncclguard observe` in Python processes of every kind: those it is not for see nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ncclguard_observe
from ncclguard.watch import observe

pytestmark = pytest.mark.processes

FOLDER = Path(ncclguard_observe.__file__).parent
ARMED = "import sys; print(any(type(f).__module__ == 'ncclguard_observe' for f in sys.meta_path))"


def python(*arguments: str, **variables: str) -> str:
    """What a new interpreter prints with the hook in its path, which has to end well and say nothing else."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(FOLDER), "NCCLGUARD_OBSERVE": "1", **variables}
    command = arguments if arguments[0].startswith("/") else (sys.executable, *arguments)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("value", "armed"), [("1", True), ("true", True), ("0", False), ("", False), ("no", False), ("False", False)]
)
def test_a_process_waits_for_torch_only_where_it_is_asked_to(value: str, armed: bool) -> None:
    assert python("-c", ARMED, NCCLGUARD_OBSERVE=value) == str(armed)


def test_a_process_without_torch_imports_nothing_of_the_guard() -> None:
    look = "import json, sys; print([name for name in sys.modules if name.split('.')[0] in ('ncclguard', 'torch')])"
    assert python("-c", look) == "[]"


@pytest.mark.parametrize("options", [["-S"], ["-I"], ["-E"], ["-I", "-S"]], ids=" ".join)
def test_an_interpreter_that_reads_no_environment_runs_as_ever(options: list[str]) -> None:
    assert python(*options, "-c", "print('ran')") == "ran"


def test_the_folder_is_not_on_the_path_of_the_program() -> None:
    assert str(FOLDER) not in python("-c", "import sys; print(sys.path)")
    assert python("-c", "import os; print(os.environ['PYTHONPATH'])") == str(FOLDER), "children need it"


def test_a_sitecustomize_of_the_environment_runs_too_and_is_found_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("VALUE = 7\n")
    look = "import sys, sitecustomize; print(sitecustomize.VALUE, sitecustomize.__file__)"
    path = os.pathsep.join((str(FOLDER), str(tmp_path)))
    assert python("-c", look, PYTHONPATH=path) == f"7 {tmp_path / 'sitecustomize.py'}"
    assert python("-c", ARMED, PYTHONPATH=path) == "True"


def test_a_python_without_ncclguard_runs_as_ever(tmp_path: Path) -> None:
    """As in a launcher's own environment, or a system's Python that a script of the job calls."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True, timeout=60)
    assert python(str(tmp_path / "bin" / "python"), "-c", ARMED) == "False"


def test_children_and_what_a_process_becomes_are_armed() -> None:
    child = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {ARMED!r}], text=True))"
    assert python("-c", child) == "True"
    become = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {ARMED!r}])"
    assert python("-c", become) == "True"


def test_a_program_that_has_taken_the_function_that_ends_a_job_ends_it_for_the_guard_too() -> None:
    program = (
        "from torch.distributed import destroy_process_group as end\n"  # before the guard is there
        "import torch.distributed as dist\n"
        "from ncclguard import torch_compat\n"
        "torch_compat.on_destroy(lambda: print('told'))\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "end()\n"
        "print(dist.is_initialized())"
    )
    assert python("-c", program, GLOO_SOCKET_IFNAME="lo") == "told\nFalse"


#: Stands for torch.distributed.distributed_c10d, of which the hook knows two names.
MODULE = """
def init_process_group(backend=None):
    "Initialise."
    return backend
def get_world_size():
    return 1
"""


@pytest.fixture
def package(tmp_path: Path) -> str:
    """A path with a package that has the name of torch's, and the hook."""
    folder = tmp_path / "torch" / "distributed"
    folder.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("from .distributed_c10d import *\n")
    (folder / "distributed_c10d.py").write_text(MODULE)
    return os.pathsep.join((str(FOLDER), str(tmp_path)))


#: What a program may do to the import system, or to the function -> it, and what it prints of a call.
PROGRAMS = {
    "imports": "from torch.distributed import init_process_group as f",
    "looks at the function": (
        "import inspect, pickle, torch.distributed as d\n"
        "f = d.init_process_group\n"
        "assert pickle.loads(pickle.dumps(f)) is f is d.distributed_c10d.init_process_group\n"
        "assert (f.__name__, f.__doc__, f.__module__) == ('init_process_group', 'Initialise.', 'torch.distributed.distributed_c10d')\n"
        "assert str(inspect.signature(f)) == '(backend=None)'"
    ),
    "looks at the loader": (
        "import importlib.machinery, inspect, torch.distributed.distributed_c10d as m\n"
        "assert type(m.__loader__) is importlib.machinery.SourceFileLoader is type(m.__spec__.loader)\n"
        "assert 'Initialise' in inspect.getsource(m) and not vars(m.__loader__).get('exec_module')\n"
        "f = m.init_process_group"
    ),
    "reloads": (
        "import importlib, torch.distributed.distributed_c10d as m\n"
        "importlib.reload(m)\n"
        "f = m.init_process_group"
    ),
    "has a finder of its own": (
        "import importlib.machinery, sys\n"
        "class Own:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        return importlib.machinery.PathFinder.find_spec(name, path, target) if name.startswith('torch') else None\n"
        "sys.meta_path.insert(0, Own())\n"
        "from torch.distributed import init_process_group as f"
    ),
    "empties the finders": (
        "import importlib.machinery, sys\n"
        "sys.meta_path[:] = [importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter, importlib.machinery.PathFinder]\n"
        "from torch.distributed import init_process_group as f"
    ),
    "has an old finder": (
        "import sys\n"
        "class Old:\n"
        "    pass\n"
        "sys.meta_path.append(Old())\n"
        "from torch.distributed import init_process_group as f"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(PROGRAMS))
def test_a_program_that_looks_closely_sees_what_it_would_without(what: str, package: str) -> None:
    assert python("-c", f"{PROGRAMS[what]}\nprint(f('gloo'))", PYTHONPATH=package) == "gloo"


def test_init_process_group_is_wrapped_once(package: str) -> None:
    again = "import ncclguard_observe as o; o.start(); o.start()\n"
    count = "from torch.distributed import init_process_group as f\nprint(hasattr(f.__wrapped__, '__wrapped__'))"
    assert python("-c", again + count, PYTHONPATH=package) == "False"
    late = "import os\nos.environ['NCCLGUARD_OBSERVE'] = '1'\n"
    first = "import torch.distributed\n"
    assert python("-c", first + late + again + count, PYTHONPATH=package, NCCLGUARD_OBSERVE="0") == "False"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NCCLGUARD_")}
    return subprocess.run(
        [sys.executable, "-m", "ncclguard", "observe", *words],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_command_becomes_the_program_with_its_exit_code() -> None:
    done = command("--", sys.executable, "-c", f"{ARMED}; sys.exit(7)", "--an-option")
    assert (done.returncode, done.stdout, done.stderr) == (7, "True\n", "")
    assert command(sys.executable, "-c", "pass").returncode == 0, "-- may be left out"


def test_a_command_that_cannot_be_run_is_said(tmp_path: Path) -> None:
    assert (command().returncode, command("--").returncode) == (2, 2)
    done = command("--", "no-such-command")
    assert (done.returncode, done.stderr) == (127, "ncclguard observe: no-such-command: No such file or directory\n")
    script = tmp_path / "train.py"
    script.write_text("")
    done = command("--", str(script))
    assert done.returncode == 126
    assert "give the command that starts it, such as torchrun" in done.stderr


def test_the_path_is_changed_only_where_python_does_not_read_the_variable_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, asked = {"PYTHONPATH": "/a:/b", "HOME": "/h"}, {"NCCLGUARD_OBSERVE": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
    monkeypatch.setattr(observe, "_read_at_start", lambda environ: False)
    assert observe.observing(given) == {**given, **asked, "PYTHONPATH": f"{FOLDER}:/a:/b"}
    assert observe.observing({}) == {**asked, "PYTHONPATH": str(FOLDER)}
    monkeypatch.setattr(observe, "_read_at_start", lambda environ: True)
    assert observe.observing(given) == {**given, **asked}


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_a_length_of_the_flight_recorder_that_is_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_read_at_start", lambda environ: True)
    assert observe.observing({name: "0"}) == {name: "0", "NCCLGUARD_OBSERVE": "1"}
