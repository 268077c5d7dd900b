"""Element counts are decoded exactly, and said to be unknown otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclguard_explain.arithmetic import (
    bucket_limit,
    explain_numel,
    find_model,
    first_bucket,
    known_models,
    parameter,
    sizes_from_config,
)
from ncclguard_explain.facts import Work

QWEN = find_model("qwen2.5-vl-7b")


def test_layer_of_qwen2_5_vl_7b() -> None:
    assert QWEN.layer == 233_057_792 and QWEN.embedding == 544_997_376


@pytest.mark.parametrize(
    ("numel", "expected"),
    [
        (467_019_003, "Linear(3584 -> 251, bias) 899,835 + final norm 3,584 + decoder layers 27 and 26 (466,115,584)"),
        (466_119_168, "final norm 3,584 + decoder layers 27 and 26 (466,115,584)"),
    ],
)
def test_first_gradient_bucket_is_taken_apart(numel: int, expected: str) -> None:
    assert first_bucket(numel, QWEN, 500_000_000) == expected


@pytest.mark.parametrize("numel", [467_019_004, 466_119_167, 400_000_000, 5, 544_997_376])
def test_other_counts_are_no_first_bucket(numel: int) -> None:
    assert first_bucket(numel, QWEN, 500_000_000) is None


def test_bucket_that_the_flush_rule_would_not_make_is_refused() -> None:
    assert first_bucket(466_119_168, QWEN, 1_000_000_000) is None
    assert first_bucket(466_119_168, QWEN, 400_000_000) is None


def test_seed_case_reads_as_a_sentence() -> None:
    work = Work("ALLREDUCE", 56731, 467_019_003, 467_019_003, timeout_ms=600_000)
    (sentence,) = explain_numel(work, QWEN, {"reduce_bucket_size": 5e8})
    for part in ("467,019,003", "ZeRO gradient bucket", "backward", "not an activation"):
        assert part in sentence
    assert any("qwen2" in text and "ZeRO gradient bucket" in text for text in explain_numel(work))


def test_gathered_and_scattered_parameters_are_named() -> None:
    (text,) = explain_numel(Work("_REDUCE_SCATTER_BASE", 7753, 544_997_376, 68_124_672), QWEN)
    assert "152064 x 3584" in text and "over 8 ranks" in text
    (text,) = explain_numel(Work("ALLGATHER", 1, 65_536_000, 131_072_000), find_model("llama-2-7b"))
    assert "32000 x 4096" in text and "from 2 ranks" in text


def test_padding_up_to_the_group_is_allowed_for() -> None:
    assert parameter(QWEN.layer + 5, QWEN, group=8) == "one whole decoder layer"
    assert parameter(QWEN.layer + 8, QWEN, group=8) is None


def test_one_element_is_a_flag_and_an_unknown_count_says_nothing() -> None:
    assert "flag" in explain_numel(Work("ALLREDUCE", 1, 1, 1))[0]
    assert explain_numel(Work("ALLGATHER", 1, 12_347, 98_776)) == []
    assert explain_numel(Work("ALLREDUCE")) == []


def test_all_reduce_under_the_limit_is_called_a_bucket_without_a_model() -> None:
    (text,) = explain_numel(Work("ALLREDUCE", 1, 497_464_353, 497_464_353))
    assert "gradient bucket" in text and "500,000,000" in text


def test_auto_bucket_is_hidden_size_squared() -> None:
    assert bucket_limit({"reduce_bucket_size": "auto"}, QWEN) == 12_845_056
    assert bucket_limit(None, None) == 500_000_000


@pytest.mark.parametrize("nested", [False, True])
def test_config_json_gives_the_same_sizes_as_the_table(tmp_path: Path, nested: bool) -> None:
    figures = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "model_type": "qwen2_5_vl",
    }
    config = {"model_type": "qwen2_5_vl", "text_config": figures} if nested else figures
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for argument in (str(path), str(tmp_path)):
        model = find_model(argument)
        assert (model.layer, model.embedding, model.layers) == (QWEN.layer, QWEN.embedding, 28)


def test_unusable_config_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_size"):
        sizes_from_config("x", {"vocab_size": 3})
    with pytest.raises(ValueError, match="built-in table"):
        find_model("no-such-model")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="JSON"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.7),
        ("llama-3-8b", 8.0),
        ("mistral-7b", 7.2),
        ("qwen2.5-14b", 14.8),
        ("qwen3-8b", 8.2),
        ("qwen2.5-0.5b", 0.49),
        ("llama-3-70b", 70.6),
    ],
)
def test_table_adds_up_to_the_published_sizes(name: str, billions: float) -> None:
    model = next(model for model in known_models() if model.name == name)
    total = model.layers * model.layer + model.hidden + model.embedding * (1 if model.tied else 2)
    assert total / 1e9 == pytest.approx(billions, rel=0.02)
