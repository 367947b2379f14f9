"""Warnings about LLM requests that carry no program although the user may think that they do.

Each warning is given at most once per process. Requests outside of programs give no warning if the process
has opened a program, or if there are fewer than three, since single LLM calls outside of agents are common.
A request to an unlisted host gives no warning if an earlier one went to a listed host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .program import find_context
from .sdk_logger import logger

if TYPE_CHECKING:
    from . import runtime

OUTSIDE_REQUESTS = 3
"""Number of requests outside of programs at which a warning is given."""
UNLISTED_REQUESTS = 3
"""Number of programs' requests to unlisted hosts at which a warning is given, if no request went to a listed
host."""
LLM_PATHS = ("/chat/completions", "/completions", "/responses")
"""Suffixes of the URLs of LLM requests."""
_unsaid = {"outside": True, "unlisted": True}
"""Warnings not given yet. ``pop`` is atomic, so that two threads do not give the same warning."""


def warn_outside_program(session: runtime.Session) -> None:
    """Count a request that a sojourn server answered and that belongs to no program. Warns at the third such
    request (``OUTSIDE_REQUESTS``), also where a framework's adapter makes programs: a loop that calls the
    framework's model alone has none. Never raises."""
    session.outside_requests += 1
    if session.outside_requests < OUTSIDE_REQUESTS or "outside" not in _unsaid:
        return
    try:
        config = session.config
        if config is None or config.own_program or session.has_programs:
            return
        if _unsaid.pop("outside", False):
            logger.warning(
                "%d requests were sent outside of programs, so the server keeps no KV from one to the next; "
                "if they are of one agent run, put @sojourn.program on the function with its loop, or "
                '"with sojourn.program():" around the loop, or start the process with "sojourn run"',
                session.outside_requests,
            )
    except Exception:
        session.counters.add("internal_error")


def warn_unlisted_host(session: runtime.Session, host: str, path: str) -> None:
    """Count a program's request to a ``host`` and ``path`` that ``init()`` does not name. Warns at the third
    such request (``UNLISTED_REQUESTS``), unless a request went to a listed host, since agents may use other
    servers too. Never raises."""
    if session.has_turns or "unlisted" not in _unsaid:
        return
    try:
        config = session.config
        if config is None or find_context(session.counters)[0].program is None:
            return
        session.unlisted_requests += 1
        if session.unlisted_requests >= UNLISTED_REQUESTS and _unsaid.pop("unlisted", False):
            if any(listed.startswith(f"{host}/") for listed in config.hosts):
                host += _base_path(path)  # the same host with another path
            logger.warning(
                "%d requests of programs went to %s and none to %s, which init() names: "
                "they carry no program; if %s is the same server or a replica, write "
                'sojourn.init(url, hosts=["%s"])',
                session.unlisted_requests, host, config.event_server, host, host,
            )  # fmt: skip
    except Exception:
        session.counters.add("internal_error")


def _base_path(path: str) -> str:
    """Return the path of the base URL of an LLM request, without ``/v1``, as in ``Config.hosts``."""
    for suffix in LLM_PATHS:
        if path.endswith(suffix):
            path = path.removesuffix(suffix)
            break
    return path.rstrip("/").removesuffix("/v1").rstrip("/")
