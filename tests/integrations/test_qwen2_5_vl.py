"""The classifier on a real Qwen2.5-VL of the installed transformers, tiny and random: inputs, pooling, losses, checkpoints."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.insert(0, str(Path(__file__).parent))
import qwen_cases as cases
from ncclguard.integrations.qwen2_5_vl import Qwen2_5_VLForSequenceClassification


@pytest.fixture(scope="module")
def model() -> Any:
    return cases.classifier()


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize(("side", "masked"), [("left", True), ("right", True), ("right", False)])
def test_padding_on_either_side_changes_no_logits(model: Any, side: str, masked: bool) -> None:
    """An example's logits are those it has alone. Padding is found by the mask, or without one by its id (then on the right
    only: on the left the model itself would attend to it)."""
    short, long = torch.randint(3, 89, (5,)), torch.randint(3, 89, (8,))
    padding = torch.full((3,), cases.PAD)
    batch = torch.stack([torch.cat([padding, short] if side == "left" else [short, padding]), long])
    mask = {"attention_mask": (batch != cases.PAD).long()} if masked else {}
    expected = torch.cat([logits(model, input_ids=short[None]), logits(model, input_ids=long[None])])
    torch.testing.assert_close(logits(model, input_ids=batch, **mask), expected)


def test_the_last_token_is_the_last_real_one_and_not_the_last_place(model: Any) -> None:
    batch = torch.tensor([[5, 6, 7, cases.PAD, cases.PAD]])
    by_mask = logits(model, input_ids=batch, attention_mask=torch.tensor([[1, 1, 1, 0, 0]]))
    last_place = logits(model, input_ids=batch, attention_mask=torch.ones(1, 5, dtype=torch.long))
    assert not torch.allclose(by_mask, last_place)


def test_embeddings_in_place_of_ids(model: Any) -> None:
    batch = cases.text_batch()
    embedded = model.get_input_embeddings()(batch["input_ids"])
    found = logits(model, inputs_embeds=embedded, attention_mask=batch["attention_mask"])
    torch.testing.assert_close(found, logits(model, **batch))


@pytest.mark.parametrize("both", [True, False])
def test_ids_and_embeddings_are_alternatives(model: Any, both: bool) -> None:
    inputs = {"input_ids": torch.ones(1, 2, dtype=torch.long), "inputs_embeds": torch.ones(1, 2, 32)} if both else {}
    with pytest.raises(ValueError, match="exactly one"):
        model(**inputs)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_what_is_to_be_seen_changes_the_logits(model: Any, kind: str) -> None:
    batch = cases.vision_batch(kind)
    other = cases.vision_batch(kind, seed=5)
    assert torch.equal(batch["input_ids"], other["input_ids"])
    assert not torch.allclose(logits(model, **batch), logits(model, **other))


@pytest.mark.parametrize("kind", ["image", "video"])
def test_positions_are_those_of_the_processor(model: Any, kind: str) -> None:
    """Without mm_token_type_ids the picture's tokens still get their places in two dimensions, and not those of text."""
    batch = cases.vision_batch(kind)
    ids = batch["input_ids"]
    types = (ids == cases.IMAGE).int() + 2 * (ids == cases.VIDEO).int()
    torch.testing.assert_close(logits(model, **batch), logits(model, **batch, mm_token_type_ids=types))
    as_text = logits(model, **batch, position_ids=torch.arange(ids.shape[1]).expand(3, *ids.shape))
    assert not torch.allclose(logits(model, **batch), as_text)


def test_left_padding_with_images(model: Any) -> None:
    batch = cases.vision_batch("image")
    alone = logits(model, **batch)
    for name, fill in (("input_ids", cases.PAD), ("attention_mask", 0)):
        batch[name] = functional.pad(batch[name], (4, 0), value=fill)
    torch.testing.assert_close(logits(model, **batch), alone)


def test_pixels_of_the_real_image_processor(model: Any) -> None:
    """A drawn picture through Qwen2-VL's own image processor (the one that needs no torchvision) into the model."""
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    found = [each for name, each in vars(module).items() if name.startswith("Qwen2VLImageProcessor")]
    processor = next(each for each in found if hasattr(each, "preprocess"))(min_pixels=28 * 28, max_pixels=56 * 84)
    pixels = processor(images=[image.new("RGB", (84, 56), (200, 30, 90))], return_tensors="pt")
    assert pixels["pixel_values"].shape[1] == cases.PATCH
    ids = cases.image_ids(pixels["image_grid_thw"])
    assert logits(model, input_ids=ids, **pixels).isfinite().all()


