"""Figures that only several engines behind a gateway have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from ..cluster.isolated_completion import SLO_FACTOR
from ..run_log import ProgramLog, RunLog
from .run_row import OVERALL, ReplicaChanges, ReplicaRow, Utilisation


def replica_changes(programs: Iterable[ProgramLog]) -> ReplicaChanges | None:
    """Between turns that were computed, wherever the program was promised a place meanwhile; ``None`` where
    nothing was computed."""
    changes = []
    for program in programs:
        at = [turn.replica for turn in program.turns if turn.admitted_s is not None]
        if at:
            changes.append(sum(before != after for before, after in pairwise(at)))
    if not changes:
        return None
    return ReplicaChanges(
        programs_share=sum(map(bool, changes)) / len(changes), per_program=sum(changes) / len(changes)
    )


def utilisation(run: RunLog) -> Utilisation | None:
    """Of the whole run."""
    if not run.replicas or not run.virtual_s:
        return None
    shares = [replica.busy_s / run.virtual_s for replica in run.replicas]
    return Utilisation(min=min(shares), mean=sum(shares) / len(shares), max=max(shares))


def slo_attainment(programs: Sequence[ProgramLog], run_end_s: float) -> dict[str, float] | None:
    """By tenant, and of all. A program that the run's end cut off while it was still in time is left out; one
    that was late by then has missed. ``None`` where none counts."""
    met: dict[str, list[bool]] = {}
    for program in programs:
        if program.expected_s is None:
            continue
        allowed_s = SLO_FACTOR * program.expected_s
        if program.completion_s is not None:
            in_time = program.completion_s <= allowed_s
        elif run_end_s - program.arrived_s > allowed_s:
            in_time = False
        else:
            continue
        met.setdefault(OVERALL, []).append(in_time)
        if program.tenant is not None:
            met.setdefault(program.tenant, []).append(in_time)
    if not met:
        return None
    return {tenant: sum(met[tenant]) / len(met[tenant]) for tenant in sorted(met)}


def per_replica(run: RunLog) -> tuple[ReplicaRow, ...]:
    """A row an engine, in their order."""
    turns: dict[str | None, list[tuple[int, int, int]]] = {}
    for program in run.programs:
        for turn in program.turns:
            if turn.admitted_s is not None:
                made = turn.generated_tokens if turn.finished_s is None else turn.output_tokens
                turns.setdefault(turn.replica, []).append(
                    (made, turn.computed_tokens, turn.regenerated_tokens)
                )
    rows = []
    for replica in run.replicas:
        mine = turns.get(replica.replica, [])
        rows.append(
            ReplicaRow(
                replica=replica.replica,
                steps=replica.steps,
                busy_s=replica.busy_s,
                turns=len(mine),
                output_tokens=sum(made for made, _, _ in mine),
                computed_tokens=sum(computed for _, computed, _ in mine),
                regenerated_tokens=sum(again for _, _, again in mine),
            )
        )
    return tuple(rows)
