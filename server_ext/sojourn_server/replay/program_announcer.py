"""Reports of programs and tools to the server, through the SDK or not at all."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol


class ProgramAnnouncer(Protocol):
    """Context managers for a program and its tools, and the fields that requests carry for them."""

    def program(self, name: str, program_id: str, parent_id: str | None) -> AbstractAsyncContextManager[Any]:
        """Context of one program run."""
        ...

    def tool(self, name: str, tool_class: str | None) -> AbstractAsyncContextManager[Any]:
        """Context of one tool call, inside the context of its program."""
        ...

    def request_parts(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Body fields and headers of the next request in the present program context."""
        ...

    def close(self) -> None:
        """Send all pending reports."""
        ...


class NullAnnouncer:
    """Reports nothing: the server sees unrelated requests, as from a client without the SDK."""

    def program(self, name: str, program_id: str, parent_id: str | None) -> AbstractAsyncContextManager[Any]:
        return nullcontext()

    def tool(self, name: str, tool_class: str | None) -> AbstractAsyncContextManager[Any]:
        return nullcontext()

    def request_parts(self) -> tuple[dict[str, Any], dict[str, str]]:
        return {}, {}

    def close(self) -> None:
        pass


class SdkAnnouncer:
    """Reports through the SDK, like an instrumented agent."""

    def __init__(self, url: str, api_key: str | None) -> None:
        import sojourn

        # Without the history of other runs: a replay must not depend on earlier ones.
        sojourn.init(url, api_key=api_key, dialect="sojourn", history=False)
        self._sojourn = sojourn

    def program(self, name: str, program_id: str, parent_id: str | None) -> AbstractAsyncContextManager[Any]:
        return self._sojourn.program(name, id=program_id, parent=parent_id, agent_type=name)

    def tool(self, name: str, tool_class: str | None) -> AbstractAsyncContextManager[Any]:
        return self._sojourn.tool_call(name, tool_class=tool_class)

    def request_parts(self) -> tuple[dict[str, Any], dict[str, str]]:
        return self._sojourn.request_parts()

    def close(self) -> None:
        self._sojourn.flush()
        self._sojourn.shutdown()
