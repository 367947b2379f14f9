"""A ``ProgramScheduler`` that records each event with its actions, and each query that a replay compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from sojourn.ids import ProgramId

from ..core import events_and_actions as ev
from ..core.program_scheduler import ProgramScheduler
from ..core.scheduler_state import SchedulerState
from ..metrics.decision_log import Decision, DecisionLog
from ..policies.policy_views import AbandonedBranch, RunningRequestView
from . import record_format
from .record_format import HASH_BYTES

T = TypeVar("T")

MAX_EVICTIONS_PER_RECORD = 256
"""Maximum number of evictions in one record."""


class RecordSink(Protocol):
    """Protocol of an object that stores records. No method raises."""

    full: bool
    """Whether the next record must be the last, because the maximum size is reached."""

    def write(self, record: tuple[Any, ...]) -> None:
        """Store a record. The sink keeps no reference to the record, so the caller may change its parts."""

    def close(self) -> None:
        """Store what was written, and end. The caller writes no further record."""

    def give_up(self, error: Exception) -> None:
        """End the recording, because a record could not be made (``error`` says why)."""


class CallRecorder:
    """Runs calls of a scheduler's methods, and records them with their results. If recording fails, the
    recording ends and the call goes on. ``totals`` returns statistics for the end record."""

    def __init__(self, sink: RecordSink, totals: Callable[[], dict[str, Any]], log_capacity: int) -> None:
        self.decisions = ObservedDecisionLog(log_capacity)
        """The decision log that the scheduler must use. A call's record gets the decisions logged since the
        previous record."""
        self._sink: RecordSink | None = sink
        self._totals = totals
        self._run_of: tuple[str | None, int | str | None] = (None, None)
        self._run_hashes: list[bytes] = []
        self._run_times_s: list[float] = []

    @property
    def is_recording(self) -> bool:
        """Whether records are still written."""
        return self._sink is not None

    def record(
        self,
        op: str,
        now: float | None,
        facts: tuple[Any, ...],
        answer: Callable[[T], Any],
        call: Callable[..., T],
        *args: Any,
        orders: Callable[[T], Any] | None = None,
        **more: Any,
    ) -> T:
        """Return ``call(*args, **more)``, and record the call. Raises what ``call`` raises.

        ``op``, ``now`` and ``facts`` are the first parts of the record. ``answer`` and ``orders`` compute the
        record's answer and actions from the result of ``call``. Without ``orders`` the record has no actions.
        """
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
        """Return ``make(*args)``: a call's facts, which are its arguments as plain values.

        Call this method before the recorded call, because that call may change its arguments. If ``make``
        fails, the recording ends. Returns an empty tuple if ``make`` fails, or if the recording has ended
        already."""
        if self._sink is None:
            return ()
        try:
            return make(*args)
        except Exception as error:
            self._fail(error)
            return ()

    def evicted(self, block_hash: bytes, owner: str | None, taker: int | str | None, now: float) -> None:
        """Record an evicted block. ``taker``: number or id of the request that caused the eviction, if any.
        Consecutive blocks with the same ``owner`` and the same ``taker`` share one record."""
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
        """Write the end record and close the sink. Does nothing if the recording has ended already."""
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
        answer: Callable[[T], Any],
        result: T,
        orders: Callable[[T], Any] | None,
    ) -> None:
        sink = self._sink
        if sink is None:  # the facts could not be encoded, and the sink has reported that
            return
        try:
            answered = answer(result)
            ordered = orders(result) if orders is not None else None
            if self._run_hashes:
                self._close_run(sink)
            made = self.decisions.made
            if ordered:
                sink.write((op, now, facts, answered, made, ordered))
                made.clear()
            elif made:
                sink.write((op, now, facts, answered, made))
                made.clear()
            elif answered is not None:
                sink.write((op, now, facts, answered))
            elif facts:
                sink.write((op, now, facts))
            else:
                sink.write((op, now))
        except Exception as error:
            self._fail(error)
            return
        if sink.full and op != "close":
            self.close("cut off: the recording has reached its maximum size")

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
    """A decision log that also appends each new decision to ``made``, as plain values, while ``listening``
    is true. The reader of ``made`` must empty it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.made: list[tuple[Any, ...]] = []
        self.count = 0
        self.listening = True

    def add(self, at_s: float, kind: str, program_id: str | None, reason: str, **numbers: float) -> Decision:
        self.count += 1
        if self.listening:
            self.made.append((at_s, kind, program_id, reason, numbers))
        return super().add(at_s, kind, program_id, reason, **numbers)


