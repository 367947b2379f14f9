"""What rebuilding a context costs on one engine: the offline profile (Continuum §5.2).

Prefill time over context length is fitted by a quadratic: the linear part is
the weights' work per token, the quadratic one attention. ``sojourn profile``
measures the points; policies only ask ``PrefillCurve.seconds``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROFILE_VERSION = 1


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Seconds of prefill as a + b·n + c·n² of n tokens. Coefficients must be finite and ≥ 0.

    That makes the curve non-negative and non-decreasing: a longer context is
    never cheaper. Raises ``ValueError`` otherwise.
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
        """Seconds to prefill ``tokens`` tokens on an idle engine; 0.0 for none."""
        if tokens <= 0:
            return 0.0
        return self.a_s + tokens * (self.b_s_per_token + tokens * self.c_s_per_token2)

    @classmethod
    def fit(cls, points: Sequence[tuple[int, float]]) -> PrefillCurve:
        """Least squares through ``(tokens, seconds)`` points with all coefficients ≥ 0.

        Three different lengths give a quadratic, two a line, one a
        proportionality. Raises ``ValueError`` for no point, or one that is not
        positive tokens and finite seconds ≥ 0.
        """
        for tokens, seconds in points:
            if tokens <= 0 or not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"prefill point ({tokens}, {seconds}); expected tokens > 0 and seconds ≥ 0")
        lengths = len({tokens for tokens, _ in points})
        if lengths == 0:
            raise ValueError("no prefill points to fit a curve to")
        # With so few unknowns, non-negative least squares is best done by trying every subset
        # of them: the best fit whose coefficients all come out ≥ 0 is the constrained optimum.
        powers = (0, 1, 2) if lengths >= 3 else (0, 1) if lengths == 2 else (1,)
        best: tuple[float, list[float]] | None = None
        for subset in _subsets(powers):
            found = _least_squares(points, subset)
            if found is None or min(found) < 0:
                continue
            coefficients = [0.0, 0.0, 0.0]
            for power, value in zip(subset, found, strict=True):
                coefficients[power] = value
            error = _squared_error(points, coefficients)
            if best is None or error < best[0]:
                best = error, coefficients
        if best is None:  # only points of (tiny) zero seconds get here by rounding
            return cls(0.0, 0.0, 0.0)
        return cls(*best[1])

    def residual(self, points: Sequence[tuple[int, float]]) -> float:
        """Root mean square of measured minus fitted, in seconds; 0.0 of no points."""
        if not points:
            return 0.0
        squares = math.fsum((seconds - self.seconds(tokens)) ** 2 for tokens, seconds in points)
        return math.sqrt(squares / len(points))


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What was measured of one model on one machine with one engine."""

    model: str
    hardware: str
    engine: str
    block_size: int
    """Tokens in a KV block."""
    prefill: PrefillCurve
    points: tuple[tuple[int, float], ...]
    """Measured (tokens, seconds) the curve was fitted to."""
    device_to_host_bytes_per_s: float | None = None
    """``None``: not measured."""
    host_to_device_bytes_per_s: float | None = None
    decode_points: tuple[tuple[int, float], ...] = ()
    """Measured (context tokens, seconds for each output token); may be empty."""
    measured_at: str = ""
    """ISO 8601, UTC."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of sojourn, the engine, torch: whatever the numbers depend on."""

    def reload_seconds(self, tokens: int, kv_bytes: int = 0, *, offloaded: bool = False) -> float:
        """PrefillReload(r): seconds to bring a context of ``tokens`` back (Continuum §4.1).

        From host memory where the ``kv_bytes`` are ``offloaded`` and the
        bandwidth is known, if that is faster; else by computing it again.
        """
        recompute_s = self.prefill.seconds(tokens)
        if offloaded and self.host_to_device_bytes_per_s:
            return min(recompute_s, kv_bytes / self.host_to_device_bytes_per_s)
        return recompute_s

    def to_toml(self) -> str:
        """The profile as TOML text that ``from_toml`` reads back to an equal one."""
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
        # TOML has no null: what was not measured is not there.
        lines += ["", "[bandwidth]", *bandwidths]
        lines += ["", "[versions]", *(f"{_text(k)} = {_text(v)}" for k, v in self.versions.items())]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str) -> EngineProfile:
        """Read a profile. Raises ``ValueError`` that names the field and what was wrong with it."""
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"engine profile: not TOML: {error}") from error
        version = document.get("version")
        if version != PROFILE_VERSION:
            raise ValueError(f"engine profile: version is {version!r}; expected {PROFILE_VERSION}")
        prefill = _section(document, "prefill")
        bandwidth = _section(document, "bandwidth", {})
        versions = _section(document, "versions", {})
        block_size = document.get("block_size")
        if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
            raise ValueError(f"engine profile: block_size is {block_size!r}; expected tokens ≥ 1")
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
        )


# --- fitting ------------------------------------------------------------------------------------


def _subsets(powers: tuple[int, ...]) -> list[tuple[int, ...]]:
    count = len(powers)
    return [tuple(p for i, p in enumerate(powers) if mask >> i & 1) for mask in range(1, 1 << count)]


def _least_squares(points: Sequence[tuple[int, float]], powers: tuple[int, ...]) -> list[float] | None:
    """Coefficients of the given powers by the normal equations, ``None`` where they are singular."""
    # Lengths are scaled to (0, 1]; with 128k tokens to the fourth power the equations would lose all digits.
    scale = max(tokens for tokens, _ in points)
    rows = [[(tokens / scale) ** power for power in powers] for tokens, _ in points]
    size = len(powers)
    matrix = [
        [math.fsum(row[i] * row[j] for row in rows) for j in range(size)]
        + [math.fsum(row[i] * seconds for row, (_, seconds) in zip(rows, points, strict=True))]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(matrix[r][column]))
        if abs(matrix[pivot][column]) < 1e-12:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [x - factor * y for x, y in zip(matrix[row], matrix[column], strict=True)]
    return [
        matrix[i][size] / matrix[i][i] / float(scale) ** power
        for i, power in zip(range(size), powers, strict=True)
    ]


def _squared_error(points: Sequence[tuple[int, float]], coefficients: Sequence[float]) -> float:
    a, b, c = coefficients
    return math.fsum((seconds - (a + tokens * (b + tokens * c))) ** 2 for tokens, seconds in points)


# --- TOML ---------------------------------------------------------------------------------------


def _text(value: str) -> str:
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _float(value: float) -> str:
    return repr(float(value))


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
        raise ValueError(f"engine profile: {name} is {value!r}; expected a string")
    return value


def _number(section: Mapping[str, Any], where: str, name: str) -> float:
    value = section.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"engine profile: {where}.{name} is {value!r}; expected a number")
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
            isinstance(point, list)
            and len(point) == 2
            and isinstance(point[0], int)
            and isinstance(point[1], (int, float))
        ):
            raise ValueError(f"engine profile: {where}.points holds {point!r}; expected [tokens, seconds]")
        pairs.append((point[0], float(point[1])))
    return tuple(pairs)
