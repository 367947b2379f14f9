"""The HTTP server of ``sojourn gateway``: uvicorn's, with a stop that waits for requests of models alone."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn

from .engine_routes import GatewayApplication
from .gateway_app import Gateway

OTHERS_GRACE_S = 2.0
"""Seconds that other requests, such as those of viewers, have to end when no request of a model is left."""
_ERROR_WAIT_S = 1.0
"""Longest wait, in seconds, for the errors that clients get when their requests are cut off."""
_POLL_S = 0.1
"""Seconds between two looks at what is left, as uvicorn's own."""
_UVICORN_WAITS = ("Waiting for ", "Cancel %s running task")
"""Beginnings of uvicorn's messages about waits, and about requests that are cut off at a stop."""


class GatewayServer(uvicorn.Server):
    """A server that says at a stop how many requests of models it finishes. It gives them
    ``timeout_graceful_shutdown`` seconds (setting of uvicorn). Ctrl-C again ends them at once, with an
    error."""

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Gateway,
        app: GatewayApplication,
        say: Callable[[str], None],
    ) -> None:
        """``app``: the gateway's application, which ``config`` serves. ``say``: shows a line to the user; its
        errors do not count."""
        super().__init__(config)
        self._gateway = gateway
        self._app = app
        self._say = say
        self._others_end_s: float | None = None
        """Time of the event loop at which the grace of other requests ends; ``None``: it has not begun."""
        logging.getLogger("uvicorn.error").addFilter(self._is_news)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, wait for the requests, and end the application."""
        self._say_what_is_left()
        self._gateway.live.close()
        # In a task, because uvicorn's wait does not always end at Ctrl-C: since Python 3.12, asyncio's
        # ``Server.wait_closed``, its last step, waits until all clients have disconnected.
        stopping = asyncio.ensure_future(super().shutdown(sockets))
        while not (self.force_exit or stopping.done()):
            await asyncio.wait({stopping}, timeout=_POLL_S)
            self._end_others()
        if not self.force_exit:
            return await stopping
        stopping.cancel()
        await self._cut_off({stopping, *self.server_state.tasks})
        await self.lifespan.shutdown()  # uvicorn leaves this out after the second Ctrl-C

    def _say_what_is_left(self) -> None:
        number = self._gateway.generation.open_requests
        if not number or self.force_exit:
            return
        requests = f"{number} request{'s' if number > 1 else ''}"
        grace_s = self.config.timeout_graceful_shutdown
        try:
            self._say(f"sojourn: finishing {requests}, at most {grace_s} s; Ctrl-C now ends at once")
        except (Exception, SystemExit):  # a console whose reader is gone may also raise SystemExit
            logging.getLogger(__name__).debug("the line on running requests was not shown", exc_info=True)

    def _end_others(self) -> None:
        """Cut off the requests that no model answers, if they are all that is left and their grace has
        passed."""
        now_s = asyncio.get_running_loop().time()
        if self._gateway.generation.open_requests:
            self._others_end_s = None
        elif self._others_end_s is None:
            self._others_end_s = now_s + OTHERS_GRACE_S
        elif now_s >= self._others_end_s:
            for task in self.server_state.tasks:
                task.cancel()
            if now_s >= self._others_end_s + _ERROR_WAIT_S:
                self._abort_others()

    def _abort_others(self) -> None:
        """Close the connections whose clients do not read, except those with the answer of a model."""
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)  # uvicorn's newest request of the connection
            transport = getattr(connection, "transport", None)
            if transport is not None and not (cycle and self._app.is_generation(cycle.scope)):
                transport.abort()

    @staticmethod
    async def _cut_off(tasks: set[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_ERROR_WAIT_S)

    def _is_news(self, record: logging.LogRecord) -> bool:
        """Return whether a log record of uvicorn tells more than the line on running requests does. A request
        that the stop cuts off is no error of the application."""
        error = record.exc_info[1] if record.exc_info else None
        if self.should_exit and isinstance(error, asyncio.CancelledError):
            return False
        return not str(record.msg).startswith(_UVICORN_WAITS)
