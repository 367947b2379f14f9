"""Which prefill and which decode engine serve a request (DualPath §6.1): facts and ``now`` in, actions out.

The paper's choices are those of ``policy.pd_pairs``; here is what a gateway needs around them: engines that
come and go under names, requests that fail and are sent again, what a program has in storage, and bounds.
There is no affinity: a turn's KV comes from storage wherever it goes, and the choice is by load alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

from ...policy.pd_pairs import PairScheduler
from ...policy.pd_views import FULL_BLOCK_TOKENS, PdRequest
from ..core import facts
from ..core.facts import AnyAction, AnyFact, Cut, Probe, Refuse
from ..core.limits import CoreCounts, CoreLimits
from .facts import EndedCounted, EngineSeen, NicTold, Role, SendPair
from .flight import Flight, Program

Key = tuple[str, str]
"""Tenant and program id."""
PdFact = AnyFact | EngineSeen | NicTold
ROLE_MISSING_S = 5.0
"""Where nobody starts engines, requests that were taken in wait so long for a role that no engine has: an
engine that is back at the next look or two costs nobody a request, and one that has to load takes longer."""
COME_AGAIN_S = 5.0
"""Said to whoever is refused for that."""
MOST_PROGRAMS = 200_000
"""Of which it is known how much of their context is in storage; those longest silent are forgotten."""


@dataclass(slots=True)
class Engine:
    """One that is there."""

    seen: EngineSeen
    heard_s: float
    number: int | None = None
    """By which the books know it, each life another one; ``None``: they do not yet."""
    is_open: bool = False
    """Requests may go there."""
    draining: bool = False
    suspect: bool = False
    """It failed at a request, or was not heard of for long; until it is heard of again."""
    probed_s: float | None = None


class PdCore:
    """One for all requests. No clock and no I/O; one thread at a time."""

    def __init__(
        self,
        pairs: PairScheduler | None = None,
        limits: CoreLimits | None = None,
        *,
        engines_come: bool = False,
    ) -> None:
        """``engines_come``: somebody starts engines where some are missing, so requests wait for them; else
        they are refused at once, and those that were taken in before soon."""
        self._engines_come = engines_come
        self._missing_since_s: float | None = None
        """When a tick first found a role that no engine has."""
        self.pairs = pairs or PairScheduler()
        self.limits = limits or CoreLimits()
        self.counts = CoreCounts()
        self.engines: dict[str, Engine] = {}
        self.flights: dict[str, Flight] = {}
        self._names: dict[tuple[Role, int], str] = {}
        """Engines that the books know."""
        self._nodes: dict[str, int] = {}
        self._numbers = count()
        self.programs: OrderedDict[Key, Program] = OrderedDict()
        """The one heard of last is the last."""
        self._paired = 0
        """Requests that were sent to a pair."""
        self.drained: dict[str, str] = {}
        """Instances that were drained, by engine: a blip undrains nobody."""
        self._fleet: tuple[Role | None, int] | None = None
        """Which role nobody has, and the longest request that can be held; ``None``: not known any more."""
        self._engines_changed = False
        """Some may be chosen that could not, or the other way round, since all lined up."""
        self._actions: list[AnyAction] = []
        self._handlers = {
            EngineSeen: self._seen,
            NicTold: self._nic_told,
            facts.Prefilled: self._prefilled,
            facts.ReplicaGone: self._gone,
            facts.ReplicaDrains: self._drains,
            facts.ReplicaStays: self._stays,
            facts.Asked: self._asked,
            facts.Sent: self._sent,
            facts.Began: self._began,
            facts.Ended: self._ended,
            EndedCounted: self._ended,
            facts.Failed: self._failed,
            facts.ProgramEnded: self._program_ended,
            facts.Tick: self._tick,
        }

    def take(self, fact: PdFact, now: float) -> list[AnyAction]:
        """Take in what happened; returns what is to be done now, in this order. Raises ``ValueError`` for an
        engine that cannot be; what is about moves and homes means nothing here and is left aside."""
        handler = self._handlers.get(type(fact))
        if handler is not None:
            handler(fact, now)  # type: ignore[operator]
        if self._engines_changed:
            self._engines_changed = False
            self._line_up()
        self._dispatch(now)
        actions, self._actions = self._actions, []
        return actions

    @property
    def waiting(self) -> int:
        """Requests that have no pair of engines."""
        return len(self.flights) - self._paired

    def stored_tokens(self, tenant: str, program_id: str) -> int:
        """Of a program's context, as far as is known; 0: nothing."""
        program = self.programs.get((tenant, program_id))
        return program.stored_tokens if program is not None else 0

    # -- engines ------------------------------------------------------------------

    def _seen(self, fact: EngineSeen, now: float) -> None:
        if fact.kv_tokens < 1 or not fact.node or fact.max_running < 0:
            raise ValueError(
                f"engine {fact.replica_id!r}: kv_tokens {fact.kv_tokens}, node {fact.node!r}, max_running "
                f"{fact.max_running}; expected at least 1, a name, at least 0"
            )
        node = self._nodes.setdefault(fact.node, len(self._nodes))
        self.pairs.add_node(node, fact.block_s)
        known = self.engines.get(fact.replica_id)
        if known is not None and (known.seen.instance, known.seen.role) != (fact.instance, fact.role):
            self._lose(fact.replica_id, now)
            known = None
        if known is None:
            drained = self.drained.get(fact.replica_id) == fact.instance
            known = self.engines[fact.replica_id] = Engine(fact, now, draining=drained)
            self._fleet = None
        elif (known.seen.node, known.seen.kv_tokens) != (fact.node, fact.kv_tokens):
            self._forget(known)  # to the books it is another one; requests that are there stay
        if known.seen != fact:
            self._fleet = None
        known.seen, known.heard_s, known.probed_s, known.suspect = fact, now, None, False
        self._enter(known)
        self._limit(known)

    def _enter(self, engine: Engine) -> None:
        """It may be chosen, if nothing speaks against it."""
        if engine.is_open or engine.draining or engine.suspect:
            return
        engine.is_open = self._engines_changed = True
        seen = engine.seen
        if engine.number is not None:
            if seen.role is Role.PREFILL:
                self.pairs.resume_prefill(engine.number)
            else:
                self.pairs.resume_decode(engine.number)
            return
        node = self._nodes[seen.node]
        engine.number = next(self._numbers)
        self._names[seen.role, engine.number] = seen.replica_id
        if seen.role is Role.PREFILL:
            self.pairs.add_prefill(engine.number, node)
        else:
            # Engines of one node take requests together (§6.1).
            self.pairs.add_decode(engine.number, node, node, seen.kv_tokens)
            self._limit(engine)

    def _limit(self, engine: Engine) -> None:
        """A decode engine gets no more than it runs at once."""
        seen = engine.seen
        if seen.role is Role.DECODE and engine.number is not None:
            self.pairs.limit_decode(engine.number, seen.max_running or math.inf)

    def _withdraw(self, engine: Engine) -> None:
        """Nobody new goes there for now. What is there stays in the books: it takes memory all the same."""
        if engine.number is None or not engine.is_open:
            return
        engine.is_open = False
        if engine.seen.role is Role.PREFILL:
            self.pairs.suspend_prefill(engine.number)
        else:
            self.pairs.suspend_decode(engine.number)
        self._engines_changed = True

    def _forget(self, engine: Engine) -> None:
        """To the books it is gone, and what is there with it."""
        role, number = engine.seen.role, engine.number
        if number is None:
            return
        engine.number, engine.is_open = None, False
        del self._names[role, number]
        if role is Role.PREFILL:
            self.pairs.remove_prefill(number)
        else:
            self.pairs.remove_decode(number)
        self._engines_changed = True

    def _gone(self, fact: facts.ReplicaGone, now: float) -> None:
        engine = self.engines.get(fact.replica_id)
        if engine is not None and engine.seen.instance == fact.instance:
            self._lose(fact.replica_id, now)

    def _lose(self, replica_id: str, now: float) -> None:
        self._forget(self.engines.pop(replica_id))
        self._fleet = None
        for flight in [one for one in self.flights.values() if one.is_at(replica_id)]:
            if flight.began:
                self._actions.append(Cut(flight.asked.request_id, replica_id))
                self.counts.cut += 1
                self._close(flight)
            else:
                self._again(flight, now)

    def _drains(self, fact: facts.ReplicaDrains, now: float) -> None:
        engine = self.engines.get(fact.replica_id)
        if engine is not None and not engine.draining:
            engine.draining, self._fleet = True, None
            self.drained[fact.replica_id] = engine.seen.instance
            self._withdraw(engine)

    def _stays(self, fact: facts.ReplicaStays, now: float) -> None:
        engine = self.engines.get(fact.replica_id)
        if engine is not None and engine.draining:
            engine.draining, self._fleet = False, None
            self.drained.pop(fact.replica_id, None)
            self._enter(engine)

    def _nic_told(self, fact: NicTold, now: float) -> None:
        node = self._nodes.get(fact.node)
        if node is not None:
            self.pairs.report(node, fact.queue_s, now)

    # -- requests -----------------------------------------------------------------

    def _asked(self, fact: facts.Asked, now: float) -> None:
        known = self.flights.get(fact.request_id)
        if known is not None and known.adopted:
            self._close(known)  # it went nowhere: its gateway knows
        elif known is not None:
            self._refuse(fact.request_id, 409, "duplicate_request", "a request of this id is being answered")
            return
        absent = None if self._engines_come else self._absent()
        if absent is not None:
            message = f"no {absent.value} engine is there; try again soon"
            self._refuse(fact.request_id, 503, "no_room", message, retry_after_s=COME_AGAIN_S)
            return
        if self.waiting >= self.limits.most_waiting:
            message = f"{self.waiting} requests wait already; try again later"
            self._refuse(fact.request_id, 429, "too_many_waiting", message, retry_after_s=5.0)
            return
        longest = self._longest_tokens()
        if fact.exact and longest and fact.context_tokens > longest:
            message = (
                f"the prompt has {fact.context_tokens:,} tokens; the longest that is served is {longest:,}"
            )
            self._refuse(fact.request_id, 400, "context_too_long", message)
            return
        flight = self.flights[fact.request_id] = Flight(fact, now, now)
        if fact.program_id is not None:
            self._program(fact).requests += 1
        self._submit(flight)

    def _sent(self, fact: facts.Sent, now: float) -> None:
        """Another core chose its engines, or its gateway while it could ask nobody. Such a request is in no
        books: what it takes of its engines is not known here, until it is over or sent again."""
        flight = self.flights.get(fact.request_id)
        where = (fact.prefill_id, fact.replica_id)
        if flight is not None and where in ((None, flight.decode_id), (flight.prefill_id, flight.decode_id)):
            flight.began = flight.began or fact.began
            if fact.prefill_id is None:
                self._mark_prefilled(flight)
            return
        if flight is None:
            asked = facts.Asked(
                fact.request_id,
                fact.tenant,
                fact.context_tokens,
                program_id=fact.program_id,
                output_tokens=fact.output_tokens,
            )
            flight = self.flights[fact.request_id] = Flight(asked, now, now)
            if fact.program_id is not None:
                self._program(asked).requests += 1
        else:
            self._leave_books(flight)
        self._paired += 1
        flight.prefill_id, flight.decode_id = fact.prefill_id, fact.replica_id
        flight.prefilled, flight.began = fact.prefill_id is None, fact.began
        flight.adopted = True

    def _absent(self) -> Role | None:
        """What no engine does, even when all that are in doubt are well."""
        return self._of_fleet()[0]

    def _longest_tokens(self) -> int:
        """Of one request: both of its engines have to hold it. 0: not known."""
        return self._of_fleet()[1]

    def _of_fleet(self) -> tuple[Role | None, int]:
        """Both, looked for anew when engines have changed: there may be a thousand, and each request asks."""
        if self._fleet is None:
            there = {engine.seen.role for engine in self.engines.values() if not engine.draining}
            longest = dict.fromkeys(Role, 0)
            for engine in self.engines.values():
                tokens = engine.seen.max_context_tokens or engine.seen.kv_tokens
                longest[engine.seen.role] = max(longest[engine.seen.role], tokens)
            self._fleet = (
                next((role for role in Role if role not in there), None),
                min((tokens for tokens in longest.values() if tokens), default=0),
            )
        return self._fleet

    def _program(self, asked: facts.Asked) -> Program:
        """Of a request that has one."""
        key = asked.tenant, str(asked.program_id)
        program = self.programs.setdefault(key, Program())
        self.programs.move_to_end(key)
        if len(self.programs) > MOST_PROGRAMS:
            self.programs.popitem(last=False)
        return program

    def _submit(self, flight: Flight) -> None:
        """Have it wait for its engines. A size that none holds is cut: it was a guess, or the engines that
        held it are gone, and those that are there say so themselves."""
        asked = flight.asked
        decode_tokens = self.pairs.decode.largest_kv_tokens()
        tokens = max(1, asked.context_tokens)
        kv_tokens = tokens + asked.output_tokens
        if decode_tokens:
            tokens, kv_tokens = min(tokens, decode_tokens), min(kv_tokens, decode_tokens)
        stored = self.stored_tokens(asked.tenant, asked.program_id) if asked.program_id is not None else 0
        hit_blocks = min(stored, tokens - 1) // FULL_BLOCK_TOKENS
        self.pairs.submit(PdRequest(asked.request_id, tokens, hit_blocks, kv_tokens))

    def _dispatch(self, now: float) -> None:
        for pair in self.pairs.dispatch(now):
            request_id = str(pair.request.request_id)
            flight = self.flights[request_id]
            flight.prefill_id = self._names[Role.PREFILL, pair.prefill]
            flight.decode_id = self._names[Role.DECODE, pair.decode]
            decode = self.engines[flight.decode_id].seen
            self._paired += 1
            blocks = sum(pair.split)
            flight.sent = SendPair(
                request_id,
                flight.decode_id,
                "pair",
                prefill_id=flight.prefill_id,
                peer=decode.peer,
                epoch=decode.epoch,
                decode_share=pair.split.decode_blocks / blocks if blocks else 0.0,
            )
            self._actions.append(flight.sent)
            self.counts.sent("pair")

    def _prefilled(self, fact: facts.Prefilled, now: float) -> None:
        flight = self.flights.get(fact.request_id)
        if flight is not None and flight.prefill_id == fact.replica_id:
            self._mark_prefilled(flight)

    def _mark_prefilled(self, flight: Flight) -> None:
        if not flight.prefilled:
            flight.prefilled = True
            if not flight.adopted:
                self.pairs.prefilled(flight.asked.request_id)

    def _began(self, fact: facts.Began, now: float) -> None:
        flight = self.flights.get(fact.request_id)
        if flight is not None and flight.decode_id == fact.replica_id:
            flight.began = True

    def _ended(self, fact: facts.Ended, now: float) -> None:
        flight = self.flights.get(fact.request_id)
        if flight is None or fact.replica_id not in (None, flight.decode_id):
            return
        asked = flight.asked
        # What an engine refuses is over as well, and nothing of it was stored.
        if fact.answered and fact.replica_id is not None and asked.program_id is not None:
            program = self._program(asked)
            program.turns += 1
            program.answered_by = fact.replica_id
            # What came with the request was a guess; and a context that its client has cut is short again.
            counted = fact.prompt_tokens if isinstance(fact, EndedCounted) else 0
            program.stored_tokens = (counted or asked.context_tokens) + fact.output_tokens
        self._close(flight)

    def _failed(self, fact: facts.Failed, now: float) -> None:
        flight = self.flights.get(fact.request_id)
        if flight is None or not flight.is_at(fact.replica_id):
            return
        flight.failures += 1
        flight.failures_computing += fact.computing
        engine = self.engines.get(fact.replica_id)
        if engine is not None:
            self._doubt(engine, now)
        limits = self.limits
        if flight.began:
            self._close(flight)  # whoever passes it on has ended the stream
        elif (
            flight.failures >= limits.most_failures
            or flight.failures_computing >= limits.most_failures_computing
        ):
            self._close(flight)
            message = f"{flight.failures} pairs of engines in turn did not answer"
            self._refuse(fact.request_id, 502, "replicas_failed", message, retry_after_s=1.0)
        else:
            self._again(flight, now)

    def _again(self, flight: Flight, now: float) -> None:
        """From the beginning, with other engines if there are any."""
        self._leave_books(flight)
        flight.prefill_id = flight.decode_id = flight.sent = None
        flight.prefilled = False
        flight.waiting_since_s = now
        self.counts.replayed += 1
        self._submit(flight)

    def _leave_books(self, flight: Flight) -> None:
        self._paired -= flight.decode_id is not None
        if not flight.adopted:
            self.pairs.end(flight.asked.request_id)
        flight.adopted = False

    def _close(self, flight: Flight) -> None:
        asked = flight.asked
        del self.flights[asked.request_id]
        key = asked.tenant, asked.program_id or ""
        program = self.programs.get(key) if asked.program_id is not None else None
        if program is not None:
            program.requests = max(0, program.requests - 1)
            if not program.requests and not program.turns:
                del self.programs[key]  # it never had an answer
        self._leave_books(flight)

    def _program_ended(self, fact: facts.ProgramEnded, now: float) -> None:
        self.programs.pop((fact.tenant, fact.program_id), None)

    # -- as time goes by ----------------------------------------------------------

    def _tick(self, fact: facts.Tick, now: float) -> None:
        limits = self.limits
        for engine in self.engines.values():
            silent = now - engine.heard_s >= limits.lease_s
            if silent and (engine.probed_s is None or now - engine.probed_s >= limits.lease_s):
                self._doubt(engine, now)
        waited = [
            flight
            for flight in self.flights.values()
            if flight.decode_id is None and now - flight.waiting_since_s >= limits.wait_s
        ]
        for flight in waited:
            self._close(flight)
            message = f"no pair of engines had room for it in {limits.wait_s:g} s"
            self._refuse(flight.asked.request_id, 503, "no_room", message, retry_after_s=10.0)
        self._give_up_missing(now)

    def _give_up_missing(self, now: float) -> None:
        """Whoever waits for a role that nobody has, and that nobody is going to fill, is told as newcomers
        are."""
        absent = None if self._engines_come else self._absent()
        if absent is None:
            self._missing_since_s = None
            return
        if self._missing_since_s is None:
            self._missing_since_s = now
        if now - self._missing_since_s < ROLE_MISSING_S:
            return
        message = f"no {absent.value} engine has been there for {ROLE_MISSING_S:g} s; try again soon"
        for flight in [one for one in self.flights.values() if one.decode_id is None]:
            self._close(flight)
            self._refuse(flight.asked.request_id, 503, "no_room", message, retry_after_s=COME_AGAIN_S)

    def _line_up(self) -> None:
        """All who wait line up anew, as they came and of the size that engines hold now."""
        waiting = sorted(
            (flight for flight in self.flights.values() if flight.decode_id is None),
            key=lambda flight: flight.since_s,
        )
        for flight in waiting:
            self.pairs.end(flight.asked.request_id)
        for flight in waiting:
            self._submit(flight)

    def _doubt(self, engine: Engine, now: float) -> None:
        """Nobody new goes there until it is heard of again."""
        engine.suspect, engine.probed_s = True, now
        self._withdraw(engine)
        self._actions.append(Probe(engine.seen.replica_id, engine.seen.instance))

    def _refuse(
        self, request_id: str, status: int, code: str, message: str, retry_after_s: float | None = None
    ) -> None:
        self.counts.refused += 1
        self._actions.append(Refuse(request_id, status, code, message, retry_after_s))
