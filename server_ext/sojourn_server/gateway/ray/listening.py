"""Where a replica listens: at an address of its own, and, if so wanted, nowhere that others reach."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette

logger = logging.getLogger(__name__)

STREAM_GRACE_S = 60
KEEP_ALIVE_S = 75
"""Longer than clients and load balancers keep a connection, so that they close it first."""


async def listen(app: Starlette, host: str, port: int) -> None:
    """Serve ``app`` until cancelled, then finish what is on its way. Several processes may share the port."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STREAM_GRACE_S,
        server_header=False,
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[_bound(host, port)]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Of a socket that does not say that it is TCP, asyncio does not turn off Nagle's algorithm: +40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # The kernel shares out connections among the gateways of one node, and leaves out one that is gone.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((host, port))
    return bound


def keep_to_loopback() -> None:
    """The server that each replica of Serve opens for calls between deployments, on all interfaces and with
    nothing that says otherwise, is opened on the loopback interface in this process.

    To be called before the replica is ready. Raises ``RuntimeError`` where this Ray does it in another way.
    """
    from ray.serve._private import replica

    opens: Any = getattr(replica, "add_port_to_grpc_server", None)
    if opens is None:
        raise RuntimeError(
            "this release of Ray opens its replicas' ports in another way than 2.60; expected 2.60, or "
            "loopback_only: false"
        )
    if getattr(opens, "keeps_to_loopback", False):
        return

    def on_loopback(server: Any, address: str) -> Any:
        return opens(server, address.replace("[::]:", "127.0.0.1:").replace("0.0.0.0:", "127.0.0.1:"))

    on_loopback.keeps_to_loopback = True  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = on_loopback  # type: ignore[attr-defined,unused-ignore]