class RecordingScheduler(ProgramScheduler):
    """A ``ProgramScheduler`` that also records its calls in ``sink``. Results and exceptions are unchanged.

    It records ``handle`` and the query methods whose answers depend on a policy. It overrides each of these
    methods; a test fails if one is missing.
    """

    def __init__(self, sink: RecordSink, state: SchedulerState) -> None:
        self._call_recorder = CallRecorder(sink, self._sums, state.decisions.capacity)
        self._chains: dict[str, list[Any]] = {}
        """Id of a request in the engine → the chain of block hashes recorded at its last admission."""
        state.decisions = self._call_recorder.decisions
        super().__init__(state)

    @property
    def is_recording(self) -> bool:
        """Whether records are still written."""
        return self._call_recorder.is_recording

    def close_recording(self, reason: str) -> None:
        self._call_recorder.close(reason)
        self._chains.clear()

    # -- events -----------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        if type(event) is ev.BlockEvicted:
            actions = super().handle(event, now)
            taker = event.taker_request_id
            number = self.request_number(taker) if taker is not None else None
            self._call_recorder.evicted(event.block_hash, event.owner, number, now)
            return actions
        facts = self._call_recorder.facts(self._facts, event)
        state = self._requests.states.get(getattr(event, "request_id", ""))

        def answer(actions: list[ev.Action]) -> Any:
            return self._answer(event, actions, state)

        op = str(event.__struct_config__.tag)
        return self._call_recorder.record(
            op, now, facts, answer, super().handle, event, now, orders=record_format.orders_answer
        )

    def _facts(self, event: ev.Event) -> tuple[Any, ...]:
        """Return the event as plain values: requests by number, and block hashes as the difference from
        ``chain_before``."""
        if isinstance(event, ev.RequestArrived):
            return record_format.arrival_facts(event)
        if isinstance(event, ev.ClientEventReceived):
            return record_format.event_facts(event.emitter, event.event)
        if isinstance(event, ev.RequestAdmitted | ev.TurnFinished):
            return self._with_chain(event)
        if isinstance(event, ev.CacheReset):
            return () if event.device else (False,)
        facts = list(msgspec.structs.astuple(event))
        if isinstance(event, ev.VictimNeeded | ev.DemandSampled):
            facts[1] = self._running_facts(event.running)
        elif hasattr(event, "request_id") and not isinstance(event, ev.UntrackedRequestArrived):
            facts[0] = self.request_number(facts[0])
        return tuple(facts)

    def _with_chain(self, event: ev.RequestAdmitted | ev.TurnFinished) -> tuple[Any, ...]:
        request_id, number = event.request_id, self.request_number(event.request_id)
        state = self._requests.states.get(request_id)
        if isinstance(event, ev.TurnFinished):
            chain = record_format.chain_facts(self.chain_before(request_id), event.block_hashes)
            self._chains.pop(request_id, None)
            return record_format.turn_end_facts(number, event, chain)
        if state is None or state.program is None:
            # Only placement uses the hashes of such requests, to find prefixes that programs have too.
            hashes = event.block_hashes if self._tiers.places else ()
            return record_format.admission_facts(number, event, record_format.chain_facts((), hashes))
        chain = record_format.chain_facts(self.chain_before(request_id), event.block_hashes)
        self._chains[request_id] = list(event.block_hashes)
        return record_format.admission_facts(number, event, chain)

    def _answer(self, event: ev.Event, actions: list[ev.Action], state: Any) -> Any:
        """Return the answer to record for an event, made from the actions or from the request's new state;
        ``None`` for an event without an answer."""
        if isinstance(event, ev.RequestArrived | ev.UntrackedRequestArrived):
            return record_format.request_state_answer(self._requests.states[event.request_id])
        if isinstance(event, ev.RequestAdmitted):
            return record_format.split_answer(state.record if state is not None else None)
        last = actions[-1] if actions else None
        if isinstance(event, ev.AdmissionRequested):
            return isinstance(last, ev.RequestLetIn)
        if isinstance(last, ev.LeaseGranted):
            return record_format.lease_answer(last.lease)
        if isinstance(last, ev.RecoveryChosen):
            return last.method.value
        if isinstance(last, ev.RequestChosen):
            return self.request_number(last.request_id)
        if isinstance(last, ev.LoadAheadChosen):
            return tuple(last)
        if isinstance(event, ev.ClientEventReceived) and isinstance(last, ev.EventAnswered):
            lease = self._leases.get(ProgramId(event.event.program_id))
            outcome = last.outcome.outcome.value
            return (outcome,) if lease is None else (outcome, lease.expires_s, lease.silent_s)
        if isinstance(event, ev.YieldOrdered) and isinstance(last, ev.EventAnswered):
            return (last.outcome.outcome.value,)
        return None

    # -- queries ------------------------------------------------------------------

    def queue_key(self, request_id: str, *, preempted: bool | None = None) -> tuple[Any, ...]:
        facts = (self.request_number(request_id), preempted)
        return self._ask("key", None, facts, super().queue_key, request_id, preempted=preempted)

    def promoted_s(self, request_id: str) -> float:
        return self._ask("promoted", None, (self.request_number(request_id),), super().promoted_s, request_id)

    def subject_to_admission(self, request_id: str, *, preempted: bool | None = None) -> bool:
        facts = (self.request_number(request_id), preempted)
        return self._ask("gate", None, facts, super().subject_to_admission, request_id, preempted=preempted)

    def is_parked(self, request_id: str) -> bool:
        return self._ask("park", None, (self.request_number(request_id),), super().is_parked, request_id)

    def blocks_later_requests(self, request_id: str, now: float) -> bool:
        facts = (self.request_number(request_id),)
        return self._ask("line", now, facts, super().blocks_later_requests, request_id, now)

    def owner_standing(
        self, program_id: ProgramId, left: AbandonedBranch | None = None
    ) -> tuple[float, ...] | None:
        def answer(standing: tuple[float, ...] | None) -> Any:
            return standing, self.owner_score(standing)

        facts = (program_id, left)
        return self._call_recorder.record(
            "standing", None, facts, answer, super().owner_standing, program_id, left
        )

    # -- inside -------------------------------------------------------------------

    def _ask(
        self,
        op: str,
        now: float | None,
        facts: tuple[Any, ...],
        ask: Callable[..., T],
        *args: Any,
        **more: Any,
    ) -> T:
        answer: T = self._call_recorder.record(op, now, facts, _identity, ask, *args, **more)
        return answer

    def chain_before(self, request_id: str) -> Sequence[Any]:
        """Return the chain of block hashes with which the request's next chain is compared. Only the
        difference is recorded.

        This is the chain recorded at the request's last admission. If no chain was recorded for the request,
        it is the last context of the request's program. Empty if there is no such context either."""
        chain = self._chains.get(request_id)
        if chain is not None:
            return chain
        request_state = self._requests.states.get(request_id)
        program = request_state.program if request_state is not None else None
        before = self.state.contexts.get(program.id) if program is not None else None
        return before if before is not None else ()

    def request_number(self, request_id: str) -> int | str:
        """Return the number of a request that is in the engine; return the id of any other request."""
        request_state = self._requests.states.get(request_id)
        return request_state.arrival if request_state is not None else request_id

    def _running_facts(self, running: Sequence[RunningRequestView]) -> list[Any]:
        return [record_format.running_facts(self.request_number(view.request_id), view) for view in running]

    def _sums(self) -> dict[str, Any]:
        return {
            "decisions": self._call_recorder.decisions.count,
            "leases": len(self._leases),
            "lease_blocks": self._leases.blocks,
            "requests": len(self._requests.states),
            "programs": {status.value: count for status, count in sorted(self._programs.counts.items())},
            "ledger": msgspec.to_builtins(self.state.ledger.totals),
        }


def _identity(answer: object) -> object:
    return answer


def _exception_answer(error: Exception) -> dict[str, str]:
    return {"raised": type(error).__name__}
