"""The HTTP server of a gateway: uvicorn's, with a stop that waits for requests of models alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import resource
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .gateway_app import Gateway

logger = logging.getLogger(__name__)

MAX_OPEN_FILES = 65_536
"""Open files for which a gateway raises its soft limit, which is usually 1024."""
OTHER_FILES = 128
"""Of these files, those that are for no request, such as connections of polls and viewers."""
KEEP_ALIVE_S = 75
"""Longer than load balancers keep an idle connection."""
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)
OTHERS_GRACE_S = 2.0
"""Seconds that other requests, such as those of viewers, have to end when no request of a model is left."""
_ERROR_WAIT_S = 1.0
"""Maximum seconds for the errors that clients get when their requests are cut off."""
_POLL_S = 0.1


class ClientProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, without offers to change to another one, which a server may ignore
    (RFC 9110 §7.8). Java's client offers HTTP/2, and httptools then takes the body, JSON, for bytes of it."""

    def data_received(self, data: bytes) -> None:
        super().data_received(_UPGRADE.sub(b"", data) if b"pgrade:" in data else data)


def uvicorn_settings(most_waiting: int = 0) -> dict[str, Any]:
    """Return uvicorn's settings for gateways, and raise the limit of open files for ``most_waiting``."""
    open_files = raise_open_file_limit(most_waiting)
    return {
        "http": ClientProtocol,
        "ws": "none",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": KEEP_ALIVE_S,
        # A request has a connection to its client and one to its engine. Further clients get a 503.
        "limit_concurrency": max(2, open_files - OTHER_FILES) // 2 + 1 if open_files is not None else None,
    }


def raise_open_file_limit(most_waiting: int) -> int | None:
    """Raise the soft limit of open files for so many requests. Return it; ``None``: there is none."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return None
    wanted = max(MAX_OPEN_FILES, 2 * most_waiting)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if limit < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            limit = wanted
    if limit < most_waiting:
        logger.warning("%d files may be open, %d requests may wait; raise ulimit -n", limit, most_waiting)
    return limit


class GatewayServer(uvicorn.Server):
    """A server that finishes requests of models at a stop, within uvicorn's ``timeout_graceful_shutdown``
    seconds. Ctrl-C again ends them at once, with an error."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        logging.getLogger("uvicorn.error").addFilter(self._is_news)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state, grace_s = self.server_state, self.config.timeout_graceful_shutdown or 0
        if (number := self._gateway.generation.open_requests) and not self.force_exit:
            logger.info("finishing %d requests, at most %s s; Ctrl-C now ends at once", number, grace_s)
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
        # A request that the stop cuts off is no error of the application.
        error = record.exc_info[1] if record.exc_info else None
        return not (self.should_exit and isinstance(error, asyncio.CancelledError))
