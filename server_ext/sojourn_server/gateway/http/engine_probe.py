"""Queries one engine: its health, its description, and the state of its links to storage and other
engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import aiohttp
from sojourn.wire_codec import CAPABILITIES_PATH

from ...routing.routing_status import LinkStats
from .engine_client import OWN_ERRORS, ask_engine, parse_json_object
from .engine_descriptions import (
    STATS_PATH,
    EngineDescription,
    describe_engine,
    parse_link_stats,
)

ANSWER_TIMEOUT_S = 5.0
"""Maximum seconds that all queries except probes wait for an answer."""
PROBE_TIMEOUT_S = 10.0
"""Maximum seconds that a probe waits for an answer, long enough for a slow but living engine."""
MAX_ERROR_POLLS = 2
"""Default number of consecutive failed health checks (status 500 or 503) after which an engine counts as
dead."""
MAX_PARTIAL_DESCRIPTIONS = 3
"""Number of consecutive incomplete descriptions of a new engine after which the gateway accepts the last of
them."""
_DESCRIPTION_PATHS = (CAPABILITIES_PATH, "/metrics", "/v1/models")


class EngineProbe:
    """Queries the engine at one address."""

    def __init__(
        self,
        url: str,
        session: Callable[[], aiohttp.ClientSession],
        *,
        key: str | None = None,
        read: Callable[..., EngineDescription] = describe_engine,
        accepts: Callable[[Collection[str]], bool] = lambda answered: True,
        max_error_polls: int = MAX_ERROR_POLLS,
    ) -> None:
        """``read`` builds a description from the engine's answers. ``accepts`` gets the paths that the engine
        has answered, and returns whether they suffice for a first description. ``max_error_polls``: number of
        consecutive health checks with status 500 or 503 after which the engine counts as dead."""
        self.url = url
        self.described: EngineDescription | None = None
        """The engine's last accepted description. The user of the probe sets it, ``mark_lost`` removes it."""
        self.lost_engines = 0
        """Number of engines lost at this address so far. It is the ``instance`` of an engine that reports no
        start time."""
        self.failed_here = False
        """Whether the last health check failed because the gateway could not open a connection."""
        self.asks_for_key = False
        """Whether the engine answered 401 to the last request for a description."""
        self._session = session
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._read = read
        self._accepts = accepts
        self._max_error_polls = max_error_polls
        self._errors = 0
        self._partial = 0
        """Number of consecutive incomplete descriptions."""
        self._answered: frozenset[str] = frozenset()
        """Paths that the engine answered for its last description. Later descriptions need answers to all of
        these paths."""

    def mark_lost(self) -> None:
        """Record that the engine is gone. If an engine answers at this address later, it counts as a new
        engine."""
        self.described = None
        self._errors = 0
        self.lost_engines += 1

    async def check_health(self, timeout_s: float = ANSWER_TIMEOUT_S) -> bool | None:
        """Check the engine's health. True: the engine is alive. False: it refuses the connection, or has
        returned ``max_error_polls`` errors in a row. ``None``: unknown, for instance because no answer came
        within ``timeout_s`` seconds."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        self.failed_here = False
        try:
            async with self._session().get(
                f"{self.url}/health", headers=self._headers, timeout=timeout
            ) as answer:
                await answer.read()
                if answer.status < 300:
                    self._errors = 0
                    return True
                if answer.status not in (500, 503):
                    self._errors = 0
                    return None  # answered by a proxy in between
                self._errors += 1
                return False if self._errors >= self._max_error_polls else None
        except aiohttp.ClientConnectorError as error:
            self.failed_here = error.os_error.errno in OWN_ERRORS
            # Nothing listens there. A failed name resolution or route may be a local problem.
            return False if isinstance(error.os_error, ConnectionRefusedError) else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None

    async def describe(self) -> EngineDescription | None:
        """Request the engine's description; ``None``: no usable description now.

        Once ``described`` is set, an incomplete description is not usable. With values missing, the engine
        would look like another engine.
        """
        found = await asyncio.gather(*(self.get(path) for path in _DESCRIPTION_PATHS))
        statuses = {status for status, _ in found}
        self.asks_for_key = 401 in statuses
        answered = frozenset(
            path for path, (status, _) in zip(_DESCRIPTION_PATHS, found, strict=True) if status == 200
        )
        if self.described is not None:
            if 0 in statuses or not answered >= self._answered:
                return None
        elif not self._accepts(answered):
            return None
        elif 0 in statuses:
            self._partial += 1
            if self._partial < MAX_PARTIAL_DESCRIPTIONS:
                return None
        self._partial, self._answered = 0, answered
        capabilities, metrics, models = (text for _, text in found)
        objects = [parse_json_object(text) or {} for text in (capabilities, models)]
        return self._read(objects[0], metrics, objects[1], self.lost_engines)

    async def links(self) -> dict[str, LinkStats] | None:
        """Return the state of a prefill or decode engine's links, by link name; ``None``: not reported."""
        _, text = await self.get(STATS_PATH)
        return parse_link_stats(parse_json_object(text) or {})

    async def get(self, path: str) -> tuple[int, str]:
        """Send a GET. Return (status, text). The text is empty unless the status is 200.

        Status 0 means no answer, a server error (5xx), or a text that is not UTF-8.
        """
        answer = await ask_engine(
            self._session(), self.url + path, headers=self._headers, timeout_s=ANSWER_TIMEOUT_S
        )
        if answer is None or answer.status >= 500:
            return 0, ""
        try:
            return answer.status, answer.body.decode() if answer.status == 200 else ""
        except UnicodeDecodeError:
            return 0, ""
