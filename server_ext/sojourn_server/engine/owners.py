"""The owners of cached blocks: what their place in the eviction order, and their label below it, go by."""

from __future__ import annotations

import math

from sojourn.ids import ProgramId

from ..policy.base import EvictionOrder
from ..policy.labels import Label, label
from ..policy.views import LeftBehind
from ..program.status import OVER
from ..program.table import ProgramTable
from .foreseer import Foreseer
from .placer import Placer


class Owners:
    """The programs of one engine, as its eviction order sees them."""

    def __init__(
        self, order: EvictionOrder, *, table: ProgramTable, foreseer: Foreseer, placer: Placer
    ) -> None:
        self._order = order
        self._table = table
        self._foreseer = foreseer
        self._placer = placer

    def label(self, program_id: ProgramId | None) -> Label:
        """What the program's queue says of its blocks; ``None``: of those of programs that are over."""
        program = self._table.get(program_id) if program_id is not None else None
        if program is None or program.status in OVER:
            return Label.INACTIVE
        return label(self._placer.tier(program.id))

    def standing(self, program_id: ProgramId, left: LeftBehind | None = None) -> tuple[float, ...] | None:
        """What the eviction order goes by, of a program or of what its newest turn left behind.

        ``None``: such a program is not known.
        """
        program = self._table.get(program_id)
        if program is None:
            return None
        view = self._foreseer.owner_view(program, left)
        return self._order.standing(view._replace(tier=self._placer.tier(program_id)))

    def score(self, standing: tuple[float, ...] | None, branch_reuse: float = 1.0) -> tuple[float, ...]:
        """The place of a standing in the order in which cached blocks are reused, lowest first."""
        if standing is None:
            return (-math.inf,)
        return self._order.score(standing, self._foreseer.scale(branch_reuse))

    def score_now(self, program_id: ProgramId) -> tuple[float, ...]:
        """A program's place in that order at this moment."""
        return self.score(self.standing(program_id))
