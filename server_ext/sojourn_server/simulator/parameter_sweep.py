"""Sweeps of a number of ``RunSpec``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from sojourn_server.policies.toml_document import did_you_mean

from .report.run_row import RunRow
from .simulation_run import DISK_POLICIES_HINT, RunSpec, chosen_policy

SWEEP_FIELDS: dict[str, tuple[str, type, str]] = {
    "cpu_ratio": (
        "host memory for KV, as a multiple of the device's",
        float,
        "host memory, such as lru-offload or continuum+host",
    ),
    "disk_ratio": ("disk for KV, as a multiple of the device's memory", float, DISK_POLICIES_HINT),
    "pool_tokens": ("KV tokens on the device", int, ""),
    "programs": ("programs at once, or arrivals in all", int, ""),
    "rate_per_s": ("programs arriving a second", float, ""),
    "tp": ("tensor parallel devices", int, ""),
    "replicas": ("replicas behind a gateway", int, ""),
}
"""Fields of ``RunSpec`` that can be swept → meaning with unit, type, and what a policy needs for the field to
have an effect on it. Only a field that needs something may be 0."""


class SweepError(ValueError):
    """Invalid sweep; the message says what is wrong and what is expected."""


class ParameterSweep(msgspec.Struct, frozen=True):
    """A field of ``RunSpec``, and the values that it takes, in the given order."""

    field: str
    meaning: str
    values: tuple[float, ...]

    def specs(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """All of ``specs`` with the first value, then all of them with the second, and so on.

        If a policy does not use the field, the field is 0 in all its specifications: they are equal, and
        ``run_suite`` runs one of them. Raises ``SweepError`` if no policy uses it, and ``PolicyError``.
        """
        if not any(map(self._affects, specs)):
            named = ", ".join(spec.policy for spec in specs)
            raise SweepError(
                f"--sweep {self.field} changes nothing for {named}; "
                f"expected a policy with {SWEEP_FIELDS[self.field][2]}"
            )

        def changed(spec: RunSpec, value: float) -> RunSpec:
            change: dict[str, Any] = {self.field: value if self._affects(spec) else 0.0}
            return replace(spec, **change)

        return [changed(spec, value) for value in self.values for spec in specs]

    def groups(self, rows: Sequence[RunRow]) -> list[Sequence[RunRow]]:
        """The rows of each value. ``rows`` are the results of the specifications that ``specs`` returned."""
        size = len(rows) // len(self.values)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _affects(self, spec: RunSpec) -> bool:
        policy = chosen_policy(spec)
        used = {"cpu_ratio": policy.uses_cpu_ratio, "disk_ratio": policy.own_tiers}
        return used.get(self.field, True)


def read_sweep(text: str) -> ParameterSweep:
    """Parse ``NAME=V1,V2,…``. Raises ``SweepError`` naming the invalid part."""
    name, _, listed = text.partition("=")
    name = name.strip()
    if name not in SWEEP_FIELDS:
        hint = did_you_mean(name, SWEEP_FIELDS)
        raise SweepError(
            f"--sweep {text}: cannot sweep {name!r}; expected one of {', '.join(SWEEP_FIELDS)}{hint}"
        )
    meaning, kind, needs = SWEEP_FIELDS[name]
    values: list[float] = []
    for part in listed.split(","):
        try:
            value = kind(part)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf or (value == 0 and not needs) or value in values:
            number = "a whole number" if kind is int else "a finite number"
            expected = f"{number} {'of 0 or more' if needs else 'above 0'}"
            raise SweepError(f"--sweep {text}: {part.strip()!r} is not {expected}, each once")
        values.append(abs(value))  # abs() turns -0 into 0
    return ParameterSweep(name, meaning, tuple(values))
