"""Turns the records of a recording into calls of sojourn's scheduler.

``RecordingPlayer`` has one method per kind of record, with the name of the kind. Its arguments are the time
of the record and the record's facts (see ``record_format.RECORD_SHAPES``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sojourn.ids import ProgramId

from ..core import events_and_actions as ev
from ..policies.policy_views import AbandonedBranch, ReclaimRequest, RunningRequestView
from ..recording import RecordedCall, RecordingScheduler, record_format

SchedulerCall = Callable[[], Any]


class RecordingPlayer:
    """Converts records into calls to one scheduler. Each method returns a function that makes the call."""

    def __init__(self, program_scheduler: RecordingScheduler) -> None:
        self.program_scheduler = program_scheduler
        self._request_ids: dict[int, str] = {}
        """Id of each request that is in the engine, by its arrival number."""
        self._programs: dict[int, str] = {}
        """Program id of each request, by the request's arrival number."""

    def call(self, record: RecordedCall) -> SchedulerCall:
        """Return a function that repeats the scheduler call in ``record``. Raises ``ValueError``,
        ``TypeError`` or ``LookupError`` for an invalid record."""
        make: Callable[..., SchedulerCall] = getattr(self, record.op)
        return make(record.now, *record.facts)

    def program_of(self, record: RecordedCall) -> str | None:
        """Id of the program that a record is about; ``None`` if it is about no program."""
        shape = record_format.RECORD_SHAPES[record.op]
        facts = dict(zip(shape.facts, record.facts, strict=False))  # a record may leave optional facts out
        if "request" in facts:
            return self._programs.get(facts["request"])
        if record.op in ("event", "room"):
            program_id = facts["event" if record.op == "event" else "need"]["program_id"]
        else:
            program_id = facts.get("program_id")
        return program_id if isinstance(program_id, str) else None

    # -- requests -----------------------------------------------------------

    def arrive(self, now: float, *facts: Any) -> SchedulerCall:
        return partial(self._arrived, record_format.read_arrival(facts), now)

    def stranger(self, now: float, request_id: str) -> SchedulerCall:
        return partial(self._arrived, ev.UntrackedRequestArrived(request_id), now)

    def left(self, now: float, request: int | str) -> SchedulerCall:
        return self._handle(ev.UntrackedRequestLeft(self._gone(request)), now)

    def admit(self, now: float, request: int | str, *rest: Any) -> SchedulerCall:
        request_id = self._request_id(request)
        hashes = record_format.read_chain(self.program_scheduler.chain_before(request_id), rest[-1])
        return self._handle(record_format.read_admission(request_id, rest[:-1], hashes), now)

    def token(self, now: float, request: int | str) -> SchedulerCall:
        return self._handle(ev.FirstToken(self._request_id(request)), now)

    def preempt(self, now: float, request: int | str, *rest: Any) -> SchedulerCall:
        return self._handle(ev.RequestPreempted(self._request_id(request), *rest), now)

    def unload(self, now: float, request: int | str) -> SchedulerCall:
        return self._handle(ev.LoadGivenUp(self._request_id(request)), now)

    def end(self, now: float, request: int | str, *rest: Any) -> SchedulerCall:
        request_id = self._gone(request)
        hashes = record_format.read_chain(self.program_scheduler.chain_before(request_id), rest[-1])
        return self._handle(record_format.read_turn_end(request_id, rest[:-1], hashes), now)

    def evict(
        self, now: None, program_id: str | None, taker: int | str | None, blocks: str, times_s: list[float]
    ) -> SchedulerCall:
        owner = ProgramId(program_id) if program_id is not None else None
        taker_id = self._request_id(taker) if taker is not None else None
        gone = list(zip(record_format.read_hashes(blocks), times_s, strict=True))

        def call() -> None:
            for block_hash, at_s in gone:
                self.program_scheduler.handle(ev.BlockEvicted(block_hash, owner, taker_id), at_s)

        return call

    # -- clients, time, memory ------------------------------------------------

    def event(self, now: float, emitter: str, event: Any) -> SchedulerCall:
        return self._handle(ev.ClientEventReceived(emitter, record_format.read_event(event)), now)

    def tick(self, now: float) -> SchedulerCall:
        return self._handle(ev.Tick(), now)

    def step(
        self,
        now: float,
        tokens: int,
        seconds: float,
        requests: int,
        load_back_s_per_token: float | None,
        queued_s: float,
        kv_tokens: int = 0,
    ) -> SchedulerCall:
        return self._handle(
            ev.StepCompleted(tokens, seconds, requests, load_back_s_per_token, queued_s, kv_tokens), now
        )

    def room(self, now: float, need: Any, freed_blocks: dict[ProgramId, int] | None) -> SchedulerCall:
        return self._handle(ev.BlocksNeeded(ReclaimRequest(**need), freed_blocks), now)

    def enter(self, now: float, request: int, *rest: Any) -> SchedulerCall:
        return self._handle(ev.AdmissionRequested(self._request_ids[request], *rest), now)

    def victim(
        self, now: float, short_blocks: int, running: list[list[int]], used_blocks: int
    ) -> SchedulerCall:
        return self._handle(ev.VictimNeeded(short_blocks, self._running(running), used_blocks), now)

    def look(self, now: float, used_blocks: int, running: list[list[int]], *copies: Any) -> SchedulerCall:
        return self._handle(ev.DemandSampled(used_blocks, self._running(running), *copies), now)

    def guess(
        self, now: float, request: int | str, at_tokens: int, remaining: list[float], most_tokens: int
    ) -> SchedulerCall:
        request_id = self._request_id(request)
        return self._handle(
            ev.OutputLengthPredicted(request_id, at_tokens, tuple(remaining), most_tokens), now
        )

    def pin(self, now: float, program_id: str, *rest: Any) -> SchedulerCall:
        return self._handle(ev.CachedBlocksFound(ProgramId(program_id), *rest), now)

    def prefetch(self, now: float, program_id: str, *rest: Any) -> SchedulerCall:
        return self._handle(ev.PrefetchStarted(ProgramId(program_id), *rest), now)

    def give_way(self, now: float, program_id: str, to_program_id: str) -> SchedulerCall:
        return self._handle(ev.YieldOrdered(ProgramId(program_id), ProgramId(to_program_id)), now)

    def reset_start(self, now: float) -> SchedulerCall:
        return self._handle(ev.CacheResetStarted(), now)

    def reset(self, now: float, device: bool = True) -> SchedulerCall:
        return self._handle(ev.CacheReset(device), now)

    # -- questions ------------------------------------------------------------

    def gate(self, now: None, request: int, preempted: bool | None) -> SchedulerCall:
        request_id = self._request_ids[request]
        return partial(self.program_scheduler.subject_to_admission, request_id, preempted=preempted)

    def line(self, now: float, request: int) -> SchedulerCall:
        return partial(self.program_scheduler.blocks_later_requests, self._request_ids[request], now)

    def key(self, now: None, request: int, preempted: bool | None) -> SchedulerCall:
        return partial(self.program_scheduler.queue_key, self._request_ids[request], preempted=preempted)

    def promoted(self, now: None, request: int) -> SchedulerCall:
        return partial(self.program_scheduler.promoted_s, self._request_ids[request])

    def standing(self, now: None, program_id: str, left: list[float] | None) -> SchedulerCall:
        behind = AbandonedBranch(left[0], int(left[1])) if left is not None else None
        return partial(self.program_scheduler.owner_standing, ProgramId(program_id), behind)

    def park(self, now: None, request: int) -> SchedulerCall:
        return partial(self.program_scheduler.is_parked, self._request_ids[request])

    def close(self, now: None, reason: str) -> SchedulerCall:
        return partial(self.program_scheduler.close_recording, reason)

    # -- inside ---------------------------------------------------------------

    def _handle(self, event: ev.Event, now: float) -> SchedulerCall:
        return partial(self.program_scheduler.handle, event, now)

    def _running(self, running: list[list[int]]) -> list[RunningRequestView]:
        return [record_format.read_running(self._request_id(number), rest) for number, *rest in running]

    def _arrived(self, event: ev.RequestArrived | ev.UntrackedRequestArrived, now: float) -> None:
        self.program_scheduler.handle(event, now)
        number = self.program_scheduler.request_number(event.request_id)
        known = self.program_scheduler.request(event.request_id)
        assert isinstance(number, int)
        assert known is not None
        self._request_ids[number] = event.request_id
        if known.program_id is not None:
            self._programs[number] = known.program_id

    def _gone(self, request: int | str) -> str:
        request_id = self._request_id(request)
        if isinstance(request, int):
            del self._request_ids[request]
        return request_id

    def _request_id(self, request: int | str) -> str:
        return request if isinstance(request, str) else self._request_ids[request]
