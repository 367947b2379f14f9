"""The first line of a tape: all that a steward is built from."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import msgspec

from ...policy.costs import PrefillCurve
from ...policy.preset import parse_preset
from ...program.history import SlidingMean, ToolHistory, TurnHistory
from ...program.output_lengths import HintErrors, OutputLengths
from ...program.workflows import Workflows
from ..state import Histories, Pool, StewardLimits
from .recording import Sink
from .steward import TapingSteward

TAPE_VERSION = 6


class Header(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the steward of a tape was built from, before it was told anything."""

    sojourn_tape: int = TAPE_VERSION
    versions: dict[str, str]
    """Of sojourn, the engine and Python."""
    preset_toml: str
    preset_source: str
    """What the TOML came from, for messages."""
    pool: dict[str, Any]
    limits: dict[str, Any]
    curve: tuple[float, float, float] | None
    """Coefficients of the prefill curve; None where the price of prefill was learned while serving."""
    tools: dict[str, Any]
    turns: dict[str, Any]
    evicted_waits: list[float]
    growth_tokens: list[float]
    workflows: dict[str, Any]
    output_lengths: dict[str, Any]
    hints_off: dict[str, list[float]]

    @classmethod
    def of(
        cls,
        *,
        preset_toml: str,
        preset_source: str,
        pool: Pool,
        limits: StewardLimits,
        curve: PrefillCurve | None,
        histories: Histories,
        versions: dict[str, str],
    ) -> Header:
        """The header for a steward built from these, as they are now."""
        return cls(
            versions={"sojourn": version("sojourn"), "python": platform.python_version(), **versions},
            preset_toml=preset_toml,
            preset_source=preset_source,
            pool=asdict(pool),
            limits=asdict(limits),
            curve=(curve.a_s, curve.b_s_per_token, curve.c_s_per_token2) if curve is not None else None,
            tools=histories.tools.snapshot(),
            turns=histories.turns.snapshot(),
            evicted_waits=histories.evicted_waits.values(),
            growth_tokens=histories.growth_tokens.values(),
            workflows=histories.workflows.snapshot(),
            output_lengths=histories.output_lengths.snapshot(),
            hints_off=histories.hints_off.snapshot(),
        )

    def steward(self, sink: Sink) -> TapingSteward:
        """A steward like the one that was recorded. Raises ``ValueError`` or ``TypeError`` for nonsense."""
        return TapingSteward(
            sink,
            parse_preset(self.preset_toml, source=self.preset_source),
            Pool(**self.pool),
            limits=StewardLimits(**self.limits),
            curve=PrefillCurve(*self.curve) if self.curve is not None else None,
            histories=Histories(
                tools=ToolHistory.restore(self.tools),
                turns=TurnHistory.restore(self.turns),
                evicted_waits=_mean_of(self.evicted_waits),
                growth_tokens=_mean_of(self.growth_tokens),
                workflows=Workflows.restore(self.workflows),
                output_lengths=OutputLengths.restore(self.output_lengths),
                hints_off=HintErrors.restore(self.hints_off),
            ),
        )


def _mean_of(values: list[float]) -> SlidingMean:
    mean = SlidingMean()
    for value in values:
        mean.observe(value)
    return mean
