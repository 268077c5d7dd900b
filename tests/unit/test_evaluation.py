"""The parts of a guarded evaluation in one process: state, batches, partial results, sinks, labels, options."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import ncclguard as ng
from ncclguard.errors import GuardConfigError
from ncclguard.evaluation import NOT_EVALUATED, Action, NotEvaluated, record_partial, state
from ncclguard.evaluation.decision import log_to
from ncclguard.evaluation.runner import divided, smaller


class Monitor:
    def __init__(self) -> None:
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None) -> None:
        self.logged.append((step, metrics))


class Trainer:
    """The usual shape: a model, a monitor, a loader and evaluate(step)."""

    def __init__(self, fail: int = 0) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))
        self.monitor = Monitor()
        data = TensorDataset(torch.arange(32.0).reshape(8, 4))
        self.loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))
        self.fail, self.sizes = fail, []

    @ng.resilient_evaluate(batch_size="loader")
    def evaluate(self, step: int | None = None) -> tuple[float, float]:
        """What it says."""
        self.model.eval()
        self.sizes.append(self.loader.batch_size)
        total = 0.0
        for number, (batch,) in enumerate(self.loader):
            total += float(self.model(batch).detach().sum()) + random.random() + np.random.rand() + float(torch.rand(1))
            if len(self.sizes) <= self.fail and number == 1:
                raise torch.OutOfMemoryError("no memory")
        self.model.train()
        return total, 1.0


def test_what_succeeds_is_returned_unchanged() -> None:
    plain, guarded = Trainer(), Trainer()
    guarded.model.load_state_dict(plain.model.state_dict())
    for trainer in (plain, guarded):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        trainer.result = trainer.evaluate() if trainer is guarded else Trainer.evaluate.__wrapped__(plain)
    assert plain.result == guarded.result  # type: ignore[attr-defined]
    assert guarded.monitor.logged == []
    assert Trainer.evaluate.__doc__ == "What it says."


def test_out_of_memory_is_tried_again_with_half_the_batch_and_the_same_random_numbers() -> None:
    trainer, control = Trainer(fail=1), Trainer()
    trainer.model.load_state_dict(control.model.state_dict())
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    control.loader = smaller(control.loader, 2)
    wanted = Trainer.evaluate.__wrapped__(control)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert trainer.evaluate(step=3) == wanted
    assert trainer.sizes == [4, 2]
    assert trainer.loader.batch_size == 4
    report = Trainer.evaluate.report
    assert report is not None
    assert (report.action, report.attempts, report.culprits) == (Action.ACCEPT, 2, (0,))


def test_what_is_given_up_returns_the_fallback_logs_one_failure_and_leaves_no_trace() -> None:
    trainer = Trainer(fail=9)
    parameter = trainer.model[0].weight
    parameter.grad = gradient = torch.ones_like(parameter)
    before = [
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].copy(),
        trainer.loader.generator.get_state(),
    ]
    trainer.model[2].eval()
    modes = [module.training for module in trainer.model.modules()]
    assert trainer.evaluate(step=3) is NOT_EVALUATED
    assert trainer.sizes == [4, 2, 1]
    ((step, metrics),) = trainer.monitor.logged
    assert step == 3
    assert metrics["eval/evaluation_failed"] == 1.0
    assert metrics["eval/evaluation_attempts"] == 3.0
    assert [module.training for module in trainer.model.modules()] == modes
    assert parameter.grad is gradient
    after = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1], trainer.loader.generator.get_state()]
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert np.array_equal(before[2], after[2])
    assert torch.equal(before[3], after[3])


def test_a_partial_result_is_taken_when_the_whole_cannot_be_had() -> None:
    @ng.resilient_evaluate(max_attempts=2)
    def evaluate() -> Any:
        for number in range(1, 4):
            record_partial({"sets": number}, done=number, total=5)
        raise ValueError("the fourth data set is broken")

    assert evaluate() == {"sets": 3}
    assert evaluate.report is not None
    assert (evaluate.report.action, evaluate.report.done, evaluate.report.total) == (Action.PARTIAL, 3, 5)
    with pytest.raises(ValueError, match="done is 6 of 5"):
        record_partial(None, done=6, total=5)
    record_partial(None, done=1)  # outside of an evaluation: nothing


def test_parts_of_ranks_are_combined_where_that_is_asked_for() -> None:
    @ng.resilient_evaluate(
        max_attempts=1, combine=lambda parts: sum(part[0] for part in parts) / sum(p[1] for p in parts)
    )
    def evaluate() -> Any:
        record_partial((6.0, 4), done=2, total=9)
        raise ValueError

    assert evaluate() == 1.5


def test_where_parts_are_combined_only_the_latest_is_kept() -> None:
    """Predictions that grow with each batch would else take memory that grows with the square of the batches."""

    class Part:
        def __init__(self, number: int) -> None:
            self.number = number

    alive: list[weakref.ref[Part]] = []

    @ng.resilient_evaluate(max_attempts=1, combine=lambda parts: [part.number for part in parts])
    def evaluate() -> Any:
        for number in (1, 2, 4, 3):
            part = Part(number)
            alive.append(weakref.ref(part))
            record_partial(part, done=number, total=9)
        del part
        assert [number for number, ref in zip((1, 2, 4, 3), alive, strict=True) if ref() is not None] == [4]
        raise ValueError

    assert evaluate() == [4]
    assert evaluate.report is not None
    assert "AssertionError" not in str(evaluate.report)


def test_parts_that_cannot_be_combined_give_the_fallback() -> None:
    @ng.resilient_evaluate(max_attempts=1, combine=lambda parts: parts[0] / 0)
    def evaluate() -> Any:
        record_partial(1.0, done=1)
        raise ValueError("the second data set is broken")

    assert evaluate() is NOT_EVALUATED
    assert "the second data set is broken" in str(evaluate.report)
    assert "ZeroDivisionError" in str(evaluate.report)


def test_a_keeper_that_raises_keeps_the_others_from_nothing(caplog: pytest.LogCaptureFixture) -> None:
    restored: list[int] = []

    def unable() -> Any:
        raise OSError("no state here")

    def broken() -> Any:
        def restore() -> None:
            raise OSError("cannot go back")

        return restore

    state.keep([lambda: lambda: restored.append(1), unable, broken, lambda: lambda: restored.append(2)])()
    assert restored == [2, 1]
    assert "no state here" in caplog.text
    assert "cannot go back" in caplog.text


def test_the_switches() -> None:
    calls: list[int] = []

    @ng.resilient_evaluate(fallback=None)
    def evaluate(batch_size: int = 16) -> int:
        calls.append(batch_size)
        return batch_size

    evaluate.enabled = False
    assert evaluate() is None
    assert evaluate.report is not None
    assert evaluate.report.action is Action.SKIP
    evaluate.enabled, evaluate.divisor = True, 4
    assert evaluate() == 4
    evaluate.divisor, evaluate.single_rank = 1, 0
    assert evaluate() == 16
    assert calls == [4, 16]


def test_what_was_given_up_cannot_be_mistaken_for_a_result(caplog: pytest.LogCaptureFixture) -> None:
    """Neither where the function returns a loss and an accuracy, as in the recipe, nor where it returns one number."""

    @ng.resilient_evaluate(max_attempts=1)
    def evaluate() -> Any:
        raise ValueError("a metric went wrong")

    result = evaluate()
    assert isinstance(result, float)
    assert math.isnan(result)
    loss, accuracy = result
    assert math.isnan(loss)
    assert math.isnan(accuracy)
    assert not (result < 1e9 or result > 0 or loss < 1e9 or accuracy > 0)
    assert f"{result:.3f}, {result['eval_loss']:.1f}" == "nan, nan"
    assert not result
    assert "NaN is returned, because no `fallback=` was given, and training goes on" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR
    assert pickle.loads(pickle.dumps(result)) is copy.deepcopy(result) is NOT_EVALUATED
    assert isinstance(NOT_EVALUATED, NotEvaluated)


def test_a_batch_size_that_names_nothing_is_found_before_the_first_try() -> None:
    class Owner:
        calls = 0
        size = 4
        wide = "32"

        @ng.resilient_evaluate(batch_size="sice")
        def misspelt(self) -> None:
            self.calls += 1

        @ng.resilient_evaluate(batch_size="no.such")
        def nowhere(self) -> None:
            self.calls += 1

        @ng.resilient_evaluate(batch_size="wide")
        def text(self) -> None:
            self.calls += 1

    @ng.resilient_evaluate(batch_size="size")
    def ownerless() -> None:
        raise AssertionError

    owner = Owner()
    with pytest.raises(GuardConfigError, match=r"'sice' of misspelt\(\).*did you mean 'size'"):
        owner.misspelt()
    with pytest.raises(GuardConfigError, match=r"'no.such' of nowhere\(\) names nothing: .* no attribute 'no'"):
        owner.nowhere()
    with pytest.raises(GuardConfigError, match="a whole number or a DataLoader, not str"):
        owner.text()
    with pytest.raises(GuardConfigError, match="called without arguments"):
        ownerless()
    assert owner.calls == 0


def test_a_callable_says_how_batches_get_smaller() -> None:
    divisors: list[int] = []

    @ng.resilient_evaluate(batch_size=divisors.append)
    def evaluate() -> None:
        raise MemoryError

    assert evaluate() is NOT_EVALUATED
    assert divisors == [2, 1, 4, 1]


class Broken(ValueError, OSError):
    """As the error of `requests` for JSON that was cut off: a value that cannot be read because of the network."""


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (KeyError("f1"), 1),
        (ZeroDivisionError("no samples"), 1),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "no text"), 1),
        (OSError("stale file handle"), 3),
        (TimeoutError("the server does not answer"), 3),
        (Broken("half an answer"), 3),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), 3),
        (ValueError("the allocator is out of memory"), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_of_the_program_is_tried_once_and_what_may_pass_again(error: Exception, tries: int) -> None:
    calls: list[int] = []

    @ng.resilient_evaluate(max_attempts=3)
    def evaluate() -> None:
        calls.append(1)
        raise error

    assert evaluate() is NOT_EVALUATED
    assert evaluate.report is not None
    assert (len(calls), evaluate.report.attempts) == (tries, tries)
    assert ("no other try was made" in str(evaluate.report)) == (tries == 1)


def test_an_error_on_the_way_out_of_a_lack_of_memory_is_one_of_memory() -> None:
    sizes: list[int] = []

    @ng.resilient_evaluate(max_attempts=3)
    def evaluate(batch_size: int = 8) -> int:
        sizes.append(batch_size)
        found: dict[str, int] = {}
        try:
            if batch_size > 4:
                raise MemoryError
            found["loss"] = batch_size
        finally:
            batch_size = found["loss"]
        return batch_size

    assert evaluate() == 4
    assert sizes == [8, 4]
    assert evaluate.report is not None
    assert evaluate.report.failures[0].out_of_memory


def test_a_last_try_that_fails_with_an_error_of_the_program_does_not_speak_of_others() -> None:
    @ng.resilient_evaluate(max_attempts=1)
    def evaluate() -> None:
        raise KeyError("f1")

    assert evaluate() is NOT_EVALUATED
    assert "no other try" not in str(evaluate.report)


def test_batch_sizes_are_found_by_a_dotted_name_and_put_back() -> None:
    class Holder:
        size = 5

    owner = Holder()
    owner.args = Holder()  # type: ignore[attr-defined]
    with divided(owner, "args.size", 2):
        assert owner.args.size == 2  # type: ignore[attr-defined]
    assert owner.args.size == 5  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="a batch size is a whole number"):
        smaller("big", 2)
    with pytest.raises(TypeError, match="batch sampler of its own"):
        smaller(DataLoader([1, 2], batch_sampler=[[0], [1]]), 2)


def test_an_evaluation_inside_another_is_a_part_of_it() -> None:
    calls: list[int] = []

    @ng.resilient_evaluate(max_attempts=2)
    def inner() -> None:
        calls.append(1)
        raise OSError("in the inner one")

    @ng.resilient_evaluate(max_attempts=2, fallback="given up")
    def outer() -> None:
        inner()

    assert outer() == "given up"
    assert len(calls) == 2
    assert inner.report is None


def test_who_takes_no_result_for_a_dictionary_is_told_of_fallback() -> None:
    with pytest.raises(
        AttributeError, match="no attribute 'items': the evaluation was given up: give .* a `fallback=`"
    ):
        NOT_EVALUATED.items()  # type: ignore[attr-defined]


def test_interruptions_are_not_swallowed() -> None:
    @ng.resilient_evaluate
    def evaluate() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate()


def test_an_evaluation_that_writes_into_gradients_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = torch.ones_like(model.weight)
    restore = state.keep([state.gradients([model])])
    model.weight.grad.zero_()
    with caplog.at_level(logging.WARNING, "ncclguard"):
        restore()
    assert "wrote into 1 gradients" in caplog.text
    model.weight.grad = None
    model.weight.requires_grad_(False)
    torch.set_grad_enabled(False)
    restore()
    assert model.weight.grad is not None
    assert model.weight.requires_grad
    assert torch.is_grad_enabled()


def test_positions_of_samplers_and_stateful_loaders() -> None:
    class Stateful:
        def __init__(self) -> None:
            self.position = 4

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, saved: dict[str, int]) -> None:
            self.position = saved["position"]

    generator = torch.Generator().manual_seed(3)
    loader = DataLoader([1, 2, 3], sampler=RandomSampler([1, 2, 3], generator=generator))
    loader.sampler.epoch = 2  # type: ignore[attr-defined]
    stateful = Stateful()
    restore = state.keep([state.positions([loader, stateful])])
    before = generator.get_state()
    list(loader)
    loader.sampler.epoch, stateful.position = 3, 9  # type: ignore[attr-defined]
    restore()
    assert torch.equal(generator.get_state(), before)
    assert loader.sampler.epoch == 2  # type: ignore[attr-defined]
    assert stateful.position == 4


def test_models_and_loaders_are_found_where_trainers_keep_them() -> None:
    trainer = Trainer()
    trainer.more = {"eval": DataLoader([1])}  # type: ignore[attr-defined]
    assert state.models_of([trainer, trainer.model]) == (trainer.model,)
    assert state.loaders_of([trainer]) == (trainer.loader, trainer.more["eval"])  # type: ignore[attr-defined]


MODEL = nn.Linear(2, 2)


@ng.resilient_evaluate(fallback=None, max_attempts=1)
def evaluate_the_global_model() -> None:
    MODEL.eval()
    raise ValueError("a metric went wrong")


def test_a_model_that_the_function_names_is_back_in_train_mode_after_giving_up() -> None:
    """A global variable, and one of the function around it."""
    local = nn.Linear(2, 2)

    @ng.resilient_evaluate(fallback=None, max_attempts=1)
    def evaluate() -> None:
        local.eval()
        raise ValueError("a metric went wrong")

    assert evaluate_the_global_model() is None
    assert evaluate() is None
    assert MODEL.training
    assert local.training


def test_metrics_reach_every_kind_of_sink_and_a_broken_one_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    class Run:  # as a W&B run
        def log(self, metrics: dict[str, float], step: int | None = None) -> None:
            seen.append((metrics, step))

    class Writer:  # as a TensorBoard SummaryWriter
        def add_scalar(self, name: str, value: float, step: int | None) -> None:
            seen.append((name, value, step))

    class Broken:
        def log_metrics(self, metrics: dict[str, float], step: int | None) -> None:
            raise OSError("no space left on device")

    assert log_to(Run(), {"a": 1.0}, 3)
    assert log_to(Writer(), {"a": 1.0}, 3)
    assert log_to(lambda metrics, step: seen.append((metrics, step)), {"a": 1.0}, None)
    assert seen == [({"a": 1.0}, 3), ("a", 1.0, 3), ({"a": 1.0}, None)]
    assert not log_to(None, {"a": 1.0}, 3)
    with caplog.at_level(logging.WARNING, "ncclguard"):
        assert not log_to(Broken(), {"a": 1.0}, 3)
        assert not log_to(object(), {"a": 1.0}, 3)
    assert "no space left" in caplog.text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"timeout": 0}, "timeout must be a positive"),
        ({"barrier_timeout": None}, "barrier_timeout must be seconds"),
        ({"max_attempts": 0}, "max_attempts must be at least 1, got 0: give 1"),
        ({"max_attempts": 1.5}, "max_attempts must be a whole number"),
        ({"on_lost": "shrink"}, "on_lost must be"),
        ({"on_lost": "checkpoint"}, "need each other"),
        ({"save": print}, "need each other"),
        ({"colour": 1}, "^resilient_evaluate has no argument 'colour': there are timeout, barrier_timeout, "),
        ({"timout": 3}, r"^resilient_evaluate has no argument 'timout': did you mean timeout=\?$"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        ng.resilient_evaluate(**options)


# ---------------------------------------------------------------------- what is kept cheaply is kept all the same


def test_numpys_generator_is_restored_after_each_kind_of_use() -> None:
    """Its state is asked only when its words in memory have changed; a normal variate in reserve changes none."""
    np.random.seed(4)
    for use in (lambda: None, np.random.rand, np.random.randn, np.random.randn, lambda: np.random.seed(9)):
        restore = state.keep([state.random_numbers])
        expected = np.random.randn(3).tolist()
        for _ in range(2):
            restore()
            assert np.random.randn(3).tolist() == expected
        use()


def test_another_generator_of_numpys_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(np.random, "set_bit_generator"):
        pytest.skip("this numpy cannot change its global generator")
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        restore = state.keep([state.random_numbers])
        expected = np.random.rand(3).tolist()
        restore()
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_modules_and_buffers_that_come_between_two_tries_are_kept_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    keepers = [state.modes([model]), state.buffers([model])]
    state.keep(keepers)()
    model[1] = nn.BatchNorm1d(2)  # as many modules as before
    model.register_buffer("count", torch.zeros(1))
    restore = state.keep(keepers)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.eval()
    with torch.no_grad():
        model[1].running_mean += 1  # type: ignore[operator]
    model.count = model.count + 1  # another tensor in its place
    model.register_buffer("late", torch.zeros(1))
    restore()
    assert model[1].training
    assert {name: buffer.tolist() for name, buffer in model.named_buffers()} == {n: b.tolist() for n, b in kept.items()}


def test_states_with_tensors_and_lists_are_kept_by_value() -> None:
    average = nn.Linear(1, 1)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(average.parameters(), lr=rate, capturable=False, foreach=False)
    restore = state.keep([state.states_of([average]), state.hyperparameters([optimizer])])
    weight = average.weight.item()
    for _ in range(2):
        with torch.no_grad():
            average.weight += 1
            rate.mul_(0.5)
        restore()
        assert (average.weight.item(), rate.item()) == (weight, pytest.approx(0.1))


def test_wrong_arguments_are_raised_where_they_are_given_and_are_no_failed_try() -> None:
    calls: list[int | None] = []

    @ng.resilient_evaluate
    def evaluate(step: int | None = None) -> float:
        calls.append(step)
        return 1.0

    with pytest.raises(TypeError, match="unexpected keyword argument 'stp'"):
        evaluate(stp=3)
    assert evaluate.report is None and not calls
    assert evaluate(step=3) == 1.0
    with pytest.raises(TypeError, match="a function that evaluates, not int"):
        ng.resilient_evaluate(timeout=5)(3)  # type: ignore[arg-type]
