"""How many tokens a request will yet generate, by what a network reads in hidden states (Tetris §2.2)."""

from __future__ import annotations

from dataclasses import dataclass

from .remaining import LengthView, Remaining, Survival, bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates(Survival):
    """The network's guess where its guesses have been closer to the mark than what is known without it.

    Without one, and as long as the network has not shown itself better, ``Survival`` answers: a network
    that has learned nothing yet, was fed nonsense or belongs to yesterday's load changes nothing. Options
    and errors are those of ``Survival``.
    """

    reads_states: bool = True

    def remaining(self, view: LengthView, now: float) -> Remaining | None:
        known = Survival.remaining(self, view, now)
        if not view.guess or view.guess_off is None:
            return known
        if known is not None and (view.known_off is None or view.guess_off >= view.known_off):
            return known
        return tuple(bounded(tokens, view) for tokens in view.guess)
