"""``init()`` and ``shutdown()``: create, replace and end the session of this process."""

from __future__ import annotations

import os
from collections.abc import Iterable

from . import instrumentation, process_hooks, runtime
from .config import Config, Environment
from .errors import ConfigError
from .runtime import Session
from .sdk_logger import logger


def init(
    url: str | None = None,
    *,
    api_key: str | None = None,
    hosts: Iterable[str] | None = None,
    dialect: str | None = None,
    tool_events: str | None = None,
    probe_timeout_s: float = 0.3,
    threads: bool = False,
    instrument: bool = True,
    history: str | os.PathLike[str] | bool | None = None,
) -> None:
    """Connect the SDK to a server, and patch the supported client libraries, imported now or later.

    - ``url``: root of the server, by default ``SOJOURN_URL``.
    - ``api_key``: bearer key for sending events, by default ``SOJOURN_API_KEY``.
    - ``hosts``: further servers that may receive program ids, such as replicas, each as ``host:port`` or URL.
      Requests to all other hosts stay unchanged. If a URL has a path besides ``/v1``, requests to other paths
      of its host stay unchanged too.
    - ``dialect``: a name of ``sojourn.dialects.DIALECTS``. Without it the server's dialect is detected in the
      background; this call waits at most ``probe_timeout_s`` for the detection.
    - ``tool_events``: Dynamo's ZeroMQ endpoint for tool events, such as ``"tcp://127.0.0.1:20390"``.
    - ``threads``: carry the current program into new threads and the jobs of thread pools, but not into
      long-lived workers of your own.
    - ``instrument``: if False, nothing is patched until you call ``instrument()`` or ``wrap()``.
    - ``history``: path of a file that keeps tool durations and program runs (names and numbers only) for
      later processes, or ``False`` for no file; by default ``SOJOURN_HISTORY``, else a file in the platform's
      folder for application data.

    A second call with the same arguments changes nothing. With other arguments it replaces the session. Open
    programs continue in the new session, which reports their starts again. The start of a program with
    ``heartbeat=False`` is not reported again; the server learns of that program from its next request or
    event. If the server or the dialect changes, SGLang and ThunderAgent would keep the open programs for
    ever. So the previous session reports their ends there.

    Raises ``ConfigError`` if the session cannot be set up; the previous session then stays.
    """
    environment = Environment.read()
    if environment.disabled:
        with runtime.session_lock:
            before = runtime.live
            if before is None or not before.disabled:
                _retire()
                _replace_session(Session(disabled=True))
        return
    config = Config.resolve(
        url,
        api_key=api_key,
        hosts=hosts,
        dialect=dialect,
        tool_events=tool_events,
        probe_timeout_s=probe_timeout_s,
        threads=threads,
        instrument=instrument,
        history=history,
        environment=environment,
    )
    _go_online(config).await_dialect()


def shutdown() -> None:
    """Undo ``init()``: send unsent events within a second, remove every patch, go offline. Never raises."""
    with runtime.session_lock:
        _retire()
        before = runtime.live
        _replace_session(Session(disabled=before is not None and before.disabled))


def _go_online(config: Config) -> Session:
    with runtime.session_lock:
        before = runtime.live
        if before is not None and before.online and before.config == config:
            return before
        fresh = _connected(config, before)  # before _retire(), so that a failure keeps the previous session
        if before is not None:
            before.replaced = fresh.open_programs is before.open_programs
        _retire()
        _replace_session(fresh)
        if config.instrument:
            instrumentation.instrument()
        if config.threads:
            from . import thread_context

            thread_context.install()
        return fresh


def _replace_session(fresh: Session) -> None:
    before, runtime.live = runtime.live, fresh
    if before is not None:
        fresh.take_over(before)


def _connected(config: Config, before: Session | None) -> Session:
    fresh = Session(config)
    if before is not None:
        fresh.share_open_programs(before)
    try:
        fresh.connect()
        _start_learning(fresh, config)
        process_hooks.observe_process(fresh)
    except Exception as error:
        fresh.replaced = True  # so that it reports no ends of programs of ``before``
        fresh.close(0.0)
        if isinstance(error, ConfigError):
            raise
        text = f"cannot set up the connection to the server ({type(error).__name__}: {error})"
        raise ConfigError(text) from error
    return fresh


def _start_learning(session: Session, config: Config) -> None:
    # Imported on the caller's thread, since a fork must not happen while another thread imports.
    from .learning.advisor import Advisor
    from .learning.history_store import HistoryStore
    from .listener_registry import add_listener

    history: HistoryStore | None = None
    if config.history is not None:
        try:
            import sqlite3  # noqa: F401

            history = HistoryStore(config.history, session.counters)
        except ImportError:  # some builds of Python lack it
            session.counters.add("history_error")
    advisor = Advisor(session.counters, history)
    session.advisor = advisor
    if history is not None:
        advisor.start()
    add_listener(advisor)


def _retire() -> None:
    before = runtime.live
    if before is None:
        return
    instrumentation.uninstrument()
    from . import thread_context

    thread_context.remove()
    before.close()


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
