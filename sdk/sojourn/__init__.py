"""The SDK: tells an inference server what an agent does, so that the agent's KV cache survives tool calls.

    import sojourn
    sojourn.init("http://127.0.0.1:8000")
    with sojourn.program("fix-issue"):
        ...                                   # OpenAI requests to this host now carry the program's id

The SDK never raises into a running agent, never blocks it, and never sends prompts, arguments or outputs. It
imports only the standard library and msgspec. Start reading at ``program`` and ``request``.
"""

from __future__ import annotations

from .aeg import Aeg
from .errors import ArgumentError, ConfigError, SojournError
from .instrumentation import active as _active
from .instrumentation import instrument, uninstrument, wrap
from .lifecycle import init, shutdown
from .program import Program
from .program_scope import current_program, program
from .request import headers, request_fields, request_parts
from .runtime import session as _session
from .stats import Stats
from .step import Step, step
from .tools import ToolCall, tool, tool_call

__version__ = "0.1.0"

__all__ = [
    "Aeg",
    "ArgumentError",
    "ConfigError",
    "Program",
    "SojournError",
    "Stats",
    "Step",
    "ToolCall",
    "__version__",
    "current_program",
    "flush",
    "headers",
    "init",
    "instrument",
    "program",
    "request_fields",
    "request_parts",
    "shutdown",
    "stats",
    "step",
    "tool",
    "tool_call",
    "uninstrument",
    "wrap",
]


def stats() -> Stats:
    """Return a snapshot of the SDK's counters. ``sojourn/stats.py`` lists their names."""
    snapshot = _session().stats()
    snapshot.instrumented = _active()
    return snapshot


def flush(timeout_s: float = 1.0) -> bool:
    """Wait at most ``timeout_s`` until no event is left to send. Returns False if events are left then, or if
    sending a batch failed meanwhile. Without a server, returns True at once."""
    sender = _session().event_sender
    return sender is None or sender.flush(timeout_s)
