"""The gaps between a program's turns: from the end of its output until its next request arrives.

A gap is what its tools take. Where no client reports that, its length is learned instead.
"""

from __future__ import annotations

from ..metrics.metrics_recorder import MetricsRecorder
from ..programs.program_state import ProgramState
from .events_and_actions import TurnFinished
from .scheduler_state import Histories


class TurnGaps:
    """Opens and closes the gaps of one engine's programs. Times are seconds on its monotonic clock."""

    def __init__(self, histories: Histories, recorder: MetricsRecorder) -> None:
        self._histories = histories
        self._recorder = recorder

    def open(self, program: ProgramState, fact: TurnFinished, now: float) -> None:
        """The program's turn is over: note how long its context is, and which tool runs from now on."""
        context_tokens = fact.prompt_tokens + fact.output_tokens
        if program.turns > 1:
            self._histories.growth_tokens.observe(max(0, context_tokens - program.peak_tokens))
        else:
            program.first_prompt_tokens = fact.prompt_tokens
        program.context_tokens = context_tokens
        program.peak_tokens = max(program.peak_tokens, context_tokens)
        program.gap_started_s = now
        program.gap_reported = False
        program.gap_leased = False
        program.pending_tool = self._slowest(fact)

    def close(self, program: ProgramState, now: float) -> float | None:
        """The program is back: what its tools took is known now, unless the client told it already.

        Returns the gap's length in seconds; ``None`` where there was none, or another request has closed it.
        """
        program.tools.clear()
        if program.gap_started_s is None or program.live_requests:
            return None
        gap_s = max(0.0, now - program.gap_started_s)
        if program.pending_tool is not None:
            source = "reported" if program.gap_reported else "inferred"
            self._recorder.count("sojourn_tool_gap_source_total", source=source)
            self._recorder.observe("sojourn_tool_gap_seconds", gap_s, tool=program.pending_tool)
            if not program.gap_reported:
                self._histories.tools.observe(program.pending_tool, gap_s)
                program.gap_inferred_s = now
        program.gap_started_s = None
        return gap_s

    def _slowest(self, fact: TurnFinished) -> str | None:
        """Several tool calls are one gap, the longest: the key whose median was highest so far."""
        keys = [call.key for call in fact.tool_calls]
        if len(keys) < 2:
            return keys[0] if keys else None
        return max(keys, key=self._median_s)

    def _median_s(self, key: str) -> float:
        durations = self._histories.tools.durations(key)
        return durations[len(durations) // 2] if durations else 0.0
