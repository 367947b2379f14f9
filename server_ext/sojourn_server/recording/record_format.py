"""Converts a scheduler's calls to the values that a recording stores, and stored inputs back to events.

``facts`` are the stored form of a call's input, ``answer`` is the stored form of its result. A replay reads
the facts (``read_...`` functions) and repeats the call. Then it compares the stored answer with the answer of
the repeated call.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from sojourn.hints import AgenticContext
from sojourn.ids import ProgramId
from sojourn.wire_codec import Outcome
from sojourn.wire_events import AnyEvent, ProgramEnd, ProgramStart, ToolStop

from ..core.events_and_actions import (
    Action,
    EngineAction,
    RequestAdmitted,
    RequestArrived,
    RequestRefused,
    RequestRequeued,
    RequestYields,
    TurnFinished,
    TurnFinishReason,
)
from ..core.lease_table import Lease
from ..core.request_hints import MAX_NAME_CHARS, RequestIdentity
from ..core.request_table import RequestState
from ..metrics.turn_ledger import TurnRecord, common_prefix_length
from ..policies.policy_views import RunningRequestView
from ..programs.program_status import REPORTED_OUTCOMES
from ..programs.tool_call_parsers import ParsedToolCall


class RecordShape(NamedTuple):
    """Description of one kind of record: its meaning, and names for the values of its facts and answer."""

    meaning: str
    facts: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    """Names of the answer's values, in order. With one name the answer is usually the value, not a list."""
    optional: int = 0
    """Number of facts that a record may leave out at its end."""


_LEASE_FIELDS = (
    "ttl_s", "expires_s", "silent_s", "limit_s", "blocks", "reload_s", "reason", "tool", "rank",
)  # fmt: skip

_COPIES = ("offload_s_per_token", "load_back_s_per_token", "queued_s")

RECORD_SHAPES: dict[str, RecordShape] = {
    "tick": RecordShape("time passed"),
    "step": RecordShape(
        "an engine step is over", ("tokens", "seconds", "requests", *_COPIES[1:], "kv_tokens")
    ),
    "event": RecordShape(
        "a client's event", ("emitter", "event"), ("outcome", "lease_expires_s", "lease_silent_s")
    ),
    "arrive": RecordShape(
        "a request arrived",
        ("request_id", "prompt_tokens", "program_id", "context", "outcome", "priority"),
        ("number", "rank", "turn", "gap_s", "leased", "tool_before", "hinted_ttl_s", "final"),
        optional=1,  # a priority of 0 is left out
    ),
    "stranger": RecordShape(
        "a request arrived whose program could not be read",
        ("request_id",), ("number", "rank")
    ),
    "gate": RecordShape("is a request subject to admission", ("request", "preempted"), ("behind_gate",)),
    "key": RecordShape("a request's place in the queue", ("request", "preempted"), ("key",)),
    "promoted": RecordShape("when a request is first because it has waited", ("request",), ("promoted_s",)),
    "enter": RecordShape(
        "may a request be admitted",
        (
            "request",
            "need_blocks",
            "free_blocks",
            "anything_running",
            "output_tokens",
            "most_tokens",
            "preempted",
        ),
        ("enters",),
    ),
    "line": RecordShape("does a rejected request block later ones", ("request",), ("holds",)),
    "park": RecordShape("is a request parked", ("request",), ("parked",)),
    "room": RecordShape("blocks are needed", ("need", "freed_blocks")),
    "victim": RecordShape("request to preempt", ("short_blocks", "running", "used_blocks"), ("request",)),
    "look": RecordShape("request to copy in advance", ("used_blocks", "running", *_COPIES), ("request",)),
    "guess": RecordShape(
        "a network's prediction of the remaining tokens", ("request", "at_tokens", "remaining", "most_tokens")
    ),
    "standing": RecordShape("a program in the eviction order", ("program_id", "left"), ("standing", "score")),
    "admit": RecordShape(
        "a request got its blocks",
        ("request", "cached_tokens", "host_tokens", "tokens", "resumed", "most_tokens", "chain"),
        ("device", "new", "tail", "lost", "evictor", "recomputed_after_preemption"),
    ),
    "token": RecordShape("a request's first token exists", ("request",)),
    "preempt": RecordShape(
        "a running request lost its blocks",
        ("request", "tokens", "copied_tokens", *_COPIES), ("recovery",)
    ),
    "unload": RecordShape("a request lost the blocks into which its KV was being loaded", ("request",)),
    "evict": RecordShape(
        "cached blocks were reused", ("program_id", "taker", "blocks", "times_s")
    ),
    "end": RecordShape(
        "a request left the engine",
        ("request", "outcome", "tool_calls", "prompt_tokens", "output_tokens", "cached_blocks",
         "held_blocks", "unheld_blocks", "used_blocks", "chain"),
        _LEASE_FIELDS,
    ),
    "left": RecordShape("a request without a program left the engine", ("request",)),
    "pin": RecordShape(
        "still-cached blocks can be held",
        ("program_id", "blocks", "held_blocks", "unheld_blocks", "used_blocks"),
        _LEASE_FIELDS,
    ),
    "prefetch": RecordShape(
        "a prefetch began",
        ("program_id", "missing_blocks", "coming_blocks", "lost_blocks", "host_blocks", "spare_blocks"),
        ("load_blocks", "keep_s")
    ),
    "give_way": RecordShape(
        "a gateway orders that a running request yields", ("program_id", "to_program_id"), ("outcome",)
    ),
    "reset_start": RecordShape("the prefix cache is about to be cleared"),
    # ``device`` is left out if it is true, as in recordings that were made before the event had this field.
    "reset": RecordShape("the prefix cache was cleared", ("device",), optional=1),
    "close": RecordShape("the recording ends", ("reason",), ("totals",)),
}  # fmt: skip
"""``op`` → shape of the records of this kind. A value named ``request`` is the request's number: the first
value in the answer of the request's ``arrive`` or ``stranger`` record. For a request that is not in the
engine, the value is the request's id."""

