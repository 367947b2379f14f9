"""HTTP listeners of a replica: its own port, and on request none that other machines reach."""

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


async def serve_http(app: Starlette, host: str, port: int) -> None:
    """Serve ``app`` until cancelled, then finish running requests. Several processes may share the port."""
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
    serving = asyncio.ensure_future(server.serve(sockets=[_bound_socket(host, port)]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only for sockets declared as TCP; otherwise +40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # The kernel spreads connections over the gateways of a node, and skips dead ones.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((host, port))
    return bound


def restrict_to_loopback() -> None:
    """Bind the server that each Serve replica opens for calls between deployments to the loopback interface.
    By default it listens on all interfaces, and no setting changes that.

    Call it before the replica is ready. Raises ``RuntimeError`` if this release of Ray works differently.
    """
    from ray.serve._private import replica

    opens: Any = getattr(replica, "add_port_to_grpc_server", None)
    if opens is None:
        raise RuntimeError(
            "this release of Ray opens its replicas' ports differently from 2.60; expected 2.60, or "
            "loopback_only: false"
        )
    if getattr(opens, "keeps_to_loopback", False):
        return

    def on_loopback(server: Any, address: str) -> Any:
        return opens(server, address.replace("[::]:", "127.0.0.1:").replace("0.0.0.0:", "127.0.0.1:"))

    on_loopback.keeps_to_loopback = True  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = on_loopback  # type: ignore[attr-defined,unused-ignore]
