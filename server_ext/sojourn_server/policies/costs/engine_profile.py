"""The engine profile: the measured time to rebuild a context on one engine (Continuum §5.2).

``sojourn profile`` measures prefill times and fits a quadratic in the context length to them. The linear term
is the work of the weights on each token, the quadratic term is attention. Policies use
``PrefillCurve.seconds``. The simulator also uses step costs (``step_costs.py``) and the engine's limits.
Profiles of version 1 have neither.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from ..toml_document import TomlError, load_toml
from .step_costs import StepCosts, StepSample, non_negative_least_squares

PROFILE_VERSION = 2

_Number = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A finite number."""
_Cost = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Prefill seconds of n tokens: a + b·n + c·n².

    Since a, b, c are ≥ 0, a longer context never takes less time than a shorter one.
    """

    a_s: float
    b_s_per_token: float
    c_s_per_token2: float

    def seconds(self, tokens: int) -> float:
        """Return the seconds to prefill ``tokens`` tokens on an idle engine; 0.0 for no tokens."""
        if tokens <= 0:
            return 0.0
        return self.a_s + tokens * (self.b_s_per_token + tokens * self.c_s_per_token2)

    @classmethod
    def fit(cls, points: Sequence[tuple[int, float]]) -> PrefillCurve:
        """Fit a curve with coefficients ≥ 0 to ``(tokens, seconds)`` points by least squares.

        The curve is a quadratic if the points have three or more different token counts. With two token
        counts it is a line. With one token count it is a line through 0. Raises ``ValueError`` without
        points.
        """
        lengths = len({tokens for tokens, _ in points})
        if lengths == 0:
            raise ValueError("no prefill points to fit a curve to")
        powers = (0, 1, 2) if lengths >= 3 else (0, 1) if lengths == 2 else (1,)
        # Scale lengths to (0, 1]: squared lengths next to a constant would lose all digits.
        scale = float(max(tokens for tokens, _ in points))
        rows = [[(tokens / scale) ** power for power in powers] for tokens, _ in points]
        found = non_negative_least_squares(rows, [seconds for _, seconds in points])
        scaled = dict(zip(powers, found, strict=True))
        return cls(*(scaled.get(power, 0.0) / scale**power for power in range(3)))

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
    """Measurements of one model on one machine with one engine."""

    model: str
    hardware: str
    engine: str
    block_size: int
    """Tokens in a KV block."""
    prefill: PrefillCurve
    points: tuple[tuple[int, float], ...]
    """Measured (tokens, seconds) that the curve was fitted to."""
    device_to_host_bytes_per_s: float | None = None
    """Bandwidth of copies from the device to host memory; ``None``: not measured."""
    host_to_device_bytes_per_s: float | None = None
    decode_points: tuple[tuple[int, float], ...] = ()
    """Measured (context tokens, seconds per output token); may be empty."""
    measured_at: str = ""
    """ISO 8601, UTC."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of sojourn, the engine and torch."""
    limits: EngineLimits = EngineLimits()
    steps: StepCosts | None = None
    """Costs of a step; ``None`` in profiles of version 1."""
    step_samples: tuple[StepSample, ...] = ()
    """The samples that ``steps`` was fitted to."""

    def to_toml(self) -> str:
        """Return the profile as TOML text, which ``from_toml`` reads. TOML has no null, so values that were
        not measured are left out."""
        named = ("model", "hardware", "engine", "block_size", "measured_at")
        links = ("device_to_host_bytes_per_s", "host_to_device_bytes_per_s")
        steps = {} if self.steps is None else {**self.steps._asdict(), "samples": self.step_samples}
        tables: list[tuple[str, Mapping[str, Any]]] = [
            ("", {"version": PROFILE_VERSION, **{name: getattr(self, name) for name in named}}),
            (
                "[prefill]  # seconds = a_s + b_s_per_token * n + c_s_per_token2 * n * n",
                {**asdict(self.prefill), "points": self.points},
            ),
            ("[decode]  # points: context, seconds a token", {"points": self.decode_points}),
            ("[bandwidth]", {name: getattr(self, name) for name in links}),
            ("[limits]", asdict(self.limits)),
            (f"[steps]  # a step's costs; samples: {', '.join(StepSample._fields)}", steps),
            ("[versions]", {_toml(key): value for key, value in self.versions.items()}),
        ]
        texts = (
            "\n".join(
                (head, *(f"{key} = {_toml(value)}" for key, value in values.items() if value is not None))
            )
            for head, values in tables
            if values
        )
        return "\n\n".join(texts).lstrip() + "\n"

    @classmethod
    def from_toml(cls, text: str) -> EngineProfile:
        """Read a profile from TOML text. Raises ``ValueError``, whose message names the faulty field and the
        reason."""
        try:
            read = msgspec.convert(load_toml(text), _ProfileDocument)
        except (TomlError, msgspec.ValidationError) as error:
            raise ValueError(f"engine profile: {error}") from error
        prefill, steps = read.prefill, read.steps
        named = ("model", "hardware", "engine", "block_size", "measured_at", "versions", "limits")
        return cls(
            **{name: getattr(read, name) for name in named},
            prefill=PrefillCurve(prefill.a_s, prefill.b_s_per_token, prefill.c_s_per_token2),
            points=prefill.points,
            device_to_host_bytes_per_s=read.bandwidth.device_to_host_bytes_per_s,
            host_to_device_bytes_per_s=read.bandwidth.host_to_device_bytes_per_s,
            decode_points=read.decode.points,
            steps=StepCosts(*(getattr(steps, name) for name in StepCosts._fields)) if steps else None,
            step_samples=tuple(StepSample(*row) for row in steps.samples) if steps else (),
        )


# --- TOML ---------------------------------------------------------------------------------------


class _Points(msgspec.Struct, frozen=True):
    points: tuple[tuple[int, _Number], ...] = ()


class _Prefill(msgspec.Struct, frozen=True):
    a_s: _Cost
    b_s_per_token: _Cost
    c_s_per_token2: _Cost
    points: tuple[tuple[int, _Number], ...]


class _Bandwidth(msgspec.Struct, frozen=True):
    device_to_host_bytes_per_s: _Rate | None = None
    host_to_device_bytes_per_s: _Rate | None = None


class _Steps(msgspec.Struct, frozen=True):
    step_s: _Cost
    token_s: _Cost
    pair_s: _Cost
    kv_token_s: _Cost
    request_s: _Cost
    call_s: _Cost
    samples: tuple[tuple[_Number, _Number, _Number, _Number, _Number, _Number, _Number], ...] = ()
    """Rows of ``StepSample``."""


class _ProfileDocument(msgspec.Struct, frozen=True):
    """A profile as TOML data."""

    version: Literal[1, 2]
    model: str
    hardware: str
    engine: str
    measured_at: str
    block_size: _Count
    prefill: _Prefill
    decode: _Points = _Points()
    bandwidth: _Bandwidth = _Bandwidth()
    limits: EngineLimits = EngineLimits()
    versions: dict[str, str] = {}
    steps: _Steps | None = None


def _toml(value: Any) -> str:
    # A JSON value is a valid TOML value, except that TOML requires DEL to be escaped.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return text.replace("], [", "],\n  [") if isinstance(value, list) else text
