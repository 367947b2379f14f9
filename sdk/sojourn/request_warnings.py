"""Warnings about LLM requests that carry no program although the user may think that they do.

Each warning is given at most once per process:

- for the third request outside of programs, if the process has opened no program;
- for the third request to hosts that are not in the session's ``hosts``, if no request went to a listed host;
- for a program that ends without a request, if requests outside of any program ran meanwhile;
- at the exit of a process under ``sojourn run`` that sent no request to the server.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address
from typing import TYPE_CHECKING

from . import runtime
from .config import LLM_PATHS
from .sdk_logger import logger

if TYPE_CHECKING:
    from .config import Config, Target

OUTSIDE_REQUESTS = 3
"""Number of requests outside of programs at which a warning is given."""
UNLISTED_REQUESTS = 3
"""Number of requests to unlisted hosts at which a warning is given, if no request went to a listed
host."""
_unsaid = {"outside": True, "unlisted": True, "empty": True}
"""Warnings not given yet. ``pop`` is atomic, so that two threads do not give the same warning."""


def warn_outside_program(session: runtime.Session) -> None:
    """Count an answered request that belongs to no program. Warns at the third such request
    (``OUTSIDE_REQUESTS``) if the server is sojourn's and the process has opened no program. An active adapter
    of a framework does not prevent the warning, since a loop that calls only the framework's model gets no
    program. Never raises."""
    session.outside_requests += 1
    if session.outside_requests < OUTSIDE_REQUESTS or "outside" not in _unsaid:
        return
    try:
        config, server = session.config, session.server
        if config is None or config.own_program or session.has_programs:
            return
        if server is None or server.dialect.name != "sojourn":
            return
        if _unsaid.pop("outside", False):
            logger.warning(
                "%d requests were sent outside of programs, so the server does not protect their KV from "
                "eviction; if they are of one agent run, put @sojourn.program on the function with its loop, "
                'or "with sojourn.program():" around the loop, or start the process with "sojourn run"',
                session.outside_requests,
            )
    except Exception:
        session.counters.add("internal_error")


def warn_empty_program(session: runtime.Session, label: str, outside: int) -> None:
    """Warn that a program ended without a request, while ``outside`` requests of no program were answered.
    Threads of the program may have sent them. ``label``: the program's name or id. Never raises."""
    try:
        if _unsaid.pop("empty", False):
            remedy = 'run each job in "with p.here():", where p is the program'
            if session.config is not None and not session.config.threads:
                remedy = f"write sojourn.init(url, threads=True), or {remedy}"
            logger.warning(
                "program %r ended with 0 requests, but %d requests outside of any program ran during it; "
                "if threads of the program sent them, %s",
                label, outside, remedy,
            )  # fmt: skip
    except Exception:
        session.counters.add("internal_error")


def warn_unlisted_host(session: runtime.Session, program: object | None, target: Target) -> None:
    """Count a request that goes to no entry of ``Config.hosts``. Warn at the third such request
    (``UNLISTED_REQUESTS``), once per process. Count nothing after the first request to a listed host, since
    agents may use other servers too. Never raises.

    ``target`` is where the request goes, ``program`` is the program around it, if any.

    Every request inside a program counts. A request outside of programs counts only if its host may be
    another address of a listed server: a listed host has the same name and another port, or the request's
    host and a listed host are both local (``_is_local``). A request outside of programs to a listed
    ``host:port`` with another path does not count, since the user listed only a part of that host.
    """
    if session.has_turns or "unlisted" not in _unsaid:
        return
    _, host, path, written = target
    session.unlisted_host = written
    try:
        config = session.config
        if config is None or (program is None and not _may_be_listed(host, config)):
            return
        session.unlisted_requests += 1
        if session.unlisted_requests >= UNLISTED_REQUESTS and _unsaid.pop("unlisted", False):
            if any(listed.startswith(f"{host}/") for listed in config.hosts):
                suffix = next(filter(path.endswith, LLM_PATHS), "")
                # The same host with another path, in the form of ``Config.hosts``.
                written += path.removesuffix(suffix).rstrip("/").removesuffix("/v1").rstrip("/")
            if not config.url_from_environment:
                named_by, remedy = "init()", f'write sojourn.init(url, hosts=["{written}"])'
            elif config.own_program:
                named_by, remedy = "sojourn run", f"give sojourn run --url http://{written}"
            else:
                named_by, remedy = "SOJOURN_URL", f"give SOJOURN_URL=http://{written}"
            named = config.address.partition("://")[2]
            logger.warning(
                "%d requests went to %s and none to %s, which %s names: "
                "they carry no program; if %s is the same server or a replica, %s",
                session.unlisted_requests, written, named, named_by, written, remedy,
            )  # fmt: skip
    except Exception:
        session.counters.add("internal_error")


def warn_no_request() -> None:
    """Warn at the exit of a process under ``sojourn run`` that sent requests elsewhere, or opened programs,
    but sent no request to the server. Says nothing after ``warn_unlisted_host``. Never raises."""
    session = runtime.session()
    try:
        config, host = session.config, session.unlisted_host
        if config is None or not config.own_program or config.reported or session.has_turns:
            return
        if (host or session.has_programs) and _unsaid.pop("unlisted", False):
            url, last = config.address, f"; the last one went to {host}" if host else ""
            logger.warning(
                "no request of an instrumented client went to %s%s; set OPENAI_BASE_URL=%s/v1, or the "
                "base_url of the agent's client",
                url, last, url,
            )  # fmt: skip
    except Exception:
        session.counters.add("internal_error")


runtime.before_exit.append(warn_no_request)


def _may_be_listed(host: str, config: Config) -> bool:
    """Return whether ``host`` (``host:port``) may be another address of a server in ``config.hosts``."""
    name = host.rpartition(":")[0]
    listed = {place.partition("/")[0] for place in config.hosts}
    names = {place.rpartition(":")[0] for place in listed}
    return host not in listed and (name in names or (_is_local(name) and any(map(_is_local, names))))


@lru_cache(maxsize=256)
def _is_local(name: str) -> bool:
    """Return whether the host ``name`` is in a private network. This holds for an address that is not global,
    such as 127.0.0.1 or 10.0.0.1. It also holds for a name without a dot, and for a name that ends in
    ``.local`` or ``.internal``. Docker and Kubernetes use such names."""
    try:
        return not ip_address(name).is_global
    except ValueError:
        return "." not in name or name.endswith((".local", ".internal"))
