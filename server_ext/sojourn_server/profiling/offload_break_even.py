"""Computes the context length from which offloading KV is faster than recomputing it (Tetris §2.1)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from sojourn_server.policies.costs.engine_profile import EngineProfile
from sojourn_server.policies.preemption.preemption_recovery import (
    break_even_tokens,
    measured_break_even_tokens,
)

from .machine_speed import ComputeThroughput


class ModelDimensions(NamedTuple):
    """Dimensions of a decoder-only model, for the closed-form break-even."""

    layers: int
    hidden: int


class ContextThreshold(NamedTuple):
    """The context length from which copying KV out and back is faster than recomputing it."""

    tokens: float | None
    """The length in tokens. 0 or less: copying is always faster. ``inf``: never. ``None``: unknown."""
    why: str = ""
    """Why the threshold is unknown."""

    def words(self, longest: int) -> str:
        """Return the threshold as text. ``longest``: the longest measured context, in tokens."""
        if self.tokens is None:
            return f"not known, {self.why}"
        if self.tokens <= 0:
            return "always"
        if self.tokens == math.inf:
            return "never"
        beyond = f", beyond the {longest:,} measured" if self.tokens > longest else ""
        return f"from {math.ceil(self.tokens):,} tokens on{beyond}"

    def as_json(self) -> dict[str, Any]:
        """Return the threshold as a JSON object. ``faster`` is ``always``, ``from``, ``never`` or ``not
        known``. ``tokens`` is the threshold: 0 for ``always``; null for ``never`` and ``not known``.
        ``why``, only with ``not known``: the reason."""
        if self.tokens is None:
            return {"faster": "not known", "tokens": None, "why": self.why}
        if self.tokens == math.inf:
            return {"faster": "never", "tokens": None}
        return {"faster": "from" if self.tokens > 0 else "always", "tokens": max(0.0, self.tokens)}


class OffloadBreakEven(NamedTuple):
    """The break-even length by two methods, with the inputs of both."""

    measured: ContextThreshold
    """Computed from the measured prefill curve and copy bandwidth."""
    closed_form: ContextThreshold
    """Computed from the model's dimensions, the machine's compute throughput and the same bandwidth."""
    copy_s_per_token: float | None
    """Seconds to copy a token's KV out and back."""
    flops_per_s: float | None
    dimensions: ModelDimensions | None

    def as_json(self) -> dict[str, Any]:
        """Return the thresholds and their inputs as JSON data."""
        return {
            "measured": self.measured.as_json(),
            "closed_form": self.closed_form.as_json(),
            "copy_s_per_token": self.copy_s_per_token,
            "flops_per_s": self.flops_per_s,
            "layers": self.dimensions.layers if self.dimensions else None,
            "hidden_size": self.dimensions.hidden if self.dimensions else None,
        }


def offload_break_even(
    profile: EngineProfile, dimensions: ModelDimensions | None, compute: ComputeThroughput
) -> OffloadBreakEven:
    """Return the context length from which offloading is faster than recomputing, by two methods. If inputs
    of a method are missing, its length is unknown, and ``why`` says what is missing. Never raises."""
    kv_bytes = profile.limits.kv_bytes_per_token
    down, up = profile.device_to_host_bytes_per_s, profile.host_to_device_bytes_per_s
    if not (kv_bytes and down and up):
        why = "no copies were measured"
        if not kv_bytes:
            why = "the server does not report the KV bytes per token; give them with --kv-bytes-per-token"
        unknown = ContextThreshold(None, why)
        return OffloadBreakEven(unknown, unknown, None, compute.flops_per_s, dimensions)
    copy_s = kv_bytes / down + kv_bytes / up
    curve = profile.prefill
    measured = measured_break_even_tokens(curve.a_s, curve.b_s_per_token, curve.c_s_per_token2, copy_s)
    if dimensions is None:
        closed = ContextThreshold(None, "the model has no config.json here (say: --layers, --hidden-size)")
    elif compute.flops_per_s is None:
        closed = ContextThreshold(None, compute.reason)
    else:
        closed = ContextThreshold(
            break_even_tokens(
                layers=dimensions.layers,
                hidden=dimensions.hidden,
                kv_bytes_per_token=kv_bytes,
                flops_per_s=compute.flops_per_s,
                link_bytes_per_s=2 * kv_bytes / copy_s,  # the formula has one speed for both directions
            )
        )
    return OffloadBreakEven(ContextThreshold(measured), closed, copy_s, compute.flops_per_s, dimensions)


def read_dimensions(root: str | None) -> ModelDimensions | None:
    """Return the dimensions in ``config.json`` of the model folder ``root``; ``None`` if the file or the
    dimensions are missing or invalid."""
    if root is None:
        return None
    try:
        config = json.loads((Path(root) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(config, dict):
        config = config.get("text_config", config)  # multimodal models
    if not isinstance(config, dict):
        return None
    layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
    if isinstance(layers, int) and isinstance(hidden, int) and layers > 0 and hidden > 0:
        return ModelDimensions(layers, hidden)
    return None
