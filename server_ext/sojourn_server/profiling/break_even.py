"""From which context on copying KV out and in again is faster than computing it (Tetris §2.1)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from sojourn_server.policy.costs import EngineProfile
from sojourn_server.policy.recovery import break_even_tokens, measured_break_even_tokens

from .compute import Compute


class Dimensions(NamedTuple):
    """What the closed form asks for of a decoder-only model."""

    layers: int
    hidden: int


class Threshold(NamedTuple):
    """A context in tokens."""

    tokens: float | None
    """0 or less: copying is always faster; ``inf``: never; ``None``: not known."""
    why: str = ""
    """It is not known."""

    def words(self, longest: int) -> str:
        """For people; ``longest`` is the longest context that was measured."""
        if self.tokens is None:
            return f"not known, {self.why}"
        if self.tokens <= 0:
            return "always"
        if self.tokens == math.inf:
            return "never"
        beyond = f", beyond the {longest:,} measured" if self.tokens > longest else ""
        return f"from {math.ceil(self.tokens):,} tokens on{beyond}"

    def as_json(self) -> dict[str, Any]:
        """``faster`` is ``always``, ``from``, ``never`` or ``not known``; JSON has no infinity."""
        if self.tokens is None:
            return {"faster": "not known", "tokens": None, "why": self.why}
        if self.tokens == math.inf:
            return {"faster": "never", "tokens": None}
        return {"faster": "from" if self.tokens > 0 else "always", "tokens": max(0.0, self.tokens)}


class BreakEven(NamedTuple):
    """Two answers to the one question, and what they were made from."""

    measured: Threshold
    """By the prefill curve and the copies that were measured."""
    closed_form: Threshold
    """By the model's dimensions, this machine's operations a second and the same copies."""
    copy_s_per_token: float | None
    """To copy a token's KV out and in again."""
    flops_per_s: float | None
    dimensions: Dimensions | None

    def as_json(self) -> dict[str, Any]:
        """A plain document."""
        return {
            "measured": self.measured.as_json(),
            "closed_form": self.closed_form.as_json(),
            "copy_s_per_token": self.copy_s_per_token,
            "flops_per_s": self.flops_per_s,
            "layers": self.dimensions.layers if self.dimensions else None,
            "hidden_size": self.dimensions.hidden if self.dimensions else None,
        }


def break_even(profile: EngineProfile, dimensions: Dimensions | None, compute: Compute) -> BreakEven:
    """Whatever ``profile`` lets be known; never raises."""
    kv_bytes = profile.limits.kv_bytes_per_token
    down, up = profile.device_to_host_bytes_per_s, profile.host_to_device_bytes_per_s
    if not (kv_bytes and down and up):
        why = "no copies were measured"
        if not kv_bytes:
            why = "the server doesn't tell the bytes of a token's KV (say them: --kv-bytes-per-token)"
        unknown = Threshold(None, why)
        return BreakEven(unknown, unknown, None, compute.flops_per_s, dimensions)
    copy_s = kv_bytes / down + kv_bytes / up
    curve = profile.prefill
    measured = measured_break_even_tokens(curve.a_s, curve.b_s_per_token, curve.c_s_per_token2, copy_s)
    if dimensions is None:
        closed = Threshold(None, "the model has no config.json here (say: --layers, --hidden-size)")
    elif compute.flops_per_s is None:
        closed = Threshold(None, compute.reason)
    else:
        closed = Threshold(
            break_even_tokens(
                layers=dimensions.layers,
                hidden=dimensions.hidden,
                kv_bytes_per_token=kv_bytes,
                flops_per_s=compute.flops_per_s,
                link_bytes_per_s=2 * kv_bytes / copy_s,  # the form has one speed for both ways
            )
        )
    return BreakEven(Threshold(measured), closed, copy_s, compute.flops_per_s, dimensions)


def read_dimensions(root: str | None) -> Dimensions | None:
    """From the ``config.json`` of a model's folder on this machine; ``None`` where none can be read."""
    if root is None:
        return None
    try:
        config = json.loads((Path(root) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if isinstance(config, dict):
        config = config.get("text_config", config)  # of a model that sees or hears too
    if not isinstance(config, dict):
        return None
    layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
    if isinstance(layers, int) and isinstance(hidden, int) and layers > 0 and hidden > 0:
        return Dimensions(layers, hidden)
    return None
