"""Detects that a client has disconnected."""

from __future__ import annotations

import asyncio
import logging

from .gateway_request_state import GatewayRequestState
from .request_bodies import AsgiReceive

logger = logging.getLogger(__name__)

WATCH_DELAY_S = 0.02
"""Longest delay of the detection."""


class DisconnectWatcher:
    """Marks the state of one request when its client disconnects."""

    def __init__(self, receive: AsgiReceive, request_state: GatewayRequestState) -> None:
        self._receive = receive
        self._ticket = request_state
        self._task: asyncio.Task[None] | None = None
        # Not at once: until then the request is sent to its engine, which should not wait for this.
        self._later = asyncio.get_running_loop().call_later(WATCH_DELAY_S, self._begin)

    def stop(self) -> None:
        """Stop watching."""
        self._later.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._until_gone())

    async def _until_gone(self) -> None:
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        except Exception as error:
            logger.debug("a client counts as disconnected: %s", error)  # no other event will follow
        self._ticket.mark_client_disconnected()
