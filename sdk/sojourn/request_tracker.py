"""Tracks one logical LLM request from its start to the end of its answer."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING

from . import listener_registry, runtime
from .errors import status_of
from .listener_registry import notify_listeners
from .process_program import stop_counting_as_one_run

if TYPE_CHECKING:
    from .program import Program
    from .stats import Counters
    from .token_usage import TokenUsage


class LogicalRequest:
    """One LLM request with all its attempts. It counts attempts, time to first token and outcome in the SDK's
    counters. Until it ends, it is in its program's ``open_requests``. No method raises."""

    __slots__ = (
        "__dict__", "__weakref__", "_counters", "_open", "attempts", "awaits_answer", "error",
        "host", "id", "model", "node", "path", "program", "started_s", "usage",
    )  # fmt: skip

    def __init__(
        self,
        counters: Counters,
        program: Program,
        id: str = "",
        node: str | None = None,
        *,
        model: str | None = None,
        host: str | None = None,
        path: str | None = None,
        session: runtime.Session | None = None,
    ) -> None:
        self.id = id
        """Id of the request, the same for every attempt."""
        self.program = program
        self.node = node
        """Node of the program's graph, as sent with the request."""
        self.model = model
        """Model name in the request's body, if any."""
        self.host = host
        """Target ``host:port``, if known."""
        self.path = path
        """Path of the request's URL, e.g. ``/chat/completions``."""
        self.usage: TokenUsage | None = None
        """Token counts of the answer. ``None`` if no listener has ``wants_usage``, or if the answer holds no
        counts."""
        self.error: str | None = None
        """Class name of the exception that ended the request; ``None`` if there was none."""
        self.attempts = 0
        self._counters = counters
        self.started_s = runtime.clock()
        """When the request started, in monotonic seconds."""
        self.awaits_answer = True
        """True until the first byte of the answer."""
        self._open = True
        program.open_requests.add(self)
        program.is_used = True
        if len(program.open_requests) > 1:
            try:
                _check_overlapping_requests(program, self)
            except Exception:
                counters.add("internal_error")
        counters.of_thread[get_ident()]["requests_started"] += 1
        advisor = (session or runtime.session()).advisor
        if advisor is not None:
            try:
                advisor.request_begins(self)
            except Exception:
                counters.add("internal_error")
        if listener_registry.hears_turns:
            notify_listeners("request_started", self)

    def pause(self) -> None:
        """Remove the request from ``open_requests`` after a failed attempt. The next attempt puts it back.
        While a program has no open request, every due heartbeat is sent (see ``Heartbeats.take_due``)."""
        self.program.open_requests.discard(self)

    def got_bytes(self) -> None:
        """Record that bytes of the answer arrived. The first call marks the start of the answer. Later calls
        check for a newer open request outside of ``program()``. If there is one, the process no longer counts
        as one run (``Session.counts_as_one_run``)."""
        if self.awaits_answer:
            self.awaits_answer = False
            self._counters.add("ttft_count")
            self._counters.add("ttft_ms_sum", round((runtime.clock() - self.started_s) * 1000))
            if listener_registry.hears_turns:
                notify_listeners("request_first_byte", self)
        elif len(self.program.open_requests) > 1:
            try:
                _check_overlapping_streams(self.program, self.started_s)
            except Exception:
                self._counters.add("internal_error")

    def end(self, how: str = "ended") -> None:
        """End the request. Only the first call counts. ``how``: ``ended`` (the answer is complete),
        ``failed``, ``cancelled``, ``closed_early`` (closed before the stream's end) or ``abandoned`` (the
        response was garbage-collected without being closed)."""
        if self._open:
            self._open = False
            program = self.program
            program.open_requests.discard(self)
            outcome = "requests_ended" if how == "ended" else f"requests_{how}"
            self._counters.of_thread[get_ident()][outcome] += 1
            run_trace = program.run_trace
            if run_trace is not None and run_trace.has_nodes:
                advisor = (runtime.live or runtime.session()).advisor
                if advisor is not None:
                    try:
                        advisor.request_over(run_trace, self.node)
                    except Exception:
                        self._counters.add("internal_error")
            if listener_registry.hears_turns:
                notify_listeners("request_ended", self, how)
            if program.ends_as is not None:
                program.end_if_deferred()

    def fail(self, error: BaseException) -> None:
        """End the request as ``cancelled`` or ``failed``, because of the exception ``error``."""
        self.error = type(error).__name__
        self.end("cancelled" if status_of(error) == "cancelled" else "failed")


def _check_overlapping_requests(program: Program, begun: object) -> None:
    """Stop counting the process as one run if another request of ``program`` still waits for its answer.
    ``begun`` is the request that starts now. ``process_program`` checks for overlaps too, but two threads may
    pass that check at the same moment."""
    session = runtime.session()
    if not session.counts_as_one_run or program is not session.program:
        return
    others = (other for other in tuple(program.open_requests) if other is not begun)
    if any(getattr(other, "awaits_answer", False) for other in others):
        stop_counting_as_one_run(session)


def _check_overlapping_streams(program: Program, began_s: float) -> None:
    """Stop counting the process as one run if ``program`` has an open request that began after ``began_s``.

    Called when the agent reads further bytes of a stream. ``began_s``: start of the stream's request, in
    monotonic seconds. One agent loop does not go back to an older stream. So a newer open request belongs to
    another loop.
    """
    session = runtime.session()
    if not session.counts_as_one_run or program is not session.program:
        return
    if any(getattr(other, "started_s", began_s) > began_s for other in tuple(program.open_requests)):
        stop_counting_as_one_run(session)
