"""One periodic job and when it is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .clock import Clock


@dataclass
class Job:
    """Calls ``action`` every ``period_s`` seconds, the first time at ``due_s``."""

    name: str
    action: Callable[[], None]
    period_s: float
    due_s: float
    runs: int = 0
    missed: int = 0
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.period_s <= 0:
            raise ValueError(f"{self.name}: a period of {self.period_s} s never ends")

    def run(self, clock: Clock) -> None:
        """Run once and plan the next time. An error is kept; it stops nobody else."""
        try:
            self.action()
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        self.runs += 1
        self.plan(clock.now())

    def plan(self, now_s: float) -> None:
        """Set the next due time, on the grid of the first one; skipped times count as missed."""
        self.due_s = now_s + self.period_s
        while self.due_s <= now_s:
            self.due_s += self.period_s
            self.missed += 1
