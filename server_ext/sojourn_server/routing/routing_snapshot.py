"""Snapshot of a core for its successor: replicas, programs with their homes, and statistics.

The snapshot contains no requests. Gateways report their sent requests to the successor (``RequestSent``), and
submit their waiting requests again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from .bounded_program_table import BoundedProgramTable
from .replica_fleet import MAX_REMEMBERED_DRAINS, Replica, ReplicaFleet, ReplicaHealth
from .routed_programs import ProgramEstimator, RoutedProgram
from .routing_tables import ProgramAffinity

ROUTING_STATE_VERSION = 1
"""Version of the snapshot format. Snapshots of other versions are refused."""
SNAPSHOT_SLICE = 500
"""Number of programs that one step of a snapshot copies. This takes about half a millisecond. A copy of a
full table of programs at once would hold up every stream for a quarter of a second."""


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


class SavedProgram(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
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
    """Number of registrations of replicas so far. A replica's ``epoch`` is its number in this count."""
    replicas: tuple[SavedReplica, ...]
    programs: tuple[SavedProgram, ...]
    """Programs that have not ended, in no certain order. Each is saved as it was when its step of the
    snapshot ran."""
    expected: dict[str, Any]
    """Result of ``ProgramEstimator.snapshot``."""
    drained: tuple[tuple[str, str], ...] = ()
    """Ids and instances of replicas that disappeared while draining."""


def snapshot_routing_state(
    fleet: ReplicaFleet,
    programs: Sequence[RoutedProgram],
    is_saved: Callable[[RoutedProgram], bool],
    expected: ProgramEstimator,
    number: int,
    now: float,
) -> Generator[None, None, RoutingState]:
    """Copy these tables in steps; return the snapshot. Each step copies ``SNAPSHOT_SLICE`` programs. The
    first step also copies everything else. The core may take events between two steps.

    ``programs``: all programs. ``is_saved``: whether to save a program, asked in the program's step. It must
    return False for removed programs, and for ended programs that still have open requests. A successor
    would keep the homes of such programs. ``number``: number of requests so far.

    The saved programs may be newer than the saved replicas. Then some programs lose their homes, and with
    them their cached KV. No request is lost.

    - A replica that registers after the first step is not saved. Its programs are restored without a home.
    - A replica that restarts after the first step is saved with its former instance. When the new instance
      registers with the successor, the programs there lose their homes.
    """
    replicas = tuple(
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
    )
    epoch, drained, estimates = fleet.epoch, tuple(fleet.drained.items()), expected.snapshot()
    saved: list[SavedProgram] = []
    for start in range(0, len(programs), SNAPSHOT_SLICE):
        if start:
            yield
        part = programs[start : start + SNAPSHOT_SLICE]
        saved += [_saved_program(program) for program in part if is_saved(program)]
    return RoutingState(
        taken_s=now,
        number=number,
        epoch=epoch,
        replicas=replicas,
        programs=tuple(saved),
        expected=estimates,
        drained=drained,
    )


def _saved_program(program: RoutedProgram) -> SavedProgram:
    return SavedProgram(
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
    # The table has the order of the last events, and the snapshot has not.
    for one in sorted(state.programs, key=lambda program: program.last_s):
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
