"""Lines of ``sojourn doctor``'s report, and parsers of a server's answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

GATEWAY_HEADER = "X-Sojourn-Gateway"
"""Header of answers that the gateway itself makes, the list of models included (docs/gateway.md)."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``ok``: True for a passed check, False for a fault, ``None`` if neither is
    certain."""

    name: str
    ok: bool | None
    detail: str
    next_step: str = ""


def get(client: httpx.Client, path: str) -> httpx.Response | str:
    """The server's answer to a GET, or the text of the error."""
    try:
        return client.get(path)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"


def json_object(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object in an answer; empty if the body is anything else."""
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def error_summary(answer: httpx.Response | str) -> str:
    """A short text about an error answer."""
    if isinstance(answer, str):
        return answer
    error = json_object(answer).get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return f"{answer.status_code} {message or answer.reason_phrase}"


def is_gateway_answer(answer: httpx.Response | str) -> bool:
    """Whether the gateway itself made this answer, not an engine behind it."""
    return not isinstance(answer, str) and GATEWAY_HEADER in answer.headers


def as_list(value: object) -> list[Any]:
    """``value`` if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def as_text_mapping(value: object) -> dict[str, str]:
    """``value`` with keys and values converted to text if it is a mapping, else an empty mapping."""
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}


def as_text_list(value: object) -> list[str]:
    """The elements of ``value`` converted to text if it is a list, else an empty list."""
    return [str(one) for one in as_list(value)]


def count_roles(counts: dict[str, Any]) -> str:
    """The number of engines per role as text, prefill first."""
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts, reverse=True)) or "none"
