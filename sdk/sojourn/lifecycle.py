"""``init()`` and ``shutdown()``: create, replace and end the session of this process."""

from __future__ import annotations

import os
from collections.abc import Iterable

from . import instrumentation, process_hooks, runtime
from .config import FALSE, Config, Environment
from .errors import ConfigError
from .runtime import Session
from .sdk_logger import logger


def init(
    url: str | None = None,
    *,
    api_key: str | None = None,
    hosts: Iterable[str] | None = None,
    dialect: str | None = None,
    probe_timeout_s: float = 0.3,
    threads: bool = False,
    instrument: bool = True,
    history: object = None,
    tool_events: object = None,
) -> None:
    """Connect the SDK to a server, and patch the supported client libraries, imported now or later.

    - ``url``: root of the server, by default ``SOJOURN_URL``.
    - ``api_key``: bearer key for sending events, by default ``SOJOURN_API_KEY``.
    - ``hosts``: further servers that may receive program ids, such as replicas, each as ``host:port`` or URL.
      Requests to all other hosts stay unchanged. If a URL has a path besides ``/v1``, requests to other paths
      of its host stay unchanged too.
    - ``dialect``: a name of ``sojourn.dialects.DIALECTS``. Without it the server's dialect is detected in the
      background; this call waits at most ``probe_timeout_s`` for the detection.
    - ``threads``: carry the current program into new threads and the jobs of thread pools, but not into
      long-lived workers of your own.
    - ``instrument``: if False, nothing is patched until you call ``instrument()`` or ``wrap()``.
    - ``history``, ``tool_events``: withdrawn and ignored. The server learns by itself what a client's history
      told it, and Dynamo gets no tool events.

    A second call with the same arguments changes nothing. With other arguments it replaces the session. Open
    programs continue in the new session, which reports their starts again. The start of a program with
    ``heartbeat=False`` is not reported again; the server learns of that program from its next request or
    event. SGLang and ThunderAgent keep only the open programs that have a request in progress; the previous
    session reports the ends of the others there.

    Raises ``ConfigError`` if the session cannot be set up; the previous session then stays.
    """
    environment = Environment.read()
    for name, value in (("history", history), ("tool_events", tool_events)):
        if value or os.environ.get(f"SOJOURN_{name.upper()}", "off").strip().lower() not in FALSE:
            logger.warning("%s is withdrawn and ignored; see CHANGELOG.md", name)
    if environment.disabled:
        with runtime.session_lock:
            before = runtime.live
            if before is None or not before.disabled:
                _replace_session(Session(disabled=True))
        return
    config = Config.resolve(
        url,
        api_key=api_key,
        hosts=hosts,
        dialect=dialect,
        probe_timeout_s=probe_timeout_s,
        threads=threads,
        instrument=instrument,
        environment=environment,
    )
    _go_online(config).await_dialect()


def shutdown() -> None:
    """Undo ``init()``: send unsent events within a second, remove every patch, go offline. Never raises."""
    with runtime.session_lock:
        before = runtime.live
        _replace_session(Session(disabled=before is not None and before.disabled))


def _go_online(config: Config) -> Session:
    with runtime.session_lock:
        before = runtime.live
        if before is not None and before.online and before.config == config:
            return before
        fresh = _connected(config)  # first, so that a failure keeps the previous session
        _replace_session(fresh)
        if config.instrument:
            instrumentation.instrument()
        if config.threads:
            from . import thread_context

            thread_context.install()
        return fresh


def _replace_session(fresh: Session) -> None:
    before = runtime.live
    if before is not None:
        if fresh.config is None or not fresh.config.instrument:  # else runs in progress stay attached
            instrumentation.uninstrument()
        from . import thread_context

        thread_context.remove()
        before.close(replaced=fresh.online)
    runtime.live = fresh
    if before is not None:
        fresh.take_over(before)


def _connected(config: Config) -> Session:
    fresh = Session(config)
    try:
        fresh.connect()
        process_hooks.observe_process(fresh)
    except Exception as error:
        fresh.close(0.0)
        if isinstance(error, ConfigError):
            raise
        text = f"cannot set up the connection to the server ({type(error).__name__}: {error})"
        raise ConfigError(text) from error
    return fresh


def _first_use() -> Session:
    """Create and return the session for ``SOJOURN_URL``, or an offline one. Logs errors and does not raise
    them, since the caller is a running agent."""
    with runtime.session_lock:
        found = runtime.live
        if found is not None:
            return found
        try:
            environment = Environment.read()
            if environment.disabled or not environment.url:
                found = Session(disabled=environment.disabled)
            else:
                found = _go_online(Config.resolve(None, environment=environment))
        except Exception as error:
            logger.error("sojourn stays off: %s", error)
        if runtime.live is None:
            runtime.live = found or Session()
        found = runtime.live
    found.await_dialect()
    return found


runtime.first_use = _first_use
