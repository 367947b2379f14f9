"""The engine profile: the measured time to rebuild a context on one engine (Continuum §5.2).

``sojourn profile`` measures prefill times and fits a quadratic in the context length to them. The linear term
is the work of the weights on each token, the quadratic term is attention. Policies use
``PrefillCurve.seconds``. The simulator also uses step costs (``step_costs.py``) and the engine's limits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from ..toml_document import load_toml
from .step_costs import MAX_FLOAT, Cost, StepCosts, StepSample

PROFILE_VERSION = 3
_Rate = Annotated[float, msgspec.Meta(gt=0, le=MAX_FLOAT)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Prefill seconds of n tokens: a + b·n + c·n².

    Since a, b, c are ≥ 0, a longer context never takes less time than a shorter one.
    """

    a_s: Cost
    b_s_per_token: Cost
    c_s_per_token2: Cost

    def seconds(self, tokens: int) -> float:
        """Return the seconds to prefill ``tokens`` tokens on an idle engine; 0.0 for no tokens."""
        if tokens <= 0:
            return 0.0
        return self.a_s + tokens * (self.b_s_per_token + tokens * self.c_s_per_token2)

    def residual(self, points: Sequence[tuple[int, float]]) -> float:
        """Return the root mean square of the differences between measured and fitted seconds; 0.0 without
        points."""
        squares = math.fsum((seconds - self.seconds(tokens)) ** 2 for tokens, seconds in points)
        return math.sqrt(squares / max(1, len(points)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of the measured engine; ``None``: unknown."""

    kv_pool_tokens: _Count | None = None
    """Tokens of KV that fit on the device."""
    max_context_tokens: _Count | None = None
    max_num_seqs: _Count | None = None
    max_num_batched_tokens: _Count | None = None
    """Maximum tokens per step; longer prefills take several steps."""
    kv_bytes_per_token: _Count | None = None


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Measurements of one model on one machine with one engine. The file has the same names."""

    model: str
    hardware: str
    engine: str
    block_size: _Count
    """Tokens in a KV block."""
    prefill: PrefillCurve
    points: tuple[tuple[int, Cost], ...]
    """Measured (tokens, seconds) that the curve was fitted to."""
    device_to_host_bytes_per_s: _Rate | None = None
    """Bandwidth of copies from the device to host memory; ``None``: not measured."""
    host_to_device_bytes_per_s: _Rate | None = None
    decode_points: tuple[tuple[int, Cost], ...] = ()
    """Measured (context tokens, seconds per output token); may be empty."""
    measured_at: str = ""
    """ISO 8601, UTC."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of sojourn, the engine and torch."""
    limits: EngineLimits = EngineLimits()
    steps: StepCosts | None = None
    """Costs of a step; ``None``: decoding was not measured."""
    step_samples: tuple[StepSample, ...] = ()
    """The samples that ``steps`` was fitted to."""

    def to_toml(self) -> str:
        """Return the profile as TOML text, which ``from_toml`` reads. TOML has no null, so values that were
        not measured are left out."""
        document = {"version": PROFILE_VERSION, **msgspec.to_builtins(self)}
        tables = {name: value for name, value in document.items() if isinstance(value, dict)}
        lines = _lines({name: value for name, value in document.items() if name not in tables})
        for name, table in tables.items():
            lines += ["", f"[{name}]{_COMMENTS.get(name, '')}", *_lines(table)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str) -> EngineProfile:
        """Read a profile from TOML text. Raises ``ValueError``, whose message names the faulty field and the
        reason."""
        try:
            document = load_toml(text)
            version = document.pop("version", None)
            if version != PROFILE_VERSION:
                raise ValueError(f"version {version}; expected {PROFILE_VERSION}: run sojourn profile again")
            return msgspec.convert(document, cls)
        except (ValueError, msgspec.ValidationError) as error:
            raise ValueError(f"engine profile: {error}") from error


_COMMENTS = {
    "prefill": "  # seconds = a_s + b_s_per_token * n + c_s_per_token2 * n * n",
    "decode_points": "  # context, seconds a token",
    "steps": f"  # {', '.join(StepCosts._fields)}",
    "step_samples": f"  # {', '.join(StepSample._fields)}",
}


def _lines(values: dict[str, Any]) -> list[str]:
    known = {key: value for key, value in values.items() if value is not None}
    return [f"{_key(key)} = {_toml(value)}{_COMMENTS.get(key, '')}" for key, value in known.items()]


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else _toml(name)


def _toml(value: Any) -> str:
    # A JSON value is a valid TOML value, except that TOML requires DEL to be escaped.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return text.replace("], [", "],\n  [") if isinstance(value, tuple) else text
