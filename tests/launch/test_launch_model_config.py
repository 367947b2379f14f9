"""What a model's configuration says before the model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.launch.engine_flags import InvalidOption
from sojourn_server.launch.launch_environment import emulates_bfloat16
from sojourn_server.launch.model_config import check_layers, read_model_config

FULL, SLIDING = "full_attention", "sliding_attention"


STEP = "serve it with --policy stock"


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["JambaForCausalLM"], "layers_block_type": ["mamba", "attention"]},
        {"text_config": {"layer_types": ["linear_attention", FULL]}},
    ],
)
def test_a_hybrid_model_is_refused_before_it_is_loaded(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=r"org/model has layers that keep a state") as caught:
        check_layers("org/model", config, STEP)
    assert caught.value.next_step == STEP


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
        {"layer_types": [SLIDING, SLIDING], "sliding_window": 4096},
        # Some models of a hybrid family have no such layer; those with a state only have one kind.
        {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["attention"] * 4},
        {"architectures": ["Mamba2ForCausalLM"]},
        {"architectures": "text", "layer_types": "text", "text_config": [1]},
        {"architectures": [1, None], "layer_types": [1, None]},
    ],
)
def test_models_whose_layers_are_alike_are_served_without_a_note(config: dict[str, Any]) -> None:
    assert check_layers("org/model", config, STEP) == []


def test_a_processor_without_avx512_emulates_bfloat16(tmp_path: Path) -> None:
    processor = tmp_path / "cpuinfo"
    assert not emulates_bfloat16(processor), "unknown"
    for flags, emulates in (("sse2 avx2", True), ("sse2 avx2 avx512f", False), ("fp asimd bf16", False)):
        processor.write_text(f"flags\t\t: {flags}\n")
        assert emulates_bfloat16(processor) == emulates


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": [SLIDING, FULL]},
        {"text_config": {"layer_types": [SLIDING, FULL]}},
        {"sliding_window": 1024, "sliding_window_pattern": 6},
    ],
)
def test_windows_beside_full_attention_are_kept_whole_with_a_note(config: dict[str, Any]) -> None:
    (note,) = check_layers("org/model", config, STEP)
    assert "--disable-hybrid-kv-cache-manager" in note
    assert "fewer tokens" in note
    assert check_layers("org/model", config, STEP, in_one_group=False) == []


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
