"""Telling a steward what a tape says: one method a kind of record, from its facts to the call they mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sojourn.ids import ProgramId

from ..engine.state import Ticket
from ..engine.tape import Record, TapingDesk, TapingSteward, records
from ..policy.views import LeftBehind, RoomNeed, RunningView

Call = Callable[[], Any]


class TapePlayer:
    """Turns records into calls of one steward; ``call`` makes none of them itself."""

    def __init__(self, steward: TapingSteward) -> None:
        self.steward = steward
        self._desk = TapingDesk(steward)
        self._tickets: dict[int, Ticket] = {}
        """Of requests in the engine, by the number they arrived with."""
        self._programs: dict[int, str] = {}
        """Of all requests that a program sent."""

    def call(self, record: Record) -> Call:
        """The recorded call. Raises ``ValueError``, ``TypeError`` or ``LookupError`` for nonsense."""
        make: Callable[..., Call] = getattr(self, record.op)
        return make(record.now, *record.facts)

    def program_of(self, record: Record) -> str | None:
        """Whom a record tells of, where it is one program."""
        shape = records.SHAPES[record.op]
        told = dict(zip(shape.facts, record.facts, strict=True))
        if "request" in told:
            return self._programs.get(told["request"])
        if record.op in ("event", "room"):
            program_id = told["event" if record.op == "event" else "need"]["program_id"]
        else:
            program_id = told.get("program_id")
        return program_id if isinstance(program_id, str) else None

    # -- requests -----------------------------------------------------------

    def arrive(self, now: float, *facts: Any) -> Call:
        fact = records.read_arrival(facts)
        return lambda: self._came(self.steward.arrived(fact, now))

    def stranger(self, now: float, request_id: str) -> Call:
        def call() -> None:
            self.steward.stranger(request_id, now)
            self._came(self.steward.tickets[request_id])

        return call

    def left(self, now: None, request: int | str) -> Call:
        return partial(self.steward.stranger_left, self._gone(request))

    def admit(self, now: float, request: int | str, *rest: Any) -> Call:
        request_id = self._request_id(request)
        hashes = records.read_chain(self.steward.chain_before(request_id), rest[-1])
        return partial(self.steward.admitted, records.read_admission(request_id, rest[:-1], hashes), now)

    def token(self, now: float, request: int | str) -> Call:
        return partial(self.steward.first_token, self._request_id(request), now)

    def preempt(self, now: float, request: int | str, options: dict[str, Any]) -> Call:
        return partial(self.steward.preempted, self._request_id(request), now, **options)

    def end(self, now: float, request: int | str, *rest: Any) -> Call:
        request_id = self._gone(request)
        hashes = records.read_chain(self.steward.chain_before(request_id), rest[-1])
        return partial(self.steward.finished, records.read_turn_end(request_id, rest[:-1], hashes), now)

    def evict(
        self, now: None, program_id: str | None, taker: int | str | None, blocks: str, times_s: list[float]
    ) -> Call:
        owner = ProgramId(program_id) if program_id is not None else None
        taker_id = self._request_id(taker) if taker is not None else None
        gone = list(zip(records.read_hashes(blocks), times_s, strict=True))

        def call() -> None:
            for block_hash, at_s in gone:
                self.steward.evicted(block_hash, owner, taker_id, at_s)

        return call

    # -- events ---------------------------------------------------------------

    def event(self, now: float, emitter: str, event: Any) -> Call:
        return partial(self._desk.fold, emitter, records.read_event(event), now)

    # -- time, room, order ----------------------------------------------------

    def tick(self, now: float) -> Call:
        return partial(self.steward.tick, now)

    def step(self, now: None, tokens: int, seconds: float, requests: int) -> Call:
        return partial(self.steward.step_took, tokens, seconds, requests)

    def orders(self, now: None) -> Call:
        return self.steward.take_actions

    def room(self, now: float, need: Any, freed_by: list[int] | None) -> Call:
        asked = RoomNeed(**need)
        if freed_by is None:
            return partial(self.steward.make_room, asked, now)
        freed = iter(freed_by)

        def answer(program_id: ProgramId) -> int:
            for blocks in freed:
                return blocks
            raise LookupError(f"{len(freed_by)} leases were asked about, and now one more")

        return partial(self.steward.make_room, asked, now, answer)

    def enter(
        self, now: float, request: int, need_blocks: int, free_blocks: int, options: dict[str, Any]
    ) -> Call:
        ticket = self._tickets[request]
        return partial(self.steward.may_enter, ticket, need_blocks, free_blocks, now, **options)

    def gate(self, now: None, request: int, preempted: bool) -> Call:
        ticket = self._tickets[request]

        def call() -> None:
            ticket.preempted = preempted
            self.steward.behind_gate(ticket)

        return call

    def line(self, now: float, request: int) -> Call:
        return partial(self.steward.holds_the_line, self._tickets[request], now)

    def key(self, now: None, request: int, options: dict[str, Any]) -> Call:
        return partial(self.steward.queue_key, self._tickets[request], **options)

    def promoted(self, now: None, request: int) -> Call:
        return partial(self.steward.promoted_s, self._tickets[request])

    def standing(self, now: None, program_id: str, left: list[float] | None) -> Call:
        behind = LeftBehind(left[0], int(left[1])) if left is not None else None
        return partial(self.steward.owner_standing, ProgramId(program_id), behind)

    def victim(
        self, now: float, short_blocks: int, running: list[list[int]], options: dict[str, Any]
    ) -> Call:
        return partial(self.steward.victim, self._running(running), short_blocks, now, **options)

    def look(self, now: float, used_blocks: int, running: list[list[int]], options: dict[str, Any]) -> Call:
        return partial(self.steward.look_ahead, self._running(running), used_blocks, now, **options)

    def guess(
        self,
        now: float,
        request: int | str,
        at_tokens: int,
        remaining: list[float],
        options: dict[str, Any],
    ) -> Call:
        request_id = self._request_id(request)
        return partial(self.steward.guessed, request_id, at_tokens, tuple(remaining), now, **options)

    def pin(self, now: float, program_id: str, blocks: int, options: dict[str, Any]) -> Call:
        return partial(self.steward.pinned, ProgramId(program_id), blocks, now, **options)

    def refused(self, now: None) -> Call:
        return self.steward.take_refused

    def park(self, now: None, request: int) -> Call:
        return partial(self.steward.parked, self._tickets[request])

    def prefetch(self, now: float, program_id: str, missing_blocks: int, options: dict[str, Any]) -> Call:
        return partial(self.steward.prefetched, ProgramId(program_id), missing_blocks, now, **options)

    def reset(self, now: float) -> Call:
        return partial(self.steward.cache_reset, now)

    def close(self, now: None, reason: str) -> Call:
        return partial(self.steward.close_tape, reason)

    # -- inside ---------------------------------------------------------------

    def _running(self, running: list[list[int]]) -> list[RunningView]:
        return [records.read_running(self._request_id(number), rest) for number, *rest in running]

    def _came(self, ticket: Ticket) -> None:
        self._tickets[ticket.arrival] = ticket
        if ticket.program is not None:
            self._programs[ticket.arrival] = ticket.program.id

    def _gone(self, request: int | str) -> str:
        request_id = self._request_id(request)
        if isinstance(request, int):
            del self._tickets[request]
        return request_id

    def _request_id(self, request: int | str) -> str:
        return request if isinstance(request, str) else self._tickets[request].request_id
