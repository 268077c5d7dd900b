"""Outputs without what nobody reads: on a class, a model, under wrappers; and nothing of it collected inside."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.insert(0, str(Path(__file__).parent))
import qwen_cases as cases
from ncclguard.integrations.qwen2_5_vl import (
    Qwen2_5_VLForSequenceClassification,
    SequenceShape,
    slim_outputs,
    unpatch,
)

from ncclguard.errors import GuardConfigError

LABELS = torch.tensor([0, 2])


def fat() -> Any:
    """A classifier whose config says to return everything, as the first users' did."""
    return cases.classifier(output_hidden_states=True)


def items(model: Any, *arguments: Any, **options: Any) -> list[str]:
    batch = {} if arguments else cases.text_batch()
    return list(model(*arguments, **batch, labels=LABELS, **options))


class Users(nn.Module):
    """A classifier as users write them: its forward has no flags, and passes none to the model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = fat().model
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
        found = self.backbone(input_ids=input_ids, attention_mask=attention_mask)
        logits = self.head(found.last_hidden_state[:, -1])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return type(found)(last_hidden_state=logits) if loss is None else {"loss": loss, "logits": logits, **found}


@pytest.fixture
def slim_class() -> Iterator[Any]:
    """A class of its own to patch."""
    kind = type("Patched", (Qwen2_5_VLForSequenceClassification,), {})
    yield kind
    unpatch(kind)


@pytest.mark.parametrize("training", [True, False])
def test_loss_and_logits_alone_in_both_modes(training: bool) -> None:
    model = fat().train(training)
    before = model(**cases.text_batch(), labels=LABELS)
    assert list(before) == cases.fat()
    after = slim_outputs(model)(**cases.text_batch(), labels=LABELS)
    assert list(after) == ["loss", "logits"]
    assert after.hidden_states is None and getattr(after, cases.name_of_cache()) is None and after.attentions is None
    assert isinstance(after, type(before))
    assert torch.equal(after.loss, before.loss) and torch.equal(after.logits, before.logits)


@pytest.mark.parametrize("kind", ["flags", "no flags"])
def test_memory_is_saved_at_its_peak(kind: str) -> None:
    """At the end of the decoder its layers' outputs are gone, and no cache has grown; without slimming all are alive."""
    model: Any = (fat() if kind == "flags" else Users()).eval()
    decoder = (model.model if kind == "flags" else model.backbone).language_model
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[tuple[int, bool]] = []
    for layer in decoder.layers:
        layer.register_forward_hook(
            lambda _, __, output: outputs.append(weakref.ref(output if torch.is_tensor(output) else output[0]))
        )
    decoder.register_forward_hook(
        lambda _, __, output: alive.append(
            (sum(ref() is not None for ref in outputs), getattr(output, cases.name_of_cache()) is not None)
        )
    )
    for patched in (False, True):
        (slim_outputs if patched else unpatch)(model)
        outputs.clear()
        with torch.no_grad():
            model(**cases.text_batch(), labels=LABELS)
    (collected, cached), slim = alive
    assert collected >= 1  # how many of the two depends on the version of transformers
    assert cached
    assert slim == (0, False)


def test_a_forward_without_flags_is_slim_and_restored() -> None:
    model = Users().eval()
    assert {cases.name_of_cache(), "hidden_states"} <= set(items(model))
    slim_outputs(model)
    assert set(items(model)) - {"rope_deltas"} == {"loss", "logits", "last_hidden_state"}
    inner = model.backbone(**cases.text_batch(), use_cache=True, output_hidden_states=True)
    assert {cases.name_of_cache(), "hidden_states"} <= set(inner)  # its own caller may still ask
    unpatch(model)
    assert {cases.name_of_cache(), "hidden_states"} <= set(items(model))
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_a_class_with_its_present_and_future_models(slim_class: Any) -> None:
    config = cases.config(output_hidden_states=True)
    present = slim_class(config)
    assert items(present) == cases.fat()
    assert slim_outputs(slim_class) is slim_class
    assert items(present) == items(slim_class(config)) == ["loss", "logits"]
    unpatch(slim_class)
    assert items(present) == items(slim_class(config)) == cases.fat()
    assert "forward" not in vars(slim_class)


