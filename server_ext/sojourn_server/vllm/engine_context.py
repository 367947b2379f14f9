"""What the parts of one engine's ``SchedulerAdapter`` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.client_event_decoder import EventHandler
from ..core.program_scheduler import ProgramScheduler
from .kv_cache_groups import KVCacheGroups

if TYPE_CHECKING:
    from .compat import Scheduler


@dataclass(frozen=True, slots=True)
class EngineContext:
    """One engine's scheduler with the ``ProgramScheduler`` beside it, and the adapter's ways to both."""

    scheduler: Scheduler
    program_scheduler: ProgramScheduler
    groups: KVCacheGroups
    clock: Callable[[], float]
    handle: EventHandler
    """Passes an event to the ``ProgramScheduler``, and keeps its actions on KV until ``carry_out``."""
    carry_out: Callable[[float], None]
    guarded: Callable[..., Any]
    """Runs a call; returns ``None`` if it fails, after the failure was counted and logged."""
    report_failure: Callable[[Exception, str], None]
