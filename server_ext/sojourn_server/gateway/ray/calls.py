"""How a coordinator is reached."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from . import messages as m

CALL_TIMEOUT_S = 10.0

Answered = TypeVar("Answered")


class CoordinatorAway(Exception):
    """Nobody answers: it is being started anew, or cannot be reached. What was said may have been heard."""


class CoordinatorCalls(ABC):
    """A coordinator's methods. All raise ``CoordinatorAway``; ``CannotBeWritten`` for what has no bytes."""

    @abstractmethod
    async def _call(self, method: str, message: Any, kind: type[m.Message]) -> m.Message:
        """Call a method by its name, with this message (``None``: without one); its answer is of this kind.
        Raises ``CoordinatorAway``, ``CannotBeWritten``."""

    async def join(self, join: m.Join) -> m.Answer:
        return await self._call("join", join, m.Answer)

    async def tell(self, tell: m.Tell) -> m.Answer:
        return await self._call("tell", tell, m.Answer)

    async def listen(self, listen: m.Listen) -> m.Answer:
        return await self._call("listen", listen, m.Answer)

    async def register(self, told: m.Registration) -> m.Registered:
        return await self._call("register", told, m.Registered)

    async def gone(self, gone: m.EngineGone) -> m.Registered:
        return await self._call("gone", gone, m.Registered)

    async def drain(self, drain: m.Drain) -> m.Drained:
        return await self._call("drain", drain, m.Drained)

    async def state(self) -> m.State:
        return await self._call("state", None, m.State)


async def answered(call: Coroutine[Any, Any, Answered], timeout_s: float = CALL_TIMEOUT_S) -> Answered:
    """What a call comes to. Raises what it raises, and ``CoordinatorAway`` where it takes too long.

    ``asyncio.wait_for`` of Python before 3.12 returns what came in the moment in which it is cancelled, as if
    it had not been: who is to end would go on.
    """
    calling = asyncio.ensure_future(call)
    try:
        await asyncio.wait({calling}, timeout=timeout_s)
        if not calling.done():
            raise CoordinatorAway("it does not answer")
        return calling.result()
    finally:
        if not calling.cancel() and not calling.cancelled():
            calling.exception()  # nobody may have looked at it
