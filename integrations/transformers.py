"""Evaluation that survives, for `transformers.Trainer`: a mixin for a class of your own, a callback for a trainer.

Both work with and without DeepSpeed, best-model selection and early stopping. Run with transformers 5.23 on CPU (gloo).
Another mixin has the training go on when ranks are killed. Run with transformers 5.24 on CPU ("ncclguard").
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import json
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from ncclguard.integrations.accelerate import refuse_sharded, resilient_step
from torch.utils.data import DataLoader

from ncclguard import lifecycle
from ncclguard.errors import GuardConfigError, GuardError
from ncclguard.evaluation import Action, GuardedEvaluation, record_partial, resilient_evaluate
from ncclguard.evaluation.decision import metrics_of
from ncclguard.evaluation.state import Restore
from ncclguard.spelling import refuse_other
from ncclguard.training import ElasticLoader
from ncclguard.training.step import check_options
from ncclguard_explain.language import told

_GUARDS = "_ncclguard_guards"  # attribute of a trainer


class ResilientEvaluation:
    """A mixin: `class MyTrainer(ResilientEvaluation, Trainer)` has `evaluate` and `predict` that survive.

    `evaluation_options`: options of `ncclguard.resilient_evaluate`, on the class or an instance. When the evaluation
    fails on any rank it is tried again with half of `per_device_eval_batch_size`; when it is given up, `evaluate`
    returns `{"eval_evaluation_failed": 1.0, ...}` with NaN for `metric_for_best_model`, on all ranks: no best model, no
    count against the patience of early stopping. A dictionary of data sets that fails in the middle returns the metrics
    of those that are in. All ranks get the metrics of the first, so that they decide alike. `predict` raises GuardError
    when it is given up.

    >>> from types import SimpleNamespace
    >>> from ncclguard.integrations.transformers import ResilientEvaluation
    >>> class Trainer:  # stands for transformers.Trainer
    ...     args = SimpleNamespace(per_device_eval_batch_size=8)
    ...     def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
    ...         return {"eval_loss": 0.5}
    >>> class MyTrainer(ResilientEvaluation, Trainer):
    ...     evaluation_options = {"timeout": 3600}
    >>> MyTrainer().evaluate()
    {'eval_loss': 0.5}
    """

    evaluation_options: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_hidden(cls, ResilientEvaluation, "evaluate")
        _refuse_misspelt(cls, "evaluation_options")
        if _are_said(cls.evaluation_options):  # refused now, not behind the first epoch
            resilient_evaluate(**_options_of(cls, "evaluation_options"))

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return _evaluate(self, super().evaluate, args, kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return _predict(self, super().predict, args, kwargs)  # type: ignore[misc]


def _refuse_hidden(cls: type, mixin: type, method: str) -> None:
    """Raise TypeError for a class in which the trainer comes before the mixin, which then would do nothing."""
    place = cls.__mro__.index(mixin)
    before, after = (
        [one for one in part if method in vars(one) and not issubclass(one, mixin)]
        for part in (cls.__mro__[:place], cls.__mro__[place + 1 :])
    )
    if before and not after:
        raise TypeError(
            told(
                "{name} has {other} before {mixin}, whose methods are never called then: write class "
                "{name}({mixin}, {other})",
                name=cls.__name__,
                other=before[-1].__name__,
                mixin=mixin.__name__,
            )
        )


def _refuse_misspelt(cls: type, name: str) -> None:
    """Raise TypeError for a class with options under a similar name, which nobody would read."""
    for given, value in vars(cls).items():
        if given != name and isinstance(value, Mapping) and difflib.get_close_matches(given, [name], cutoff=0.9):
            raise TypeError(
                told(
                    "{name}.{given} is nothing that its base classes know: did you mean {near}?",
                    name=cls.__name__,
                    given=given,
                    near=name,
                )
            )


def _options_of(holder: Any, name: str) -> dict[str, Any]:
    options = getattr(holder, name)
    if not isinstance(options, Mapping):
        raise TypeError(told("{name} must be a dict of options, not {kind}", name=name, kind=type(options).__name__))
    return dict(options)


def _are_said(options: Any) -> bool:
    """Return whether a class has options, and not a property of its instances, or None for what they set themselves."""
    return options is not None and not hasattr(options, "__get__")


def _training_options(holder: Any) -> dict[str, Any]:
    options = _options_of(holder, "training_options")
    check_options(options, _OF_A_TRAINER)
    on_change = options.get("on_change")
    if not (on_change is None or callable(on_change)):
        raise TypeError(
            told("on_change must be a function of two numbers of ranks, not {kind}", kind=type(on_change).__name__)
        )
    return options


def patch_trainer(trainer: Any, **options: Any) -> None:
    """Do to a trainer that exists what `ResilientEvaluation` does to a class.

    `options` are those of `ncclguard.resilient_evaluate`; patching again replaces them. Raises TypeError for what is no
    trainer.
    """
    refuse_other(trainer, "trainer", "or use ResilientEvaluation", "evaluate")
    resilient_evaluate(**options)  # refused now, not behind the first epoch
    unpatch_trainer(trainer)
    trainer.evaluation_options = options
    for name, around in (("evaluate", _evaluate), ("predict", _predict)):
        setattr(trainer, name, _patched(trainer, getattr(trainer, name), around))


def unpatch_trainer(trainer: Any) -> None:
    """Give a trainer its own methods back; one that was not patched stays as it is."""
    for name in [name for name in ("evaluate", "predict") if hasattr(vars(trainer).get(name), "__ncclguard__")]:
        delattr(trainer, name)
    vars(trainer).pop(_GUARDS, None)


def _patched(trainer: Any, original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(trainer, original, args, kwargs)

    method.__ncclguard__ = True  # type: ignore[attr-defined]
    return method


# ---------------------------------------------------------------------- training that goes on without lost ranks


class ResilientTraining:
    """A mixin: `class MyTrainer(ResilientTraining, Trainer)` goes on when ranks are killed, under `ncclguard run`.

    Call `init_process_group("ncclguard")` before TrainingArguments are made. All micro-batches of an optimizer's step
    are one `ncclguard.resilient_step`, and so are `evaluate` and the saving of a checkpoint. Samples come from an
    `ElasticLoader`, in its order; an epoch has as many steps as it takes the ranks that are there at the beginning.
    `training_options`: options of `ncclguard.resilient_step`, on the class or an instance.

    `train` raises GuardConfigError, before a rank waits for another, for what cannot go on: models that are sharded,
    samples in an order by length, tokens that are counted in each step, and a new process in the place of a lost rank,
    which cannot come to the others' place in the Trainer's loop.

    >>> from ncclguard.integrations.transformers import ResilientTraining
    >>> class Trainer:  # stands for transformers.Trainer
    ...     def evaluate(self, eval_dataset=None):
    ...         return {"eval_loss": 0.5}
    >>> class MyTrainer(ResilientTraining, Trainer):
    ...     training_options = {"min_ranks": 2}
    """

    training_options: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_hidden(cls, ResilientTraining, "train")
        _refuse_misspelt(cls, "training_options")
        if _are_said(cls.training_options):
            _training_options(cls)

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if lifecycle.is_joining():
            raise GuardConfigError(
                told(
                    "a new rank cannot come to the others' place in the loop of a Trainer: leave out --spares "
                    "and --restart-lost, or write the loop with Accelerate, in which new ranks join"
                )
            )
        refuse_sharded(self.accelerator)
        if not hasattr(self, "_run_epoch"):
            raise GuardConfigError(
                told(
                    "ResilientTraining takes the Trainer's steps as transformers 5.24 makes them (a method "
                    "`_run_epoch`), which this version does not: take a newer transformers, or write the loop "
                    "with Accelerate"
                )
            )
        if self.args.train_sampling_strategy not in ("random", "sequential"):
            raise GuardConfigError(
                told(
                    "ResilientTraining has its samples in random or sequential order, and not by "
                    "train_sampling_strategy={value}",
                    value=repr(self.args.train_sampling_strategy),
                )
            )
        if self.args.include_num_input_tokens_seen != "no":
            raise GuardConfigError(
                told(
                    "the Trainer counts tokens in a collective for that only, which does not go on without a "
                    "lost rank: leave include_num_input_tokens_seen out"
                )
            )
        vars(self).pop(_STEPS, None)  # they are of the model as it was wrapped before
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        """Return an empty batch for each that an epoch has at its beginning: the step takes the samples itself."""
        made = super().get_train_dataloader()  # type: ignore[misc] # has the data set and collator of all options
        size, parts = self._train_batch_size, self.args.gradient_accumulation_steps
        self._loader = ElasticLoader(
            made.dataset,
            size * parts,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            shuffle=self.args.train_sampling_strategy == "random",
            collate_fn=lambda rows: [made.collate_fn(rows[at : at + size]) for at in range(0, len(rows), size)],
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return DataLoader(range(len(made.dataset)), size * self.args.world_size, collate_fn=_empty)  # type: ignore[arg-type]

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Make all micro-batches of the optimizer's step with the last one; the loss is the mean of all ranks."""
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        one = super().training_step  # type: ignore[misc]

        def train(parts: list[Any]) -> Any:
            self.current_gradient_accumulation_steps = len(parts)
            items = self._get_num_items_in_batch(parts, self.args.device)
            losses: list[Any] = []
            for part in parts:
                last = len(losses) == len(parts) - 1
                with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                    losses.append(one(model, part, items))
            mean = self.accelerator.reduce(torch.stack(losses).sum(), "mean")
            self.current_flos += sum(map(self.floating_point_ops, parts)) * self.accelerator.num_processes
            return mean

        return self._go_on(train, model, loader=self._loader)

    def evaluate(self: Any, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        one = super().evaluate  # type: ignore[misc]
        if isinstance(self.eval_dataset if eval_dataset is None else eval_dataset, dict):
            return one(eval_dataset, *args, **kwargs)  # which comes here with each data set

        def evaluate() -> Any:
            return one(eval_dataset, *args, **kwargs)

        return self._go_on(evaluate)

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        save = super()._save_checkpoint  # type: ignore[misc]

        def save_checkpoint() -> None:
            save(model, trial)
            if self.args.should_save:
                path = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}", _POSITION)
                path.write_text(json.dumps(self._loader.state_dict()))
            self.accelerator.wait_for_everyone()  # who was to save it may have been lost: then another one does

        self._go_on(save_checkpoint)

    def _save(self: Any, *args: Any, **kwargs: Any) -> None:
        inner = self.accelerator.unwrap_model(self.model)
        inner.should_save_on_this_rank = bool  # transformers 5 has torch's rank 0 save it, which may be gone
        try:
            super()._save(*args, **kwargs)  # type: ignore[misc]
        finally:
            del inner.should_save_on_this_rank

    def _load_optimizer_and_scheduler(self: Any, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and (path := Path(checkpoint, _POSITION)).exists():
            self._loader.load_state_dict(json.loads(path.read_text()))

    def _maybe_log_save_evaluate(self: Any, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        """Log the loss, which is all ranks' already: the Trainer would gather it for as many as there were."""
        steps = self.state.global_step - self._globalstep_last_logged
        if self.control.should_log and steps > 0:
            loss = tr_loss.item()
            tr_loss.zero_()
            self._total_loss_scalar += loss
            self._globalstep_last_logged = self.state.global_step
            rate = kwargs.get("learning_rate")
            logs = {"loss": loss / steps, "learning_rate": self._get_learning_rate() if rate is None else rate}
            self.store_flos()
            self.log(logs if grad_norm is None else {**logs, "grad_norm": float(grad_norm)})
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> Any:
        return super().floating_point_ops(inputs) if inputs else 0  # type: ignore[misc]

    def store_flos(self: Any) -> None:
        self.state.total_flos += self.current_flos  # those of all ranks
        self.current_flos = 0

    def _go_on(self: Any, function: Callable[..., Any], *models: Any, **options: Any) -> Any:
        """Call a function as a resilient step, of which there is one for each name."""
        known = vars(self).setdefault(_STEPS, {})
        if function.__name__ not in known:
            options |= _training_options(self) | {"on_change": self._ranks_changed}
            decorate = resilient_step(self.accelerator, *models, **options)
            known[function.__name__] = decorate(lambda *batch, function: function(*batch))
        result = known[function.__name__](function=function)
        self._prints()  # an evaluation that is tried again has put back who did
        return result

    def _ranks_changed(self: Any, before: int, now: int) -> None:
        self._prints()  # at once, for the line of what is done again
        on_change = self.training_options.get("on_change")
        if on_change is not None:
            on_change(before, now)

    def _prints(self: Any) -> None:
        """Have the first rank that is left print the Trainer's lines."""
        if self.is_world_process_zero() and not self.state.is_world_process_zero:
            from transformers import PrinterCallback, ProgressCallback

            self.state.is_world_process_zero = self.state.is_local_process_zero = True
            if self.pop_callback(ProgressCallback) is not None:  # which has no bar here
                self.add_callback(PrinterCallback)


#: Options of `resilient_step` that the mixin gives itself.
_OF_A_TRAINER = ("loader",)
_STEPS, _POSITION = "_ncclguard_steps", "elastic_loader.json"


def _empty(_: Any) -> dict[str, Any]:
    return {}


# ---------------------------------------------------------------------- evaluate and predict


def _evaluate(trainer: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    guards: dict[str, Any] = vars(trainer).setdefault(_GUARDS, {})
    if "inside" in guards:  # one of several data sets
        guards["inside"].append(original(*args, **kwargs))
        merged = {name: value for each in guards["inside"] for name, value in each.items()}
        record_partial((merged, {}), done=len(guards["inside"]))
        return guards["inside"][-1]

    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        guards["inside"] = []
        return original(*args, **kwargs), _standing_of(self)

    guarded = _guard(trainer, "evaluate", once)
    before = guarded.report
    try:
        result = guarded(*args, **kwargs)
    finally:
        guards.pop("inside", None)
    report = guarded.report
    metrics, standing = result if isinstance(result, tuple) else (result, {})
    _adopt(trainer, standing)
    if report is None or report is before or report.action is Action.ACCEPT:
        return metrics
    prefix = kwargs.get("metric_key_prefix", args[2] if len(args) > 2 else "eval")
    failed = metrics_of(report, f"{prefix}_") if report.failed else {}
    if failed:
        trainer.log(dict(failed))
    return {**_undecided(trainer), **(metrics or {}), **failed}


def _predict(trainer: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    guarded = _guard(trainer, "predict", lambda self, *args, **kwargs: original(*args, **kwargs))
    output = guarded(*args, **kwargs)
    if output is None:
        raise GuardError(
            told(
                "{report}\nThere is no prediction to return; the process groups can still be used.",
                report=guarded.report,
            )
        )
    return output


def _guard(trainer: Any, name: str, function: Callable[..., Any]) -> GuardedEvaluation:
    """Return the guard of a trainer's method; there is one for each, so that its switches stay what they are."""
    guards = vars(trainer).setdefault(_GUARDS, {})
    if name not in guards:
        function.__name__ = name
        options: dict[str, Any] = {
            "fallback": None,
            "batch_size": "args.per_device_eval_batch_size",
            "monitor": lambda metrics, step: None,  # `_evaluate` calls the trainer's own `log`, on every rank
            "same_result": name == "evaluate",
            "keepers": (functools.partial(_keep, trainer),),
        }
        options |= _options_of(trainer, "evaluation_options")
        guards[name] = resilient_evaluate(types.MethodType(function, trainer), **options)
    found: GuardedEvaluation = guards[name]
    return found


def _undecided(trainer: Any) -> dict[str, float]:
    """Return NaN as the metric for best-model selection: it compares as false, so this model is not the best."""
    name = getattr(getattr(trainer, "args", None), "metric_for_best_model", None)
    return {} if name is None else {name if name.startswith("eval_") else f"eval_{name}": float("nan")}


# ---------------------------------------------------------------------- what decides about the training to come


def _callbacks(trainer: Any) -> list[Any]:
    return list(getattr(getattr(trainer, "callback_handler", None), "callbacks", ()))


def _stateful(trainer: Any) -> list[Any]:
    return [callback for callback in _callbacks(trainer) if callable(getattr(callback, "state", None))]


def _standing_of(trainer: Any) -> dict[str, Any]:
    """Return the switches of the training loop and the states of callbacks, such as the patience of early stopping."""
    control = dict(vars(trainer.control)) if hasattr(trainer, "control") else {}
    return {"control": control, "callbacks": [callback.state()["attributes"] for callback in _stateful(trainer)]}


def _adopt(trainer: Any, standing: dict[str, Any]) -> None:
    """Take over the first rank's switches and callbacks.

    Metrics may differ in the last bit, and a rank that stops alone stops all.
    """
    if standing.get("control"):
        vars(trainer.control).update(standing["control"])
    for callback, attributes in zip(_stateful(trainer), standing.get("callbacks", ()), strict=False):
        for name, value in attributes.items():
            setattr(callback, name, value)


def _keep(trainer: Any) -> Restore:
    """Remember the trainer's state, log, switches and callbacks, which an unfinished evaluation has partly changed."""
    held = {name: value for name, value in vars(trainer).items() if name in ("state", "control", "_memory_tracker")}
    objects = [*held.values(), *_callbacks(trainer)]
    saved = [(each, {name: _copied(value) for name, value in vars(each).items()}) for each in objects]

    def restore() -> None:
        for each, values in saved:
            if getattr(each, "prediction_bar", None) is not None and values["prediction_bar"] is None:
                each.prediction_bar.close()
            vars(each).clear()
            vars(each).update({name: _copied(value) for name, value in values.items()})
        vars(trainer).update(held)

    return restore


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def __getattr__(name: str) -> Any:
    """Make `SurvivingEvaluation` on demand, because its base class is in transformers."""
    if name != "SurvivingEvaluation":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import TrainerCallback

    class SurvivingEvaluation(TrainerCallback):  # type: ignore[misc]
        """A callback that does what `patch_trainer` does, without a class of your own.

        Add it with `trainer.add_callback(SurvivingEvaluation(trainer, timeout=1800))`.
        """

        def __init__(self, trainer: Any, **options: Any) -> None:
            patch_trainer(trainer, **options)

    globals()[name] = SurvivingEvaluation
    return SurvivingEvaluation
