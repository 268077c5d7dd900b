"""The how-tos as they stand: their programs run on two ranks, their commands run or are taken by the program's own parser."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclguard import faults
from ncclguard.__main__ import COMMANDS
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(page for page in (ROOT / "docs" / "how-to").glob("*.md") if not page.name.endswith(".zh.md"))
TOUR = ROOT / "docs" / "tour.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: What the pages leave to the reader, for their programs to begin with.
PRELUDES = {
    "deepspeed.md": """
import torch
class Trainer:
    def __init__(self):
        import deepspeed
        model = torch.nn.Linear(16, 4)
        config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
        self.model = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        self.monitor, self.eval_loader = self, torch.utils.data.DataLoader(torch.randn(16, 16), batch_size=8)
    def log_metrics(self, metrics, step=None): print(metrics)
    def evaluate(self, step=None): return sum(self.model(x).square().mean().item() for x in self.eval_loader), 1.0
    def train(self):
        for step in range(3):
            self.model.backward(self.model(torch.randn(8, 16)).square().mean())
            self.model.step()
        assert self.evaluate(step)[1] == 1.0
""",
    "ray.md": """
import sys, types
from datetime import timedelta
import torch.distributed as dist
class TorchTrainer:
    def __init__(self, train, scaling_config, torch_config): self.train, self.group = train, torch_config
    def fit(self):
        dist.init_process_group(self.group["backend"], timeout=timedelta(seconds=self.group["timeout_s"]))
        self.train({})
        dist.destroy_process_group()
for name, values in {"ray": {"init": dict}, "ray.train": {"ScalingConfig": dict},
                     "ray.train.torch": {"TorchConfig": dict, "TorchTrainer": TorchTrainer}}.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(values)
""",
    "transformers.md": """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)
    def forward(self, x, labels=None):
        loss = self.layer(x).square().mean()
        return {"loss": loss, "logits": self.layer(x)}
model, data = Model(), [{"x": torch.randn(16), "labels": torch.tensor(0)} for _ in range(32)]
held_out = data
""",
}
#: What the page on torchrun leaves to the reader: more collectives than a drill counts before it strikes.
STEPS = """
import torch
for step in range(30):
    dist.all_reduce(torch.ones(1000))
print("done", dist.get_rank())
dist.destroy_process_group()
"""
#: torch 2.13 aborts a process that ends while gloo's thread still drops the last collective, which has saved Python's
#: thread-local state: it waits for the GIL of an interpreter that is gone. On a busy machine one of 12 programs did.
REST = "\nimport time\ntime.sleep(1)\n"
NEEDS = {"accelerate.md": "accelerate", "deepspeed.md": "deepspeed", "lightning.md": "lightning", "transformers.md": "transformers"}  # fmt: skip
#: Programs of a cluster and of the system, whose arguments nothing here can judge.
ELSEWHERE = ("kubectl", "scontrol", "export", "exit", "apt-get", "pip", "vllm")
#: Programs whose parsers are asked.
OURS = ("ncclguard", "torchrun", "deepspeed", "accelerate", "bash", "python", "srun")


def needed(page: Path) -> None:
    name = NEEDS.get(page.name)
    if name is not None and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


#: From here on a page has another program, which goes on when a rank is killed.
GOES_ON = "\n## Go on when a rank is killed\n"


def program(page: Path, part: int = 0) -> str:
    """The page's Python, with what it leaves to the reader, and gloo where it says NCCL: CPU builds of torch have none."""
    text = page.read_text().split(GOES_ON)[part]
    code = "".join(text for kind, text in BLOCK.findall(text) if kind == "python")
    steps = STEPS + REST if page.name == "torchrun.md" else REST
    code = re.sub(r'\(("nccl")(, timeout)', r'("gloo"\2', code)
    return PRELUDES.get(page.name, "") + code + steps


def shell(script: str, folder: Path, **variables: str) -> str:
    """What the commands print, which have to end well, by themselves."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    environment |= {"PYTHONWARNINGS": "ignore", **variables}
    with subprocess.Popen(
        ["bash", "-e"], cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as bash:  # fmt: skip
        try:
            output, _ = bash.communicate(script, timeout=200)
        finally:
            if bash.poll() is None:
                os.killpg(bash.pid, signal.SIGTERM)  # torchrun's ranks lead sessions of their own: it ends them
                bash.wait(timeout=30)
    assert bash.returncode == 0, output[-6000:]
    return output


def run_program(path: str) -> None:
    """Run a program in its own folder, into which it writes."""
    os.chdir(os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


def ranks(script: str, folder: Path) -> str:
    """What two ranks of a program print, which have to end well: forks, as the imports take most of the time.

    The test of the commands for torchrun has torchrun start them.
    """
    (folder / "train.py").write_text(script)
    variables = {"CUDA_VISIBLE_DEVICES": "", "TORCHELASTIC_RUN_ID": "none"}  # Lightning asks for this one of torchrun's
    ended = faults.run_ranks(run_program, 2, args=[str(folder / "train.py")], env=variables, timeout=200).check()
    return "".join(rank.output for rank in ended)


RUN = [page for page in PAGES if page.name not in ("kubernetes.md", "rl.md", "slurm.md")]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_program_of_a_page_runs_on_two_ranks(page: Path, tmp_path: Path) -> None:
    """Ray's without Ray, which is not among what the tests install. Three pages have none."""
    needed(page)
    output = ranks(program(page), tmp_path)
    assert "Traceback" not in output, output


