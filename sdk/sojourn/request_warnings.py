"""Warnings of LLM requests that no program carries, though the user may think so. Each is given once in a
process, and not where the process shows that its user or framework knows programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .instrumentation import active
from .sdk_logger import logger

if TYPE_CHECKING:
    from . import runtime

_WITHOUT_PROGRAMS = frozenset({"openai", "litellm"})
"""Frameworks whose adapters make no programs by themselves."""
_unsaid = {"outside": True}
"""Warnings not given yet. ``pop`` is atomic, so that threads do not give one twice."""


def note_outside_program(session: runtime.Session) -> None:
    """Warn of a request of no program that was answered by a sojourn server. Never raises."""
    if "outside" not in _unsaid:
        return
    try:
        config = session.config
        if config is None or config.own_program or session.has_programs:
            return
        if not _WITHOUT_PROGRAMS.issuperset(active()):
            return
        if _unsaid.pop("outside", False):
            logger.warning(
                "a request was sent outside a program, so its KV is not kept for the next one; wrap the run in "
                'sojourn.program("name"), or start it with "sojourn run"'
            )
    except Exception:
        session.counters.add("internal_error")
