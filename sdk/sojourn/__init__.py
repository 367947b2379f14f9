"""Tell an inference server what an agent is doing, so that its KV cache survives its tool calls.

    import sojourn
    sojourn.init("http://127.0.0.1:8000")
    with sojourn.program("fix-issue"):
        ...                                   # OpenAI clients of that host are taken care of

Nothing here raises once an agent runs, blocks it, or sends prompts, arguments or outputs.
"""

from __future__ import annotations

from .aeg import Aeg
from .errors import ArgumentError, ConfigError, SojournError
from .instruments import active as _active
from .instruments import instrument, uninstrument, wrap
from .program import Program, current_program, program
from .request import headers, request_fields, request_parts
from .runtime import init, shutdown
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
    """A snapshot of what was done, sent and dropped; the names are listed in ``sojourn.stats``."""
    snapshot = _session().stats()
    snapshot.instrumented = _active()
    return snapshot


def flush(timeout_s: float = 1.0) -> bool:
    """Wait until no event is unsent. True if so within ``timeout_s`` seconds and none was lost meanwhile."""
    emitter = _session().emitter
    return emitter is None or emitter.flush(timeout_s)
