"""Links to storage and between engines, as metrics: totals that an engine tells become increments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .catalog import PATH_OUTCOMES
from .recorder import Recorder

LINK_LABELS = {
    "storage read": ("storage", "read"),
    "storage write": ("storage", "write"),
    "compute network": ("compute", "sent"),
}
"""A link's name → its labels ``link`` and ``direction``."""
RECEIVED = ("compute", "received")


class LinkMeter:
    """Counts into ``recorder`` by what totals have grown since the last time."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._counted: dict[tuple[str, ...], float] = {}

    def take(self, told: Mapping[str, Any] | None) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Count what is new in ``told`` (as ``paths/told.py`` has it), and return what is so at this moment.
        ``None``: there are no links, and so no rows."""
        if told is None:
            return {}
        for (link, direction), total in _moved(told):
            self._count("sojourn_link_bytes_total", total, link=link, direction=direction)
        for what, total in told["counts"].items():
            if what in PATH_OUTCOMES:
                self._count("sojourn_path_outcomes_total", total, what=what)
        links = [(_labels(*LINK_LABELS[name]), state) for name, state in told["links"].items()]
        used = told["slots_used"]
        return {
            "sojourn_link_queued_seconds": [
                (labels, state["queued_s"]) for labels, state in links if state["queued_s"] is not None
            ],
            "sojourn_link_queued_bytes": [(labels, state["queued_bytes"]) for labels, state in links],
            "sojourn_path_slots": [({"state": "used"}, used), ({"state": "free"}, told["slots"] - used)],
        }

    def _count(self, metric: str, total: float, **labels: str) -> None:
        name = (metric, *labels.values())
        grown = total - self._counted.get(name, 0)
        self._counted[name] = total
        if grown > 0:
            self._recorder.count(metric, grown, **labels)


def _moved(told: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], float]]:
    for name, state in told["links"].items():
        yield LINK_LABELS[name], state["moved_bytes"]
    yield RECEIVED, told["received_bytes"]


def _labels(link: str, direction: str) -> dict[str, str]:
    return {"link": link, "direction": direction}
