"""The one live session of this process: what ``init()`` set up and everything else asks for.

Before ``init()``, and where ``SOJOURN_DISABLED`` is set, the session is *offline*:
programs, steps and tool calls work as plain scopes and nothing is sent anywhere.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from . import process
from .config import Config, Environment, unclaim
from .context import opened
from .errors import ConfigError
from .events import Event, Heartbeat
from .lease import Heartbeats
from .stats import Counters, Stats

if TYPE_CHECKING:
    from .backlog import Pending
    from .dialects import Courier
    from .emitter import Emitter
    from .learning.advisor import Advisor
    from .probe import Server
    from .program import Program

logger = logging.getLogger("sojourn")


class Session:
    """Counters, heartbeats and, once online, the sender and the server's dialect."""

    def __init__(self, config: Config | None = None, *, disabled: bool = False) -> None:
        self.config = config
        self.disabled = disabled
        self.counters = Counters()
        self.heartbeats = Heartbeats(config.heartbeat_s if config else 3.0)
        self.emitter: Emitter | None = None
        self.server: Server | None = None
        self.advisor: Advisor | None = None
        """What was learned from the programs so far; ``None`` offline."""
        self.graphs_told: set[str] = set()
        """Hashes of graphs this emitter has spelt out, to a server that has taken every batch since."""
        self.graphs_lost = 0
        """Events lost on their way when ``graphs_told`` was last looked at."""
        self.program: Program | None = None
        """The process's own program, for what happens outside ``program()``."""
        self._answered = threading.Event()

    @property
    def online(self) -> bool:
        """A server was named."""
        return self.emitter is not None

    def connect(self) -> None:
        """Start the sender, which asks the server for its dialect. Raises ``ConfigError`` where the process
        lacks what it takes: certificates, the library for its proxy, one more thread."""
        try:
            self._connect()
        except ConfigError:
            raise
        except Exception as error:
            text = f"cannot set up the connection to the server ({type(error).__name__}: {error})"
            raise ConfigError(text) from error

    def _connect(self) -> None:
        # Imported here: an `import sojourn` alone needs no HTTP. On the caller's thread, since a fork must
        # never meet an import under way on another one.
        from .dialects import Road, SojournCourier
        from .dialects.dynamo_events import load_zmq
        from .emitter import Emitter
        from .probe import Server, probe
        from .transport import HttpTransport

        config = self.config
        assert config is not None
        transport = HttpTransport(config.url, api_key=config.api_key, timeout_s=config.send_timeout_s)
        server = Server(config.dialect)
        road = Road(transport, self.counters, config.tool_events, self._graph_unknown)
        if config.tool_events is not None:
            load_zmq()

        def ask() -> None:
            try:
                answer = probe(transport, timeout_s=config.send_timeout_s)
                if answer is not None:
                    emitter.use(server.learn(answer).courier(road))
            finally:
                self._answered.set()

        def ask_again() -> Courier | None:
            # The server was not up when asked, or is another one now. Not ours, whatever it says.
            answer = None if server.given else probe(transport, timeout_s=config.send_timeout_s)
            return server.learn(answer if answer not in (None, "sojourn") else "vllm").courier(road)

        emitter = Emitter(
            transport,
            self.counters,
            queue_events=config.queue_events,
            batch_events=config.batch_events,
            linger_s=config.linger_s,
            close_timeout_s=config.close_timeout_s,
            first=None if server.known else ask,
            promised=lambda: self.heartbeats.promised,
            beats=self._beats,
            delivered=lambda: server.learn("sojourn"),
            unsupported=ask_again,
        )
        emitter.use(server.dialect.courier(road) if server.known else SojournCourier(road))
        emitter.start()
        self.emitter, self.server = emitter, server
        self._learn(config)
        process.watch(self)

    def _learn(self, config: Config) -> None:
        from .learning.advisor import Advisor
        from .learning.history import History
        from .observe import add_listener

        history: History | None = None
        if config.history is not None:
            try:
                import sqlite3  # noqa: F401  # on the caller's thread, as above

                history = History(config.history, self.counters)
            except ImportError:  # some builds of Python lack it
                self.counters.add("history_error")
        self.advisor = Advisor(self.counters, history)
        if history is not None:
            self.advisor.start()
        add_listener(self.advisor)

    def await_dialect(self) -> None:
        """Wait for the server's answer about its dialect, no longer than configured. Holds no lock."""
        if self.config is not None and self.server is not None and not self.server.known:
            self._answered.wait(self.config.probe_timeout_s)

    def exclusive(self) -> AbstractContextManager[object]:
        """Keep other threads from emitting. The emitter's own lock: a second one could be taken in another
        order by a garbage collection that ends a program."""
        return nullcontext() if self.emitter is None else self.emitter.lock

    def emit(self, program: Program, kind: type[Event], **fields: Any) -> None:
        """Queue an event. Never blocks, never raises."""
        if self.emitter is not None:
            self.emitter.put(program, kind, **fields)

    def close(self, timeout_s: float | None = None) -> None:
        """End the process's own program and send what is left within the bound. Repeating it is harmless."""
        program, self.program = self.program, None
        if program is not None:
            program.end()
            unclaim()
        bound_s = timeout_s if timeout_s is not None else self.config.close_timeout_s if self.config else 0.0
        end_s = clock() + bound_s
        if self.advisor is not None:
            from .observe import remove_listener

            remove_listener(self.advisor)
            self.advisor.hurry_up()  # it saves while the emitter sends
        if self.emitter is not None:
            self.emitter.close(timeout_s)
        if self.advisor is not None:
            self.advisor.close(end_s - clock())

    def exit(self) -> None:
        """The process ends: so do the programs that nobody has ended, as ``cancelled``."""
        while opened:
            opened.pop().end("cancelled")
        self.close()

    def stats(self) -> Stats:
        """Counts and state as of now."""
        # First: what is pending is counted as queued by then.
        pending = self.emitter.pending if self.server is not None and self.emitter is not None else 0
        stats = Stats(self.counters.snapshot())
        stats.disabled = self.disabled
        stats.url = self.config.url if self.config else None
        if self.server is not None and self.emitter is not None:
            stats.dialect = self.server.dialect.name
            stats.dialect_known = self.server.known
            stats.events_pending = pending
        return stats

    def after_fork(self) -> None:
        """In the child: the parent's programs are the parent's to keep alive and to end."""
        self.counters.after_fork()
        self.heartbeats.after_fork()
        self.program = None
        self.graphs_told = set()
        self._answered = threading.Event()
        self._answered.set()  # nobody asks in the child: the events will tell
        if self.emitter is not None:
            self.emitter.after_fork()
        if self.advisor is not None:
            self.advisor.after_fork()

    def _graph_unknown(self, report: Pending) -> None:
        """The server was restarted, or has forgotten the graph, or the report that spelt it out was lost."""
        self.graphs_told.discard(report.fields["graph_hash"])
        if report.fields["graph"] is None:
            program = self.heartbeats.find(report.program_id)
            if program is not None:
                program.report_graph()

    def _beats(self, now: float) -> tuple[list[tuple[Program, type[Event]]], float | None]:
        programs, wait_s = self.heartbeats.due(now)
        return [(program, Heartbeat) for program in programs], wait_s