DECISION_FIELDS = ("at_s", "kind", "program_id", "reason", "numbers")
"""Names of the fields of each decision in a record, as in the decision log."""

HASH_BYTES = 8
"""Number of bytes kept of a block hash. Among 10^6 blocks, a collision has a probability of 3 in 10^8."""


# --- facts ---------------------------------------------------------------------------------------


def arrival_facts(fact: RequestArrived) -> tuple[Any, ...]:
    identity = fact.identity
    outcome = identity.outcome.value if identity.outcome is not None else None
    facts = (fact.request_id, fact.prompt_tokens, identity.program_id, _context(identity.context), outcome)
    return (*facts, fact.priority) if fact.priority else facts


def read_arrival(facts: Sequence[Any]) -> RequestArrived:
    request_id, prompt_tokens, program_id, context, outcome, *priority = facts
    return RequestArrived(
        request_id=request_id,
        identity=RequestIdentity(
            ProgramId(program_id) if program_id is not None else None,
            msgspec.convert(context, AgenticContext) if context is not None else None,
            Outcome(outcome) if outcome is not None else None,
        ),
        prompt_tokens=prompt_tokens,
        priority=priority[0] if priority else 0,
    )


def _context(context: AgenticContext | None) -> Any:
    """Return a request's hints as plain values; ``None`` without hints. Long names are cut. The events that
    the request carries are left out, since they have records of their own."""
    if context is None:
        return None
    ours = context.sojourn
    if ours is not None:
        ours = msgspec.structs.replace(
            ours,
            emitter=None,
            events=[],
            agent_type=_truncated_name(ours.agent_type),
            node=_truncated_name(ours.node),
            tenant=_truncated_name(ours.tenant),
        )
    kept = msgspec.structs.replace(
        context, request_id=_truncated_name(context.request_id), step_id=None, sojourn=ours
    )
    return msgspec.to_builtins(kept)


def _truncated_name(name: str | None) -> str | None:
    return name[:MAX_NAME_CHARS] if name is not None else None


def event_facts(emitter: str, event: AnyEvent) -> tuple[Any, ...]:
    """Return (emitter, event as plain values). Constants replace fields that cannot change a decision."""
    if isinstance(event, ProgramStart):
        event = msgspec.structs.replace(event, name=None)
    elif isinstance(event, ToolStop):
        event = msgspec.structs.replace(event, status="ok")
    elif isinstance(event, ProgramEnd) and event.status not in REPORTED_OUTCOMES:
        event = msgspec.structs.replace(event, status="error")
    return emitter, msgspec.to_builtins(event)


def read_event(document: Any) -> AnyEvent:
    event: AnyEvent = msgspec.convert(document, AnyEvent)
    return event


def running_facts(number: int | str, view: RunningRequestView) -> tuple[Any, ...]:
    """Return a running request's number and the fields of its view that the engine sets."""
    return (
        number, view.program_rank, view.position, view.blocks, view.context_tokens, view.output_tokens,
        view.most_tokens, view.freed_blocks,
    )  # fmt: skip


