"""How uvicorn faces a gateway's clients: its settings, and the limit of open files.

An open port belongs behind a proxy, which bounds what strangers may send: half a request, headers without an
end, requests ahead of their answers.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

MAX_OPEN_FILES = 65_536
"""``raise_open_file_limit`` raises a gateway's soft limit of open files to at least this number, if the hard
limit permits. The usual soft limit of a process is 1024."""
KEEP_ALIVE_S = 75
"""Idle seconds after which a client's connection is closed. Longer than clients and load balancers keep it,
so that their side closes it first."""
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class ClientProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, without clients' offers to change to another protocol.

    Java's HTTP client offers HTTP/2 with its first request, and httptools then takes the request's body for
    bytes of the other protocol. A server may ignore the offer (RFC 9110 §7.8). A body of JSON has no such
    line.
    """

    def data_received(self, data: bytes) -> None:
        super().data_received(_UPGRADE.sub(b"", data) if b"pgrade:" in data else data)


def uvicorn_settings(most_waiting: int = 0) -> dict[str, Any]:
    """Return the settings of uvicorn that all gateways share, and raise the limit of open files.
    ``most_waiting``: see ``raise_open_file_limit``."""
    open_files = raise_open_file_limit(most_waiting)
    return {
        "http": ClientProtocol,
        "ws": "none",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": KEEP_ALIVE_S,
        # A request has a connection to its client and one to its engine. Further clients get a 503.
        "limit_concurrency": open_files // 2 if open_files is not None else None,
    }


def raise_open_file_limit(most_waiting: int) -> int | None:
    """Raise this process's soft limit of open files to ``MAX_OPEN_FILES`` or twice ``most_waiting``,
    whichever is larger. The hard limit caps it. Logs a warning if the limit stays below ``most_waiting``.
    Return the limit; ``None``: there is none.

    ``most_waiting``: number of requests that may wait. A waiting request has one connection, to its client. A
    sent request has a second one, to its engine.
    """
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(MAX_OPEN_FILES, 2 * most_waiting)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            limit = wanted
        except (OSError, ValueError) as error:
            logger.debug("the limit of open files stays: %s", error)
    if limit == resource.RLIM_INFINITY:
        return None
    if limit < most_waiting:
        logger.warning(
            "this process may open %d files, fewer than the %d requests that may wait; raise the hard limit "
            "(ulimit -n, systemd: LimitNOFILE) or lower the number of requests",
            limit,
            most_waiting,
        )
    return limit
