"""Facts and answers as plain JSON values, and facts back as what they were."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import msgspec
from sojourn.events import AnyEvent, ProgramEnd, ProgramStart, ToolStop
from sojourn.hints import AgenticContext
from sojourn.ids import ProgramId
from sojourn.wire import Outcome

from ...metrics.ledger import TurnRecord, common_prefix
from ...policy.views import RoomNeed, RunningView
from ...program.toolcalls import ToolCall
from ..desk import PROGRAM_OUTCOMES
from ..facts import Action, Admission, Arrival, TurnEnd, TurnOutcome
from ..hint import MAX_NAME_CHARS
from ..identity import Identity
from ..leases import Lease
from ..state import Ticket


class Shape(NamedTuple):
    """What the parts of one kind of record mean, by their places."""

    meaning: str
    facts: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    """Names of a list's places, or one name for a single value."""


_LEASE = (
    "ttl_s", "expires_s", "silent_s", "limit_s", "blocks", "reload_s", "reason", "tool", "rank",
)  # fmt: skip

SHAPES: dict[str, Shape] = {
    "tick": Shape("time passed"),
    "step": Shape("an engine step took its time", ("tokens", "seconds", "requests")),
    "event": Shape(
        "a client's event", ("emitter", "event"), ("outcome", "lease_expires_s", "lease_silent_s")
    ),
    "arrive": Shape(
        "a request arrived",
        ("request_id", "prompt_tokens", "program_id", "context", "outcome"),
        ("number", "rank", "turn", "gap_s", "leased", "tool_before", "hinted_ttl_s", "final"),
    ),
    "stranger": Shape("a request that could not be taken in arrived", ("request_id",), ("number", "rank")),
    "gate": Shape("whether the entry policy has a say", ("request", "preempted"), ("behind_gate",)),
    "key": Shape("a request's place in the queue", ("request", "options"), ("key",)),
    "promoted": Shape("when waiting alone lets a request go first", ("request",), ("promoted_s",)),
    "enter": Shape(
        "may a program enter", ("request", "need_blocks", "free_blocks", "options"), ("enters",)
    ),
    "line": Shape("does the request that is kept out hold the line", ("request",), ("holds",)),
    "park": Shape("does a request wait because of where its program is", ("request",), ("parked",)),
    "refused": Shape("requests to be refused were taken", (), ("request_ids",)),
    "room": Shape("room was asked for", ("need", "freed_by"), ("leases_given_up",)),
    "victim": Shape("whom to preempt", ("short_blocks", "running", "options"), ("request",)),
    "look": Shape("whom to copy ahead", ("used_blocks", "running", "options"), ("request",)),
    "guess": Shape(
        "what a network expects a request to write yet", ("request", "at_tokens", "remaining", "options")
    ),
    "standing": Shape("what the order of reuse goes by", ("program_id", "left"), ("standing", "score")),
    "admit": Shape(
        "a request got its blocks",
        ("request", "cached_tokens", "host_tokens", "tokens", "resumed", "most_tokens", "chain"),
        ("device", "new", "tail", "lost", "evictor", "recomputed_after_preemption"),
    ),
    "token": Shape("a request's first token exists", ("request",)),
    "preempt": Shape("a running request lost its blocks", ("request", "options"), ("recovery",)),
    "evict": Shape(
        "cached blocks were reused, one time each", ("program_id", "taker", "blocks", "times_s")
    ),
    "end": Shape(
        "a request left the engine",
        ("request", "outcome", "tool_calls", "prompt_tokens", "output_tokens", "cached_blocks",
         "held_blocks", "unheld_blocks", "used_blocks", "chain"),
        _LEASE,
    ),
    "left": Shape("a request of no program left the engine", ("request",)),
    "orders": Shape("orders were taken", (), ("orders",)),
    "pin": Shape(
        "still-cached blocks can be held", ("program_id", "blocks", "options"), _LEASE
    ),
    "prefetch": Shape("a prefix was to be brought back", ("program_id", "missing_blocks", "options")),
    "reset": Shape("the prefix cache is about to be cleared"),
    "close": Shape("the tape ends", ("reason",), ("totals",)),
}  # fmt: skip
"""Every kind of record. ``request`` is the number its ``arrive`` or ``stranger`` was answered with."""

