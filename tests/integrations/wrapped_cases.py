"""Run on ranks: a model in each wrapping that people use, and what its forward returns and which modes it is in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
import qwen_cases as cases
from ncclguard.integrations.qwen2_5_vl import set_eval_mode, set_train_mode, slim_outputs, unpatch

from ncclguard import faults

LABELS = torch.tensor([2])


def ddp(model: nn.Module) -> Any:
    return DistributedDataParallel(model)


def ddp_finding_unused(model: nn.Module) -> Any:
    return DistributedDataParallel(model, find_unused_parameters=True)


def ddp_static(model: nn.Module) -> Any:
    return DistributedDataParallel(model, static_graph=True)


def fsdp(model: nn.Module) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.language_model.layers:
        fully_shard(layer)
    return fully_shard(model)


def deepspeed_engine(stage: int) -> Callable[[nn.Module], Any]:
    def wrap(model: nn.Module) -> Any:
        import deepspeed

        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        return deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings
        )[0]

    return wrap


WRAPPINGS: dict[str, Callable[[nn.Module], Any]] = {
    "ddp": ddp,
    "ddp finding unused": ddp_finding_unused,
    "ddp static": ddp_static,
    "fsdp": fsdp,
    "fsdp2": fsdp2,
}
ENGINES = {f"zero {stage}": deepspeed_engine(stage) for stage in (1, 2, 3)}


def seen(output: Any) -> dict[str, Any]:
    """What an output has, for a report."""
    last = getattr(output, "last_hidden_state", None)
    return {"items": list(output), "length": None if last is None else last.size(1), "logits": output.logits.tolist()}


def forwards(model: Any, greedy: bool = False) -> dict[str, Any]:
    """One forward in training, with its backward, and one in evaluation."""
    batch = cases.vision_batch("image", seed=dist.get_rank())
    set_train_mode(model)
    training = model(**batch, labels=LABELS)
    (model.backward if hasattr(model, "backward") else torch.Tensor.backward)(training.loss)
    set_eval_mode(model)
    with torch.no_grad():
        evaluation = model(**batch)
        asked = list(model(**batch, output_hidden_states=True)) if greedy else []
    return {"training": seen(training), "evaluation": seen(evaluation), "asked": asked}


def slimmed(names: list[str]) -> None:
    """Each wrapping around a patched model, and around one that is patched through the wrapping; and not patched at all."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo")
    for name in names:
        wrap = (WRAPPINGS | ENGINES)[name]
        fat = wrap(cases.classifier(output_hidden_states=True))
        before = forwards(fat)
        after = forwards(slim_outputs(fat), greedy=True)
        restored = forwards(unpatch(fat))
        patched_first = forwards(wrap(slim_outputs(cases.classifier(output_hidden_states=True))))
        faults.report(**{name: [before, after, restored, patched_first]})
    dist.destroy_process_group()


class Holder:
    """No module itself: keeps the wrapped model, and passes its mode on to nobody."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.training = True


class Nested(nn.Module):
    """As PEFT nests: the wrapped model is deep inside, among other parts."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model, "adapter": nn.Linear(2, 2)})


def modes() -> None:
    """What ``eval()`` and ``train()`` leave, and what set_eval_mode and set_train_mode leave, in every wrapping."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo")
    engine = deepspeed_engine(2)
    wrappings: dict[str, Callable[[nn.Module], Any]] = {
        **WRAPPINGS,
        "zero 2": engine,
        "zero 3": deepspeed_engine(3),
        "compiled": torch.compile,
        "ddp of compiled": lambda model: ddp(torch.compile(model)),  # type: ignore[arg-type]
        "compiled ddp": lambda model: torch.compile(ddp(model)),
        "held engine": lambda model: Holder(engine(model)),
        "nested engine": lambda model: Nested(engine(model)),
    }
    for name, wrap in wrappings.items():
        inner = cases.classifier().train()
        wrapped = wrap(inner)
        (wrapped.model if isinstance(wrapped, Holder) else wrapped).eval()
        found = [states(wrapped, inner)]
        set_eval_mode(wrapped)
        found.append(states(wrapped, inner))
        set_train_mode(wrapped)
        found.append(states(wrapped, inner))
        faults.report(**{name: found})
    dist.destroy_process_group()


def states(wrapped: Any, inner: nn.Module) -> list[bool]:
    """``training`` of the wrapper, of all modules in it, and of all modules of the model."""
    modules = wrapped.model if isinstance(wrapped, Holder) else wrapped
    return sorted(
        {wrapped.training, *(each.training for each in modules.modules()), *(each.training for each in inner.modules())}
    )
