"""Builds an engine's part of a live frame, and collects the facts about one program's turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sojourn.ids import ProgramId

from ..metrics.live_frame import EngineRow, EngineSnapshot, ProgramRow
from ..metrics.turn_ledger import TurnRecord
from ..policies.placement.placement_views import Tier
from ..policies.retention_policies import NoRetention
from ..programs.program_state import ProgramState
from ..programs.program_status import ProgramStatus
from .request_hints import HINTED_TTL, unused_hint_fields
from .scheduler_state import SchedulerState

TIERS_BELOW_DEVICE = ("host", "disk")


def take_snapshot(
    state: SchedulerState,
    *,
    now: float,
    since_s: float | None,
    limit: int,
    placed_tier: Callable[[ProgramId], Tier | None],
    owned_blocks: Callable[[ProgramId], int],
    below_blocks: Callable[[ProgramId], tuple[int, int]],
    blocks: Mapping[str, int],
    tiers: Mapping[str, Any],
) -> EngineSnapshot:
    """Return the engine's numbers, and a row for each of at most ``limit`` programs, latest contact first.

    The programs are those with a request, a lease or contact since ``since_s``; all if ``since_s`` is
    ``None``. ``placed_tier``: the tier of a program's placement queue. ``owned_blocks``: the number of blocks
    on the device that a program owns. ``below_blocks``: the numbers of blocks of a program's context in host
    memory and on disk. ``blocks``: device blocks by state. ``tiers``: state of the tiers below the device.
    """
    leased = state.leases.programs()
    chosen = [
        program
        for program in state.programs
        if since_s is None
        or program.last_contact_s >= since_s
        or program.live_requests
        or program.id in leased
    ]
    chosen.sort(key=lambda program: program.last_contact_s, reverse=True)
    rows = [
        _row(state, program, placed_tier(program.id), owned_blocks(program.id), below_blocks(program.id))
        for program in chosen[:limit]
    ]
    totals = state.ledger.totals
    engine = EngineRow(
        engine="0",
        now_s=now,
        policy=state.preset.name,
        block_tokens=state.pool.tokens_per_block,
        block_bytes=state.pool.block_bytes,
        blocks={name: count for name, count in blocks.items() if name != "total"},
        tiers={tier: dict(tiers[tier]) for tier in TIERS_BELOW_DEVICE if tier in tiers},
        programs={status.value: state.programs.counts[status] for status in ProgramStatus},
        requests=len(state.requests.states),
        running_requests=sum(request.running for request in state.requests.states.values()),
        leases=len(state.leases),
        forgotten=state.programs.forgotten,
        mean_running=state.reload.mean_running,
        prefill_share=state.reload.prefill_share,
        turns=totals.turns,
        prompt_tokens=totals.prompt_tokens,
        device_tokens=totals.device_tokens,
        host_tokens=totals.host_tokens,
        new_tokens=totals.new_tokens,
        tail_tokens=totals.tail_tokens,
        output_tokens=totals.output_tokens,
        preempted_tokens=totals.recomputed_after_preemption_tokens,
        lost_tokens=totals.lost_tokens,
        grants_leases=not isinstance(state.preset.retention, NoRetention),
        untracked_requests=state.requests.untracked_arrivals,
    )
    return EngineSnapshot(
        engine=engine, programs=rows, total=len(state.programs), full=since_s is None and len(chosen) <= limit
    )


def _row(
    state: SchedulerState, program: ProgramState, tier: Tier | None, owned: int, below: tuple[int, int]
) -> ProgramRow:
    lease = state.leases.get(program.id)
    requests = [
        request for name in program.live_requests if (request := state.requests.states.get(name)) is not None
    ]
    since_s = min(
        (request.arrived_s for request in requests), default=program.last_turn_s or program.arrived_s
    )
    return ProgramRow(
        program_id=program.id,
        engine="0",
        tenant=program.tenant,
        status=program.status.value,
        name=program.name or program.agent_type,
        parent_program_id=program.parent_id,
        turns=program.turns,
        context_tokens=program.context_tokens,
        requests=len(requests),
        tool=program.tool_now(),
        since_s=round(since_s, 3),
        running=any(request.running for request in requests),
        tier=tier.value if tier is not None else None,
        device_blocks=owned,
        lease_blocks=lease.blocks if lease is not None else 0,
        lease_until_s=round(lease.deadline_s(), 3) if lease is not None else None,
        lease_reason=lease.reason.value if lease is not None else None,
        reused_tokens=program.reused_tokens,
        lost_tokens=program.lost_tokens,
        saved_s=round(program.saved_s, 3),
        ttft_s=None if program.ttft_s is None else round(program.ttft_s, 3),
        host_blocks=below[0],
        disk_blocks=below[1],
        tool_ended=program.tools_ended(),
    )


def collect_turn_facts(state: SchedulerState, program: ProgramState, now: float) -> dict[str, Any]:
    """Return the program's turns, oldest first, and the decisions about the program. Turns in progress come
    last. Each turn has estimates of the seconds to compute its lost and its reused tokens.

    The result also has two entries on hinted TTLs. ``max_hinted_ttl_s``: longest TTL that a hint can get;
    ``None`` if the preset ignores hinted TTLs. ``max_hinted_ttl_from``: the settings that limit this TTL."""
    records = state.ledger.of_program(program.id)
    live = [
        replace(request.record, finished_s=now, outcome="running")
        for name in program.live_requests
        if (request := state.requests.states.get(name)) is not None and request.record is not None
    ]
    records += sorted(live, key=lambda record: record.arrived_s)
    max_hinted_ttl_s, bound_by = _max_hinted_ttl(state)
    return {
        "program_id": program.id,
        "turns": program.turns,
        "ledger": [_with_estimates(state, record) for record in records],
        "decisions": [decision.as_dict() for decision in state.decisions.of_program(program.id)],
        "decisions_since_s": state.decisions.oldest_s,
        "max_hinted_ttl_s": max_hinted_ttl_s,
        "max_hinted_ttl_from": bound_by,
    }


def _max_hinted_ttl(state: SchedulerState) -> tuple[float | None, str]:
    """Return the longest TTL that a hint can get (``None`` if the preset ignores hinted TTLs), and the
    settings that limit this TTL."""
    if HINTED_TTL in unused_hint_fields(state.preset):
        return None, ""
    of_policy_s = float(getattr(state.preset.retention, "max_ttl_s", math.inf))
    bounds_s = {
        "--sojourn-max-ttl-s": state.limits.max_hinted_ttl_s,
        "max_ttl_s of the preset's retention": of_policy_s,
    }
    least_s = min(bounds_s.values())
    return least_s, " and ".join(name for name, bound_s in bounds_s.items() if bound_s == least_s)


def _with_estimates(state: SchedulerState, record: TurnRecord) -> dict[str, Any]:
    tokens = record.tokens
    known = tokens is not None and state.reload.known
    reused = tokens.device + tokens.host if tokens is not None else 0
    lost = sum(tokens.lost.values()) if tokens is not None else 0
    return {
        **record.as_dict(),
        "recompute_estimate_s": round(state.reload.seconds(lost), 6) if known else None,
        "saved_estimate_s": round(state.reload.seconds(reused), 6) if known else None,
    }