DECISION = ("at_s", "kind", "program_id", "reason", "numbers")
"""What an entry of a record's last part means, as in the decision log."""

HASH_BYTES = 8
"""Of each block hash: among 10^6 blocks two agree with a chance of 3 in 10^8."""


# --- facts ---------------------------------------------------------------------------------------


def arrival_facts(fact: Arrival) -> tuple[Any, ...]:
    identity = fact.identity
    outcome = identity.outcome.value if identity.outcome is not None else None
    return fact.request_id, fact.prompt_tokens, identity.program_id, _context(identity.context), outcome


def read_arrival(facts: Sequence[Any]) -> Arrival:
    request_id, prompt_tokens, program_id, context, outcome = facts
    return Arrival(
        request_id=request_id,
        identity=Identity(
            ProgramId(program_id) if program_id is not None else None,
            msgspec.convert(context, AgenticContext) if context is not None else None,
            Outcome(outcome) if outcome is not None else None,
        ),
        prompt_tokens=prompt_tokens,
    )


def _context(context: AgenticContext | None) -> Any:
    """The hint without its events, which have records of their own, and with no name longer than is kept."""
    if context is None:
        return None
    ours = context.sojourn
    if ours is not None:
        ours = msgspec.structs.replace(
            ours,
            emitter=None,
            events=[],
            agent_type=_clipped(ours.agent_type),
            node=_clipped(ours.node),
            tenant=_clipped(ours.tenant),
        )
    kept = msgspec.structs.replace(
        context, request_id=_clipped(context.request_id), step_id=None, sojourn=ours
    )
    return msgspec.to_builtins(kept)


def _clipped(name: str | None) -> str | None:
    return name[:MAX_NAME_CHARS] if name is not None else None


def event_facts(emitter: str, event: AnyEvent) -> tuple[Any, ...]:
    """The event without words that nothing is decided by."""
    if isinstance(event, ProgramStart):
        event = msgspec.structs.replace(event, name=None)
    elif isinstance(event, ToolStop):
        event = msgspec.structs.replace(event, status="ok")
    elif isinstance(event, ProgramEnd) and event.status not in PROGRAM_OUTCOMES:
        event = msgspec.structs.replace(event, status="error")
    return emitter, msgspec.to_builtins(event)


def read_event(document: Any) -> AnyEvent:
    event: AnyEvent = msgspec.convert(document, AnyEvent)
    return event


def running_facts(number: int | str, view: RunningView) -> tuple[Any, ...]:
    """What an engine says of a request that runs; the rest of the view is the steward's."""
    return (
        number, view.program_rank, view.position, view.blocks, view.context_tokens, view.output_tokens,
        view.most_tokens, view.freed_blocks,
    )  # fmt: skip


def read_running(request_id: str, facts: Sequence[Any]) -> RunningView:
    rank, position, blocks, context_tokens, output_tokens, most_tokens, freed_blocks = facts
    return RunningView(
        request_id,
        rank,
        position,
        blocks,
        context_tokens=context_tokens,
        output_tokens=output_tokens,
        most_tokens=most_tokens,
        freed_blocks=freed_blocks,
    )


def admission_facts(number: int | str, fact: Admission, chain: tuple[int, bytes]) -> tuple[Any, ...]:
    return (
        number,
        fact.cached_tokens,
        fact.host_tokens,
        fact.tokens,
        fact.resumed,
        fact.most_tokens,
        chain,
    )


