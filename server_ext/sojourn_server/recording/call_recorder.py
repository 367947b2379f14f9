"""One recording: makes a record of every call that is told to it, in order, and hands it to a sink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ..metrics.decision_log import Decision, DecisionLog
from .record_format import HASH_BYTES

MAX_EVICTIONS_PER_RECORD = 256
"""Evictions written as one record at most."""

T = TypeVar("T")


class RecordSink(Protocol):
    """Where records go. No method raises."""

    full: bool
    """The next record must be the last."""

    def write(self, record: tuple[Any, ...]) -> None:
        """Take in a record; nothing of it may be referred to afterwards."""

    def close(self) -> None:
        """There are no more."""

    def give_up(self, error: Exception) -> None:
        """A record could not be made: nothing more can follow."""


class CallRecorder:
    """Writes calls and what came of them. What fails in here ends the recording, never the call.

    ``totals`` is asked for sums over everything, for the end record.
    """

    def __init__(self, sink: RecordSink, totals: Callable[[], dict[str, Any]]) -> None:
        self.decisions = ObservedDecisionLog()
        """The decision log to be used, so that each record holds the decisions made meanwhile."""
        self._sink: RecordSink | None = sink
        self._totals = totals
        self._run_of: tuple[str | None, int | str | None] = (None, None)
        self._run_hashes: list[bytes] = []
        self._run_times_s: list[float] = []

    @property
    def running(self) -> bool:
        """Whether anything is still written down."""
        return self._sink is not None

    def record(
        self,
        op: str,
        now: float | None,
        facts: tuple[Any, ...],
        answer: Callable[[T], Any] | None,
        call: Callable[..., T],
        *args: Any,
        orders: Callable[[T], Any] | None = None,
        **more: Any,
    ) -> T:
        """Carry out one call and record it. ``orders``: the actions that its result holds. Raises what the
        call raises."""
        if self._sink is None:
            return call(*args, **more)
        try:
            result = call(*args, **more)
        except Exception as error:
            self._write(op, now, facts, _exception_answer, error, None)
            raise
        self._write(op, now, facts, answer, result, orders)
        return result

    def facts(self, make: Callable[..., tuple[Any, ...]], *args: Any) -> tuple[Any, ...]:
        """The facts that ``make`` puts into plain values, before the call."""
        if self._sink is None:
            return ()
        try:
            return make(*args)
        except Exception as error:
            self._fail(error)
            return ()

    def evicted(self, block_hash: bytes, owner: str | None, taker: int | str | None, now: float) -> None:
        """A block was reused. Blocks go by the dozen for one request, so one record holds a run of them."""
        if self._sink is None:
            return
        try:
            if (owner, taker) != self._run_of or len(self._run_hashes) >= MAX_EVICTIONS_PER_RECORD:
                self._close_run(self._sink)
                self._run_of = (owner, taker)
            self._run_hashes.append(block_hash[:HASH_BYTES])
            self._run_times_s.append(now)
        except Exception as error:
            self._fail(error)

    def close(self, reason: str) -> None:
        """Write the end record and close the sink."""
        sink = self._sink
        if sink is None:
            return
        self._write("close", None, (reason,), lambda _: self._totals(), None, None)
        self._stop()
        sink.close()

    def _write(
        self,
        op: str,
        now: float | None,
        facts: tuple[Any, ...],
        answer: Callable[[T], Any] | None,
        result: T,
        orders: Callable[[T], Any] | None,
    ) -> None:
        sink = self._sink
        if sink is None:  # the facts could not be encoded, and the sink has reported that
            return
        try:
            said = answer(result) if answer is not None else None
            ordered = orders(result) if orders is not None else None
            if self._run_hashes:
                self._close_run(sink)
            made = self.decisions.made
            if ordered:
                sink.write((op, now, facts, said, made, ordered))
                made.clear()
            elif made:
                sink.write((op, now, facts, said, made))
                made.clear()
            elif said is not None:
                sink.write((op, now, facts, said))
            elif facts:
                sink.write((op, now, facts))
            else:
                sink.write((op, now))
        except Exception as error:
            self._fail(error)
            return
        if sink.full and op != "close":
            self.close("cut off: the tape has reached its longest")

    def _close_run(self, sink: RecordSink) -> None:
        if self._run_hashes:
            sink.write(("evict", None, (*self._run_of, b"".join(self._run_hashes), self._run_times_s)))
            self._run_hashes.clear()
            self._run_times_s.clear()

    def _fail(self, error: Exception) -> None:
        sink = self._sink
        self._stop()
        if sink is not None:
            sink.give_up(error)

    def _stop(self) -> None:
        self._sink = None
        self.decisions.listening = False
        self.decisions.made.clear()
        self._run_hashes.clear()
        self._run_times_s.clear()


class ObservedDecisionLog(DecisionLog):
    """A decision log that also says what was logged since somebody last took note."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, ...]] = []
        self.count = 0
        self.listening = True

    def add(self, at_s: float, kind: str, program_id: str | None, reason: str, **numbers: float) -> Decision:
        self.count += 1
        if self.listening:
            self.made.append((at_s, kind, program_id, reason, numbers))
        return super().add(at_s, kind, program_id, reason, **numbers)


def _exception_answer(error: Exception) -> dict[str, str]:
    return {"raised": type(error).__name__}
