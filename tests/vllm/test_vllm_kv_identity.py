"""Engines whose KV differs have different identities; settings that do not change the KV keep one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from sojourn_server.vllm.kv_connector_settings import model_identity
from transformers import Llama4Config, LlamaConfig
from vllm.config import ModelConfig

COMMIT = "1" * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5]}))
    return tmp_path


def config_of(**given: Any) -> Any:
    """A model's configuration with any content; releases of Transformers differ in what they accept."""
    return SimpleNamespace(to_dict=lambda: given, to_json_string=lambda: json.dumps(given))


def identity(
    folder: Path,
    config: Any = None,
    *,
    media: dict[str, Any] | None = None,
    loader: Any = None,
    max_model_len: int = 4096,
    **changed: Any,
) -> str:
    """The identity of an engine with a model in ``folder``; ``media``: its options, if it takes media."""
    model = {
        "hf_config": config or config_of(),
        "quantization": None,
        "seed": 0,
        "model": str(folder),
        "revision": None,
        "model_weights": "",
        "dtype": "bf16",
        "max_model_len": max_model_len,
        "multimodal_config": None if media is None else SimpleNamespace(**media),
        **changed,
    }
    load = SimpleNamespace(load_format="auto", download_dir=None, model_loader_extra_config=loader or {})
    return model_identity(SimpleNamespace(model_config=SimpleNamespace(**model), load_config=load))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Phi3Config", "Llama4Config"])
def test_the_maximum_length_changes_the_kv_of_some_models(folder: Path, kind: str) -> None:
    """LongRoPE rotates keys by it, and Llama 4 scales attention by it."""
    config = transformers.Llama4Config()
    if kind == "Phi3Config":
        config = transformers.Phi3Config(
            hidden_size=4, num_attention_heads=1, pad_token_id=0, max_position_embeddings=131072,
            original_max_position_embeddings=4096,
            rope_scaling={"type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2},
        )  # fmt: skip
    assert identity(folder, config, max_model_len=4096) != identity(folder, config, max_model_len=4097)
    tuned = {"override_generation_config": {"attn_temperature_tuning": True}}
    assert identity(folder, config) != identity(folder, config, **tuned)


def test_a_maximum_length_that_vllm_lowers_is_the_one_that_the_model_was_built_with(folder: Path) -> None:
    """With ``--max-model-len auto``, vLLM lowers ``max_model_len`` after it has loaded the model."""

    def at(length: int, original: int | None) -> str:
        derived = {-1: 1 << 20, None: 1 << 20}
        return identity(
            folder,
            Llama4Config(),
            max_model_len=length,
            original_max_model_len=original,
            get_and_verify_max_len=lambda given: derived.get(given, given),
        )

    assert at(30000, -1) == at(1 << 20, None) != at(30000, 30000)


def test_the_derived_maximum_length_is_vllms(tmp_path: Path) -> None:
    LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=16, num_attention_heads=2, num_hidden_layers=1,
        intermediate_size=16, vocab_size=32, max_position_embeddings=1000,
    ).save_pretrained(tmp_path)  # fmt: skip
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=-1, dtype="float32")
    assert (model.original_max_model_len, model.max_model_len) == (-1, 1000)
    model.max_model_len = 10  # as vLLM's _auto_fit_max_model_len does
    assert model.get_and_verify_max_len(model.original_max_model_len) == 1000


def test_the_maximum_length_of_another_model_is_not_part_of_it(folder: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = config_of(rope_parameters=rope)
    assert identity(folder, config, max_model_len=4096) == identity(folder, config, max_model_len=32768)


@pytest.mark.parametrize(
    "options",
    [
        {"mm_processor_kwargs": {"do_normalize": False}},
        {"media_io_kwargs": {"video": {"num_frames": 8}}},
        {"video_pruning_rate": 0.5},
    ],
)
def test_how_media_become_tokens_is_part_of_it(folder: Path, options: dict[str, Any]) -> None:
    """The hash of a medium, and so a block's key, does not have the server's options."""
    assert identity(folder, media=options) != identity(folder, media={})
    assert identity(folder, media={name: None for name in options}) == identity(folder, media={})


@pytest.mark.parametrize("name", ["preprocessor_config.json", "video_preprocessor_config.json"])
def test_the_processor_of_a_directory_is_part_of_it(folder: Path, name: str) -> None:
    before, text = identity(folder, media={}), identity(folder)
    (folder / name).write_text(json.dumps({"image_mean": [0.1]}))
    assert identity(folder, media={}) != before
    assert identity(folder) == text, "an engine without media has no processor"


def test_the_commit_of_a_snapshot_names_its_processor(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    for each in (snapshot, tmp_path / "models--org--name" / "blobs"):
        each.mkdir(parents=True)
    (tmp_path / "models--org--name/blobs/w").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/w")
    before = identity(snapshot, media={})
    (tmp_path / "models--org--name/blobs/p").write_text("{}")
    (snapshot / "preprocessor_config.json").symlink_to("../../blobs/p")
    assert identity(snapshot, media={}) == before, "the hub's client may download it at any time"


def test_how_weights_are_loaded_is_part_of_it(folder: Path) -> None:
    plain = identity(folder)
    assert identity(folder, quantization_config={"moe": "fp8"}) != plain
    assert identity(folder, loader={"qlora_adapter_name_or_path": "/adapter"}) != plain
    assert identity(folder, quantization_config=None) == plain
    # The identity lies in a file of the store, and a loader's options may have a password.
    assert "swordfish" not in identity(folder, loader={"s3_secret_access_key": "swordfish"})
