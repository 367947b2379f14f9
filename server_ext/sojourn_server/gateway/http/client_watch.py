"""Whether a client still waits for its answer."""

from __future__ import annotations

import asyncio
import logging

from .bodies import Receive
from .ticket import Ticket

logger = logging.getLogger(__name__)

WATCH_AFTER_S = 0.02
"""So late at most it is seen that a client has gone."""


class ClientWatch:
    """Tells the ticket of one request when its client has gone."""

    def __init__(self, receive: Receive, ticket: Ticket) -> None:
        self._receive = receive
        self._ticket = ticket
        self._task: asyncio.Task[None] | None = None
        # Not at once: until then the request is on its way to its engine, which is not to wait for this.
        self._later = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)

    def stop(self) -> None:
        """It matters no more."""
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
            logger.debug("a client is taken for gone: %s", error)  # there is no other word of it to come
        self._ticket.client_is_gone()