def read_running(request_id: str, facts: Sequence[Any]) -> RunningRequestView:
    rank, position, blocks, context_tokens, output_tokens, most_tokens, freed_blocks = facts
    return RunningRequestView(
        request_id,
        rank,
        position,
        blocks,
        context_tokens=context_tokens,
        output_tokens=output_tokens,
        most_tokens=most_tokens,
        freed_blocks=freed_blocks,
    )


def admission_facts(number: int | str, fact: RequestAdmitted, chain: tuple[int, bytes]) -> tuple[Any, ...]:
    return (
        number,
        fact.cached_tokens,
        fact.host_tokens,
        fact.tokens,
        fact.resumed,
        fact.most_tokens,
        chain,
    )


def read_admission(request_id: str, facts: Sequence[Any], hashes: Sequence[bytes]) -> RequestAdmitted:
    cached_tokens, host_tokens, tokens, resumed, most_tokens = facts
    return RequestAdmitted(
        request_id=request_id,
        cached_tokens=cached_tokens,
        host_tokens=host_tokens,
        tokens=tokens,
        block_hashes=hashes,
        resumed=resumed,
        most_tokens=most_tokens,
    )


def turn_end_facts(number: int | str, fact: TurnFinished, chain: tuple[int, bytes]) -> tuple[Any, ...]:
    calls = [(call.name,) if call.command is None else (call.name, call.command) for call in fact.tool_calls]
    return (
        number, fact.outcome.value, calls, fact.prompt_tokens, fact.output_tokens, fact.cached_blocks,
        fact.held_blocks, fact.unheld_blocks, fact.used_blocks, chain,
    )  # fmt: skip


def read_turn_end(request_id: str, facts: Sequence[Any], hashes: Sequence[bytes]) -> TurnFinished:
    outcome, calls, prompt_tokens, output_tokens, cached_blocks, held_blocks, unheld_blocks, used_blocks = (
        facts
    )
    return TurnFinished(
        request_id=request_id,
        outcome=TurnFinishReason(outcome),
        tool_calls=tuple(ParsedToolCall(*call) for call in calls),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_blocks=cached_blocks,
        held_blocks=held_blocks,
        unheld_blocks=unheld_blocks,
        used_blocks=used_blocks,
        block_hashes=hashes,
    )


# --- block hashes --------------------------------------------------------------------------------


def chain_facts(base: Sequence[Any], hashes: Sequence[Any]) -> tuple[int, bytes]:
    """Return a chain of block hashes as its difference from ``base``: (number of leading hashes that both
    chains have, the first ``HASH_BYTES`` bytes of each further hash, joined). ``read_chain`` needs the same
    ``base``."""
    shared = common_prefix_length(base, hashes)
    return shared, b"".join(block_hash[:HASH_BYTES] for block_hash in hashes[shared:])


def read_chain(base: Sequence[bytes], facts: Sequence[Any]) -> list[bytes]:
    """Return the chain of block hashes that ``chain_facts(base, ...)`` stored as ``facts``. Raises
    ``ValueError`` if ``facts`` are invalid or ``base`` is too short for them."""
    shared, rest = facts
    if not 0 <= shared <= len(base):
        raise ValueError(f"a chain shares {shared} blocks with one of {len(base)}")
    return [*base[:shared], *read_hashes(rest)]


def read_hashes(text: str) -> list[bytes]:
    """Return the block hashes in a base64 text. Raises ``ValueError`` if the text is not base64, or if the
    last hash is incomplete."""
    data = base64.b64decode(text, validate=True)
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes of block hashes; expected a multiple of {HASH_BYTES}")
    return [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]


# --- answers -------------------------------------------------------------------------------------


def request_state_answer(request_state: RequestState) -> tuple[Any, ...]:
    record = request_state.record
    if record is None:
        return request_state.arrival, request_state.rank
    return (
        request_state.arrival, request_state.rank, record.turn, record.gap_s, record.leased,
        record.tool_before, request_state.hinted_ttl_s, request_state.final,
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


def orders_answer(actions: Sequence[Action]) -> list[tuple[str, ...]]:
    """Return the actions as plain values, without those that are recorded as the event's answer."""
    orders: list[tuple[str, ...]] = []
    for action in actions:
        if isinstance(action, EngineAction):
            tier = (action.tier.value,) if action.tier else ()
            orders.append((action.kind.value, action.program_id, action.reason.value, *tier))
        elif isinstance(action, RequestRefused):
            orders.append(("refuse", action.request_id))
        elif isinstance(action, RequestYields):
            orders.append(("yields", action.request_id))
        elif isinstance(action, RequestRequeued):
            orders.append(("requeue", action.request_id))
    return orders
