"""The engine profile: the measured time to rebuild a context on one engine (Continuum §5.2).

``sojourn profile`` measures prefill times and fits a quadratic in the context length to them. The linear term
is the work of the weights on each token, the quadratic term is attention. Policies use
``PrefillCurve.seconds``. The simulator also uses step costs (``step_costs.py``) and the engine's limits.
Profiles of version 1 have neither.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..toml_document import TomlError, load_toml
from .least_squares import non_negative_least_squares
from .step_costs import StepCosts, StepSample

PROFILE_VERSION = 2
READABLE_VERSIONS = (1, 2)


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Prefill seconds of n tokens: a + b·n + c·n².

    Since a, b, c are ≥ 0, a longer context never takes less time than a shorter one. Raises ``ValueError`` if
    a, b or c is negative or not finite.
    """

    a_s: float
    b_s_per_token: float
    c_s_per_token2: float

    def __post_init__(self) -> None:
        for name in ("a_s", "b_s_per_token", "c_s_per_token2"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"prefill curve: {name} is {value}; expected a finite number ≥ 0")

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
        points, for tokens ≤ 0, or for seconds that are negative or not finite.
        """
        for tokens, seconds in points:
            if tokens <= 0 or not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"prefill point ({tokens}, {seconds}); expected tokens > 0 and seconds ≥ 0")
        lengths = len({tokens for tokens, _ in points})
        if lengths == 0:
            raise ValueError("no prefill points to fit a curve to")
        powers = (0, 1, 2) if lengths >= 3 else (0, 1) if lengths == 2 else (1,)
        # Scale lengths to (0, 1]: squared lengths next to a constant would lose all digits.
        scale = float(max(tokens for tokens, _ in points))
        rows = [[(tokens / scale) ** power for power in powers] for tokens, _ in points]
        coefficients = [0.0, 0.0, 0.0]
        found = non_negative_least_squares(rows, [seconds for _, seconds in points])
        for power, value in zip(powers, found, strict=True):
            coefficients[power] = value / scale**power
        return cls(*coefficients)

    def residual(self, points: Sequence[tuple[int, float]]) -> float:
        """Return the root mean square of the differences between measured and fitted seconds; 0.0 without
        points."""
        if not points:
            return 0.0
        squares = math.fsum((seconds - self.seconds(tokens)) ** 2 for tokens, seconds in points)
        return math.sqrt(squares / len(points))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of the measured engine; ``None``: unknown."""

    kv_pool_tokens: int | None = None
    """Tokens of KV that fit on the device."""
    max_context_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    """Maximum tokens per step; longer prefills take several steps."""
    kv_bytes_per_token: int | None = None


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
        """Return the profile as TOML text, which ``from_toml`` reads."""
        lines = [
            f"version = {PROFILE_VERSION}",
            f"model = {_text(self.model)}",
            f"hardware = {_text(self.hardware)}",
            f"engine = {_text(self.engine)}",
            f"block_size = {self.block_size}",
            f"measured_at = {_text(self.measured_at)}",
            "",
            "[prefill]  # seconds = a_s + b_s_per_token * n + c_s_per_token2 * n * n",
            f"a_s = {_float(self.prefill.a_s)}",
            f"b_s_per_token = {_float(self.prefill.b_s_per_token)}",
            f"c_s_per_token2 = {_float(self.prefill.c_s_per_token2)}",
            f"points = {_points(self.points)}  # [tokens, seconds]",
        ]
        if self.decode_points:
            lines += ["", "[decode]", f"points = {_points(self.decode_points)}  # [context, seconds a token]"]
        bandwidths = [
            f"{name} = {_float(value)}"
            for name in ("device_to_host_bytes_per_s", "host_to_device_bytes_per_s")
            if (value := getattr(self, name)) is not None
        ]
        # TOML has no null, so values that were not measured are left out.
        lines += ["", "[bandwidth]", *bandwidths]
        limits = [
            f"{known.name} = {value}"
            for known in fields(EngineLimits)
            if (value := getattr(self.limits, known.name)) is not None
        ]
        lines += ["", "[limits]", *limits]
        if self.steps is not None:
            samples = ",\n".join(
                f"  [{', '.join(_short(v) for v in sample)}]" for sample in self.step_samples
            )
            lines += [
                "",
                "[steps]  # seconds = the sum of each cost times its amount",
                *(f"{name} = {_float(value)}" for name, value in self.steps._asdict().items()),
                f"samples = [  # {', '.join(StepSample._fields)}",
                *([samples] if samples else []),
                "]",
            ]
        lines += ["", "[versions]", *(f"{_text(k)} = {_text(v)}" for k, v in self.versions.items())]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str) -> EngineProfile:
        """Read a profile from TOML text. Raises ``ValueError``, whose message names the faulty field and the
        reason."""
        try:
            document = load_toml(text)
        except TomlError as error:
            raise ValueError(f"engine profile: {error}") from error
        version = document.get("version")
        if version not in READABLE_VERSIONS or isinstance(version, bool):
            known = " or ".join(str(readable) for readable in READABLE_VERSIONS)
            raise ValueError(f"engine profile: version is {version!r:.200}; expected {known}")
        prefill = _section(document, "prefill")
        bandwidth = _section(document, "bandwidth", {})
        versions = _section(document, "versions", {})
        block_size = document.get("block_size")
        if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
            raise ValueError(f"engine profile: block_size is {block_size!r:.200}; expected tokens ≥ 1")
        return cls(
            model=_string(document, "model"),
            hardware=_string(document, "hardware"),
            engine=_string(document, "engine"),
            block_size=block_size,
            prefill=PrefillCurve(
                *(_number(prefill, "prefill", n) for n in ("a_s", "b_s_per_token", "c_s_per_token2"))
            ),
            points=_pairs(prefill, "prefill"),
            device_to_host_bytes_per_s=_rate(bandwidth, "device_to_host_bytes_per_s"),
            host_to_device_bytes_per_s=_rate(bandwidth, "host_to_device_bytes_per_s"),
            decode_points=_pairs(_section(document, "decode", {"points": []}), "decode"),
            measured_at=_string(document, "measured_at"),
            versions={str(name): str(value) for name, value in versions.items()},
            limits=_limits(_section(document, "limits", {})),
            **_steps(document),
        )