#: A rank is killed in its third backward, without a word of that in the page's own program.
KILLED = """
import os, signal, torch
backwards, backward = [], torch.Tensor.backward
def strike(self, *args, **kwargs):
    backwards.append(1)
    if len(backwards) == 3 and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return backward(self, *args, **kwargs)
torch.Tensor.backward = strike
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if GOES_ON in page.read_text()], ids=lambda page: page.name)
def test_the_program_of_a_page_goes_on_when_its_first_rank_is_killed(page: Path, tmp_path: Path) -> None:
    needed(page)
    (tmp_path / "train.py").write_text(KILLED + program(page, part=1))
    output = shell("ncclguard run --nproc-per-node 3 train.py", tmp_path, ACCELERATE_USE_CPU="true")
    assert "Traceback" not in output and "went on without rank 0" in output, output
    assert [*tmp_path.glob("checkpoint-10/model.safetensors"), *tmp_path.glob("out/checkpoint-10/model.safetensors")]


@pytest.mark.slow
@pytest.mark.parametrize("marks", [" -", " +"], ids=["before", "after"])
def test_the_script_of_the_readme_runs_before_and_after_its_changes(marks: str, tmp_path: Path) -> None:
    diff = next(text for kind, text in BLOCK.findall((ROOT / "README.md").read_text()) if kind == "diff")
    code = "\n".join(line[2:] for line in diff.splitlines() if line[:1] in marks)
    data = (
        "import torch\nmodel, loader, held_out = torch.nn.Linear(16, 4), torch.randn(8, 2, 16), torch.randn(3, 2, 16)\n"
    )
    output = ranks(data + code.replace('"nccl"', '"gloo"') + REST, tmp_path)
    losses = re.findall(r"(?=\d\.\d{9})", output)  # wherever they stand: two ranks may write into one line
    assert len(losses) == 2, output


def blocks(page: str) -> list[str]:
    """The lines of the page's commands, for two ranks of this host."""
    text = (ROOT / "docs" / "how-to" / page).read_text()
    lines = [line for kind, block in BLOCK.findall(text) if kind == "sh" for line in block.splitlines()]
    return [line.replace("per-node 8", "per-node 2").replace("--master-addr host0", MASTER) for line in lines]


MASTER = "--master-addr 127.0.0.1 --master-port $PORT"


def nodes(command: str) -> str:
    """The command on each of two nodes, which are both this host."""
    each = command.replace("per-node 2", "per-node 1")
    return f"(NODE=1; {each}\n) & other=$!\nNODE=0\n{each}\nwait $other\n"


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_commands_for_torchrun_run(tmp_path: Path) -> None:
    """On one host, on two nodes, doctor's, and the drill, which names the rank that it kills in a job under watch()."""
    (tmp_path / "train.py").write_text(program(ROOT / "docs" / "how-to" / "torchrun.md"))
    one, several, check, drill = blocks("torchrun.md")
    port = str(free_port())
    assert shell(one, tmp_path).count("done") == 2
    assert shell(nodes(several), tmp_path, PORT=port).count("done") == 2
    looked = shell(f"set +e\n{nodes(check)}true", tmp_path, PORT=port)  # its exit code judges this host
    assert "connections" in looked
    found = shell(drill, tmp_path)
    assert "named:     rank 1, lost: right" in found and "drill:     passed" in found


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.thorough
def test_a_rank_that_lightning_has_started_is_named(tmp_path: Path) -> None:
    """The last one is late beyond the limit, under torchrun and where Lightning itself has started it.

    Where it is killed there, Lightning ends the others within a second, and who is first is not to be tested.
    """
    page = ROOT / "docs" / "how-to" / "lightning.md"
    needed(page)
    limit = "timeout=8"  # torch's store may take 5 s to connect
    (tmp_path / "train.py").write_text(program(page).replace("timeout=300", limit))
    torchrun, alone = blocks("lightning.md")
    drill = "NCCLGUARD_ALLOW_DRILL=1 ncclguard drill --rank 1 --raw"
    for command in (torchrun, alone):
        assert "named:     rank 1, late: right" in shell(f"{drill} --fault late --seconds 16 -- {command}", tmp_path)


