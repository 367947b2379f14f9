"""Calls from the API server to engines: the interface, and limits on duration, concurrency and repetition.

A call runs on the engine's thread between two steps, so it takes time from generation. An engine therefore
gets few queries at a time, even if many clients poll the server. Equal queries of one of the
``CACHEABLE_OPERATIONS`` share one answer for ``CACHE_TTL_S`` seconds.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from .api_errors import RETRY_AFTER_S, ApiError


class EngineError(Exception):
    """The engine gave no result. The error's text is for the server's log only."""


class EngineUnavailableError(EngineError):
    """The engine is starting, dead, shutting down, busy or too slow; a retry may help."""


class StockEngineError(EngineError):
    """The engine runs without sojourn's scheduler; a retry does not help."""


def is_stock_answer(answer: str) -> bool:
    """Return whether ``answer`` is the fixed error answer of an engine core without sojourn's scheduler."""
    return answer.startswith('{"error"') and json.loads(answer)["error"] == "stock"


class EngineRpc(Protocol):
    """One or more engine cores behind one API server.

    Every core answers every call. Answers are in the order of ``engine_ids``.
    """

    def engine_ids(self) -> Sequence[str]:
        """Return the engines' indices as text: the values of the label ``engine`` in vLLM's metrics."""
        ...

    async def call(self, op: str, payload: str) -> list[str]:
        """Call the operation ``op`` with a JSON ``payload``. Return one JSON text per engine. Raises
        ``EngineError``."""
        ...


PERSIST_OPERATION = "persist"
"""Name of the operation that starts to write a program's KV to disk and returns the state of the write."""
MAX_QUERIES_IN_FLIGHT = 2
"""Maximum number of unanswered queries per operation, except for ``GATEWAY_OPERATIONS``."""
MAX_GATEWAY_CALLS_IN_FLIGHT = 16
"""Maximum number of unanswered calls for each of ``GATEWAY_OPERATIONS``. A gateway that drains an engine
sends many ``persist`` calls at once."""
GATEWAY_OPERATIONS = frozenset({PERSIST_OPERATION})
CACHE_TTL_S = 0.5
"""Seconds for which an answer is reused for equal queries."""
CACHEABLE_OPERATIONS = frozenset({"capabilities", "programs", "load", "stats"})
"""Operations that clients poll. Queries for the decision log or for one program are not cached."""
MAX_CACHED_ANSWERS = 16
"""Maximum number of shared answers. Queries with different parameters have separate answers."""

_Query = tuple[str, str]


class EngineQueryLimiter:
    """Sends queries to one ``EngineRpc``, within the limits of this module."""

    def __init__(self, engine: EngineRpc, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._in_flight: dict[str, set[asyncio.Task[list[str]]]] = {}
        self._shared: dict[_Query, tuple[float, asyncio.Task[list[str]]]] = {}
        """Cacheable query → (time until which its answer is shared, query), oldest first."""

    async def __call__(self, op: str, payload: str, timeout_s: float) -> list[str]:
        """Query the engines, or reuse a recent answer. Return one JSON text per engine.

        Raises ``EngineUnavailableError`` after ``timeout_s`` seconds, any ``EngineError`` of the engine, and
        ``ApiError`` 429 if too many queries are unanswered.
        """
        question = (op, payload)
        until_s, task = self._shared.get(question, (-math.inf, None))
        if task is None or self._clock() >= until_s:
            task = self._ask(question)
        # A timeout does not cancel the task, because the engine has the call and will answer it.
        if not task.done():
            await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise EngineUnavailableError(f"{op}: no answer within {timeout_s:g} s")
        return task.result()

    def _ask(self, question: _Query) -> asyncio.Task[list[str]]:
        op, payload = question
        in_flight = self._in_flight.setdefault(op, set())
        most = MAX_GATEWAY_CALLS_IN_FLIGHT if op in GATEWAY_OPERATIONS else MAX_QUERIES_IN_FLIGHT
        if len(in_flight) >= most:
            what = "too many queries of this kind are waiting for the engine"
            next_step = "repeat it later and poll less often: each query takes time from the engine's steps"
            raise ApiError(429, what, next_step, {"Retry-After": str(RETRY_AFTER_S)})
        task = asyncio.ensure_future(self._engine.call(op, payload))
        in_flight.add(task)
        if op in CACHEABLE_OPERATIONS:
            self._shared[question] = (math.inf, task)
        task.add_done_callback(lambda landed: self._on_answer(question, landed))
        return task

    def _on_answer(self, question: _Query, task: asyncio.Task[list[str]]) -> None:
        self._in_flight[question[0]].discard(task)
        was_shared = self._shared.pop(question, None) is not None
        # Reading the exception keeps asyncio from reporting it as never retrieved.
        if not task.cancelled() and task.exception() is None and was_shared:
            self._shared[question] = (self._clock() + CACHE_TTL_S, task)
        while len(self._shared) > MAX_CACHED_ANSWERS:
            del self._shared[next(iter(self._shared))]
