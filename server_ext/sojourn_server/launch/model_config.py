"""The ``config.json`` of a model, read before an engine loads the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .launch_errors import InvalidOption

_STATE_LAYERS = frozenset(
    {"conv", "gdn", "hybrid", "linear_attention", "mamba", "mamba2", "recurrent", "rwkv", "ssm"}
)
"""Types of layers that keep a state instead of keys and values."""
_STATE_MODELS = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv"})
_STATE_KEYS = ("hybrid_override_pattern", "mamba_", "ssm_")
"""Beginnings of ``config.json`` keys that only models with such state layers have."""


def read_model_config(model: str, revision: str | None = None) -> dict[str, Any] | None:
    """The configuration of a model directory, or of a hub id that was downloaded before; ``None``: there is
    none on this machine, or it cannot be read."""
    path: object = str(Path(model).expanduser() / "config.json")
    try:
        if not Path(model).expanduser().is_dir():
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(model, "config.json", revision=revision)
        if not isinstance(path, str):
            return None
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def check_layers(model: str, config: Mapping[str, Any]) -> list[str]:
    """Check that sojourn can keep the KV of the model's layers. Raises ``InvalidOption`` for a model with
    state-space or linear-attention layers. Returns a note if some layers attend to a window only."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config  # multimodal models have one
    types = text.get("layer_types", text.get("layers_block_type"))
    kinds = {kind for kind in types if isinstance(kind, str)} if isinstance(types, list) else set()
    if kinds:
        has_state = bool(kinds & _STATE_LAYERS)
    else:
        has_state = text.get("model_type") in _STATE_MODELS or any(
            key.startswith(_STATE_KEYS) for key in text
        )
    if has_state:
        raise InvalidOption(
            f"{model} has state-space or linear-attention layers; sojourn keeps keys and values only, "
            "and the engine would refuse the model once it is loaded",
            "serve it with --policy stock",
        )
    if len(kinds) > 1 and any("sliding" in kind or "chunked" in kind for kind in kinds):
        return [
            f"{model} has layers that attend to a window; sojourn keeps the whole context of these too "
            "(--disable-hybrid-kv-cache-manager), so that the KV cache holds fewer tokens than with "
            "--policy stock"
        ]
    return []
