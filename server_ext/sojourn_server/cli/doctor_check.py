"""A line of ``sojourn doctor``'s report, and what it reads of a server's answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

GATEWAY = "X-Sojourn-Gateway"
"""In what a gateway says itself, its list of models too (docs/gateway.md)."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``ok`` is ``None`` where nothing is wrong and nothing is proven."""

    name: str
    ok: bool | None
    detail: str
    next_step: str = ""


def get(client: httpx.Client, path: str) -> httpx.Response | str:
    """An answer, or why there is none."""
    try:
        return client.get(path)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"


def document_of(answer: httpx.Response) -> dict[str, Any]:
    """What it says in JSON; empty where that is no object."""
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def said(answer: httpx.Response | str) -> str:
    """An error in a few words."""
    if isinstance(answer, str):
        return answer
    error = document_of(answer).get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return f"{answer.status_code} {message or answer.reason_phrase}"


def is_gateways(answer: httpx.Response | str) -> bool:
    """Whether it is a gateway's own word."""
    return not isinstance(answer, str) and GATEWAY in answer.headers


def list_of(value: object) -> list[Any]:
    """What was told, if it is a list."""
    return value if isinstance(value, list) else []


def texts_of(value: object) -> dict[str, str]:
    """What was told, if it is an object, as texts."""
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}


def texts(value: object) -> list[str]:
    """What was told, if it is a list, as texts."""
    return [str(one) for one in list_of(value)]


def roles_told(told: dict[str, Any]) -> str:
    """How many engines there are of each role, those that prefill first."""
    return ", ".join(f"{told[name]} {name}" for name in sorted(told, reverse=True)) or "none"
