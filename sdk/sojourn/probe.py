"""Which dialect a server speaks: a few GETs, on the emitter's thread, never on the agent's.

First our own question. A server that does not know it is then recognised by what it
says of itself where every client may ask: no request that costs it anything, one GET
each, and only by a shape that nobody else has. All else is spoken to in headers only.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from .dialects import DIALECTS, Dialect
from .transport import Transport
from .wire import CAPABILITIES_PATH, WIRE_VERSION

logger = logging.getLogger("sojourn")

MAX_ANSWER_BYTES = 4 * 1024 * 1024
_STOCK = frozenset({404, 405, 501})


class _Capabilities(msgspec.Struct):
    """The part of the answer that this client needs; servers may say more."""

    name: str
    wire: list[int]
    """Wire versions spoken."""


_decoder = msgspec.json.Decoder(_Capabilities)


class Server:
    """What is known of the server's dialect. Starts cautious, learns at any time."""

    def __init__(self, dialect: str | None = None) -> None:
        self.dialect: Dialect = DIALECTS[dialect or "vllm"]
        """Said to it now. Headers only as long as nothing is known: they are harmless anywhere."""
        self.given = dialect is not None
        """By the caller: then nothing is asked."""
        self.known = self.given
        """The dialect was given or shown, not assumed."""

    def learn(self, dialect: str) -> Dialect:
        """The server showed what it speaks. The dialect shown; one given by the caller stays in use."""
        if not self.given:
            self.dialect = DIALECTS[dialect]
        self.known = True
        return DIALECTS[dialect]


def probe(transport: Transport, *, timeout_s: float) -> str | None:
    """Ask each question once. The dialect's name; ``None`` where the answer does not tell. Never raises."""
    try:
        answer = transport.get(CAPABILITIES_PATH, timeout_s)
    except Exception as error:
        logger.warning("no answer from the server (%s); it is asked again as events are sent", error)
        return None
    if answer.status in _STOCK:
        return _peer(transport, timeout_s) or "vllm"
    if answer.status in (401, 403):
        logger.warning(
            "the server wants a key (%d): init(url, api_key=...) or SOJOURN_API_KEY; headers only until then",
            answer.status,
        )
        return None
    if answer.status != 200:
        logger.warning(
            "the server answered %d when asked what it speaks; sending headers only", answer.status
        )
        return None
    try:
        told = _decoder.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "vllm"  # a server that answers 200 to anything
    if told.name != "sojourn":
        return "vllm"
    if WIRE_VERSION not in told.wire:
        logger.warning("the server speaks wire %s, this SDK %d; headers only", told.wire, WIRE_VERSION)
        return "vllm"
    return "sojourn"


def _peer(transport: Transport, timeout_s: float) -> str | None:
    """A server that is not ours but says clearly which it is. Never raises."""

    def ask(path: str) -> dict[str, Any]:
        try:
            answer = transport.get(path, timeout_s)
            if answer.status == 200 and len(answer.body) <= MAX_ANSWER_BYTES:
                told = msgspec.json.decode(answer.body)
                return told if isinstance(told, dict) else {}
        except Exception as error:  # gone, or no JSON: as good as silent
            logger.debug("GET %s told nothing: %s", path, error)
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
    """``owned_by`` of the models listed."""
    data = models.get("data")
    if not isinstance(data, list):
        return set()
    return {str(model.get("owned_by")) for model in data if isinstance(model, dict)}