def test_a_class_whose_forward_has_no_flags() -> None:
    kind = type("Patched", (Users,), {})
    model = slim_outputs(kind)().eval()
    assert set(items(model)) - {"rope_deltas"} == {"loss", "logits", "last_hidden_state"}
    unpatch(kind)
    assert {cases.name_of_cache(), "hidden_states"} <= set(items(model))


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"output_hidden_states": True}, "hidden_states"),
        ({"use_cache": True}, cases.name_of_cache()),
        ({"output_attentions": True}, "attentions"),
    ],
)
def test_a_caller_who_asks_gets_it_and_that_alone(asked: dict[str, bool], kept: str) -> None:
    model = slim_outputs(cases.classifier(attention="eager", output_hidden_states=True))
    assert items(model, **asked) == ["loss", "logits", kept]
    assert items(model, **dict.fromkeys(asked, False)) == ["loss", "logits"]


def test_flags_by_position() -> None:
    class Model(nn.Module):
        def forward(
            self, input_ids: torch.Tensor, use_cache: bool | None = None, output_hidden_states: Any = None
        ) -> Any:
            return {"logits": input_ids, "flags": (use_cache, output_hidden_states), "hidden_states": 1}

    model = slim_outputs(Model())
    ids = torch.ones(2, 3)
    assert model(ids, True, None)["flags"] == (True, False)
    assert model(ids, None, True) == {"logits": ids, "flags": (False, True), "hidden_states": 1}
    assert model(ids)["flags"] == (False, False)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_that_is_passed_in_comes_back(name: str) -> None:
    from transformers import DynamicCache

    model = slim_outputs(fat())
    cache = DynamicCache()
    with torch.no_grad():
        output = model(**cases.text_batch(), **{name: cache})
    assert getattr(output, cases.name_of_cache()) is cache
    assert cache.get_seq_length() == 9


def test_elsewhere_cache_is_a_word_like_any_other() -> None:
    """Only models of transformers mean `past_key_values` by it."""

    class Model(nn.Module):
        def forward(self, input_ids: torch.Tensor, cache: Any = None, use_cache: bool = True) -> Any:
            return {"logits": input_ids, "cache": cache, **({"past_key_values": 1} if use_cache else {})}

    model = slim_outputs(Model())
    for cache in (None, {}, torch.ones(2)):
        assert list(model(torch.ones(2, 3), cache=cache)) == ["logits", "cache"]


def test_generation_of_a_slim_model_is_unchanged() -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(cases.config()).eval()
    batch = cases.vision_batch("image")
    before = model.generate(**batch, max_new_tokens=4, do_sample=False)
    after = slim_outputs(model).generate(**batch, max_new_tokens=4, do_sample=False)
    assert torch.equal(before, after)


def test_twice_is_as_once_and_the_last_one_counts() -> None:
    model = fat()
    original = model.forward
    slim_outputs(slim_outputs(model), drop=("hidden_states",))
    assert items(model) == ["loss", "logits", cases.name_of_cache()]
    unpatch(unpatch(model))
    assert model.forward == original and "forward" not in vars(model)
    assert items(model) == cases.fat()


def test_a_models_own_options_go_before_its_classs(slim_class: Any) -> None:
    model = slim_outputs(slim_class)(cases.config(output_hidden_states=True))
    assert items(slim_outputs(model, drop=("hidden_states",))) == ["loss", "logits", cases.name_of_cache()]
    assert items(unpatch(model)) == ["loss", "logits"]


def test_a_forward_set_on_the_model_is_kept_and_given_back() -> None:
    """Accelerate does so in prepare()."""
    model = fat()
    own = model.forward
    calls = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return own(*args, **kwargs)

    model.forward = forward
    assert items(slim_outputs(model)) == items(slim_outputs(model))
    assert len(calls) == 2
    assert unpatch(model).forward is forward


