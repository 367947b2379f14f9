"""Interface of a remote coordinator."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from . import coordinator_messages as m

CALL_TIMEOUT_S = 10.0

Answered = TypeVar("Answered")


class CoordinatorUnavailable(Exception):
    """The coordinator does not answer: it restarts, or is unreachable. It may have processed the message."""


class CoordinatorClient(ABC):
    """A coordinator's methods. All raise ``CoordinatorUnavailable``, and ``MessageEncodingError`` for a
    message that cannot be encoded."""

    @abstractmethod
    async def _call(self, method: str, message: Any, kind: type[m.Message]) -> m.Message:
        """Call a method with a message (``None``: without one); its answer has the type ``kind``. Raises
        ``CoordinatorUnavailable``, ``MessageEncodingError``."""

    async def join(self, join: m.JoinRequest) -> m.CoordinatorResponse:
        return await self._call("join", join, m.CoordinatorResponse)

    async def tell(self, tell: m.ReportRequest) -> m.CoordinatorResponse:
        return await self._call("tell", tell, m.CoordinatorResponse)

    async def listen(self, listen: m.PollRequest) -> m.CoordinatorResponse:
        return await self._call("listen", listen, m.CoordinatorResponse)

    async def register(self, told: m.EngineRegistration) -> m.RegistrationResponse:
        return await self._call("register", told, m.RegistrationResponse)

    async def gone(self, gone: m.EngineStopped) -> m.RegistrationResponse:
        return await self._call("gone", gone, m.RegistrationResponse)

    async def drain(self, drain: m.DrainRequest) -> m.DrainResponse:
        return await self._call("drain", drain, m.DrainResponse)

    async def state(self) -> m.CoordinatorState:
        return await self._call("state", None, m.CoordinatorState)


async def call_with_timeout(
    call: Coroutine[Any, Any, Answered], timeout_s: float = CALL_TIMEOUT_S
) -> Answered:
    """The result of a call. Raises its exceptions, and ``CoordinatorUnavailable`` after ``timeout_s``.

    ``asyncio.wait_for`` before Python 3.12 swallows a cancellation that coincides with the result: the caller
    would not end.
    """
    calling = asyncio.ensure_future(call)
    try:
        await asyncio.wait({calling}, timeout=timeout_s)
        if not calling.done():
            raise CoordinatorUnavailable("it does not answer")
        return calling.result()
    finally:
        if not calling.cancel() and not calling.cancelled():
            calling.exception()  # mark it as retrieved
