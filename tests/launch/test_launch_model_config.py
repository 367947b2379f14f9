"""What a model's configuration says before the model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.launch.launch_errors import InvalidOption
from sojourn_server.launch.model_config import check_layers, read_model_config

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 3 + [FULL]},
        {"model_type": "lfm2", "layer_types": ["conv", FULL]},
        {"model_type": "jamba", "layers_block_type": ["mamba", "attention"]},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-"},
        {"model_type": "falcon_h1", "mamba_d_state": 256},
        {"model_type": "mamba2", "state_size": 128},
        {"model_type": "vision", "text_config": {"layer_types": ["linear_attention", FULL]}},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_model_with_a_state_is_refused_before_it_is_loaded(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=r"org/model has state-space or linear-attention") as caught:
        check_layers("org/model", config)
    assert caught.value.next_step == "serve it with --policy stock"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "qwen3", "layer_types": [FULL, FULL], "sliding_window": None},
        {"model_type": "mistral", "layer_types": [SLIDING, SLIDING], "sliding_window": 4096},
        # Some models of a hybrid family have no such layer.
        {"model_type": "granitemoehybrid", "mamba_d_state": 256, "layer_types": ["attention"] * 4},
        {"layer_types": "text", "text_config": [1]},
        {"layer_types": [1, None]},
    ],
)
def test_models_whose_layers_are_alike_are_served_without_a_note(config: dict[str, Any]) -> None:
    assert check_layers("org/model", config) == []


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_windows_beside_full_attention_are_kept_whole_with_a_note(where: str) -> None:
    layers = {"layer_types": [SLIDING, FULL]}
    (note,) = check_layers("org/model", layers if where == "top" else {"text_config": layers})
    assert "--disable-hybrid-kv-cache-manager" in note
    assert "fewer tokens" in note


def test_a_configuration_is_read_from_a_directory_or_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    file = tmp_path / "config.json"
    asked = []

    def cached(model: str, name: str, revision: str | None) -> str | None:
        asked.append((model, name, revision))
        return str(file) if model == "org/model" else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    file.write_text(json.dumps({"model_type": "llama"}))
    assert read_model_config(str(tmp_path)) == {"model_type": "llama"}
    assert asked == []
    assert read_model_config("org/model", "main") == {"model_type": "llama"}
    assert asked == [("org/model", "config.json", "main")]
    assert read_model_config("org/other") is None


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 5000, "\ud800"])
def test_a_configuration_that_cannot_be_read_is_the_engines_to_report(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert read_model_config(str(tmp_path)) is None
    assert read_model_config(str(tmp_path / "missing")) is None
