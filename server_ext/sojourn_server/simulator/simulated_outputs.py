"""What made-up outputs say: the tool calls that a real model's text would hold."""

from __future__ import annotations

from collections.abc import Sequence

from sojourn_server.programs.tool_call_parsers import ParsedToolCall
from sojourn_server.traces.trace_schema import TraceToolRun


class SimulatedOutputs:
    """Stands in for the adapter's ``ToolCallReader``: made-up tokens decode to nothing.

    It is asked when an output is complete, and then says what stands in it: which
    tools are called, not how long they will take.
    """

    def __init__(self) -> None:
        self._calls: dict[int, tuple[ParsedToolCall, ...]] = {}
        """By identity of the request's list of output tokens, which lives as long as the request."""

    def say(self, token_ids: Sequence[int], runs: Sequence[TraceToolRun]) -> None:
        """This output, once it is complete, will call these tools."""
        self._calls[id(token_ids)] = tuple(ParsedToolCall(run.name, run.cmd) for run in runs)

    def forget(self, token_ids: Sequence[int]) -> None:
        """Its request has left the engine."""
        self._calls.pop(id(token_ids), None)

    def read(self, token_ids: Sequence[int]) -> tuple[ParsedToolCall, ...]:
        """The tool calls in an output."""
        return self._calls.get(id(token_ids), ())
