"""Gates in the client that decide when the requests of a program may enter an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

from sojourn_server.replay.completions_client import Completion, CompletionsClient
from sojourn_server.replay.program_announcer import NullAnnouncer
from sojourn_server.routing.routing_events import (
    AnyRoutingEvent,
    ProgramEnded,
    ReplicaRegistered,
    RequestFinished,
    RequestReceived,
    Tick,
)
from sojourn_server.simulator.thunderagent_router import ThunderAgentRouter

_PROGRAM: ContextVar[str] = ContextVar("program")
"""Program of the request that the current task is about to send."""


class Gate(Protocol):
    """Holds requests back."""

    async def enter(self, program_id: str, prompt_tokens: int) -> None:
        """Return when the program's next request may be sent."""

    def turn_ended(self, program_id: str, context_tokens: int) -> None:
        """The engine has answered. ``context_tokens``: prompt and output."""

    def program_ended(self, program_id: str) -> None: ...


class SessionGate:
    """A program holds one of ``slots`` slots from its first request to its end, also while its tools run."""

    def __init__(self, slots: int) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._holders: set[str] = set()

    async def enter(self, program_id: str, prompt_tokens: int) -> None:
        if program_id not in self._holders:
            await self._slots.acquire()
            self._holders.add(program_id)

    def turn_ended(self, program_id: str, context_tokens: int) -> None:
        pass

    def program_ended(self, program_id: str) -> None:
        if program_id in self._holders:
            self._holders.remove(program_id)
            self._slots.release()


class ThunderAgentGate:
    """ThunderAgent's router before one engine with a device memory of ``capacity_tokens``."""

    def __init__(self, capacity_tokens: int) -> None:
        self._router = ThunderAgentRouter()
        self._last: dict[str, RequestReceived] = {}
        """Program → its last request."""
        self._waiting: dict[str, asyncio.Event] = {}
        self._take(ReplicaRegistered("engine", "1", capacity_tokens))

    async def enter(self, program_id: str, prompt_tokens: int) -> None:
        entered = asyncio.Event()
        request_id = f"{program_id}#{time.monotonic()}"
        self._waiting[request_id] = entered
        self._last[program_id] = RequestReceived(request_id, "", prompt_tokens, program_id=program_id)
        self._take(self._last[program_id])
        while not entered.is_set():
            # The router acts at its own interval, when it is called after that.
            try:
                await asyncio.wait_for(entered.wait(), self._router.tick_s / 5)
            except TimeoutError:
                self._take(Tick())

    def turn_ended(self, program_id: str, context_tokens: int) -> None:
        last = self._last[program_id]
        self._take(RequestFinished(last.request_id, context_tokens - last.context_tokens))

    def program_ended(self, program_id: str) -> None:
        self._last.pop(program_id, None)
        self._take(ProgramEnded(program_id, ""))

    def _take(self, event: AnyRoutingEvent) -> None:
        now = time.monotonic()
        for sent in (*self._router.take(event, now), *self._router.take(Tick(), now)):
            self._waiting.pop(sent.request_id).set()


class GatedAnnouncer(NullAnnouncer):
    """Reports nothing to the server. Tells the gate which programs run."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def program(self, name: str, program_id: str, parent_id: str | None) -> AbstractAsyncContextManager[Any]:
        return self._run(program_id)

    @asynccontextmanager
    async def _run(self, program_id: str) -> AsyncIterator[None]:
        _PROGRAM.set(program_id)
        try:
            yield
        finally:
            self._gate.program_ended(program_id)


class GatedClient(CompletionsClient):
    """Client whose requests wait at a gate. The wait counts as time to the first token."""

    def __init__(self, url: str, gate: Gate) -> None:
        super().__init__(url)
        self._gate = gate

    async def complete(self, model: str, prompt: list[int], max_tokens: int, **more: Any) -> Completion:
        program_id = _PROGRAM.get(None)
        if program_id is None:
            return await super().complete(model, prompt, max_tokens, **more)
        began_s = time.monotonic()
        await self._gate.enter(program_id, len(prompt))
        waited_s = time.monotonic() - began_s
        answer = await super().complete(model, prompt, max_tokens, **more)
        self._gate.turn_ended(program_id, answer.prompt_tokens + answer.output_tokens)
        return replace(answer, ttft_s=answer.ttft_s + waited_s, latency_s=answer.latency_s + waited_s)
