"""Reads and checks the ``config.json`` of a model before an engine loads the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .engine_flags import InvalidOption

_STATE_LAYERS = frozenset({"conv", "hybrid", "linear_attention", "mamba", "mamba2", "recurrent"})
"""Types of layers that keep a state instead of keys and values."""
_ATTENTION = frozenset({"attention", "chunked_attention", "full_attention", "sliding_attention"})
"""Types of layers that sojourn's KV connectors support together. vLLM puts chunks and full attention in one
KV cache group."""


def read_model_config(model: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return the configuration of ``model``, a directory or a hub id that was downloaded before; ``None`` if
    this machine has no readable configuration of it. ``revision``: branch or commit of a hub id; ``None`` for
    main."""
    try:
        folder = Path(model).expanduser()
        path: object = str(folder / "config.json")
        if not folder.is_dir():
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(model, "config.json", revision=revision)
        if not isinstance(path, str):
            return None
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ImportError, OSError, RuntimeError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _text_layers(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], set[str]]:
    """Return (the part of the configuration that describes the language model, its kinds of layers)."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config  # only multimodal models have a ``text_config``
    types = text.get("layer_types", text.get("layers_block_type"))
    return text, {kind for kind in types if isinstance(kind, str)} if isinstance(types, list) else set()


def connector_refusal(model: str, config: Mapping[str, Any]) -> str:
    """Return why no KV connector supports the model; empty if its configuration says nothing against it."""
    if config.get("is_encoder_decoder") is True:
        return f"{model} has an encoder and a decoder; vLLM's KV connectors support decoders alone"
    return ""


def only_vllm_refusal(model: str, config: Mapping[str, Any]) -> str:
    """Return why sojourn's KV connectors do not support a model that vLLM's own connector supports; empty if
    its configuration says nothing against them."""
    kinds, ours = _text_layers(config)[1], "sojourn's KV connectors support"
    if kinds & _STATE_LAYERS:
        state = "layers that keep a state (state-space or linear attention) beside attention"
        return f"{model} has {state}; {ours} attention alone"
    if kinds - _ATTENTION and len(kinds) > 1:
        listed = ", ".join(sorted(kinds))
        beside = "full attention, alone or beside sliding windows"
        return f"{model} has layers of the kinds {listed}; {ours} {beside}"
    return ""


def check_layers(
    model: str, config: Mapping[str, Any], next_step: str, *, in_one_group: bool = True
) -> list[str]:
    """Check that sojourn's KV connectors support the KV caches of all layers that the configuration lists.
    Return notes for the user. Raises ``InvalidOption`` for other models.

    ``next_step``: what the user can do; part of the error. ``in_one_group``: whether layers with sliding
    windows and with full attention share a KV cache group.
    """
    refusal = connector_refusal(model, config) or only_vllm_refusal(model, config)
    if refusal:
        raise InvalidOption(f"{refusal}, so the engine would refuse the model once it is loaded", next_step)
    text, kinds = _text_layers(config)
    windows = any("sliding" in kind or "chunked" in kind for kind in kinds) and len(kinds) > 1
    if in_one_group and (windows or (not kinds and "sliding_window_pattern" in text)):
        return [
            f"{model} has layers that attend to a window; with sojourn's disk or pairs these keep the whole "
            "context too (--disable-hybrid-kv-cache-manager), so that the KV cache holds fewer tokens"
        ]
    return []
