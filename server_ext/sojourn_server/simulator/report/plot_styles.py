"""How a policy looks in every plot: told apart by colour-blind readers, in print, and by the dozen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

# Okabe and Ito's palette without its yellow, too pale for a line on white, and its black, which is stock's.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_MARKERS = "osD^vP*X<>phdH8"
_STOCK_COLOUR, _LIMIT_COLOUR = "#000000", "#8A8A8A"

CAUSE_COLOURS = {
    "evicted": "#0072B2",
    "preempted": "#D55E00",
    "expired": "#E69F00",
    "pressure": "#CC79A7",
    "changed": "#56B4E9",
    "silent": "#009E73",
    "dropped": "#F0E442",
    "unknown": "#8A8A8A",
}
"""Causes of ``metrics.ledger.Lost``; a cause that is not here gets one of ``CAUSE_SPARES``."""
CAUSE_SPARES = ("#000000", "#BBBBBB", "#6A3D9A", "#B15928")
CAUSE_HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "ooo", "+++")


class PlotStyle(NamedTuple):
    """One policy's look."""

    colour: str
    dash: Any
    """As matplotlib's ``linestyle``."""
    marker: str
    width: float = 1.8


def styles_by_policy(policies: Iterable[str], limits: Iterable[str] = ()) -> dict[str, PlotStyle]:
    """A look for each of ``policies``, in their order: by the same names always the same.

    A variant shares the colour of the policy whose name its own begins with (``continuum-fcfs``) and has
    a dash of its own; ``stock`` is black, limits are grey.
    """
    grey = set(limits)
    names = list(dict.fromkeys(policies))
    colour_of: dict[str, str] = {}
    used: dict[str, int] = {}
    made: dict[str, PlotStyle] = {}
    for number, name in enumerate(names):
        family = _family(name, names)
        if name in grey:
            colour = _LIMIT_COLOUR
        elif family == "stock":
            colour = _STOCK_COLOUR
        else:
            colour = colour_of.setdefault(family, _COLOURS[len(colour_of) % len(_COLOURS)])
        turn = used[colour] = used.get(colour, -1) + 1
        made[name] = PlotStyle(
            colour,
            _DASHES[turn % len(_DASHES)],
            _MARKERS[number % len(_MARKERS)],
            2.4 if name == "stock" else 1.8,
        )
    return made


def cause_colours(causes: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and hatch of each cause, in their order."""
    spares = 0
    made = {}
    for number, cause in enumerate(dict.fromkeys(causes)):
        colour = CAUSE_COLOURS.get(cause)
        if colour is None:
            colour = CAUSE_SPARES[spares % len(CAUSE_SPARES)]
            spares += 1
        made[cause] = (colour, CAUSE_HATCHES[number % len(CAUSE_HATCHES)])
    return made


def _family(name: str, names: Iterable[str]) -> str:
    heads = [other for other in names if name.startswith(f"{other}-")]
    return min(heads, key=len) if heads else name
