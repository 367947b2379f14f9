"""Plot styles of policies and recomputation causes, readable in print and by colour-blind people. Also places
labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# Okabe and Ito's palette without yellow (too pale on white) and black (used for stock).
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
"""Colours of recomputation causes. Causes that are missing here get one of ``CAUSE_SPARES``."""
CAUSE_SPARES = ("#000000", "#BBBBBB", "#6A3D9A", "#B15928")
CAUSE_HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "ooo", "+++")


class PlotStyle(NamedTuple):
    """Style of one policy."""

    colour: str
    dash: Any
    """Style of the line, as matplotlib's ``linestyle``."""
    marker: str
    width: float = 1.8


def styles_by_policy(policies: Iterable[str], limits: Iterable[str] = ()) -> dict[str, PlotStyle]:
    """A style for each of ``policies``; the same names in the same order always give the same styles.

    A variant such as ``continuum-fcfs`` has the colour of the policy whose name is its prefix, ``continuum``,
    and another dash. ``stock`` is black. Names in ``limits`` are bounds, and grey.
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
    """Return cause → (colour, hatch). The hatch depends on the order of ``causes``."""
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


_DIRECTIONS = 16
_DISTANCES_POINTS = (8.0, 14.0, 22.0, 32.0, 44.0, 58.0)
_POINT_RADIUS_PIXELS = 7.5
_MARGIN_PIXELS = 2.0
_TEXT_COLOUR = "#222222"
"""Colour of all labels. Half of the points' colours would be too pale for text."""


def place_labels(figure: Any, panels: Sequence[tuple[Any, Sequence[tuple[float, float, str, str]]]]) -> None:
    """Write labels beside points so that they overlap little. ``panels`` are pairs of an axis and its points,
    each ``(x, y, label, colour)``.

    Lays out the figure first and freezes the layout, because the size of a text is known only in pixels. A
    thin line of the point's ``colour`` joins a point and its label if they are far apart.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer: Any = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    pixels_a_point = figure.dpi / 72.0
    for axis, points in panels:
        places = [tuple(axis.transData.transform((x, y))) for x, y, _, _ in points]
        frame = axis.get_window_extent(renderer)
        taken = [
            (
                x - _POINT_RADIUS_PIXELS,
                y - _POINT_RADIUS_PIXELS,
                x + _POINT_RADIUS_PIXELS,
                y + _POINT_RADIUS_PIXELS,
            )
            for x, y in places
        ]
        for (x, y, text, colour), (label_x, label_y) in zip(points, places, strict=True):
            drawn = axis.annotate(
                text,
                (x, y),
                xytext=(0, 0),
                textcoords="offset points",
                fontsize=7.5,
                color=_TEXT_COLOUR,
                va="bottom",
            )
            box = drawn.get_window_extent(renderer)
            best = None
            for distance in _DISTANCES_POINTS:
                for turn in range(_DIRECTIONS):
                    angle = 2 * math.pi * turn / _DIRECTIONS
                    centre_x = label_x + math.cos(angle) * (distance * pixels_a_point + box.width / 2)
                    centre_y = label_y + math.sin(angle) * (distance * pixels_a_point * 0.7 + box.height / 2)
                    spot = (centre_x - box.width / 2, centre_y - box.height / 2,
                            centre_x + box.width / 2, centre_y + box.height / 2)  # fmt: skip
                    cost = 20.0 * sum(_overlap(spot, other) for other in taken)
                    cost += 4.0 * (
                        box.width * box.height - _overlap(spot, (frame.x0, frame.y0, frame.x1, frame.y1))
                    )
                    cost += distance * 2.0
                    if best is None or cost < best[0] - 1e-9:
                        best = (cost, spot, distance)
            assert best is not None
            _, spot, distance = best
            taken.append((spot[0] - _MARGIN_PIXELS, spot[1] - _MARGIN_PIXELS,
                          spot[2] + _MARGIN_PIXELS, spot[3] + _MARGIN_PIXELS))  # fmt: skip
            drawn.set_position(((spot[0] - label_x) / pixels_a_point, (spot[1] - label_y) / pixels_a_point))
            if distance > _DISTANCES_POINTS[0]:
                near = (min(max(label_x, spot[0]), spot[2]), min(max(label_y, spot[1]), spot[3]))
                back = axis.transData.inverted().transform([near, (label_x, label_y)])
                axis.plot(back[:, 0], back[:, 1], color=colour, linewidth=0.6, scalex=False, scaley=False)


def _overlap(one: Sequence[float], other: Sequence[float]) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0
