"""The owners of cached blocks: what their place in the eviction order, and their label below it, go by."""

from __future__ import annotations

import math

from sojourn.ids import ProgramId

from ..policies.eviction.block_labels import BlockLabel, label_of_tier
from ..policies.policy_protocols import EvictionPolicy
from ..policies.policy_views import AbandonedBranch
from ..programs.program_status import OVER_STATUSES
from ..programs.program_table import ProgramTable
from .tier_manager import TierManager
from .workflow_predictor import WorkflowPredictor


class EvictionKeys:
    """The programs of one engine, as its eviction order sees them."""

    def __init__(
        self,
        order: EvictionPolicy,
        *,
        table: ProgramTable,
        workflow_predictor: WorkflowPredictor,
        tier_manager: TierManager,
    ) -> None:
        self._order = order
        self._table = table
        self._workflow_predictor = workflow_predictor
        self._tier_manager = tier_manager

    def label(self, program_id: ProgramId | None) -> BlockLabel:
        """What the program's queue says of its blocks; ``None``: of those of programs that are over."""
        program = self._table.get(program_id) if program_id is not None else None
        if program is None or program.status in OVER_STATUSES:
            return BlockLabel.INACTIVE
        return label_of_tier(self._tier_manager.tier(program.id))

    def standing(
        self, program_id: ProgramId, left: AbandonedBranch | None = None
    ) -> tuple[float, ...] | None:
        """What the eviction order goes by, of a program or of what its newest turn left behind.

        ``None``: such a program is not known.
        """
        program = self._table.get(program_id)
        if program is None:
            return None
        view = self._workflow_predictor.owner_view(program, left)
        return self._order.standing(view._replace(tier=self._tier_manager.tier(program_id)))

    def score(self, standing: tuple[float, ...] | None, branch_reuse: float = 1.0) -> tuple[float, ...]:
        """The place of a standing in the order in which cached blocks are reused, lowest first."""
        if standing is None:
            return (-math.inf,)
        return self._order.score(standing, self._workflow_predictor.scale(branch_reuse))

    def current_score(self, program_id: ProgramId) -> tuple[float, ...]:
        """A program's place in that order at this moment."""
        return self.score(self.standing(program_id))
