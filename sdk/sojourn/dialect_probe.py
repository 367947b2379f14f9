"""Detects a server's dialect (the form in which it takes hints) by a few GET requests from the event sender's
thread.

The first GET reads sojourn's capabilities page. A server without that page is recognised by its other public
pages, with one cheap GET for each. An answer identifies a server only if no other kind of server answers the
same. A server that is not recognised gets headers only.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from .dialects import DIALECTS, Dialect
from .http_transport import ServerTransport
from .sdk_logger import logger
from .wire_codec import CAPABILITIES_PATH, WIRE_VERSION

_STOCK = frozenset({404, 405, 501})


class _Capabilities(msgspec.Struct):
    """The fields of the capabilities page that the SDK reads; servers may send more."""

    name: str
    wire: list[int]
    """Wire versions that the server speaks."""


_decoder = msgspec.json.Decoder(_Capabilities)


class ServerDialect:
    """The dialect of the server, known or assumed. ``learn`` may change it at any time."""

    def __init__(self, dialect: str | None = None) -> None:
        self.dialect: Dialect = DIALECTS[dialect or "vllm"]
        """The dialect in use. For an unknown server it is ``vllm``, which adds only the header
        ``X-Session-ID``. Most servers use or ignore this header; ``AibrixDialect`` describes an exception."""
        self.given = dialect is not None
        """True if the caller named the dialect; then the server is not probed."""
        self.known = self.given
        """True if the dialect was given or detected, False if it is assumed."""
        self.was_sojourn = False
        """True if the dialect ``sojourn`` was ever detected."""

    def learn(self, dialect: str) -> Dialect:
        """Record that the dialect named ``dialect`` was detected, and return its ``Dialect`` object. Uses
        this dialect from now on, unless the caller of ``init()`` named a dialect."""
        if not self.given:
            self.dialect = DIALECTS[dialect]
        self.known = True
        self.was_sojourn = self.was_sojourn or dialect == "sojourn"
        return DIALECTS[dialect]


def probe_dialect(
    transport: ServerTransport,
    *,
    timeout_s: float,
    address: str = "the server",
    log_level: int = logging.WARNING,
    no_answer_level: int | None = None,
) -> str | None:
    """Probe the server once and return the name of its dialect. Never raises.

    Returns ``vllm`` for a server that answers but is not recognised, and for one that does not speak this
    SDK's wire version. Returns ``None`` for a server that does not answer, requires a key or fails. Log
    messages call the server ``address`` and have the level ``log_level``. The message that there is no answer
    has the level ``no_answer_level``, if given.
    """
    try:
        answer = transport.get(CAPABILITIES_PATH, timeout_s)
    except Exception as error:
        logger.log(
            log_level if no_answer_level is None else no_answer_level,
            "no answer from %s (%s); the agent continues without it; "
            "the SDK tries again when it sends events",
            address,
            error,
        )
        return None
    if answer.status in _STOCK:
        return _identify_other_server(transport, timeout_s) or "vllm"
    if answer.status in (401, 403):
        logger.log(
            log_level,
            "the server wants a key (%d): init(url, api_key=...) or SOJOURN_API_KEY; headers only until then",
            answer.status,
        )
        return None
    if answer.status != 200:
        logger.log(
            log_level,
            "the server answered %d when asked for its capabilities; sending headers only",
            answer.status,
        )
        return None
    try:
        page = _decoder.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "vllm"  # a server that answers 200 to anything
    if page.name != "sojourn":
        return "vllm"
    if WIRE_VERSION not in page.wire:
        logger.log(
            log_level, "the server has wire version %s, this SDK %d; headers only", page.wire, WIRE_VERSION
        )
        return "vllm"
    return "sojourn"


def _identify_other_server(transport: ServerTransport, timeout_s: float) -> str | None:
    """Return the dialect of a server that identifies itself clearly, else ``None``. Never raises."""

    def ask(path: str) -> dict[str, Any]:
        try:
            answer = transport.get(path, timeout_s)
            if answer.status == 200:
                page = msgspec.json.decode(answer.body)
                return page if isinstance(page, dict) else {}
        except Exception as error:  # unreachable, or not JSON
            logger.debug("GET %s: no JSON answer: %s", path, error)
        return {}

    owners = _owners(ask("/v1/models"))
    if owners == {"sglang"}:
        return "sglang"
    health = ask("/health")
    if owners == {"nvidia"} and {"endpoints", "instances"} <= health.keys():
        return "dynamo"
    if {"router_mode", "scheduling_enabled", "programs_count"} <= health.keys():
        return "thunderagent"
    scheduling = ask("/scheduling/diagnostics")
    if scheduling.get("enabled") is True and {"retained_requests", "resume_order"} <= scheduling.keys():
        return "vllm_router"
    return None


def _owners(models: dict[str, Any]) -> set[Any]:
    """Return the ``owned_by`` values of all models in ``models``, the answer to ``GET /v1/models``."""
    data = models.get("data")
    if not isinstance(data, list):
        return set()
    return {str(model.get("owned_by")) for model in data if isinstance(model, dict)}
