"""OpenTelemetry in both directions: ``source`` reads the spans of instrumented agents, ``export`` writes
spans.

    from sojourn_integrations import otel
    otel.install()           # no patches needed: spans become programs, nodes and tool calls
    otel.export_spans()      # GenAI-convention spans with the server's outcome of each request

Needs the extra ``sojourn[otel]``; its packages are imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sojourn.errors import install_command

_HOMES = {"install": "source", "SojournSpanProcessor": "source", "export_spans": "export"}

__all__ = ["SojournSpanProcessor", "export_spans", "install"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import opentelemetry.sdk.trace  # noqa: F401  -- without it spans would silently go nowhere
    except ImportError as error:
        raise ImportError(f"OpenTelemetry's SDK is not installed: {install_command('otel')}") from error
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
