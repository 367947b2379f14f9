"""Parameter sweeps: runs with several values of one parameter, each under every policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sojourn_server.policies.custom_policies import did_you_mean

from .simulation_run import DISK_POLICIES_HINT, RunSpec, device_for_run, engine_policy

HOST_MEMORY_POLICIES_HINT = "host memory, such as lru-offload or continuum+host"
"""Part of an error message: which policies use host memory."""


class SweepError(ValueError):
    """Invalid sweep; the message says what is wrong and what is expected."""


class SweepParameter(NamedTuple):
    """A field of ``RunSpec`` that can be swept."""

    name: str
    option: str
    """Name of the option of ``sojourn simulate`` that sets the field to a single value."""
    meaning: str
    """Axis label, with unit."""
    whole: bool = False
    """Whether only integers are allowed."""
    zero: bool = False
    """Whether 0 is allowed."""

    @property
    def expected(self) -> str:
        """Description of a valid value, for error messages."""
        number = "a whole number" if self.whole else "a finite number"
        return f"{number} of 0 or more" if self.zero else f"{number} above 0"


HOST_MEMORY = SweepParameter(
    "cpu_ratio", "cpu_ratio", "host memory for KV, as a multiple of the device's", zero=True
)
DISK = SweepParameter(
    "disk_ratio", "disk_ratio", "disk for KV, as a multiple of the device's memory", zero=True
)
SWEEP_PARAMETERS = {
    field.name: field
    for field in (
        HOST_MEMORY,
        DISK,
        SweepParameter("pool_tokens", "pool_tokens", "KV tokens on the device", whole=True),
        SweepParameter("programs", "programs", "programs at once, or arrivals in all", whole=True),
        SweepParameter("rate_per_s", "rate", "programs arriving a second"),
        SweepParameter("tp", "tp", "tensor parallel devices", whole=True),
        SweepParameter("replicas", "replicas", "replicas behind a gateway", whole=True),
    )
}
"""Fields that can be swept, by name. A larger value means more hardware or more load."""


@dataclass(frozen=True, slots=True)
class ParameterSweep:
    """A field of ``RunSpec``, and the values that it takes, in the given order."""

    field: SweepParameter
    values: tuple[float, ...]

    def specs(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """The specifications of the sweep: all of ``specs`` with the first value, then all of them with the
        second, and so on.

        If a policy does not use the field, the field is 0 in all specifications of this policy. They are then
        equal, and ``run_suite`` runs only one of them. Raises ``SweepError`` if no policy uses the field, and
        ``PolicyError`` for an unknown policy.
        """
        if not any(self._affects(spec) for spec in specs):
            named = ", ".join(spec.policy for spec in specs)
            hint = DISK_POLICIES_HINT if self.field is DISK else HOST_MEMORY_POLICIES_HINT
            raise SweepError(f"{self.field.name} changes nothing for {named}; expected a policy with {hint}")
        return [self._at(spec, value) for value in self.values for spec in specs]

    def label(self, spec: RunSpec) -> str:
        """Name of a run in progress bars: the policy, and the swept value if the policy uses the field."""
        if not self._affects(spec):
            return spec.policy
        return f"{spec.policy} @ {self.field.name} {getattr(spec, self.field.name):g}"

    def _at(self, spec: RunSpec, value: float) -> RunSpec:
        changed: dict[str, Any] = {self.field.name: value if self._affects(spec) else 0.0}
        return replace(spec, **changed)

    def _affects(self, spec: RunSpec) -> bool:
        if self.field == HOST_MEMORY:
            return engine_policy(spec).uses_cpu_ratio
        return self.field != DISK or engine_policy(spec).own_tiers


def read_sweep(text: str) -> ParameterSweep:
    """Parse ``NAME=V1,V2,…``. Raises ``SweepError`` naming the invalid part."""
    name, equals, listed = text.partition("=")
    name = name.strip()
    field = SWEEP_PARAMETERS.get(name)
    if field is None:
        hint = did_you_mean(name, SWEEP_PARAMETERS)
        raise SweepError(
            f"{text}: cannot sweep {name!r}; expected one of {', '.join(SWEEP_PARAMETERS)}{hint}"
        )
    if not equals:
        raise SweepError(f"{text}: no values; expected {name}=V1,V2,…")
    values: list[float] = []
    for part in listed.split(","):
        value = _parse_number(part, field)
        if value is None:
            raise SweepError(f"{text}: {part.strip()!r} is not {field.expected}")
        if value in values:
            raise SweepError(f"{text}: {part.strip()!r} is repeated")
        values.append(value)
    return ParameterSweep(field, tuple(values))


def kv_bytes_per_token(spec: RunSpec) -> int | None:
    """KV bytes of a token, over all devices of one engine; ``None`` if the engine profile does not state
    them. Raises ``LatencyProfileError``."""
    # With cpu_ratio 0 an engine profile needs no copy bandwidth.
    _, shape = device_for_run(spec, cpu_ratio=0.0)
    return shape.kv_bytes_per_token or None


def _parse_number(text: str, field: SweepParameter) -> float | None:
    try:
        value = int(text) if field.whole else float(text)
    except ValueError:
        return None
    if not 0 <= value < math.inf or (value == 0 and not field.zero):
        return None
    return abs(value)  # abs() turns -0 into 0
