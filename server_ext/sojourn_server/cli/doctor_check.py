"""Lines of ``sojourn doctor``'s report, and parsers of a server's answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

GATEWAY_HEADER = "X-Sojourn-Gateway"
"""Header of responses that the gateway creates itself, such as the list of models, in contrast to responses
that it forwards (docs/gateway.md)."""


Announce = Callable[[str], None]
"""A function that shows a line before a slow check."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``ok``: True for a passed check, False for a fault, ``None`` for information or
    an undecided check."""

    name: str
    ok: bool | None
    detail: str
    next_step: str = ""


def get(client: httpx.Client, path: str) -> httpx.Response | str:
    """Return the server's response to ``GET path``, or the text of the transport error."""
    try:
        return client.get(path)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"


def json_object(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in a response body; empty if the body is anything else."""
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def error_summary(answer: httpx.Response | str) -> str:
    """Return status and message of an error response as text. A transport error is returned unchanged."""
    if isinstance(answer, str):
        return answer
    error = json_object(answer).get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return f"{answer.status_code} {message or answer.reason_phrase}"


def is_gateway_answer(answer: httpx.Response | str) -> bool:
    """Return whether the gateway created this response itself, instead of forwarding an engine's response."""
    return not isinstance(answer, str) and GATEWAY_HEADER in answer.headers


def as_list(value: object) -> list[Any]:
    """Return ``value`` if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def as_text_mapping(value: object) -> dict[str, str]:
    """Return ``value`` with keys and values converted to text if it is a dict, else an empty dict."""
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}


def as_text_list(value: object) -> list[str]:
    """Return the elements of ``value`` converted to text if it is a list, else an empty list."""
    return [str(one) for one in as_list(value)]


def count_roles(counts: dict[str, Any]) -> str:
    """Return the number of engines per role as text, prefill first."""
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts, reverse=True)) or "none"