# --- TOML ---------------------------------------------------------------------------------------


def _text(value: str) -> str:
    # A JSON string is a valid TOML basic string, except that TOML requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _float(value: float) -> str:
    return repr(float(value))


def _short(value: float) -> str:
    return str(int(value)) if value == int(value) else _float(value)


def _points(points: Sequence[tuple[int, float]]) -> str:
    return "[" + ", ".join(f"[{tokens}, {_float(seconds)}]" for tokens, seconds in points) + "]"


def _section(document: Mapping[str, Any], name: str, default: Any = None) -> Mapping[str, Any]:
    section = document.get(name, default)
    if not isinstance(section, Mapping):
        raise ValueError(f"engine profile: section [{name}] is missing or not a table")
    return section


def _string(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str):
        raise ValueError(f"engine profile: {name} is {value!r:.200}; expected a string")
    return value


def _number(section: Mapping[str, Any], where: str, name: str) -> float:
    value = section.get(name)
    if value is None or not _is_number(value):
        raise ValueError(f"engine profile: {where}.{name} is {value!r:.200}; expected a number")
    return float(value)


def _rate(section: Mapping[str, Any], name: str) -> float | None:
    if name not in section:
        return None
    value = _number(section, "bandwidth", name)
    if value <= 0:
        raise ValueError(f"engine profile: bandwidth.{name} is {value}; expected bytes per second > 0")
    return value


def _pairs(section: Mapping[str, Any], where: str) -> tuple[tuple[int, float], ...]:
    points = section.get("points")
    pairs: list[tuple[int, float]] = []
    for point in points if isinstance(points, list) else [None]:
        if not (
            isinstance(point, list) and len(point) == 2 and isinstance(point[0], int) and _is_number(point[1])
        ):
            raise ValueError(
                f"engine profile: {where}.points holds {point!r:.200}; expected [tokens, seconds]"
            )
        pairs.append((point[0], float(point[1])))
    return tuple(pairs)


def _limits(section: Mapping[str, Any]) -> EngineLimits:
    for name in section:
        if name not in {known.name for known in fields(EngineLimits)}:
            raise ValueError(f"engine profile: limits.{name:.200} is unknown")
    for name, value in section.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"engine profile: limits.{name} is {value!r:.200}; expected a whole number ≥ 1")
    return EngineLimits(**section)


def _steps(document: Mapping[str, Any]) -> dict[str, Any]:
    if "steps" not in document:
        return {}
    section = _section(document, "steps")
    costs = StepCosts(*(_number(section, "steps", name) for name in StepCosts._fields))
    for name, cost in costs._asdict().items():
        if cost < 0:
            raise ValueError(f"engine profile: steps.{name} is {cost}; expected a number ≥ 0")
    rows = section.get("samples", [])
    samples: list[StepSample] = []
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, list) or len(row) != len(StepSample._fields) or not all(map(_is_number, row)):
            raise ValueError(
                f"engine profile: steps.samples holds {row!r:.200}; "
                f"expected [{', '.join(StepSample._fields)}]"
            )
        samples.append(StepSample(*map(float, row)))
    return {"steps": costs, "step_samples": tuple(samples)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
