"""Snapshot of a core for its successor: replicas, programs with their homes, and statistics.

The snapshot contains no requests. Gateways report their sent requests to the successor (``RequestSent``), and
submit their waiting requests again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from .bounded_program_table import BoundedProgramTable
from .replica_fleet import MAX_REMEMBERED_DRAINS, Replica, ReplicaFleet, ReplicaHealth
from .routed_programs import ProgramEstimator, RoutedProgram
from .routing_tables import ProgramAffinity

ROUTING_STATE_VERSION = 1
"""Version of the snapshot format. Snapshots of other versions are refused."""


class SavedReplica(msgspec.Struct, frozen=True, omit_defaults=True):
    """A replica in a snapshot: the fields of its ``Replica`` that a successor needs."""

    replica_id: str
    instance: str
    capacity_tokens: int
    host_tokens: int = 0
    max_running: int = 0
    max_context_tokens: int = 0
    epoch: int = 0
    health: str = ReplicaHealth.UP.value


class SavedProgram(msgspec.Struct, frozen=True, omit_defaults=True):
    """A program in a snapshot: the fields of its ``RoutedProgram`` that a successor needs."""

    tenant: str
    program_id: str
    began_s: float
    last_s: float
    agent_type: str | None = None
    parent_id: str | None = None
    deadline_s: float | None = None
    home: str | None = None
    cached: bool = False
    context_tokens: int = 0
    size_tokens: int = 0
    turns: int = 0
    moves: int = 0
    moved_at_turn: int = -1


class RoutingState(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of an affinity core."""

    version: int = ROUTING_STATE_VERSION
    taken_s: float
    """Time of the snapshot. All times in the snapshot are on the clock of the core that wrote it."""
    number: int
    """Number of requests so far."""
    epoch: int
    """Number of registrations of replicas so far; the next replica gets the next number as its ``epoch``."""
    replicas: tuple[SavedReplica, ...]
    programs: tuple[SavedProgram, ...]
    """Programs that their clients have not ended, least recently active first."""
    expected: dict[str, Any]
    """Result of ``ProgramEstimator.snapshot``."""
    drained: tuple[tuple[str, str], ...] = ()
    """Ids and instances of replicas that disappeared while draining."""


def snapshot_routing_state(
    fleet: ReplicaFleet,
    programs: Iterable[RoutedProgram],
    expected: ProgramEstimator,
    number: int,
    now: float,
) -> RoutingState:
    """Return a snapshot of these tables. ``programs``: the programs to save, least recently active first.
    Ended programs that still have open requests must not be among them, because a successor would keep the
    homes of ended programs. ``number``: number of requests so far."""
    return RoutingState(
        taken_s=now,
        number=number,
        epoch=fleet.epoch,
        replicas=tuple(
            SavedReplica(
                replica.replica_id,
                replica.instance,
                replica.capacity_tokens,
                replica.host_tokens,
                replica.max_running,
                replica.max_context_tokens,
                replica.epoch,
                replica.health.value,
            )
            for replica in fleet
        ),
        programs=tuple(
            SavedProgram(
                program.tenant,
                program.key[1],
                program.began_s,
                program.last_s,
                program.agent_type,
                program.parent[1] if program.parent is not None else None,
                program.deadline_s,
                program.home,
                program.cached,
                program.context_tokens,
                program.size_tokens,
                program.turns,
                program.moves,
                program.moved_at_turn,
            )
            for program in programs
        ),
        expected=expected.snapshot(),
        drained=tuple(fleet.drained.items()),
    )


def restore_routing_state(
    state: RoutingState,
    fleet: ReplicaFleet,
    programs: BoundedProgramTable[RoutedProgram],
    homes: ProgramAffinity,
    expected: ProgramEstimator,
    now: float,
    shift_s: float,
) -> None:
    """Fill empty tables from a snapshot. ``shift_s`` seconds are added to all times, to convert them to the
    clock of ``now``. Raises ``ValueError`` for an invalid snapshot, before it changes any table."""
    _check(state)
    expected.restore(state.expected)
    for saved in state.replicas:
        replica = Replica(
            saved.replica_id,
            saved.instance,
            saved.capacity_tokens,
            saved.host_tokens,
            saved.max_running,
            saved.max_context_tokens,
            now,
            saved.epoch,
            ReplicaHealth(saved.health),
        )
        fleet.add(replica, now)
    fleet.epoch = state.epoch
    fleet.drained.update(state.drained[-MAX_REMEMBERED_DRAINS:])
    for one in state.programs:
        key = (one.tenant, one.program_id)
        program = RoutedProgram(
            key,
            one.agent_type,
            (one.tenant, one.parent_id) if one.parent_id else None,
            one.began_s + shift_s,
            one.last_s + shift_s,
            one.deadline_s + shift_s if one.deadline_s is not None else None,
            context_tokens=one.context_tokens,
            turns=one.turns,
            moves=one.moves,
            moved_at_turn=one.moved_at_turn,
        )
        programs.add(program)
        home = fleet.get(one.home)
        if home is not None:
            homes.set_home(program, home, one.size_tokens, now)
            program.cached = one.cached


def _check(state: RoutingState) -> None:
    """Check a snapshot, except its estimates. Raises ``ValueError`` if it is invalid."""
    if state.version != ROUTING_STATE_VERSION:
        raise ValueError(f"a state of version {state.version}; expected {ROUTING_STATE_VERSION}")
    replica_ids = set()
    for replica in state.replicas:
        if replica.capacity_tokens < 1 or replica.replica_id in replica_ids:
            raise ValueError(
                f"state: replica {replica.replica_id!r} has {replica.capacity_tokens} tokens or occurs "
                "twice; expected unique ids and at least 1 token"
            )
        replica_ids.add(replica.replica_id)
        ReplicaHealth(replica.health)
    for program in state.programs:
        if min(program.context_tokens, program.size_tokens, program.turns) < 0:
            raise ValueError(f"state: program {program.program_id!r} has numbers below 0: {program}")
