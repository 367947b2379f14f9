"""The session of this process: the state that ``init()`` sets up and every other module reads.

An *offline* session sends nothing; programs, steps and tool calls still work as ``with`` blocks. The session
is offline if ``SOJOURN_DISABLED`` is set, or if neither ``init()`` nor ``SOJOURN_URL`` has named a server.
The module ``lifecycle`` creates and replaces the session.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from . import process_hooks
from .config import Config, unclaim
from .heartbeats import Heartbeats, OpenProgram
from .stats import Counters, Stats
from .wire_events import Event

if TYPE_CHECKING:
    from .aeg import Aeg
    from .dialect_probe import ServerDialect
    from .dialects import Dialect, EventTransport
    from .event_queue import PendingEvent
    from .event_sender import EventSender
    from .learning.run_trace import RunTrace
    from .learning.tool_durations import DurationEstimate

clock = time.monotonic
"""Returns monotonic seconds: the clock for all intervals and ages in this package."""
pid = os.getpid()
"""Id of this process, also after a fork. Code that runs in each turn reads this variable, because
``os.getpid()`` is a system call."""


class Estimates(Protocol):
    """The part of ``learning.advisor.Advisor`` that the session uses."""

    estimates: dict[tuple[str, str | None], DurationEstimate]
    """(tool, class) → durations of its calls. The class ``None`` stands for all calls of the tool."""

    def request_begins(self, request: Any) -> None: ...

    def request_over(self, run_trace: RunTrace, node: str | None) -> None: ...

    def tool_begins(self, run_trace: RunTrace, tool: str) -> None: ...

    def tool_over(self, call: Any, duration_s: float, status: str) -> None: ...

    def turns_left(self, program: Any, node: str | None) -> float | None: ...

    def graph(self, program: Any) -> Aeg | None: ...

    def begin_shutdown(self) -> None: ...

    def close(self, timeout_s: float) -> None: ...

    def after_fork(self) -> None: ...


class Session:
    """State of the SDK in this process: counters and heartbeats. An online session also has the event
    sender, the server's dialect and the advisor."""

    def __init__(self, config: Config | None = None, *, disabled: bool = False) -> None:
        self.config = config
        self.disabled = disabled
        self.counters = Counters()
        self.heartbeats = Heartbeats(config.heartbeat_s if config else 3.0)
        self.event_sender: EventSender | None = None
        self.server: ServerDialect | None = None
        self.advisor: Estimates | None = None
        """Estimates from earlier programs; ``None`` offline."""
        self.graphs_reported: set[str] = set()
        """Hashes of the graphs that this process has sent in full since a batch was last lost."""
        self.graphs_lost = 0
        """The count ``dropped_send`` (events lost in sending) at the last check. If the count has grown since
        then, ``graphs_reported`` is cleared, because the server may have restarted."""
        self.open_programs: dict[str, None] = {}
        """Ids of the programs whose end the server still expects; see ``TransportContext``."""
        self.replaced = False
        """Whether another session has taken over ``open_programs``."""
        self.shared_dialect: Dialect | None = None
        """Dialect in which the replaced session reported the ends of ``open_programs``; ``None`` if this
        session has not taken them over."""
        self.program: OpenProgram | None = None
        """The process's own program, for requests and tool calls outside ``program()``."""
        self.left_program: OpenProgram | None = None
        """The process's own program after ``leave_own_program``; otherwise ``None``. This program ends when
        its last request in progress ends."""
        self.counts_as_one_run = config is not None and config.own_program and config.program_id is None
        """Whether all code outside of ``program()`` counts as one run. Becomes False once the code opens
        programs of its own or requests overlap."""
        self.has_programs = False
        """Whether a program other than the process's own has started."""
        self.has_turns = False
        """Whether a request to a listed host has begun, or the user has asked for a request's fields."""
        self.outside_requests = 0
        """Number of answered requests of no program."""
        self.unlisted_requests = 0
        """Number of requests to unlisted hosts, as ``warn_unlisted_host`` counts them. The number stops
        growing at the first request to a listed host."""
        self._answered = threading.Event()

    @property
    def online(self) -> bool:
        """True if the session sends events to a server."""
        return self.event_sender is not None

    def connect(self) -> None:
        """Start the background sender, which also detects the server's dialect. Raises if certificates cannot
        be read, the proxy is not HTTP, ZeroMQ is needed but missing, or no thread can start."""
        # Imported here, since ``import sojourn`` alone needs no HTTP. Imported on the caller's thread, since
        # a fork must not happen while another thread imports.
        from .dialect_probe import ServerDialect, probe_dialect
        from .dialects import SojournEventTransport, TransportContext
        from .dialects.dynamo import load_zmq
        from .event_sender import EventSender
        from .http_transport import HttpTransport

        config = self.config
        assert config is not None
        transport = HttpTransport(config.url, api_key=config.api_key, timeout_s=config.send_timeout_s)
        server = ServerDialect(config.dialect)
        transport_context = TransportContext(
            transport,
            self.counters,
            config.tool_events,
            self._resend_graph,
            self.open_programs,
            lambda: self.replaced,
        )
        if config.tool_events is not None:
            load_zmq()

        def probe(log_level: int = logging.WARNING, no_answer_level: int | None = None) -> str | None:
            return probe_dialect(
                transport,
                timeout_s=config.send_timeout_s,
                address=config.address,
                log_level=log_level,
                no_answer_level=no_answer_level,
            )

        def ask() -> None:
            try:
                # ``sojourn run`` has said that the server does not answer, and nothing else.
                answer = probe(no_answer_level=logging.DEBUG if config.reported else None)
                if answer is not None:
                    sender.set_event_transport(server.learn(answer).event_transport(transport_context))
            finally:
                self._answered.set()

        def ask_again() -> EventTransport | None:
            # The server was not up at the first probe, or was replaced. It has just refused our events, so
            # its answer "sojourn" does not count.
            answer = None if server.given else probe()
            return server.learn(answer if answer not in (None, "sojourn") else "vllm").event_transport(
                transport_context
            )

        def recover() -> EventTransport | None:
            # A server whose gateway answers 404 for a moment, as in a rolling restart, looks like stock vLLM.
            # So that answer does not replace a dialect that was recognised.
            answer = probe(logging.DEBUG)
            return (
                None if answer in (None, "vllm") else server.learn(answer).event_transport(transport_context)
            )

        def report_shared() -> None:
            # A server that answers 404 for a moment looks like stock vLLM, whose transport reports no ends.
            if self.shared_dialect is not None and self.open_programs:
                left = self.shared_dialect.event_transport(transport_context)
                if left is not None:
                    left.close()

        sender = EventSender(
            transport,
            self.counters,
            queue_events=config.queue_events,
            batch_events=config.batch_events,
            linger_s=config.linger_s,
            close_timeout_s=config.close_timeout_s,
            first=None if server.known else ask,
            last=report_shared,
            promised=lambda: self.heartbeats.promised,
            beats=self.heartbeats.take_due,
            delivered=lambda: server.learn("sojourn"),
            unsupported=ask_again,
            recover=None if server.given else recover,
            recognised=lambda: server.was_sojourn,
        )
        sender.set_event_transport(
            server.dialect.event_transport(transport_context)
            if server.known
            else SojournEventTransport(transport_context)
        )
        sender.start()
        self.event_sender, self.server = sender, server

    def await_dialect(self) -> None:
        """Wait at most ``probe_timeout_s`` for the server's answer about its dialect. Holds no lock."""
        if self.config is not None and self.server is not None and not self.server.known:
            self._answered.wait(self.config.probe_timeout_s)

    def exclusive(self) -> AbstractContextManager[object]:
        """Return the event sender's lock, as a ``with`` block for several changes in one atomic step.

        The session has no lock of its own. Garbage collection may end a program at any moment, which takes
        the event sender's lock. With two locks, threads could take them in different orders and deadlock.
        """
        return nullcontext() if self.event_sender is None else self.event_sender.lock

    def leave_own_program(self) -> bool:
        """Stop counting the process as one run. The process's own program, if any, ends once its requests in
        progress have ended. Later requests outside ``program()`` belong to an implicit program. Returns
        False, without changes, if the process did not count as one run."""
        with self.exclusive():  # else a thread that makes the program just now would bring it back
            if not self.counts_as_one_run:
                return False
            self.counts_as_one_run = False
            found, self.program = self.program, None
            self.left_program = found
        if found is not None:
            found.end_after_requests("cancelled")  # so that no run length is learned from an incomplete run
        return True

    def emit(self, program: OpenProgram, kind: type[Event], **fields: Any) -> None:
        """Queue an event of ``program``: an instance of ``kind`` with ``fields``. Offline, do nothing. Never
        raises, and never waits for the network."""
        if self.event_sender is not None:
            self.event_sender.put(program, kind, **fields)

    def share_open_programs(self, before: Session) -> None:
        """Share ``open_programs`` with ``before``, the session that is about to be replaced. This happens
        only if both use one server and one dialect. Otherwise ``before`` reports the ends of its programs
        when it closes, since its server would keep them for ever. Called before ``connect``."""
        ours, theirs = self.config, before.config
        if ours is None or theirs is None or before.server is None or ours.server != theirs.server:
            return
        if ours.dialect in (theirs.dialect, before.server.dialect.name):
            self.open_programs = before.open_programs
            dialect = before.server.dialect
            # With ``vllm``, which reports no ends, ``before`` may have taken the programs over itself.
            self.shared_dialect = before.shared_dialect if dialect.name == "vllm" else dialect

    def take_over(self, before: Session) -> None:
        """Continue the open programs of the replaced session ``before``, except programs without heartbeats.
        Reports their starts again, since the server may be a different server. Never raises."""
        for program in before.heartbeats.programs():
            try:
                program.join(self)
            except Exception:
                self.counters.add("internal_error")

    def close(self, timeout_s: float | None = None) -> None:
        """End the process's own program, send the queued events and save what was learned. Waits at most
        ``timeout_s``, by default the configured ``close_timeout_s``. Saving may take up to 50 ms more. A
        second call is harmless."""
        left, self.left_program = self.left_program, None
        if left is not None:
            left.end("cancelled")
        program, self.program = self.program, None
        if program is not None:
            program.end()
            unclaim()
        bound_s = timeout_s if timeout_s is not None else self.config.close_timeout_s if self.config else 0.0
        end_s = clock() + bound_s
        if self.advisor is not None:
            self.advisor.begin_shutdown()  # it saves while the event sender sends
        if self.event_sender is not None:
            self.event_sender.close(timeout_s)
        if self.advisor is not None:
            self.advisor.close(end_s - clock())

    def exit(self) -> None:
        """Run the ``before_exit`` functions and close the session. Called when the process ends."""
        for callback in before_exit:
            callback()
        self.close()

    def stats(self) -> Stats:
        """Return the current counts and state."""
        # Read before the counters, so that ``events_queued`` includes every pending event.
        pending = (
            self.event_sender.pending if self.server is not None and self.event_sender is not None else 0
        )
        stats = Stats(self.counters.snapshot())
        stats.disabled = self.disabled
        stats.url = self.config.address if self.config else None
        if self.server is not None and self.event_sender is not None:
            stats.dialect = self.server.dialect.name
            stats.dialect_known = self.server.known
            stats.events_pending = pending
        return stats

    def after_fork(self) -> None:
        """Reset the session in a forked child. Only the parent process sends heartbeats for the programs that
        it started, and reports their ends."""
        self.counters.reset()
        self.heartbeats.after_fork()
        self.program = self.left_program = None
        self.open_programs.clear()
        self.graphs_reported = set()
        self._answered = threading.Event()
        self._answered.set()  # the child does not probe; its first batch shows what the server accepts
        if self.event_sender is not None:
            self.event_sender.after_fork()
        if self.advisor is not None:
            self.advisor.after_fork()

    def _resend_graph(self, report: PendingEvent) -> None:
        """Handle the server's answer that the graph of ``report`` is unknown. If ``report`` held only the
        hash, send the full graph now. Otherwise send the graph in full with its next report."""
        self.graphs_reported.discard(report.fields["graph_hash"])
        if report.fields["graph"] is None:
            program = self.heartbeats.find(report.program_id)
            if program is not None:
                program.report_graph()


before_exit: list[Callable[[], None]] = []
"""Functions that ``Session.exit`` calls before it closes the session. The module ``program`` adds a function
that ends the programs opened for the whole process."""
live: Session | None = None
"""The session, once there is one; only the module ``lifecycle`` sets it. Code that runs in each turn reads
``runtime.live or runtime.session()``, which saves a function call."""
first_use: Callable[[], Session] = Session
"""Makes the session if ``init()`` was not called. The module ``lifecycle`` sets this function."""
session_lock = threading.RLock()
"""Held while a new session replaces the previous one and while the previous one closes. Both take a bounded
time. Not held while a thread waits for the server to name its dialect."""


def _after_fork() -> None:
    # A thread of the parent may hold the lock at the fork. That thread does not exist in the child.
    global session_lock, pid
    session_lock = threading.RLock()
    pid = os.getpid()


process_hooks.register_at_fork(after_in_child=_after_fork)


def session() -> Session:
    """Return the session of this process. The first call creates one if ``init()`` was not called: online if
    ``SOJOURN_URL`` names a server, else offline."""
    return live if live is not None else first_use()
