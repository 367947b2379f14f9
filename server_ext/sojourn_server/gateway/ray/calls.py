"""How a coordinator is reached."""

from __future__ import annotations

from typing import Protocol

from .messages import (
    Answer,
    Drain,
    Drained,
    EngineGone,
    Join,
    Listen,
    Registered,
    Registration,
    State,
    Tell,
)


class CoordinatorAway(Exception):
    """Nobody answers: it is being started anew, or cannot be reached. What was said may have been heard."""


class CoordinatorCalls(Protocol):
    """A coordinator's methods. All raise ``CoordinatorAway``."""

    async def join(self, join: Join) -> Answer: ...

    async def tell(self, tell: Tell) -> Answer: ...

    async def listen(self, listen: Listen) -> Answer: ...

    async def register(self, told: Registration) -> Registered: ...

    async def gone(self, gone: EngineGone) -> Registered: ...

    async def drain(self, drain: Drain) -> Drained: ...

    async def state(self) -> State: ...
