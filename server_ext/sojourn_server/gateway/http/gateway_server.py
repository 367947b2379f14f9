"""The HTTP server of ``sojourn gateway``: uvicorn's, with a stop that waits for requests of models alone."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn

from .gateway_app import Gateway

OTHERS_GRACE_S = 2.0
"""Seconds that other requests, such as those of viewers, have to end when no request of a model is left."""
_ERROR_WAIT_S = 1.0
"""Longest wait, in seconds, for the errors that clients get when their requests are cut off."""
_POLL_S = 0.1
"""Seconds between two looks at what is left, as uvicorn's own."""


class GatewayServer(uvicorn.Server):
    """A server that says at a stop how many requests of models it finishes. It gives them
    ``timeout_graceful_shutdown`` seconds (setting of uvicorn). Ctrl-C again ends them at once, with an
    error."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, say: Callable[[str], None]) -> None:
        """``say``: shows a line to the user; its errors do not count."""
        super().__init__(config)
        self._gateway = gateway
        self._say = say
        logging.getLogger("uvicorn.error").addFilter(self._is_news)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, wait for the requests, and end the application."""
        state, grace_s = self.server_state, self.config.timeout_graceful_shutdown or 0
        number = self._gateway.generation.open_requests
        if number and not self.force_exit:
            requests = f"{number} request{'s' if number > 1 else ''}"
            try:
                self._say(f"sojourn: finishing {requests}, at most {grace_s} s; Ctrl-C now ends at once")
            except (Exception, SystemExit):  # a console whose reader is gone may also raise SystemExit
                logging.getLogger(__name__).debug("the line on running requests was not shown", exc_info=True)
        self._gateway.live.close()
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(state.connections):
            connection.shutdown()
        await self._until(lambda: not self._gateway.generation.open_requests, grace_s)
        await self._until(lambda: not state.connections, OTHERS_GRACE_S)
        for _ in range(2):  # the second time for errors that clients do not read
            for task in state.tasks:
                task.cancel()
            if state.tasks:
                await asyncio.wait(set(state.tasks), timeout=_ERROR_WAIT_S)
        for connection in list(state.connections):  # their clients do not read
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
        await self.lifespan.shutdown()

    async def _until(self, is_over: Callable[[], bool], most_s: float) -> None:
        now = asyncio.get_running_loop().time
        end_s = now() + most_s
        while not (is_over() or self.force_exit or now() >= end_s):
            await asyncio.sleep(_POLL_S)

    def _is_news(self, record: logging.LogRecord) -> bool:
        """Return whether to show a log record of uvicorn. A request that the stop cuts off is no error of the
        application."""
        error = record.exc_info[1] if record.exc_info else None
        return not (self.should_exit and isinstance(error, asyncio.CancelledError))
