"""Which dialect a server speaks: one GET, on the emitter's thread, never on the agent's."""

from __future__ import annotations

import logging

import msgspec

from .dialects import DIALECTS, Dialect
from .transport import Transport
from .wire import CAPABILITIES_PATH, WIRE_VERSION

logger = logging.getLogger("sojourn")

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
        self._given = dialect is not None
        self.known = self._given
        """The dialect was given or shown, not assumed."""

    def learn(self, dialect: str) -> None:
        """The server showed what it speaks. A dialect given by the caller stays."""
        if not self._given:
            self.dialect = DIALECTS[dialect]
        self.known = True


def probe(transport: Transport, *, timeout_s: float) -> str | None:
    """Ask once. The dialect's name; ``None`` where the answer does not tell. Never raises."""
    try:
        answer = transport.get(CAPABILITIES_PATH, timeout_s)
    except Exception as error:
        logger.info("could not ask the server what it speaks: %s", error)
        return None
    if answer.status in _STOCK:
        return "vllm"
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
