"""Evaluation that survives, for `transformers.Trainer`: a mixin for a class of your own, a callback for a trainer.

Both work with and without DeepSpeed, best-model selection and early stopping. Run with transformers 5.23 on CPU (gloo).
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar

from ncclguard.errors import GuardError
from ncclguard.evaluation import Action, GuardedEvaluation, record_partial, resilient_evaluate
from ncclguard.evaluation.decision import metrics_of
from ncclguard.evaluation.state import Restore

_GUARDS = "_ncclguard_guards"  # attribute of a trainer


class ResilientEvaluation:
    """A mixin: `class MyTrainer(ResilientEvaluation, Trainer)` has `evaluate` and `predict` that survive.

    `evaluation_options`: options of `ncclguard.resilient_evaluate`, on the class or an instance. When the evaluation
    fails on any rank it is tried again with half of `per_device_eval_batch_size`; when it is given up, `evaluate`
    returns `{"eval_evaluation_failed": 1.0, ...}` with NaN for `metric_for_best_model`, on all ranks: no best model, no
    count against the patience of early stopping. A dictionary of data sets that fails in the middle returns the metrics
    of those that are in. All ranks get the metrics of the first, so that they decide alike. `predict` raises GuardError
    when it is given up.

    >>> from ncclguard.integrations.transformers import ResilientEvaluation
    >>> class Trainer:  # stands for transformers.Trainer
    ...     def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
    ...         return {"eval_loss": 0.5}
    >>> class MyTrainer(ResilientEvaluation, Trainer):
    ...     evaluation_options = {"timeout": 3600}
    >>> MyTrainer().evaluate()
    {'eval_loss': 0.5}
    """

    evaluation_options: ClassVar[dict[str, Any]] = {}

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return _evaluate(self, super().evaluate, args, kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return _predict(self, super().predict, args, kwargs)  # type: ignore[misc]


def patch_trainer(trainer: Any, **options: Any) -> None:
    """Do to a trainer that exists what `ResilientEvaluation` does to a class.

    `options` are those of `ncclguard.resilient_evaluate`; patching again replaces them.
    """
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
        raise GuardError(f"{guarded.report}\nThere is no prediction to return; the process groups can still be used.")
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
        options |= trainer.evaluation_options
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
