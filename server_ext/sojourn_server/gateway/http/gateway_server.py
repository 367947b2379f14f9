"""The HTTP server of ``sojourn gateway``: uvicorn's, with a stop that Ctrl-C ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn

_ERROR_WAIT_S = 1.0
"""Longest wait, in seconds, for the errors that clients get when their requests are cut off."""
_POLL_S = 0.1
"""Seconds between two looks at what is left, as uvicorn's own."""
_UVICORN_WAITS = ("Waiting for ", "Cancel %s running task")
"""Beginnings of uvicorn's messages about waits, and about requests that are cut off at a stop."""


class GatewayServer(uvicorn.Server):
    """A server that says at a stop how many requests it finishes. It gives them
    ``timeout_graceful_shutdown`` seconds (setting of uvicorn). Ctrl-C again ends them at once, with an
    error."""

    def __init__(
        self,
        config: uvicorn.Config,
        say: Callable[[str], None],
    ) -> None:
        """``say``: shows a line to the user; its errors do not count."""
        super().__init__(config)
        self._say = say
        logging.getLogger("uvicorn.error").addFilter(self._is_news)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, wait for the requests, and end the application."""
        self._say_what_is_left()
        # In a task, because uvicorn's wait does not always end at Ctrl-C: since Python 3.12, asyncio's
        # ``Server.wait_closed``, its last step, waits until all clients have disconnected.
        stopping = asyncio.ensure_future(super().shutdown(sockets))
        while not (self.force_exit or stopping.done()):
            await asyncio.wait({stopping}, timeout=_POLL_S)
        if not self.force_exit:
            return await stopping
        stopping.cancel()
        await self._cut_off({stopping, *self.server_state.tasks})
        await self.lifespan.shutdown()  # uvicorn leaves this out after the second Ctrl-C

    def _say_what_is_left(self) -> None:
        number = len(self.server_state.tasks)
        if not number or self.force_exit:
            return
        requests = f"{number} request{'s' if number > 1 else ''}"
        grace_s = self.config.timeout_graceful_shutdown
        try:
            self._say(f"sojourn: finishing {requests}, at most {grace_s} s; Ctrl-C now ends at once")
        except (Exception, SystemExit):  # a console whose reader is gone may also raise SystemExit
            logging.getLogger(__name__).debug("the line on running requests was not shown", exc_info=True)

    @staticmethod
    async def _cut_off(tasks: set[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_ERROR_WAIT_S)

    @staticmethod
    def _is_news(record: logging.LogRecord) -> bool:
        """Return whether a log record of uvicorn tells more than the line on running requests does."""
        return not str(record.msg).startswith(_UVICORN_WAITS)
