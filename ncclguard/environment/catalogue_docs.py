"""The tables of docs/environment.md: ``python -m ncclguard.environment.catalogue_docs > docs/environment.md``."""

from __future__ import annotations

from collections.abc import Sequence

from ncclguard.environment.catalogue import DEEPSPEED_VARIABLES, UNREAD_VARIABLES
from ncclguard.environment.nccl_names import NCCL_NAMES, NEWEST_READ
from ncclguard.environment.variable import Variable
from ncclguard.environment.variables_nccl import NCCL_VARIABLES
from ncclguard.environment.variables_torch import TORCH_VARIABLES
from ncclguard.environment.versions import BUNDLED_NCCL

_HEAD = """# Environment

<!-- Written by `python -m ncclguard.environment.catalogue_docs`; a test compares. Do not edit. -->

`ncclguard.setup_env()` puts the environment of a distributed program in order; call it before
`init_process_group`. `setup_nccl_timeout_env()` is another name of it. `ncclguard env` prints the same for a
shell or a file.

```python
import ncclguard as ng
import torch.distributed as dist

report = ng.setup_env()
dist.init_process_group("nccl", timeout=report.limits.process_group_timeout)
```

What is already set, in the environment or in NCCL's files (`NCCL_CONF_FILE`, `~/.nccl.conf`, `/etc/nccl.conf`),
is never overwritten, only checked. `print(report)` shows what was set and why, what was kept, and what is
wrong. After `init_process_group` nothing is set any more, and `report.too_late` says for what it was too late.

## The interface

`NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME` get the interface that reaches the master. The first that decides:

1. all ranks run on this host: `lo` (where it is up and has 127.0.0.1);
2. the kernel's route to `MASTER_ADDR`, or on the master's own host the interface that has the address;
3. its route to 8.8.8.8 (2001:4860:4860::8888), to which nothing is sent;
4. the default routes;
5. the only interface that is up.

A bridge, a veth, a tunnel or an interface without a carrier is taken only when nothing else leads to the
master: if the kernel's route to it goes over one of these and another route exists, one connection to the
master's port is tried through the other, for at most a second. A bridge with a network card in it counts as
that card.

NCCL gets the exact form (`=eth0`), as the plain one is a prefix that `eth0.100` matches too. gloo takes exact
names only.

## Profiles

| profile | when | sets |
|---|---|---|
| `infiniband` | an InfiniBand port under `/sys/class/infiniband` is active | `NCCL_IB_HCA` (the fastest active\
 ports), `NCCL_IB_TIMEOUT=22`, `NCCL_IB_RETRY_CNT=7` |
| `roce` | an active port speaks Ethernet | the same, and `NCCL_IB_GID_INDEX` for NCCL before 2.21 |
| `ethernet` | otherwise | `NCCL_BUFFSIZE=8388608`; asked for by name beside RDMA hardware also `NCCL_IB_DISABLE=1` |

## The ladder of time limits

guard deadline < process-group timeout < heartbeat monitor < launcher. Each has to leave the one below it time
to act: the guard names the rank that is missing and the program goes on; the process group's watchdog ends the
process with a dump; the monitor ends it when the watchdog hangs; the launcher ends the job. No environment
variable sets the process-group timeout of torch: pass `report.limits.process_group_timeout` to
`init_process_group` (and `ddp_timeout`, in seconds, to the transformers `Trainer`). For DeepSpeed it is
`DEEPSPEED_TIMEOUT`, in minutes.

With the defaults: 1800 s (evaluation) < 1920 s < 2040 s < the launcher's, which is read from Slurm or given
with `setup_env(launcher_timeout=...)`.

## torch 2.15: nccl2

`init_process_group("nccl")` gives another backend there, nccl2 (`TORCH_DIST_USE_NCCL2=0` or the backend `nccl-legacy`: the one of before). It ends the
process 15 s after a timeout, sends no dump signal to other ranks, and does not heed `TORCH_NCCL_ENABLE_MONITORING`, `_HEARTBEAT_TIMEOUT_SEC`,
`_DESYNC_DEBUG`, `_ENABLE_TIMING`, `_PROPAGATE_ERROR` nor `TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC` (`TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC` works): tried on an
emulated GPU. `ncclguard env` and `doctor` leave these out, and say so where they are set.

## `ncclguard env`

`eval "$(ncclguard env)"`, or `--format dotenv|json|slurm|k8s|deepspeed`, `--profile`, `--explain`,
`--master-addr HOST`, `--debug info`. What is found wrong goes to stderr. The interfaces are those of the host
on which the command runs: where names differ from host to host, call `setup_env()` in the program instead.
"""

_HINT = """
## The catalogue

Versions are those of the reader, both inclusive. "torch with NCCL" means that ProcessGroupNCCL reads the variable. The
CUDA wheels of torch bring: """


def _versions(variable: Variable) -> str:
    since = variable.since or ""
    if variable.until:
        return f"{since} to {variable.until}".strip()
    return f"{since} on" if since else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(variable: Variable) -> str:
    unit = f" {variable.unit}" if variable.unit and variable.default else ""
    default = f"{variable.default}{unit}"
    sentence = variable.sentence
    if variable.replaced_by:
        sentence += f" Deprecated since {variable.deprecated_since}; use `{variable.replaced_by}`."
    cells = (f"`{variable.name}`", _versions(variable), variable.reader.value, default, variable.allowed)
    return "| " + " | ".join(_cell(cell) for cell in (*cells, variable.read_at, sentence, variable.source)) + " |"


def _table(title: str, variables: Sequence[Variable]) -> list[str]:
    return [
        "",
        f"### {title}",
        "",
        "| name | versions | reader | default | values | read at | meaning | source |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(variable) for variable in variables),
    ]


def markdown() -> str:
    """The text of docs/environment.md."""
    bundled = ", ".join(f"{torch}: NCCL {nccl}" for torch, nccl in BUNDLED_NCCL.items())
    lines = [_HEAD + _HINT + bundled + "."]
    lines += [
        "",
        "### Names that nothing reads",
        "",
        "| name | what is known | use instead | source |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{entry.name}` | {entry.sentence} | {_cell(entry.instead or '')} | {entry.source} |"
        for entry in UNREAD_VARIABLES
    ]
    lines += _table("torch and gloo", TORCH_VARIABLES)
    lines += _table("NCCL", NCCL_VARIABLES)
    lines += _table("DeepSpeed", DEEPSPEED_VARIABLES)
    described = {variable.name for variable in NCCL_VARIABLES}
    lines += [
        "",
        "### All other NCCL variables",
        "",
        f"Found in the source of NCCL 2.3.5 to {NEWEST_READ}: name, first version, and last one where it is gone.",
        "",
    ]
    lines += [
        f"- `{name}` {since}{f' to {until}' if until else ''}"
        for name, (since, until) in NCCL_NAMES.items()
        if name not in described
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