_session: Session | None = None
_lock = threading.RLock()
"""Around changes of the session. Held while the session before says its last, which is bounded; never while
the new one waits for its server's answer."""


def _after_fork() -> None:
    # Another thread may have held it, which the child does not have. Its change goes on in the parent only.
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def session() -> Session:
    """The live session; an offline one where none was set up and ``SOJOURN_URL`` names no server."""
    return _session if _session is not None else _first_use()


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
    """Name the server and instrument the clients found now or imported later.

    ``url`` is the server's root (``SOJOURN_URL`` where left out); ``hosts`` names further ``host:port`` that
    may be told about programs, e.g. replicas: nothing is ever added to requests for other hosts. ``dialect``
    is a name of ``sojourn.dialects.DIALECTS``; without it the server is asked in the background, for whose
    answer this call waits ``probe_timeout_s`` at most. ``tool_events`` is where Dynamo takes them, e.g.
    ``"tcp://127.0.0.1:20390"``. ``threads=True`` carries the current program into new threads and
    the jobs of thread pools; not into long-lived workers of one's own. ``instrument=False`` attaches to
    nothing by itself: name frameworks to ``instrument()``, or objects to ``wrap()``. Repeating it with the
    same arguments is harmless; with others it replaces the session. Raises ``ConfigError`` where it cannot
    be set up, and leaves the session before as it is. ``history`` is the file that keeps how long tools took
    and which ways programs went, for the next process: a path, ``False`` for none (``SOJOURN_HISTORY``, else
    the place the platform has for that); names and numbers only.
    """
    global _session
    environment = Environment.read()
    if environment.disabled:
        with _lock:
            if _session is None or not _session.disabled:
                _retire()
                _session = Session(disabled=True)
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


def _go_online(config: Config) -> Session:
    global _session
    with _lock:
        if _session is not None and _session.online and _session.config == config:
            return _session
        fresh = Session(config)
        fresh.connect()  # first: where it cannot, the session before goes on
        _retire()
        _session = fresh
        from . import instruments
        from . import threads as thread_propagation

        if config.instrument:
            instruments.instrument()
        if config.threads:
            thread_propagation.install()
        return fresh


def shutdown() -> None:
    """Undo ``init()``: send what is left within a second, remove every patch, go offline. Never raises."""
    global _session
    with _lock:
        _retire()
        _session = Session(disabled=_session.disabled if _session is not None else False)


clock = time.monotonic
"""Monotonic seconds; the one clock of this package."""


def _retire() -> None:
    from . import instruments
    from . import threads as thread_propagation

    if _session is None:
        return
    instruments.uninstrument()
    thread_propagation.remove()
    _session.close()


def _first_use() -> Session:
    """``SOJOURN_URL`` alone is enough; its mistakes are logged here since no ``init()`` is there to raise."""
    global _session
    with _lock:
        if _session is not None:
            return _session
        found: Session | None = None
        try:
            environment = Environment.read()
            if environment.disabled or not environment.url:
                found = Session(disabled=environment.disabled)
            else:
                found = _go_online(Config.resolve(None, environment=environment))
        except Exception as error:
            logger.error("sojourn stays off: %s", error)
        if _session is None:
            _session = found or Session()
        found = _session
    found.await_dialect()
    return found
