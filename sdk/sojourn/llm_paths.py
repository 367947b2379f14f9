"""The URL paths that make a request an LLM request."""

from __future__ import annotations

LLM_PATHS = ("/chat/completions", "/completions", "/responses")
"""Suffixes of the URLs of LLM requests. A patched client adds nothing to requests with other paths."""


def base_path(path: str) -> str:
    """Return the URL path of an LLM request without its suffix of ``LLM_PATHS`` and without ``/v1``. This is
    the form of the paths in ``Config.hosts``."""
    for suffix in LLM_PATHS:
        if path.endswith(suffix):
            path = path.removesuffix(suffix)
            break
    return path.rstrip("/").removesuffix("/v1").rstrip("/")
