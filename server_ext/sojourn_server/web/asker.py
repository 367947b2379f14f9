"""Between the routes and the engine: how long to wait, how much to ask at once, what to answer from memory.

Every call runs on the engine's own thread, between two steps, so whoever asks
takes time from all who generate. However many clients poll, the engine hears a
question at most every ``FRESH_S``, and few at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from .calls import EngineCalls, EngineUnavailable
from .failure import RETRY_AFTER_S, Failure

EVENTS = "events"
"""The operation that tells; all others ask."""
PERSIST = "persist"
"""Asks too, and gives an order by it."""
MAX_EVENTS_IN_FLIGHT = 64
"""Batches the engine may owe an answer to; or a hung engine would fill our memory."""
MAX_QUESTIONS_IN_FLIGHT = 2
"""The same of each kind of question."""
MAX_PERSISTS_IN_FLIGHT = 16
"""A gateway that empties an engine asks for many programs at once."""
FRESH_S = 0.5
"""An answer this old is given again."""
REPEATABLE = frozenset({"capabilities", "programs", "graphs", "stats"})
"""What is polled. Who walks the decisions or looks one program up asks something new each time."""
MAX_REMEMBERED = 16
"""Answers kept at a time: a list of programs comes in thousands of sizes."""

_Question = tuple[str, str]


class Asker:
    """Calls one ``EngineCalls`` within these limits."""

    def __init__(self, engine: EngineCalls, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._in_flight: dict[str, set[asyncio.Task[list[str]]]] = {}
        self._asked: dict[_Question, asyncio.Task[list[str]]] = {}
        """Repeatable questions that are in flight."""
        self._remembered: dict[_Question, tuple[float, list[str]]] = {}
        """When each came in, and what it was; oldest first."""

    async def __call__(self, op: str, payload: str, timeout_s: float) -> list[str]:
        """One JSON text per engine.

        Raises ``EngineError``, of it ``EngineUnavailable`` after ``timeout_s``
        seconds or with too many events in flight, and ``Failure`` 429 with too
        many questions.
        """
        question = (op, payload)
        remembered = self._remembered.get(question)
        if remembered is not None and self._clock() - remembered[0] < FRESH_S:
            return remembered[1]
        # Not cancelled when time is up: the engine has the call by then and will answer it, so it
        # keeps its place among those in flight until it does.
        task = self._asked.get(question) or self._ask(question)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise EngineUnavailable(f"{op}: no answer within {timeout_s:g} s")
        return task.result()

    def _ask(self, question: _Question) -> asyncio.Task[list[str]]:
        op, payload = question
        in_flight = self._in_flight.setdefault(op, set())
        if op == EVENTS:
            if len(in_flight) >= MAX_EVENTS_IN_FLIGHT:
                raise EngineUnavailable(f"{op}: {len(in_flight)} calls are waiting for the engine")
        elif len(in_flight) >= (MAX_PERSISTS_IN_FLIGHT if op == PERSIST else MAX_QUESTIONS_IN_FLIGHT):
            raise _too_many()
        task = asyncio.ensure_future(self._engine.call(op, payload))
        in_flight.add(task)
        if op in REPEATABLE:
            self._asked[question] = task
        task.add_done_callback(lambda landed: self._landed(question, landed))
        return task

    def _landed(self, question: _Question, task: asyncio.Task[list[str]]) -> None:
        self._in_flight[question[0]].discard(task)
        repeatable = self._asked.pop(question, None) is not None
        # The exception is read, so that a failure nobody waits for is not reported as forgotten.
        if task.cancelled() or task.exception() is not None or not repeatable:
            return
        self._remembered.pop(question, None)
        self._remembered[question] = (self._clock(), task.result())
        if len(self._remembered) > MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]


def _too_many() -> Failure:
    return Failure(
        429,
        "as many such questions as may are waiting for the engine",
        "ask again later, or less often: each takes time from the engine's steps",
        {"Retry-After": str(RETRY_AFTER_S)},
    )
