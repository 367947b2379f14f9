"""The session of this process: the state that ``init()`` sets up and every other module reads.

An *offline* session sends nothing; programs, steps and tool calls still work as ``with`` blocks. The session
is offline if ``SOJOURN_DISABLED`` is set, or if neither ``init()`` nor ``SOJOURN_URL`` has named a server.
The module ``lifecycle`` creates and replaces the session.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from . import process_hooks
from .config import Config, unclaim
from .heartbeats import Heartbeats, OpenProgram
from .stats import Counters, Stats
from .wire_events import Event

if TYPE_CHECKING:
    from .dialect_probe import ServerDialect
    from .event_queue import PendingEvent
    from .event_sender import EventSender

clock = time.monotonic
"""Returns monotonic seconds: the clock for all intervals and ages in this package."""
pid = os.getpid()
"""Id of this process, also after a fork. Code that runs in each turn reads this variable, because
``os.getpid()`` is a system call."""
listener_methods: dict[str, tuple[Callable[..., object], ...]] = {}
"""Methods of listeners to call at each event, set by ``listeners``. A change replaces the whole dict, so
that ``notify_listeners`` needs no lock."""
hears_turns = False
"""True while at least one listener has a method for tool calls or requests. While it is False, the code of
tool calls and requests calls no ``notify_listeners``, since each call costs the agent microseconds."""
usage_wanted = False
"""True while at least one registered listener wants token counts (``wants_usage``)."""


class Session:
    """State of the SDK in this process: counters and heartbeats. An online session also has the event
    sender and the server's dialect."""

    def __init__(self, config: Config | None = None, *, disabled: bool = False) -> None:
        self.config = config
        self.disabled = disabled
        self.counters = Counters()
        self.heartbeats = Heartbeats(config.heartbeat_s if config else 3.0)
        self.event_sender: EventSender | None = None
        self.server: ServerDialect | None = None
        self.graphs_reported: set[str] = set()
        """Hashes of the graphs that this process has sent in full since a batch was last lost."""
        self.graphs_lost = 0
        """The count ``dropped_send`` (events lost in sending) at the last check. If the count has grown since
        then, ``graphs_reported`` is cleared, because the server may have restarted."""
        self.program: OpenProgram | None = None
        """The process's own program, for requests and tool calls outside ``program()``."""
        self.programs: WeakKeyDictionary[OpenProgram, None] = WeakKeyDictionary()
        """The programs whose start was reported here. Some may have ended."""
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
        self.unlisted_host = ""
        """Host of the last request to an unlisted host, in the same time."""

    @property
    def online(self) -> bool:
        """True if the session sends events to a server."""
        return self.event_sender is not None

    def connect(self) -> None:
        """Start the background sender, which also detects the server's dialect. Raises if certificates cannot
        be read, the proxy is not HTTP, or no thread can start."""
        # Imported here, since ``import sojourn`` alone needs no HTTP. Imported on the caller's thread, since
        # a fork must not happen while another thread imports.
        from .dialect_probe import ServerDialect
        from .event_sender import EventSender
        from .http_transport import HttpTransport

        config = self.config
        assert config is not None
        transport = HttpTransport(config.url, api_key=config.api_key, timeout_s=config.send_timeout_s)
        server = ServerDialect(
            transport,
            self.counters,
            config.dialect,
            timeout_s=config.send_timeout_s,
            address=config.address,
            reported=config.reported,
            unknown_graph=self._resend_graph,
        )
        sender = EventSender(
            transport,
            self.counters,
            server,
            self.heartbeats,
            queue_events=config.queue_events,
            batch_events=config.batch_events,
            linger_s=config.linger_s,
            close_timeout_s=config.close_timeout_s,
        )
        sender.start()
        self.event_sender, self.server = sender, server

    def await_dialect(self) -> None:
        """Wait at most ``probe_timeout_s`` for the server's answer about its dialect. Holds no lock."""
        if self.config is not None and self.server is not None and not self.server.known:
            self.server.answered.wait(self.config.probe_timeout_s)

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
            found.end_after_requests("cancelled")  # so that the server learns no length of an incomplete run
        return True

    def emit(self, program: OpenProgram, kind: type[Event], **fields: Any) -> None:
        """Queue an event of ``program``: an instance of ``kind`` with ``fields``. Offline, do nothing. Never
        raises, and never waits for the network."""
        if self.event_sender is not None:
            self.event_sender.put(program, kind, **fields)

    def take_over(self, before: Session) -> None:
        """Continue the open programs of the replaced session ``before``, except programs without heartbeats.
        Reports their starts again, since the server may be a different server. Never raises."""
        for program in before.heartbeats.programs():
            try:
                program.join(self)
            except Exception:
                self.counters.add("internal_error")

    def close(self, timeout_s: float | None = None, *, replaced: bool = False) -> None:
        """End the process's own program and send the queued events. Waits at most ``timeout_s``, by default
        the configured ``close_timeout_s``. ``replaced``: another session follows. Then the programs with a
        request in progress do not end here, and the next session reports their ends. A second call is
        harmless."""
        left, self.left_program = self.left_program, None
        program, self.program = self.program, None
        programs = [reference() for reference in self.programs.keyrefs()] if replaced else []
        in_progress = {each.id for each in programs if each is not None and each.open_requests}
        if left is not None and left.id not in in_progress:
            left.end("cancelled")
        if program is not None:
            if program.id in in_progress:
                program.end_after_requests("ok")
            else:
                program.end()
            unclaim()
        if self.event_sender is not None:
            self.event_sender.close(timeout_s, leave_open=frozenset(in_progress))

    def exit(self) -> None:
        """Run the ``before_exit`` functions and close the session. Called when the process ends."""
        for callback in before_exit:
            callback()
        self.close()

    def stats(self) -> Stats:
        """Return the current counts and state."""
        # Read before the counters, so that ``events_queued`` includes every pending event.
        pending = self.event_sender.pending if self.event_sender is not None else 0
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
        self.graphs_reported = set()
        if self.event_sender is not None:
            self.event_sender.after_fork()

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
that ends the programs opened for the whole process, ``request_warnings`` adds ``warn_no_request``."""
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


def notify_listeners(event: str, *args: object) -> None:
    """Call the method named ``event`` of every listener with ``args``. Exceptions of listeners are counted
    (``listener_error``), not raised."""
    for method in listener_methods.get(event, ()):
        try:
            method(*args)
        except Exception:
            session().counters.add("listener_error")
