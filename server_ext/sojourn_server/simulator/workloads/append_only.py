"""Programs of lengths alone, whose every prompt goes on from the prompt and the output before it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sojourn_server.traces.trace_schema import TraceProgram, TraceToolRun, TraceTurn

from .distributions import Distribution


def append_only(
    appends: Sequence[int],
    outputs: Sequence[int],
    tools: Sequence[TraceToolRun],
    tool_s: Distribution | None,
    rng: random.Random,
    *,
    arrival_s: float | None = None,
    tenant: str | None = None,
    agent_type: str | None = None,
) -> TraceProgram:
    """A turn for each append. The last calls no tool; others take ``tool_s`` seconds, or their tools' own."""
    turns, context = [], 0
    for index, (append, output, tool) in enumerate(zip(appends, outputs, tools, strict=True)):
        context += append
        last = index + 1 == len(appends)
        took_s = tool.s if tool_s is None else round(tool_s(rng), 6)
        turns.append(
            TraceTurn(
                prompt_tokens=context,
                output_tokens=output,
                append_tokens=append,
                tool=None if last else tool.name,
                tools=None if last else (TraceToolRun(name=tool.name, s=took_s),),
                tool_seconds=None if last else took_s,
                gap_s=None if last else took_s,
                gap_kind=None if last else "tool",
            )
        )
        context += output
    return TraceProgram(
        program_id="synthetic",
        turns=tuple(turns),
        arrival_s=arrival_s,
        tenant=tenant,
        group=agent_type or tenant,
        agent_type=agent_type,
    )
