"""The steward with a tape running: it does the same, and writes down what it was told and what it said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from sojourn.ids import ProgramId

from ...policy.costs import PrefillCurve
from ...policy.preset import Preset
from ...policy.recovery import Recovery
from ...policy.views import LeftBehind, RoomNeed, RunningView
from ..facts import Action, Admission, Arrival, TurnEnd
from ..leases import Lease
from ..state import Histories, Pool, StewardLimits, Ticket
from ..steward import Steward
from . import records
from .recording import Recording, Sink

T = TypeVar("T")


class TapingSteward(Steward):
    """A ``Steward`` whose every call is written to ``sink``. What it answers and raises is the same.

    A new method of ``Steward`` that changes its state or answers the engine
    belongs here too; a test says so.
    """

    def __init__(
        self,
        sink: Sink,
        preset: Preset,
        pool: Pool,
        *,
        limits: StewardLimits | None = None,
        curve: PrefillCurve | None = None,
        histories: Histories | None = None,
    ) -> None:
        self._tape = Recording(sink, self._sums)
        self._chains: dict[str, list[Any]] = {}
        """Of each request in the engine the chain of block hashes that was written down last."""
        super().__init__(
            preset, pool, limits=limits, curve=curve, histories=histories, decisions=self._tape.decisions
        )

    @property
    def taping(self) -> bool:
        """Whether anything is still written down."""
        return self._tape.running

    def close_tape(self, reason: str) -> None:
        self._tape.close(reason)
        self._chains.clear()

    # -- requests -----------------------------------------------------------

    def arrived(self, fact: Arrival, now: float) -> Ticket:
        facts = self._tape.facts(records.arrival_facts, fact)
        return self._tape.told("arrive", now, facts, records.ticket_answer, super().arrived, fact, now)

    def stranger(self, request_id: str, now: float) -> None:
        def answer(_: None) -> Any:
            return records.ticket_answer(self.tickets[request_id])

        self._tape.told("stranger", now, (request_id,), answer, super().stranger, request_id, now)

    def stranger_left(self, request_id: str) -> None:
        facts = (self._number(request_id),)
        self._tape.told("left", None, facts, None, super().stranger_left, request_id)

    def admitted(self, fact: Admission, now: float) -> None:
        ticket = self.tickets.get(fact.request_id)

        def facts() -> tuple[Any, ...]:
            chain: tuple[int, bytes] = (0, b"")
            if ticket is not None and ticket.program is not None:  # of others nobody looks at it
                chain = records.chain_facts(self.chain_before(fact.request_id), fact.block_hashes)
                self._chains[fact.request_id] = list(fact.block_hashes)
            return records.admission_facts(self._number(fact.request_id), fact, chain)

        def answer(_: None) -> Any:
            return records.split_answer(ticket.record if ticket is not None else None)

        self._tape.told("admit", now, self._tape.facts(facts), answer, super().admitted, fact, now)

    def first_token(self, request_id: str, now: float) -> None:
        facts = (self._number(request_id),)
        self._tape.told("token", now, facts, None, super().first_token, request_id, now)

    def preempted(self, request_id: str, now: float, **more: Any) -> Recovery:
        facts = (self._number(request_id), more)

        def answer(recovery: Recovery) -> Any:
            return recovery.value

        return self._tape.told("preempt", now, facts, answer, super().preempted, request_id, now, **more)

    def finished(self, fact: TurnEnd, now: float) -> Lease | None:
        def facts() -> tuple[Any, ...]:
            chain = records.chain_facts(self.chain_before(fact.request_id), fact.block_hashes)
            self._chains.pop(fact.request_id, None)
            return records.turn_end_facts(self._number(fact.request_id), fact, chain)

        told = self._tape.facts(facts)
        return self._tape.told("end", now, told, records.lease_answer, super().finished, fact, now)

    def evicted(
        self,
        block_hash: Any,
        owner: ProgramId | None,
        taker_request_id: str | None,
        now: float,
        score: tuple[float, ...] | None = None,
    ) -> None:
        super().evicted(block_hash, owner, taker_request_id, now, score)
        taker = self._number(taker_request_id) if taker_request_id is not None else None
        self._tape.evicted(block_hash, owner, taker, now)

    # -- time, room, order ----------------------------------------------------

    def tick(self, now: float) -> None:
        self._tape.told("tick", now, (), None, super().tick, now)

    def step_took(self, tokens: int, seconds: float, requests: int) -> None:
        facts = (tokens, seconds, requests)
        self._tape.told("step", None, facts, None, super().step_took, tokens, seconds, requests)

    def take_actions(self) -> list[Action]:
        return self._tape.told("orders", None, (), records.orders_answer, super().take_actions)

    def make_room(
        self, need: RoomNeed, now: float, freed_by: Callable[[ProgramId], int] | None = None
    ) -> int:
        freed: list[int] | None = None
        asked = freed_by
        if freed_by is not None:
            freed, asked = _noted(freed_by)
        facts = self._tape.facts(records.need_facts, need, freed)
        return self._tape.told("room", now, facts, _itself, super().make_room, need, now, asked)

    def may_enter(self, ticket: Ticket, need_blocks: int, free_blocks: int, now: float, **more: Any) -> bool:
        facts = (ticket.arrival, need_blocks, free_blocks, more)
        return self._tape.told(
            "enter", now, facts, _itself, super().may_enter, ticket, need_blocks, free_blocks, now, **more
        )

    def behind_gate(self, ticket: Ticket) -> bool:
        facts = (ticket.arrival, ticket.preempted)
        return self._tape.told("gate", None, facts, _itself, super().behind_gate, ticket)

    def parked(self, ticket: Ticket) -> bool:
        return self._tape.told("park", None, (ticket.arrival,), _itself, super().parked, ticket)

    def take_refused(self) -> list[str]:
        return self._tape.told("refused", None, (), list, super().take_refused)

    def holds_the_line(self, ticket: Ticket, now: float) -> bool:
        return self._tape.told("line", now, (ticket.arrival,), _itself, super().holds_the_line, ticket, now)

    def queue_key(self, ticket: Ticket, **more: Any) -> tuple[Any, ...]:
        facts = (ticket.arrival, more)
        return self._tape.told("key", None, facts, _itself, super().queue_key, ticket, **more)

    def promoted_s(self, ticket: Ticket) -> float:
        return self._tape.told("promoted", None, (ticket.arrival,), _itself, super().promoted_s, ticket)

    def owner_standing(
        self, program_id: ProgramId, left: LeftBehind | None = None
    ) -> tuple[float, ...] | None:
        def answer(standing: tuple[float, ...] | None) -> Any:
            return standing, self.owner_score(standing)

        return self._tape.told(
            "standing", None, (program_id, left), answer, super().owner_standing, program_id, left
        )

    def victim(
        self, running: Sequence[RunningView], short_blocks: int, now: float, **more: Any
    ) -> str | None:
        def facts() -> tuple[Any, ...]:
            return short_blocks, self._running_facts(running), more

        told = self._tape.facts(facts)
        return self._tape.told(
            "victim", now, told, self._chosen, super().victim, running, short_blocks, now, **more
        )

    def look_ahead(
        self, running: Sequence[RunningView], used_blocks: int, now: float, **more: Any
    ) -> str | None:
        def facts() -> tuple[Any, ...]:
            return used_blocks, self._running_facts(running), more

        told = self._tape.facts(facts)
        return self._tape.told(
            "look", now, told, self._chosen, super().look_ahead, running, used_blocks, now, **more
        )

    def guessed(
        self, request_id: str, at_tokens: int, remaining: tuple[float, ...], now: float, **more: Any
    ) -> None:
        facts = (self._number(request_id), at_tokens, remaining, more)
        called = super().guessed
        self._tape.told("guess", now, facts, None, called, request_id, at_tokens, remaining, now, **more)

    def pinned(self, program_id: ProgramId, blocks: int, now: float, **more: Any) -> Lease | None:
        facts = (program_id, blocks, more)
        answer = records.lease_answer
        return self._tape.told("pin", now, facts, answer, super().pinned, program_id, blocks, now, **more)

    def prefetched(self, program_id: ProgramId, missing_blocks: int, now: float, **more: Any) -> None:
        facts = (program_id, missing_blocks, more)
        called = super().prefetched
        self._tape.told("prefetch", now, facts, None, called, program_id, missing_blocks, now, **more)

    def cache_reset(self, now: float) -> None:
        self._tape.told("reset", now, (), None, super().cache_reset, now)

    # -- the tape -------------------------------------------------------------

    def told_event(
        self, emitter: str, event: Any, now: float, answer: Callable[[T], Any], call: Callable[[], T]
    ) -> T:
        """A client's event is folded by ``call``; ``answer`` puts its outcome into plain values."""
        facts = self._tape.facts(records.event_facts, emitter, event)
        return self._tape.told("event", now, facts, answer, call)

    def chain_before(self, request_id: str) -> Sequence[Any]:
        """The chain of block hashes that the request's next one is written down relative to."""
        chain = self._chains.get(request_id)
        if chain is not None:
            return chain
        ticket = self.tickets.get(request_id)
        program = ticket.program if ticket is not None else None
        before = self.contexts.get(program.id) if program is not None else None
        return before if before is not None else ()

    def _number(self, request_id: str) -> int | str:
        """The number of a request that is in the engine; the id itself of any other."""
        ticket = self.tickets.get(request_id)
        return ticket.arrival if ticket is not None else request_id

    def _running_facts(self, running: Sequence[RunningView]) -> list[Any]:
        return [records.running_facts(self._number(view.request_id), view) for view in running]

    def _chosen(self, request_id: str | None) -> Any:
        return self._number(request_id) if request_id is not None else None

    def _sums(self) -> dict[str, Any]:
        return {
            "decisions": self._tape.decisions.count,
            "leases": len(self.leases),
            "lease_blocks": self.leases.blocks,
            "requests": len(self.tickets),
            "programs": {status.value: count for status, count in sorted(self.table.counts.items())},
            "ledger": msgspec.to_builtins(self.ledger.totals),
        }


def _noted(
    freed_by: Callable[[ProgramId], int],
) -> tuple[list[int], Callable[[ProgramId], int]]:
    """The function, and what it was answered each time."""
    freed: list[int] = []

    def asked(program_id: ProgramId) -> int:
        blocks = freed_by(program_id)
        freed.append(blocks)
        return blocks

    return freed, asked


def _itself(answer: object) -> object:
    return answer
