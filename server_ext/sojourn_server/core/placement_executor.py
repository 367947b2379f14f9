"""The moves of placement: what follows for a program's lease, its requests and its KV when it is moved."""

from __future__ import annotations

from ..policies.placement.placement_policy import MoveReason, MoveTiming, TierMove
from ..policies.placement.placement_views import Tier
from ..policies.policy_protocols import DecisionReason
from ..programs.program_state import ProgramState
from ..programs.program_status import ProgramSignal
from ..programs.program_table import ProgramTable
from .decision_recorder import DecisionRecorder
from .events_and_actions import EngineAction, EngineActionKind
from .lease_manager import LeaseManager
from .workflow_predictor import WorkflowPredictor


class PlacementExecutor:
    """Follows the placer of one engine, and orders the engine's part of each move."""

    def __init__(
        self,
        table: ProgramTable,
        lease_manager: LeaseManager,
        workflow_predictor: WorkflowPredictor,
        journal: DecisionRecorder,
    ) -> None:
        self._table = table
        self._lease_manager = lease_manager
        self._workflow_predictor = workflow_predictor
        self._journal = journal

    def made(self, program: ProgramState, move: TierMove, now: float) -> None:
        """The placer has moved a program: log it, and have the engine do its part."""
        if move.reason is MoveReason.OVER:  # that it is over is logged as such
            self._lease_manager.actions.append(
                EngineAction(EngineActionKind.PLACE, program.id, DecisionReason.END, move.to)
            )
            return
        self._journal.moved(program.id, move, now)
        if move.when is MoveTiming.AFTER_TURN:
            return
        self._workflow_predictor.touched(program)
        parked = move.to is not Tier.DEVICE
        if parked:
            self._lease_manager.end(program.id, DecisionReason.PLACED, now)
        if program.live_requests:
            self._table.signal(program, ProgramSignal.GATE if parked else ProgramSignal.UNGATE)
        self._lease_manager.actions.append(
            EngineAction(EngineActionKind.PLACE, program.id, DecisionReason.PLACED, move.to)
        )
