"""What a core leaves to the one that comes after it: replicas, programs and their homes, and what it learnt.

Requests are not in it. Gateways have them, and tell a new core of those that they have sent (``facts.Sent``)
and ask again for those that wait.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .fleet import MOST_DRAINED, Fleet, Health, Replica
from .homes import Homes
from .programs import Expectations, Program, Programs

STATE_VERSION = 1
"""Version of the states that are written and read."""


class ReplicaState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A replica; fields as in ``facts.ReplicaSeen``."""

    replica_id: str
    instance: str
    capacity_tokens: int
    host_tokens: int = 0
    max_running: int = 0
    max_context_tokens: int = 0
    epoch: int = 0
    health: str = Health.UP.value


class ProgramState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A program; fields as in ``programs.Program``."""

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


class CoreState(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    version: int = STATE_VERSION
    taken_s: float
    """When, on the clock of the core that wrote it; so are all other times."""
    number: int
    """Requests that came so far."""
    epoch: int
    """Registrations of replicas so far."""
    replicas: tuple[ReplicaState, ...]
    programs: tuple[ProgramState, ...]
    """Those that were silent for longest first."""
    expected: dict[str, Any]
    drained: tuple[tuple[str, str], ...] = ()
    """Replicas that were gone while they were drained, and their instances."""


def written_state(
    fleet: Fleet, programs: Programs, expected: Expectations, number: int, now: float
) -> CoreState:
    """As it is now."""
    return CoreState(
        taken_s=now,
        number=number,
        epoch=fleet.epoch,
        replicas=tuple(
            ReplicaState(
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
            ProgramState(
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


def read_state(
    state: CoreState,
    fleet: Fleet,
    programs: Programs,
    homes: Homes,
    expected: Expectations,
    now: float,
    shift_s: float,
) -> None:
    """Fill what is empty. ``shift_s`` is added to all times. Raises ``ValueError`` for a state that makes
    no sense, and may have read part of it then."""
    if state.version != STATE_VERSION:
        raise ValueError(f"a state of version {state.version}; expected {STATE_VERSION}")
    expected.restore(state.expected)
    for told in state.replicas:
        if told.capacity_tokens < 1 or fleet.get(told.replica_id) is not None:
            raise ValueError(
                f"state: replica {told.replica_id!r} of {told.capacity_tokens} tokens; expected each once, "
                "of at least 1"
            )
        health = Health(told.health)
        replica = Replica(
            told.replica_id,
            told.instance,
            told.capacity_tokens,
            told.host_tokens,
            told.max_running,
            told.max_context_tokens,
            now,
            told.epoch,
            health,
        )
        fleet.add(replica, now)
    fleet.epoch = state.epoch
    fleet.drained.update(state.drained[-MOST_DRAINED:])
    for one in state.programs:
        if min(one.context_tokens, one.size_tokens, one.turns) < 0:
            raise ValueError(f"state: program {one.program_id!r} has numbers below 0: {one}")
        key = (one.tenant, one.program_id)
        program = Program(
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
            homes.settle(program, home, one.size_tokens, now)
            program.cached = one.cached