@pytest.mark.parametrize(
    ("num_labels", "settings", "labels", "expected"),
    [
        (1, {}, torch.tensor([0.5, -1.0]), lambda x, y: functional.mse_loss(x[:, 0], y)),
        (3, {"problem_type": "regression"}, torch.randn(2, 3), functional.mse_loss),
        (3, {}, torch.tensor([2, 0]), functional.cross_entropy),
        (3, {}, torch.tensor([[2], [0]]), lambda x, y: functional.cross_entropy(x, y[:, 0])),
        (3, {}, torch.tensor([-100, 1]), lambda x, y: functional.cross_entropy(x[1:], y[1:])),
        (3, {}, torch.tensor([[1.0, 0, 1], [0, 0, 1]]), functional.binary_cross_entropy_with_logits),
        (
            3,
            {"problem_type": "multi_label_classification"},
            torch.tensor([[1, 0, 1], [0, 0, 1]]),
            lambda x, y: functional.binary_cross_entropy_with_logits(x, y.float()),
        ),
    ],
    ids=["one number", "numbers", "single", "single column", "left out", "multi", "multi of integers"],
)
def test_losses(num_labels: int, settings: dict[str, Any], labels: torch.Tensor, expected: Any) -> None:
    model = cases.classifier(num_labels, **settings)
    output = model(**cases.text_batch(), labels=labels)
    torch.testing.assert_close(output.loss, expected(output.logits, labels))
    output.loss.backward()
    assert model.score.weight.grad.abs().sum() > 0
    assert model.config.problem_type == settings.get("problem_type")  # what one batch looked like decides nothing later


def test_an_unknown_problem_is_refused() -> None:
    model = cases.classifier()
    model.config.problem_type = "ranking"
    with pytest.raises(ValueError, match="ranking"):
        model(**cases.text_batch(), labels=torch.tensor([0, 1]))


def test_a_tuple_when_asked_for(model: Any) -> None:
    loss, scores = model(**cases.text_batch(), labels=torch.tensor([0, 1]), return_dict=False, use_cache=False)
    assert loss.ndim == 0
    assert scores.shape == (2, 3)


def test_saved_and_loaded_it_is_the_same(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded, report = Qwen2_5_VLForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.architectures == ["Qwen2_5_VLForSequenceClassification"]
    batch = cases.vision_batch("image")
    assert torch.equal(logits(loaded.eval(), **batch), logits(model, **batch))


def test_a_published_checkpoint_gives_the_body_and_a_new_head(tmp_path: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(3)
    published = Qwen2_5_VLForConditionalGeneration(cases.config())
    published.save_pretrained(tmp_path)
    loaded, report = Qwen2_5_VLForSequenceClassification.from_pretrained(
        tmp_path, num_labels=5, output_loading_info=True
    )
    assert set(report["missing_keys"]) == {"score.weight"}
    assert not report["unexpected_keys"]
    assert loaded.score.weight.shape == (5, 32)
    body = published.model.state_dict()
    assert all(torch.equal(tensor, body[name]) for name, tensor in loaded.model.state_dict().items())


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    batch = cases.vision_batch("image")
    gradients = []
    for checkpointing in (False, True):
        again = cases.classifier().train()
        if checkpointing:
            cases.checkpointed(again)
        again(**batch, labels=torch.tensor([1])).loss.backward()
        gradients.append([each.grad for each in again.parameters() if each.grad is not None])
    torch.testing.assert_close(*gradients)


def test_importing_the_tools_does_not_import_transformers() -> None:
    code = (
        "import sys; from ncclguard.integrations.qwen2_5_vl import slim_outputs, set_eval_mode; "
        "assert 'transformers' not in sys.modules"
    )
    # Any option makes it a process of its own, which has imported nothing: tests/preforked.py.
    subprocess.run([sys.executable, "-B", "-c", code], check=True, timeout=60)


def test_without_transformers_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "try:\n    from ncclguard.integrations.qwen2_5_vl import Qwen2_5_VLForSequenceClassification\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert "pip install 'ncclguard[transformers]'" in done.stdout


@pytest.mark.parametrize(
    "name", ["accelerate", "deepspeed", "modes", "qwen2_5_vl_classifier", "slim_outputs", "transformers"]
)
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(f"ncclguard.integrations.{name}")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted
