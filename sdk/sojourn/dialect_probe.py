"""Detects a server's dialect (the form in which it takes hints) by a few GET requests from the event sender's
thread.

The first GET reads sojourn's capabilities page. A server without that page is recognised by its other public
pages, with one cheap GET for each. An answer identifies a server only if no other kind of server answers the
same. A server that is not recognised gets headers only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from .dialects import DIALECTS, Dialect
from .event_queue import PendingEvent
from .event_transport import EndNotifier, EventTransport, SojournEventTransport
from .http_transport import ServerTransport
from .sdk_logger import logger
from .stats import Counters
from .wire_codec import CAPABILITIES_PATH, WIRE_VERSION

_STOCK = frozenset({404, 405, 501})


class _Capabilities(msgspec.Struct):
    """The fields of the capabilities page that the SDK reads; servers may send more."""

    name: str
    wire: list[int]
    """Wire versions that the server speaks."""


_decoder = msgspec.json.Decoder(_Capabilities)


class ServerDialect:
    """The dialect of one session's server, known or assumed, and the transport of its events. The methods run
    on the event sender's thread."""

    def __init__(
        self,
        transport: ServerTransport,
        counters: Counters,
        dialect: str | None = None,
        *,
        timeout_s: float = 2.0,
        address: str = "the server",
        reported: bool = False,
        unknown_graph: Callable[[PendingEvent], None] = lambda report: None,
    ) -> None:
        """``dialect``: the name that the caller of ``init()`` gave, if any. ``address``: the server in log
        messages. ``reported``: the user has been told that the server does not answer."""
        self.dialect: Dialect = DIALECTS[dialect or "vllm"]
        """The dialect in use. For an unknown server it is ``vllm``, which adds only the header
        ``X-Session-ID``. Most servers use or ignore this header; the row of AIBrix describes an exception."""
        self.given = dialect is not None
        """True if the caller named the dialect; then the server is not probed."""
        self.known = self.given
        """True if the dialect was given or detected, False if it is assumed."""
        self.was_sojourn = self.given
        """True if the dialect was given, or ``sojourn`` was ever detected. Such a server has accepted events,
        or should, and is asked again more often."""
        self.answered = threading.Event()
        """Set after the first probe."""
        self._transport = transport
        self._counters = counters
        self._timeout_s = timeout_s
        self._address = address
        self._reported = reported
        self._unknown_graph = unknown_graph

    @property
    def may_recover(self) -> bool:
        """Whether a server that accepts no events now may accept them later."""
        return not self.given or self.dialect.end is not None or self.dialect.carries_events

    def event_transport(self) -> EventTransport | None:
        """Return a new transport for the server's events; sojourn's own for an unknown server. Returns
        ``None`` if the server accepts no events."""
        if not self.known or self.dialect.name == "sojourn":
            return SojournEventTransport(self._transport, self._counters, self._unknown_graph)
        if self.dialect.end is None:
            return None
        return EndNotifier(
            self._transport, self._counters, *self.dialect.end, takes_implicit=self.dialect.takes_implicit
        )

    def ask(self) -> bool:
        """Probe the server once, at the start. Return whether the dialect became known."""
        try:
            answer = None
            if not self.known:
                # ``sojourn run`` has said that the server does not answer, and nothing else.
                answer = self._probe(no_answer_level=logging.DEBUG if self._reported else None)
            if answer is not None:
                self.learn(answer)
            return answer is not None
        finally:
            self.answered.set()

    def confirm(self) -> None:
        """Record that an answer proved that the server speaks sojourn's wire format."""
        self.learn("sojourn")

    def refused(self) -> EventTransport | None:
        """Ask again, since the server has refused our events: it was not up at the first probe, or was
        replaced. Its answer "sojourn" does not count then. A server whose dialect was given is not asked.
        Returns another transport, or ``None`` to stop sending until ``recover`` returns one."""
        if self.given:
            return None
        answer = self._probe()
        self.learn(answer if answer is not None and answer != "sojourn" else "vllm")
        return self.event_transport()

    def recover(self) -> EventTransport | None:
        """Ask whether the server accepts events again. Returns a transport if it does. If the dialect was
        given, nothing is asked: the next event shows it."""
        if self.given:
            return self.event_transport()
        answer = self._probe(logging.DEBUG)
        # A server whose gateway answers 404 for a moment, as in a rolling restart, looks like stock vLLM. So
        # that answer does not replace a dialect that was recognised.
        if answer is None or answer == "vllm":
            return None
        self.learn(answer)
        return self.event_transport()

    def learn(self, dialect: str) -> None:
        """Record that the dialect named ``dialect`` was detected, and use it, unless one was given."""
        if not self.given:
            self.dialect = DIALECTS[dialect]
        self.known = True
        self.was_sojourn = self.was_sojourn or dialect == "sojourn"

    def after_fork(self) -> None:
        """In a forked child, which does not probe: nothing is to be waited for."""
        self.answered = threading.Event()
        self.answered.set()

    def _probe(self, log_level: int = logging.WARNING, no_answer_level: int | None = None) -> str | None:
        return probe_dialect(
            self._transport,
            timeout_s=self._timeout_s,
            address=self._address,
            log_level=log_level,
            no_answer_level=no_answer_level,
        )


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
    no_server_level = log_level if no_answer_level is None else no_answer_level
    try:
        answer = transport.get(CAPABILITIES_PATH, timeout_s)
    except Exception as error:
        logger.log(
            no_server_level,
            "no answer from %s (%s); the agent continues without it; "
            "the SDK tries again when it sends events",
            address,
            error,
        )
        return None
    if answer.status in _STOCK:
        return _identify_other_server(transport, timeout_s) or _stock(answer.status, address, no_server_level)
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
        return _stock(200, address, no_server_level)  # a server that answers 200 to anything
    if page.name != "sojourn":
        return _stock(200, address, no_server_level)
    if WIRE_VERSION not in page.wire:
        logger.log(
            log_level, "the server has wire version %s, this SDK %d; headers only", page.wire, WIRE_VERSION
        )
        return "vllm"
    return "sojourn"


def _stock(status: int, address: str, level: int) -> str:
    """Say that a server is not sojourn's, and return its dialect."""
    logger.log(level, "no sojourn server answers at %s (HTTP %d); sending headers only", address, status)
    return "vllm"


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