def read_admission(request_id: str, facts: Sequence[Any], hashes: Sequence[bytes]) -> Admission:
    cached_tokens, host_tokens, tokens, resumed, most_tokens = facts
    return Admission(
        request_id=request_id,
        cached_tokens=cached_tokens,
        host_tokens=host_tokens,
        tokens=tokens,
        block_hashes=hashes,
        resumed=resumed,
        most_tokens=most_tokens,
    )


def turn_end_facts(number: int | str, fact: TurnEnd, chain: tuple[int, bytes]) -> tuple[Any, ...]:
    calls = [(call.name,) if call.command is None else (call.name, call.command) for call in fact.tool_calls]
    return (
        number, fact.outcome.value, calls, fact.prompt_tokens, fact.output_tokens, fact.cached_blocks,
        fact.held_blocks, fact.unheld_blocks, fact.used_blocks, chain,
    )  # fmt: skip


def read_turn_end(request_id: str, facts: Sequence[Any], hashes: Sequence[bytes]) -> TurnEnd:
    outcome, calls, prompt_tokens, output_tokens, cached_blocks, held_blocks, unheld_blocks, used_blocks = (
        facts
    )
    return TurnEnd(
        request_id=request_id,
        outcome=TurnOutcome(outcome),
        tool_calls=tuple(ToolCall(*call) for call in calls),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_blocks=cached_blocks,
        held_blocks=held_blocks,
        unheld_blocks=unheld_blocks,
        used_blocks=used_blocks,
        block_hashes=hashes,
    )


def need_facts(need: RoomNeed, freed: Sequence[int] | None) -> tuple[Any, ...]:
    return asdict(need), freed


# --- block hashes --------------------------------------------------------------------------------


def chain_facts(base: Sequence[Any], hashes: Sequence[Any]) -> tuple[int, bytes]:
    """A chain of block hashes by how many it shares with ``base``, which both sides know, and the rest."""
    shared = common_prefix(base, hashes)
    return shared, b"".join(block_hash[:HASH_BYTES] for block_hash in hashes[shared:])


def read_chain(base: Sequence[bytes], facts: Sequence[Any]) -> list[bytes]:
    """Raises ``ValueError`` for what is no chain upon ``base``."""
    shared, rest = facts
    if not 0 <= shared <= len(base):
        raise ValueError(f"a chain shares {shared} blocks with one of {len(base)}")
    return [*base[:shared], *read_hashes(rest)]


def read_hashes(text: str) -> list[bytes]:
    """Raises ``ValueError`` for what is not a number of whole hashes."""
    data = base64.b64decode(text, validate=True)
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes of block hashes; expected a multiple of {HASH_BYTES}")
    return [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]


# --- answers -------------------------------------------------------------------------------------


def ticket_answer(ticket: Ticket) -> tuple[Any, ...]:
    record = ticket.record
    if record is None:
        return ticket.arrival, ticket.rank
    return (
        ticket.arrival, ticket.rank, record.turn, record.gap_s, record.leased, record.tool_before,
        ticket.hinted_ttl_s, ticket.final,
    )  # fmt: skip


def split_answer(record: TurnRecord | None) -> tuple[Any, ...] | None:
    if record is None or record.tokens is None:
        return None
    split = record.tokens
    lost = {cause.value: tokens for cause, tokens in split.lost.items()}
    return split.device, split.new, split.tail, lost, record.evictor, record.recomputed_after_preemption


def lease_answer(lease: Lease | None) -> tuple[Any, ...] | None:
    if lease is None:
        return None
    return (
        lease.ttl_s, lease.expires_s, lease.silent_s, lease.limit_s, lease.blocks, lease.reload_s,
        lease.reason.value, lease.tool, lease.rank,
    )  # fmt: skip


def orders_answer(orders: Sequence[Action]) -> list[tuple[str, ...]]:
    return [
        (order.kind.value, order.program_id, order.reason.value, *((order.tier.value,) if order.tier else ()))
        for order in orders
    ]
