"""Reports the programs and tool calls of a replay to the server through the SDK."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any


class ProgramAnnouncer:
    """Reports programs and tool calls like an agent that uses the SDK. Without a ``url`` it reports nothing:
    to the server, all requests are unrelated."""

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        self._sojourn: Any = None
        if url is not None:
            import sojourn

            # For this process, so that the SDK's events bypass proxies, as ``CompletionsClient`` does.
            os.environ["no_proxy"] = "*"
            # No history of other runs, because a replay must not depend on earlier replays.
            sojourn.init(url, api_key=api_key, dialect="sojourn")
            self._sojourn = sojourn

    def program(self, name: str, program_id: str, parent_id: str | None) -> AbstractAsyncContextManager[Any]:
        """Return a context manager for one run of a program. ``name``: agent type of the program.
        ``parent_id``: for a sub-agent, the id of its parent program."""
        if self._sojourn is None:
            return nullcontext()
        run: AbstractAsyncContextManager[Any]
        run = self._sojourn.program(name, id=program_id, parent=parent_id, agent_type=name)
        return run

    def tool(self, name: str, tool_class: str | None) -> AbstractAsyncContextManager[Any]:
        """Return a context manager for one tool call. Enter it inside the context of the call's program.
        ``tool_class``: the head of a shell tool's command; ``None`` for other tools."""
        return (
            nullcontext() if self._sojourn is None else self._sojourn.tool_call(name, tool_class=tool_class)
        )

    def request_parts(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return (body fields, headers) to add to the next request of the program whose context is open."""
        return ({}, {}) if self._sojourn is None else self._sojourn.request_parts()

    def close(self) -> None:
        """Send all pending reports and stop."""
        if self._sojourn is not None:
            self._sojourn.flush()
            self._sojourn.shutdown()