def test_unpatched_beneath_somebody_elses_wrapper() -> None:
    """Theirs stays; ours does nothing any more. functools.wraps copies our mark along."""
    import functools

    model = slim_outputs(fat())
    model.forward = functools.wraps(model.forward)(functools.partial(model.forward))
    assert items(model) == ["loss", "logits"]
    theirs = model.forward
    unpatch(model)
    assert model.forward is theirs
    assert items(model) == cases.fat()
    assert items(slim_outputs(model)) == ["loss", "logits"]


def test_a_copy_runs_its_own_weights() -> None:
    model = slim_outputs(fat())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.score.weight.zero_()
    assert twin(**cases.text_batch()).logits.abs().sum() == 0
    assert model(**cases.text_batch()).logits.abs().sum() > 0
    assert items(unpatch(twin)) == cases.fat()
    assert items(model) == ["loss", "logits"]


def test_the_sequence_length_without_the_tensor() -> None:
    model = slim_outputs(fat())
    output = model(**cases.text_batch(batch=2, length=11), labels=LABELS)
    last = output.last_hidden_state
    assert last.size(1) == last.shape[1] == 11
    assert last.size() == (2, 11, 32) and last.ndim == last.dim() == 3
    assert len(output.to_tuple()) == 2  # what gathers or detaches outputs never meets it
    with pytest.raises(AttributeError, match="output_hidden_states=True"):
        last.mean()
    embedded = model(inputs_embeds=torch.zeros(2, 5, 32), attention_mask=torch.ones(2, 5, dtype=torch.long))
    assert embedded.last_hidden_state.size() == (2, 5, 32)
    without = slim_outputs(model, keep_sequence_length=False)(**cases.text_batch())
    assert without.last_hidden_state is None


def test_a_real_last_hidden_state_is_kept_unless_dropped() -> None:
    model = fat().model
    with torch.no_grad():
        extra = ("past_key_values", "rope_deltas")  # the second one in transformers 4
        kept = slim_outputs(model, drop=("hidden_states", *extra))(**cases.text_batch())
        dropped = slim_outputs(model, drop=("last_hidden_state", *extra))(**cases.text_batch())
    assert kept.last_hidden_state.shape == (2, 9, 32) and isinstance(kept.last_hidden_state, torch.Tensor)
    assert list(kept) == ["last_hidden_state"]
    assert dropped.last_hidden_state == SequenceShape((2, 9, 32))
    assert list(dropped) == ["hidden_states"]


@pytest.mark.parametrize("how", ["pickle", "copy", "deepcopy", "replace", "pytree", "mapping"])
def test_an_output_survives_what_frameworks_do_to_it(how: str) -> None:
    with torch.no_grad():
        output = slim_outputs(fat())(**cases.text_batch(), labels=LABELS)
    again = {
        "pickle": lambda: pickle.loads(pickle.dumps(output)),
        "copy": lambda: copy.copy(output),
        "deepcopy": lambda: copy.deepcopy(output),
        "replace": lambda: dataclasses.replace(output),
        "pytree": lambda: pytree.tree_map(torch.clone, output),
        "mapping": lambda: type(output)(dict(output)),  # Accelerate's conversion to float32
    }[how]()
    assert type(again) is type(output)
    assert list(again) == ["loss", "logits"]
    assert torch.equal(again.logits, output.logits) and torch.equal(again["loss"], output.loss)
    assert again.last_hidden_state == (None if how == "mapping" else SequenceShape((2, 9, 32)))


def test_other_kinds_of_output() -> None:
    @dataclasses.dataclass
    class Output:
        logits: Any
        hidden_states: Any = None

    class Model(nn.Module):
        def forward(self, kind: str) -> Any:
            fields = {"logits": 1, "hidden_states": 2}
            return {"dict": fields, "dataclass": Output(**fields), "tuple": (1, 2)}[kind]

    model = slim_outputs(Model())
    assert model("dict") == {"logits": 1}
    assert model("dataclass") == Output(logits=1)
    assert model("tuple") == (1, 2)


