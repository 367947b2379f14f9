"""Warnings about LLM requests that carry no program although the user may think that they do.

Each warning is given at most once per process. A request outside of programs gives no warning if the process
has opened a program. A request to an unlisted host gives no warning if an earlier one went to a listed host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .instrumentation import active
from .program import find_context
from .sdk_logger import logger

if TYPE_CHECKING:
    from . import runtime

_WITHOUT_PROGRAMS = frozenset({"openai", "litellm"})
"""Frameworks whose adapters make no programs by themselves."""
UNLISTED_REQUESTS = 3
"""Number of programs' requests to unlisted hosts at which a warning is given, if no request went to a listed
host."""
LLM_PATHS = ("/chat/completions", "/completions", "/responses")
"""Suffixes of the URLs of LLM requests."""
_unsaid = {"outside": True, "unlisted": True}
"""Warnings not given yet. ``pop`` is atomic, so that two threads do not give the same warning."""


def warn_outside_program(session: runtime.Session) -> None:
    """Warn about a request that a sojourn server answered and that belongs to no program. Never raises."""
    if "outside" not in _unsaid:
        return
    try:
        config = session.config
        if config is None or config.own_program or session.has_programs:
            return
        if not _WITHOUT_PROGRAMS.issuperset(active()):
            return
        if _unsaid.pop("outside", False):
            logger.warning(
                "a request was sent outside a program, so its KV is not kept for the next one; "
                'wrap the run in sojourn.program("name"), or start it with "sojourn run"'
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