def commands(page: Path) -> list[str]:
    """Every command of the page: the lines of its blocks, and what stands in the text between them."""
    text = page.read_text()
    lines = [
        line
        for kind, block in BLOCK.findall(text)
        if kind == "sh"
        for line in block.replace("\\\n", " ").splitlines()
        if line and not line.startswith("#")
    ]
    spans = [re.sub(r"^NCCLGUARD_\w+=\w+ ", "", span) for span in re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))]
    if page.name == "tour.md":  # tests/distributed/test_tour.py runs its blocks
        lines = []
    return lines + [span for span in spans if (words := shlex.split(span)) and words[0] in OURS and len(words) > 1]


@pytest.mark.parametrize(
    ("page", "command"),
    [
        pytest.param(page, command, id=f"{page.name}: {command[:60]}")
        for page in [*PAGES, TOUR]
        for command in commands(page)
    ],
)
def test_a_command_of_a_page_is_one_that_its_program_takes(page: Path, command: str) -> None:
    """Also those that need a cluster, by the parsers of the programs that it would start there."""
    parsed = re.sub(r"\$\w+|\$\([^)]*\)", "1", command)
    for part in re.split(r"\|\||&&|[;|>](?=\s)", re.sub(r"\s#.*", "", parsed)) if "bash -c" not in parsed else [parsed]:
        taken(shlex.split(part, comments=True))


def taken(words: list[str]) -> None:
    """Have the parser of the command's program take its arguments. Fail for a program that is not known here."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if not words or words[0] in ELSEWHERE:
        return
    assert words[0] in OURS, words
    name, *arguments = words
    if name == "python":
        assert arguments[0].endswith(".py")
    elif name == "bash":
        assert arguments[0] == "-c"
        taken(shlex.split(arguments[1]))
    elif name == "srun":
        taken(next((arguments[at:] for at, word in enumerate(arguments) if word in OURS), []))
    elif name == "ncclguard":
        module = importlib.import_module(COMMANDS[arguments[0]].module)
        at = arguments.index("--") if "--" in arguments else len(arguments)
        if len(arguments) > 1:  # else it is only the name
            options = module.build_parser().parse_args(arguments[1:at])
            if arguments[0] == "drill":  # what it refuses though each option is right: no rank, no seconds
                module.chosen(options, has_command=at < len(arguments))
        taken(arguments[at + 1 :])
    else:
        PARSERS[name](arguments)


def of_torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    found = get_args_parser().parse_args(arguments)
    if found.no_python:
        taken([found.training_script, *found.training_script_args])


def of_deepspeed(arguments: list[str]) -> None:
    pytest.importorskip("deepspeed.launcher.runner").parse_args(arguments)


def of_accelerate(arguments: list[str]) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    assert arguments[0] == "launch"
    launch.launch_command_parser().parse_args(arguments[1:])


PARSERS: dict[str, Callable[[list[str]], None]] = {
    "torchrun": of_torchrun,
    "deepspeed": of_deepspeed,
    "accelerate": of_accelerate,
}


def test_the_job_for_kubernetes_is_yaml_and_its_command_is_one_of_torchrun() -> None:
    """No cluster has been at hand to take it."""
    page = ROOT / "docs" / "how-to" / "kubernetes.md"
    found = next(text for kind, text in BLOCK.findall(page.read_text()) if kind == "yaml")
    job = pytest.importorskip("yaml").safe_load(found)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        taken(container["command"])
        assert {entry["name"] for entry in container["env"]} >= {"NCCLGUARD_REPORT_DIR"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_process_group_of_a_page_has_the_limit_that_the_guard_needs(page: Path) -> None:
    """torch's own default on NCCL, 600 s, is below the guard's limits: its watchdog would end the process first."""
    made = re.findall(r"(?:init_process_group|init_distributed|DDPStrategy|TorchConfig)\(.*", "".join(
        text for kind, text in BLOCK.findall(page.read_text()) if kind == "python"))  # fmt: skip
    assert [call for call in made if "timeout" not in call] == []


def test_the_page_on_groups_of_any_processes_runs_as_it_stands(tmp_path: Path) -> None:
    found = BLOCK.findall((ROOT / "docs" / "join.md").read_text())
    (tmp_path / "weights.py").write_text(next(text for kind, text in found if kind == "python"))
    output = shell(next(text for kind, text in found if kind == "sh"), tmp_path)
    assert (output.count("engine True 7.0 ()"), output.count("trainer True 7.0 ()")) == (2, 1), output


def test_the_page_on_the_channel_of_weights_runs_as_it_stands(tmp_path: Path) -> None:
    found = BLOCK.findall((ROOT / "docs" / "weights.md").read_text())
    (tmp_path / "channel.py").write_text(next(text for kind, text in found if kind == "python"))
    output = shell(next(text for kind, text in found if kind == "sh"), tmp_path)
    assert "engine 1 engine 2" in output, output
    for version in range(3):
        said = (f"version {version} is on engine 1, engine 2 after", *(f"engine {n} serves {version}" for n in (1, 2)))
        assert [output.count(text) for text in said] == [1, 1, 1], output  # wherever: several may write into one line
