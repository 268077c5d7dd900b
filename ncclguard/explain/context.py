"""What the ranks were doing: progress bars, phases of a training script, the world's size."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ncclguard.explain.facts import Fact, Kind

_BAR = re.compile(
    r"(?P<what>[^|\r\n]{0,120}?)\s*(?P<percent>\d{1,3})%\|[^|]*\|\s*(?P<at>[\d.]+\w?)/(?P<of>[\d.]+\w?) "
    r"\[(?P<spent>[\d:]+)<"
)
_PERCENT = re.compile(
    r"(?P<what>[A-Za-z][\w ,()'\-]{2,80}?):?\s+(?P<percent>\d{1,3}) ?% (?:at|after|in) (?P<spent>\d+:\d\d(?::\d\d)?)"
)
_WORLD = re.compile(
    r"(?<![A-Za-z_])(?:WORLD_SIZE|world[_ ]size|distributed_world_size"
    r"|num_processes)['\"]?\s*[=:]+\s*['\"]?(\d{1,6})\b",
    re.IGNORECASE,
)

_STEP = re.compile(r"\b(?:step|iter(?:ation)?|epoch|loss|batch)\b\W{0,3}\d", re.IGNORECASE)
_NODES = re.compile(
    r"(?<![A-Za-z_])(?:--?nnodes|nnodes|num_nodes|num_machines|NNODES|SLURM_NNODES|SLURM_JOB_NUM_NODES|N_NODES)"
    r"['\"]?[\s=:]+['\"]?(\d{1,5})\b(?!:)",
    re.IGNORECASE,
)
_LOCAL_SIZE = re.compile(
    r"(?<![A-Za-z_])(?:--?nproc[-_]per[-_]node|LOCAL_WORLD_SIZE|local_world_size|nproc_per_node)['\"]?[\s=:]+['\"]?(\d{1,3})\b"
)

# Phases by the words that frameworks print or that stand in a stack's function names: (phase, pattern). First match
# counts.
_PHASES: tuple[tuple[str, str], ...] = (
    (
        "preprocess",
        (
            r"[Tt]okeniz|Running tokenizer|[Pp]re-?process|^Map(?: \(num_proc|:)|Generating \w+ split|Grouping "
            r"texts|[Pp]acking|"
            r"line-offset|building (?:index|dataset)|load_dataset|Filter(?: \(num_proc|:)"
        ),
    ),
    ("upload", r"[Pp]ush(?:ing)? (?:\w+ )?to (?:the )?hub|push_to_hub|[Uu]pload"),
    (
        "checkpoint",
        (
            r"[Ss]aving (?:model|checkpoint|state|optimizer|artifact|the model|latest)|[Ss]av(?:e"
            r"|ing)_?(?:checkpoint|pretrained|model|state)"
            r"|dcp\.save|dcp_save|torch\.save|state_dict_saver|writ(?:e|ing) checkpoint|checkpoint/filesystem"
        ),
    ),
    ("logger", r"wandb\.(?:init|sdk)|wandb/sdk|wandb_init|mlflow|swanlab|aim\.Run|comet_ml"),
    (
        "loader",
        (
            r"decord|torchvision\.io|video_reader|read_video|utils/data/dataloader|_MultiProcessingDataLoaderIter"
            r"|DataLoader worker"
        ),
    ),
    (
        "evaluate",
        (
            r"Running (?:Evaluation|Prediction|Validation)|[Vv]alidat(?:ion|ing)|[Ee]valuat(?:ion|ing)"
            r"|evaluation_loop|eval_step|_validate\b"
        ),
    ),
    ("generate", r"\bgenerate\b|generation/utils|[Gg]enerating (?:samples|responses|completions|video|image)|rollout"),
    ("load", r"[Ll]oading (?:checkpoint shards|model|weights)|from_pretrained"),
    (
        "finished",
        (
            r"[Ff]inished training|[Tt]raining (?:is )?(?:done|finished|complete)|train_runtime|End of training|exiting "
            r"(?:program|train)"
        ),
    ),
)
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in _PHASES)


def _duration(text: str) -> float:
    total = 0.0
    for part in text.split(":"):
        total = total * 60 + float(part or 0)
    return total


def phase_of(text: str) -> str | None:
    """Return the phase that a line or a stack frame speaks of: preprocess, checkpoint, evaluate, ... or None."""
    for name, pattern in _COMPILED:
        if pattern.search(text):
            return name
    return None


def world_size_of(text: str) -> int | None:
    """Return the number of ranks a line states, from an environment print-out or an NCCL init line."""
    found = _WORLD.search(text)
    return int(found[1]) if found else None


def nodes_of(text: str) -> int | None:
    """Return the number of nodes a line states, or None."""
    found = _NODES.search(text)
    return int(found[1]) if found else None


def local_size_of(text: str) -> int | None:
    """Return the number of processes per node that a line states, or None."""
    found = _LOCAL_SIZE.search(text)
    return int(found[1]) if found else None


def parse(text: str, make: Fact, last: bool) -> Iterator[Fact]:
    """Yield what a line of context says about progress; `seconds` is the time spent, `number` the percentage.

    `last`: the line is among the last ones of its file.
    """
    phase = phase_of(text)
    found = None
    for found in _BAR.finditer(text):
        pass  # a line of several bars: the last one counts
    if found is None:
        found = _PERCENT.search(text)
    if found is not None:
        yield make.clone(
            kind=Kind.PROGRESS,
            name=phase or "train",
            detail=found[0].strip()[-200:],
            number=int(found["percent"]),
            seconds=_duration(found["spent"]),
            after_symptom=last,
        )
    elif last and make.rank is not None and _STEP.search(text):
        yield make.clone(kind=Kind.ALIVE, name=phase or "train", detail=text[-200:], after_symptom=True)
    if found is None and phase is not None:
        yield make.clone(kind=Kind.PHASE, name=phase, detail=text[-200:], after_symptom=last)