def test_items_that_are_no_fields_and_fields_that_are_required() -> None:
    from transformers.utils import ModelOutput

    @dataclasses.dataclass
    class Output(ModelOutput):
        logits: Any
        hidden_states: Any = None

    class Model(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> Any:
            output = Output(logits=input_ids, hidden_states=(input_ids,))
            output["router"] = input_ids
            return output

    output = slim_outputs(Model())(torch.ones(2, 3))
    assert output.last_hidden_state.size(1) == 3
    assert list(output) == ["logits", "router"]
    assert torch.equal(output.router, torch.ones(2, 3))


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(TypeError, match="one string"):
        slim_outputs(nn.Linear(2, 2), drop="hidden_states")
    with pytest.raises(ValueError, match="logits"):
        slim_outputs(nn.Linear(2, 2), drop=("logits", "attentions"))
    for function in (slim_outputs, unpatch):
        with pytest.raises(TypeError, match="neither"):
            function(3)
    for name, meant in {"hidden_state": "hidden_states", "past_key_value": "past_key_values"}.items():
        with pytest.raises(GuardConfigError, match=f"drop has '{name}', .* did you mean {meant}"):
            slim_outputs(nn.Linear(2, 2), drop=("attentions", name))
    slim_outputs(nn.Linear(2, 2), drop=("router", "text_hidden_states", "encoder_attentions"))  # a model's own names


def test_gradient_checkpointing_and_no_word_about_the_cache(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without slimming, transformers warns that it has to switch the cache off."""
    from transformers.utils import logging as messages

    gradients, warned = [], []
    monkeypatch.setattr(messages.get_logger("transformers"), "propagate", True)
    for patch in (unpatch, slim_outputs):
        messages.warning_once.cache_clear()
        caplog.clear()
        model = patch(cases.checkpointed(fat()).train())
        output = model(**cases.vision_batch("image"), labels=torch.tensor([1]))
        output.loss.backward()
        gradients.append([each.grad for each in model.parameters() if each.grad is not None])
        warned.append("use_cache" in caplog.text)
    assert list(output) == ["loss", "logits"]
    assert warned == [True, False]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_accelerate_in_bfloat16() -> None:
    """Its conversion rebuilds outputs from their items: patched after prepare() the length is there too."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(fat())
    assert items(model) == cases.fat()
    output = slim_outputs(model)(**cases.text_batch(), labels=LABELS)
    assert list(output) == ["loss", "logits"]
    assert output.last_hidden_state.size(1) == 9


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft 0.21 with transformers 5.23
@pytest.mark.parametrize("where", ["outside", "inside", "class"])
def test_under_peft(where: str, slim_class: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = slim_class(cases.config(output_hidden_states=True))
    if where != "outside":
        slim_outputs(model if where == "inside" else slim_class)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"))
    if where == "outside":
        assert items(adapted) == cases.fat()
        slim_outputs(adapted)
    assert items(adapted) == ["loss", "logits"]
    assert items(adapted, output_hidden_states=True) == ["loss", "logits", "hidden_states"]


def test_what_a_trainer_collects(tmp_path: Path) -> None:
    """Trainer.evaluate gathers and keeps every item of the output: all hidden states of all batches, or the logits."""
    from transformers import Trainer, TrainingArguments

    pytest.importorskip("accelerate", reason="accelerate is not installed")
    rows = [{"input_ids": ids, "labels": torch.tensor(1)} for ids in cases.text_batch(batch=4)["input_ids"]]
    model = cases.classifier(output_hidden_states=True, use_cache=False)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], per_device_eval_batch_size=2)
    trainer = Trainer(model=model, args=arguments)
    before = trainer.predict(rows).predictions
    assert isinstance(before, tuple) and len(before) == 2 and before[1][0].shape == (4, 9, 32)
    slim_outputs(model)
    after = trainer.predict(rows).predictions
    assert after.shape == (4, 3)
    torch.testing.assert_close(after, before[0])
