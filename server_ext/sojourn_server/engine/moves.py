"""The moves of placement: what follows for a program's lease, its requests and its KV when it is moved."""

from __future__ import annotations

from ..policy.base import Reason
from ..policy.placement import Move, MoveReason, When
from ..policy.placement_views import Tier
from ..program.record import Program
from ..program.status import Signal
from ..program.table import ProgramTable
from .facts import Action, ActionKind
from .foreseer import Foreseer
from .journal import Journal
from .keeper import Keeper


class Moves:
    """Follows the placer of one engine, and orders the engine's part of each move."""

    def __init__(self, table: ProgramTable, keeper: Keeper, foreseer: Foreseer, journal: Journal) -> None:
        self._table = table
        self._keeper = keeper
        self._foreseer = foreseer
        self._journal = journal

    def made(self, program: Program, move: Move, now: float) -> None:
        """The placer has moved a program: log it, and have the engine do its part."""
        if move.reason is MoveReason.OVER:  # that it is over is logged as such
            self._keeper.actions.append(Action(ActionKind.PLACE, program.id, Reason.END, move.to))
            return
        self._journal.moved(program.id, move, now)
        if move.when is When.AFTER_TURN:
            return
        self._foreseer.touched(program)
        parked = move.to is not Tier.DEVICE
        if parked:
            self._keeper.end(program.id, Reason.PLACED, now)
        if program.live_requests:
            self._table.signal(program, Signal.GATE if parked else Signal.UNGATE)
        self._keeper.actions.append(Action(ActionKind.PLACE, program.id, Reason.PLACED, move.to))
