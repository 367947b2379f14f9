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
from sojourn_server.simulator.request_router import RequestRouterView, RoutableRequest, RoutedProgramView
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
        self._capacity_tokens = capacity_tokens
        self._programs: dict[str, RoutedProgramView] = {}
        self._waiting: dict[str, tuple[RoutableRequest, asyncio.Event]] = {}

    async def enter(self, program_id: str, prompt_tokens: int) -> None:
        now, entered = time.monotonic(), asyncio.Event()
        known = self._programs.get(program_id) or RoutedProgramView(program_id, "waiting", 0, now, 0, now)
        turn = known.turns
        request_id = f"{program_id}#{turn}"
        self._waiting[request_id] = RoutableRequest(request_id, program_id, prompt_tokens, now, turn), entered
        self._programs[program_id] = known._replace(state="waiting", since_s=now)
        self._select()
        while not entered.is_set():
            # The router acts at its own interval, when it is called after that.
            try:
                await asyncio.wait_for(entered.wait(), self._router.tick_s / 5)
            except TimeoutError:
                self._select()

    def turn_ended(self, program_id: str, context_tokens: int) -> None:
        known = self._programs[program_id]
        self._programs[program_id] = known._replace(
            state="acting", context_tokens=context_tokens, since_s=time.monotonic(), turns=known.turns + 1
        )
        self._select()

    def program_ended(self, program_id: str) -> None:
        self._programs.pop(program_id, None)
        mine = [key for key, (request, _) in self._waiting.items() if request.program_id == program_id]
        for request_id in mine:
            del self._waiting[request_id]
        self._select()

    def _select(self) -> None:
        now = time.monotonic()
        view = RequestRouterView(
            waiting=tuple(request for request, _ in self._waiting.values()),
            programs=tuple(self._programs.values()),
            capacity_tokens=self._capacity_tokens,
        )
        for request_id in self._router.select_requests(view, now):
            request, entered = self._waiting.pop(request_id)
            self._programs[request.program_id] = self._programs[request.program_id]._replace(
                state="reasoning", since_s=now
            )
            entered.set()


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
