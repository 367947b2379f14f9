"""The first line of a recording: everything that a scheduler is built from."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import msgspec

from ..core.scheduler_state import Histories, KVPoolConfig, SchedulerLimits
from ..policies.costs.engine_profile import PrefillCurve
from ..policies.preset import parse_preset
from ..programs.execution_history import SlidingMean, ToolHistory, TurnHistory
from ..programs.output_lengths import HintErrors, OutputLengthHistory
from ..programs.workflow_history import WorkflowHistory
from .call_recorder import RecordSink
from .recording_scheduler import RecordingScheduler

RECORDING_VERSION = 7
"""7: one record an event, with the actions that it led to. Older recordings are replayed by the version of
sojourn that wrote them."""


class RecordingHeader(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the recorded scheduler was built from, before its first event."""

    sojourn_tape: int = RECORDING_VERSION
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
        pool: KVPoolConfig,
        limits: SchedulerLimits,
        curve: PrefillCurve | None,
        histories: Histories,
        versions: dict[str, str],
    ) -> RecordingHeader:
        """The header for a scheduler built from these, as they are now."""
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

    def program_scheduler(self, sink: RecordSink) -> RecordingScheduler:
        """A scheduler like the recorded one. Raises ``ValueError`` or ``TypeError`` for invalid fields."""
        return RecordingScheduler(
            sink,
            parse_preset(self.preset_toml, source=self.preset_source),
            KVPoolConfig(**self.pool),
            limits=SchedulerLimits(**self.limits),
            curve=PrefillCurve(*self.curve) if self.curve is not None else None,
            histories=Histories(
                tools=ToolHistory.restore(self.tools),
                turns=TurnHistory.restore(self.turns),
                evicted_waits=_mean_of(self.evicted_waits),
                growth_tokens=_mean_of(self.growth_tokens),
                workflows=WorkflowHistory.restore(self.workflows),
                output_lengths=OutputLengthHistory.restore(self.output_lengths),
                hints_off=HintErrors.restore(self.hints_off),
            ),
        )


def _mean_of(values: list[float]) -> SlidingMean:
    mean = SlidingMean()
    for value in values:
        mean.observe(value)
    return mean
